"""C part: inode table, origin scan, libfuse interposer (front), segment reads, notifications.

State is process-wide: one mount per server process (as in pyfuse3). Every function that may block
releases the GIL. Errors of system calls are OSError with errno set. Inode numbers are ints >= 1;
UnknownInode (fusecache.base.errors): the table has none of this number.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES: Final[int]  # 4 MiB
CHUNK_BYTES: Final[int]  # 64 KiB, the unit of segment checksums
STREAM_HEAD_BYTES: Final[int]  # 128 KiB left unpushed at the start of a streamed block
DOT_COOKIE: Final[int]  # readdir cookies that follow "." and ".."; others are node numbers
DOTDOT_COOKIE: Final[int]

# ---- table -------------------------------------------------------------------------------------
def attach(table_fd: int, source_fd: int, zero_open: bool) -> int:
    """Map the table memfd (sparse; created empty by the keeper) and remember the source directory.

    An empty table gets its header and the root node (from fstat of source_fd). A table that was
    used before keeps all: an update that a killed server left half done is finished from the redo
    slot, the private hashes are rebuilt, and what was flagged stale, or was being pushed, is queued
    for take_stale(). Returns the highest inode number. source_fd is dup'ed. May be called again
    (tests) while no front runs. Before it, every inode is unknown.
    ValueError: table written by another layout version, or with another zero_open mode.
    """

def adopt_source(fd: int) -> None:
    """The source's file system was mounted anew, and this is its directory there: all that is known
    stays, and is looked at there from now on. Waits for the origin. OSError.
    """

def table_mode(table_fd: int) -> int:
    """-1 empty, 0 ordinary, 1 zero-open: the mode the table was created with (no attach needed)."""

def count() -> int: ...
def census() -> tuple[int, int, int, bool]:
    """Regular files that have a name, their bytes, those whose place on SSD is known, and whether
    all directories are listed. Scans the table: for people who ask, in a worker thread."""

def memory_bytes() -> int:
    """Bytes of table (touched part), hash, rings and buffers of the log: for status."""

def scan(
    ino: int, tick: Callable[[], object] | None = None, is_forced: bool = False
) -> tuple[int, int, int]:
    """List directory `ino` at the origin and merge it into the table; sets LISTED at the end.

    Returns how many entries were (added, removed, changed) since the previous listing; (0, 0, n) on
    the first one, and where an earlier mount's listing holds (load_table); atime alone is no
    change. What the kernel has to forget is flagged in the table
    (take_stale). A name whose origin inode or file type changed is both removed (old inode, marked
    DEAD) and added (new inode). A version change clears the file's locations. `tick` is called with
    the GIL every few thousand entries (progress); an exception from it aborts the scan.
    Two scans of one directory may overlap: one that ends after a scan that began later has ended
    leaves the listing as it is. Every name is stat'ed once more before it is taken for removed.
    `is_forced`: past what the file system here keeps of attributes (AT_STATX_FORCE_SYNC).
    Entries whose attributes the origin refuses (EACCES, EPERM) are listed without: attributes()
    has only the type in mode, nlink 0; lookup() says -1, so that add() gives the real errno.
    Raises OSError (ENOENT/EACCES/EIO ... as the origin gave; ENOTDIR: also a symlink in its place;
    ESTALE: the path of `ino` now leads to another directory, or through a symlink).
    """

def is_unchecked(ino: int) -> bool:
    """Whether only an earlier mount has looked at this file. Its bytes may be of another version by
    now; refresh(), add() or scan() look at it.
    """

def has_unchecked(directory: int) -> bool:
    """Whether such a file is in it."""

def saved_bytes() -> int:
    """What save_table() would write, at most."""

def save_table(fd: int, source: bytes) -> int:
    """Write the table to the file, from offset 0 (docs/FORMAT.md, "Saved tables"); the bytes
    written. `source`: 16 bytes that tell this source from others. OSError.
    """

def load_table(fd: int, source: bytes) -> str:
    """Fill a table that knows only its root from such a file; "", or why it is not used. Its
    directories are not LISTED: scan() of one looks at its time stamps alone where these show that
    the listing holds. Its files are unchecked. OSError: EEXIST, the table knows more; ENOMEM.
    """

def lookup(parent: int, name: bytes) -> int:
    """Inode number; 0 when the directory is LISTED and has no such name; -1 when not known."""

def add(parent: int, name: bytes, is_forced: bool = False) -> int:
    """statx one name at the origin, insert or update its node, return the inode number.

    If the existing node turned out to be replaced or gone, it is marked DEAD first. `is_forced`:
    past what the file system here keeps of attributes; those of `parent` are taken, too, and the
    kernel is told what of the name it has kept. OSError: as the origin gave; ESTALE: the path of
    `parent` now leads to another directory; EINVAL: empty name, ".", "..", "/" or NUL in it.
    """

def refresh(ino: int) -> int:
    """statx the node by path at the origin. 0 same, 1 attributes changed, 2 version changed,
    3 replaced or gone (the node is now DEAD; of a hard-linked file: all its known names are)."""

def attributes(ino: int) -> tuple[int, int, int, int, int, int, int, int, int, int]:
    """(mode, nlink, uid, gid, rdev, size, blocks, atime_ns, mtime_ns, ctime_ns).

    UnknownInode.
    """

def version(ino: int) -> tuple[int, int, int, int]:
    """(origin inode number, size, mtime_ns, ctime_ns). UnknownInode."""

def is_listed(ino: int) -> bool: ...
def refuse_short(ino: int) -> bool:
    """True: the file has shrunk and the kernel may not know it. A READ that gets fewer bytes than
    it wanted must be refused (EINTR) for now: the reader would see zeros in place of the rest."""

def told(ino: int) -> None:
    """The inode's attributes are being answered: the kernel learns its size."""

