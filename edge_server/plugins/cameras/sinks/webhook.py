"""Sink that sends each result to a URL, as a POST request with a JSON object."""

from __future__ import annotations

import base64
import http.client
from urllib.parse import unquote, urlsplit

from edge_server.bounded_http import HttpClient
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
        parts = urlsplit(url)
        self._host = parts.hostname
        self._url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        self._headers = {"Content-Type": "application/json"}
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        self._client = HttpClient(uses_proxy=False)

    def send(self, message: SinkMessage) -> bool:
        body = message.json_text().encode()
        try:
            with self._client.open(self._url, body, self._headers, timeout_s=TIMEOUT_S) as response:
                status, is_success = response.status, response.is_success
        except (OSError, http.client.HTTPException) as error:
            raise SinkError(f"{self._shown}: {connection_failure(error, self._host, TIMEOUT_S)}") from None
        if not is_success:
            raise SinkError(f"{self._shown}: expected a status of 200 to 299, given {status}")
        return True
