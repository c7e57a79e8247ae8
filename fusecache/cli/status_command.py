"""`fusecache status` and `fusecache list`: what a mount did and holds; which mounts there are."""

from __future__ import annotations

from typing import Any, Final

import click
from rich.table import Table

from fusecache.base import command, mounts, terminal
from fusecache.base.command import PATH, printable
from fusecache.base.units import format_bytes, format_count, format_duration
from fusecache.base.wire import Packing
from fusecache.control import control_client, hintsd_client
from fusecache.observe import summary
from fusecache.observe.asking import log_of, look

# What `packing` in a mount's state means (docs/LOG.md); 0 is nothing.
_PACKING: Final = {
    Packing.OPEN: "a log is being written",
    Packing.NO_ROOM: "NO LOG: no room on SSD",
    Packing.NO_CREDIT: "NO LOG: too little room on SSD",
    Packing.WRITE_FAILED: "A WRITE TO THE LOG FAILED: see the log file",
    Packing.DRAINING: "a log is being written, as far as there is room on SSD",
}
_NO_JOB: Final = "no job has hints now"
_WITHOUT: Final = "mounted without hints (--hintsd none)"
_NO_HINTSD: Final = "no hintsd is connected (hintsd serve starts one)"
# What is reserved on SSD and not written is shown from this share of --ssd on.
_RESERVED_SHOWN: Final = 0.01
_PINS_SHOWN: Final = 8


@click.command()
@click.argument("path", required=False, type=PATH)
@command.json_flag
def status(path: str | None, as_json: bool) -> None:
    """Show what the mount at PATH did and holds. Of root's with --allow-other everybody may.

    \b
    fusecache status                                  all mounts of this machine, in a line or two
    fusecache status /data/imagenet
    fusecache status /data/imagenet --json | jq .reads

    Without PATH a mount that is dead, or does not answer within 3 s, is shown with the command that
    heals it; and READs hit, which this host could answer by itself.

    \b
    dataset   the files of all directories that were listed since it was mounted, or by the mount
              before, and how much of them is on SSD
    RAM tier  files of the mount in the page cache, of --ram, as far as the mount knows: the kernel
              may have let go of some
    SSD tier  what is stored, of --ssd; reserved: with room on the disk for segments that are being
              written, which --ssd counts, and which is given back at their end; blocks: of 4 MiB at
              most, a small file is one; evicted: files that went one by one, for hints or `evict`,
              since the server began; a line for each of several cache directories, or one that is
              out of service
    pins      globs of `fusecache pin`, and the files known so far that they name, cached or not
    reads     requests that reached the mount: not those that the page cache answered
    origin    what was read there, by readers, hints and `warm`
    pool      what other hosts had read of the dataset, and this one needed not (docs/POOL.md). A
              server that is left alone did not answer three times; it is tried again by itself
    manifest  what `fusecache digest` wrote, if one is used; and what was on SSD under another path,
              so that it was not read at the origin
    service   the host's cache service, if one is used: files that were found there, and that this
              mount has put there (docs/CACHED.md)
    prefetch  what hints want now (to stage: from SSD into RAM; to fetch: from the origin), and
              what they brought. Reads overtook it: they came for a file that was on its way into
              RAM, or that the kernel had let go of, since the server began. What `hintsd status`
              calls late is more: what a job was to find in RAM, though its turn had not come
    layout    how hinted samples lie on SSD, and why; last: of the job that has ended last
              (`hintsd status --help`, docs/TUNING.md)
    integrity
              bad blocks that readers or `verify` met; they are fetched again on use
    counted   since when, if the server was restarted
    cache faults
              what was wrong with the cache directory or its disk; readers got the origin's bytes
    """
    if path is None:
        _show_all(as_json)
        return
    target = control_client.find(path)
    answer = control_client.status(target)
    answer["keeper_stopped"] = bool(control_client.stopped(target))
    told = hintsd_client.told(target)
    if isinstance(answer.get("layout"), dict):
        answer["layout"] |= told.layout
    if told.absent:
        answer["no_hintsd_at"] = told.absent
    if told.is_unhinted:
        answer["without_hints"] = True
    if as_json:
        command.say_json(answer)
    else:
        terminal.console().print(_status_table(answer, log_of(target)))


def _show_all(as_json: bool) -> None:
    host = look()
    if as_json:
        command.say_json(summary.as_json(host))
    elif host.mounts:
        terminal.console().print(summary.table(host))
    else:
        command.say("no mounts")


def _of(part: dict[str, Any]) -> str:
    bytes_, limit = part["bytes"], part["limit_bytes"]
    share = f" ({bytes_ / limit:.0%})" if limit else ""
    return f"{format_bytes(bytes_)} of {format_bytes(limit)}{share}"


