"""Frigate's detectors send neither key nor certificate: a server that requires one does not start with them."""

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


def test_a_server_that_asks_for_certificates_does_not_open_a_port_to_other_machines(tmp_path: Path) -> None:
    files = {"http_port": 0, "http_tls_cert": "/c", "http_tls_key": "/k", "https_client_ca": "/ca"}
    server = edge_server.Server(tmp_path, frigate_zmq="tcp://*:0", **files)
    with pytest.raises(InvalidRequest, match="--https-client-ca asks for a proof that clients of Frigate cannot give"):
        server.start()
