"""How much of one hintsd users other than its own may have, one by one and together.

What they ask for takes hintsd's memory, and room in the directory of its journal. Each bound leaves
a part to hintsd's own user.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

CONNECTIONS_MOST: Final = 64
"""Of one user."""
CONNECTIONS_OF_ALL: Final = 192
JOBS_MOST: Final = 64
"""Of one user: sixteen ranks, with a validation each, twice."""
JOBS_OF_ALL: Final = 192
SAMPLES_MOST: Final = 1 << 27
"""Of all jobs of one user, with the orders that were told ahead: sixteen ranks on 8 M files."""
BYTES_MOST: Final = 1 << 30
"""Of paths and orders that one user's clients have sent: in hints; and as much on the way."""

ENTRIES_MOST: Final = 1 << 24
"""That are looked at for one job: links in a loop make more than there are files."""
ENTRY_BYTES: Final = 64  # a path of so many counts as one more


def excess(what: str, uid: int, uids: Iterable[int], most: int, most_of_all: int) -> str:
    """Why user `uid` can have no further one, where `uids` have theirs; "": it can be had."""
    held = list(uids)
    if held.count(uid) >= most:
        return f"you have {most} {what} already"
    if len(held) >= most_of_all:
        return f"other users have {most_of_all} {what} already"
    return ""
