"""The command `hintsd`: parses, asks the daemon, prints; `serve` is the daemon itself.

A mistake is one line on stderr and an exit code: fusecache's `command.run`.
INVARIANT: importing it is quick: trio, numpy and torch come with the commands that need them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NoReturn, TextIO

import click

from fusecache import __version__
from fusecache.base import command, logs, mounts, processes, trust, units
from fusecache.base.command import PATH, Commands
from fusecache.base.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_A_MOUNT,
    EXIT_OK,
    EXIT_USAGE,
    UserError,
)
from hintsd.cli.channel import Channel, channel_again, complain, open_channel
from hintsd.cli.running import (
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    explain_command,
    run_command,
)
from hintsd.cli.scores import read_scores, tell_scores
from hintsd.client.finding import SOCKET_VARIABLE
from hintsd.keeping import AUTO, NAMES

if TYPE_CHECKING:
    from hintsd.orders.spec import OrderSpec
    from hintsd.users.public import Others

STATUS_INTERVAL_S: Final = 1.0

EXIT_CODES: Final = f"""\b
Exit codes:
  {EXIT_OK}    done
  {EXIT_FAILED}    failed, or refused by the daemon
  {EXIT_USAGE}    a flag cannot be used
  {EXIT_NOT_A_MOUNT}    hint: the path is on no fusecache mount, or hints are off for it
  {EXIT_INTERRUPTED}  interrupted with Ctrl-C
  run: the command's own (128 + N: ended by signal N), or {EXIT_NOT_FOUND}: not found,
       {EXIT_NOT_EXECUTABLE}: not executable; {EXIT_FAILED}: --require, and not all is hinted
  explain: {EXIT_OK}: each DataLoader would be hinted, in-memory datasets aside; {EXIT_FAILED}:
       not each, or none was read and the command ended with {EXIT_OK}; else as run"""


class _Whole(click.IntRange):
    """A number of the command line."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number", param, ctx)
        number: int = super().convert(value, param, ctx)
        return number


def _parse_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else units.parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def _socket_flag(unless: str) -> Callable[[click.decorators.FC], click.decorators.FC]:
    return click.option(
        "--socket", "socket_path", type=PATH, metavar="PATH", help=f"The daemon's. [{unless}]"
    )


_server_socket_flag = _socket_flag("in the runtime directory")
_client_socket_flag = _socket_flag(f"{SOCKET_VARIABLE}, or in the runtime directory")


@click.group(
    cls=Commands,
    places={"lab": "hintsd.lab.command:lab", "simulate": "hintsd.simulator.command:simulate"},
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="hintsd")
def cli() -> None:
    """Tells fusecache what will be read next, so that it is there before it is read.

    \b
    hintsd run -- python train.py --data /data/imagenet    no code change
    hintsd hint /data/imagenet --seed 0 --epochs 90        any reader that follows torch's order
    hintsd status

    `fusecache mount` starts the daemon. Each command has its own --help.
    """


# ---- serve ---------------------------------------------------------------------------------------


@cli.command()
@_server_socket_flag
@click.option(
    "--ram",
    callback=_parse_size,
    metavar="SIZE",
    help="Budget of all mounts together. [each has its own]",
)
@click.option(
    "--keep",
    type=click.Choice(NAMES),
    default=AUTO,
    metavar="RULE",
    help="What stays in the cache: auto, or by the rule of a paper, to compare with: "
    f"{', '.join(name for name in NAMES if name != AUTO)}. [auto]",
)
@click.option("--until-unmounted", is_flag=True, help="End when you have no mount any more.")
@click.option(
    "--others",
    metavar="all|none|GROUP",
    help="Whose hints for root's mounts are taken, besides root's. [all; with --socket none]",
)
@click.option("--log-file", type=PATH, metavar="FILE", help="[stderr]")
@click.option("--log-level", type=click.Choice(logs.LEVELS), default="info", show_default=True)
@click.option("--log-format", type=click.Choice(logs.FORMATS), default="text", show_default=True)
def serve(
    socket_path: str | None,
    ram: int | None,
    keep: str,
    until_unmounted: bool,
    others: str | None,
    log_file: str | None,
    log_level: str,
    log_format: str,
) -> None:
    """Be the daemon, in the foreground. SIGTERM ends it; the jobs are left to the next one.

    \b
    hintsd serve
    hintsd serve --socket ~/hints/sock --log-file hintsd.log       ~/hints exists, mode 0700
    hintsd serve --others gpuusers                                 hints of this group's users, too

    Of root's, other users have what their own rights allow: hints for directories that they may
    list, and jobs that nobody else sees or ends (SECURITY.md).
    """
    from hintsd.daemon import server

    served = _others(others, socket_path)
    if socket_path is None:
        mounts.make_runtime_base()
        socket_path = mounts.hintsd_socket(os.getuid())
    try:
        stream = _open_log(os.path.abspath(log_file)) if log_file else None
    except OSError as error:
        raise server.CannotServe(f"cannot write the log {log_file}: {error.strerror}") from None
    logs.begin(log_level, log_format, stream=stream)
    server.serve(
        os.path.abspath(socket_path),
        ram_bytes=ram,
        keep=keep,
        until_unmounted=until_unmounted,
        others=served,
        ready=_ready,
    )


