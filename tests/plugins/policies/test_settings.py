"""Addresses of the wires of robot policies."""

from __future__ import annotations

from pathlib import Path

import pytest

import edge_server
from edge_server.config import ConfigError
from edge_server.errors import InvalidRequest


@pytest.mark.parametrize("address", ["8010", "tcp://0.0.0.0:8010", "localhost:", "::1:8010", "localhost:65536"])
@pytest.mark.parametrize("setting", ["policy_openpi", "policy_groot"])
def test_an_address_has_a_host_and_a_port(tmp_path: Path, setting: str, address: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        edge_server.Server(tmp_path, **{setting: address})


@pytest.mark.parametrize("address", ["localhost:8010/", "/arm", "localhost:8010/arm/2"])
def test_the_model_behind_an_address_is_one_name(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT or HOST:PORT/MODEL"):
        edge_server.Server(tmp_path, policy_groot=address)


def test_ipv6_addresses_and_models_are_taken(tmp_path: Path) -> None:
    edge_server.Server(tmp_path, policy_openpi="[::1]:0", policy_groot="[::1]:0/arm")


@pytest.mark.parametrize(("setting", "protocol"), [("policy_openpi", "openpi"), ("policy_groot", "GR00T")])
def test_a_server_that_asks_for_certificates_does_not_open_a_port_to_other_machines(
    tmp_path: Path, setting: str, protocol: str
) -> None:
    files = {"http_port": 0, "http_tls_cert": "/c", "http_tls_key": "/k", "https_client_ca": "/ca"}
    server = edge_server.Server(tmp_path, **{setting: "0.0.0.0:0"}, **files)
    message = f"--https-client-ca asks for a proof that clients of {protocol} cannot give"
    with pytest.raises(InvalidRequest, match=message):
        server.start()
