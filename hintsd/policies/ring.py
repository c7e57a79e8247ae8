"""Items in an order that changes, doubly linked in one array: 8 bytes an item."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

END: Final = -1
_END: Final = 2 * END


class Ring:
    """From the first item to the last and on to END, which is both behind the last and before the
    first. An item is in it or not.

    Links are twice the item's number: those of an item lie side by side, at link (what is before
    it) and at link + 1 (what is behind it). END's are the array's last two, where its negative
    link leads.
    """

    def __init__(self) -> None:
        self._links = array("i", [_END, _END])

    def grow(self, more: int) -> None:
        """Room for `more` items."""
        links = self._links
        links[_END:_END] = array("i", bytes(2 * links.itemsize * more))

    def append(self, item: int) -> None:
        """Puts an item that is not in it behind the last."""
        links = self._links
        link = 2 * item
        last = links[_END]
        links[link] = last
        links[link + 1] = _END
        links[_END] = links[last + 1] = link

    def renew(self, item: int) -> None:
        """Moves an item to the end."""
        links = self._links
        link = 2 * item
        before, after = links[link], links[link + 1]
        links[before + 1] = after
        links[after] = before
        last = links[_END]
        links[link] = last
        links[link + 1] = _END
        links[_END] = links[last + 1] = link

    def insert(self, behind: int, item: int) -> None:
        """Puts an item that is not in it behind another one, or behind END."""
        links = self._links
        link, before = 2 * item, 2 * behind
        after = links[before + 1]
        links[link] = before
        links[link + 1] = after
        links[after] = links[before + 1] = link

    def remove(self, item: int) -> None:
        links = self._links
        link = 2 * item
        before, after = links[link], links[link + 1]
        links[before + 1] = after
        links[after] = before

    def pop(self) -> int:
        """Takes the first; there is one."""
        links = self._links
        link = links[-1]
        after = links[link + 1]
        links[-1] = after
        links[after] = _END
        return link >> 1

    def before(self, item: int) -> int:
        """END: it is the first."""
        return self._links[2 * item] >> 1

    def __iter__(self) -> Iterator[int]:
        """Checks the links on the way."""
        links = self._links
        link = _END
        while True:
            after = links[link + 1]
            assert links[after] == link
            if after == _END:
                return
            yield after >> 1
            link = after
