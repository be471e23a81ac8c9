"""TLS of the client, with its certificate files."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from edge_server.client import FrameStream, StreamError, Tls, http2_call, server_connection
from edge_server.errors import InvalidRequest


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


def refusal(address: str, tls: Tls) -> str:
    with FrameStream(address, "m", tls=tls, reconnects=False) as stream:
        stream.send(b"picture", format="jpeg")
        with pytest.raises(StreamError) as caught:
            next(stream.results())
    assert (caught.value.status, caught.value.heals) == ("UNAVAILABLE", True)
    return str(caught.value)


def serve_once(answer: Callable[[socket.socket], None]) -> tuple[str, threading.Thread]:
    """Return the address of a listener that answers one connection, and its thread."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listener, listener.accept()[0] as sock:
            answer(sock)

    thread = threading.Thread(target=run)
    thread.start()
    return f"127.0.0.1:{listener.getsockname()[1]}", thread


def test_the_reason_is_named_when_tls_does_not_begin(
    scripted: Callable[..., Any], pem: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, cert = pem
    server = scripted(credentials=grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())]))
    assert "CERTIFICATE_VERIFY_FAILED: self-signed certificate" in refusal(
        server.address, Tls(server_name="camera.local")
    )
    assert "certificate is not valid for '127.0.0.1'" in refusal(server.address, Tls(cert))
    assert "WRONG_VERSION_NUMBER" in refusal(scripted().address, Tls(cert))

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    def shake_hands(sock: socket.socket) -> None:
        with context.wrap_socket(sock, server_side=True) as tls:
            tls.recv(1)

    address, thread = serve_once(shake_hands)
    assert "no HTTP/2 over TLS" in refusal(address, Tls(cert, server_name="camera.local"))
    thread.join()
    address, thread = serve_once(lambda sock: None)
    assert "failed to begin TLS" in refusal(address, Tls(cert))
    thread.join()

    monkeypatch.setattr(http2_call, "CONNECT_TIMEOUT_S", 0.1)
    is_over = threading.Event()
    address, thread = serve_once(lambda sock: is_over.wait(20) and None)
    assert "timed out" in refusal(address, Tls(cert))
    is_over.set()
    thread.join()


def test_a_server_that_refuses_the_client_ends_the_stream_with_the_reason(
    scripted: Callable[..., Any], pem: tuple[Path, Path]
) -> None:
    key, cert = pem
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.load_verify_locations(cert)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])

    def shake_hands(sock: socket.socket) -> None:
        with context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False) as tls:
            with contextlib.suppress(ssl.SSLError):
                tls.do_handshake()
            # Closed with unread data, the kernel would reset the connection, and the client lose the alert.
            tls.shutdown(socket.SHUT_WR)
            while tls.recv(65536):
                pass

    address, thread = serve_once(shake_hands)
    assert "TLSV13_ALERT_CERTIFICATE_REQUIRED" in refusal(address, Tls(cert, server_name="camera.local"))
    thread.join()


def test_a_wrong_file_is_named_before_the_connection_opens(pem: tuple[Path, Path], tmp_path: Path) -> None:
    key, cert = pem
    wrong, locked = tmp_path / "wrong.pem", tmp_path / "locked.pem"
    wrong.write_text("no certificate")
    subprocess.run(
        [
            "openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-aes-128-cbc",
            "-pass", "pass:secret", "-out", str(locked),
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    for tls, text in (
        (Tls(wrong), "wrong.pem: expected certificates in a PEM file"),
        (Tls(key), "server.key: expected certificates in a PEM file"),
        (Tls(cert, wrong, key), "wrong.pem: expected a client certificate in a PEM file and its key"),
        (Tls(cert, cert), "server.crt: expected a client certificate in a PEM file and its key .* in the same file"),
        (Tls(cert, cert, locked), "server.crt: expected .* and its key without a password in .*locked.pem"),
        (Tls(cert, "", key), "server.key: expected a client certificate beside its key, given none"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            tls.context()
    assert server_connection.ServerEndpoint("localhost:1", Tls(cert)).tls_session() is not None
