"""HTTP client of the commands that query a running server: their options, and JSON answers."""

from __future__ import annotations

import argparse
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, cast

from edge_server.cli.options import header, number

DEFAULT_URL = "http://127.0.0.1:8000"

NO_ANSWER = (OSError, ValueError, http.client.HTTPException)
"""What comes up when no server, or none of this kind, answers at an address."""


class Refused(Exception):
    """The server answered, with an error. `status` is HTTP's number."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def add_options(parser: argparse.ArgumentParser, timeout_s: float = 60.0) -> None:
    """Add --url, --header and --timeout."""
    parser.add_argument("--url", default=DEFAULT_URL, type=_url, help=f"address of its HTTP; default: {DEFAULT_URL}")
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        type=header,
        metavar="KEY=VALUE",
        help="header to send along: the key of a restricted API. Repeatable.",
    )
    parser.add_argument(
        "--timeout",
        type=number(0.001, 1e6),
        default=timeout_s,
        metavar="SECONDS",
        help=f"to wait for each answer; default: {timeout_s:g}",
    )


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
            raise Refused(error.code, _error_of(error, options.url)) from None
    return cast(http.client.HTTPResponse, answer)


def reason_of(error: BaseException) -> str:
    """Return in words why there was no answer."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ConnectionRefusedError):
        return "connection refused: nothing listens there"
    if isinstance(reason, OSError):
        return reason.strerror or str(reason) or type(reason).__name__
    if isinstance(reason, http.client.HTTPException):
        return "what answers there does not speak HTTP/1.1 (is it the gRPC port?)"
    return "what answers there is no edge-server"


def _error_of(error: urllib.error.HTTPError, url: str) -> str:
    try:
        answer = json.loads(error.read(1 << 20))
    except NO_ANSWER:
        answer = None
    told = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(told, dict):  # OpenAI's form
        told = told.get("message")
    if error.code == http.HTTPStatus.NOT_FOUND and told in (None, error.reason):
        return f"{url} has no {urllib.parse.urlsplit(error.url).path}: is it the HTTP of an edge-server?"
    return str(told) if told else f"HTTP {error.code} {error.reason}"


def _url(text: str) -> str:
    """Return http://HOST:PORT without a slash at its end; HOST:PORT, as tritonclient has it, is taken too."""
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    try:
        parts = urllib.parse.urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_one = is_one and ("://" in text or parts.port is not None)
    except ValueError:
        is_one = False
    if not is_one or not url.isprintable() or " " in url:
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT, got '{text}'")
    return url