def is_dead(ino: int) -> bool:
    """No known name leads to it any more (a hard-linked file lives as long as one of them)."""

def device(ino: int) -> str:
    """ "major:minor" of the file system at the origin that the file is on; "": not known."""

def directories(after: int, limit: int) -> list[int]:
    """Inode numbers > after of live LISTED directories (none beneath a DEAD one), ascending, at
    most `limit` (and 65536): for the sweep."""

def children(ino: int, after: int, limit: int) -> list[tuple[bytes, int, int]]:
    """Up to `limit` (and 65536) live (name, inode, cookie) of a directory following cookie `after`.

    0: from the start; so are DOT_COOKIE and DOTDOT_COOKIE.
    """

def siblings(ino: int, by_name: bool, limit: int) -> list[int]:
    """Up to `limit` (1 to 32) live directories that follow this one in its parent: by name (none
    when the parent has more than 16,384 entries), or else in the order of the listing.
    """

def path(ino: int) -> bytes:
    """Path relative to the source, b"" for the root. UnknownInode."""

def parent(ino: int) -> int:
    """Of a living name, when there is one; the root's is the root."""

def name(ino: int) -> bytes: ...
def open(ino: int, flags: int) -> int:  # noqa: A001  (the contract's name; never star-imported)
    """Open the node at the origin (openat2 BENEATH|NO_SYMLINKS, in hops when the path exceeds
    PATH_MAX); O_CLOEXEC|O_NOFOLLOW added. ESTALE: the node is DEAD, or a symlink is in the way."""

def readlink(ino: int) -> bytes: ...
def take_stale(limit: int) -> list[tuple[int, bool, list[tuple[int, bytes]]]]:
    """At most `limit` inodes of which the kernel may hold something old; they are in flight then.

    (inode, its names' dentries are stale too, its names, dead ones too, as (parent, name); none for
    the root). event_fd() becomes readable when the queue stops being empty.
    """

def settled(ino: int) -> None:
    """The kernel was told; clears the flags unless the inode was flagged again since take_stale."""

def mark_young(ino: int) -> None:
    """Its pages will be forgotten (mark_stale); a server that dies before leaves it to the next."""

def mark_stale(ino: int) -> None:
    """Attributes, pages and listing of the inode are to be forgotten."""

def version_of_fd(fd: int) -> tuple[int, int, int, int, int]:
    """statx with AT_STATX_FORCE_SYNC: (origin inode, size, mtime_ns, ctime_ns, mode)."""

