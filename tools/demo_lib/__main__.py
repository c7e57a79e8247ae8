"""The demo's main program: dataset, slow origin, three trainings, comparison, PASS or FAIL.

All trainings run the same three epochs: directly from the origin, through a mount, and through a
mount that is told the order by one line, `hintsd.attach(loader)`, and lays out its SSD by it (the
log, docs/LOG.md). No memory helps the direct one (the kernel's caches are dropped before each
epoch: a dataset larger than memory), and a mount may use RAM for a third of the dataset.

INVARIANT: mounts, daemon, loop device, read limit and temporary files are gone at the end, also
after a failure, Ctrl-C or SIGTERM.
"""

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.console import Console

from tools.demo_lib import dataset, report, training
from tools.fusecache_command import FusecacheMount, default_executable
from tools.hintsd_command import HintsdCommand
from tools.slow_origin import LoopOrigin, can_throttle, drop_caches

EPOCHS = 3
READ_BPS = 8_000_000
READ_IOPS = 400
RAM_SHARE = 1 / 3  # of the dataset: what a mount may hold in RAM
LAYOUT = "reorder"  # of the hinted mount's SSD: written anew for each epoch
SPARE_BYTES = 64 << 20  # of the origin's file system, for its own tables


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Your images, a folder for each class, read where they lie at their own speed.",
)
@click.option("--images", default=1000, show_default=True, help="Train on so many images.")
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
    signal.signal(signal.SIGTERM, _terminated)
    started = time.monotonic()
    try:
        checks = _demo(console, data, images, seed, out, work_dir, fusecache)
    except KeyboardInterrupt:
        console.print("[bold red]FAIL[/]: interrupted; everything was cleaned up")
        sys.exit(130)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        console.print(f"[bold red]FAIL[/]: {error}", highlight=False, soft_wrap=True)
        sys.exit(1)
    seconds = time.monotonic() - started
    failed = [check.claim for check in checks if not check.holds]
    if failed:
        console.print(f"[bold red]FAIL[/]: not so: {'; '.join(failed)} ({seconds:.0f} s)")
        sys.exit(1)
    console.print(f"[bold green]PASS[/]: {len(checks)} of {len(checks)} checks ({seconds:.0f} s)")


