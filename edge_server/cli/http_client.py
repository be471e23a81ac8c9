"""HTTP client of the commands that query a running server: connection options and JSON requests."""

from __future__ import annotations

import argparse
import functools
import http.client
import json
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http.client import HTTPMessage
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from edge_server.cli.options import add_header_and_tls_files, float_range
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


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: the keys of --header are for the server that the command line names."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> NoReturn:
        fp.close()
        raise Refused(code, f"{req.full_url} redirects to {newurl}: give the address of the server itself")


def add_options(parser: argparse.ArgumentParser, timeout_s: float = 60.0) -> None:
    """Add --url and the options of `add_request_options`."""
    parser.add_argument(
        "--url", default=DEFAULT_URL, type=server_url, help=f"HTTP address of the server; default: {DEFAULT_URL}"
    )
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
        opener = urllib.request.build_opener(NoRedirects, https_handler(options, options.url))
        response = opener.open(request, timeout=timeout_s or options.timeout)
    except urllib.error.HTTPError as error:
        with error:
            raise Refused(error.code, _error_message(error, options.url)) from None
    return cast(http.client.HTTPResponse, response)


def https_handler(options: argparse.Namespace, url: str) -> urllib.request.HTTPSHandler:
    """Return urllib's handler with the files of --tls-root, --tls-cert and --tls-key. Raises InvalidRequest."""
    return urllib.request.HTTPSHandler(context=tls_context(options, url))


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
    if isinstance(_reason(error), ConnectionRefusedError):
        text += "; start `edge-server serve` there, or give another --url"
    return text


def describe_failure(error: BaseException) -> str:
    """Return a text for an error in NO_ANSWER."""
    reason = _reason(error)
    if isinstance(reason, ConnectionRefusedError):
        return "connection refused: nothing listens there"
    if isinstance(reason, _CLOSED):
        return (
            "the server closed the connection: does it use TLS (https://), or want a client certificate (--tls-cert)?"
        )
    if isinstance(reason, ssl.SSLError):
        return _describe_tls_failure(reason)
    if isinstance(reason, OSError):
        return reason.strerror or str(reason) or type(reason).__name__
    if isinstance(reason, http.client.HTTPException):
        return "the server at this address does not speak HTTP/1.1 (is it the gRPC port?)"
    return "the server at this address is no edge-server"


_CLOSED = (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""Errors of a connection that the server closed. http.client.RemoteDisconnected is a ConnectionResetError."""


def _reason(error: BaseException) -> BaseException | str:
    return error.reason if isinstance(error, urllib.error.URLError) else error


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
    if expected := re.search(_EXPECTED_HEADER, str(message)):
        message = f"{message}; give it with --header {expected[1]}=VALUE"
    return str(message) if message else f"HTTP {error.code} {error.reason}"


def server_url(text: str) -> str:
    """Return http://HOST:PORT without a trailing slash. Accepts HOST:PORT too, as tritonclient does."""
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    try:
        parts = urllib.parse.urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        # A user would become part of the name that is looked up, which tells the password to name servers.
        is_valid = is_valid and "@" not in parts.netloc
        is_valid = is_valid and ("://" in text or parts.port is not None)
    except ValueError:
        is_valid = False
    if not is_valid or not url.isprintable() or " " in url:
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT, got '{text}'")
    return url
