"""The demo's main program: dataset, slow origin, two trainings, comparison, PASS or FAIL.

Both trainings run the same three epochs: kernel caches dropped before the first and the second (a
dataset larger than memory), left alone before the third (one that fits). For the mount that is:
from the origin, from the SSD store, from RAM.

INVARIANT: mounts, loop device, read limit and temporary files are gone at the end, also after a
failure, Ctrl-C or SIGTERM.
"""

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from tools.demo_lib import dataset, report, training
from tools.fusecache_command import FusecacheMount, default_executable
from tools.slow_origin import LoopOrigin, can_throttle, drop_caches

EPOCHS = 3
READ_BPS = 8_000_000
READ_IOPS = 400
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
    console = Console()
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
        origin_read = device.bytes_read if device is not None else None

        def run(
            source: str,
            root: Path,
            count: Callable[[], int] | None,
            count_ssd: Callable[[], int] | None,
        ) -> None:
            before = before_ssd = 0
            epochs: list[tuple[training.Epoch, int | None, int]] = []

            def before_epoch(number: int) -> None:
                nonlocal before, before_ssd
                if number < 2:
                    drop_caches([root, origin])
                before = count() if count is not None else 0
                before_ssd = count_ssd() if count_ssd is not None else 0

            def after_epoch(number: int, epoch: training.Epoch) -> None:
                fetched = count() - before if count is not None else None
                from_ssd = count_ssd() - before_ssd if count_ssd is not None else 0
                epochs.append((epoch, fetched, from_ssd))
                say(
                    f"{source}, epoch {number + 1}: {epoch.samples_per_s:.0f} samples/s,"
                    f" {epoch.waiting_s:.1f} of {epoch.seconds:.1f} s waiting for data"
                )

            trained[source] = training.train(
                root,
                most=images,
                epochs=EPOCHS,
                seed=seed,
                before_epoch=before_epoch,
                after_epoch=after_epoch,
            )
            hashed[source] = training.hash_files(root, images)
            for number, (epoch, fetched, from_ssd) in enumerate(epochs, start=1):
                served = _served_from(fetched, from_ssd, hashed[source])
                rows.append(report.Row(source, number, served, epoch, fetched))

        run("direct", origin, origin_read, None)
        mount = FusecacheMount(origin, work / "mnt", work / "cache", executable=fusecache)
        with mount:
            say(f"fusecache mount {origin} {mount.mountpoint} --cache-dir {work / 'cache'}")

            def fetched_bytes() -> int:
                return int(mount.status()["origin"]["bytes"])

            def ssd_requests() -> int:
                return int(mount.status()["reads"]["from_ssd"])

            run("fusecache", mount.mountpoint, origin_read or fetched_bytes, ssd_requests)
            status = mount.status()

        checks = _compare(rows, trained, hashed, status, throttled)
        files = hashed["direct"]
        about = f"{files.count} JPEG files, {files.size_bytes / 1e6:.0f} MB; origin: {kind}"
        console.print()
        report.print_table(console, rows, checks)
        with (out / "table.txt").open("w") as table:
            report.print_table(Console(file=table, width=120), rows, checks)
        report.save_json(out / "demo.json", rows, checks, {"dataset": about, "status": status})
        report.save_plot(out / "demo.png", rows, about)
        say(f"saved {out / 'demo.png'}, table.txt, demo.json")
    return checks


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
    status: dict[str, object],
    throttled: bool,
) -> list[report.Check]:
    direct, mounted = trained["direct"], trained["fusecache"]
    files, through = hashed["direct"], hashed["fusecache"]
    integrity = status["integrity"]
    assert isinstance(integrity, dict)
    checks = [
        report.Check(
            "every file has the same bytes",
            files == through,
            f"{files.count} files, {files.digest} and {through.digest}",
        ),
        report.Check(
            "every batch had the same pixels and labels",
            [e.batches_digest for e in direct] == [e.batches_digest for e in mounted],
            f"{sum(len(e.losses) for e in direct)} batches of {len(direct)} epochs",
        ),
        report.Check(
            "loss and accuracy have the same course, to the last bit",
            [(e.losses, e.accuracy) for e in direct] == [(e.losses, e.accuracy) for e in mounted],
            f"accuracy {direct[-1].accuracy:.1%} and {mounted[-1].accuracy:.1%} in the last epoch",
        ),
        report.Check(
            "no cached block failed its checksum",
            integrity["mismatches"] == 0,
            f"{integrity['mismatches']} mismatches",
        ),
    ]
    later = [row.origin_bytes for row in rows if row.source == "fusecache" and row.epoch > 1]
    if None not in later:
        fetched = sum(count or 0 for count in later)
        checks.append(
            report.Check(
                "later epochs read (almost) nothing from the origin",
                fetched < 0.05 * files.size_bytes,
                f"{fetched / 1e6:.1f} MB of {files.size_bytes * len(later) / 1e6:.0f} MB",
            )
        )
    if throttled:
        ratio = direct[1].seconds / mounted[1].seconds
        checks.append(
            report.Check(
                "the second epoch is faster than from the origin", ratio > 1, f"{ratio:.1f}x"
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
