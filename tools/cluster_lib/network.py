"""The network of a cluster: each host a namespace, a bridge in one of its own, links with a limit.

Each host's eth0 is the end of a veth pair whose other end, at the bridge, is named as the host.
Both ends send at the link's rate at most (tbf), so a host receives at it, too. There is no IPv6 and
nothing else that talks: an idle link passes ARP, and first packets that the bridge floods.
"""

import json
import subprocess
import time
from typing import Any, NamedTuple

BRIDGE = "net"
_BURST_BYTES = 128 << 10  # more than one large segment
_QUEUE_MS = 50
_UP_S = 10.0


class LinkBytes(NamedTuple):
    """What has passed a host's link since it was made; what was dropped has not."""

    received: int
    sent: int


def address(host: int) -> str:
    """Of its eth0. Clusters share addresses: none sees another one."""
    return f"10.77.0.{host + 1}"


def namespace(cluster: str, host: int | str) -> str:
    return f"{cluster}-{BRIDGE if host == BRIDGE else f'h{host}'}"


def make(cluster: str, hosts: int, link_mbit: float) -> None:
    """`link_mbit`: each way, a host's; 0: no limit. RuntimeError: what could not be made, and why.
    Whatever was made, `remains.remove` takes away.
    """
    bridge = namespace(cluster, BRIDGE)
    each = [namespace(cluster, host) for host in range(hosts)]
    _ip(None, *(f"netns add {name}" for name in (bridge, *each)))
    lines = ["link add bridge type bridge", "link set bridge addrgenmode none up"]
    for host, name in enumerate(each):
        lines.append(f"link add h{host} type veth peer name eth0 netns {name}")
        lines.append(f"link set h{host} addrgenmode none master bridge up")
    _ip(bridge, *lines)
    for host, name in enumerate(each):
        _ip(
            name,
            "link set lo up",
            f"address add {address(host)}/24 dev eth0",
            "link set eth0 addrgenmode none up",
        )
        if link_mbit:
            _limit(name, "eth0", link_mbit)
            _limit(bridge, f"h{host}", link_mbit)
    for host in range(hosts):
        _await_up(cluster, host)


def _limit(name: str, device: str, mbit: float) -> None:
    tbf = f"tbf rate {round(mbit * 1e6)}bit burst {_BURST_BYTES} latency {_QUEUE_MS}ms"
    _run(["tc", "-n", name, "qdisc", "add", "dev", device, "root", *tbf.split()])


def link_bytes(cluster: str, host: int) -> LinkBytes:
    stats = _eth0(cluster, host)["stats64"]
    return LinkBytes(stats["rx"]["bytes"], stats["tx"]["bytes"])


def set_link(cluster: str, host: int, *, is_up: bool) -> None:
    """Down: what the host sends, and what is sent to it, is lost without a word."""
    state = "up" if is_up else "down"
    _ip(namespace(cluster, BRIDGE), f"link set h{host} {state}")
    if is_up:
        _await_up(cluster, host)


def _await_up(cluster: str, host: int) -> None:
    """The kernel needs a moment before packets pass."""
    deadline = time.monotonic() + _UP_S
    while _eth0(cluster, host)["operstate"] != "UP":
        if time.monotonic() > deadline:
            raise RuntimeError(f"the link of host {host} did not come up")
        time.sleep(0.02)


def _eth0(cluster: str, host: int) -> dict[str, Any]:
    command = ["ip", "-n", namespace(cluster, host), "-j", "-s", "link", "show", "eth0"]
    found: dict[str, Any] = json.loads(_run(command))[0]
    return found


def _ip(name: str | None, *lines: str) -> None:
    inside = [] if name is None else ["-n", name]
    _run(["ip", *inside, "-batch", "-"], "".join(f"{line}\n" for line in lines))


def _run(command: list[str], told: str = "") -> str:
    done = subprocess.run(command, input=told, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
