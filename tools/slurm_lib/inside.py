"""What tools/slurm runs in namespaces of its own, as root. A line for each thing that holds."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

from tools.services_lib.inside import GUEST, PROGRAMS, eventually, fusecache, holds, run

ADDRESS = "10.99.0.1"  # of this network namespace; Slurm takes none of 127.0.0.0/8
ROOT = Path(__file__).resolve().parents[2]
TRAIN = Path(__file__).with_name("train.py")
FILES, FILE_BYTES = 40, 20_000
JOBS = Path("/run/fusecache-jobs")
MUNGE = "/run/munge.socket"
SLURM = """\
ClusterName=fusecache
SlurmctldHost={host}({address})
AuthType=auth/munge
AuthInfo=socket={munge}
SlurmUser=root
SlurmdUser=root
StateSaveLocation={work}/state
SlurmdSpoolDir={work}/spool
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={work}/slurmctld.log
SlurmdLogFile={work}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
JobContainerType=job_container/tmpfs
PrologFlags=Alloc,Contain
Prolog={work}/slurm/prolog
Epilog={work}/slurm/epilog
SchedulerParameters=nohold_on_prolog_fail
SelectType=select/cons_tres
NodeName=node NodeHostname={host} NodeAddr={address} CPUs=2
PartitionName=all Nodes=node Default=YES MaxTime=INFINITE State=UP
"""
SETTINGS = """\
NODE_MOUNTS="{work}/node"
JOB_SOURCE="{work}/source"
JOB_OPTIONS="--ssd 64M --ram 16M --keep-free 0"
JOB_MOUNTS={jobs}
JOB_CACHES={work}/caches
FUSECACHE={programs}/fusecache
"""


class Cluster:
    """One controller, one node."""

    def __init__(self, work: Path) -> None:
        self.work = work
        for name in ("source/a", "node", "caches", "state", "spool", "containers"):
            (work / name).mkdir(parents=True)
        for number in range(FILES):
            (work / f"source/a/{number:02}.jpg").write_bytes(bytes([number]) * FILE_BYTES)
        (work / "out").mkdir()
        os.chown(work / "out", GUEST, GUEST)
        shutil.copytree(ROOT / "deploy/slurm", work / "slurm")
        told = {"work": work, "jobs": JOBS, "munge": MUNGE, "programs": PROGRAMS}
        told |= {"host": socket.gethostname(), "address": ADDRESS}
        (work / "slurm/fusecache.conf").write_text(SETTINGS.format(**told))
        (work / "slurm.conf").write_text(SLURM.format(**told))
        (work / "job_container.conf").write_text(f"AutoBasePath=true\nBasePath={work}/containers\n")
        os.environ["SLURM_CONF"] = str(work / "slurm.conf")
        (work / "key").write_bytes(os.urandom(1024))
        (work / "key").chmod(0o600)

    def start(self) -> None:
        files = {"key-file": self.work / "key", "socket": MUNGE, "pid-file": "/run/munged.pid"}
        files |= {"seed-file": "/run/munged.seed", "log-file": "/run/munged.log"}
        run("munged", *[f"--{name}={path}" for name, path in files.items()])
        self.mount_of_node()
        run("slurmctld")
        run("slurmd", "-N", "node")
        eventually(lambda: self.node() == "idle")

    def mount_of_node(self) -> None:
        flags: list[str | Path] = [
            "--cache-dir",
            self.work / "caches/node",
            "--ssd",
            "16M",
            "--ram",
            "16M",
        ]
        flags += ["--keep-free", "0", "--allow-other"]
        fusecache("mount", self.work / "source", self.work / "node", *flags)

    def node(self) -> str:
        return run("sinfo", "--noheader", "--format=%T").strip()

    def submit(self, script: str) -> int:
        """A batch job of a guest's; `$mount` is its mount."""
        text = f"#!/bin/sh\nmount={JOBS}/$SLURM_JOB_ID\n{script}\n"
        user = ["setpriv", f"--reuid={GUEST}", f"--regid={GUEST}", "--clear-groups"]
        out = f"--output={self.work}/out/%j"
        return int(run(*user, "sbatch", "--parsable", out, "--chdir=/", input=text))

    def output(self, job: int) -> str:
        path = self.work / f"out/{job}"
        return path.read_text() if path.exists() else ""

    def state(self, job: int) -> str:
        said = run("scontrol", "show", "job", str(job))
        found = re.search(r"JobState=(\w+)", said)
        assert found, said
        return found[1]

    def run_until(self, job: int, wanted: str) -> None:
        """Until its output has the line."""
        eventually(lambda: wanted in self.output(job).splitlines())

    def left(self, job: int) -> list[str]:
        """What there is of its mount."""
        path = JOBS / str(job)
        found = [line for line in Path("/proc/self/mountinfo").read_text().splitlines()
                 if f" {path} " in line]  # fmt: skip
        found += re.findall(rf"^fusecache: .* {path}\s*$", run("ps", "-Ao", "args="), re.MULTILINE)
        found += map(str, (self.work / "caches").glob("fusecache-*"))
        found += map(str, JOBS.glob("*"))
        return found

    def ends_clean(self, job: int, state: str) -> None:
        eventually(lambda: self.state(job) == state and self.node() == "idle")
        assert self.left(job) == []
        of_mounts = [
            *Path("/run/fusecache").glob("*:*"),
            *Path("/run/fusecache-public").glob("*:*"),
        ]
        assert len(of_mounts) == 2, of_mounts  # the node's

    def processes(self, job: int) -> dict[str, int]:
        said = run("ps", "-Ao", "pid=,args=")
        found = re.findall(rf"(\d+) fusecache: (\w+) {JOBS / str(job)}\s*$", said, re.MULTILINE)
        return {role: int(pid) for pid, role in found}


