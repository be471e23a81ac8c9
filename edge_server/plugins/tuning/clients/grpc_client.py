"""gRPC client for load tests: reads metadata and statistics, registers shared memory, and encodes requests."""

from __future__ import annotations

import contextlib
import re
import ssl
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from edge_server.cli.http_client import describe_failure
from edge_server.cli.options import describe_grpc_failure
from edge_server.core.tensor import DType
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
from edge_server.plugins.tuning.clients.connection import ConnectionLoop, LoadWorker, ServerAddress, find_address
from edge_server.plugins.tuning.clients.grpc_connection import (
    GrpcCall,
    GrpcLoadConnection,
    frame_message,
    parse_message,
)
from edge_server.protocol import messages
from edge_server.protocol.raw_tensors import raw_from_tensor

Metadata = Sequence[tuple[str, str]]

CALLS_EACH_CONNECTION = 6
"""Workers that share one connection. Triton's C++ client, and so perf_analyzer, shares it among as many."""


class GrpcControl:
    """Queries models and statistics, and registers shared memory. `timeout_s` applies to each call."""

    def __init__(
        self, address: str, metadata: Metadata, timeout_s: float, tls_context: ssl.SSLContext | None = None
    ) -> None:
        self._address = address
        self._metadata = metadata
        self._timeout_s = timeout_s
        self._tls_context = tls_context
        self._server: ServerAddress | None = None
        self._methods = {method.name: method for method in messages.service_methods(messages.GRPC_SERVICE)}

    def model(self, name: str, version: str) -> ModelFacts:
        metadata = self._request("ModelMetadata", name=name, version=version)
        config = self._request("ModelConfig", name=name, version=version).config
        optional = {item.name for item in config.input if item.optional}
        inputs, outputs = (
            tuple(
                TensorFacts(
                    item.name, dtype_named(name, item.name, item.datatype), tuple(item.shape), item.name in optional
                )
                for item in items
            )
            for items in (metadata.inputs, metadata.outputs)
        )
        return ModelFacts(
            name,
            version,
            inputs,
            outputs,
            config.max_batch_size,
            config.model_transaction_policy.decoupled,
            len(config.ensemble_scheduling.step) > 0,
            picture_size({key: value.string_value for key, value in config.parameters.items()}),
        )

    def model_names(self) -> list[str]:
        return [item.name for item in self._request("RepositoryIndex").models]

    def counts(self, name: str, version: str) -> ServerCounts:
        total = ServerCounts()
        for item in self._request("ModelStatistics", name=name, version=version).model_stats:
            stats = item.inference_stats
            total += ServerCounts(
                stats.success.count,
                stats.fail.count,
                item.inference_count,
                item.execution_count,
                stats.success.ns,
                stats.queue.ns,
                stats.compute_input.ns,
                stats.compute_infer.ns,
                stats.compute_output.ns,
            )
        return total

    def infer(self, request: bytes) -> Any:
        """Return the ModelInferResponse to an encoded request. Raises RequestRefused."""
        return self._call("ModelInfer", request)

    def register_region(self, name: str, key: str, size_bytes: int) -> None:
        self._request("SystemSharedMemoryRegister", name=name, key=key, offset=0, byte_size=size_bytes)

    def unregister_region(self, name: str) -> None:
        self._request("SystemSharedMemoryUnregister", name=name)

    def _request(self, method: str, **fields: Any) -> Any:
        return self._call(method, self._methods[method].input_class(**fields).SerializeToString())

    def _call(self, name: str, request: bytes) -> Any:
        method = self._methods[name]
        if self._server is None:
            self._server = resolve_grpc(self._address, self._tls_context, self._timeout_s)
        answers: list[tuple[str, str]] = []
        with contextlib.closing(ConnectionLoop()) as loop:
            connection = GrpcLoadConnection(
                self._server,
                loop,
                lambda worker, end_s, reason, message, text: answers.append((reason, message)),
                GrpcCall(method.path, _authority(self._address), self._metadata),
            )
            worker = LoadWorker(connection, iter(()))
            connection.start(worker, frame_message(request))
            connection.flush()
            end_s = time.monotonic() + self._timeout_s
            while not answers:
                left_s = end_s - time.monotonic()
                if left_s > 0:
                    loop.wait(left_s)
                else:
                    connection.cancel(worker, f"no answer within {self._timeout_s:g} s")
        reason, message = answers[0]
        if not reason:
            try:
                return parse_message(method.output_class, connection.answer or b"")
            except ValueError as error:
                raise RequestRefused(f"{self._address}: {error}") from None
        if key := re.search(r"is restricted, expecting header '([^']+)'$", message):
            is_sent = any(name == key[1] for name, _ in self._metadata)
            hint = "its value is wrong" if is_sent else f"give it with --header {key[1]}=VALUE"
            raise RequestRefused(f"{self._address}: {message}; {hint}")
        if reason in ("UNAVAILABLE", "DEADLINE_EXCEEDED") and name != "ModelInfer":
            raise _unreachable(self._address, connection.error or OSError(message))
        raise RequestRefused(f"{self._address}: {message or reason}")


