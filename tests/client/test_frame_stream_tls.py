"""TLS of the client, with its certificate files."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from edge_server.client import StreamError, Tls


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return key and self-signed certificate of a machine called camera.local."""
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=camera.local",
            "-addext", "subjectAltName=DNS:camera.local", "-keyout", str(key), "-out", str(cert),
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, cert


@pytest.mark.parametrize("is_mutual", [False, True])
def test_a_stream_over_tls(
    scripted: Callable[..., Any], connect: Callable[..., Any], pem: tuple[Path, Path], is_mutual: bool
) -> None:
    key, cert = pem
    pair = (key.read_bytes(), cert.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], pair[1] if is_mutual else None, is_mutual)
    server = scripted(credentials=credentials)
    tls = Tls(cert, cert if is_mutual else "", key if is_mutual else "", server_name="camera.local")
    with connect(server.address, tls=tls) as stream:
        stream.send(b"picture", format="jpeg")
        stream.finish()
        assert len(list(stream.results())) == 1


def test_an_untrusted_certificate_ends_the_connection(
    scripted: Callable[..., Any], connect: Callable[..., Any], pem: tuple[Path, Path]
) -> None:
    key, cert = pem
    server = scripted(credentials=grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())]))
    with connect(server.address, tls=Tls(server_name="camera.local"), reconnects=False) as stream:
        stream.send(b"picture", format="jpeg")
        with pytest.raises(StreamError, match="UNAVAILABLE"):
            next(stream.results())
        assert server.calls == []


def test_a_missing_file_is_reported(connect: Callable[..., Any]) -> None:
    with connect("127.0.0.1:1", tls=Tls("/no/such/file.pem")) as stream:
        stream.send(b"picture", format="jpeg")
        with pytest.raises(FileNotFoundError, match=r"/no/such/file\.pem"):
            next(stream.results())