# ---- changes, for the hosts of a pool ----------------------------------------------------------
def journal(is_on: bool, /) -> None:
    """From now on (again) note which names change in the table, whatever looked at the origin; or
    no more. OSError: no memory.
    """

def journal_take() -> tuple[list[tuple[bytes, bytes]], bool]:
    """What was noted since the last take: (path of the directory, name) of each name that came to a
    LISTED directory, went, or leads to other attributes than before; of a file with several names
    each. The root is not in it: changes in it come with one of its names, or chmod of it alone.
    False: more has changed than that, for there was too much of it, or a directory below which
    something was known has gone. OSError: no memory.
    """

def is_shared(ino: int, /) -> bool:
    """A LISTED directory of the source's own file system, with no entry of another one, and none
    whose attributes the origin refuses.
    """

def find_path(path: bytes, /) -> int:
    """The node of a path below the source (b"": the root), if the table knows it; else 0."""

# ---- locations and segments --------------------------------------------------------------------
def set_location(
    ino: int,
    block: int,
    segno: int,
    offset: int,
    header_len: int,
    version: tuple[int, int, int, int],
) -> bool:
    """Remember where a block lies: record at byte `offset` (multiple of 4096, not 0, below 1 GiB)
    of segment `segno`, payload begins `header_len` bytes into the record. False (nothing set) when
    the node's version is no longer `version`. Locations of files of several blocks end with the
    server.
    """

def get_location(ino: int, block: int) -> tuple[int, int, int] | None: ...
def clear_location(ino: int, block: int, only_if: tuple[int, int, int]) -> None:
    """Forget where a block lies, if that (as `get_location` says it) is still the place."""

def segment_add(segno: int, fd: int) -> None:
    """Give the front a descriptor to read segment `segno` with (it is opened anew with O_DIRECT, or
    dup'ed; buffered reads are the fallback). A known segment stays as it is. When the front holds
    half of the descriptors the process may have, the segment used longest ago is dropped for it."""

def segment_drop(segno: int) -> None:
    """Close it (waits for reads in progress). Locations that name it become misses."""

def segment_known(segno: int) -> bool: ...
def segment_reads() -> dict[int, int]:
    """Of each segment that the front has open: how many blocks were read from it since then."""

def read_record(fd: int, offset: int, header_len: int, payload_len: int, segno: int = 0) -> bytes:
    """Whole verified payload of one record (for verify and tests). ValueError: checksum, magic or
    length mismatch."""

def read_cached(ino: int, offset: int, size: int) -> bytes | None:
    """The bytes [offset, offset+size) clipped to the file size, verified, from segments; None: some
    block has no readable location (faults are reported as events). May span blocks, up to 4 MiB."""

# ---- kernel ------------------------------------------------------------------------------------
def push(
    fuse_fd: int,
    ino: int,
    version: tuple[int, int, int, int],
    offset: int,
    data: bytes | memoryview,
) -> int:
    """FUSE_NOTIFY_STORE, clipped to the version's size; noted in the RAM ring. Gives bytes pushed:
    0 when the node is another version or stale (looked at before and after each MiB; a change in
    between marks the inode stale). OSError ENOENT: the kernel does not know the inode."""

def push_cached(fuse_fd: int, ino: int, block: int, skip: int) -> int:
    """Read the block from its segment, verify, push all but its first `skip` bytes. Bytes pushed,
    or -1: no readable location. OSError ENOENT: as in push()."""

def inval_inode(fuse_fd: int, ino: int, offset: int, length: int) -> bool:
    """FUSE_NOTIFY_INVAL_INODE; offset 0, length 0: all pages and attributes; offset -1: attributes
    only. False: the kernel does not know the inode."""

def inval_entry(fuse_fd: int, parent: int, name: bytes) -> None:
    """FUSE_NOTIFY_INVAL_ENTRY; ENOENT is ignored."""

def resend(fuse_fd: int) -> None:
    """FUSE_NOTIFY_RESEND. OSError EINVAL on kernels before 6.9."""

# ---- session and front -------------------------------------------------------------------------
def why_not_interposed() -> str:
    """Why the front has no part in pyfuse3's session; "" if it has (call after pyfuse3.init)."""

