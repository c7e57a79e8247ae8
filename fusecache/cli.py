"""The commands: what a person or a script calls. Parses, asks, prints; does none of the work.

A mistake is one line on stderr and an exit code: `command.run`.
`mount.fusecache` is the same package as a helper of mount(8): see `mount_helper`.
It imports nothing that mounts or serves; keeper and server import nothing from here.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from fusecache import (
    __version__,
    command,
    config,
    control_client,
    gc_command,
    hintsd_client,
    keeper,
    mounts,
    probe,
    trace_command,
)
from fusecache.command import Commands, console, printable
from fusecache.config import Config
from fusecache.errors import (
    EXIT_BUSY,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_A_MOUNT,
    EXIT_OK,
    EXIT_USAGE,
    ConfigError,
    UserError,
)
from fusecache.units import format_bytes, format_duration

HELPER_NAMES = ("mount.fusecache", "mount.fuse.fusecache")
HELPER_DIRECTORY = "/sbin"
HINTSD_START_S = 5.0
# What `packing` in a mount's state means (docs/LOG.md); 0 is nothing.
OPEN = 1
PACKING = {
    OPEN: "a log is being written",
    2: "NO LOG: no room on SSD",
    4: "NO LOG: too little room on SSD",
    5: "A WRITE TO THE LOG FAILED: see the log file",
    6: "a log is being written, as far as there is room on SSD",
}

EXIT_CODES = f"""\b
Exit codes:
  {EXIT_OK}    done
  {EXIT_FAILED}    failed; verify: bad blocks were found
  {EXIT_USAGE}    a flag or a setting cannot be used
  {EXIT_NOT_A_MOUNT}    the path is on no fusecache mount
  {EXIT_BUSY}    busy: the mount is in use, or the mount point is a fusecache already
  {EXIT_INTERRUPTED}  interrupted with Ctrl-C"""


def _complain(line: str) -> None:
    command.complain("fusecache", line)


def _say(line: str) -> None:
    """print, for text that may hold the bytes of a file name."""
    sys.stdout.flush()
    sys.stdout.buffer.write(line.encode("utf-8", "surrogateescape") + b"\n")
    sys.stdout.flush()


# ---- flags ---------------------------------------------------------------------------------------


def _settings_flags(*, shows_defaults: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The flags of `mount` and `restart`: each is a setting of the same name in TOML."""

    def flag(names: str, help_: str, default: str = "", **more: Any) -> Callable[..., Any]:
        shown = f"[{default}]" if default and shows_defaults else ""
        return click.option(names, default=None, help=f"{help_} {shown}".strip(), **more)

    flags = [
        click.option("--config", "config_file", metavar="FILE", help="TOML with these same names."),
        flag(
            "--cache-dir",
            "Where the SSD tier lies; several, on several disks.",
            "/var/cache/fusecache",
            metavar="DIR",
            multiple=True,
        ),
        flag("--ssd", "Limit of the SSD tier.", "what is free", metavar="SIZE"),
        flag("--ram", "Budget of the RAM tier.", "a quarter of the memory", metavar="SIZE"),
        flag("--keep-free", "Left to others on that disk.", "5%", metavar="SIZE|%"),
        flag("--policy", "keep: replace nothing.", "lrf", metavar="|".join(config.POLICIES)),
        flag("--digest", "blake3 where users share.", metavar="|".join(config.DIGESTS)),
        flag(
            "--layout",
            "reorder: hinted samples lie on SSD as the next epoch reads them.",
            "static",
            metavar="|".join(config.LAYOUTS),
        ),
        flag("--allow-other", "Other users may read, too.", is_flag=True),
        flag("--revalidate", "See changes within this.", "60", metavar="SECONDS|never"),
        flag("--zero-open/--no-zero-open", "Reads without round trips.", "on"),
        flag("--origin-timeout", "A hung origin gives EIO.", "30", metavar="SECONDS"),
        flag("--origin-threads", "Calls to the origin at a time.", "32", metavar="N"),
        flag("--prefetch-bandwidth", "Of hinted reads, a second.", "none", metavar="SIZE|none"),
        flag("--prefetch-depth", "Hinted reads at a time.", "128", metavar="N"),
        flag("--hintsd", "Who takes hints; auto starts it.", "auto", metavar="auto|none|SOCKET"),
        flag("--log-file", "Where the log goes.", "in the runtime directory", metavar="FILE"),
    ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(flags):
            function = option(function)
        return function

    return decorate


def _collect(
    config_file: str | None, options: tuple[str, ...], flags: dict[str, Any]
) -> dict[str, Any]:
    """Settings from file, then -o, then flags: the later wins."""
    settings = config.read_file(config_file) if config_file else {}
    settings.update(config.read_options(options))
    for name, value in flags.items():
        if value not in (None, ()):
            canonical, parsed = config.parse_setting(name, value, "--" + name.replace("_", "-"))
            settings[canonical] = parsed
            if isinstance(value, tuple) and len({*map(os.path.abspath, value)}) < len(value):
                _complain(f"warning: the same twice: --{name.replace('_', '-')} {' '.join(value)}")
    return settings


@click.group(
    cls=Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="fusecache")
def cli() -> None:
    """A cache mounted over a dataset directory: RAM and SSD here, the origin only once.

    \b
    fusecache mount /data/imagenet                     over the directory itself
    fusecache mount /mnt/nfs/imagenet /data/imagenet --cache-dir /ssd/cache --ssd 500G
    fusecache status /data/imagenet
    fusecache warm /data/imagenet 'train/n01*'         fetch before it is needed
    fusecache umount /data/imagenet

    Sizes are like 500G, 64GiB or 1048576. Each command has its own --help.
    """


# ---- mount ---------------------------------------------------------------------------------------


@cli.command()
@click.argument("places", nargs=-1, metavar="[SOURCE] [MOUNTPOINT]")
@_settings_flags(shows_defaults=True)
@click.option("--foreground", "-f", is_flag=True, default=None, help="Stay, and log on stderr.")
@click.option(
    "-o",
    "options",
    multiple=True,
    metavar="A,B=C",
    help="Settings, as from fstab; also noexec: nothing on it is executed.",
)
def mount(
    places: tuple[str, ...], config_file: str | None, options: tuple[str, ...], **flags: Any
) -> None:
    """Mount SOURCE on MOUNTPOINT, or over itself. Returns when the mount answers.

    \b
    fusecache mount /data/imagenet
    fusecache mount /mnt/nfs/imagenet /data/imagenet --cache-dir /ssd/cache --ssd 500G --ram 64G
    fusecache mount /data/imagenet --cache-dir /ssd1/cache --cache-dir /ssd2/cache
    fusecache mount --config /etc/fusecache/imagenet.toml --foreground

    \b
    The same in TOML (flags win over the file):
      source = "/mnt/nfs/imagenet"
      mountpoint = "/data/imagenet"
      ssd = "500G"
      revalidate = "never"       # the data does not change
    """
    if len(places) > 2:
        raise ConfigError("too many places: fusecache mount [SOURCE] MOUNTPOINT")
    settings = _collect(config_file, options, flags)
    if len(places) == 1:
        settings.pop("source", None)  # one place: over itself
    for name, place in zip(("mountpoint", "source"), reversed(places), strict=False):
        settings[name] = config.parse_setting(name, place, name)[1]
    _mount(config.build(settings))


def _mount(given: Config) -> None:
    """Start the keeper and wait for its report."""
    wanted = config.check_places(given)
    warnings = config.warnings_of(wanted)
    if len(wanted.cache_dirs) < len(given.cache_dirs):
        warnings.append(f"the same directory twice, by a link: {', '.join(given.cache_dirs)}")
    arguments = [sys.executable, "-P", "-m", "fusecache.keeper", wanted.to_json()]
    environment = {**os.environ, **keeper.package_environment()}
    sys.stdout.flush()
    if wanted.foreground:
        for line in warnings:
            _complain(f"warning: {line}")
        os.execve(sys.executable, arguments, environment)
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    process = subprocess.Popen(
        [*arguments, str(theirs)],
        pass_fds=[theirs],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )
    os.close(theirs)
    report = _read_report(ours, process, wanted)
    if report.get("ready"):
        for line in warnings:
            _complain(f"warning: {line}")
    for line in report.get("warnings") or []:
        _complain(f"warning: {line}")
    if not report.get("ready"):
        process.wait()
        others = config.users_of_more(wanted)
        line = "; ".join([str(report.get("error")), *others])
        raise UserError(line, int(report.get("exit", EXIT_FAILED)))
    if wanted.hintsd == "auto":
        try:
            _start_hintsd(mounts.hintsd_socket(os.getuid()))
        except OSError as error:
            _complain(f"warning: hintsd was not started, hints have no effect: {error}")
    elif wanted.hintsd != "none" and not _listens(*os.path.split(wanted.hintsd)):
        _complain(
            f"warning: --hintsd {wanted.hintsd}: nobody listens there, hints have no effect until "
            f"somebody does: hintsd serve --socket {wanted.hintsd}"
        )


def _start_hintsd(path: str) -> None:
    """Have a daemon listen on `path` that lives as long as this user's mounts. OSError: none does,
    and none can be started.
    """
    directory, name = os.path.split(path)
    if _listens(directory, name):
        return
    log_path = os.path.join(directory, "hintsd.log")
    with open(log_path, "ab", opener=lambda file, flags: os.open(file, flags, 0o600)) as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hintsd", "serve", "--socket", path, "--until-unmounted"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={**os.environ, **keeper.package_environment()},
        )
    deadline = time.monotonic() + HINTSD_START_S
    while not _listens(directory, name):
        code = process.poll()
        if code is not None and not _listens(directory, name):
            raise OSError(f"it ended at once ({keeper.reason(code)}), see {log_path}")
        if time.monotonic() > deadline:
            raise OSError(f"it does not listen yet, see {log_path}")
        time.sleep(0.02)


