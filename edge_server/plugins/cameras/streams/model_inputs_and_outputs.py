"""Preparation of one loaded model for frames: allocates its input buffers, and makes the converter of pictures and the
decoder of outputs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from edge_server.core.model_spec import ModelSpec
from edge_server.core.priority_class import priority_class
from edge_server.core.request_response import Response
from edge_server.core.tensor import Tensor
from edge_server.errors import EdgeServerError, InvalidRequest, NotReady, UnknownModel
from edge_server.plugins.cameras.streams.stream_settings import frame_plan, settled
from edge_server.plugins.vision.perception_decoder import PerceptionDecoder, make_perception_decoder
from edge_server.protocol.frame_messages import Returns

if TYPE_CHECKING:
    import numpy.typing as npt

    from edge_server.plugins.vision.image_plan import ImagePlan
    from edge_server.service import Handle, InferenceService

Array: TypeAlias = "npt.NDArray[np.generic]"

_LOG = logging.getLogger(__name__)

_MAX_SHARING = 8
"""Maximum number of frames, each of another stream, in flight per instance for the sequence scheduler to batch."""

_MAX_OUTPUT_PLANS = 8
"""Number of model generations with a kept output plan: the old, the new, a canary, and some spare."""


class RowBuffer:
    """Input buffer of one request, with two kinds of holders.

    The worker holds it because a model that returns its input places its outputs there. The request holds it because a
    runtime may read it for longer than the worker waits.
    """

    def __init__(self, array: Array, plan: ImagePlan, rows: int) -> None:
        self.array = array
        self.holds = 0
        self._plan = plan
        self._rows = array.reshape(rows, *plan.item_shape)

    def __getitem__(self, index: int) -> Array:
        row: Array = self._rows[index]
        return row

    def hold(self) -> None:
        """Prevent reuse for other frames until one more `give_back`."""
        self.holds += 1

    def tensor(self, count: int) -> Tensor:
        """Return the first `count` rows as the model's input; the whole buffer for a model that does not batch."""
        plan = self._plan
        return Tensor(plan.input_name, plan.dtype, self.array[:count] if len(self._rows) > 1 else self.array)


class InputPlan:
    """Input plan of one generation of a model, and the latest handle on it. Thread-safe.

    `max_rows` is the maximum number of frames in one request: 1 unless the model batches dynamically.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.spec = spec = handle.spec
        self.image_plan = frame_plan(spec)
        self.priority = int(priority_class(spec))
        self.max_rows = max(1, spec.max_batch_size) if spec.dynamic_batching is not None else 1
        self.reads_text = "detection_text_model" in spec.all_parameters
        """Whether another model reads text in the frames, so that their pixels are kept until then."""
        self.is_sequence = spec.sequence is not None
        """Whether each stream sends one frame at a time; the scheduler batches the frames of several streams."""
        self.instance_count = max(
            1, sum(group.count * max(1, len(group.gpus)) for group in spec.instance_groups if group.count > 0)
        )
        if self.is_sequence:
            self.instance_count *= min(max(1, spec.max_batch_size), _MAX_SHARING)
        self._lock = threading.Lock()
        self._free: list[RowBuffer] = []

    def take_rows(self) -> RowBuffer:
        """Return a buffer of `max_rows` rows with one hold; the caller ends it with `give_back`."""
        with self._lock:
            rows = self._free.pop() if self._free else None
        if rows is None:
            plan = self.image_plan
            shape = (self.max_rows, *plan.shape[1:]) if self.max_rows > 1 else plan.shape
            rows = RowBuffer(np.empty(shape, plan.dtype.numpy), plan, self.max_rows)
        rows.hold()
        return rows

    def give_back(self, rows: RowBuffer) -> None:
        """End one hold; after the last one the buffer is reused for other frames."""
        with self._lock:
            rows.holds -= 1
            if rows.holds == 0:
                self._free.append(rows)


class VariantInputPlan:
    """Input plan of the model variant that currently answers for `model`, if any. Thread-safe."""

    def __init__(self, service: InferenceService, model: str) -> None:
        self._service = service
        self._model = model
        self._known: tuple[ModelSpec, InputPlan | None, PerceptionDecoder | None] | None = None

    def of(self, returns: Sequence[Returns]) -> InputPlan | None:
        """Return the variant's input plan.

        Return None if there is no variant, it takes fewer frames at once, or it cannot give the requested results.
        """
        variants = self._service.variants
        lighter = None if variants.choice is None else variants.variant_for(self._model)
        if lighter is None:
            return None
        try:
            handle = self._service.find(lighter.name, None)
        except (NotReady, UnknownModel):
            return None  # unloaded meanwhile
        spec, known = handle.spec, self._known
        if known is None or known[0] is not spec:
            known = self._known = _lighter(handle, self._model)
        _, plan, perception = known
        if plan is None or plan.max_rows < len(returns):
            return None
        plan.handle = handle
        return plan if all(_gives(spec, perception, wanted) for wanted in returns) else None


def _lighter(handle: Handle, model: str) -> tuple[ModelSpec, InputPlan | None, PerceptionDecoder | None]:
    spec = handle.spec
    try:
        return spec, InputPlan(handle), make_perception_decoder(spec)
    except EdgeServerError as error:
        _LOG.warning("frames for model '%s' do not go to its variant: %s", model, error.message)
        return spec, None, None


def _gives(spec: ModelSpec, perception: PerceptionDecoder | None, wanted: Returns) -> bool:
    if any(name != "*" and spec.output(name) is None for name in wanted.tensors):
        return False
    try:
        settled(perception, wanted, spec)
    except InvalidRequest:
        return False
    return True


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """Output plan of one generation of a model. `runtime` names the runtime and the device, as in `status`."""

    spec: ModelSpec
    perception: PerceptionDecoder | None
    runtime: str
    has_rows: bool

    @property
    def labels(self) -> tuple[str, ...]:
        return () if self.perception is None else self.perception.labels

    def settled(self, returns: Returns) -> Returns:
        """Return the results to send, as `stream_settings.settled`."""
        return settled(self.perception, returns, self.spec)


class OutputPlans:
    """Cache of output plans of recently used model generations. Thread-safe."""

    def __init__(self, runtime_of: Callable[[ModelSpec, int], str]) -> None:
        self._runtime_of = runtime_of
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], OutputPlan] = {}

    def of(self, spec: ModelSpec, version: int) -> OutputPlan:
        """Return the output plan of that generation. Raises BadModelConfig for a wrong declaration."""
        # The entry holds the specification, so no other one can get the same id().
        key = (id(spec), version)
        found = self._known.get(key)
        if found is None:
            found = OutputPlan(
                spec, make_perception_decoder(spec), self._runtime_of(spec, version), has_rows=spec.max_batch_size > 0
            )
            with self._lock:
                if len(self._known) >= _MAX_OUTPUT_PLANS:
                    del self._known[next(iter(self._known))]
                self._known[key] = found
        return found


def describe_runtime(service: InferenceService, spec: ModelSpec, version: int) -> str:
    """Return runtime, device and precision, as "openvino 2026.4 on CPU, f32".

    Return the backend's name if the version is already unloaded.
    """
    for report in service.instance_reports():
        if (report.name, report.version) == (spec.name, version):
            return f"{report.runtime} on {report.device}, {report.precision}"
    return spec.backend


def outputs_of(response: Response) -> Mapping[str, Array]:
    return {tensor.name: tensor.array for tensor in response.outputs}
