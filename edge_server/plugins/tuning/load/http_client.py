"""HTTP client for load tests: reads metadata and statistics, encodes requests, and sends them over sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edge_server.cli.http_client import describe_failure
from edge_server.plugins.tuning.load.client_interface import (
    MeasuredRequest,
    ModelFacts,
    RequestRefused,
    SendFailed,
    ServerCounts,
    SharedMemoryPlace,
    TensorFacts,
    Unreachable,
    dtype_named,
)
from edge_server.protocol.raw_tensors import raw_from_tensor

Headers = Sequence[tuple[str, str]]
_MAX_HEADER_BYTES = 1 << 16
_RECEIVE_BYTES = 1 << 18


class HttpControl:
    """Queries models and statistics, and registers shared memory. `url` has no trailing slash."""

    def __init__(self, url: str, headers: Headers, timeout_s: float, tls_context: ssl.SSLContext | None = None) -> None:
        self._url = url
        self._tls_context = tls_context
        self._headers = dict(headers)
        self._timeout_s = timeout_s

    def model(self, name: str, version: str) -> ModelFacts:
        base = _model_path(name, version)
        metadata, config = self.request_json(base), self.request_json(f"{base}/config")
        optional = {item["name"] for item in config.get("input", ()) if item.get("optional")}
        inputs, outputs = (
            tuple(
                TensorFacts(
                    item["name"],
                    dtype_named(name, item["name"], item["datatype"]),
                    tuple(item["shape"]),
                    item["name"] in optional,
                )
                for item in metadata[key]
            )
            for key in ("inputs", "outputs")
        )
        is_decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        is_ensemble = bool(config.get("ensemble_scheduling", {}).get("step"))
        return ModelFacts(name, version, inputs, outputs, config.get("max_batch_size", 0), is_decoupled, is_ensemble)

    def model_names(self) -> list[str]:
        return [item["name"] for item in self.request_json("/v2/repository/index", {})]

    def counts(self, name: str, version: str) -> ServerCounts:
        total = ServerCounts()
        for item in self.request_json(f"{_model_path(name, version)}/stats")["model_stats"]:
            stats = item["inference_stats"]
            total += ServerCounts(
                stats["success"]["count"],
                stats["fail"]["count"],
                item["inference_count"],
                item["execution_count"],
                stats["success"]["ns"],
                stats["queue"]["ns"],
                stats["compute_input"]["ns"],
                stats["compute_infer"]["ns"],
                stats["compute_output"]["ns"],
            )
        return total

    def register_region(self, name: str, key: str, size_bytes: int) -> None:
        path = f"/v2/systemsharedmemory/region/{urllib.parse.quote(name, safe='')}/register"
        self.request_json(path, {"key": key, "offset": 0, "byte_size": size_bytes})

    def unregister_region(self, name: str) -> None:
        self.request_json(f"/v2/systemsharedmemory/region/{urllib.parse.quote(name, safe='')}/unregister", {})

    def close(self) -> None:
        """Do nothing: each query has its own connection."""

    def request_json(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        """Send a GET, or with `body` a POST, and return the JSON response; None if the response is empty.

        Raises RequestRefused and Unreachable.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s, context=self._tls_context) as response:
                text = response.read()
            return json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            with error:
                raise RequestRefused(
                    f"{self._url}: {_error_text(error.read(_MAX_HEADER_BYTES)) or error.reason}"
                ) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Unreachable(f"no answer from {self._url}: {describe_failure(error)}") from None


def _model_path(name: str, version: str) -> str:
    path = f"/v2/models/{urllib.parse.quote(name, safe='')}"
    return f"{path}/versions/{urllib.parse.quote(version, safe='')}" if version else path


def _error_text(body: bytes) -> str:
    try:
        document = json.loads(body)
    except ValueError:
        return ""
    return str(document.get("error", "")) if isinstance(document, dict) else ""


