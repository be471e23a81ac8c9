"""Interface of the queries of load tests over HTTP and gRPC, and the metadata of the measured model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from edge_server.core.tensor import BY_NAME, DType, Tensor
from edge_server.errors import EdgeServerError


class Unreachable(EdgeServerError):
    """No server of the expected kind answers at the address."""


class RequestRefused(EdgeServerError):
    """The server answered with an error that ends the measurement, such as an unknown model or an invalid request."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Metadata of a tensor. `shape` includes the batch dimension; -1 stands for a variable dimension."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Metadata of a model. If `max_batch_size` is 0, the model has no batch dimension.

    If `version` is "", the server chooses the version. `picture`: height and width that the configuration declares for
    a picture, () if it declares none.
    """

    name: str
    version: str
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    max_batch_size: int
    is_decoupled: bool = False
    is_ensemble: bool = False
    picture: tuple[int, ...] = ()


def picture_size(parameters: Mapping[str, str]) -> tuple[int, ...]:
    """Return `ModelFacts.picture` for the texts of a configuration's parameters."""
    sizes = [parameters.get(f"network_image_{side}", "") for side in ("height", "width")]
    return tuple(map(int, sizes)) if all(size.isdecimal() for size in sizes) else ()


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """Totals of a model's statistics since the model was loaded, of one version or of all. Durations are in ns."""

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
        """Whether any total is less than in `before`. This happens after a reload, which resets the statistics."""
        return any(getattr(self, name) < getattr(before, name) for name in ServerCounts.__slots__)

    def __sub__(self, before: ServerCounts) -> ServerCounts:
        return ServerCounts(*(getattr(self, name) - getattr(before, name) for name in ServerCounts.__slots__))

    def __add__(self, other: ServerCounts) -> ServerCounts:
        return ServerCounts(*(getattr(self, name) + getattr(other, name) for name in ServerCounts.__slots__))


class ServerQueries(Protocol):
    """Queries sent to a server in addition to the load, each over a connection of its own. Raises Unreachable and
    RequestRefused."""

    def model(self, name: str, version: str) -> ModelFacts: ...

    def model_names(self) -> list[str]: ...

    def counts(self, name: str, version: str) -> ServerCounts: ...

    def register_region(self, name: str, key: str, size_bytes: int) -> None: ...

    def unregister_region(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class TextTimes:
    """When the first and the last text of a streamed answer came (time.perf_counter), and its number of tokens."""

    first_s: float
    last_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class SharedMemoryPlace:
    """Location of a tensor in shared memory."""

    region: str
    size_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class SharedMemoryOutput:
    """An output that the server writes into shared memory."""

    name: str
    place: SharedMemoryPlace


@dataclass(frozen=True, slots=True)
class MeasuredRequest:
    """A request before it is encoded for a protocol. `places` maps the inputs in shared memory to their locations."""

    model: ModelFacts
    inputs: tuple[Tensor, ...]
    places: dict[str, SharedMemoryPlace]
    outputs: tuple[SharedMemoryOutput, ...] = ()


def dtype_named(model: str, tensor: str, name: str) -> DType:
    """Return the data type of a tensor by its KServe name. Raises RequestRefused for an unknown name."""
    found = BY_NAME.get(name)
    if found is None:
        raise RequestRefused(f"model '{model}': tensor '{tensor}' has the unknown data type '{name}'")
    return found
