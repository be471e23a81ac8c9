"""Detector of network packets that Linux dropped because a receive buffer of this process was full."""

from __future__ import annotations

import contextlib
from pathlib import Path

from edge_server.plugins.ros.transports.dds_domains import socket_inodes

RMEM_MAX = Path("/proc/sys/net/core/rmem_max")
"""Largest receive buffer that a program may ask for, in bytes."""

_TABLES = Path("/proc/net/udp"), Path("/proc/net/udp6")
_LARGE_IMAGE = 8 << 20
_MAX_ADVICE = 64 << 20


class PacketDrops:
    """Counts dropped UDP packets of this process between two calls of `explain`."""

    def __init__(self) -> None:
        self._dropped: dict[str, int] = {}

    def explain(self, largest_image: int) -> str:
        """Return a message about packets that were dropped since the last call, "" if none was.

        `largest_image`: bytes of the largest image that came, 0 if unknown. A buffer that holds two of them waits long
        enough for a busy machine.
        """
        before, self._dropped = self._dropped, _drops_of_own_sockets()
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


def _drops_of_own_sockets() -> dict[str, int]:
    """Return the drops of each UDP socket by its inode, both as /proc/net/udp writes them."""
    own, drops = socket_inodes(), {}
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                row = line.split()
                if row[9] in own:
                    drops[row[9]] = int(row[-1])
    return drops
