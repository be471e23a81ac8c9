"""gRPC's TLS files, renewed while connections live: real handshakes with a real front end."""

from __future__ import annotations

import ssl
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from edge_server.config import GrpcConfig
from edge_server.errors import ServingFault
from edge_server.frontends.grpc.server import GrpcFrontend

LIVE = "/inference.GRPCInferenceService/ServerLive"
PATIENCE_S = 60


class Pair(NamedTuple):
    key: Path
    cert: Path


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Make a self-signed certificate for localhost; equal arguments give the same one."""
    folder = tmp_path_factory.mktemp("certificates")

    def make(name: str, *algorithm: str) -> Pair:
        pair = Pair(folder / f"{name}.key", folder / f"{name}.crt")
        if not pair.cert.exists():
            subprocess.run(
                [
                    "openssl", "req", "-x509", "-newkey", *(algorithm or ("rsa:2048",)), "-nodes", "-days", "2",
                    "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost",
                    "-keyout", str(pair.key), "-out", str(pair.cert),
                ],
                check=True, capture_output=True,
            )  # fmt: skip
        return pair

    return make


@pytest.fixture
def files(tmp_path: Path, make_pair: Callable[..., Pair]) -> Pair:
    """The files that the server's flags name, with the pair "first" in them."""
    pair = Pair(tmp_path / "server.key", tmp_path / "server.crt")
    lay_out(make_pair("first"), pair)
    return pair


def lay_out(source: Pair, target: Pair) -> None:
    for origin, copy in zip(source, target, strict=True):
        copy.write_bytes(origin.read_bytes())


def tls(files: Pair, **more: object) -> dict[str, Any]:
    return {"is_tls": True, "server_key": str(files.key), "server_cert": str(files.cert), **more}


def shown(port: int) -> list[str]:
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=PATIENCE_S).split()


def text(path: Path) -> list[str]:
    return path.read_text().split()


def channel_to(port: int, root: Path, own: Pair | None = None) -> grpc.Channel:
    own_bytes = (None, None) if own is None else (own.key.read_bytes(), own.cert.read_bytes())
    credentials = grpc.ssl_channel_credentials(root.read_bytes(), *own_bytes)
    return grpc.secure_channel(f"localhost:{port}", credentials, [("grpc.use_local_subchannel_pool", 1)])


def is_live(channel: grpc.Channel) -> bool:
    return bool(channel.unary_unary(LIVE)(b"", timeout=PATIENCE_S) == b"\x08\x01")


def is_let_in(port: int, root: Path, own: Pair | None) -> bool:
    with channel_to(port, root, own) as channel:
        try:
            return is_live(channel)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False


def test_new_connections_see_the_new_certificate_and_old_ones_go_on(
    open_front_end: Any, files: Pair, make_pair: Callable[..., Pair], make_request: Any
) -> None:
    front_end = open_front_end(**tls(files))
    first, second = make_pair("first"), make_pair("second")
    with channel_to(front_end.port, first.cert) as before:
        assert is_live(before)
        infer = before.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        under_way = infer.future(make_request("held").SerializeToString(), timeout=PATIENCE_S)
        (held,) = front_end.service.wait_for_calls(1)
        lay_out(second, files)
        front_end.frontend.renew_tls(GrpcConfig(**tls(files)))
        assert shown(front_end.port) == text(second.cert)
        assert is_let_in(front_end.port, second.cert, None)
        assert not is_let_in(front_end.port, first.cert, None)
        assert is_live(before)
        held.answer()
        under_way.result()


