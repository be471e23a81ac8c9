"""HTTP client of the commands that query a running server: connection options and JSON requests."""

from __future__ import annotations

import argparse
import functools
import http.client
import json
import math
import re
import ssl
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_server.bounded_http import BoundedResponse, HttpClient
from edge_server.cli.options import (
    GRPC_PORT,
    HTTP_PORT,
    URL_FORMS,
    add_header_and_tls_files,
    float_range,
    replace_port,
)
from edge_server.config.setting import nearest
from edge_server.default_tls import make_default_tls_context
from edge_server.errors import SUGGESTION, InvalidRequest

DEFAULT_URL = "http://127.0.0.1:8000"

_EXPECTED_HEADER = re.compile(r"This API is restricted, expecting header '([^']+)'$")
"""Message of the server to a client without the key of a restricted API."""

NO_ANSWER = (OSError, ValueError, http.client.HTTPException)
"""Errors that occur if no server, or another kind of server, answers at an address."""


class Refused(Exception):
    """The server answered with an error. `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def refuse_redirect(url: str, next_url: str) -> bool:
    """Raise Refused: the keys of --header are for the server that the command line names."""
    raise Refused(http.HTTPStatus.FOUND, f"{url} redirects to {next_url}: give the address of the server itself")


def add_options(parser: argparse.ArgumentParser, timeout_s: float = 60.0) -> None:
    """Add --url and the options of `add_request_options`."""
    parser.add_argument(
        "--url", default=DEFAULT_URL, type=server_url, metavar="ADDRESS",
        help=f"address of the server, which is asked over HTTP: {URL_FORMS}; default: {DEFAULT_URL}",
    )  # fmt: skip
    add_request_options(parser, timeout_s)


def add_request_options(parser: argparse.ArgumentParser, timeout_s: float) -> None:
    """Add --header, the files of TLS and --timeout."""
    add_header_and_tls_files(parser)
    parser.add_argument(
        "--timeout",
        type=float_range(0.001, 1e6),
        default=timeout_s,
        metavar="SECONDS",
        help=f"time limit for each answer; default: {timeout_s:g}",
    )


def request_json(options: argparse.Namespace, path: str, body: Mapping[str, object] | None = None) -> Any:
    """Send a GET, or with `body` a POST, and return the JSON response.

    Raises Refused, the errors in NO_ANSWER, and InvalidRequest for the files of TLS.
    """
    with _open(options, path, body, options.timeout) as response:
        return json.load(response)


def open_response(
    options: argparse.Namespace,
    path: str,
    body: Mapping[str, object] | None = None,
    timeout_s: float | None = None,
) -> BoundedResponse:
    """Send a request and return the open response, which the caller closes and which may last: only a silence of the
    timeout ends it. Raises as `request_json`."""
    response = _open(options, path, body, timeout_s or options.timeout)
    response.set_deadline(math.inf)
    return response


def _open(
    options: argparse.Namespace, path: str, body: Mapping[str, object] | None, timeout_s: float
) -> BoundedResponse:
    headers = dict(options.header)
    data = None
    if body is not None:
        data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
    client = HttpClient(refuse_redirect, tls=tls_context(options, options.url))
    response = client.open(options.url + path, data, headers, timeout_s=timeout_s)
    if not response.is_success:
        with response:
            raise Refused(response.status, _error_message(response, options.url))
    return response


def tls_context(options: argparse.Namespace, url: str) -> ssl.SSLContext | None:
    """Return the TLS settings for a URL, with the files of --tls-root, --tls-cert and --tls-key; None: not https.

    Raises InvalidRequest if a file cannot be used, or if files are given for another URL than https.
    """
    files = (options.tls_root, options.tls_cert, options.tls_key)
    if url.startswith("https:"):
        return _load_tls_files(*files) if any(files) else make_default_tls_context()
    if any(files):
        raise InvalidRequest(f"--tls-root, --tls-cert and --tls-key need an address with https://, given {url}")
    return None


def grpc_tls_context(options: argparse.Namespace) -> ssl.SSLContext | None:
    """Return the TLS settings for an address of gRPC, from --tls and the files of `tls_context`; None: no TLS.

    Raises InvalidRequest if a file cannot be used.
    """
    if not (options.tls or options.tls_root or options.tls_cert):
        return None
    return _load_tls_files(options.tls_root, options.tls_cert, options.tls_key, "h2")


@functools.cache
def _load_tls_files(root: Path | None, certificate: Path | None, key: Path | None, alpn: str = "") -> ssl.SSLContext:
    if key and not certificate:
        raise InvalidRequest("--tls-key is given without --tls-cert, the certificate of the key")
    given = f"--tls-root={root}"
    try:
        context = make_default_tls_context(cafile=root)
        if certificate:
            given = f"--tls-cert={certificate}" + (f" --tls-key={key}" if key else "")
            context.load_cert_chain(certificate, key)
    except OSError as error:
        reason = f"no valid PEM files: {error}" if isinstance(error, ssl.SSLError) else error.strerror
        raise InvalidRequest(f"{given}: {reason}") from None
    if alpn:
        context.set_alpn_protocols([alpn])
    return context


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


def no_answer(options: argparse.Namespace, error: BaseException) -> str:
    """Return a text for an error in NO_ANSWER of a request to --url."""
    text = f"no answer from {options.url}: {describe_failure(error)}"
    if isinstance(error, ConnectionRefusedError):
        text += "; start `edge-server serve` there, or give another --url"
    return text


def describe_failure(error: BaseException) -> str:
    """Return a text for an error in NO_ANSWER."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: nothing listens there"
    if isinstance(error, _CLOSED):
        return (
            "the server closed the connection: does it use TLS (https://), or want a client certificate (--tls-cert)?"
        )
    if isinstance(error, ssl.SSLError):
        return _describe_tls_failure(error)
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    if isinstance(error, http.client.HTTPException):
        return "the server at this address does not speak HTTP/1.1 (is it the gRPC port?)"
    return "the server at this address is no edge-server"


