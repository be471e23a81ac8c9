"""HTTP client for load tests: reads metadata and statistics, registers shared memory, and encodes requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import ssl
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from edge_server.bounded_http import HttpClient
from edge_server.cli.http_client import Refused, describe_failure, refuse_redirect
from edge_server.plugins.tuning.clients.client_interface import (
    MeasuredRequest,
    ModelFacts,
    RequestRefused,
    ServerCounts,
    SharedMemoryPlace,
    TensorFacts,
    Unreachable,
    dtype_named,
    picture_size,
)
from edge_server.protocol.raw_tensors import raw_from_tensor

Headers = Sequence[tuple[str, str]]
_MAX_HEADER_BYTES = 1 << 16


class HttpControl:
    """Queries models and statistics, and registers shared memory. `url` has no trailing slash."""

    def __init__(self, url: str, headers: Headers, timeout_s: float, tls_context: ssl.SSLContext | None = None) -> None:
        self._url = url
        self._headers = dict(headers)
        self._timeout_s = timeout_s
        self._client = HttpClient(refuse_redirect, tls=tls_context)

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
        parameters = config.get("parameters", {})
        picture = picture_size({key: value.get("string_value", "") for key, value in parameters.items()})
        return ModelFacts(
            name, version, inputs, outputs, config.get("max_batch_size", 0), is_decoupled, is_ensemble, picture
        )

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

    def request_json(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        """Send a GET, or with `body` a POST, and return the JSON response; None if the response is empty.

        Raises RequestRefused and Unreachable.
        """
        data = None if body is None else json.dumps(body).encode()
        try:
            with self._client.open(self._url + path, data, self._headers, timeout_s=self._timeout_s) as response:
                if not response.is_success:
                    reason = error_text(response.read(_MAX_HEADER_BYTES)) or response.reason
                    raise RequestRefused(f"{self._url}: {reason}")
                text = response.read()
            return json.loads(text) if text else None
        except Refused as error:
            raise RequestRefused(str(error)) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Unreachable(f"no answer from {self._url}: {describe_failure(error)}") from None


def _model_path(name: str, version: str) -> str:
    path = f"/v2/models/{urllib.parse.quote(name, safe='')}"
    return f"{path}/versions/{urllib.parse.quote(version, safe='')}" if version else path


def error_text(body: bytes) -> str:
    """Return the message of the body of an error, in Triton's or in OpenAI's form; "" if it has none."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, TypeError, KeyError):
        return ""


class HttpWriter:
    """Encodes requests for one address: headers, then a body of JSON and the tensors as binary data."""

    def __init__(self, url: str, headers: Headers) -> None:
        self._url = url
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
        headers = [
            ("Content-Type", "application/octet-stream"),
            ("Inference-Header-Content-Length", str(len(json_part))),
            *self._headers,
        ]
        path = f"{_model_path(request.model.name, request.model.version)}/infer"
        return encode_post(self._url, path, headers, b"".join([json_part, *binary]))


def encode_post(url: str, path: str, headers: Headers, body: bytes) -> bytes:
    """Return a whole POST request of HTTP/1.1."""
    host, port, prefix = split_url(url)
    lines = [
        f"POST {prefix}{path} HTTP/1.1",
        f"Host: [{host}]:{port}" if ":" in host else f"Host: {host}:{port}",
        f"Content-Length: {len(body)}",
        *(f"{key}: {value}" for key, value in headers),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body


def check_http_answer(body: bytes, json_bytes: int) -> None:
    """Raise ValueError unless the body of a success is an inference response. `json_bytes`: those before binary data;
    -1 without binary data."""
    document = json.loads(body if json_bytes < 0 else body[:json_bytes])
    outputs = document.get("outputs") if isinstance(document, dict) else None
    if not isinstance(outputs, list):
        raise ValueError("the answer has no 'outputs'")
    if json_bytes >= 0:
        binary = sum(item.get("parameters", {}).get("binary_data_size", 0) for item in outputs)
        if binary != len(body) - json_bytes:
            raise ValueError(f"the outputs have {binary} bytes, the answer holds {len(body) - json_bytes}")


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


def read_process_metrics(url: str, timeout_s: float) -> tuple[float, float] | None:
    """Return CPU seconds and resident bytes from a Prometheus metrics page; None if either is missing."""
    try:
        with HttpClient().open(url, timeout_s=timeout_s) as response:
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
