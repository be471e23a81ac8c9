"""Asking a running server over HTTP: the options that every such command has, and answers read as JSON."""

from __future__ import annotations

import argparse
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, cast

DEFAULT_URL = "http://127.0.0.1:8000"

NO_ANSWER = (OSError, ValueError, http.client.HTTPException)
"""What comes up when no server, or none of this kind, answers at an address."""


class Refused(Exception):
    """The server answered, with an error. `status` is HTTP's number."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --url, --header and --timeout."""
    parser.add_argument("--url", default=DEFAULT_URL, type=lambda text: text.rstrip("/"), help="address of its HTTP")
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        type=_header,
        metavar="KEY=VALUE",
        help="header to send along: the key of a restricted API. Repeatable.",
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for the answer")


def ask(options: argparse.Namespace, path: str, body: Mapping[str, object] | None = None) -> Any:
    """Return the answer to a GET, or with `body` to a POST. Raises Refused, and NO_ANSWER's errors."""
    with open_answer(options, path, body) as answer:
        return json.load(answer)


def open_answer(
    options: argparse.Namespace,
    path: str,
    body: Mapping[str, object] | None = None,
    more: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> http.client.HTTPResponse:
    """Return an answer to be read by the caller, who closes it. Raises as `ask` does."""
    headers = {**dict(options.header), **(more or {})}
    data = None
    if body is not None:
        data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
    request = urllib.request.Request(options.url + path, data=data, headers=headers)
    try:
        answer = urllib.request.urlopen(request, timeout=timeout_s or options.timeout)
    except urllib.error.HTTPError as error:
        with error:
            raise Refused(error.code, _error_of(error)) from None
    return cast(http.client.HTTPResponse, answer)


def reason_of(error: BaseException) -> str:
    """Return in words why there was no answer."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(reason) or type(reason).__name__


def _error_of(error: urllib.error.HTTPError) -> str:
    try:
        answer = json.loads(error.read(1 << 20))
    except NO_ANSWER:
        answer = None
    told = answer.get("error") if isinstance(answer, dict) else None
    return str(told) if told else f"HTTP {error.code} {error.reason}"


def _header(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got '{text}'")
    return key, value