def _others(given: str | None, socket_path: str | None) -> Others | None:
    """Who is served besides root; at a socket of one's own nobody, unless it was said."""
    from hintsd.users import public

    usual = mounts.hintsd_socket(0)
    default = public.EVERYONE if socket_path in (None, usual) else public.NOBODY
    if os.geteuid() != 0:
        if given not in (None, public.NOBODY):
            raise click.UsageError("--others: only root's hintsd can serve other users")
        return None
    try:
        return public.parse(default if given is None else given)
    except ValueError as error:
        raise click.UsageError(f"--others: {error}") from None


def _open_log(path: str) -> TextIO:
    """OSError; trust.Untrusted: it is another user's."""
    return open(path, "a", opener=lambda name, _: trust.open_log(name))


def _look_for_torch() -> None:
    """Say whether torch's orders can be computed. torch is not imported: TorchProcess does."""
    import logging
    from importlib import metadata, util

    from hintsd.orders.own_drawing import SAMPLES_MOST

    log = logging.getLogger(__name__)
    if util.find_spec("torch") is None:
        log.info(
            "orders of a WeightedRandomSampler, or of more than %d samples, are not known: there is"
            " no torch in %s",
            SAMPLES_MOST,
            sys.executable,
        )
        return
    version = "of an unknown version"
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = metadata.version("torch")
    log.info("torch %s draws weighted orders, and the longest, in a process of its own", version)


def _ready() -> None:
    threading.Thread(target=_look_for_torch, daemon=True).start()
    processes.tell_systemd("READY=1")


# ---- asking the daemon ---------------------------------------------------------------------------


def _default_socket() -> str:
    """What HINTSD_SOCKET says; or our own hintsd's; if there is none, root's, if that serves us."""
    if told := os.environ.get(SOCKET_VARIABLE):
        return told
    own = mounts.hintsd_socket(os.getuid())
    roots = mounts.public_socket(mounts.hintsd_socket(0))
    return roots if not os.path.lexists(own) and os.access(roots, os.W_OK) else own


# ---- hint ----------------------------------------------------------------------------------------