def configure_answers(hintsd: bytes, has_acls: bool = False) -> None:
    """Before pyfuse3.init: what is answered without pyfuse3 in both modes (native/front/raw.c).

    `hintsd`: path of its socket; empty: none. `has_acls`: the kernel honours access control
    lists, which are asked of pyfuse3's handler; else it learns that there are no extended
    attributes at all, for the mount's life.
    """

def keep_root_acl(value: bytes, ctime_ns: int) -> None:
    """The access control list that the root directory had at this ctime, empty: none. The front
    answers for it until the ctime is another: the kernel keeps every inode's list but this one's.
    """

def configure_session(front: bool, threads: int, negative_timeout_s: float) -> None:
    """Before pyfuse3.init. front False: INIT is touched (max_background) and of READs it is noted
    which thread asks.

    1 to 64 threads. The front answers only what a sweep watches (names and attributes beneath
    LISTED directories), or everything it knows when negative_timeout_s >= 1e9 (no sweep).
    """

def resume_session() -> None:
    """On a live mount, after pyfuse3.init: make libfuse and pyfuse3 believe in an INIT, which the
    kernel sends only once in a mount's life. ValueError: no session, or it has begun."""

def read_asker() -> tuple[int, int]:
    """For pyfuse3's READ handler, which is not told: the thread id that its request is from, as the
    kernel tells it (0: unknown), and when it came (nanoseconds, time.monotonic_ns). To be called
    before the handler awaits anything."""

# ---- events and counters -----------------------------------------------------------------------
# (EVENT_FAULT, segno, offset, ino): a record failed verification
EVENT_FAULT: Final[int]
# (EVENT_STREAM, ino, block, 0): a sequential reader of a large file has entered `block`
EVENT_STREAM: Final[int]
# (EVENT_UNREAD, segno, offset, ino): the disk failed when a record was read
EVENT_UNREAD: Final[int]
# (EVENT_PUNCHED, segno, offset, ino): a location led to a record that was evicted
EVENT_PUNCHED: Final[int]

def event_fd() -> int:
    """An eventfd, readable when take_events() or take_stale() has something (os.read it)."""

def take_events() -> list[tuple[int, int, int, int]]: ...
def note_read(ino: int, offset: int, size: int, tid: int = 0) -> None:
    """Sequential detection and RAM ring for READs answered in Python (the front does so itself)."""

def ram_bytes() -> int: ...
def ram_take(limit_bytes: int, most: int) -> list[tuple[int, int, int]]:
    """Pop the oldest noted blocks (inode, offset, length) until the total is <= limit_bytes, at
    most `most` (and 65536) of them. One entry a (inode, block), counted with what was noted of
    it; a block that was noted again since has moved back in the order."""

def counters() -> dict[str, int]:
    """requests (all READs that reached us in the front), from_ssd (READs answered from segments by
    C), bytes_from_ssd, lookups, getattrs, readdirs, slow (requests handed to Python), faults,
    bytes_staged (pushed by stage()), waited (READs that waited for bytes that were being staged),
    from_origin (READs answered by the fetch threads, from the origin or the pool),
    bytes_from_origin (in those answers), files_fetched and bytes_fetched (read by the fetch threads
    from the origin, without the pool), files_pooled and bytes_pooled (from the pool alone)."""

# Bucket k of a histogram counts what took at most 2^(LATENCY_SHIFT + k) ns, and is in no lower one.
LATENCY_SHIFT: Final[int]

def note_origin_read(ns: int, /) -> None:
    """A read of the origin in Python ended well, after that time. C counts its own."""

def origin_reads() -> tuple[list[int], int]:
    """Reads of the origin that ended well: (how many, by bucket; the last one: all that took
    longer; nanoseconds that all took together)."""

def note_mount_read(ns: int, /) -> None:
    """Python has answered a READ with bytes, so long after it came. C counts its own."""

def mount_reads() -> tuple[list[int], int]:
    """READs that were answered with bytes, as `origin_reads`."""

