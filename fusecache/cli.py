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
PACKING = {
    1: "a log is being written",
    2: "NO LOG: no room on SSD",
    3: "no log: another one is not finished",
    4: "what is written anew is limited by the room on SSD",
    5: "A WRITE TO THE LOG FAILED: see the log file",
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


def _settings_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """The flags of `mount` and `restart`: each is a setting of the same name in TOML."""
    flags = [
        click.option("--config", "config_file", metavar="FILE", help="TOML with these same names."),
        click.option(
            "--cache-dir", metavar="DIR", help="Where the SSD tier lies. [/var/cache/fusecache]"
        ),
        click.option("--ssd", metavar="SIZE", help="Limit of the SSD tier. [what is free]"),
        click.option(
            "--ram", metavar="SIZE", help="Budget of the RAM tier. [a quarter of the memory]"
        ),
        click.option("--keep-free", metavar="SIZE|%", help="Left to others on that disk. [5%]"),
        click.option(
            "--policy", metavar="|".join(config.POLICIES), help="keep: replace nothing. [lrf]"
        ),
        click.option(
            "--digest", metavar="|".join(config.DIGESTS), help="blake3 where users share."
        ),
        click.option(
            "--layout",
            metavar="|".join(config.LAYOUTS),
            help="reorder: hinted samples lie on SSD as the next epoch reads them. [static]",
        ),
        click.option(
            "--allow-other", is_flag=True, default=None, help="Other users may read, too."
        ),
        click.option("--revalidate", metavar="SECONDS|never", help="See changes within this. [60]"),
        click.option(
            "--zero-open/--no-zero-open", default=None, help="Reads without round trips. [on]"
        ),
        click.option("--origin-timeout", metavar="SECONDS", help="A hung origin gives EIO. [30]"),
        click.option("--origin-threads", metavar="N", help="Calls to the origin at a time. [32]"),
        click.option(
            "--prefetch-bandwidth", metavar="SIZE|none", help="Of hinted reads, a second. [none]"
        ),
        click.option("--prefetch-depth", metavar="N", help="Hinted reads at a time. [128]"),
        click.option(
            "--hintsd", metavar="auto|none|SOCKET", help="Who takes hints; auto starts it. [auto]"
        ),
        click.option("--log-file", metavar="FILE", help="[in the runtime directory]"),
    ]
    for flag in reversed(flags):
        function = flag(function)
    return function


def _collect(
    config_file: str | None, options: tuple[str, ...], flags: dict[str, Any]
) -> dict[str, Any]:
    """Settings from file, then -o, then flags: the later wins."""
    settings = config.read_file(config_file) if config_file else {}
    settings.update(config.read_options(options))
    for name, value in flags.items():
        if value is not None:
            canonical, parsed = config.parse_setting(name, value, "--" + name.replace("_", "-"))
            settings[canonical] = parsed
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
@_settings_flags
@click.option("--foreground", "-f", is_flag=True, default=None, help="Stay, and log on stderr.")
@click.option("-o", "options", multiple=True, metavar="A,B=C", help="Settings, as from fstab.")
def mount(
    places: tuple[str, ...], config_file: str | None, options: tuple[str, ...], **flags: Any
) -> None:
    """Mount SOURCE on MOUNTPOINT, or over itself. Returns when the mount answers.

    \b
    fusecache mount /data/imagenet
    fusecache mount /mnt/nfs/imagenet /data/imagenet --cache-dir /ssd/cache --ssd 500G --ram 64G
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
    _mount(config.check_places(config.build(settings)))


def _mount(wanted: Config) -> None:
    """Start the keeper and wait for its report."""
    warnings = config.warnings_of(wanted)
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
        raise UserError(str(report.get("error")), int(report.get("exit", EXIT_FAILED)))
    if wanted.hintsd == "auto":
        try:
            _start_hintsd(mounts.hintsd_socket(os.getuid()))
        except OSError as error:
            _complain(f"warning: hintsd was not started, hints have no effect: {error}")


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
    """
    target = control_client.find(path)
    answer = control_client.ask(target, {"op": "status"})["status"]
    if isinstance(answer.get("layout"), dict):
        answer["layout"] |= hintsd_client.layout(target)
    if as_json:
        _say(json.dumps(answer, indent=2))
    else:
        console().print(_status_table(answer))


def _of(part: dict[str, Any]) -> str:
    bytes_, limit = part["bytes"], part["limit_bytes"]
    share = f" ({bytes_ / limit:.0%})" if limit else ""
    return f"{format_bytes(bytes_)} of {format_bytes(limit)}{share}"


def _prefetch(part: dict[str, Any]) -> str:
    if not part.get("connected"):
        done = format_bytes(part.get("bytes", 0))
        return f"no job has hints now; {part.get('files', 0):,} files, {done} until now"
    return (
        f"{part['queued_stage']:,} to stage and {part['queued_fetch']:,} to fetch, "
        f"{part['in_flight']:,} of {part['depth']:,} in flight; "
        f"{part['files']:,} files, {format_bytes(part['bytes'])}, {part['late_reads']:,} late reads"
    )


def _layout(part: dict[str, Any], pushed_bytes: int) -> str:
    setting, chosen = part.get("setting", "static"), part.get("chosen")
    said = f"--layout {setting}"
    if chosen:
        said = f"{chosen} (--layout {setting}, {part['job']}): {part['why']}"
    packing = part.get("packing", 0)
    if packing in PACKING:
        said += f"; {PACKING[packing]}"
    written = part.get("log_written_bytes", 0)
    if written:
        said += f"; {format_bytes(written)} written"
        if pushed_bytes:
            said += f", {written / pushed_bytes:.2f} bytes for each byte served"
    return said


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
        ("up", f"{format_duration(answer['uptime_s'])}, {mode}, server restarted {restarts} times"),
        ("processes", f"keeper {answer['keeper_pid']}, server {answer['server_pid']}"),
        ("RAM tier", _of(answer["ram"]) + " at most"),
        ("SSD tier", f"{_of(answer['ssd'])}, {answer['ssd']['blocks']:,} blocks"),
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
        ("prefetch", _prefetch(answer.get("prefetch") or {})),
        ("layout", _layout(answer.get("layout") or {}, reads.get("bytes_pushed", 0))),
        ("integrity", f"{answer['integrity']['mismatches']:,} mismatches"),
    ]
    if origin.get("available") is False:
        rows.append(
            ("", f"THE ORIGIN IS AWAY: {origin.get('last_error')}; cached files are served")
        )
    if answer.get("keeper_alive") is False:
        rows.append(("", "THE KEEPER IS GONE: umount and mount again at the next occasion"))
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