def _listens(directory: str, name: str) -> bool:
    try:
        mounts.connect(directory, name, 1.0).close()
    except OSError:
        return False
    return True


def _read_report(fd: int, process: subprocess.Popen[bytes], wanted: Config) -> dict[str, Any]:
    received, patience_s = b"", 10.0
    try:
        while not received.endswith(b"\n"):
            if not select.select([fd], [], [], patience_s)[0]:
                _complain(f"still opening {wanted.cache_dir} (a large index may be rebuilt) …")
                patience_s = 60.0
                continue
            data = os.read(fd, 65536)
            if not data:
                code = process.wait()
                raise UserError(
                    f"the keeper died before the mount was there ({keeper.reason(code)})"
                )
            received += data
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    finally:
        os.close(fd)
    report: dict[str, Any] = json.loads(received)
    return report


# ---- status, list --------------------------------------------------------------------------------


@cli.command()
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def status(path: str, as_json: bool) -> None:
    """Show what the mount at PATH did and holds.

    \b
    fusecache status /data/imagenet
    fusecache status /data/imagenet --json | jq .reads

    \b
    RAM tier  files of the mount in the page cache, of --ram, as far as the mount knows: the kernel
              may have let go of some
    SSD tier  used, of --ssd: what is reserved for segments that are being written counts whole, so
              it may fall later; blocks: of 4 MiB at most, a small file is one; a line for each of
              several cache directories
    reads     requests that reached the mount: not those that the page cache answered
    origin    what was read there, by readers, hints and `warm`
    prefetch  what hints want now (to stage: from SSD into RAM; to fetch: from the origin), and
              what they brought; late: reads of files that were to be in RAM, and were not
    layout    how hinted samples lie on SSD, and why; last: of the job that has ended last
              (`hintsd status --help`, docs/TUNING.md)
    integrity
              blocks whose digest was wrong; they were fetched again
    counted   since when, if the server was restarted
    cache faults
              what was wrong with the cache directory or its disk; readers got the origin's bytes
    """
    target = control_client.find(path)
    answer = control_client.ask(target, {"op": "status"})["status"]
    told = hintsd_client.told(target)
    if isinstance(answer.get("layout"), dict):
        answer["layout"] |= told.layout
    if told.absent:
        answer["no_hintsd_at"] = told.absent
    if as_json:
        _say(json.dumps(answer, indent=2))
    else:
        console().print(_status_table(answer))


