"""The demo's main program: dataset, slow origin, three trainings, comparison, PASS or FAIL.

All trainings run the same three epochs: directly from the origin, through a mount, and through a
mount that is told the order by one line, `hintsd.attach(loader)`. The dataset is larger than
memory: of the origin's pages none are left between epochs, a mount may use RAM for an eighth of the
dataset, and SSD for half of it. The origin takes its time for each request, and has a limit.

INVARIANT: mounts, daemon, loop device, read limit and temporary files are gone at the end, also
after a failure, Ctrl-C or SIGTERM.
"""

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from fusecache.config.settings import RAM_BYTES_MIN, SSD_BYTES_MIN
from tools.demo_lib import report, training
from tools.demo_lib.origin import Origin, slow_origin
from tools.fusecache_command import FusecacheMount, default_executable
from tools.hintsd_command import HintsdCommand
from tools.interrupts import end_on_signals, failing_in_a_line
from tools.slow_origin import forget_files

EPOCHS = 3
RAM_SHARE, SSD_SHARE = 1 / 8, 1 / 2  # of the dataset: what a mount may hold


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Your images, a folder for each class, read where they lie at their own speed.",
)
@click.option("--images", default=2000, show_default=True, help="Train on so many images.")
@click.option("--seed", default=0, show_default=True, help="Of dataset, network and order.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("out/demo"),
    show_default=True,
    help="Table, plot and JSON go here.",
)
@click.option(
    "--work-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Temporary files (dataset, cache) go below this directory; default: the system's.",
)
@click.option(
    "--fusecache",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=default_executable,
    help="The command to use; default: the one installed beside this Python.",
)
def main(
    data: Path | None, images: int, seed: int, out: Path, work_dir: Path | None, fusecache: Path
) -> None:
    console = Console(width=None if sys.stdout.isatty() else report.WIDTH)
    end_on_signals()
    started = time.monotonic()
    with failing_in_a_line(console):
        out.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as cleanup:
            work = Path(tempfile.mkdtemp(prefix="fusecache-demo-", dir=work_dir))
            cleanup.callback(shutil.rmtree, work, ignore_errors=True)
            say = report.sayer(console)
            if data is not None:
                origin = Origin(data.resolve(), data.resolve(), f"{data}, at its own speed")
            else:
                origin = cleanup.enter_context(slow_origin(work, images, seed, say))
            say(f"origin: {origin.kind}")
            demo = _Demo(work, origin, images, seed, fusecache, say)
            demo.run()
            checks = _compare(demo, is_slow=data is None)
            _show(console, out, demo, checks)
    seconds = time.monotonic() - started
    failed = [check.claim for check in checks if not check.holds]
    if failed:
        console.print(f"[bold red]FAIL[/]: not so: {'; '.join(failed)} ({seconds:.0f} s)")
        sys.exit(1)
    console.print(f"[bold green]PASS[/]: {len(checks)} of {len(checks)} checks ({seconds:.0f} s)")


@dataclass
class _Demo:
    """The three readers, and what they found."""

    work: Path
    origin: Origin
    images: int
    seed: int
    fusecache: Path
    say: Callable[[str], None]
    rows: list[report.Row] = field(default_factory=list)
    trained: dict[str, list[training.Epoch]] = field(default_factory=dict)
    statuses: dict[str, dict[str, Any]] = field(default_factory=dict)
    about: str = ""

    def run(self) -> None:
        self._files = training.files(self.origin.behind, self.images)
        size_bytes = sum(file.stat().st_size for file in self._files)
        self.about = f"{len(self._files)} JPEG files, {size_bytes / 1e6:.0f} MB"
        self._train("direct", self.origin.directory)
        ram = max(RAM_BYTES_MIN, int(size_bytes * RAM_SHARE))
        ssd = max(SSD_BYTES_MIN, int(size_bytes * SSD_SHARE))
        budget = ("--ram", str(ram), "--ssd", str(ssd))
        self.about += f"; a mount has {ram / 1e6:.0f} MB of RAM, {ssd / 1e6:.0f} MB of SSD"
        self._mounted("mount", *budget, "--hintsd", "none")
        with HintsdCommand(self.work) as daemon:
            self._mounted("hinted", *budget, "--hintsd", str(daemon.socket))

    def _mounted(self, reader: str, *options: str) -> None:
        mount = FusecacheMount(
            self.origin.directory,
            self.work / f"mnt-{reader}",
            self.work / f"cache-{reader}",
            options,
            executable=self.fusecache,
        )
        with mount:
            self.say(f"fusecache mount {' '.join(options)}")
            self._train(reader, mount.mountpoint, mount)
            self.statuses[reader] = mount.status()

    def _train(self, reader: str, root: Path, mount: FusecacheMount | None = None) -> None:
        fetched: int | None = None

        def count() -> int | None:
            if self.origin.device is not None:
                return self.origin.device.bytes_read()
            return None if mount is None else int(mount.status()["origin"]["bytes"])

        def before_epoch(number: int) -> None:
            nonlocal fetched
            forget_files(self._files)
            fetched = count()

        def after_epoch(number: int, epoch: training.Epoch) -> None:
            now = count()
            more = None if now is None or fetched is None else now - fetched
            self.rows.append(report.Row(reader, number + 1, epoch, more))
            busy = report.percent(epoch.busy)
            self.say(
                f"{reader}, epoch {number + 1}: {epoch.seconds:.1f} s, accelerator busy {busy}"
            )

        self.trained[reader] = training.train(
            root,
            most=self.images,
            epochs=EPOCHS,
            seed=self.seed,
            hints=reader == "hinted",
            before_epoch=before_epoch,
            after_epoch=after_epoch,
        )


def _compare(demo: _Demo, is_slow: bool) -> list[report.Check]:
    direct = demo.trained["direct"]
    mismatches = sum(int(s["integrity"]["mismatches"]) for s in demo.statuses.values())
    delivered = {tuple(e.delivered for e in epochs) for epochs in demo.trained.values()}
    courses = {tuple((e.losses, e.accuracy) for e in epochs) for epochs in demo.trained.values()}
    accuracy = " → ".join(report.percent(epoch.accuracy) for epoch in direct)
    checks = [
        report.Check(
            "every reader got the same bytes in the same order",
            len(delivered) == 1,
            f"{direct[0].samples} images, {len(direct)} epochs, {direct[0].delivered}",
        ),
        report.Check(
            "every network learned the same, to the last bit",
            len(courses) == 1,
            f"accuracy {accuracy}",
        ),
        report.Check(
            "no cached block failed its checksum", mismatches == 0, f"{mismatches} mismatches"
        ),
    ]
    if is_slow:
        hinted = report.busy(demo.rows, "hinted")
        for other in ("direct", "mount"):
            ratio = hinted / report.busy(demo.rows, other)
            claim = f"hinted keeps the accelerator busier than {other}"
            checks.append(report.Check(claim, ratio > 1, f"{ratio:.2f} times"))
    return checks


def _show(console: Console, out: Path, demo: _Demo, checks: list[report.Check]) -> None:
    console.print()
    report.print_table(console, demo.rows, checks)
    with (out / "table.txt").open("w") as table:
        report.print_table(Console(file=table, width=report.WIDTH), demo.rows, checks)
    about = f"{demo.about}; origin: {demo.origin.kind}"
    notes: dict[str, object] = {"dataset": about, "status": demo.statuses}
    report.save_json(out / "demo.json", demo.rows, checks, notes)
    report.save_plot(out / "demo.png", demo.rows, about)
    demo.say(f"saved {out / 'demo.png'}, table.txt, demo.json")


if __name__ == "__main__":
    main()
