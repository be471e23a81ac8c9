"""Local addresses, shared keys, and the warning about changes that other machines may make."""

from __future__ import annotations

import pytest

from edge_server.config import parse_serve
from edge_server.errors import InvalidRequest
from edge_server.frontends.access_control import (
    ORDERING_CATEGORIES,
    check_plugin_port,
    find_unprotected_categories,
    is_this_machine,
    open_without_token,
    required_picture_access,
)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
def test_loopback_is_this_machine(address: str) -> None:
    assert is_this_machine(address)


@pytest.mark.parametrize("address", ["192.168.1.4", "::ffff:10.0.0.1", "fe80::1%eth0", "0.0.0.0", "", None, "x"])
def test_any_other_address_is_another_machine(address: str | None) -> None:
    assert not is_this_machine(address)


OPEN = ["--http-address=0.0.0.0", "--grpc-address=::"]
EXPLICIT = "--model-control-mode=explicit"
KEYS = ["--http-restricted-api=logging,trace:key=word", "--grpc-restricted-protocol=logging,trace:key=word"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([EXPLICIT], ""),
        (["--http-address=localhost", "--grpc-address=[::1]"], ""),
        (OPEN, "logging, trace over HTTP and gRPC"),
        ([*OPEN, EXPLICIT], "logging, model-repository, trace over HTTP and gRPC"),
        ([*OPEN, "--allow-client-shm"], "logging, shared-memory, trace over HTTP and gRPC"),
        ([*OPEN, EXPLICIT, *KEYS], "model-repository over HTTP and gRPC"),
        ([*OPEN, EXPLICIT, KEYS[0]], "model-repository over HTTP; logging, model-repository, trace over gRPC"),
        ([*OPEN, *KEYS], ""),
        ([*OPEN, "--allow-grpc=false"], "logging, trace over HTTP"),
    ],
)
def test_the_start_line_names_control_requests_open_to_any_machine(flags: list[str], told: str) -> None:
    sentence = find_unprotected_categories(parse_serve(["--model-repository=/m", *flags], {}).config)
    assert sentence == (f"any machine may give orders without a key: {told}" if told else "")


@pytest.mark.parametrize(
    ("flags", "closed", "told"),
    [
        ([], set(), ""),
        (["--auth-tokens-file=/t"], {"inference", "metadata", "model-config", "statistics", "view"},
         "health, metrics, reflection, openapi, the page's files"),
        (["--auth-tokens-file=/t"], {"inference", "metadata", "model-config", "statistics", "view", "metrics",
                                     "reflection", "openapi", "health"}, "the page's files"),
        (["--auth-tokens-file=/t"], {"metadata", "model-config", "statistics", "view"},
         "health, inference, metrics, reflection, openapi, the page's files"),
        (["--auth-tokens-file=/t", "--http-restricted-api=inference,metrics:key=word"],
         {"metadata", "model-config", "statistics", "view"},
         "health, inference over gRPC, reflection, openapi, the page's files"),
        (["--auth-tokens-file=/t", "--allow-http=false", "--allow-metrics=false"],
         {"metadata", "model-config", "statistics", "inference"}, "health, reflection"),
    ],
)  # fmt: skip
def test_the_start_names_what_needs_no_token(flags: list[str], closed: set[str], told: str) -> None:
    config = parse_serve(["--model-repository=/m", *flags], {}).config
    sentence = open_without_token(config, {*closed, *ORDERING_CATEGORIES}.__contains__)
    assert sentence == (f"no token is needed for: {told}" if told else "")


OPEN = "--http-address=0.0.0.0"


@pytest.mark.parametrize(
    ("flags", "needs_token", "told"),
    [
        ([], False, ""),
        ([OPEN, "--allow-http=false"], False, ""),
        ([OPEN], False, "camera pictures: this machine only; --view-open shows them to others"),
        ([OPEN, "--view-open"], False, "any machine sees camera pictures without a key: --view-open"),
        ([OPEN, "--view-open"], True, "camera pictures need a key"),
        ([OPEN, "--http-restricted-api=view:k=v"], False, "camera pictures need a key"),
    ],
)
def test_the_start_line_says_who_sees_camera_pictures(flags: list[str], needs_token: bool, told: str) -> None:
    config = parse_serve(["--model-repository=/m", *flags], {}).config
    assert required_picture_access(config, needs_token=needs_token) == told


HTTPS = ["--http-tls-cert=/c", "--http-tls-key=/k", "--https-client-ca=/ca"]
MUTUAL = ["--grpc-use-ssl", "--grpc-use-ssl-mutual", "--grpc-server-cert=/c", "--grpc-server-key=/k"]
MUTUAL += ["--grpc-root-cert=/ca"]


@pytest.mark.parametrize(
    ("flags", "proofs"),
    [
        (HTTPS, "--https-client-ca"),
        (MUTUAL, "--grpc-use-ssl-mutual"),
        (["--grpc-restricted-protocol=inference:key=word"], "--grpc-restricted-protocol"),
        ([*HTTPS, *MUTUAL], "--https-client-ca and --grpc-use-ssl-mutual"),
    ],
)
@pytest.mark.parametrize("sends_key", [True, False])
def test_a_port_whose_clients_cannot_give_the_demanded_proof_opens_on_this_machine_only(
    flags: list[str], proofs: str, sends_key: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = parse_serve(["--model-repository=/m", *flags], {}).config
    for address in ("0.0.0.0:8010", "box.local:8010/arm", "[::]:8010"):
        with pytest.raises(InvalidRequest) as caught:
            check_plugin_port(config, "--wire", address, "the wire", needs_key=False, sends_key=sends_key)
        assert f"--wire={address}: {proofs} asks for a proof that clients of the wire cannot give" in str(caught.value)
        assert ("--auth-tokens-file" in str(caught.value)) is sends_key
    assert caplog.text == ""
    for number, address in enumerate(("127.0.0.1:8010/arm", "localhost:0", "[::1]:1"), 1):
        check_plugin_port(config, "--wire", address, "the wire", needs_key=False, sends_key=sends_key)
        assert caplog.text.count("programs of this machine run inference without it") == number


def test_a_port_that_takes_keys_and_tokens_opens_where_inference_needs_one(caplog: pytest.LogCaptureFixture) -> None:
    config = parse_serve(["--model-repository=/m", *HTTPS], {}).config
    check_plugin_port(config, "--wire", "0.0.0.0:1", "the wire", needs_key=True, sends_key=True)
    with pytest.raises(InvalidRequest, match="--wire: inference needs a key here, and clients of the wire send none"):
        check_plugin_port(config, "--wire", "127.0.0.1:1", "the wire", needs_key=True, sends_key=False)
    open_config = parse_serve(["--model-repository=/m"], {}).config
    check_plugin_port(open_config, "--wire", "0.0.0.0:1", "the wire", needs_key=False, sends_key=False)
    assert caplog.text == ""
