"""What the keeper hands to a server: the mount's configuration and its descriptors (inherited)."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """What the keeper hands over. Descriptors are inherited."""

    config: dict[str, Any]
    fuse_fd: int
    source_fd: int
    table_fd: int
    control_fd: int
    ready_fd: int
    source_device: str  # "major:minor" of the source directory, known without asking the origin
    keeper_pid: int
    restarts: int
    mounted_at: float  # seconds since the epoch
    resume: bool  # takes over a live mount
    planned: bool  # ... because it was asked for, not because the last server died
    # mounts.identity of the source when it was opened; None: from a keeper that does not tell
    source_identity: dict[str, str] | None = None
    device: str = ""  # "major:minor" of the mount; "": from a keeper that does not tell

    @classmethod
    def from_json(cls, text: str) -> Launch:
        fields = json.loads(text)
        fds = fields.pop("fds")
        return cls(**fields, **{f"{name}_fd": fd for name, fd in fds.items()})

    def report(self, **message: Any) -> None:
        """One JSON line to the keeper. It may be gone: then there is nothing to tell."""
        try:
            os.write(self.ready_fd, json.dumps(message).encode() + b"\n")
        except OSError:
            log.info("the keeper does not listen")

    def beat(self) -> bool:
        """A sign of life to the keeper (processes.Watch). False: it does not want any."""
        try:
            os.set_blocking(self.ready_fd, False)
            os.write(self.ready_fd, b"\n")
        except BlockingIOError:
            pass  # the keeper is stopped
        except OSError:
            return False
        return True
