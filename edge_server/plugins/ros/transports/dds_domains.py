"""Search for DDS domains in which other programs of this machine take part, for messages about nodes that are not
found."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from edge_server.plugins.ros.transports.ros2_environment import MAX_DOMAIN_ID

_FIRST_PORT, _PORTS_OF_DOMAIN = 7400, 250


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
    own = socket_inodes()
    ports = set()
    for path in ("/proc/net/udp", "/proc/net/udp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(path).read_text().splitlines()[1:]]
            ports |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[9] not in own}
    domains = set()
    for port in ports:
        domain, offset = divmod(port - _FIRST_PORT, _PORTS_OF_DOMAIN)
        # A participant has two ports side by side, for discovery and for data: from an offset of 10 on its own ones, or
        # with Cyclone DDS on a network with multicast only those that all participants share, at 0.
        if 0 <= domain <= MAX_DOMAIN_ID and (offset == 0 or (offset >= 10 and offset % 2 == 0)) and port + 1 in ports:
            domains.add(domain)
    return domains


def socket_inodes() -> set[str]:
    """Return the inodes of this process's sockets, as /proc/net writes them."""
    inodes = set()
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed since it was listed
            kind, _, inode = os.readlink(entry).partition(":")
            if kind == "socket":
                inodes.add(inode.strip("[]"))
    return inodes
