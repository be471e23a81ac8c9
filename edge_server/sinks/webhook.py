"""Webhook sink: one POST request with a JSON object for each message."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from urllib.parse import unquote, urlsplit

from edge_server.config.sources_config import shown_url
from edge_server.sinks.sink_interface import SinkError, SinkMessage

TIMEOUT_S = 5.0


class Webhook:
    """A URL that takes POST requests and answers them with a status of 200 to 299. One connection is kept."""

    def __init__(self, url: str) -> None:
        self._shown = shown_url(url)
        self._parts = urlsplit(url)
        self._headers = {"Content-Type": "application/json"}
        if self._parts.username is not None:
            pair = f"{unquote(self._parts.username)}:{unquote(self._parts.password or '')}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        self._connection: http.client.HTTPConnection | None = None

    def open(self) -> None:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None
        self._connection = kind(self._parts.hostname, self._parts.port, timeout=TIMEOUT_S)

    def send(self, message: SinkMessage) -> None:
        assert self._connection is not None
        target = (self._parts.path or "/") + (f"?{self._parts.query}" if self._parts.query else "")
        body = json.dumps(message.as_json(), allow_nan=False).encode()
        try:
            self._connection.request("POST", target, body, self._headers)
            response = self._connection.getresponse()
            # The connection is kept only if the whole answer was read.
            rest = response.read(1 << 16)
            if len(rest) == 1 << 16:
                self._connection.close()
        except (OSError, http.client.HTTPException) as error:
            raise SinkError(f"{self._shown}: {_failure(error)}") from None
        if not 200 <= response.status < 300:
            raise SinkError(f"{self._shown}: expected a status of 200 to 299, given {response.status}")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _failure(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {TIMEOUT_S:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not valid: {error.verify_message}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"the connection broke ({type(error).__name__})"