# ---- plan --------------------------------------------------------------------------------------
# What a hintsd wants (docs/HINTS.md). Arrays are packed little-endian bytes: inode numbers u32,
# sizes u64, name lengths u16, all else u8. One flag byte an inode:
PLAN_ARMED: Final[int]  # its next look-up is to be reported
PLAN_READ: Final[int]  # a READ has come for it while it was QUEUED or FLYING
PLAN_COMING: Final[int]  # its chunk is staged, or its bytes are being read: a READ waits for it
PLAN_WANTED: Final[int]  # in a window: ram_take() spares it while there is anything else
PLAN_QUEUED: Final[int]
PLAN_FLYING: Final[int]
PLAN_STAGED: Final[int]  # pushed whole, and not dropped since
PLAN_FAILED: Final[int]
SEEN_LOOKUP: Final[int]  # what was seen of an inode: the look-up of an armed one,
SEEN_SSD: Final[int]  # a READ at offset 0, answered from SSD
SEEN_ORIGIN: Final[int]  # or from beyond this host: the origin, or the pool
# Results of stage() and push_files(), a byte each:
PUSH_NO_BYTES: Final[int]  # no readable location (not on SSD, a fault, attributes refused)
PUSHED: Final[int]  # whole; an empty file is
PUSH_CHANGED: Final[int]  # another version, flagged stale, gone, or no file
PUSH_REFUSED: Final[int]  # the kernel would not take it
PUSH_LARGE: Final[int]  # more than one block: not done here
PAGES_GONE: Final[int]
PAGES_THERE: Final[int]
PUSH_READ: Final[int]  # a reader was faster: its own READs bring the pages

def plan_begin() -> None:
    """From now on observations are noted. All flags are clear. attach() ends a plan."""

def plan_end() -> None:
    """Flags and observations are dropped, nothing is noted any more."""

def plan_mark(inos: bytes, add: int, remove: int) -> None:
    """Nothing happens to unknown inodes, or without a plan."""

def plan_flags(inos: bytes) -> bytes:
    """One byte each; 0 for unknown inodes and without a plan."""

def seen_fd() -> int:
    """An eventfd, readable exactly while take_seen() has something: it need not be read."""

def take_seen(most: int) -> tuple[bytes, bytes, bytes, bytes, int]:
    """The oldest observations: (inodes, kinds, processes that asked, their parents, how many were
    lost since the last call). Processes and parents are u32, 0 where they are unknown.

    A kind is SEEN_* plus the PLAN_* flags (but ARMED) of that moment: a READ of a STAGED inode says
    that the kernel has let go of it. At most 65,536 are kept; later ones are lost.
    """

def note_seen(ino: int, what: int, tid: int = 0) -> bool:
    """For requests that Python answers, before it does: each LOOKUP, and READs at offset 0, with
    the requester's thread id (0: unknown). A LOOKUP is noted if the inode was ARMED, which it then
    is no more. True: the LOOKUP is one of our own, the inode stays ARMED (answer with entry_timeout
    0)."""

def arm(fuse_fd: int, inos: bytes) -> int:
    """Set PLAN_ARMED and let the dentries of their living names expire, so that the next open costs
    a LOOKUP; pages stay (before Linux 6.2 they go). How many were armed: not dead or unknown ones.
    Waits for a look-up that is going on in the same directory."""

def open_unseen(path: bytes, /) -> int:
    """An O_PATH descriptor of a path through the mount. Its look-ups are our own: they cut no wire.
    OSError. Waits for the origin where the path is not known."""

def stage(fuse_fd: int, mountpoint: bytes, inos: bytes, moves: bytes = b"") -> bytes:
    """Push the pages of files of one block from their segments, verified; results PUSH_*.

    An inode that the kernel does not know is looked up below `mountpoint` first (through the mount,
    if every directory of its path is LISTED: no thread waits for the origin). PUSHED ones are
    STAGED, and noted in the RAM ring. A page that a READ is about to bring is waited for.
    Neighbours in a segment that follow each other are read together.

    moves, a byte each: 1: the record goes to the open log if it has a chunk there. Such a file is
    read from SSD even if it is STAGED or was READ, but not pushed then.
    """

def count_within(inos: bytes, bytes: int) -> int:  # noqa: A002
    """How many of the first files have at most so many bytes together; at least one of them."""

def push_files(
    fuse_fd: int,
    mountpoint: bytes,
    files: list[tuple[int, tuple[int, int, int, int], bytes | memoryview]],
) -> bytes:
    """As stage(), from memory: (inode, version, whole content). Other lengths: PUSH_CHANGED."""

