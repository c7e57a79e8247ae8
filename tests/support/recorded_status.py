"""What `status` of a mount and of a hintsd have said, for tests of what shows it."""

from __future__ import annotations

import copy
import json
from typing import Any

from fusecache.base import mounts
from fusecache.control.control_client import Target
from fusecache.observe.asking import Answer, Host

MOUNT = "/data/imagenet"
SOCKET = "/run/fusecache/hintsd.sock"

_STATUS = r"""
{"version": "0.1.0", "mountpoint": "/data/imagenet", "source": "/mnt/nfs/imagenet",
 "cache_dir": "/ssd/cache", "keeper_pid": 23136, "keeper_alive": true, "server_pid": 23137,
 "restarts": 2, "zero_open": true, "uptime_s": 3600.5, "counted_s": 1800.25, "inodes": 32,
 "table_bytes": 163824, "ram": {"bytes": 12000000, "limit_bytes": 16777216},
 "ssd": {"bytes": 128000000, "reserved_bytes": 128000000, "limit_bytes": 256000000,
  "given_bytes": 256000000, "blocks": 33, "segments": 1, "evicted_files": 3, "evicted_bytes": 300,
  "policy": "reuse", "full_disk_bytes": null, "keep_free_bytes": 13527658700,
  "directories": [{"path": "/ssd/cache", "why_out": "", "bytes": 12017152, "segments": 1}]},
 "dataset": {"files": 31, "bytes": 515396075520, "on_ssd_bytes": 442381631488, "is_whole": true},
 "pins": {"globs": ["val/**"], "files": 4, "bytes": 400, "known": true},
 "layout": {"setting": "static", "probe_fault": "", "ssd_needed_bytes": 0, "packing": 0,
  "log_written_bytes": 7000, "log_waiting_bytes": 0, "log_segments": 0, "log_files": 0, "logs": 0,
  "log_samples": 0, "log_moved_samples": 0},
 "reads": {"requests": 49, "from_ssd": 33, "from_origin": 11, "by_fetch_threads": 10,
  "waited_for_staging": 5, "bytes_pushed": 8606784, "bytes_staged": 6000, "bytes_served": 16412480,
  "read_s": {"bounds": [0.001, 0.01], "counts": [40, 4, 5], "sum": 1.5}},
 "metadata": {"lookups": 5, "getattrs": 6, "readdirs": 7, "to_python": 8},
 "origin": {"files": 31, "bytes": 12262144, "errors": 6, "available": true, "last_error": "",
  "read_s": {"bounds": [0.25, 0.5, 1.0], "counts": [30, 1, 0, 2], "sum": 9.5}},
 "pool": {"files": 71, "bytes": 7100, "origin_files": 31, "origin_bytes": 12262144,
  "dataset": "imagenet", "is_tls": true, "is_cluster": false, "fault": "", "without": [],
  "misses": 72, "waits": 73,
  "leases": 74, "written": 75, "bytes_written": 7500, "failures": 76, "damaged": 77, "moved": 78,
  "skipped": 79, "servers": [{"host": "pool-1", "port": "6379", "why": "", "has_address": true,
  "is_left_alone": false, "connections": 2, "hits": 71, "failures": 76}]},
 "manifest": {"files": 9, "linked_files": 8, "linked_bytes": 800},
 "service": {"socket": "/run/fusecache-cached/socket", "used": true, "why_not": "",
  "room_bytes": 9900, "found_files": 61, "put_files": 62, "put_bytes": 6200},
 "prefetch": {"connected": true, "depth": 16, "queued_stage": 21, "queued_fetch": 22,
  "in_flight": 12, "files": 13, "bytes": 1300, "overtaking_reads": 14, "looks": 17,
  "restored_files": 15, "reclaimed_files": 18},
 "integrity": {"mismatches": 1, "faults": {"checksum": 1, "read": 2}},
 "revalidate": {"period_s": 60.0, "sweeps": 19, "last_sweep_s": 0.125, "changes_seen": 20,
 "swept": 57, "shared": null}}
"""

_HINTSD = r"""
{"version": "0.1.0", "pid": 7, "uptime_s": 900.5, "connections": 2,
 "mounts": [{"mountpoint": "/data/imagenet", "connected": true, "ram_bytes": 12000000,
  "ram_limit_bytes": 16777216, "origin_bytes_per_s": 104857600, "depth": 16}],
 "jobs": [
  {"name": "train-1", "path": "/data/imagenet/train", "mountpoint": "/data/imagenet", "pid": 4711,
   "uid": 0, "age_s": 800.0, "state": "running", "reason": "", "epoch": 3, "epochs": 10,
   "index": 2500, "samples": 10000, "window_bytes": 9000000, "ahead_bytes": 8000000,
   "not_late": 31500, "late": {"queued": 600, "fetching": 400}, "unplanned": {"not in window": 3},
   "predicted_stall_s": 1.5, "samples_per_s": 250.0, "layout": null, "layout_why": null,
   "ram_needed_bytes": null, "reclaimed": 18, "withheld_bytes": 0, "hits": 0.75,
   "kept_bytes": 100, "scores_age_s": null, "substituted": null, "h_list": null},
  {"name": "eval-1", "mountpoint": "/data/imagenet", "pid": null, "state": "waiting",
   "epoch": null, "epochs": null, "index": null, "samples": null, "late": null, "not_late": null,
   "samples_per_s": null, "hits": null}],
 "ended": []}
"""


def mount_status(**changed: Any) -> dict[str, Any]:
    """Of the mount; `changed`: keys of the top."""
    return {**json.loads(_STATUS), **copy.deepcopy(changed)}


def hintsd_status() -> dict[str, Any]:
    """Of its hintsd, with two jobs."""
    found: dict[str, Any] = json.loads(_HINTSD)
    return found


def target(mountpoint: str = MOUNT, device: str = "0:99", uid: int = 0) -> Target:
    """A mount of the table, without a runtime directory."""
    options = {"user_id": str(uid)}
    mount = mounts.Mount(
        7, device, mountpoint, mounts.FILESYSTEM_TYPE, "/mnt/nfs/imagenet", options
    )
    return Target(mount, None)


def host() -> Host:
    """That mount, a dead one and one of another user; that hintsd, and one that is missing."""
    return Host(
        [
            Answer(target(), "up", mount_status()),
            Answer(
                target("/data/coco"),
                "dead",
                {},
                "its keeper and its server are gone",
                "fusecache mount /mnt/nfs/imagenet /data/coco",
            ),
            Answer(target("/home/u/data", uid=54321), "private", {}, "another user's"),
        ],
        {SOCKET: hintsd_status(), "/run/user/1000/fusecache/hintsd.sock": None},
    )
