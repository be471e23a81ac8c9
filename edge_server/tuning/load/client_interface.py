"""Interface of the load clients (HTTP and gRPC), and the facts about the measured model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edge_server.core.tensor import BY_NAME, DType, Tensor
from edge_server.errors import EdgeServerError


class Unreachable(EdgeServerError):
    """No server, or none of this kind, answers at the address."""


class RequestRefused(EdgeServerError):
    """The server answered, with an error that ends the measurement: there is no such model, the request is wrong."""


class SendFailed(Exception):
    """One request had no good answer. `reason` is gRPC's word or "HTTP 429", short enough to count by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A tensor as the model's metadata tells of it; `shape` has the batch dimension, unknown ones are -1."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`max_batch_size` 0: the model has no batch dimension. `version` is "" when the server is to choose."""

    name: str
    version: str
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    max_batch_size: int
    is_decoupled: bool = False
    is_ensemble: bool = False


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """Sums of a model's statistics since it was loaded, over its versions or of one. Durations in nanoseconds."""

    successes: int = 0
    failures: int = 0
    inferences: int = 0
    executions: int = 0
    request_ns: int = 0
    queue_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0

    def is_less(self, before: ServerCounts) -> bool:
        """Whether any sum is less than it was: a model that was loaded anew counts from 0."""
        return any(getattr(self, name) < getattr(before, name) for name in ServerCounts.__slots__)

    def __sub__(self, before: ServerCounts) -> ServerCounts:
        return ServerCounts(*(getattr(self, name) - getattr(before, name) for name in ServerCounts.__slots__))

    def __add__(self, other: ServerCounts) -> ServerCounts:
        return ServerCounts(*(getattr(self, name) + getattr(other, name) for name in ServerCounts.__slots__))


class ServerQueries(Protocol):
    """The questions asked of a server beside the load. Raises Unreachable and Refusal."""

    def model(self, name: str, version: str) -> ModelFacts: ...

    def counts(self, name: str, version: str) -> ServerCounts: ...

    def register_region(self, name: str, key: str, size_bytes: int) -> None: ...

    def unregister_region(self, name: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TextTimes:
    """When the first and the last text of a streamed answer came (time.perf_counter), and its number of tokens."""

    first_s: float
    last_s: float
    tokens: int


class Sender(Protocol):
    """Sends requests that were written before; for one thread. `send` raises SendFailed."""

    def send(self, request: bytes) -> TextTimes | None:
        """Send a request and wait for the answer. Return its times if it is text."""

    def close(self) -> None:
        """End what is under way, from any thread."""


@dataclass(frozen=True, slots=True)
class SharedMemoryPlace:
    """Where a tensor lies in shared memory instead of in the request."""

    region: str
    size_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class SharedMemoryOutput:
    """An output that is to be written into shared memory."""

    name: str
    place: SharedMemoryPlace


@dataclass(frozen=True, slots=True)
class MeasuredRequest:
    """A request before it is written for a wire. `places`: inputs by name that lie in shared memory."""

    model: ModelFacts
    inputs: tuple[Tensor, ...]
    places: dict[str, SharedMemoryPlace]
    outputs: tuple[SharedMemoryOutput, ...] = ()


def dtype_named(model: str, tensor: str, name: str) -> DType:
    """Return the data type of a tensor by its KServe name. Raises RequestRefused for one that is not known here."""
    found = BY_NAME.get(name)
    if found is None:
        raise RequestRefused(f"model '{model}': tensor '{tensor}' has the unknown data type '{name}'")
    return found
