"""`fusecache digest`: a manifest of a directory (docs/FORMAT.md, Manifests)."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from fusecache.base import command
from fusecache.base.command import PATH
from fusecache.base.digest import ALGORITHMS, why_unusable
from fusecache.base.errors import EXIT_FAILED, ConfigError, UserError
from fusecache.base.units import format_bytes, format_count
from fusecache.cli.files import progress
from fusecache.config.settings import DIGESTS

if TYPE_CHECKING:
    from fusecache.manifest.digesting import Progress

# What needs numpy is imported late: `fusecache --help` need not wait for it.


@click.command()
@click.argument("directory", type=PATH, metavar="DIR")
@click.option(
    "-o", "output", type=PATH, metavar="FILE", help="The manifest. [DIR/.fusecache-manifest]"
)
@click.option(
    "--digest",
    "algorithm",
    default=DIGESTS[0],
    metavar="|".join(DIGESTS),
    help=f"That of the mounts that will use it. [{DIGESTS[0]}]",
)
@click.option(
    "--copy-of",
    metavar="MANIFEST",
    help="Believe it of files with the same path, size and mtime: DIR is a copy.",
)
@command.json_flag
def digest(
    directory: str, output: str | None, algorithm: str, copy_of: str | None, as_json: bool
) -> None:
    """Write a manifest of DIR: what its files consist of. Mounts of it take from their cache what
    came there under another path, and read nothing of that at the origin.

    \b
    fusecache digest /data/imagenet
    fusecache digest /data/imagenet -o /var/lib/imagenet.manifest    DIR stays as it is
    fusecache digest /data/copy --copy-of /data/imagenet/.fusecache-manifest

    All files are read, once. Interrupt it any time: running it again goes on where it was. Later
    only files that have changed (size, mtime, ctime) are read; links and special files are left
    out.

    A mount uses DIR/.fusecache-manifest, or what mount --manifest names, from its start (or
    `fusecache restart`) on, if it is yours or root's, and only you can write to it. An entry holds
    for the file as it was, down to its ctime. A copy has other ctimes (cp -a, rsync -a), so a
    manifest that was copied as well says nothing there. --copy-of makes one without reading: you
    say that files which agree in size and mtime are the same. It reads the others, and those that
    are neither yours nor root's.

    The exit code is 1 where a file could not be read: the manifest lists the others.
    """
    if why := why_unusable(algorithm):
        raise ConfigError(f"--digest: {why}")
    from fusecache.manifest import writing

    path = output if output is not None else writing.default_path(directory)
    try:
        root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"{directory}: {error.strerror}") from None
    try:
        found = _write(root, directory, path, ALGORITHMS[algorithm], copy_of, as_json)
    except OSError as error:
        if output is None and writing.is_read_only(error):
            line = f"{path}: {error.strerror}: name a file elsewhere with -o FILE"
            raise UserError(line) from None
        raise
    finally:
        os.close(root)
    for line in found.messages:
        command.complain("fusecache", line)
    if found.bad > len(found.messages):
        command.complain("fusecache", f"… and {found.bad - len(found.messages):,} more")
    if found.bad:
        sys.exit(EXIT_FAILED)


def _write(
    root: int, directory: str, path: str, algorithm: int, copy_of: str | None, as_json: bool
) -> Progress:
    from fusecache.manifest.digesting import Digesting
    from fusecache.manifest.listed import Listed
    from fusecache.manifest.writing import Output, copied

    believed = copied(copy_of, algorithm) if copy_of is not None else Listed()
    out = Output(path, algorithm)
    try:
        for line in out.notes:
            command.complain("fusecache", line)
        digesting = Digesting(root, out, algorithm, believed, _left_out(directory, out.files))
        with progress("digesting") as tell:

            def show(done: Progress) -> None:
                note = f"{done.files:,} files, {done.read_files:,} read, {done.bad:,} bad"
                tell(done.seen_bytes, None, note)

            digesting.run(show)
        why_unused = out.finish()
    finally:
        out.close()
    if why_unused:
        command.complain("fusecache", f"warning: {path}: {why_unused}")
    found = digesting.progress
    if as_json:
        facts = {
            "manifest": path,
            "files": found.files,
            "bytes": found.seen_bytes,
            "read_files": found.read_files,
            "read_bytes": found.read_bytes,
            "bad": found.bad,
            "digest": out.whole.digest.hex(),
        }
        command.say_json(facts)
        return found
    command.say(
        f"{path}: {format_count(found.files, 'file')}, {format_bytes(found.seen_bytes)}; read "
        f"{format_count(found.read_files, 'file')}, {format_bytes(found.read_bytes)}; "
        f"digest {out.whole.digest.hex()}"
    )
    return found


def _left_out(directory: str, files: list[str]) -> set[bytes]:
    """Which of these are below the directory, relative to it; and those of a manifest there."""
    from fusecache.manifest.format import NAME
    from fusecache.manifest.writing import NEW, PARTIAL

    root = os.path.realpath(directory)
    below = {os.path.relpath(file, root) for file in files}
    return {os.fsencode(name) for name in {*below, NAME, NAME + NEW, NAME + PARTIAL}}