@cli.command("probe")
@click.argument("cache_dir")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def probe_device(cache_dir: str, as_json: bool) -> None:
    """Measure the disk of CACHE_DIR, and keep the result there for `--layout auto`.

    \b
    fusecache probe /var/cache/fusecache
    fusecache probe /ssd/cache --json | jq .mixed_bytes_per_s

    Takes some 3 s and, meanwhile, room for 256 MiB. Best while nobody uses the disk: a mount that
    needs the figures makes them itself, but while a training reads. They are valid for 30 days.
    Samples are worth reordering where the gain is well above 1; docs/TUNING.md says more.
    """
    directory = pathlib.Path(cache_dir)
    if not directory.is_dir():
        raise UserError(f"{cache_dir} is no directory: make it (mkdir -p), or mount with it first")
    found = probe.measure(directory)
    if as_json:
        _say(json.dumps(found.as_map(), indent=2))
        return
    command.show(_device_table(found), "", _samples_table(found))


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
@_settings_flags
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
    target = control_client.find(_place(path, settings))
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
    wanted = config.check_places(config.build(settings))
    if not fake:
        _mount(wanted)


# ---- entry ---------------------------------------------------------------------------------------


def main() -> NoReturn:
    command.run("fusecache", lambda: cli(prog_name="fusecache", standalone_mode=False))


if __name__ == "__main__":
    main()