_CLOSED = (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""Errors of a connection that the server closed. http.client.RemoteDisconnected is a ConnectionResetError."""


_OTHER_NAME = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL's x509_vfy.h."""

_UNKNOWN_AUTHORITY = (18, 19, 20, 21)
"""Of the same file: the certificate, or the first of its chain, is signed by itself, or its issuer is unknown."""


def _describe_tls_failure(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"the server's certificate is refused (CERTIFICATE_VERIFY_FAILED): {error.verify_message}"
        if error.verify_code in _UNKNOWN_AUTHORITY:
            text += "; name the file of its certificate authority with --tls-root=FILE"
        elif error.verify_code in _OTHER_NAME:
            text += "; use a name or IP address of the certificate as the address"
        return text
    if "CERTIFICATE_REQUIRED" in (error.reason or ""):
        return "the server asks for a client certificate: give --tls-cert=FILE and --tls-key=FILE"
    if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        return "the server at this address does not use TLS: http://?"
    return f"TLS: {error.reason or error}"


def _error_message(response: BoundedResponse, url: str) -> str:
    try:
        document = json.loads(response.read(1 << 20))
    except NO_ANSWER:
        document = None
    message = document.get("error") if isinstance(document, dict) else None
    if isinstance(message, dict):  # OpenAI's form
        message = message.get("message")
    if response.status == http.HTTPStatus.NOT_FOUND and message in (None, response.reason):
        return f"{url} has no {urllib.parse.urlsplit(response.url).path}: is it the HTTP address of an edge-server?"
    if expected := re.search(_EXPECTED_HEADER, str(message)):
        message = f"{message}; give it with --header {expected[1]}=VALUE"
    return str(message) if message else f"HTTP {response.status} {response.reason}"


def server_url(text: str) -> str:
    """Return http://HOST:PORT without a trailing slash for the address of a server, see URL_FORMS.

    That of gRPC is refused if its port is not the default one, because then nothing says which port HTTP has.
    """
    scheme, separator, netloc = text.rpartition("://")
    if scheme in ("grpc", "grpcs"):
        address = replace_port(netloc, GRPC_PORT, HTTP_PORT) or ""
        url = f"{'https' if scheme == 'grpcs' else 'http'}://{address}"
    elif not separator:
        url = f"http://{replace_port(text.rstrip('/'), '', HTTP_PORT) or text}".rstrip("/")
    else:
        url = text.rstrip("/")
    try:
        parts = urllib.parse.urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        # A user would become part of the name that is looked up, which tells the password to name servers.
        is_valid = is_valid and "@" not in parts.netloc
        is_valid = is_valid and (bool(separator) or parts.port is not None)
    except ValueError:
        is_valid = False
    if not is_valid or not url.isprintable() or " " in url:
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT, got '{text}'")
    return url
