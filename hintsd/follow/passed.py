"""What the reader has left behind without opening it: a hint whose files are not all read (pure).

A wire that lies behind the reader, and whose file nobody has looked up, stands for samples that are
hinted and not read: a filter, a subset, or a cache of the trainer's own. Page's cumulative sum over
the wires that were looked up: one with such a gap before it adds 3, another one takes 1 away, never
below 0. At LEFT_OUT the plan does more than it is worth. So less than three quarters of what is
hinted has to be read: where it is a half, 64 wires tell. Where a tenth is not read the chance to
come so far is 1e-7 each time that the sum leaves 0; where one wire in twenty gets lost, 4e-12.

Wires that nobody looks up one after another are one gap: a server that armed them too late, or
files that were opened once for all and are opened no more. Those before the first that was looked
up are none. Each epoch is judged by itself: what goes wrong at the beginning of each adds up else.

INVARIANT: the sum is never negative: a reader that opens all earns no credit.
"""

from __future__ import annotations

from hintsd.policies import Mask

LEFT_OUT = 32


class Passed:
    """Wires that the reader has left behind since all of the last ones were opened."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing that was seen counts any more."""
        self._calm()
        self.skip()

    def skip(self) -> None:
        """What comes next does not follow what was seen."""
        self._is_gap = self._has_begun = False

    def _calm(self) -> None:
        self.wires = self.unopened = self._evidence = 0

    def weigh(self, are_opened: Mask) -> None:
        """The next ones, in their order: whether their files were looked up. Shape (wires,)."""
        for is_opened in are_opened.tolist():
            self._has_begun |= is_opened
            if not self._has_begun:
                continue
            self.wires += 1
            self.unopened += not is_opened
            if is_opened:
                self._evidence += 3 if self._is_gap else -1
                if self._evidence <= 0:
                    self._calm()
            self._is_gap = not is_opened

    @property
    def is_much_left_out(self) -> bool:
        """Whether the reader opens less than three quarters of what it is told to."""
        return self._evidence >= LEFT_OUT
