"""gRPC client for load tests: reads metadata and statistics, encodes requests, and sends them."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from edge_server.cli.options import describe_grpc_failure
from edge_server.client.endpoint import ServerEndpoint
from edge_server.core.tensor import DType
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
from edge_server.protocol import messages
from edge_server.protocol.raw_tensors import raw_from_tensor

_SERVICE = f"/{messages.GRPC_SERVICE}/"
_STREAM_ERROR_TAG = 0x0A
"""First byte of a ModelStreamInferResponse whose first field is `error_message`."""
_FINAL = "triton_final_response"

CALLS_EACH_CHANNEL = 6
"""Workers that share one connection. Triton's C++ client, and so perf_analyzer, shares it among as many."""


class GrpcControl:
    """Queries models and statistics, and registers shared memory. `timeout_s` applies to each call."""

    def __init__(self, endpoint: ServerEndpoint, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._channel = endpoint.channel(grpc)
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
        )

    def model_names(self) -> list[str]:
        return self._endpoint.model_names()

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

    def close(self) -> None:
        self._channel.close()

    def _request(self, method: str, **fields: Any) -> Any:
        return self._call(method, self._methods[method].input_class(**fields).SerializeToString())

    def _call(self, name: str, request: bytes) -> Any:
        method = self._methods[name]
        call = self._channel.unary_unary(method.path, None, method.output_class.FromString)
        try:
            return call(request, timeout=self._timeout_s, metadata=tuple(self._endpoint.metadata) or None)
        except grpc.RpcError as error:
            details = error.details() or error.code().name
            if key := re.search(r"is restricted, expecting header '([^']+)'$", details):
                is_sent = any(name == key[1] for name, _ in self._endpoint.metadata)
                hint = "its value is wrong" if is_sent else f"give it with --header {key[1]}=VALUE"
                raise RequestRefused(f"{self._endpoint.address}: {details}; {hint}") from None
            if (
                error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                and name != "ModelInfer"
            ):
                raise Unreachable(
                    f"no answer from {self._endpoint.address}: {describe_grpc_failure(details)}"
                ) from None
            raise RequestRefused(f"{self._endpoint.address}: {details}") from None


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


class UnarySender:
    """Sends one worker's unary calls over a channel that several workers share."""

    def __init__(self, endpoint: ServerEndpoint, channel: Any, timeout_s: float) -> None:
        self._call = channel.unary_unary(_SERVICE + "ModelInfer")
        self._metadata = tuple(endpoint.metadata) or None
        self._timeout_s = timeout_s
        self._channel = channel

    def send(self, request: bytes) -> None:
        try:
            self._call(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise SendFailed(error.code().name, error.details() or "") from None
        except ValueError:
            # grpcio raises ValueError on a closed channel.
            raise SendFailed("CANCELLED", "the measurement has ended") from None

    def close(self) -> None:
        self._channel.close()


class GrpcStreamSender:
    """Sends one worker's requests over a bidirectional stream, one request at a time.

    Opens a new stream after a failure.
    """

    def __init__(self, endpoint: ServerEndpoint, channel: Any, timeout_s: float, *, is_decoupled: bool) -> None:
        self._open = channel.stream_stream(_SERVICE + "ModelStreamInfer")
        self._metadata = tuple(endpoint.metadata) or None
        self._timeout_s = timeout_s
        self._is_decoupled = is_decoupled
        self._answer_class = messages.ModelStreamInferResponse
        self._queue: queue.SimpleQueue[bytes | None] | None = None
        self._answers: Any = None
        self._channel = channel
        self._since_s: float | None = None
        self._is_overdue = False

    def send(self, request: bytes) -> None:
        try:
            if self._queue is None:
                self._queue = queue.SimpleQueue()
                self._answers = self._open(iter(self._queue.get, None), metadata=self._metadata)
            self._since_s = time.perf_counter()
            self._queue.put(request)
            self._read_responses()
            if self._is_overdue:
                self._end_stream()  # the other thread cancelled the stream while the response arrived
        except grpc.RpcError as error:
            self._end_stream()
            if self._is_overdue:
                raise SendFailed("DEADLINE_EXCEEDED", f"no answer within {self._timeout_s:g} s") from None
            raise SendFailed(error.code().name, error.details() or "") from None
        except StopIteration:
            self._end_stream()
            raise SendFailed("UNAVAILABLE", "the server ended the stream") from None
        except ValueError:
            raise SendFailed("CANCELLED", "the measurement has ended") from None
        finally:
            self._since_s, self._is_overdue = None, False

    def cancel_if_overdue(self) -> None:
        """Cancel the stream if its response is overdue. Called from another thread.

        gRPC has no deadline for a single message of a stream.
        """
        since_s = self._since_s
        if since_s is not None and time.perf_counter() - since_s > self._timeout_s:
            self._is_overdue = True
            self._answers.cancel()

    def _read_responses(self) -> None:
        """Read the response; for a decoupled model, read all responses to the request."""
        while True:
            answer = next(self._answers)
            self._since_s = time.perf_counter()
            if answer[:1] == bytes((_STREAM_ERROR_TAG,)):
                if self._is_decoupled:
                    # Later responses to this request would be mistaken for responses to the next one.
                    self._end_stream()
                    self._answers.cancel()
                raise SendFailed("STREAM_ERROR", self._answer_class.FromString(answer).error_message)
            if not self._is_decoupled:
                return
            if self._answer_class.FromString(answer).infer_response.parameters[_FINAL].bool_param:
                return

    def _end_stream(self) -> None:
        if self._queue is not None:
            self._queue.put(None)
        self._queue = None

    def close(self) -> None:
        self._end_stream()
        self._channel.close()


class GrpcSenders:
    """Creates the channels and a sender for each worker; closes them at the end of the context."""

    def __init__(self, endpoint: ServerEndpoint, timeout_s: float, *, streams: bool, is_decoupled: bool) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._streams = streams
        self._is_decoupled = is_decoupled

    @contextlib.contextmanager
    def __call__(self, count: int) -> Iterator[Sequence[UnarySender | GrpcStreamSender]]:
        channels = [self._endpoint.channel(grpc) for _ in range(-(-count // CALLS_EACH_CHANNEL))]
        senders = [self._sender(channels[index // CALLS_EACH_CHANNEL]) for index in range(count)]
        is_over = threading.Event()
        watchdog = threading.Thread(
            target=self._cancel_overdue_streams, args=(senders, is_over), name="perf-watch", daemon=True
        )
        if self._streams:
            watchdog.start()
        try:
            yield senders
        finally:
            is_over.set()
            if self._streams:
                watchdog.join()
            for sender in senders:
                sender.close()
            for channel in channels:
                channel.close()

    def _sender(self, channel: Any) -> UnarySender | GrpcStreamSender:
        if self._streams:
            return GrpcStreamSender(self._endpoint, channel, self._timeout_s, is_decoupled=self._is_decoupled)
        return UnarySender(self._endpoint, channel, self._timeout_s)

    def _cancel_overdue_streams(
        self, senders: Sequence[UnarySender | GrpcStreamSender], is_over: threading.Event
    ) -> None:
        while not is_over.wait(min(self._timeout_s / 4, 1.0)):
            for sender in senders:
                if isinstance(sender, GrpcStreamSender):
                    sender.cancel_if_overdue()
