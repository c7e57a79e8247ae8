"""tools/loaders: runs each stack below `hintsd run`, beside a hintsd that notes what it is told;
compares that with the files that were opened, and with what `hintsd explain` says of the stack;
writes the table of docs/LOADERS.md."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from hintsd.autohint import environment
from hintsd.client import summary
from tests.support.fake_hintsd import FakeHintsd, Told
from tools.loaders_lib.judging import WOULD, Announced, Explained, Judged, differs, judge
from tools.loaders_lib.stacks import ROOT, STACKS, Stack

FILES: Final = 30
LIMIT_S: Final = 300
LAST_S: Final = 30
PAGE: Final = ROOT / "docs/LOADERS.md"
BEGIN: Final = "<!-- tools/loaders: begin -->"
END: Final = "<!-- tools/loaders: end -->"


def make_dataset(root: Path) -> list[str]:
    """Images in two classes; their names, in ImageFolder's order."""
    from PIL import Image

    names = [f"class{number % 2}/{number:02}.png" for number in range(FILES)]
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(root / name)
    return sorted(names)


def announced(told: Told, names: Sequence[str], root: str) -> Announced:
    """Of a job: each epoch's order, as names below the dataset."""
    listed = told.job["files"].get("paths")
    if listed is not None:
        above = os.path.join(os.fsdecode(told.job["path"]), "")
        names = [os.path.relpath(above + os.fsdecode(one), root) for one in listed.split(b"\0")]
    epochs = {epoch: [names[index] for index in sequence] for epoch, sequence in told.sequences()}
    return Announced(epochs, told.job["spec"] is not None)


class Failed(Exception):
    """The stack itself, or its library; one line."""


@dataclass
class Place:
    """A dataset and a hintsd for one run of a stack."""

    work: Path
    fake: FakeHintsd
    names: list[str]

    @property
    def root(self) -> str:
        return str(self.work / "set")

    @property
    def log(self) -> Path:
        return self.work / "log"


@contextlib.contextmanager
def _place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="fusecache-loaders-") as name:
        work = Path(name)
        (work / "log").mkdir()
        (work / "cache").mkdir()
        fake = FakeHintsd(work / "sock")
        fake.start()
        try:
            yield Place(work, fake, make_dataset(work / "set"))
        finally:
            fake.stop()


def run_stack(name: str, stack: Stack, python: str) -> Judged:
    """In processes of their own, with files and a hintsd of their own. Failed."""
    with _place() as place:
        environ = _environment(place, stack, ROOT / "client")
        command = _command(name, stack, python, place)
        done = _run(command, environment(environ) if stack.is_wrapped else environ)
        if done.returncode:
            raise Failed((done.stderr.strip().splitlines() or ["no output"])[-1])
        told = {int(path.stem): json.loads(path.read_text()) for path in place.log.iterdir()}
    read = {pid: of_process[0] for pid, of_process in told.items()}
    by_process = {
        pid: [Announced(dict(enumerate(asked)), is_foreseen=False)]
        for pid, (_, asked) in told.items()
        if asked
    }
    for job in place.fake.jobs:
        by_process.setdefault(job.pid, []).append(announced(job, place.names, place.root))
    return judge(read, by_process, done.stderr, stack.early)


def explain_stack(name: str, stack: Stack, python: str) -> Explained:
    """What `hintsd explain` says of it. Failed."""
    with _place() as place:
        options = ["--copy-samplers"] if stack.copy_samplers else []
        words = [*options, "--", *_command(name, stack, python, place)]
        explain = [sys.executable, "-m", "hintsd", "explain", *words]
        done = _run(explain, _environment(place, stack, ROOT))
        if place.fake.jobs or any(place.log.iterdir()):
            raise Failed("explain: it was trained")
    lines = [line for line in done.stdout.splitlines() if WOULD.search(line)]
    return Explained(done.returncode, lines or done.stderr.splitlines()[-1:])