def drop(mountpoint: bytes, inos: bytes, fuse_fd: int) -> None:
    """Drop their pages; they are neither STAGED nor in the RAM ring any more."""

def ask_pages(fuse_fd: int, inos: bytes, within_ms: int) -> bytes:
    """A byte each: PAGES_THERE: the kernel has the file's first page; PAGES_GONE: not any more,
    though the RAM ring counts the file; 0: not known. Blocking: not in a thread that answers
    requests.
    """

def segments_of(marks: NDArray[np.uint8]) -> tuple[bytes, bytes]:
    """Of inodes whose mark (by number) is not 0: the segments in which a block of them lies, and
    those that are larger than a block of which one has no location (u32 each). Blocking.
    """

def list_directory(
    ino: int, after: int, most: int, owned: bool = False
) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes, int]:
    """Up to `most` (and 65536) living entries that follow cookie `after` (0: from the start).

    (inodes, sizes, kinds: 0 other 1 file 2 directory 3 symlink, stored: 1 the locations of all its
    blocks are known, and with `owned` 2 other hosts of the pool ask this one for it, name lengths,
    names, next `after` or 0 at the end). Changes between two pages show in the second.
    UnknownInode; ValueError: not LISTED; NotADirectoryError.
    """

# ---- fetch threads ------------------------------------------------------------------------------
def fetch_start(threads: int, direct: bool = False) -> None:
    """Threads that read whole files of at most one block, from other hosts or from the origin; they
    are made as they are needed, at most `threads` (1 to 352), and do not end: they may hang in the
    origin for ever.
    `direct`: with O_DIRECT, as long as the origin's file system does not refuse it."""

def fetch_submit(ino: int, version: tuple[int, int, int, int], tag: int) -> None:
    """Queue one file. READs of it that wait (missed_fresh) get its content, where the table still
    has that version; the others are pyfuse3's.

    UnknownInode; ValueError: larger than a block; OSError: there is no thread, and none can be
    made.
    """

def fetch_fd() -> int:
    """An eventfd, readable exactly while fetch_take() has something: it need not be read."""

def fetch_take(most: int) -> list[tuple[int, int, bytes | None, int, int, int, bool]]:
    """Files that are finished: (tag, inode, content or None, errno, begun_ns, ended_ns, from the
    pool over hosts).

    errno 0: all bytes were read, and the origin, asked before and after (not an attribute cache),
    said `version`; or another host had written them as of that. ESTALE: it has another version, or
    the name is gone from the table. begun_ns is
    CLOCK_REALTIME, before the file was opened; ended_ns lies the time it took later. No copy is
    left in the page cache of the origin's file system; what it had before, a direct read leaves.
    """

def missed_enable(enabled: bool, tick_ns: int) -> None:
    """Whether READs of whole files of one block without a location wait. Else, and from the
    beginning, pyfuse3 gets them. No such READ is answered with a file that
    changed less than tick_ns before it was read."""

def missed_fresh(wait: bool, /) -> bytes:
    """Inodes (u32) for which READs wait, each once until they have been answered. `wait`: until
    there are some, or none because they do not wait any more."""

def missed_pass(ino: int, /) -> None:
    """READs of it that wait are pyfuse3's; 0: all that wait, named by missed_fresh() or not."""

def missed_waits(ino: int, /) -> bool:
    """Does any READ of it wait?"""

# ---- the pool over hosts (docs/POOL.md) ----------------------------------------------------------
def pool_begin(
    dataset: str,
    user: str | None,
    password: str | None,
    ca: str | None,
    certificate: str | None,
    private_key: str | None,
    min_age_ns: int,
    patience_ns: int,
    has_peers: bool,
) -> None:
    """From now on blocks may be asked for: once in a process. `ca`: with TLS; files are read now.
    Files that changed less than min_age_ns ago are not shared. pool_get() waits for
    patience_ns at most. `has_peers`: servers are hosts, as this one is.
    ValueError: a file is no good.
    """

def pool_server(host: str, port: str) -> int:
    """Its index. OSError ENOSPC: there are 64."""

def pool_address(server: int, address: str, port: str) -> None:
    """Where a server is. ValueError: not the digits of an address."""

