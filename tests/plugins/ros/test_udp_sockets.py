"""Packets that Linux drops at a full receive buffer of this process: counted once, with the setting that helps."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from edge_server.plugins.ros.transports import udp_sockets
from edge_server.plugins.ros.transports.udp_sockets import PacketDrops

IMAGE = 1920 * 1080 * 3


def overflow() -> socket.socket:
    """Return a socket whose smallest possible receive buffer was too small for what it got."""
    full = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    full.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    full.bind(("127.0.0.1", 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(20):
            sender.sendto(bytes(1000), full.getsockname())
    return full


def test_drops_are_told_once_with_the_limit_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "rmem_max"
    limit.write_text("212992\n")
    monkeypatch.setattr(udp_sockets, "RMEM_MAX", limit)
    drops = PacketDrops()
    assert drops.explain(IMAGE) == ""
    with overflow():
        message = drops.explain(IMAGE)
        assert message.startswith("Linux dropped ")
        assert f"net.core.rmem_max is 212992, expected {2 * IMAGE} or more" in message
        assert drops.explain(IMAGE) == ""


def test_with_a_large_limit_the_machine_is_too_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "rmem_max"
    limit.write_text(f"{1 << 27}\n")
    monkeypatch.setattr(udp_sockets, "RMEM_MAX", limit)
    with overflow():
        assert "the machine is too busy" in PacketDrops().explain(0)


def test_a_socket_that_is_closed_does_not_hide_drops_of_others() -> None:
    drops = PacketDrops()
    with overflow():
        assert drops.explain(0)
    with overflow():
        assert drops.explain(0)