@cli.command()
@click.argument("path", type=PATH)
@click.option(
    "--sampler",
    type=click.Choice(["random", "distributed", "sequential"]),
    default="random",
    show_default=True,
    help="Of torch.utils.data.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Random, distributed: of the sampler's generator (torch counts negative ones from 2^64 "
    "down).",
)
@click.option("--epochs", type=_Whole(1), metavar="N", help="In all. [until it is ended]")
@click.option("--batch-size", type=_Whole(1), default=1, show_default=True, metavar="N")
@click.option("--world-size", type=_Whole(1), metavar="N", help="Distributed: needed.")
@click.option("--rank", type=_Whole(0), metavar="N", help="Distributed: needed.")
@click.option("--drop-last", is_flag=True, help="The sampler's if distributed, else the loader's.")
@click.option("--num-samples", type=_Whole(1), metavar="N", help="Random: an epoch. [the files]")
@click.option("--replacement", is_flag=True, help="Random: the sampler's.")
@click.option(
    "--loader-draws",
    type=click.Choice(["every", "first", "never"]),
    default="every",
    show_default=True,
    help="Random: the DataLoader has the sampler's generator, too (with persistent workers: "
    "first), or not (never).",
)
@click.option("--workers", type=_Whole(0), default=0, metavar="N", help="The loader's. [unknown]")
@click.option(
    "--prefetch-factor",
    type=_Whole(0),
    default=0,
    metavar="N",
    help="The loader's. [unknown]",
)
@click.option("--start-epoch", type=_Whole(0), default=0, metavar="N")
@click.option("--start-batch", type=_Whole(0), default=0, metavar="N")
@click.option(
    "--extensions", metavar="A,B", help="Of the files, in any case. [ImageFolder's: .jpg,.png,…]"
)
@click.option(
    "--importance",
    type=PATH,
    metavar="FILE",
    help="A .npy array: how often each sample is expected to be used in an epoch whose order is "
    "not known yet (their sum: an epoch's samples). [all alike]",
)
@click.option(
    "--pid",
    type=_Whole(1),
    metavar="PID",
    help="Of the reader, or of one that starts it: the hint is theirs, and ends with it.",
)
@click.option("--detach", is_flag=True, help="Return; see `hintsd status`, `hintsd end`.")
@click.option("--json", "as_json", is_flag=True, help="With --detach: its name, for machines.")
@_client_socket_flag
def hint(
    path: str,
    epochs: int | None,
    start_epoch: int,
    start_batch: int,
    workers: int,
    prefetch_factor: int,
    extensions: str | None,
    importance: str | None,
    pid: int | None,
    detach: bool,
    as_json: bool,
    socket_path: str | None,
    **order: Any,
) -> None:
    """Say how the dataset directory PATH (an ImageFolder) will be read, for a reader that cannot.

    Stays until all epochs are read; Ctrl-C ends the hint. With --detach and without --pid it stays
    until then or until `hintsd end NAME`, even while the directory is unmounted and mounted again.

    \b
    hintsd hint /data/imagenet --seed 0 --epochs 90 --batch-size 256
    hintsd hint /data/imagenet --sampler distributed --seed 0 --world-size 8 --rank 3 --pid 4711
    hintsd hint /data/imagenet --seed 0 --importance uses.npy
    """
    from hintsd.client.finding import place_of
    from hintsd.orders.extensions import IMG_EXTENSIONS
    from hintsd.orders.hint import PID_MOST, Files, Hint

    spec = _order(order)
    if as_json and not detach:
        raise click.UsageError("--json: with --detach only; hintsd status --json shows the others")
    if pid is not None and pid > PID_MOST:
        raise click.UsageError(f"--pid must lie in 1 … {PID_MOST}")
    if epochs is not None and start_epoch >= epochs:
        raise click.UsageError("--start-epoch must lie below --epochs")
    scores = None if importance is None else read_scores(importance)
    socket_path, path = _place(path, socket_path)
    told = extensions.lower().split(",") if extensions else IMG_EXTENSIONS
    hint = Hint(
        path=os.fsencode(path),
        files=Files([one.strip() for one in told]),
        spec=spec,
        epochs=epochs,
        start_epoch=start_epoch,
        start_batch=start_batch,
        workers=workers,
        prefetch_factor=prefetch_factor,
        name="hint",
        detached=detach,
        pid=pid,
    )
    message = {**hint.to_message(), "of_others": True, **place_of(path)}
    name = None
    while True:
        try:
            with channel_again(socket_path) if name else open_channel(socket_path) as channel:
                accepted = channel.ask("job", message | {"resume": name}, None)
                if scores is not None:
                    tell_scores(channel, scores)
                if name is None:
                    _announce(accepted, socket_path if detach else None, as_json)
                name = accepted["job"]
                if not detach:
                    _follow(channel, name)
                return
        except ConnectionError:
            if name is None:
                raise
            complain("the connection was lost; waiting for the next hintsd")