def pool_slots(servers: bytes, heirs: bytes | None = None) -> None:
    """Of each of the 16,384 slots the index of its server, and of the one that is asked when that
    does not answer; 255: none. ValueError: size.
    """

def pool_get(
    ino: int, version: tuple[int, int, int, int], block: int, size: int
) -> tuple[bytes | None, bytes]:
    """The block, which has so many bytes, or None; a ticket. It waits for another host's read.
    UnknownInode.
    """

def pool_finish(ticket: bytes, data: bytes | bytearray | memoryview | None) -> None:
    """The block was read at the origin; None: it was not, or is not to be shared."""

def pool_note_origin(ns: int, size: int) -> None:
    """A read of so many bytes at the origin has taken so long."""

def pool_counters() -> dict[str, int]: ...
def pool_servers() -> list[dict[str, Any]]:
    """In the order of their indices: host, port, why (what went wrong last), has_address,
    is_left_alone, is_self, connections, hits, failures."""

# ---- what other hosts ask this one for (peers) ---------------------------------------------------
def pool_meet(server: int, /) -> bool:
    """Connect to it, for a second at most. False: it is not there, or `is_self` from now on."""

def serve_begin(address: str, port: str) -> None:
    """Answer others at this address: once in a process, after pool_begin(). ValueError: not the
    digits of an address. OSError: as of bind().
    """

def serve_holds(held_bytes: int, limit_bytes: int, version: str) -> None:
    """For INFO: what is on SSD here, and may be."""

def serve_counters() -> dict[str, int]:
    """connections (open now), refused, requests (for blocks), hits (on SSD), fetched (read for the
    others), bytes (in answers), stale, busy, malformed (connections that it ended).
    """

def asked_enable(enabled: bool, /) -> None:
    """Whether blocks that are not on SSD wait for asked_end(); disabled: none does any more.
    OSError: no descriptor is left.
    """

def asked_fd() -> int:
    """-1: it never was enabled. Readable: asked_take() has some."""

def asked_take() -> list[tuple[int, int]]:
    """Blocks that others wait for, and that were not told before: (inode, block)."""

def asked_waits(ino: int, block: int) -> bool:
    """Whether anybody still waits for it."""

def asked_end(
    ino: int,
    block: int,
    version: tuple[int, int, int, int] | None,
    data: bytes | bytearray | memoryview | None,
) -> None:
    """The whole block, of that version, to all that wait for it; None: they look on SSD once more,
    and then it is not here.
    """

# ---- recording accesses ------------------------------------------------------------------------
def trace_begin(wires: bool, lookups: bool) -> None:
    """Record READs, and note_open(). `wires`: opens that fire a tripwire; `lookups`: each LOOKUP of
    a file, whose entry is answered to expire at once. OSError EBUSY: a recording runs already."""

def trace_end() -> None:
    """What was not taken is forgotten."""

def take_accesses(most: int) -> tuple[bytes, int]:
    """The oldest accesses, at most `most` (and 65,536), and how many were lost since the last call.

    16 bytes each: u64 time (CLOCK_MONOTONIC, ns, ascending), u32 inode, u32 thread id << 8 | seen
    (docs/TRACES.md). At most 262,144 are kept.
    """

def describe_files(inos: bytes) -> tuple[bytes, bytes, bytes]:
    """Of the first inodes (u32), as many as is convenient, at least one: sizes (u64), lengths
    of their paths (u32; 0: no regular file, or its path has more than 65,535 bytes), paths."""

def note_open(ino: int, tid: int) -> None:
    """For an OPEN that Python answers."""

def trace_sees_lookups() -> bool:
    """Entries of files must expire at once."""

def expire_names(fuse_fd: int) -> int:
    """Have the kernel ask again for the names of all files; returns how many it knew. Blocking."""