def _ssd(answer: dict[str, Any]) -> str:
    part, packed = answer["ssd"], (answer.get("layout") or {}).get("log_files", 0)
    used, limit = _of(part), part["limit_bytes"]
    if limit < part.get("given_bytes", limit):
        used += " (another mount on the cache directory was given no more, the smallest wins)"
    reserved = part.get("reserved_bytes", 0)
    if reserved - part["bytes"] > limit * _RESERVED_SHOWN:
        used += f", {format_bytes(reserved)} reserved"
    if evicted := part.get("evicted_files", 0):
        used += f", {format_count(evicted, 'file')} evicted file by file"
    if not packed:
        return f"{used}, {part['blocks']:,} blocks"
    return (
        f"{used}, {format_count(packed, 'file')} in the log, "
        f"{part['blocks']:,} blocks elsewhere (of files that have moved, too: fusecache gc tells)"
    )


def _unhinted(answer: dict[str, Any]) -> str:
    """Why a mount gets no hints now."""
    if answer.get("without_hints"):
        return _WITHOUT
    return _NO_HINTSD if answer.get("no_hintsd_at") else _NO_JOB


def _prefetch(part: dict[str, Any], staged_bytes: int, unhinted: str, further: str) -> str:
    done = (
        f"{part.get('files', 0):,} files, {format_bytes(part.get('bytes', 0))} from {further}; "
        f"{format_bytes(staged_bytes)} from SSD into RAM"
    )
    if not part.get("connected"):
        return f"{unhinted}; until now {done}"
    return (
        f"{part['queued_stage']:,} to stage and {part['queued_fetch']:,} to fetch, "
        f"{part['in_flight']:,} of {part['depth']:,} in flight; "
        f"{done}; {part.get('overtaking_reads', 0):,} reads overtook it"
    )


def _layout(answer: dict[str, Any]) -> str:
    part = answer.get("layout") or {}
    setting, chosen = part.get("setting", "static"), part.get("chosen")
    parts = [f"--layout {setting}"]
    if chosen:
        why = f": {part['why']}" if part["why"] != f"--layout {setting}" else ""
        parts = [f"{chosen} (--layout {setting}, {part['job']}){why}"]
    elif setting != "static" and not (answer.get("prefetch") or {}).get("connected"):
        parts.append(f"nothing is moved: {_unhinted(answer)}")
    if last := part.get("last"):
        parts.append(f"last: {last['chosen']} ({last['job']}): {last['why']}")
    if part.get("probe_fault"):
        parts.append(f"STATIC, SINCE {part['probe_fault']}")
    packing, samples = part.get("packing", 0), part.get("log_samples", 0)
    if packing == Packing.OPEN and samples:
        share = part.get("log_moved_samples", 0) / samples
        parts.append(f"the next epoch's log is being written, {share:.0%} is there")
    elif packing in _PACKING:
        parts.append(_PACKING[packing])
    if needed_bytes := part.get("ssd_needed_bytes", 0):
        parts[-1] += f", --ssd {-(-needed_bytes >> 20)}M would be needed"
    written, served = part.get("log_written_bytes", 0), answer["reads"].get("bytes_served", 0)
    if written:
        logs = part.get("logs", 0)
        parts.append(f"{format_bytes(written)} written in {format_count(logs, 'log')}")
        if served:
            parts[-1] += f", {written / served:.2f} bytes for each byte served"
    return "; ".join(parts)


def _pins(part: dict[str, Any]) -> list[tuple[str, str]]:
    """Their row, if there are any."""
    globs, count = part.get("globs") or [], part.get("files", 0)
    if not globs and not count:
        return []
    more = "" if part.get("known") else ", looking for more"
    shown = [*globs[:_PINS_SHOWN], "…"] if len(globs) > _PINS_SHOWN else globs
    files = f"{format_count(count, 'file')}, {format_bytes(part.get('bytes', 0))}{more}"
    return [("pins", f"{files}: {' '.join(shown)}" if shown else files)]


