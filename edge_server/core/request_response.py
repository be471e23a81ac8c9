"""Classes `Request` and `Response` of an inference, without JSON or protobuf."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import field
from typing import NamedTuple, Protocol, TypeAlias

from edge_server.core.device_tensor import DevicePiece
from edge_server.core.model_spec import ModelSpec
from edge_server.core.tensor import Tensor
from edge_server.core.trace_settings import RequestTrace
from edge_server.errors import EdgeServerError
from edge_server.record import record

Parameter: TypeAlias = str | int | float | bool
"""Value of a request or response parameter (Triton's extension_parameters)."""

NO_PARAMETERS: Mapping[str, Parameter] = {}


class SequenceStep(NamedTuple):
    """Sequence of a request. `id` is never 0 or "" (both mean: no sequence)."""

    id: int | str
    is_start: bool = False
    is_end: bool = False


@record(slots=True)
class CheckedHeader:
    """Result of one version's `RequestCheck`, valid for all requests with the same request header. `check` identifies
    it.

    `item_count` is the request's number of items: its batch size. Requests share a batch only if their `key` is equal.
    `outputs` are the outputs to compute, in model order. `is_certain`: the result depends only on the header. It is
    False if the values of shape tensors are part of the key.
    """

    check: object
    item_count: int
    key: Hashable
    outputs: tuple[str, ...]
    is_certain: bool


class RequestMemo:
    """Decisions of the server for all requests with the same request header: the same model, version, input names,
    types and shapes, outputs, priority and timeout. Only id and data differ.

    A front end makes an empty memo for each cached header, and sets it on every request with that header. The core
    fills it and replaces outdated parts. Any number of threads use it: each part is replaced as a whole."""

    __slots__ = ("checked_header", "front_end")

    def __init__(self) -> None:
        self.front_end: object | None = None
        """Data of the front end for the generation that answers. Becomes None when another generation takes requests.
        The old generation may still answer a running request; its response then names the old `spec`."""
        self.checked_header: CheckedHeader | None = None
        """The check result of the version that took the last request."""

    def keep(self, header: CheckedHeader) -> None:
        """Store the check result of a version, and drop the front end's data of another version."""
        if self.checked_header is None or self.checked_header.check is not header.check:
            self.front_end = None
        self.checked_header = header


@record(slots=True)
class Request:
    """One inference request. Do not change it after it is submitted.

    `version` None requests the highest version that serves. Empty `outputs` requests all outputs, in model order.
    `priority` 0 means the model's default; 1 is the highest. `timeout_us` 0 means no timeout.
    `release` is called exactly once, from any thread, when the server does not use the inputs any more. It releases
    their memory (a pinned shared-memory region). `deadline_ns` is the latest useful time of a response
    (time.monotonic_ns; 0: none): the server does not start a request that cannot finish in time. `trace` records the
    request's path if it is traced. `targets` are pieces of GPU memory for outputs, by name, valid until `release`. If
    an output was written there, its tensor is a DeviceTensor. The sizes of `targets` are not checked yet.
    `memo` belongs to the request's header, see RequestMemo; None if the front end does not cache the header.
    """

    model: str
    inputs: Mapping[str, Tensor]
    version: int | None = None
    id: str = ""
    outputs: tuple[str, ...] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=lambda: NO_PARAMETERS)
    priority: int = 0
    timeout_us: int = 0
    sequence: SequenceStep | None = None
    release: Callable[[], None] | None = None
    deadline_ns: int = 0
    trace: RequestTrace | None = None
    targets: Mapping[str, DevicePiece] | None = None
    memo: RequestMemo | None = None


@record(slots=True)
class Response:
    """One response of a request's response stream. Most models send exactly one.

    Either `error` is set and `outputs` is empty, or `error` is None. `is_final` ends the stream. `is_empty` marks an
    end of the stream that is not a response of the model (Triton's final flag without a response). It has no outputs
    and no error, and is sent only to clients that enabled empty final responses. The receiver owns the output arrays.
    `spec` is the ModelSpec of the version that answered (with its labels), or None if no version did. That version may
    be unloaded by now. `started_ns` is the start of its batch (time.monotonic_ns), `batch_size` the items of the batch;
    both are 0 if nothing ran.
    """

    model: str
    version: int
    request_id: str
    outputs: tuple[Tensor, ...] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=lambda: NO_PARAMETERS)
    error: EdgeServerError | None = None
    is_final: bool = True
    spec: ModelSpec | None = None
    started_ns: int = 0
    batch_size: int = 0
    is_empty: bool = False


ResponseSink: TypeAlias = Callable[[Response], None]
"""Called with each response on the thread that produced it. Must return at once and must not raise."""


class SubmittedRequest(Protocol):
    """A request that was submitted, for its caller."""

    def cancel(self) -> None:
        """Answer the request CANCELLED at once. Other requests of its batch are not disturbed.

        Does nothing after the final response.
        """