def _times(count: int) -> str:
    return f"{count:,} time{'s' * (count != 1)}"


def _of(part: dict[str, Any]) -> str:
    bytes_, limit = part["bytes"], part["limit_bytes"]
    share = f" ({bytes_ / limit:.0%})" if limit else ""
    return f"{format_bytes(bytes_)} of {format_bytes(limit)}{share}"


def _ssd(answer: dict[str, Any]) -> str:
    part, packed = answer["ssd"], (answer.get("layout") or {}).get("log_files", 0)
    if not packed:
        return f"{_of(part)}, {part['blocks']:,} blocks"
    return (
        f"{_of(part)}, {_files(packed)} in the log, {part['blocks']:,} blocks elsewhere "
        "(of files that have moved, too: fusecache gc tells)"
    )


def _prefetch(part: dict[str, Any], staged_bytes: int) -> str:
    done = (
        f"{part.get('files', 0):,} files, {format_bytes(part.get('bytes', 0))} from the origin; "
        f"{format_bytes(staged_bytes)} from SSD into RAM"
    )
    if not part.get("connected"):
        return f"no job has hints now; until now {done}"
    return (
        f"{part['queued_stage']:,} to stage and {part['queued_fetch']:,} to fetch, "
        f"{part['in_flight']:,} of {part['depth']:,} in flight; "
        f"{done}; {part['late_reads']:,} late reads"
    )


