"""The figures that the documents state, beside those of a run.

A table of a document is found by a line above it. A cell is the numbers in it: "7.5 + 92.5",
"2,135 · 0 GB", "7.27 (0.995)", none for "refused".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

NUMBER: Final = re.compile(r"\d[\d,]*(?:\.\d+)?")

Cells = Mapping[tuple[str, str], Sequence[float]]
"""The numbers by (first cell of the row, title of the column)."""


@dataclass(frozen=True, slots=True)
class Stated:
    """A table of a document, and what a run has found for it.

    line: how a line above the table begins, with no other table between. found: what is not in it
    is not compared. Numbers agree that differ by at most `absolute`, or by the part `relative`.
    """

    document: str
    line: str
    found: Cells
    absolute: float
    relative: float

    def differences(self, text: str) -> tuple[int, list[str]]:
        """How many cells of the table were compared, and a line for each that differs."""
        cells = {key: cell for key, cell in table(text, self.line).items() if key in self.found}
        lines = []
        for (row, column), cell in cells.items():
            stated, found = numbers(cell), self.found[row, column]
            if len(stated) != len(found) or not all(map(self._agree, stated, found)):
                here = ", ".join(f"{value:,.4g}" for value in found) or "refused"
                lines.append(
                    f"{self.document}, {self.line!r}, {row}, {column}: {cell}; here {here}"
                )
        if not cells:
            lines.append(f"{self.document} has no table after {self.line!r} of these figures")
        return len(cells), lines

    def _agree(self, stated: float, found: float) -> bool:
        return abs(stated - found) <= max(self.absolute, self.relative * stated)


def table(text: str, line: str) -> dict[tuple[str, str], str]:
    """The cells of the first table after a line that begins so; none if there is no such line. Of
    columns of one title, the first.
    """
    _, _, after = f"\n{text}".partition(f"\n{line}")
    rows: list[list[str]] = []
    for each in after.splitlines():
        if each.startswith("|"):
            rows.append([cell.strip().strip("`") for cell in each.strip("|").split("|")])
        elif rows:
            break
    found: dict[tuple[str, str], str] = {}
    for row in rows[2:]:
        for title, cell in zip(rows[0][1:], row[1:], strict=True):
            found.setdefault((row[0], title), cell)
    return found


def numbers(cell: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(cell)]
