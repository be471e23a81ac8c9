"""UDP sockets of this machine, from /proc/net/udp: DDS domains of its other programs, for messages about nodes that are
not found, and packets that this process lost because a receive buffer was full."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from edge_server.plugins.ros.transports.ros2_environment import MAX_DOMAIN_ID

RMEM_MAX = Path("/proc/sys/net/core/rmem_max")
"""Largest receive buffer that a program may ask for, in bytes."""

_FIRST_PORT, _PORTS_OF_DOMAIN = 7400, 250
_LARGE_IMAGE = 8 << 20
_MAX_ADVICE = 64 << 20


def explain_no_nodes(domain_id: int, reach: str = "") -> str:
    """Return why no other node may be seen in a domain, by the domains of this machine's other DDS programs.

    `reach` says where nodes are looked for.
    """
    where = f"no other node is seen in ROS domain {domain_id}" + (f", on {reach}" if reach else "")
    domains = domains_of_other_programs()
    if domain_id in domains:
        return (
            f"{where}; another DDS program of this machine is in domain {domain_id} and is not reached, so its network "
            "interface is another one: expected the same ROS_AUTOMATIC_DISCOVERY_RANGE (or ROS_LOCALHOST_ONLY, or "
            "interface in CYCLONEDDS_URI) there and here"
        )
    if domains:
        listed = ", ".join(map(str, sorted(domains)))
        return f"{where}; programs on this machine use domain {listed}: expected the same ROS_DOMAIN_ID"
    return f"{where}: is the camera's ROS_DOMAIN_ID another one, or its network not reached from here?"


def domains_of_other_programs() -> set[int]:
    """Return the DDS domains of this machine's other programs, by their UDP ports (RTPS 2.5, 9.6.2)."""
    ports = {int(row[1].rpartition(":")[2], 16) for row, is_own in _sockets() if not is_own}
    domains = set()
    for port in ports:
        domain, offset = divmod(port - _FIRST_PORT, _PORTS_OF_DOMAIN)
        # A participant has two ports side by side, for discovery and for data: from an offset of 10 on its own ones, or
        # with Cyclone DDS on a network with multicast only those that all participants share, at 0.
        if 0 <= domain <= MAX_DOMAIN_ID and (offset == 0 or (offset >= 10 and offset % 2 == 0)) and port + 1 in ports:
            domains.add(domain)
    return domains


class PacketDrops:
    """Counts dropped UDP packets of this process between two calls of `explain`."""

    def __init__(self) -> None:
        self._dropped: dict[str, int] = {}
        """By the inode of a socket."""

    def explain(self, largest_image: int) -> str:
        """Return a message about packets that were dropped since the last call, "" if none was.

        `largest_image`: bytes of the largest image that came, 0 if unknown. A buffer that holds two of them waits long
        enough for a busy machine.
        """
        before, self._dropped = self._dropped, {row[9]: int(row[-1]) for row, is_own in _sockets() if is_own}
        lost = sum(max(0, count - before.get(inode, 0)) for inode, count in self._dropped.items())
        if not lost:
            return ""
        text = f"Linux dropped {lost} packet(s), as the receive buffer was full, and with them images"
        with contextlib.suppress(OSError, ValueError):
            limit = int(RMEM_MAX.read_text())
            advice = min(2 * (largest_image or _LARGE_IMAGE), _MAX_ADVICE)
            if limit < advice:
                return (
                    f"{text}: net.core.rmem_max is {limit}, expected {advice} or more (sudo sysctl -w), then a restart"
                )
        return f"{text}: the machine is too busy to take them; send fewer or smaller images, or compressed ones"


def _sockets() -> Iterator[tuple[list[str], bool]]:
    """Yield the line of each UDP socket, split into words, and whether the socket is of this process."""
    own = set()
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed since it was listed
            own.add(os.readlink(entry))
    for table in ("/proc/net/udp", "/proc/net/udp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                row = line.split()
                yield row, f"socket:[{row[9]}]" in own
