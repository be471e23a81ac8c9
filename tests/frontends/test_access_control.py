"""Local addresses, shared keys, and the warning about changes that other machines may make."""

from __future__ import annotations

import pytest

from edge_server.config import parse_serve
from edge_server.frontends.access_control import (
    ORDERING_CATEGORIES,
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
