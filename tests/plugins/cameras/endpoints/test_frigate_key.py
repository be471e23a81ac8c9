"""Frigate's detectors send no key: a server that requires one does not start with them, and leaves nothing open."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import edge_server
from edge_server.errors import InvalidRequest


def test_a_server_that_cannot_start_ends_its_threads(tmp_path: Path) -> None:
    server = edge_server.Server(tmp_path, frigate_zmq="tcp://127.0.0.1:0", http_restricted_api="inference:key=value")
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(InvalidRequest, match="inference needs a key here"):
        server.start()
    assert {thread.name for thread in threading.enumerate() if thread.name.startswith("edge-")} <= before
