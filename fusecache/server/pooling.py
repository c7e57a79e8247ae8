"""A mount's place in a pool over hosts (docs/POOL.md)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from fusecache import _native
from fusecache.base import metrics
from fusecache.base.errors import EXIT_USAGE, UserError
from fusecache.base.metrics import Metric, Metrics
from fusecache.config.building import pool_of
from fusecache.config.settings import Config
from fusecache.pool.address import PEERS_PORT, parse_server
from fusecache.pool.hosts import Hosts, member_name
from fusecache.pool.keys import Keys
from fusecache.pool.sweeping import SharedSweep
from fusecache.read.fetcher import read_so_far
from fusecache.server.launch import Launch
from fusecache.store import Store

log = logging.getLogger(__name__)


def join(config: Config, counted: Metrics, launch: Launch, store: Store) -> Hosts | None:
    """None: it has none. UserError: a file of its credentials is no good. A mount that is
    live goes on without it.
    """
    pool = pool_of(config)
    if pool is None:
        return None
    try:
        return Hosts(
            *pool,
            member_name(config.mountpoint),
            lambda: _figures(counted.read()),
            config.pool_min_age_s,
            config.origin_timeout_s / 2,
            parse_server(config.pool_listen, PEERS_PORT) if config.pool_listen else None,
            partial(_held, store),
        )
    except ValueError as error:
        if not launch.resume or launch.planned:
            raise UserError(str(error), EXIT_USAGE) from error
        log.warning("the pool is not used: %s", error)
        return None


def _held(store: Store) -> tuple[int, int]:
    """Bytes on SSD, and their limit."""
    usage = store.usage()
    return usage.bytes, usage.limit_bytes


def share_sweep(config: Config, hosts: Hosts | None) -> SharedSweep | None:
    """None: there is no pool, or no engine that would know who sweeps, or no sweep."""
    address = pool_of(config)
    if hosts is None or hosts.has_peers or address is None or config.revalidate_s is None:
        return None
    return SharedSweep(
        Keys(hosts),
        _native,
        address[0].prefix,
        member_name(config.mountpoint),
        config.revalidate_s,
    )


def status(hosts: Hosts | None, now: Mapping[Metric, int]) -> dict[str, Any] | None:
    """For `fusecache status`. None: there is no pool."""
    return None if hosts is None else _figures(now) | hosts.status()


def _figures(now: Mapping[Metric, int]) -> dict[str, int]:
    """What this mount has had from other hosts, and from the origin; directories it has swept."""
    origin_files, origin_bytes = read_so_far(now)
    return {
        "files": now[metrics.FRONT_FILES_POOLED] + now[metrics.POOL_FILES],
        "bytes": now[metrics.FRONT_BYTES_POOLED] + now[metrics.BYTES_FROM_POOL],
        "origin_files": origin_files,
        "origin_bytes": origin_bytes,
        "swept": now[metrics.SWEPT],
    }
