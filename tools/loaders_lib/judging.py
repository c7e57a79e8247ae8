"""What was read against what was announced: the verdict on one run of a loader stack."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Verdict = Literal["exact", "no", "wrong"]
WOULD: Final = re.compile(r"would (?:not )?be hinted")
_WARNING = re.compile(r"Warning: hintsd: (.*)")


@dataclass(frozen=True)
class Announced:
    """By one job: its epochs' files, and whether all epochs were told at once."""

    epochs: dict[int, list[str]]
    is_foreseen: bool


@dataclass(frozen=True)
class Judged:
    """Of one stack."""

    verdict: Verdict
    why: str
    """Of `no`, what the script was told; of `wrong`, which epoch of which process."""
    is_foreseen: bool

    @property
    def when(self) -> str:
        """Its order is known, as `hintsd explain` says it, too."""
        return "all epochs ahead" if self.is_foreseen else "as each epoch begins"


@dataclass(frozen=True)
class Explained:
    """What `hintsd explain` said of one stack."""

    code: int
    lines: list[str]


def differs(explained: Explained, judged: Judged) -> str:
    """What it says otherwise than the run was; "": nothing."""
    lines = "\n".join(explained.lines)
    said = {*WOULD.findall(lines)}
    if judged.verdict == "exact":
        is_so = explained.code == 0 and said == {"would be hinted"}
        reasons = [judged.when]
    else:
        is_so = explained.code == 1 and "would not be hinted" in said
        reasons = judged.why.split("; ")
    if not is_so:
        return f"it exits with {explained.code}"
    missing = [reason for reason in reasons if reason not in lines]
    return f"it does not say: {missing[0]}" if missing else ""


def judge(
    read: dict[int, list[list[str]]],
    announced: dict[int, list[Announced]],
    stderr: str,
    early: int = 0,
) -> Judged:
    """By process. `exact`: each epoch that was read was announced, file by file; of one that began
    amid an epoch, the rest of it. `no`: nothing was announced, of any process. `early`: a file may
    be opened so many places before its turn."""
    jobs = [job for of_process in announced.values() for job in of_process]
    if not any(job.epochs for job in jobs):
        return Judged("no", "; ".join(dict.fromkeys(_reasons(stderr))), False)
    for pid, epochs in read.items():
        orders = [
            files for job in announced.get(pid, []) for _, files in sorted(job.epochs.items())
        ]
        for number, files in enumerate(epochs):
            found = [order for order in orders if _is_end(order, files, early)]
            if not found:
                begun = [order for order in orders if order[: len(files)] == files]
                if begun and number < len(epochs) - 1:
                    continue  # it was left early, and resumed
                return Judged("wrong", f"epoch {number} of process {pid}", False)
            orders.remove(found[0])
    return Judged("exact", "", all(job.is_foreseen for job in jobs))


def _is_end(order: list[str], files: list[str], early: int) -> bool:
    """Whether these are the last ones of that order, each so many places early at most."""
    end = order[-len(files) :]
    if not early:
        return files == end
    place = {file: number for number, file in enumerate(end)}
    return sorted(files) == sorted(end) and all(
        place[file] - number <= early for number, file in enumerate(files)
    )


def _reasons(stderr: str) -> list[str]:
    return [line.partition("; going on without")[0] for line in _WARNING.findall(stderr)]