# ---- the log (docs/LOG.md) ---------------------------------------------------------------------
def log_begin(
    chunks: int,
    buffer_bytes: int,
    segnos: bytes,
    fds: bytes,
    uuid: bytes,
    dataset: bytes,
    algorithm: int,
    credit_bytes: int,
) -> None:
    """Begin the log of a coming epoch: 1 to 4096 chunks, each with a segment (u32 each) that has
    its header, open for writing (i32 each), and a buffer of `buffer_bytes` (a multiple of 4096).

    The descriptors stay the caller's, and open until log_end(); they lose O_DIRECT when a write is
    refused with it. The front knows the segments from here on. At most `credit_bytes` are appended.
    `algorithm`: of digests. Blocking. OSError EBUSY: a log is open; ENOMEM; ValueError.
    """

def log_assign(inos: bytes | bytearray | memoryview, chunk: int) -> None:
    """These inodes (u32) belong to the chunk; the first assignment of an inode counts. Unknown ones
    are left out. OSError ENOENT: no log; ValueError: no such chunk."""

def log_open() -> None:
    """From now on records are appended. OSError ENOENT: no log."""

def log_wants(ino: int) -> bool:
    """The log is open, the inode in one of its chunks, neither in it nor on its way there, and not
    in a segment that others are drained before (log_drain)."""

def log_move(ino: int) -> int:
    """Read the file where it lies and append it to its chunk. Staging does the same in C, with a
    mount: this is for tests of the log alone. Blocking.

    0, or an errno: EALREADY it is in the log, or on its way; ENOENT no chunk, or no log; ENOSPC no
    credit, or no memory; EIO a write of the chunk has failed; ESTALE not on SSD, or not there now.
    """

def log_add(
    ino: int,
    version: tuple[int, int, int, int],
    digest: bytes,
    fetched_ns: int,
    payload: bytes | bytearray | memoryview,
) -> bool:
    """Append the content of a file that has no location yet. Until it is written, it has none.

    False: it is not for the log (as in log_move), or not of this version any more. Blocking: it may
    wait for the disk.
    """

def log_read(ino: int, version: tuple[int, int, int, int], offset: int, size: int) -> bytes | None:
    """Bytes of a file that waits in the buffer of its chunk. None: it does not, in this version."""

def log_credit(more_bytes: int) -> int:
    """Add to the bytes that may be appended; returns how many are left, 0 without a log."""

def log_flush() -> None:
    """All that was appended before is written, and its locations lead to the log. Blocking."""

def log_end() -> list[tuple[int, int, int]]:
    """Write out and close the log: (segment, its used length, errno of its first write that failed
    or 0) of each chunk; [] without a log.

    Blocking. A segment whose writing failed is cut behind the last record that arrived.
    """

def log_counters() -> dict[str, int]:
    """Since the process began: written_bytes; moved and added (locations switched); refused (for
    want of credit); failed (records lost with a failed write; their files keep their old places).
    Now: waiting_bytes: appended and not written yet; buffer_bytes: of memory."""

def log_left() -> list[tuple[int, int]]:
    """(segment, locations switched away from it by the log) since the last call."""

def log_survey() -> list[tuple[int, int, int, int]]:
    """Of each segment that locations lead to, by number: (segment, inodes with a name whose block 0
    lies there, bytes of their records, how many of those inodes are in a chunk of the log and have
    not been refused by it). One scan of the table, which holds its lock for a moment at a time.
    Blocking."""

def log_drain(segnos: bytes | None) -> None:
    """Move only what lies in these segments (u32 each) until the next call or the next log; what is
    added is taken as ever. None: move everything. Blocking."""

def sort_by_location(inos: bytes | bytearray | memoryview) -> bytes:
    """The permutation (i64 each) that puts inodes (u32) in the order in which their first blocks
    lie on SSD: by segment and offset, stable, those without a location last."""

# ---- what a device can do ----------------------------------------------------------------------
def probe_io(
    fd: int,
    file_bytes: int,
    read_bytes: int,
    reads: int,
    write_bytes: int,
    writes: int,
    is_random: bool,
    seconds: float,
) -> tuple[int, int, float]:
    """Keep `reads` reads and `writes` writes of that many bytes each (4 KiB to 1 MiB, multiples of
    4096; 64 together at most) in flight for so long. Returns bytes read, bytes written, seconds.

    fd: of a file of `file_bytes` that was opened with O_DIRECT. Reads go through it from its
    beginning, again and again, or to random places; writes alone go through it once. Both together:
    reads in the first half, writes in the second, equally many bytes of each. OSError; ValueError.
    """