def _run(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Failed: it did not end."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ, text=True, stdout=pipe, stderr=pipe) as process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its processes then
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=LAST_S)
            process.kill()
            raise Failed(f"did not end within {LIMIT_S} s") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _command(name: str, stack: Stack, python: str, place: Place) -> list[str]:
    script = [str(ROOT / "tools/loaders_lib/stacks.py"), name, place.root, str(place.log)]
    return [python, *_launch(stack), *script]


def _launch(stack: Stack) -> list[str]:
    if stack.processes == 1:
        return []
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={stack.processes}"]


def _environment(place: Place, stack: Stack, hintsd: Path) -> dict[str, str]:
    cache = str(place.work / "cache")
    told = {
        **{"HF_HUB_OFFLINE": "1", "HF_HOME": cache, "OMP_NUM_THREADS": "1"},
        **{"LOADERS_SOCKET": str(place.fake.path), "LOADERS_CACHE": cache},
        **{"PYTHONPATH": str(hintsd)},
        **{summary.COPY_SAMPLERS: "1" if stack.copy_samplers else "0"},
    }
    return {**os.environ, **told}


def _versions(python: str, names: Iterable[str]) -> dict[str, str]:
    libraries = sorted({STACKS[name].library for name in names})
    code = f"import importlib.metadata as m; print(*[m.version(one) for one in {libraries}])"
    told = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return {
        library: version.split("+")[0]
        for library, version in zip(libraries, told.stdout.split(), strict=True)
    }


def row(stack: Stack, judged: Judged, version: str) -> str:
    """Of the table."""
    if judged.verdict == "exact":
        said = f"exact, {judged.when}"
        if stack.early:
            said += f"; opened up to {stack.early} files early"
    else:
        said = f"**{judged.verdict}**: {judged.why}"
    return f"| {stack.library} {version} | {stack.what} | {said} |"


def with_table(page: str, rows: Sequence[str]) -> str:
    """The page, the table between its markers replaced. ValueError: it has no markers."""
    before, begun, rest = page.partition(BEGIN)
    _, ended, behind = rest.partition(END)
    if not begun or not ended:
        raise ValueError("no markers")
    lines = ["| library | stack | its order |", "| --- | --- | --- |", *rows]
    return "\n".join([before + begun, *lines, ended + behind])


@click.command()
@click.option("--python", default=sys.executable, help="Of an environment with the libraries.")
@click.option("--write", is_flag=True, help="Write the table into docs/LOADERS.md.")
@click.argument("names", nargs=-1)
def main(python: str, write: bool, names: tuple[str, ...]) -> None:
    """Try the loader stacks NAMES (all of them)."""
    unknown = [name for name in names if name not in STACKS]
    if unknown:
        raise click.UsageError(f"no stack {unknown[0]}: {', '.join(STACKS)}")
    if write and names:
        raise click.UsageError("--write needs all stacks: give no names")
    names = names or tuple(STACKS)
    versions, rows, failed = _versions(python, names), list[str](), list[str]()
    for name in names:
        stack = STACKS[name]
        try:
            judged = run_stack(name, stack, python)
            explained = explain_stack(name, stack, python) if stack.is_wrapped else None
        except Failed as error:
            failed.append(name)
            click.echo(f"{name}: FAILED: {error}")
            continue
        rows.append(row(stack, judged, versions[stack.library]))
        if judged.verdict != stack.expected:
            failed.append(name)
        click.echo(f"{name}: {judged.verdict}{judged.why and ': '}{judged.why}")
        if explained is not None and (otherwise := differs(explained, judged)):
            failed.append(f"explain {name}")
            click.echo(f"explain {name}: {otherwise}: {explained}")
    if failed:
        raise click.ClickException(f"not as expected: {', '.join(failed)}")
    if write:
        PAGE.write_text(with_table(PAGE.read_text(), rows))


if __name__ == "__main__":
    main()