def _directories(parts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """A line for each of several cache directories, or one that is not used."""
    if len(parts) < 2 and not any(part["why_out"] for part in parts):
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


def _pool(part: dict[str, Any] | None) -> list[tuple[str, str]]:
    if not part:
        return []
    servers = part["servers"]
    away = summary.servers_away(part)
    line = (
        f"{part['files']:,} files, {format_bytes(part['bytes'])} that other hosts had read; "
        f"{format_bytes(part['bytes_written'])} written for them, "
        f"{format_count(len(servers), 'server')}"
    )
    rows = [("pool", line)]
    if part["fault"] and not away:
        rows.append(("", f"THE POOL: {part['fault']}"))
    for server, why in away:
        rows.append(("", f"{server['host']}:{server['port']} IS LEFT ALONE: {why}"))
    return rows


def _manifest(part: dict[str, Any]) -> list[tuple[str, str]]:
    """A line, where there is one."""
    if not part.get("files"):
        return []
    linked = f"{format_count(part['linked_files'], 'file')}, {format_bytes(part['linked_bytes'])}"
    listed = format_count(part["files"], "file")
    return [("manifest", f"{listed} listed; found on SSD by digest, not read there: {linked}")]


def _service(part: dict[str, Any]) -> list[tuple[str, str]]:
    """A line, where the mount has one."""
    if not part.get("socket"):
        return []
    if not part.get("used"):
        return [("service", str(part.get("why_not")))]
    put = f"{format_count(part['put_files'], 'file')}, {format_bytes(part['put_bytes'])}"
    found = format_count(part["found_files"], "file")
    return [("service", f"{part['socket']}: {found} found; {put}, put there")]


def _full_disk(part: dict[str, Any]) -> str | None:
    """That others have taken the room on the disk, if they have."""
    free_bytes = part.get("full_disk_bytes")
    if free_bytes is None:
        return None
    kept = f", of which --keep-free leaves {format_bytes(part['keep_free_bytes'])} to others"
    return (
        f"THE DISK OF THE CACHE IS FULL: {format_bytes(free_bytes)} free"
        f"{kept if part['keep_free_bytes'] else ''}; the SSD tier gets no larger"
    )


def _dataset(part: Any) -> list[tuple[str, str]]:
    cached = summary.on_ssd(part)
    return [("dataset", f"{format_count(part['files'], 'file')}, {cached}")] if cached else []


def _status_table(answer: dict[str, Any], log: str) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    reads, origin = answer["reads"], answer["origin"]
    mode = "zero-open" if answer["zero_open"] else "ordinary open (slower)"
    restarts = answer["restarts"]
    further = "the origin or the pool" if answer.get("pool") else "the origin"
    rows = [
        ("mount point", answer["mountpoint"]),
        ("source", answer["source"]),
        (
            "up",
            f"{format_duration(answer['uptime_s'])}, {mode}, "
            f"server restarted {format_count(restarts, 'time')}",
        ),
        ("processes", f"keeper {answer['keeper_pid']}, server {answer['server_pid']}"),
        *_dataset(answer.get("dataset")),
        ("RAM tier", _of(answer["ram"]) + " at most"),
        ("SSD tier", _ssd(answer)),
        *_directories(answer["ssd"].get("directories") or []),
        *_pins(answer.get("pins") or {}),
        (
            "reads",
            f"{reads['requests']:,} requests, {reads['from_ssd']:,} from SSD, "
            f"{reads['from_origin']:,} from {further}; page cache hits are not seen",
        ),
        (
            "origin",
            f"{origin['files']:,} files, {format_bytes(origin['bytes'])}, "
            f"{origin['errors']:,} errors",
        ),
        *_pool(answer.get("pool")),
        *_manifest(answer.get("manifest") or {}),
        *_service(answer.get("service") or {}),
        (
            "prefetch",
            _prefetch(
                answer.get("prefetch") or {},
                reads.get("bytes_staged", 0),
                _unhinted(answer),
                further,
            ),
        ),
        ("layout", _layout(answer)),
        ("integrity", f"{answer['integrity']['mismatches']:,} mismatches"),
    ]
    if cache_dir := answer.get("cache_dir"):
        rows.append(("cache", cache_dir))
    if log:
        rows.append(("log file", log))
    if restarts:
        since = format_duration(answer.get("counted_s", 0))
        rows.append(("counted", f"reads to integrity: since the last restart, {since} ago"))
    if origin.get("available") is False:
        rows.append(
            ("", f"THE ORIGIN IS AWAY: {origin.get('last_error')}; cached files are served")
        )
    if answer.get("keeper_alive") is False:
        rows.append(("", "THE KEEPER IS GONE: umount and mount again at the next occasion"))
    if answer.get("keeper_stopped"):
        pid = answer["keeper_pid"]
        rows.append(("", f"THE KEEPER IS STOPPED: kill -CONT {pid}; it replaces no server now"))
    if line := _full_disk(answer["ssd"]):
        rows.append(("", line))
    if path := answer.get("no_hintsd_at"):
        rows.append(("", f"NO HINTSD LISTENS at {path}: hints have no effect until one does"))
    faults = answer["integrity"].get("faults") or {}
    if faults:
        rows.append(("cache faults", ", ".join(f"{name}: {n:,}" for name, n in faults.items())))
    for name, value in rows:
        table.add_row(name, printable(value))
    return table


@click.command("list")
@command.json_flag
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
                "keeper_gone": bool(record) and control_client.is_gone(target),
            }
        )
    if as_json:
        command.say_json(found)
        return
    table = Table(box=None, pad_edge=False)
    for title in ("mount point", "source", "user", "keeper", "log"):
        table.add_column(title, overflow="fold")
    for row in found:
        pid = f"{row['keeper_pid']} (gone)" if row.pop("keeper_gone") else row["keeper_pid"]
        shown = (row | {"keeper_pid": pid}).values()
        table.add_row(*(printable("-" if value is None else value) for value in shown))
    if found:
        terminal.console().print(table)
    else:
        command.say("no mounts")
