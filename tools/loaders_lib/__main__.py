"""tools/loaders: runs each stack below `hintsd run`, beside a hintsd that notes what it is told;
compares that with the files that were opened; writes the table of docs/LOADERS.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import click

from hintsd.autohint import environment
from hintsd.client import summary
from tests.support.fake_hintsd import FakeHintsd, Told
from tools.loaders_lib.judging import Announced, Judged, judge
from tools.loaders_lib.stacks import ROOT, STACKS, Stack

FILES: Final = 30
LIMIT_S: Final = 300
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


def run_stack(name: str, stack: Stack, python: str) -> Judged:
    """In processes of their own, with files and a hintsd of their own. Failed."""
    with tempfile.TemporaryDirectory(prefix="fusecache-loaders-") as work:
        root, log = Path(work, "set"), Path(work, "log")
        names = make_dataset(root)
        log.mkdir()
        script = [str(ROOT / "tools/loaders_lib/stacks.py"), name, str(root), str(log)]
        fake = FakeHintsd(Path(work, "sock"))
        fake.start()
        try:
            done = subprocess.run(
                [python, *_launch(stack), *script],
                env=_environment(fake, Path(work, "cache"), stack),
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"did not end within {LIMIT_S} s") from None
        finally:
            fake.stop()
        if done.returncode:
            raise Failed((done.stderr.strip().splitlines() or ["no output"])[-1])
        read = {int(path.stem): json.loads(path.read_text()) for path in log.iterdir()}
        by_process: dict[int, list[Announced]] = {}
        for told in fake.jobs:
            by_process.setdefault(told.pid, []).append(announced(told, names, str(root)))
        return judge(read, by_process, done.stderr, stack.early)


def _launch(stack: Stack) -> list[str]:
    if stack.processes == 1:
        return []
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={stack.processes}"]


def _environment(fake: FakeHintsd, cache: Path, stack: Stack) -> dict[str, str]:
    cache.mkdir()
    told = {
        **{"HF_HUB_OFFLINE": "1", "HF_HOME": str(cache), "OMP_NUM_THREADS": "1"},
        **{"LOADERS_SOCKET": str(fake.path), "LOADERS_CACHE": str(cache)},
        **{"PYTHONPATH": str(ROOT / "client")},
        **{summary.COPY_SAMPLERS: "1" if stack.copy_samplers else "0"},
    }
    environ = {**os.environ, **told}
    return environment(environ) if stack.is_wrapped else environ


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
        said = "exact, all epochs ahead" if judged.is_foreseen else "exact, as each epoch begins"
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
        except Failed as error:
            failed.append(name)
            click.echo(f"{name}: FAILED: {error}")
            continue
        rows.append(row(stack, judged, versions[stack.library]))
        if judged.verdict != stack.expected:
            failed.append(name)
        click.echo(f"{name}: {judged.verdict}{judged.why and ': '}{judged.why}")
    if failed:
        raise click.ClickException(f"not as expected: {', '.join(failed)}")
    if write:
        PAGE.write_text(with_table(PAGE.read_text(), rows))


if __name__ == "__main__":
    main()