def _demo(
    console: Console,
    data: Path | None,
    images: int,
    seed: int,
    out: Path,
    work_dir: Path | None,
    fusecache: Path,
) -> list[report.Check]:
    say = _sayer(console)
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as cleanup:
        work = Path(tempfile.mkdtemp(prefix="fusecache-demo-", dir=work_dir))
        cleanup.callback(shutil.rmtree, work, ignore_errors=True)
        device: LoopOrigin | None = None
        throttled = False
        if data is not None:
            origin, kind = data.resolve(), f"{data}, at its own speed"
        elif can_throttle():
            size_bytes = images * dataset.MEDIAN_BYTES * 3 // 2 + SPARE_BYTES
            device = cleanup.enter_context(LoopOrigin(work, size_bytes))
            origin, kind = device.directory / "train", "ext4 on a loop device, not throttled"
        else:
            origin, kind = work / "train", "a plain directory, not throttled (that needs root)"
        if data is None:
            say(f"making {images} JPEG files")
            dataset.make(origin, images, seed)
        if device is not None:
            try:
                device.throttle(READ_BPS, READ_IOPS)
                throttled = True
                kind = f"ext4 on a loop device, {READ_BPS / 1e6:.0f} MB/s, {READ_IOPS} requests/s"
            except OSError as error:
                say(f"this machine cannot limit a device: {error}")
        say(f"origin: {kind}")

        rows: list[report.Row] = []
        trained: dict[str, list[training.Epoch]] = {}
        hashed: dict[str, training.Files] = {}
        statuses: dict[str, dict[str, Any]] = {}
        layouts: list[report.Layout] = []

        def run(source: str, root: Path, mount: FusecacheMount | None) -> None:
            before: _Counted = _Counted()
            epochs: list[tuple[training.Epoch, _Counted]] = []

            def count() -> _Counted:
                fetched = device.bytes_read() if device is not None else None
                if mount is None:
                    return _Counted(fetched)
                status = mount.status()
                if fetched is None:
                    fetched = int(status["origin"]["bytes"])
                late = _late(daemon.status()) if source == "hinted" else None
                return _Counted(fetched, int(status["reads"]["from_ssd"]), late)

            def before_epoch(number: int) -> None:
                nonlocal before
                if mount is None or number == 0:
                    drop_caches([root, origin])
                before = count()

            def after_epoch(number: int, epoch: training.Epoch) -> None:
                epochs.append((epoch, count().since(before)))
                if source == "hinted":
                    layouts.append(_layout(daemon.status()))
                say(
                    f"{source}, epoch {number + 1}: {epoch.samples_per_s:.0f} samples/s,"
                    f" {epoch.waiting_s:.1f} of {epoch.seconds:.1f} s waiting for data"
                )

            trained[source] = training.train(
                root,
                most=images,
                epochs=EPOCHS,
                seed=seed,
                hints=source == "hinted",
                before_epoch=before_epoch,
                after_epoch=after_epoch,
            )
            hashed[source] = training.hash_files(root, images)
            for number, (epoch, counted) in enumerate(epochs, start=1):
                served = _served_from(counted.fetched, counted.from_ssd, hashed[source])
                rows.append(
                    report.Row(source, number, served, epoch, counted.fetched, counted.late)
                )

        run("direct", origin, None)
        ram = int(hashed["direct"].size_bytes * RAM_SHARE)
        daemon = cleanup.enter_context(HintsdCommand(work))
        for source, hints in (
            ("mount", ("--hintsd", "none")),
            ("hinted", ("--hintsd", str(daemon.socket), "--layout", LAYOUT)),
        ):
            options = ("--ram", str(ram), *hints)
            mount = FusecacheMount(
                origin,
                work / f"mnt-{source}",
                work / f"cache-{source}",
                options,
                executable=fusecache,
            )
            with mount:
                say(f"fusecache mount {origin} {mount.mountpoint} {' '.join(options)}")
                run(source, mount.mountpoint, mount)
                statuses[source] = mount.status()

        checks = _compare(rows, trained, hashed, statuses, throttled)
        files = hashed["direct"]
        about = f"{files.count} JPEG files, {files.size_bytes / 1e6:.0f} MB; origin: {kind}"
        console.print()
        written = int(statuses["hinted"]["layout"]["log_written_bytes"])
        served = files.size_bytes * EPOCHS
        log = report.Log(LAYOUT, layouts, written / max(1, served))
        report.print_table(console, rows, log, checks)
        with (out / "table.txt").open("w") as table:
            report.print_table(Console(file=table, width=report.WIDTH), rows, log, checks)
        notes: dict[str, object] = {"dataset": about, "layout": asdict(log), "status": statuses}
        report.save_json(out / "demo.json", rows, checks, notes)
        report.save_plot(out / "demo.png", rows, about)
        say(f"saved {out / 'demo.png'}, table.txt, demo.json")
    return checks


@dataclass(frozen=True)
class _Counted:
    """Bytes from the origin (None: cannot be counted), READs answered from SSD, late reads."""

    fetched: int | None = None
    from_ssd: int = 0
    late: int | None = None

    def since(self, before: "_Counted") -> "_Counted":
        return _Counted(
            None if self.fetched is None else self.fetched - (before.fetched or 0),
            self.from_ssd - before.from_ssd,
            None if self.late is None else self.late - (before.late or 0),
        )


def _layout(status: dict[str, Any]) -> report.Layout:
    """Of the job that reads, or has just ended."""
    job: dict[str, str] = [*status["ended"], *status["jobs"]][-1]
    return report.Layout(job.get("layout", "static"), job.get("layout_why", "not packed"))


