"""The main program of tools/importance: dataset, slow origin, five trainings, comparison.

The first training is a plain shuffle that reads the origin itself. The others read through a mount
whose RAM takes a fifth of the dataset, and its SSD the least that a mount may have; hintsd is told
their orders, and the scores of those that have some.

INVARIANT: mounts, daemon, loop device, read limit and temporary files are gone at the end, also
after a failure, Ctrl-C or SIGTERM.
"""

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console

from fusecache.config.settings import RAM_BYTES_MIN, SSD_BYTES_MIN
from tools.demo_lib import dataset
from tools.demo_lib.origin import Origin, slow_origin
from tools.demo_lib.report import sayer
from tools.fusecache_command import FusecacheMount
from tools.hintsd_command import HintsdCommand
from tools.importance_lib import report, training
from tools.interrupts import end_on_signals, failing_in_a_line
from tools.slow_origin import forget_files

IMAGES_MOST = 1_400  # the other digits are for judging
JUDGED_MOST = dataset.DIGITS - IMAGES_MOST
RAM_SHARE = 1 / 5  # of the dataset

Say = Callable[[str], None]


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--images", default=IMAGES_MOST, type=click.IntRange(training.BATCH, IMAGES_MOST))
@click.option("--epochs", default=8, type=click.IntRange(2, 100))
@click.option("--judged", default=JUDGED_MOST, type=click.IntRange(1, JUDGED_MOST))
@click.option("--seed", default=0)
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/importance"))
@click.option("--work-dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(
    images: int, epochs: int, judged: int, seed: int, out: Path, work_dir: Path | None
) -> None:
    console = Console(width=None if sys.stdout.isatty() else report.WIDTH)
    end_on_signals()
    started = time.monotonic()
    say = sayer(console)
    with failing_in_a_line(console):
        out.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as cleanup:
            work = Path(tempfile.mkdtemp(prefix="fusecache-importance-", dir=work_dir))
            cleanup.callback(shutil.rmtree, work, ignore_errors=True)
            dataset.make(work / "held-out", judged, seed, first=IMAGES_MOST)
            origin = cleanup.enter_context(slow_origin(work, images, seed, say))
            say(f"origin: {origin.kind}")
            comparison = _Comparison(work, origin, epochs, seed, say)
            comparison.run()
        console.print()
        report.print_table(console, comparison.trainings)
        with (out / "table.txt").open("w") as table:
            report.print_table(Console(file=table, width=report.WIDTH), comparison.trainings)
        about = f"{comparison.about}; origin: {origin.kind}"
        report.save_json(out / "importance.json", comparison.trainings, about)
        report.save_plot(out / "importance.png", comparison.trainings, about)
        say(f"saved {out / 'importance.png'}, table.txt, importance.json")
    seconds = time.monotonic() - started
    console.print(f"[bold green]DONE[/]: {len(comparison.trainings)} trainings ({seconds:.0f} s)")


class _Comparison:
    """The trainings, and what they found."""

    def __init__(self, work: Path, origin: Origin, epochs: int, seed: int, say: Say) -> None:
        self._work, self._origin, self._say = work, origin, say
        self._epochs, self._seed = epochs, seed
        self._judged = training.held_out(work / "held-out")
        self._files = sorted(path for path in origin.behind.rglob("*") if path.is_file())
        size_bytes = sum(path.stat().st_size for path in self._files)
        ram_bytes = max(RAM_BYTES_MIN, int(size_bytes * RAM_SHARE))
        self._budget = ("--ram", str(ram_bytes), "--ssd", str(SSD_BYTES_MIN))
        self.about = (
            f"{len(self._files)} JPEG files, {size_bytes / 1e6:.0f} MB; a mount has RAM for "
            f"{ram_bytes / size_bytes:.0%} of that, SSD for {SSD_BYTES_MIN / size_bytes:.0%}"
        )
        self.trainings: list[report.Training] = []

    def run(self) -> None:
        uniform, *_ = training.ARMS
        self._train("direct", uniform, self._origin.directory, None)
        with HintsdCommand(self._work) as daemon:
            for arm in training.ARMS:
                mount = FusecacheMount(
                    self._origin.directory,
                    self._work / f"mnt-{arm.name}",
                    self._work / f"cache-{arm.name}",
                    (*self._budget, "--hintsd", str(daemon.socket)),
                )
                with mount:
                    self._train(arm.name, arm, mount.mountpoint, mount)

    def _train(
        self, reader: str, arm: training.Arm, root: Path, mount: FusecacheMount | None
    ) -> None:
        rows: list[report.Row] = []

        def count() -> tuple[int | None, int | None]:
            """Files and bytes that the origin has given."""
            device = self._origin.device
            if mount is None:
                return None, None if device is None else device.bytes_read()
            told = mount.status()["origin"]
            return int(told["files"]), int(told["bytes"])

        before = count()

        def after_epoch(epoch: training.Epoch) -> None:
            nonlocal before
            now = count()
            files, size_bytes = (
                None if to is None or since is None else to - since
                for to, since in zip(now, before, strict=True)
            )
            before = now  # what is fetched between two epochs is for the next one
            row = report.Row(reader, len(rows) + 1, epoch, files, size_bytes)
            rows.append(row)
            hits = "" if row.hits is None else f", hits {row.hits:.2f}"
            self._say(
                f"{reader}, epoch {row.epoch}: {epoch.samples} images, {epoch.seconds:.1f} s"
                f"{hits}, {epoch.accuracy:.1%} right"
            )

        training.train(
            root,
            arm,
            self._judged,
            epochs=self._epochs,
            seed=self._seed,
            hints=mount is not None,
            before_epoch=lambda: forget_files(self._files),
            after_epoch=after_epoch,
        )
        self.trainings.append(report.Training(reader, arm.what, rows))


if __name__ == "__main__":
    main()
