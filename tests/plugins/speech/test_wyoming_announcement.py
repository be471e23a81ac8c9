"""Announcement of the Wyoming port by multicast DNS, on the loopback interface."""

from __future__ import annotations

import json
import queue
import socket
from pathlib import Path
from typing import Any

import pytest

import edge_server
from edge_server.errors import InvalidRequest

TYPE = "_wyoming._tcp.local."


def find(changes: queue.Queue[tuple[Any, str]], wanted: Any) -> str:
    """Return the name of the next service that changed like this."""
    while True:
        change, name = changes.get(timeout=60)
        if change is wanted:
            return name


@pytest.mark.full
def test_a_port_is_found_while_the_server_runs(tmp_path: Path) -> None:
    zeroconf = pytest.importorskip("zeroconf", reason="needs zeroconf, of the extra test-all")
    changes: queue.Queue[tuple[Any, str]] = queue.Queue()

    def note(zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
        changes.put((state_change, name))

    with zeroconf.Zeroconf(interfaces=["127.0.0.1"]) as listener:
        browser = zeroconf.ServiceBrowser(listener, TYPE, handlers=[note])
        try:
            with edge_server.Server(tmp_path, wyoming="127.0.0.1:0", wyoming_announce=True):
                name = find(changes, zeroconf.ServiceStateChange.Added)
                info = listener.get_service_info(TYPE, name, timeout=30_000)
                assert name.startswith("edge-server on ")
                (address,) = info.parsed_addresses()
                with socket.create_connection((address, info.port), timeout=30) as connection:
                    connection.sendall(b'{"type": "describe"}\n')
                    assert json.loads(connection.makefile("rb").readline())["type"] == "info"
            assert find(changes, zeroconf.ServiceStateChange.Removed) == name
        finally:
            browser.cancel()


def test_an_announcement_needs_a_port(tmp_path: Path) -> None:
    server = edge_server.Server(tmp_path, wyoming_announce=True)
    with pytest.raises(InvalidRequest, match="--wyoming-announce: expected --wyoming=HOST:PORT beside it"):
        server.start()
