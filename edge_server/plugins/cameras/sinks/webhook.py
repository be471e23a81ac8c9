"""Sink that sends each result to a URL, as a POST request with a JSON object."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from urllib.parse import unquote, urlsplit

from edge_server.bounded_http import BoundedHttpConnection, BoundedHttpsConnection
from edge_server.config.setting import shown_url
from edge_server.plugins.cameras.failure_reason import connection_failure
from edge_server.plugins.cameras.sinks.sink_interface import Sink, SinkError, SinkMessage

TIMEOUT_S = 5.0
"""To connect, to send, and for the head of the answer. Its body is not read."""


class Webhook(Sink):
    """A URL that takes POST requests and answers them with a status of 200 to 299.

    No connection is kept: it would often be closed by the receiver between two messages.
    """

    def __init__(self, url: str) -> None:
        self._shown = shown_url(url)
        self._parts = urlsplit(url)
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if self._parts.username is not None:
            pair = f"{unquote(self._parts.username)}:{unquote(self._parts.password or '')}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()

    def send(self, message: SinkMessage) -> bool:
        kind = BoundedHttpsConnection if self._parts.scheme == "https" else BoundedHttpConnection
        assert self._parts.hostname is not None
        connection = kind(self._parts.hostname, self._parts.port, timeout=TIMEOUT_S)
        target = (self._parts.path or "/") + (f"?{self._parts.query}" if self._parts.query else "")
        body = json.dumps(message.as_json(), allow_nan=False).encode()
        try:
            connection.request("POST", target, body, self._headers)
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            reason = connection_failure(error, self._parts.hostname)
            if isinstance(error, TimeoutError):
                reason = f"no answer within {TIMEOUT_S:g} s"
            elif isinstance(error, ssl.SSLCertVerificationError):
                reason = f"the certificate is not valid: {error.verify_message}"
            raise SinkError(f"{self._shown}: {reason}") from None
        finally:
            connection.close()
        if not 200 <= status < 300:
            raise SinkError(f"{self._shown}: expected a status of 200 to 299, given {status}")
        return True