def _late(status: dict[str, Any]) -> int:
    """Late reads of all jobs, by what `hintsd status --json` says."""
    return sum(sum((job["late"] or {}).values()) for job in status["jobs"])


def _served_from(fetched: int | None, ssd_requests: int, files: training.Files) -> str:
    """Like "SSD" or "RAM 30 %, origin 70 %". Bytes of the origin are counted; of the SSD only
    requests are, and each stands for a file; what is left the kernel had in its page cache.
    """
    if fetched is None:
        return "not measured"
    origin = min(1.0, fetched / max(1, files.size_bytes))
    ssd = min(1.0 - origin, ssd_requests / max(1, files.count))
    shares = {"RAM": 1.0 - origin - ssd, "SSD": ssd, "origin": origin}
    seen = {name: share for name, share in shares.items() if share >= 0.05}
    if len(seen) == 1:
        return next(iter(seen))
    return ", ".join(f"{name} {share:.0%}".replace("%", " %") for name, share in seen.items())


def _compare(
    rows: list[report.Row],
    trained: dict[str, list[training.Epoch]],
    hashed: dict[str, training.Files],
    statuses: dict[str, dict[str, Any]],
    throttled: bool,
) -> list[report.Check]:
    direct, hinted = trained["direct"], trained["hinted"]
    files = hashed["direct"]
    mismatches = sum(int(status["integrity"]["mismatches"]) for status in statuses.values())
    digests = {tuple(e.batches_digest for e in epochs) for epochs in trained.values()}
    courses = {tuple((e.losses, e.accuracy) for e in epochs) for epochs in trained.values()}
    accuracy = ", ".join(f"{epochs[-1].accuracy:.1%}" for epochs in trained.values())
    checks = [
        report.Check(
            "every file has the same bytes",
            len(set(hashed.values())) == 1,
            f"{files.count} files, {files.digest}",
        ),
        report.Check(
            "the order is the same: every batch had the same pixels and labels",
            len(digests) == 1,
            f"{sum(len(e.losses) for e in direct)} batches of {len(direct)} epochs",
        ),
        report.Check(
            "loss and accuracy have the same course, to the last bit",
            len(courses) == 1,
            f"accuracy {accuracy} in the last epoch",
        ),
        report.Check(
            "no cached block failed its checksum", mismatches == 0, f"{mismatches} mismatches"
        ),
    ]
    later = [row.origin_bytes for row in rows if row.source != "direct" and row.epoch > 1]
    if None not in later:
        fetched = sum(count or 0 for count in later)
        checks.append(
            report.Check(
                "later epochs read (almost) nothing from the origin",
                fetched < 0.05 * files.size_bytes,
                f"{fetched / 1e6:.1f} MB of {files.size_bytes * len(later) / 1e6:.0f} MB",
            )
        )
    late = sum(row.late or 0 for row in rows if row.source == "hinted" and row.epoch > 1)
    read = sum(e.samples for e in hinted[1:])
    checks.append(
        report.Check(
            "with hints, later epochs find their bytes in place",
            late < 0.05 * read,
            f"{late} of {read} reads were late",
        )
    )
    if throttled:
        for source in ("mount", "hinted"):
            ratio = direct[1].seconds / trained[source][1].seconds
            checks.append(
                report.Check(
                    f"{source}: the second epoch is faster than from the origin",
                    ratio > 1,
                    f"{ratio:.1f}x",
                )
            )
    return checks


def _sayer(console: Console) -> Callable[[str], None]:
    start = time.monotonic()

    def say(text: str) -> None:
        seconds = time.monotonic() - start
        console.print(f"[dim]{seconds:6.1f} s[/]  {text}", highlight=False, soft_wrap=True)

    return say


if __name__ == "__main__":
    main()