def _announce(accepted: dict[str, Any], end_at: str | None, as_json: bool) -> None:
    """`end_at`: the socket to end it at; None: it ends with this command."""
    for line in accepted["warnings"]:
        complain(f"warning: {line}")
    if as_json:
        told = ("job", "samples_per_epoch")
        command.say_json({name: accepted[name] for name in told})
        return
    line = f"{accepted['job']}: {accepted['samples_per_epoch']:,} samples an epoch"
    if end_at is not None:
        line += f"; to end it: hintsd end {accepted['job']}"
        if end_at != _default_socket():
            line += f" --socket {shlex.quote(end_at)}"
    click.echo(line)


def _order(flags: dict[str, Any]) -> OrderSpec:
    from hintsd.client.client import stock_order

    try:
        return stock_order(**flags)
    except ValueError as error:
        name, _, fault = str(error).partition(" ")
        raise click.UsageError(f"--{name.replace('_', '-')} {fault}") from None


def _place(path: str, socket_path: str | None) -> tuple[str, str]:
    """The daemon's socket, and the dataset's path without links."""
    from hintsd.client.finding import Unhinted, find_socket

    path = os.path.abspath(path)
    if socket_path is not None:
        return socket_path, mounts.resolve(path)
    try:
        return find_socket(path)
    except Unhinted as error:
        line = error.args[0].partition("; going on without")[0]
        raise UserError(line, EXIT_NOT_A_MOUNT) from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _follow(channel: Channel, name: str) -> None:
    """Show the job until it has ended; Ctrl-C ends it. ConnectionError: the daemon is gone."""
    from fusecache.base import terminal
    from hintsd.cli import report

    line = f"{name}: has ended"
    try:
        with terminal.display(lambda _: None) as show:
            while True:
                status = channel.ask("status", {})
                known = (job for job in (*status["jobs"], *status["ended"]) if job["name"] == name)
                job = next(known, None)
                if job is not None:
                    line = f"{name}: {report.job_line(job)}"
                if job is None or "why_ended" in job:
                    break
                show(line)
                time.sleep(STATUS_INTERVAL_S)
    except KeyboardInterrupt:
        channel.ask("close", {})
        raise
    click.echo(line)


# ---- status, end ---------------------------------------------------------------------------------


@cli.command()
@click.option(
    "--json", "as_json", is_flag=True, help="For machines. With --watch: one object a line."
)
@click.option(
    "--watch", is_flag=True, help="Again each second, until Ctrl-C; in a script one after another."
)
@_client_socket_flag
def status(as_json: bool, watch: bool, socket_path: str | None) -> None:
    """Show the mounts that have jobs, the jobs, and the last jobs that have ended.

    \b
    state     waiting: nothing of it was read yet, or its mount has gone; running; idle: nothing for
              a while (other jobs have its share of RAM until it is read); wrong: the reader follows
              another order (the reason stands below), nothing is planned; done: all epochs are
              read (or, of attach, left when all was in the workers' hands); ended: before that, or
              closed by a training that did not say how many epochs it has (after whole ones, too);
              refused: it never began
    epoch, sample
              the furthest position that is known of the reader, counted from 0. It lags: by a
              few batches, at an epoch's end by what the workers hold
    window    bytes that are kept in RAM ahead of the reader, or are on their way; a file that comes
              twice, in two epochs, is counted once
    not late  samples that the position has passed without a read that reached the mount: they
              were in RAM, or were not read (an epoch left early, time without a daemon)
    late      reads, by the job's own readers, of files in the window that were not in RAM (below,
              for each reason). queued: their turn had not come; fetching: under way; failed: the
              origin gave an error; evicted: they were in RAM, and the kernel let go of them (for
              want of memory, or because the host pages out what it believes cold: when they are
              more than 1% of the not late, a line below says which). fusecache status counts
              less: see there, prefetch. A line below tells of a RAM tier that the kernel does not
              let be used whole (--json: reclaimed, withheld_bytes)
    unplanned other reads that were not answered from RAM. not in window: files of the dataset
              elsewhere in the order, so the reader is not where it is thought to be, or there
              is another one; not in dataset: other files of the mount
    stall     what the reader will wait in the rest of its epoch, as predicted from what the origin
              and the SSD gave while they were busy; -: by that nothing, but reads were late in the
              last 5 s for other reasons (the processors, say)
    hits      (in a line below) of the samples that the mount's jobs have read since this one began,
              those that took no file from the origin; what others read there counts against them.
              Then what stays in RAM from epoch to epoch, and when scores were told; of iCACHE's
              sampler, how many samples its H-list has, and how many reads of the epoch stand for
              another sample's (--json: hits, kept_bytes, scores_age_s, h_list, substituted)
    share     (in a line below, where jobs of the mount read several datasets) what the cache has of
              this job's dataset, of how much it may have, and why. A job that waits for nothing
              leaves its share to those that wait (--json: cached_bytes, share_bytes, share_why)
    when      of the last jobs that have ended; why stands below
    layout    of its samples on SSD (fusecache mount --layout), and why. reorder: what is read
              is written anew in the next epoch's order; log: it lies in this epoch's order;
              static: where it was fetched to (fusecache status: how far, and what it wears)

    \b
    mount     RAM tier, SSD tier: used, of the limit; origin: bytes read from it now; depth:
              fetches at a time; queued: files to be put into RAM + files to be put on SSD
    """
    from fusecache.base import terminal
    from hintsd.cli import report

    with open_channel(socket_path or _default_socket()) as channel:
        answer = channel.ask("status", {})
        if not watch:
            if as_json:
                click.echo(json.dumps(answer, indent=2))
            else:
                terminal.show(report.tables(answer))
            return
        display = (
            contextlib.nullcontext(_print_line) if as_json else terminal.display(_print_and_part)
        )
        with contextlib.suppress(KeyboardInterrupt), display as show:
            while True:
                show(json.dumps(answer) if as_json else report.tables(answer))
                time.sleep(STATUS_INTERVAL_S)
                answer = channel.ask("status", {})