def resolve_grpc(address: str, tls_context: ssl.SSLContext | None, timeout_s: float) -> ServerAddress:
    """Return the address for connections to HOST:PORT or unix:PATH. Raises Unreachable."""
    is_unix = address.startswith("unix:")
    host, _, port = (address, "", "0") if is_unix else address.rpartition(":")
    try:
        return find_address(host, int(port), tls_context, timeout_s)
    except OSError as error:
        raise _unreachable(address, error) from None


def _unreachable(address: str, error: Exception) -> Unreachable:
    if isinstance(error, ssl.SSLCertVerificationError):
        text = describe_failure(error)
    elif isinstance(error, (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError)):
        text = describe_grpc_failure("Socket closed")
    else:
        text = describe_grpc_failure(str(error) or type(error).__name__)
    return Unreachable(f"no answer from {address}: {text}")


def _authority(address: str) -> str:
    return "localhost" if address.startswith("unix:") else address


def infer_call(address: str, metadata: Metadata, *, streams: bool, is_decoupled: bool) -> GrpcCall:
    """Return the call of inference requests, unary or over a stream for each worker."""
    answer_class = messages.ModelStreamInferResponse if streams else messages.ModelInferResponse
    return GrpcCall(
        f"/{messages.GRPC_SERVICE}/{'ModelStreamInfer' if streams else 'ModelInfer'}",
        _authority(address),
        metadata,
        streams,
        is_decoupled,
        partial(parse_message, answer_class),
    )


def write_grpc_frame(request: MeasuredRequest) -> bytes:
    """Return an encoded request as a connection sends it."""
    return frame_message(write_grpc(request))


def write_grpc(request: MeasuredRequest) -> bytes:
    """Return an encoded ModelInferRequest with the tensors as raw contents."""
    message = messages.ModelInferRequest(model_name=request.model.name, model_version=request.model.version)
    for tensor in request.inputs:
        item = message.inputs.add(name=tensor.name, datatype=tensor.dtype.value, shape=tensor.shape)
        place = request.places.get(tensor.name)
        if place is None:
            message.raw_input_contents.append(bytes(raw_from_tensor(tensor)))
        else:
            _set_shared_memory(item.parameters, place)
    for wanted in request.outputs:
        _set_shared_memory(message.outputs.add(name=wanted.name).parameters, wanted.place)
    if request.model.is_decoupled:
        message.parameters["triton_enable_empty_final_response"].bool_param = True
    data: bytes = message.SerializeToString()
    return data


def _set_shared_memory(parameters: Any, place: SharedMemoryPlace) -> None:
    parameters["shared_memory_region"].string_param = place.region
    parameters["shared_memory_byte_size"].int64_param = place.size_bytes
    if place.offset:
        parameters["shared_memory_offset"].int64_param = place.offset


def raw_outputs(response: Any) -> dict[str, tuple[DType, tuple[int, ...], bytes]]:
    """Return the outputs of a ModelInferResponse by name: data type, shape, raw bytes."""
    return {
        item.name: (dtype_named(response.model_name, item.name, item.datatype), tuple(item.shape), raw)
        for item, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }
