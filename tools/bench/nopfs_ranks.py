"""NoPFS on the hosts of a cluster: a rank on each, which tell each other by MPI over the links.

`mpirun` starts a daemon on each host (in its network namespace, with a host name of its own), and
that the rank: this module, with the path of a JSON file: built, seed, epochs, batch; roots and
configs (see nopfs_reader.py), one a rank. A rank prints a line of JSON each epoch.

INVARIANT: all ranks begin an epoch together, when the last one has ended the epoch before. Setting
up, in which it already fetches, belongs to the first epoch.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.bench.nopfs_reader import configuration, loader_of, packages
from tools.cluster_lib.cluster import Cluster
from tools.cluster_lib.dataset import Dataset

BATCH, STAGING_BYTES = 32, 16 << 20
_ROOT = Path(__file__).resolve().parents[2]
_AGENT = """#!/bin/sh
# mpirun's: HOST COMMAND
host=$((${{1##*.}} - 1)); shift
exec nsenter --net={namespaces}$host unshare --uts sh -c "hostname rank$host; $*"
"""
_MCA = {
    "plm_rsh_no_tree_spawn": "1",
    "pml": "ob1",
    "btl": "tcp,self",
    "btl_tcp_if_include": "eth0",
    "oob_tcp_if_include": "eth0",
    "mpi_yield_when_idle": "1",
}


@contextmanager
def ranks_of(
    cluster: Cluster, dataset: Dataset, built: Path, *, ram: int, ssd: int, epochs: int, seed: int
) -> Iterator[Iterator[float]]:
    """Seconds of each epoch, when it has ended. `ram`, `ssd`: bytes of each rank.
    RuntimeError: a rank failed, or they did not read each file once.
    """
    work = cluster.work / "nopfs"
    work.mkdir()
    told: dict[str, Any] = {"built": str(built), "seed": seed, "epochs": epochs, "batch": BATCH}
    told |= {"roots": [], "configs": []}
    for host in cluster.hosts:
        storage = host.directory / "nopfs"
        storage.mkdir()
        config = work / f"{host.number}.cfg"
        config.write_text(configuration(STAGING_BYTES, ram, ssd, storage, ranks=len(cluster.hosts)))
        told["roots"].append(str(host.origin))
        told["configs"].append(str(config))
    (work / "told").write_text(json.dumps(told))
    with subprocess.Popen(
        _mpirun(cluster, work),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=(work / "log").open("w"),
        text=True,
        cwd=_ROOT,
    ) as process:
        try:
            yield _epochs(process, dataset, len(cluster.hosts), work / "log")
        finally:
            process.kill()


def _mpirun(cluster: Cluster, work: Path) -> list[str]:
    first, agent = cluster.hosts[0], work / "agent"
    agent.write_text(_AGENT.format(namespaces=first.enter[1].removeprefix("--net=")[:-1]))
    agent.chmod(0o700)
    command = ["mpirun", "--allow-run-as-root", "--bind-to", "none"]
    for name, value in (
        _MCA | {"plm_rsh_agent": str(agent), "orte_tmpdir_base": str(work)}
    ).items():
        command += ["--mca", name, value]
    command += ["--host", ",".join(f"{host.address}:1" for host in cluster.hosts)]
    command += [sys.executable, "-m", "tools.bench.nopfs_ranks", str(work / "told")]
    named = 'hostname rank0; exec "$@"'
    return [*first.enter, "unshare", "--uts", "sh", "-c", named, "sh", *command]


def _epochs(
    process: "subprocess.Popen[str]", dataset: Dataset, ranks: int, log: Path
) -> Iterator[float]:
    assert process.stdout is not None
    text, decoder = "", json.JSONDecoder()
    while True:
        done: list[dict[str, Any]] = []
        while len(done) < ranks:  # mpirun runs their lines into each other
            if not (text := text.lstrip()):
                text = process.stdout.readline()
                if not text:
                    raise RuntimeError(f"NoPFS: {log.read_text()[-400:]}")
                continue
            of_rank, end = decoder.raw_decode(text)
            done.append(of_rank)
            text = text[end:]
        read = sum(rank["samples"] for rank in done), sum(rank["bytes"] for rank in done)
        if read != (len(dataset.names), dataset.bytes):
            raise RuntimeError(f"NoPFS has read {read} of {len(dataset.names)}, {dataset.bytes}")
        yield max(rank["seconds"] for rank in done)


def _barrier() -> None:
    """Of all ranks."""
    mpi = ctypes.CDLL("libmpi.so.40")
    world = ctypes.addressof(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world"))
    mpi.MPI_Barrier(ctypes.c_void_p(world))


def _meet(directory: Path, rank: int, ranks: int) -> None:
    """As a barrier, where MPI has not begun: it does so as the first epoch's loader is made."""
    (directory / f"rank{rank}").touch()
    while not all((directory / f"rank{other}").exists() for other in range(ranks)):
        time.sleep(0.01)


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    work |= {"root": work["roots"][rank], "config": work["configs"][rank]}
    hdmlp, its_torch = packages(Path(work["built"]))
    _meet(Path(sys.argv[1]).parent, rank, len(work["roots"]))
    loader = None
    for _ in range(work["epochs"]):
        begin = time.perf_counter()
        if loader is None:
            loader = loader_of(work, hdmlp, its_torch)
        samples = size_bytes = 0
        for batch in loader:
            samples += len(batch)
            size_bytes += sum(size for size, _ in batch)
        _barrier()
        done = {"seconds": time.perf_counter() - begin, "samples": samples, "bytes": size_bytes}
        print(json.dumps(done), flush=True)
    _barrier()  # others may still ask for what this one has
    os._exit(0)  # its serving thread never ends


if __name__ == "__main__":
    main()