# ---- the tests, in this order --------------------------------------------------------------------


def trains(cluster: Cluster) -> None:
    (cluster.work / "caches/fusecache-999999").mkdir()  # of a job that a crash ended
    script = f'touch /tmp/mine; "{PROGRAMS}/python" "{TRAIN}" "$mount"; ls /tmp'
    job = cluster.submit(script)
    cluster.ends_clean(job, "COMPLETED")
    hint, *read, tmp = cluster.output(job).splitlines()
    assert (hint, read) == ("hinted", [str(FILES * FILE_BYTES)] * 2), cluster.output(job)
    holds(
        "a guest's batch job trained, hinted, through its own mount; nothing of the mount is left"
    )
    assert tmp == "mine"
    assert not Path("/tmp/mine").exists()
    holds("its /tmp was private (job_container/tmpfs)")


def is_killed(cluster: Cluster) -> None:
    hold = 'cd "$mount/a"; exec 3<00.jpg; echo begun; sleep 600'
    for kills in ((), ("keeper",), ("keeper", "server")):
        job = cluster.submit(hold)
        cluster.run_until(job, "begun")
        found = cluster.processes(job)
        assert set(found) == {"keeper", "server"}, found
        for role in kills:
            os.kill(found[role], signal.SIGKILL)
        run("scancel", "--signal=KILL", "--full", str(job))
        eventually(lambda job=job: cluster.state(job) in ("FAILED", "CANCELLED"))  # type: ignore[misc]
        cluster.ends_clean(job, cluster.state(job))
        before = f"kill -9 of {' and '.join(kills)}, then " if kills else ""
        holds(f"{before}scancel -s KILL with a file open: nothing is left")


def epilog_again(cluster: Cluster) -> None:
    environment = {**os.environ, "SLURM_JOB_ID": "4711"}
    for _ in range(2):
        assert run(cluster.work / "slurm/epilog", env=environment) == ""
    holds("the epilog, without a mount, and again: nothing to say")


def node_without_mount(cluster: Cluster) -> None:
    fusecache("umount", cluster.work / "node")
    job = cluster.submit("echo begun")
    eventually(lambda: cluster.node() == "drained" and cluster.state(job) == "PENDING")
    assert "Prolog error" in run("scontrol", "show", "node", "node")
    holds("the node's mount does not answer: Slurm drains the node, the job waits")
    cluster.mount_of_node()
    run("scontrol", "update", "NodeName=node", "State=RESUME")
    run("scontrol", "update", f"JobId={job}", "StartTime=now")  # by itself: after two minutes
    cluster.run_until(job, "begun")
    cluster.ends_clean(job, "COMPLETED")
    holds("mounted again, and the node resumed: the job ran")


def main() -> int:
    cluster = Cluster(Path(sys.argv[1]))
    try:
        cluster.start()
        for test in (trains, is_killed, epilog_again, node_without_mount):
            test(cluster)
    except (AssertionError, OSError, subprocess.SubprocessError, ValueError):
        traceback.print_exc(file=sys.stdout)
        for name in ("slurmctld", "slurmd"):
            print(run("tail", "-n", "15", cluster.work / f"{name}.log", code=None))
        return 1
    print("slurm: all holds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
