"""tools/loaders: runs each stack below `hintsd run`, beside a hintsd that notes what it is told;
compares that with the files that were opened; writes the table of docs/LOADERS.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from hintsd.autohint import environment
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


def run_stack(name: str, stack: Stack, python: str) -> Judged:
    """In processes of their own, with files and hintsd of their own."""
    with tempfile.TemporaryDirectory(prefix="fusecache-loaders-") as work:
        root, log = Path(work, "set"), Path(work, "log")
        names = make_dataset(root)
        log.mkdir()
        fake = FakeHintsd(Path(work, "sock"))
        fake.start()
        try:
            done = subprocess.run(
                [python, *_launch(stack), str(ROOT / "tools/loaders_lib/stacks.py"), name]
                + [str(root), str(log)],
                env=_environment(fake, Path(work, "cache"), stack),
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        finally:
            fake.stop()
        if done.returncode:
            raise click.ClickException(f"{name} failed:\n{done.stderr}")
        read = {int(path.stem): json.loads(path.read_text()) for path in log.iterdir()}
        by_process: dict[int, list[Announced]] = {}
        for told in fake.jobs:
            by_process.setdefault(told.pid, []).append(announced(told, names, str(root)))
        return judge(read, by_process, done.stderr)


def _launch(stack: Stack) -> list[str]:
    if stack.processes == 1:
        return []
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={stack.processes}"]


def _environment(fake: FakeHintsd, cache: Path, stack: Stack) -> dict[str, str]:
    cache.mkdir()
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cache)}
    told = {"LOADERS_SOCKET": str(fake.path), "LOADERS_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    client = {"PYTHONPATH": str(ROOT / "client")}
    return environment({**os.environ, **offline, **told, **client})


def _version(python: str, distribution: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    told = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return told.stdout.strip().split("+")[0]


@click.command()
@click.option("--python", default=sys.executable, help="Of the environment with the libraries.")
@click.option("--write", is_flag=True)
@click.argument("names", nargs=-1)
def main(python: str, write: bool, names: tuple[str, ...]) -> None:
    failed = []
    for name in names or STACKS:
        stack = STACKS[name]
        try:
            judged = run_stack(name, stack, python)
        except click.ClickException as error:
            click.echo(f"{name}: {error.message[-1500:]}")
            continue
        mark = "" if judged.verdict == stack.expected else f"   EXPECTED {stack.expected}"
        click.echo(
            f"{name}: {judged.verdict} {'all' if judged.is_foreseen else ''} {judged.why}{mark}"
        )


if __name__ == "__main__":
    main()