def _print_line(line: Any) -> None:
    click.echo(line)


def _print_and_part(shown: Any) -> None:
    from fusecache.base import terminal

    terminal.console().print(shown, "")
    sys.stdout.flush()


@cli.command()
@click.argument("job")
@_client_socket_flag
def end(job: str, socket_path: str | None) -> None:
    """End a job: `hintsd status` shows the names."""
    with open_channel(socket_path or _default_socket()) as channel:
        channel.ask("end", {"job": job})


# ---- run, explain --------------------------------------------------------------------------------

_COMMAND: Final = {"ignore_unknown_options": True, "allow_interspersed_args": False}

_words = click.argument(
    "words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND..."
)
_copy_samplers_flag = click.option(
    "--copy-samplers",
    is_flag=True,
    help="Read copies of samplers that are not known (docs/LIMITS.md, Samplers and datasets).",
)


@cli.command(context_settings=_COMMAND)
@click.option("--require", is_flag=True, help="A DataLoader that is not hinted is an error.")
@_copy_samplers_flag
@_words
def run(words: tuple[str, ...], require: bool, copy_samplers: bool) -> NoReturn:
    """Run COMMAND with its DataLoaders announcing their order by themselves.

    \b
    hintsd run -- python train.py --data /data/imagenet
    hintsd run --require -- torchrun --nproc-per-node 8 train.py

    The last line says how many were hinted, and why others were not. With --require the script gets
    an error (hintsd.client.summary.NotHinted) where it reads a DataLoader that is not hinted.
    """
    sys.exit(run_command(words, require=require, copy_samplers=copy_samplers))


@cli.command(context_settings=_COMMAND)
@_copy_samplers_flag
@_words
def explain(words: tuple[str, ...], copy_samplers: bool) -> NoReturn:
    """Say which DataLoaders of COMMAND `hintsd run` would hint, and why not the others.

    \b
    hintsd explain -- python train.py --data /data/imagenet

    COMMAND runs up to the first batch that a DataLoader is asked for: nothing is trained. A line
    for each DataLoader that is there by then follows on stdout. Those that are made later are not
    known. What hintsd itself would refuse is not asked.

    Each process ends at its own first batch, by os._exit(0): what is printed is flushed, but no
    `finally` and no `atexit` of the script runs, and whatever started it goes on as after a
    training. What reads no DataLoader runs to its end.
    """
    sys.exit(explain_command(words, copy_samplers=copy_samplers))


# ---- entry ---------------------------------------------------------------------------------------


def main() -> NoReturn:
    command.run("hintsd", lambda: cli(prog_name="hintsd", standalone_mode=False))


if __name__ == "__main__":
    main()
