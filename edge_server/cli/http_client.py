"""HTTP client of the commands that query a running server: connection options and JSON requests."""

from __future__ import annotations

import argparse
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http.client import HTTPMessage
from typing import IO, Any, NoReturn, cast

from edge_server.cli.options import float_range, parse_header
from edge_server.config.setting import nearest
from edge_server.errors import SUGGESTION

DEFAULT_URL = "http://127.0.0.1:8000"

NO_ANSWER = (OSError, ValueError, http.client.HTTPException)
"""Errors that occur if no server, or another kind of server, answers at an address."""


class Refused(Exception):
    """The server answered with an error. `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: the keys of --header are for the server that the command line names."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> NoReturn:
        fp.close()
        raise Refused(code, f"{req.full_url} redirects to {newurl}: give the address of the server itself")


def add_options(parser: argparse.ArgumentParser, timeout_s: float = 60.0) -> None:
    """Add --url, --header and --timeout."""
    parser.add_argument(
        "--url", default=DEFAULT_URL, type=server_url, help=f"HTTP address of the server; default: {DEFAULT_URL}"
    )
    add_request_options(parser, timeout_s)


def add_request_options(parser: argparse.ArgumentParser, timeout_s: float) -> None:
    """Add --header and --timeout."""
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        type=parse_header,
        metavar="KEY=VALUE",
        help="header to send, such as the key of a restricted API. Repeatable.",
    )
    parser.add_argument(
        "--timeout",
        type=float_range(0.001, 1e6),
        default=timeout_s,
        metavar="SECONDS",
        help=f"time limit for each answer; default: {timeout_s:g}",
    )


def request_json(options: argparse.Namespace, path: str, body: Mapping[str, object] | None = None) -> Any:
    """Send a GET, or with `body` a POST, and return the JSON response. Raises Refused and the errors in NO_ANSWER."""
    with open_response(options, path, body) as response:
        return json.load(response)


def open_response(
    options: argparse.Namespace,
    path: str,
    body: Mapping[str, object] | None = None,
    timeout_s: float | None = None,
) -> http.client.HTTPResponse:
    """Send a request and return the open response, which the caller closes. Raises as `request_json`."""
    headers = dict(options.header)
    data = None
    if body is not None:
        data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
    request = urllib.request.Request(options.url + path, data=data, headers=headers)
    try:
        opener = urllib.request.build_opener(_NoRedirects)
        response = opener.open(request, timeout=timeout_s or options.timeout)
    except urllib.error.HTTPError as error:
        with error:
            raise Refused(error.code, _error_message(error, options.url)) from None
    return cast(http.client.HTTPResponse, response)


def nearest_model(options: argparse.Namespace, model: str, refused: Refused) -> str:
    """Return `, did you mean '...'?` with the server's model of the nearest name, for a refused request to `model`.

    Return "" if that was not refused with 404, the server names a model itself, which it does only without any keys, it
    does not list its models to this client, or none is near.
    """
    if refused.status != http.HTTPStatus.NOT_FOUND or SUGGESTION in str(refused):
        return ""
    try:
        return nearest(model, {str(entry["name"]) for entry in request_json(options, "/v2/repository/index", {})})
    except (Refused, *NO_ANSWER, KeyError, TypeError):
        return ""


def describe_failure(error: BaseException) -> str:
    """Return a text for an error in NO_ANSWER."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ConnectionRefusedError):
        return "connection refused: nothing listens there"
    if isinstance(reason, http.client.RemoteDisconnected):
        return "the server closed the connection: does it use TLS (https://), or ask for a client certificate?"
    if isinstance(reason, OSError):
        return reason.strerror or str(reason) or type(reason).__name__
    if isinstance(reason, http.client.HTTPException):
        return "the server at this address does not speak HTTP/1.1 (is it the gRPC port?)"
    return "the server at this address is no edge-server"


def _error_message(error: urllib.error.HTTPError, url: str) -> str:
    try:
        document = json.loads(error.read(1 << 20))
    except NO_ANSWER:
        document = None
    message = document.get("error") if isinstance(document, dict) else None
    if isinstance(message, dict):  # OpenAI's form
        message = message.get("message")
    if error.code == http.HTTPStatus.NOT_FOUND and message in (None, error.reason):
        return f"{url} has no {urllib.parse.urlsplit(error.url).path}: is it the HTTP address of an edge-server?"
    return str(message) if message else f"HTTP {error.code} {error.reason}"


def server_url(text: str) -> str:
    """Return http://HOST:PORT without a trailing slash. Accepts HOST:PORT too, as tritonclient does."""
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    try:
        parts = urllib.parse.urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_valid = is_valid and ("://" in text or parts.port is not None)
    except ValueError:
        is_valid = False
    if not is_valid or not url.isprintable() or " " in url:
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT, got '{text}'")
    return url
