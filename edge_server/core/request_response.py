"""What a caller asks and what a model answers, free of any wire: no JSON, no protobuf here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from edge_server.core.device_tensor import DevicePiece
from edge_server.core.model_spec import ModelSpec
from edge_server.core.tensor import Tensor
from edge_server.core.trace_settings import RequestTrace
from edge_server.errors import EdgeServerError

if TYPE_CHECKING:
    from edge_server.core.request_check import CheckedHead

Parameter: TypeAlias = str | int | float | bool
"""Value of a request or response parameter (Triton's extension_parameters)."""

NO_PARAMETERS: Mapping[str, Parameter] = {}


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """Which sequence a request belongs to. `id` is never 0 or "" (those mean: no sequence)."""

    id: int | str
    is_start: bool = False
    is_end: bool = False


class RequestMemo:
    """What the server decided for requests with one and the same head: the same model, version, input names, types and
    shapes, outputs, priority and timeout; only id and data differ. A front end makes an empty one for each head that it
    keeps, and sets it on every request with that head. The core fills it, and replaces what is no longer current.
    Used by any number of threads: each part is replaced as a whole."""

    __slots__ = ("front_end", "head", "route")

    def __init__(self) -> None:
        self.front_end: object | None = None
        """What the front end keeps with the generation that answers. Becomes None when another generation takes
        requests; one that is under way may still be answered by the old one, whose `spec` its response names."""
        self.route: tuple[int, Any] | None = None
        """The number of a routing table, and the version that it names for the head. See serving.router."""
        self.head: CheckedHead | None = None
        """What the checks of the version that took the last request say of the head."""

    def keep(self, head: CheckedHead) -> None:
        """Keep what the checks of a version say, and drop what the front end keeps of another version."""
        if self.head is None or self.head.check is not head.check:
            self.front_end = None
        self.head = head


@dataclass(slots=True)
class Request:
    """One inference request. Not to be changed once submitted.

    `version` None asks for the highest version that serves. `outputs` empty asks for all outputs, in model order.
    `priority` 0 means the model's default, 1 is the highest. `timeout_us` 0 means none was asked for.
    `release` is called exactly once, from any thread, when no part of the server holds the inputs any more; it gives
    back what they are views of (a pinned shared-memory region). `deadline_ns` is when an answer is of no use any more
    (time.monotonic_ns; 0: never): what cannot be finished until then is not begun. `trace` takes note of its way, if it
    is one of the few that are traced. `targets` are pieces of GPU memory for outputs, by name, kept until `release`: an
    output may be written there, which its tensor then tells (see core.device_tensor). Large enough or not is not checked yet.
    `memo` belongs to the request's head, see RequestMemo; None where the front end keeps no heads.
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


@dataclass(slots=True)
class Response:
    """One answer of the stream of answers to a request; most models send exactly one.

    Either `error` is set and `outputs` is empty, or `error` is None. `is_final` closes the stream. `is_empty` marks the
    end of a stream that is no response of the model (Triton's final flag alone): it has neither outputs nor error, and
    clients see it only if they asked for empty final responses. A response of the model without outputs is not marked.
    Output arrays belong to the receiver. `spec` is what the version that answered promised (its labels among it); None
    where no version did. The version may be gone when this is read. `started_ns` is when the batch it came from began
    to run (time.monotonic_ns), `batch_size` how many rows that had; both are 0 where nothing ran.
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
"""Takes each response on the thread that produced it. Must return at once and must not raise."""
