"""Status numbers of all error codes."""

from __future__ import annotations

import inspect

from edge_server import errors
from edge_server.frontends.error_status import GRPC_STATUS, HTTP_STATUS, grpc_status, http_status, retry_after


def test_every_error_class_maps_to_the_number_of_its_code():
    classes = [
        kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.EdgeServerError)
    ]
    assert len(classes) > 10
    for kind in classes:
        error = kind("text", "problem") if kind is errors.BadSchema else kind("text")
        assert http_status(error) == HTTP_STATUS[kind.code]
        assert grpc_status(error) == GRPC_STATUS[kind.code]


def test_every_code_has_on_both_wires_the_number_that_clients_expect():
    expected = {
        "UNKNOWN": (400, 2),
        "INTERNAL": (500, 13),
        "NOT_FOUND": (404, 5),
        "INVALID_ARG": (400, 3),
        "UNAVAILABLE": (503, 14),
        "UNSUPPORTED": (501, 12),
        "ALREADY_EXISTS": (400, 6),
        "CANCELLED": (499, 1),
        "RESOURCE_EXHAUSTED": (429, 8),
        "ABORTED": (409, 10),
        "UNAUTHENTICATED": (401, 16),
        "PERMISSION_DENIED": (403, 7),
    }
    codes = errors.ErrorCode
    assert {code.value: (HTTP_STATUS[code], GRPC_STATUS[code]) for code in codes} == expected


def test_retry_after_is_whole_seconds_rounded_up():
    table = [(None, None), (0, "0"), (0.01, "1"), (1.0, "1"), (2.5, "3"), (-1, "0")]
    assert [(seconds, retry_after(errors.Throttled("hot", retry_after_s=seconds))) for seconds, _ in table] == table