def _layout(answer: dict[str, Any]) -> str:
    part = answer.get("layout") or {}
    setting, chosen = part.get("setting", "static"), part.get("chosen")
    parts = [f"--layout {setting}"]
    if chosen:
        why = f": {part['why']}" if part["why"] != f"--layout {setting}" else ""
        parts = [f"{chosen} (--layout {setting}, {part['job']}){why}"]
    elif setting != "static" and not (answer.get("prefetch") or {}).get("connected"):
        parts.append("nothing is moved: no job has hints now")
    if last := part.get("last"):
        parts.append(f"last: {last['chosen']} ({last['job']}): {last['why']}")
    if part.get("probe_fault"):
        parts.append(f"STATIC, SINCE {part['probe_fault']}")
    packing, samples = part.get("packing", 0), part.get("log_samples", 0)
    if packing == OPEN and samples:
        share = part.get("log_moved_samples", 0) / samples
        parts.append(f"the next epoch's log is being written, {share:.0%} is there")
    elif packing in PACKING:
        parts.append(PACKING[packing])
    if needed_bytes := part.get("ssd_needed_bytes", 0):
        parts[-1] += f", --ssd {-(-needed_bytes >> 20)}M would be needed"
    written, served = part.get("log_written_bytes", 0), answer["reads"].get("bytes_served", 0)
    if written:
        logs = part.get("logs", 0)
        parts.append(f"{format_bytes(written)} written in {logs:,} log{'s' * (logs != 1)}")
        if served:
            parts[-1] += f", {written / served:.2f} bytes for each byte served"
    return "; ".join(parts)


