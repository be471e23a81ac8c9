"""gRPC client of the load generator: queries, requests as wire bytes, and senders."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from edge_server.client.endpoint import ServerEndpoint
from edge_server.core.tensor import DType
from edge_server.protocol import messages
from edge_server.protocol.raw_tensors import raw_from_tensor
from edge_server.tuning.load.client_interface import (
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

_SERVICE = f"/{messages.GRPC_SERVICE}/"
_STREAM_ERROR_TAG = 0x0A
"""First byte of a ModelStreamInferResponse that begins with `error_message`."""
_FINAL = "triton_final_response"

CALLS_EACH_CHANNEL = 6
"""Workers that share a connection: as many as Triton's C++ client, and with it perf_analyzer, lets share one."""


class GrpcControl:
    """Asks about models, statistics and shared memory. `timeout_s` holds for each answer."""

    def __init__(self, endpoint: ServerEndpoint, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._channel = endpoint.channel(grpc)
        self._methods = {method.name: method for method in messages.service_methods(messages.GRPC_SERVICE)}

    def model(self, name: str, version: str) -> ModelFacts:
        metadata = self._ask("ModelMetadata", name=name, version=version)
        config = self._ask("ModelConfig", name=name, version=version).config
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

    def counts(self, name: str, version: str) -> ServerCounts:
        total = ServerCounts()
        for item in self._ask("ModelStatistics", name=name, version=version).model_stats:
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
        """Return the ModelInferResponse to a written request. Raises as all questions do."""
        return self._call("ModelInfer", request)

    def register_region(self, name: str, key: str, size_bytes: int) -> None:
        self._ask("SystemSharedMemoryRegister", name=name, key=key, offset=0, byte_size=size_bytes)

    def unregister_region(self, name: str) -> None:
        self._ask("SystemSharedMemoryUnregister", name=name)

    def close(self) -> None:
        self._channel.close()

    def _ask(self, method: str, **fields: Any) -> Any:
        return self._call(method, self._methods[method].input_class(**fields).SerializeToString())

    def _call(self, name: str, request: bytes) -> Any:
        method = self._methods[name]
        call = self._channel.unary_unary(method.path, None, method.output_class.FromString)
        try:
            return call(request, timeout=self._timeout_s, metadata=tuple(self._endpoint.metadata) or None)
        except grpc.RpcError as error:
            said = error.details() or error.code().name
            if (
                error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                and name != "ModelInfer"
            ):
                raise Unreachable(f"no answer from {self._endpoint.address}: {said}") from None
            raise RequestRefused(f"{self._endpoint.address}: {said}") from None


def write_grpc(request: MeasuredRequest) -> bytes:
    """Return a ModelInferRequest as it stands on the wire, tensors as raw contents."""
    message = messages.ModelInferRequest(model_name=request.model.name, model_version=request.model.version)
    for tensor in request.inputs:
        item = message.inputs.add(name=tensor.name, datatype=tensor.dtype.value, shape=tensor.shape)
        place = request.places.get(tensor.name)
        if place is None:
            message.raw_input_contents.append(bytes(raw_from_tensor(tensor)))
        else:
            _place(item.parameters, place)
    for wanted in request.outputs:
        _place(message.outputs.add(name=wanted.name).parameters, wanted.place)
    if request.model.is_decoupled:
        message.parameters["triton_enable_empty_final_response"].bool_param = True
    data: bytes = message.SerializeToString()
    return data


def _place(parameters: Any, place: SharedMemoryPlace) -> None:
    parameters["shared_memory_region"].string_param = place.region
    parameters["shared_memory_byte_size"].int64_param = place.size_bytes
    if place.offset:
        parameters["shared_memory_offset"].int64_param = place.offset


def raw_outputs(response: Any) -> dict[str, tuple[DType, tuple[int, ...], bytes]]:
    """Return the outputs of a ModelInferResponse: name -> data type, shape, raw bytes."""
    return {
        item.name: (dtype_named(response.model_name, item.name, item.datatype), tuple(item.shape), raw)
        for item, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


class UnarySender:
    """One worker's unary calls over a channel that several share."""

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
            raise SendFailed("CANCELLED", "the measurement has ended") from None  # grpcio's word for a closed channel

    def close(self) -> None:
        self._channel.close()


class GrpcStreamSender:
    """One worker's bidirectional stream: one request under way at a time. A stream that broke is begun again."""

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
            self._take()
            if self._is_overdue:
                self._end()  # the answer came as its stream was cancelled
        except grpc.RpcError as error:
            self._end()
            if self._is_overdue:
                raise SendFailed("DEADLINE_EXCEEDED", f"no answer within {self._timeout_s:g} s") from None
            raise SendFailed(error.code().name, error.details() or "") from None
        except StopIteration:
            self._end()
            raise SendFailed("UNAVAILABLE", "the server ended the stream") from None
        except ValueError:
            raise SendFailed("CANCELLED", "the measurement has ended") from None
        finally:
            self._since_s, self._is_overdue = None, False

    def look(self) -> None:
        """Give up an answer that is overdue, from another thread: a stream has no deadline for each of its answers."""
        since_s = self._since_s
        if since_s is not None and time.perf_counter() - since_s > self._timeout_s:
            self._is_overdue = True
            self._answers.cancel()

    def _take(self) -> None:
        """Read the answer, or all of them of a decoupled model."""
        while True:
            answer = next(self._answers)
            self._since_s = time.perf_counter()
            if answer[:1] == bytes((_STREAM_ERROR_TAG,)):
                if self._is_decoupled:
                    # What still comes of this request would be taken for answers to the next one: a new stream.
                    self._end()
                    self._answers.cancel()
                raise SendFailed("STREAM_ERROR", self._answer_class.FromString(answer).error_message)
            if not self._is_decoupled:
                return
            if self._answer_class.FromString(answer).infer_response.parameters[_FINAL].bool_param:
                return

    def _end(self) -> None:
        if self._queue is not None:
            self._queue.put(None)
        self._queue = None

    def close(self) -> None:
        self._end()
        self._channel.close()


class GrpcSenders:
    """Makes a sender for each worker, and the channels that they share."""

    def __init__(self, endpoint: ServerEndpoint, timeout_s: float, *, streams: bool, is_decoupled: bool) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._streams = streams
        self._is_decoupled = is_decoupled

    @contextlib.contextmanager
    def __call__(self, count: int) -> Iterator[Sequence[UnarySender | GrpcStreamSender]]:
        channels = [self._endpoint.channel(grpc) for _ in range(-(-count // CALLS_EACH_CHANNEL))]
        make: Callable[[Any], UnarySender | GrpcStreamSender]
        if self._streams:
            make = lambda channel: GrpcStreamSender(  # noqa: E731
                self._endpoint, channel, self._timeout_s, is_decoupled=self._is_decoupled
            )
        else:
            make = lambda channel: UnarySender(self._endpoint, channel, self._timeout_s)  # noqa: E731
        senders = [make(channels[index // CALLS_EACH_CHANNEL]) for index in range(count)]
        is_over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(senders, is_over), name="perf-watch", daemon=True)
        if self._streams:
            watch.start()
        try:
            yield senders
        finally:
            is_over.set()
            if self._streams:
                watch.join()
            for sender in senders:
                sender.close()
            for channel in channels:
                channel.close()

    def _watch(self, senders: Sequence[UnarySender | GrpcStreamSender], is_over: threading.Event) -> None:
        while not is_over.wait(min(self._timeout_s / 4, 1.0)):
            for sender in senders:
                if isinstance(sender, GrpcStreamSender):
                    sender.look()