class HttpWriter:
    """Encodes requests for one address: headers, then a body of JSON and the tensors as binary data."""

    def __init__(self, url: str, headers: Headers) -> None:
        self.host, self.port, self._prefix = split_url(url)
        self._headers = headers

    def __call__(self, request: MeasuredRequest) -> bytes:
        inputs, binary = [], []
        for tensor in request.inputs:
            place = request.places.get(tensor.name)
            raw = bytes(raw_from_tensor(tensor)) if place is None else b""
            parameters = {"binary_data_size": len(raw)} if place is None else _shared_memory_parameters(place)
            inputs.append(
                {"name": tensor.name, "datatype": tensor.dtype.value, "shape": tensor.shape, "parameters": parameters}
            )
            binary.append(raw)
        document: dict[str, Any] = {"inputs": inputs}
        if request.outputs:
            document["outputs"] = [
                {"name": item.name, "parameters": _shared_memory_parameters(item.place)} for item in request.outputs
            ]
        else:
            document["parameters"] = {"binary_data_output": True}
        json_part = json.dumps(document, separators=(",", ":")).encode()
        body = b"".join([json_part, *binary])
        lines = [
            f"POST {self._prefix}{_model_path(request.model.name, request.model.version)}/infer HTTP/1.1",
            f"Host: [{self.host}]:{self.port}" if ":" in self.host else f"Host: {self.host}:{self.port}",
            "Content-Type: application/octet-stream",
            f"Inference-Header-Content-Length: {len(json_part)}",
            f"Content-Length: {len(body)}",
            *(f"{key}: {value}" for key, value in self._headers),
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body


def _shared_memory_parameters(place: SharedMemoryPlace) -> dict[str, Any]:
    parameters: dict[str, Any] = {"shared_memory_region": place.region, "shared_memory_byte_size": place.size_bytes}
    if place.offset:
        parameters["shared_memory_offset"] = place.offset
    return parameters


def split_url(url: str) -> tuple[str, int, str]:
    """Return host, port and path of an http:// or https:// URL. Raises RequestRefused for any other text."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError as error:
        raise RequestRefused(f"'{url}' is no address: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        raise RequestRefused(f"expected an address as http://127.0.0.1:8000, given '{url}'")
    return parts.hostname, port, parts.path.rstrip("/")


class HttpSender:
    """Sends one worker's requests over a persistent connection. Opens a new connection after a failure."""

    def __init__(self, host: str, port: int, timeout_s: float, tls_context: ssl.SSLContext | None = None) -> None:
        self._address = (host, port)
        self._tls_context = tls_context
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._is_closed = False

    def send(self, request: bytes) -> None:
        try:
            wire = self._socket or self._connect()
            wire.sendall(request)
            status, body, is_kept_alive = _read_response(wire)
        except TimeoutError:
            self._close_socket()
            raise SendFailed("TIMEOUT", f"no answer within {self._timeout_s:g} s") from None
        except (OSError, ValueError, IndexError) as error:
            self._close_socket()
            reason = "CANCELLED" if self._is_closed else "CONNECTION"
            raise SendFailed(reason, str(error) or type(error).__name__) from None
        if not is_kept_alive:
            self._close_socket()
        if status != 200:
            raise SendFailed(f"HTTP {status}", _error_text(body))

    def close(self) -> None:
        self._is_closed = True
        wire = self._socket
        if wire is not None:
            # `shutdown` ends a blocking read in another thread; `close` alone does not.
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
            wire.close()

    def _connect(self) -> socket.socket:
        if self._is_closed:
            raise OSError("the measurement has ended")
        self._socket = socket.create_connection(self._address, self._timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls_context is not None:
            self._socket = self._tls_context.wrap_socket(self._socket, server_hostname=self._address[0])
        return self._socket

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def _read_response(wire: socket.socket) -> tuple[int, bytes, bool]:
    """Return status, body, and whether the server keeps the connection open. Discards the body of a success.

    Raises ValueError unless the response is HTTP/1.1 with a Content-Length, and OSError if the connection ends.
    """
    data = bytearray()
    while (end := data.find(b"\r\n\r\n")) < 0:
        if len(data) > _MAX_HEADER_BYTES:
            raise ValueError("the head of the answer is too long")
        data += _receive(wire)
    lines = bytes(data[:end]).decode("latin-1").split("\r\n")
    status = int(lines[0].split(" ", 2)[1]) if lines[0].startswith("HTTP/1.") else 0
    headers = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines[1:])}
    if not status or not headers.get("content-length", "").isdecimal():
        raise ValueError("expected an answer of HTTP/1.1 with a Content-Length")
    missing = int(headers["content-length"]) - (len(data) - end - 4)
    body = data[end + 4 :]
    while missing > 0:
        piece = _receive(wire)
        missing -= len(piece)
        if status != 200:
            body += piece
    return status, bytes(body) if status != 200 else b"", headers.get("connection", "").lower() != "close"


def _receive(wire: socket.socket) -> bytes:
    piece = wire.recv(_RECEIVE_BYTES)
    if not piece:
        raise ConnectionError("the server closed the connection")
    return piece


class HttpSenders:
    """Creates a sender for each worker; closes them at the end of the context."""

    def __init__(self, url: str, timeout_s: float, tls_context: ssl.SSLContext | None = None) -> None:
        self._tls_context = tls_context
        self._host, self._port, _ = split_url(url)
        self._timeout_s = timeout_s

    @contextlib.contextmanager
    def __call__(self, count: int) -> Iterator[Sequence[HttpSender]]:
        senders = [HttpSender(self._host, self._port, self._timeout_s, self._tls_context) for _ in range(count)]
        try:
            yield senders
        finally:
            for sender in senders:
                sender.close()


def read_process_metrics(url: str, timeout_s: float) -> tuple[float, float] | None:
    """Return CPU seconds and resident bytes from a Prometheus metrics page; None if either is missing."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            lines = response.read().decode("utf-8", "replace").splitlines()
    except (OSError, ValueError, http.client.HTTPException):
        return None
    found = {}
    for line in lines:
        name, _, value = line.partition(" ")
        if name in ("process_cpu_seconds_total", "process_resident_memory_bytes"):
            with contextlib.suppress(ValueError):
                found[name] = float(value)
    if len(found) < 2 or not all(map(math.isfinite, found.values())):
        return None
    return found["process_cpu_seconds_total"], found["process_resident_memory_bytes"]
