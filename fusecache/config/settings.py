"""The one frozen Config of a mount, and what is the least and the most of each setting.

A setting has one name, written with `-` on the command line, with `-` or `_` in TOML and in `-o`.
`options` turns texts into values, `building` makes a Config of them (defaults < TOML file < flags),
and `places` looks whether it can be mounted. Each mistake is a ConfigError or UserError with one
line.

INVARIANT: a Config crosses processes as JSON; paths are str with surrogateescape, of any bytes.
Nothing here starts anything, or imports click or rich: the server reads its Config from here.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

SIZE_MOST = 1 << 60
SSD_BYTES_MIN = 16 << 20
RAM_BYTES_MIN = 16 << 20
RAM_SHARE = 0.25
KEEP_FREE = "5%"
# Less than these, but not 0, is a unit that was forgotten.
KEEP_FREE_BYTES_MIN = 1 << 20
PREFETCH_BYTES_PER_S_MIN = 1 << 10
SECONDS_MIN, SECONDS_MAX = 0.1, 1e7
THREADS_MAX = 1024
PREFETCH_DEPTH_MAX = 256
CACHE_DIRS_MAX = 32
POLICIES = ("reuse", "lrf", "keep")  # without hints; the rules of hintsd are in hintsd/keeping
DIGESTS = ("xxh3-128", "blake3")
LAYOUTS = ("static", "reorder", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What keeper and server are told. All paths are absolute."""

    source: str
    mountpoint: str
    cache_dir: str
    ssd_bytes: int  # of all cache directories, all mounts on them together
    ram_bytes: int
    keep_free_bytes: int  # on each disk
    further_cache_dirs: tuple[str, ...] = ()
    policy: str = "reuse"  # docs/POLICIES.md
    digest: str = "xxh3-128"
    cache: str | None = None  # the socket of the host's cache service: docs/CACHED.md
    manifest: str = "auto"  # or "none", or its path: docs/FORMAT.md
    layout: str = "static"  # of hinted samples on SSD: docs/TUNING.md
    allow_other: bool = False
    noexec: bool = False
    require_mounted: bool = False  # of the source, looked at when the mount begins
    allow_empty: bool = False  # the same
    revalidate_s: float | None = 60.0  # None: never
    zero_open: bool = True
    origin_timeout_s: float = 30.0
    origin_threads: int = 32
    prefetch_bytes_per_s: int | None = None  # None: no limit
    prefetch_depth: int = 128
    pool: str | None = None  # its URL: docs/POOL.md
    pool_listen: str | None = None  # HOST:PORT, where other hosts are answered
    pool_ca: str | None = None
    pool_cert: str | None = None
    pool_key: str | None = None
    pool_user: str | None = None
    pool_password_file: str | None = None
    pool_insecure: bool = False
    pool_min_age_s: float = 60.0
    hintsd: str = "auto"  # or "none", or the path of its socket
    log_file: str | None = None  # None: in the runtime directory; on stderr when in the foreground
    log_level: str = "info"
    log_format: str = "text"
    foreground: bool = False

    @property
    def cache_dirs(self) -> tuple[str, ...]:
        return (self.cache_dir, *self.further_cache_dirs)

    def to_json(self) -> str:
        """ASCII: bytes of paths that are no UTF-8 become escapes."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Fields that this version does not know are left out: a keeper may be older or newer."""
        fields = json.loads(text)
        fields["further_cache_dirs"] = tuple(fields.get("further_cache_dirs", ()))
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in fields.items() if name in known})