def test_files_of_other_names_are_taken(open_front_end: Any, files: Pair, make_pair: Callable[..., Pair]) -> None:
    front_end = open_front_end(**tls(files))
    second = make_pair("second", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    front_end.frontend.renew_tls(GrpcConfig(**tls(second)))
    assert shown(front_end.port) == text(second.cert)


def mixed(files: Pair, make_pair: Callable[..., Pair]) -> str:
    files.cert.write_bytes(make_pair("second").cert.read_bytes())
    return "server.key' for gRPC cannot be used: .*MISMATCH"


def cut_off(files: Pair, make_pair: Callable[..., Pair]) -> str:
    files.cert.write_bytes(files.cert.read_bytes()[:300])
    return "server.crt' and key .* cannot be used"


def empty(files: Pair, make_pair: Callable[..., Pair]) -> str:
    files.key.write_bytes(b"")
    return "server.key' for gRPC cannot be used"


def missing(files: Pair, make_pair: Callable[..., Pair]) -> str:
    files.key.unlink()
    return "server key '.*server.key' for gRPC cannot be read: .*No such file"


def missing_certificate(files: Pair, make_pair: Callable[..., Pair]) -> str:
    files.cert.unlink()
    return "server certificate '.*server.crt' for gRPC cannot be read: .*No such file"


def encrypted(files: Pair, make_pair: Callable[..., Pair]) -> str:
    made = ["openssl", "pkcs8", "-topk8", "-passout", "pass:word", "-in", make_pair("first").key, "-out", files.key]
    subprocess.run(made, check=True, capture_output=True)
    return "server.key' for gRPC cannot be used"


def foreign_curve(files: Pair, make_pair: Callable[..., Pair]) -> str:
    lay_out(make_pair("odd", "ec", "-pkeyopt", "ec_paramgen_curve:secp256k1"), files)
    return "server.key' for gRPC cannot be used: they match, but gRPC's TLS library does not accept them"


@pytest.mark.sample
@pytest.mark.parametrize("spoil", [mixed, cut_off, empty, missing, missing_certificate, encrypted, foreign_curve])
def test_files_that_cannot_be_used_are_named_and_the_old_ones_stay(
    open_front_end: Any, files: Pair, make_pair: Callable[..., Pair], spoil: Callable[..., str], transport: str
) -> None:
    if spoil is foreign_curve and transport == "http2":
        pytest.skip("OpenSSL, which http2 uses, takes the keys of every curve")
    front_end = open_front_end(**tls(files))
    reason = spoil(files, make_pair)
    with pytest.raises(ServingFault, match=reason):
        front_end.frontend.renew_tls(GrpcConfig(**tls(files)))
    assert shown(front_end.port) == text(make_pair("first").cert)
    # What was refused once does not stand in the way of what comes after it.
    lay_out(make_pair("second"), files)
    front_end.frontend.renew_tls(GrpcConfig(**tls(files)))
    assert shown(front_end.port) == text(make_pair("second").cert)


def test_whose_client_certificates_count_is_renewed_too(
    open_front_end: Any, files: Pair, make_pair: Callable[..., Pair], tmp_path: Path
) -> None:
    root = tmp_path / "clients.crt"
    old, new, server = make_pair("old client"), make_pair("new client"), make_pair("first").cert
    root.write_bytes(old.cert.read_bytes())
    settings = tls(files, is_mutual_tls=True, root_cert=str(root))
    front_end = open_front_end(**settings)
    assert is_let_in(front_end.port, server, old)
    assert not is_let_in(front_end.port, server, new)
    assert not is_let_in(front_end.port, server, None)
    root.write_bytes(new.cert.read_bytes())
    front_end.frontend.renew_tls(GrpcConfig(**settings))
    assert is_let_in(front_end.port, server, new)
    assert not is_let_in(front_end.port, server, old)
    assert not is_let_in(front_end.port, server, None)
    root.write_bytes(b"no certificate")
    with pytest.raises(ServingFault, match=r"root certificate '.*clients.crt' for gRPC cannot be used"):
        front_end.frontend.renew_tls(GrpcConfig(**settings))
    assert is_let_in(front_end.port, server, new)


def test_whether_clients_need_a_certificate_stays_as_it_was_at_the_start(
    open_front_end: Any, files: Pair, make_pair: Callable[..., Pair]
) -> None:
    client, server = make_pair("old client"), make_pair("first").cert
    mutual = tls(files, is_mutual_tls=True, root_cert=str(client.cert))
    front_end = open_front_end(**mutual)
    front_end.frontend.renew_tls(replace(GrpcConfig(**mutual), is_mutual_tls=False))
    assert not is_let_in(front_end.port, server, None)
    assert is_let_in(front_end.port, server, client)
    with pytest.raises(ServingFault, match="needs a root certificate file, but none is configured"):
        front_end.frontend.renew_tls(replace(GrpcConfig(**mutual), is_mutual_tls=False, root_cert=""))
    assert not is_let_in(front_end.port, server, None)


def test_no_handshake_fails_while_certificates_are_renewed(
    open_front_end: Any, files: Pair, make_pair: Callable[..., Pair], tmp_path: Path
) -> None:
    pairs = [make_pair("first"), make_pair("second")]
    both = tmp_path / "both.crt"
    both.write_bytes(b"".join(pair.cert.read_bytes() for pair in pairs))
    front_end = open_front_end(**tls(files))
    is_over, failures, seen = threading.Event(), [], []

    def shake_hands() -> None:
        while not is_over.is_set():
            try:
                seen.append(is_let_in(front_end.port, both, None))
            except grpc.RpcError as error:
                failures.append(error)

    clients = [threading.Thread(target=shake_hands) for _ in range(3)]
    for client in clients:
        client.start()
    try:
        for number in range(1, 11):
            pair = pairs[number % 2]
            lay_out(pair, files)
            front_end.frontend.renew_tls(GrpcConfig(**tls(files)))
            assert shown(front_end.port) == text(pair.cert)
    finally:
        is_over.set()
        for client in clients:
            client.join()
    assert failures == []
    assert seen
    assert all(seen)


def test_a_start_with_files_that_do_not_fit_says_so(
    service: Any, files: Pair, make_pair: Callable[..., Pair], transport: str
) -> None:
    mixed(files, make_pair)
    with pytest.raises(ServingFault, match=r"server.key' for gRPC cannot be used: .*MISMATCH"):
        GrpcFrontend(service, GrpcConfig(transport=transport, port=0, **tls(files))).start()
    if transport == "http2":
        return  # OpenSSL takes the keys of every curve
    foreign_curve(files, make_pair)
    with pytest.raises(ServingFault, match="gRPC's TLS library does not accept the certificate and its key"):
        GrpcFrontend(service, GrpcConfig(transport=transport, port=0, **tls(files))).start()


def test_renewing_without_tls_does_nothing(open_front_end: Any) -> None:
    front_end = open_front_end()
    front_end.frontend.renew_tls(GrpcConfig(server_cert="/no/such/file.pem"))
    assert front_end.call("ServerLive").live