def _directories(parts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """A line for each of several cache directories."""
    if len(parts) < 2:
        return []
    return [
        (
            "",
            f"{part['path']}: "
            + (
                f"OUT OF SERVICE: {part['why_out']}"
                if part["why_out"]
                else format_bytes(part["bytes"])
            ),
        )
        for part in parts
    ]


def _status_table(answer: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    reads, origin = answer["reads"], answer["origin"]
    mode = "zero-open" if answer["zero_open"] else "ordinary open (slower)"
    restarts = answer["restarts"]
    rows = [
        ("mount point", answer["mountpoint"]),
        ("source", answer["source"]),
        (
            "up",
            f"{format_duration(answer['uptime_s'])}, {mode}, server restarted {_times(restarts)}",
        ),
        ("processes", f"keeper {answer['keeper_pid']}, server {answer['server_pid']}"),
        ("RAM tier", _of(answer["ram"]) + " at most"),
        ("SSD tier", _ssd(answer)),
        *_directories(answer["ssd"].get("directories") or []),
        (
            "reads",
            f"{reads['requests']:,} requests, {reads['from_ssd']:,} from SSD, "
            f"{reads['from_origin']:,} from the origin; page cache hits are not seen",
        ),
        (
            "origin",
            f"{origin['files']:,} files, {format_bytes(origin['bytes'])}, "
            f"{origin['errors']:,} errors",
        ),
        ("prefetch", _prefetch(answer.get("prefetch") or {}, reads.get("bytes_staged", 0))),
        ("layout", _layout(answer)),
        ("integrity", f"{answer['integrity']['mismatches']:,} mismatches"),
    ]
    if restarts:
        since = format_duration(answer.get("counted_s", 0))
        rows.append(("counted", f"reads to integrity: since the last restart, {since} ago"))
    if origin.get("available") is False:
        rows.append(
            ("", f"THE ORIGIN IS AWAY: {origin.get('last_error')}; cached files are served")
        )
    if answer.get("keeper_alive") is False:
        rows.append(("", "THE KEEPER IS GONE: umount and mount again at the next occasion"))
    if path := answer.get("no_hintsd_at"):
        rows.append(("", f"NO HINTSD LISTENS at {path}: hints have no effect until one does"))
    faults = answer["integrity"].get("faults") or {}
    if faults:
        rows.append(("cache faults", ", ".join(f"{name}: {n:,}" for name, n in faults.items())))
    for name, value in rows:
        table.add_row(name, printable(value))
    return table


@cli.command("list")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def list_mounts(as_json: bool) -> None:
    """List the fusecache mounts of this machine."""
    found = []
    for target in control_client.find_all():
        record = mounts.keeper_record(target.directory) if target.directory else {}
        found.append(
            {
                "mountpoint": target.mountpoint,
                "source": target.mount.source,
                "uid": target.mount.uid,
                "keeper_pid": record.get("keeper_pid"),
                "log": record.get("log"),
            }
        )
    if as_json:
        _say(json.dumps(found, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("mount point", "source", "user", "keeper", "log"):
        table.add_column(title, overflow="fold")
    for row in found:
        table.add_row(*(printable("-" if value is None else value) for value in row.values()))
    if found:
        console().print(table)


# ---- probe ---------------------------------------------------------------------------------------

PROBE_SAMPLES_BYTES = (3000, 10_000, 30_000, 110_000)
SPREAD_MOST = 0.5


@cli.command("probe")
@click.argument("path", metavar="CACHE_DIR|MOUNTPOINT")
@click.option("--show", is_flag=True, help="What was measured last; measures nothing.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def probe_device(path: str, show: bool, as_json: bool) -> None:
    """Measure the disk of a cache directory, and keep the result there for `--layout auto`.

    \b
    fusecache probe /var/cache/fusecache
    fusecache probe /data/imagenet                    each cache directory of that mount
    fusecache probe /var/cache/fusecache --show --json | jq .mixed_bytes_per_s

    Takes some 3 s and, meanwhile, room for 256 MiB. Best while nobody uses the disk. A mount with
    `--layout auto` that finds no result of the last 30 days measures by itself when the first
    training with hints comes. In another directory, unless it is empty, nothing is kept.
    Samples are worth reordering where the gain is well above 1; docs/TUNING.md says more.
    """
    directories = _probed(path)
    maps = []
    for directory in directories:
        if show:
            kept = probe.load(directory)
            if kept is None:
                raise UserError(
                    f"{directory}: nothing that was measured in the last 30 days is kept there; "
                    f"to measure: fusecache probe {path}"
                )
            found = kept
        else:
            found = probe.measure(directory)
        maps.append(found.as_map())
        if not as_json:
            heading = [f"{directory}:"] if len(directories) > 1 else []
            command.show(
                *heading, _device_table(found), "", _samples_table(found), "", _trust(found)
            )
            if directory is not directories[-1]:
                command.show("")
        if not show and not probe.is_kept_in(directory):
            _complain(f"{directory} is no cache directory: the result is not kept")
    if as_json:
        by_path = {str(path): one for path, one in zip(directories, maps, strict=True)}
        _say(json.dumps(maps[0] if len(maps) == 1 else by_path, indent=2))


def _probed(path: str) -> list[pathlib.Path]:
    """The cache directories that are meant, of a mount those in service. Whether a mount is, is
    seen without touching it.
    """
    if mounts.find(path) is not None:
        answer = control_client.ask(control_client.find(path), {"op": "status"})["status"]
        parts = answer["ssd"].get("directories") or [{"path": answer["cache_dir"]}]
        used = [pathlib.Path(part["path"]) for part in parts if not part.get("why_out")]
        return used or [pathlib.Path(answer["cache_dir"])]
    directory = pathlib.Path(path)
    if not directory.exists():
        raise UserError(f"{path} does not exist: make it (mkdir -p), or mount with it first")
    if not directory.is_dir():
        raise UserError(f"{path} is a file: give a cache directory, or a mount point")
    if os.statvfs(directory).f_blocks == 0:
        raise UserError(f"{path}: that file system stores nothing; give a directory on the SSD")
    return [directory]


def _trust(found: probe.Probe) -> str:
    line = f"passes of one figure lie up to {found.spread:.0%} apart"
    if found.spread > SPREAD_MOST:
        line += ": somebody else uses the disk, or it is not steady; measure again when it is idle"
    return f"{line}; measured {format_duration(max(0.0, time.time() - found.taken_at))} ago"


def _device_table(found: probe.Probe) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("device", "bytes/s", "requests/s"):
        table.add_column(title, justify="left" if title == "device" else "right")
    rows = [
        ("sequential reads", found.sequential_bytes_per_s, probe.LARGE_BYTES),
        ("writes", found.write_bytes_per_s, probe.PIECE_BYTES),
        ("reads, while as much is written", found.mixed_bytes_per_s, probe.LARGE_BYTES),
        *((f"random reads of {format_bytes(size)}", rate, size) for size, rate in found.random),
    ]
    for name, rate, size in rows:
        table.add_row(name, format_bytes(rate), f"{rate / size:,.0f}")
    return table


def _samples_table(found: probe.Probe) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("samples of", "at random", "in order, rewritten", "gain"):
        table.add_column(title, justify="right")
    for size in PROBE_SAMPLES_BYTES:
        random, mixed = found.random_bytes_per_s(size), found.mixed_bytes_per_s
        shown = f"{format_bytes(random)}/s", f"{format_bytes(mixed)}/s", f"{mixed / random:.2f}"
        table.add_row(f"{size // 1000} KB", *shown)
    return table


# ---- warm, verify --------------------------------------------------------------------------------


@contextlib.contextmanager
def _progress(what: str) -> Iterator[tuple[Progress, TaskID]]:
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    with bar:
        yield bar, bar.add_task(what, total=None, note="")


@cli.command()
@click.argument("path")
@click.argument("globs", nargs=-1, metavar="[GLOB]...")
def warm(path: str, globs: tuple[str, ...]) -> None:
    """Fetch files into the cache before they are needed: all of them, or those a GLOB names.

    PATH is the mount point, or what lies below it: then only that is fetched. A GLOB is relative to
    PATH; `**` crosses directories; a directory means all below it.
    Interrupt it any time: running it again goes on where it was.

    \b
    fusecache warm /data/imagenet
    fusecache warm /data/imagenet/train
    fusecache warm /data/imagenet train 'val/**/*.JPEG'
    """
    target = control_client.find(path)
    request = _warm_request(target.mountpoint, path, globs)
    done: dict[str, Any] = {}
    result: dict[str, Any] = {}
    try:
        with _progress("warming") as (bar, task):
            for message in control_client.converse(target, request):
                if "progress" in message:
                    done = message["progress"]
                    bar.update(
                        task,
                        completed=done["bytes_done"],
                        total=done["bytes_total"],
                        note=f"{done['files_done']:,} of {done['files_total']:,} files",
                    )
                else:
                    result = message["result"]
    except KeyboardInterrupt:
        _complain(
            f"interrupted after {done.get('files_done', 0):,} files "
            f"({format_bytes(done.get('bytes_done', 0))}); run it again to go on"
        )
        sys.exit(EXIT_INTERRUPTED)
    errors = list(result.get("errors") or [])
    for line in errors[:20]:
        _complain(line)
    if len(errors) > 20:
        _complain(f"… and {len(errors) - 20:,} more")
    already, skipped = result.get("already", 0), result.get("skipped", 0)
    extra = f"; {skipped:,} skipped" if skipped else ""
    _say(
        f"{result['files']:,} files, {format_bytes(result['bytes'])} in the cache; "
        f"{already:,} were there before{extra}"
    )
    unmatched = result.get("unmatched") or []
    if unmatched:
        _complain(f"warning: no file matches {' '.join(unmatched)}")
    unfitting = result.get("unfitting", 0)
    if unfitting:
        limit = format_bytes(result["limit_bytes"])
        _complain(f"{_files(unfitting)} do not fit in --ssd {limit}")
    if skipped > unfitting:
        _complain(f"{_files(skipped - unfitting)} could not be stored: see the log")
    if errors or unmatched or skipped:
        sys.exit(EXIT_FAILED)


def _files(count: int) -> str:
    return f"{count:,} file{'s' if count != 1 else ''}"


def _warm_request(mountpoint: str, path: str, globs: tuple[str, ...]) -> dict[str, Any]:
    """The part of the mount that `path` names, and the globs relative to it."""
    place = os.path.abspath(path)
    if not mounts.is_below(place, mountpoint):
        place = mounts.resolve(place)  # by a link
    relative = []
    for glob in globs:
        base = next((p for p in (os.path.abspath(path), place) if mounts.is_below(glob, p)), None)
        if base is not None:
            glob = glob[len(base) :].strip("/") or "**"
        elif mounts.is_below(glob, mountpoint):
            raise ConfigError(f"{glob} is not below {path}")
        relative.append(glob)
    request: dict[str, Any] = {"op": "warm", "globs": relative}
    prefix = place[len(mountpoint) :].strip("/") if mounts.is_below(place, mountpoint) else ""
    if prefix:
        request["prefix"] = prefix
    return request


@cli.command()
@click.argument("path")
def verify(path: str) -> None:
    """Check every cached byte against its digest. Bad blocks are dropped and fetched again on use.

    \b
    fusecache verify /data/imagenet && echo all good
    """
    target = control_client.find(path)
    result: dict[str, Any] = {}
    with _progress("verifying") as (bar, task):
        for message in control_client.converse(target, {"op": "verify"}):
            if "progress" in message:
                done = message["progress"]
                bar.update(
                    task,
                    completed=done["bytes_done"],
                    total=done.get("bytes_total"),
                    note=f"{done['blocks_done']:,} of {done['blocks_total']:,} blocks, "
                    f"{done['bad']:,} bad",
                )
            else:
                result = message["result"]
    _say(
        f"{result['blocks']:,} blocks, {format_bytes(result['bytes'])} checked, "
        f"{result['bad']:,} bad"
    )
    if result["bad"]:
        sys.exit(EXIT_FAILED)


cli.add_command(gc_command.gc)
cli.add_command(trace_command.trace)


# ---- restart, umount -----------------------------------------------------------------------------


def _place(path: str | None, settings: dict[str, Any]) -> str:
    """The mount that a command is about: as given, or the mount point in the config file."""
    place = path or settings.get("mountpoint")
    if place is None:
        raise ConfigError("which mount? give a PATH, or a --config with a mountpoint")
    return str(place)


@cli.command()
@click.argument("path", required=False)
@_settings_flags(shows_defaults=False)
@click.option("-o", "options", multiple=True, metavar="A,B=C", help="Settings, as from fstab.")
def restart(
    path: str | None, config_file: str | None, options: tuple[str, ...], **flags: Any
) -> None:
    """Swap the server, and settings if some are given; readers notice nothing.

    Settings that are not given stay. To use a new version: install it, then restart.

    \b
    fusecache restart /data/imagenet
    fusecache restart /data/imagenet --ram 128G --revalidate never
    fusecache restart --config /etc/fusecache/imagenet.toml
    """
    settings = _collect(config_file, options, flags)
    target = control_client.find(_place(path, settings))
    settings.pop("mountpoint", None)
    try:
        info = control_client.ask_keeper(target, {"op": "info"})["info"]
        current = Config.from_json(json.dumps(info["config"]))
        if os.path.realpath(settings.get("source", current.source)) == current.source:
            settings.pop("source", None)  # a link to it, perhaps; the keeper refuses another
        wanted = config.build(settings, current)
        if "cache_dir" in settings:
            wanted = config.check_cache_dirs(wanted)
        request = {"op": "restart", "config": json.loads(wanted.to_json())}
        answer = control_client.ask_keeper(target, request, control_client.RESTART_TIMEOUT_S)
    except ConnectionError as error:
        raise UserError(f"{error}: umount and mount again") from None
    if not answer.get("ok"):
        raise UserError(str(answer.get("error")), int(answer.get("exit", EXIT_FAILED)))
    for line in answer.get("warnings") or []:
        _complain(f"warning: {line}")


@cli.command()
@click.argument("path", required=False)
@click.option("--lazy", "-l", is_flag=True, help="Detach now; what is open stays readable.")
@click.option("--force", is_flag=True, help="Also while hinted trainings read from it.")
@click.option("--config", "config_file", metavar="FILE", help="TOML that names the mount point.")
def umount(path: str | None, lazy: bool, force: bool, config_file: str | None) -> None:
    """End the mount. What is cached stays on SSD for the next one.

    Refused while a file or directory of it is in use, or while a training with hints runs, which
    may hold nothing open between two files. A training without hints is seen only while it holds
    something open.

    \b
    fusecache umount /data/imagenet
    fusecache umount --lazy /data/imagenet       even while programs use it
    """
    settings = config.read_file(config_file) if config_file else {}
    place = _place(path, settings)
    target = control_client.find(place)
    if target.mountpoint not in (os.path.abspath(place), mounts.resolve(place)):
        raise UserError(
            f"{place} is inside of the mount {target.mountpoint}; to end that: "
            f"fusecache umount {target.mountpoint}",
            EXIT_USAGE,
        )
    os.chdir("/")  # our own directory may be what keeps it busy
    readers = [] if lazy or force else hintsd_client.readers(target)
    if readers:
        raise UserError(
            f"{target.mountpoint} is read with hints by {', '.join(readers)}; "
            "end that first, or: --force",
            EXIT_BUSY,
        )
    try:
        answer = control_client.ask_keeper(target, {"op": "umount", "lazy": lazy})
    except (ConnectionError, UserError):
        if target.mount.uid != os.getuid() and os.getuid() != 0:
            raise
        answer = _umount_alone(target, lazy)
    if answer.get("ok"):
        if answer.get("detached"):
            _complain("detached; open files are served until they are closed")
        return
    line, code = str(answer.get("error")), int(answer.get("exit", EXIT_FAILED))
    if code == EXIT_BUSY:
        users = ", ".join(_process(pid) for pid in answer.get("pids") or [])
        by = f" by {users}" if users else ""
        line = f"{target.mountpoint} is in use{by}; --lazy detaches it all the same"
    raise UserError(line, code)


def _process(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return f"{file.read().strip()} ({pid})"
    except OSError:
        return str(pid)


def _umount_alone(target: control_client.Target, lazy: bool) -> dict[str, Any]:
    """Without a keeper. A server that lives on ends by itself when the mount is gone."""
    try:
        keeper.unmount(target.mountpoint, lazy)
    except OSError as error:
        busy = "busy" in str(error)
        return {
            "ok": False,
            "error": f"{target.mountpoint}: {error.strerror or error}",
            "exit": EXIT_BUSY if busy else EXIT_FAILED,
            "pids": keeper.users_of(target.mountpoint) if busy else [],
        }
    if target.directory is not None:
        shutil.rmtree(target.directory, ignore_errors=True)  # the keeper did not live to do it
    return {"ok": True}


# ---- mount(8) ------------------------------------------------------------------------------------


@cli.command("install-helpers")
@click.option("--remove", is_flag=True, help="Take them away again.")
@click.option("--directory", default=HELPER_DIRECTORY, show_default=True, metavar="DIR")
def install_helpers(remove: bool, directory: str) -> None:
    """Let mount(8) and /etc/fstab find fusecache (as root).

    \b
    Links mount.fusecache and mount.fuse.fusecache in /sbin to this installation. Then these work:
      mount -t fuse.fusecache /mnt/nfs/imagenet /data/imagenet -o ssd=500G
    and as a line of /etc/fstab:
      /mnt/nfs/imagenet /data/imagenet fuse.fusecache ssd=500G,_netdev 0 0
    """
    program = os.path.join(os.path.dirname(os.path.abspath(sys.executable)), "mount.fusecache")
    if not remove and not os.access(program, os.X_OK):
        raise UserError(f"{program} does not exist: install the package with pip first")
    for name in HELPER_NAMES:
        link = os.path.join(directory, name)
        try:
            if os.path.lexists(link) and not os.path.islink(link):
                raise UserError(f"{link} is not a link of ours: left as it is")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(link)
            if not remove:
                os.symlink(program, link)
        except OSError as error:
            raise UserError(f"{link}: {error.strerror}") from None


def mount_helper() -> NoReturn:
    """Entry point of mount.fusecache: SOURCE MOUNTPOINT [-sfnvrw] [-N NS] [-t TYPE] [-o OPTIONS].

    The interface is mount(8)'s. -s, -n, -v, -r and -w change nothing here; -f only checks.
    """
    command.run("fusecache", lambda: _help_mount(sys.argv[1:]))


def _help_mount(arguments: list[str]) -> None:
    places: list[str] = []
    options: list[str] = []
    fake = False
    rest = iter(arguments)
    for word in rest:
        if not word.startswith("-") or word == "-":
            places.append(word)
            continue
        for position, letter in enumerate(word[1:], start=1):
            if letter in "otN":
                value = word[position + 1 :] or next(rest, "")
                if letter == "o":
                    options.append(value)
                break
            if letter == "f":
                fake = True
            elif letter not in "snvrw":
                raise ConfigError(f"unknown flag -{letter}")
    if len(places) != 2:
        raise ConfigError("usage: mount.fusecache SOURCE MOUNTPOINT [-sfnv] [-o OPTIONS]")
    settings = config.read_options(options)
    for name, place in zip(("source", "mountpoint"), places, strict=True):
        settings[name] = config.parse_setting(name, place, name)[1]
    given = config.build(settings)
    if fake:
        config.check_places(given)
    else:
        _mount(given)


# ---- entry ---------------------------------------------------------------------------------------


def main() -> NoReturn:
    command.run("fusecache", lambda: cli(prog_name="fusecache", standalone_mode=False))


if __name__ == "__main__":
    main()
