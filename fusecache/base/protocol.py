"""The numbers that cross the plan channel, for both its ends (docs/WIRE.md).

They are plain ints: numpy takes a member of an enum for an int64, which widens arrays of bytes and
makes a comparison up to 18 times as long. The C part has the same numbers in native/plan/plan.h
and native/trace/trace.h.
"""

from __future__ import annotations

from typing import Final


class Result:
    """What became of a file that was to be staged or fetched (`done`)."""

    STAGED: Final = 1
    """Pushed, or a reader was first."""
    STORED: Final = 2
    """On SSD, and not pushed."""
    STAGED_AND_STORED: Final = 3
    ORIGIN_ERROR: Final = 4
    """The origin failed, hung, or is away."""
    GONE: Final = 5
    """No such inode, no regular file, or another file under its name now."""
    NO_ROOM: Final = 6
    """SSD had none for it. What was to be staged was pushed."""
    NOT_PUSHED: Final = 7
    """Worth another try."""


class Observed:
    """What was seen of an inode: the bits MASK of a kind in `seen`."""

    MASK: Final = 7
    LOOKUP: Final = 1
    """The look-up of a file that was armed."""
    SSD: Final = 2
    """A READ, answered from SSD."""
    ORIGIN: Final = 3
    """A READ, answered from the origin."""


class Standing:
    """How an inode stands under a plan: bits. A kind in `seen` carries those from WANTED up; in
    the mount's own byte of an inode three more stand below them.
    """

    ARMED: Final = 1
    """Its next look-up is to be reported."""
    READ: Final = 2
    """A READ has come for it while it was QUEUED or FLYING."""
    COMING: Final = 4
    """Its chunk is staged, or its bytes are being read: a READ waits for it."""
    WANTED: Final = 8
    """It is staged, or to be."""
    QUEUED: Final = 16
    FLYING: Final = 32
    """It is being fetched or staged."""
    STAGED: Final = 64
    """Pushed whole, and not dropped since."""
    FAILED: Final = 128


class Wish:
    """How a file is to be staged: bits of `store`."""

    STORE: Final = 1
    """Store it on SSD."""
    MOVE: Final = 2
    """Append it to the log that is open."""
    KEEP_ORDER: Final = 4
    """In the order of the frame, not in that on SSD."""
    SORT: Final = 8
    """Not moved, but one of a chunk."""


class Packing:
    """How it stands with a mount's log (`packing` of a `state`)."""

    NONE: Final = 0
    OPEN: Final = 1
    NO_ROOM: Final = 2
    """Refused: no room on SSD."""
    NO_CREDIT: Final = 4
    """Refused: too little room on SSD to empty even one segment."""
    WRITE_FAILED: Final = 5
    """Open, but for the chunk of which a write has failed."""
    DRAINING: Final = 6
    """Open, as far as there is room."""
