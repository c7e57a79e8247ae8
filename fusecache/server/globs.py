"""Which files globs name (`fusecache warm`, `evict`, `pin`): in time linear in the path, whatever
the globs.

`*` and `?` do not cross `/`, `**` does (`**/` is any number of directories, also none), `[...]` is
a set of characters, `[!...]` all others but `/`. A glob names a path, and all that lies below it.

Globs without a wildcard are looked up in a table. All others are one automaton: a state is the set
of places in the globs that a path may have come to, a bit each. States and their successors are
computed when they are met and remembered, so that most characters cost one look-up.

INVARIANT: nothing is tried twice: a character costs one look-up, or some arithmetic on PLACES_MOST
bits. What is remembered is bounded by NODES_MOST states and STEPS_MOST steps.
A request for many paths gives way to others in between.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from fusecache.base.errors import EXIT_USAGE, UserError

PLACES_MOST = 1 << 15  # characters and wildcards of all globs with wildcards together
NODES_MOST = 1 << 10
STEPS_MOST = 1 << 15
_WILD = frozenset("*?[")


class GlobError(UserError):
    """This is no glob; one line."""

    def __init__(self, message: str) -> None:
        super().__init__(message, EXIT_USAGE)


class _Node:
    """One state, and the steps from it that were met."""

    __slots__ = ("mask", "named", "steps")

    def __init__(self, mask: int, named: tuple[str, ...]) -> None:
        self.mask = mask
        self.named = named  # the globs that name a path which ends here
        self.steps: dict[str, _Node] = {}


class Globs:
    """Some globs; GlobError."""

    def __init__(self, globs: Iterable[str]) -> None:
        self._plain: dict[str, list[str]] = {}
        self._literal: dict[str, int] = {}  # character -> the places that it leads on from
        self._sets: dict[str, _Set] = {}  # the same of sets, by what stands in the brackets
        self._stays = self._stays_on_slash = 0  # places of `*`, of `**`
        self._skips, self._skips_two = 0, 0  # places that lead on without a character
        self._ends: dict[int, str] = {}  # place behind a glob's last -> the glob
        self._end_mask = 0
        self._places = 0
        begin = 0
        for glob in globs:
            text = glob.strip("/")
            if _WILD.isdisjoint(text):
                self._plain.setdefault(text, []).append(glob)
            else:
                begin |= 1 << self._places
                self._add(text, glob)
        self._advance: dict[str, int] = {}
        self._nodes: dict[int, _Node] = {}
        self._steps = 0
        self._begin_mask = self._reach(begin)

    def naming(self, path: bytes) -> list[str]:
        """The globs that name this path, or a directory that it lies below."""
        text = os.fsdecode(path)
        found: list[str] = []
        if self._plain:
            end = len(text)
            while end > 0:
                found += self._plain.get(text[:end], ())
                end = text.rfind("/", 0, end)
        if self._places:
            node = self._node(self._begin_mask)
            for character in text:
                node = node.steps.get(character) or self._step(node, character)
            found += node.named
        return found

    # ---- the globs -------------------------------------------------------------------------------

    def _add(self, text: str, glob: str) -> None:
        index = 0
        while index < len(text):
            if text[index] == "*":
                stop = len(text) - len(text[index:].lstrip("*"))
                if text[index : stop + 1] == "**/":
                    index = stop + 1
                    while text.startswith("**/", index):  # the same again says nothing more
                        index += 3
                    here = 1 << self._next()
                    self._skips |= here
                    self._skips_two |= here
                    place = self._next()
                    self._stays |= 1 << place
                    self._stays_on_slash |= 1 << place
                    self._put("/", place)
                else:
                    here = 1 << self._next()
                    self._skips |= here
                    self._stays |= here
                    self._stays_on_slash |= here if stop - index > 1 else 0
                    index = stop
            elif text[index] == "?":
                self._put_set("!", glob)  # not one of none
                index += 1
            elif text[index] == "[" and (end := _end_of_set(text, index)) > 0:
                self._put_set(text[index + 1 : end], glob)
                index = end + 1
            else:
                self._put(text[index], self._next())
                index += 1
        end_place = self._next()
        self._put("/", end_place)
        below = self._next()
        self._stays |= 1 << below
        self._stays_on_slash |= 1 << below
        for place in (end_place, below):
            self._ends[place] = glob
            self._end_mask |= 1 << place

    def _next(self) -> int:
        self._places += 1
        if self._places > PLACES_MOST:
            raise GlobError(
                f"globs of more than {PLACES_MOST:,} characters together: name directories instead"
            )
        return self._places - 1

    def _put(self, character: str, place: int) -> None:
        self._literal[character] = self._literal.get(character, 0) | 1 << place

    def _put_set(self, body: str, glob: str) -> None:
        if body not in self._sets:
            self._sets[body] = _Set(body, glob)
        self._sets[body].places |= 1 << self._next()

    # ---- the automaton ---------------------------------------------------------------------------

    def _reach(self, mask: int) -> int:
        """With the places that are reached from these without a character."""
        while True:
            more = mask | (mask & self._skips) << 1 | (mask & self._skips_two) << 2
            if more == mask:
                return mask
            mask = more

    def _node(self, mask: int) -> _Node:
        node = self._nodes.get(mask)
        if node is None:
            if len(self._nodes) >= NODES_MOST:
                self._nodes.clear()
                self._steps = 0
            node = self._nodes[mask] = _Node(mask, tuple(self._named(mask & self._end_mask)))
        return node

    def _named(self, ends: int) -> Iterable[str]:
        found: dict[str, None] = {}
        while ends:
            lowest = ends & -ends
            found[self._ends[lowest.bit_length() - 1]] = None
            ends ^= lowest
        return found

    def _step(self, node: _Node, character: str) -> _Node:
        advance = self._advance.get(character)
        if advance is None:
            if len(self._advance) >= NODES_MOST:
                self._advance.clear()
            advance = self._literal.get(character, 0)
            for characters in self._sets.values():
                advance |= characters.places if characters.has(character) else 0
            self._advance[character] = advance
        stays = self._stays_on_slash if character == "/" else self._stays
        following = self._node(self._reach((node.mask & advance) << 1 | node.mask & stays))
        if self._steps >= STEPS_MOST:
            self._nodes.clear()
            self._steps = 0
        node.steps[character] = following
        self._steps += 1
        return following


def quoted(path: str) -> str:
    """A glob that names this path alone, and what lies below it."""
    return "".join(f"[{one}]" if one in _WILD else one for one in path)


def _end_of_set(text: str, begin: int) -> int:
    """Where the `]` of a set that begins here is; 0: it is none, `[` stands for itself."""
    first = begin + (2 if text.startswith("[!", begin) else 1)
    return max(text.find("]", first + 1), 0)  # one that comes first is of the set


class _Set:
    """A set of characters, `/` never among them, and its places in the globs."""

    def __init__(self, body: str, glob: str) -> None:
        """`body`: what stands in the brackets. GlobError."""
        self.places = 0
        self._is_inverted = body.startswith("!")
        rest = body[self._is_inverted :]
        self._single: set[str] = set()
        self._ranges: list[tuple[str, str]] = []
        index = 0
        while index < len(rest):
            if rest[index + 1 : index + 2] == "-" and index + 2 < len(rest):
                first, last = rest[index], rest[index + 2]
                if first > last:
                    raise GlobError(f"glob {glob}: [{body}] has a range that ends before it begins")
                self._ranges.append((first, last))
                index += 3
            else:
                self._single.add(rest[index])
                index += 1

    def has(self, character: str) -> bool:
        is_in = character in self._single or any(
            first <= character <= last for first, last in self._ranges
        )
        return character != "/" and is_in is not self._is_inverted
