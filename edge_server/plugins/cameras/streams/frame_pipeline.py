"""Processing of the frames of one model: resizes them into the input, runs the model, decodes the results."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from edge_server.core.ensemble_and_sequence_spec import ControlKind
from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Request, Response, SequenceStep
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import (
    EdgeServerError,
    InvalidRequest,
    NotReady,
    SequenceNotBegun,
    ServingFault,
    Throttled,
    UnknownModel,
)
from edge_server.plugins.cameras.streams.camera_stream import FrameInFlight
from edge_server.plugins.cameras.streams.model_inputs_and_outputs import (
    Array,
    InputPlan,
    OutputPlan,
    OutputPlans,
    RowBuffer,
    VariantInputPlan,
    describe_runtime,
    outputs_of,
)
from edge_server.plugins.cameras.streams.stream_view import StreamView, ViewedFrame
from edge_server.plugins.vision.outputs.output_parameters import TRACK_THRESHOLD
from edge_server.protocol.frame_messages import DropReason, FrameResult
from edge_server.serving.execution.admission_control import AdmissionControl

if TYPE_CHECKING:
    from edge_server.memory.region_pins import RegionView
    from edge_server.plugins.vision.picture import Picture
    from edge_server.plugins.vision.resize import FittedPicture
    from edge_server.protocol.frame_messages import Detection, Frame, Returns
    from edge_server.service import InferenceService

_LOG = logging.getLogger(__name__)

_NORMAL = 2
"""Priority of a frame if neither the stream nor the model states one."""


_LARGEST = 0x7FFFFFFF
"""Largest number that fits every type of correlation id, including INT32."""


@dataclass(slots=True, eq=False)
class PreparedFrame:
    """A frame whose pixels are written to a row. `picture` and `pin` are set only if the frame is drawn on or read
    later.

    `view` is set if viewers of the stream wait for this picture.
    """

    flight: FrameInFlight
    fit: FittedPicture
    picture: Picture | None = None
    pin: RegionView | None = None
    view: StreamView | None = None


class _Waiter:
    """Receives the responses to one request for the waiting worker."""

    def __init__(self) -> None:
        self._response: Response | None = None
        # A bare lock, held until the final response, costs half as much as an Event; a request waits only once.
        self._closed = threading.Lock()
        self._closed.acquire()

    def take(self, response: Response) -> None:
        if self._response is None or not response.is_empty:
            self._response = response
        if response.is_final:
            self._closed.release()

    def wait(self) -> Response:
        self._closed.acquire()
        assert self._response is not None
        return self._response


class FramePipeline:
    """Runs the frames of one model, or of one version if the streams name one. All workers of the model share it."""

    def __init__(self, service: InferenceService, admission: AdmissionControl, model: str, version: int | None) -> None:
        self._service = service
        self._admission = admission
        self._model = model
        self._version = version
        self._output_plans = OutputPlans(partial(describe_runtime, service))
        self._input: InputPlan | None = None
        self._lighter = VariantInputPlan(service, model)

    def input_plan(self) -> InputPlan:
        """Return the input plan of the serving model, for the next frames.

        Raises UnknownModel, NotReady, Draining; InvalidRequest or Unsupported when it no longer takes frames.
        """
        handle, known = self._service.find(self._model, self._version), self._input
        if known is None or known.spec is not handle.spec:
            known = self._input = InputPlan(handle)
        known.handle = handle
        return known

    @property
    def priority(self) -> int:
        """Priority that the model declares, for frames whose stream states none; 0 before the first frame."""
        return self._input.priority if self._input is not None else 0

    def _rank(self, flight: FrameInFlight) -> int:
        """Return the priority of a frame (1 before 2): its stream's, else its model's."""
        return flight.stream.settings.delivery.priority or self.priority or _NORMAL

    def output_plan(self) -> OutputPlan:
        """Return the output plan of the serving model. Raises the errors of `input_plan`, and BadModelConfig."""
        spec = self.input_plan().spec
        return self._output_plans.of(spec, self.serving_version())

    def serving_version(self) -> int:
        """Return the version that would run the next frame, or 0 if none serves."""
        if self._version is not None:
            return self._version
        return max(map(int, self._service.model_metadata(self._model, None).versions), default=0)

    def run(self, flights: Sequence[FrameInFlight], plan: InputPlan | None) -> None:
        """Answer each frame, or drop it if the governor refuses it. Never raises.

        `plan`: see `input_plan`; None if it raised.
        """
        try:
            self._run(flights, plan)
        except Exception as error:  # noqa: BLE001 - boundary of the worker: maps, logs and answers the error
            failure = _as_server_error(error)
            left = [flight for flight in flights if not flight.is_settled]
            if isinstance(failure, Throttled) and failure.state:
                # The governor refused them as one request and counted only the one of highest priority.
                for flight in sorted(left, key=self._rank)[1:]:
                    self._admission.count_refused(self._model, self._rank(flight))
            for flight in left:
                self._fail(flight, failure)

    def _plan_for(self, flights: Sequence[FrameInFlight], own: InputPlan | None = None) -> InputPlan:
        """Return the input plan of the model, which is `own` if that is known already, or of the model variant that
        currently answers for it."""
        lighter = (
            None if self._version is not None else self._lighter.of([one.stream.settings.returns for one in flights])
        )
        return lighter or own or self.input_plan()

    def _run(self, flights: Sequence[FrameInFlight], own: InputPlan | None = None) -> None:
        plan = self._plan_for(flights, own)
        rows = plan.take_rows()
        fitted: list[PreparedFrame] = []
        try:
            for flight in flights:
                if (one := self._fit(flight, plan, rows, len(fitted))) is not None:
                    fitted.append(one)
            if not fitted:
                return
            response = self._ask(fitted, plan, rows)
            if response is None:
                # Between lookup and call, a model with another input replaced this one.
                self._run([one.flight for one in fitted])
            else:
                self._answer(fitted, response, rows)
        finally:
            plan.give_back(rows)
            for one in fitted:
                if one.pin is not None:
                    one.pin.release()

    # -- in

    def _fit(self, flight: FrameInFlight, plan: InputPlan, rows: RowBuffer, index: int) -> PreparedFrame | None:
        """Write one frame into its row. Return None if it was answered with an error."""
        try:
            if flight.fault is not None:
                raise flight.fault
            load = flight.load
            frame = flight.frame if load is None else load()
            return None if frame is None else self._fit_pixels(flight, frame, plan, rows[index])
        except Exception as error:  # noqa: BLE001 - one frame must not fail its batch: maps, logs and answers the error
            self._fail(flight, _as_server_error(error))
            return None

    def _fit_pixels(self, flight: FrameInFlight, frame: Frame, plan: InputPlan, row: Array) -> PreparedFrame:
        view = flight.stream.view
        if view is not None and not view.wants(time.monotonic_ns()):
            view = None
        is_kept = flight.stream.settings.returns.has_annotated_jpeg or view is not None or plan.reads_text
        pin = self._pinned(frame)
        try:
            data = memoryview(frame.data) if pin is None else pin.view
            picture = plan.image_plan.read_frame(frame, data, model=self._model, is_drawn=is_kept)
            fitted = PreparedFrame(flight, plan.image_plan.write(picture, row, model=self._model))
            if is_kept:
                fitted.picture, fitted.pin, fitted.view, pin = picture, pin, view, None
            return fitted
        finally:
            if pin is not None:
                pin.release()

    def _pinned(self, frame: Frame) -> RegionView | None:
        region = frame.region
        if region is None:
            return None
        if len(frame.data):
            raise InvalidRequest(f"a frame for model '{self._model}' has both data and a shared-memory region")
        return self._service.shared_memory.pin(region.name, region.offset, region.byte_size)

    # -- run

    def _ask(self, fitted: Sequence[PreparedFrame], plan: InputPlan, rows: RowBuffer) -> Response | None:
        """Submit the rows as one request and wait. Return None if the model was replaced and needs the frames anew."""
        waiter = _Waiter()
        tensor = rows.tensor(len(fitted))
        stream = fitted[0].flight.stream
        first = stream if len(fitted) == 1 else min((one.flight for one in fitted), key=self._rank).stream
        sequence = sequence_step(plan.spec, stream.settings.stream_id, has_begun=stream.correlation_id is not None)
        request = Request(
            model=plan.spec.name,
            version=self._version,
            inputs=plan.image_plan.inputs(tensor),
            priority=first.settings.delivery.priority,
            sequence=sequence,
            release=partial(plan.give_back, rows),
        )
        now_ns = time.monotonic_ns()
        for one in fitted:
            one.flight.queued_ns = now_ns
        rows.hold()
        try:
            plan.handle.submit(request, waiter.take, hold_us=math.inf, may_stand_in=False)
        except SequenceNotBegun:
            if stream.is_over or stream.correlation_id is None:
                raise
            stream.correlation_id = None
            return self._ask(fitted, plan, rows)
        except (InvalidRequest, UnknownModel, NotReady):
            if self._plan_for([one.flight for one in fitted]) is plan:
                raise
            return None
        if sequence is not None:
            stream.correlation_id = sequence.id
        return waiter.wait()

    # -- out

    def _answer(self, fitted: Sequence[PreparedFrame], response: Response, rows: RowBuffer) -> None:
        stream = fitted[0].flight.stream
        is_routed = self._version is None and stream.correlation_id is not None
        if is_routed and not self._service.gets_requests(self._model, response.version):
            # A stream may last for months. The next frame begins the sequence in the version that serves by then.
            stream.correlation_id = None
        if response.error is not None:
            for one in fitted:
                self._fail(one.flight, response.error)
            return
        spec = response.spec
        if spec is None:
            raise ServingFault(f"model '{self._model}' answered without saying which version did")
        plan = self._output_plans.of(spec, response.version)
        outputs = outputs_of(response)
        for index, one in enumerate(fitted):
            one.flight.started_ns = response.started_ns
            try:
                result = self._result(one, index, plan, outputs, response, rows)
            except Exception as error:  # noqa: BLE001 - as in `_fit`
                self._fail(one.flight, _as_server_error(error))
            else:
                one.flight.stream.finish(one.flight, result)

    def _result(
        self,
        one: PreparedFrame,
        index: int,
        plan: OutputPlan,
        outputs: Mapping[str, Array],
        response: Response,
        rows: RowBuffer,
    ) -> FrameResult:
        stream = one.flight.stream
        settled = stream.settled_returns
        if settled is None or settled[0] is not plan:
            settled = stream.settled_returns = plan, plan.settled(stream.settings.returns)
        returns = settled[1]
        result = self._blank(one.flight)
        if plan.perception is not None:
            row = index if plan.has_rows else None
            seen = plan.perception.decode(outputs, row, one.fit, returns, model=self._model)
            result.classes, result.detections, result.mask = seen.classes, seen.detections, seen.mask
            result.dense_map = seen.dense_map
            if plan.perception.text_model and one.picture is not None and returns.has_detections:
                result.detections = self._read_text(one, plan.perception.text_model, seen.detections)
            threshold = plan.perception.track_threshold
            zones = stream.zones
            if zones is not None and threshold is None:
                threshold = TRACK_THRESHOLD
            if threshold is not None and returns.has_detections:
                size = one.fit.width, one.fit.height
                result.detections = stream.track(one.flight, result.detections, threshold, size)
                if zones is not None:
                    result.zones = zones.report
        if returns.tensors:
            result.tensors = _tensors(returns, index if plan.has_rows else None, response, rows.array)
        if one.picture is not None and returns.has_annotated_jpeg:
            result.annotated_jpeg = self._drawn(one.picture, result, returns)
        if one.view is not None:
            self._show(one, index, plan, outputs, result.detections)
        result.version = response.version
        result.variant = plan.spec.name if plan.spec.name != self._model else ""
        result.runtime = plan.runtime
        result.batch_size = response.batch_size
        result.height, result.width = one.fit.height, one.fit.width
        result.times = one.flight.times(time.monotonic_ns())
        return result

    def _read_text(self, one: PreparedFrame, model: str, detections: tuple[Detection, ...]) -> tuple[Detection, ...]:
        from edge_server.plugins.vision.text_reading import read_text

        assert one.picture is not None
        return read_text(self._service, model, one.picture.bgr(), detections, priority=self._rank(one.flight))

    def _show(
        self,
        one: PreparedFrame,
        index: int,
        plan: OutputPlan,
        outputs: Mapping[str, Array],
        tracked: tuple[Detection, ...],
    ) -> None:
        """Pass a frame to the viewers of its stream, with the results that the model declares.

        `tracked` are the detections of the result, which may have numbers of tracks; empty if it has none.
        """
        from edge_server.plugins.vision.perception_decoder import Perception

        assert one.view is not None
        assert one.picture is not None
        # The client may change shared memory once the frame is answered.
        picture = one.picture if one.pin is None else one.picture.copy()
        seen = Perception()
        # An error here must not fail the frame of a stream that only wants tensors.
        with contextlib.suppress(EdgeServerError):
            if plan.perception is not None:
                row = index if plan.has_rows else None
                seen = plan.perception.decode(outputs, row, one.fit, plan.perception.what, model=self._model)
                if tracked:
                    seen = dataclasses.replace(seen, detections=tracked)
        if (zones := one.flight.stream.zones) is not None:
            seen = dataclasses.replace(seen, overlays=zones.overlays())
        one.view.show(ViewedFrame(one.flight.header, picture, seen), time.monotonic_ns())

    def _drawn(self, picture: Picture, result: FrameResult, returns: Returns) -> bytes:
        from edge_server.plugins.vision.draw import annotated_jpeg
        from edge_server.plugins.vision.perception_decoder import Perception

        seen = Perception(result.classes, result.detections, result.mask, dense_map=result.dense_map)
        return annotated_jpeg(picture.bgr(), seen, returns.jpeg_quality)

    def _fail(self, flight: FrameInFlight, error: EdgeServerError) -> None:
        if isinstance(error, Throttled):
            flight.stream.refuse(flight, DropReason.GOVERNOR, error.message)
            return
        result = self._blank(flight)
        result.error_code, result.error = error.code.value, error.message
        result.times = flight.times(time.monotonic_ns())
        flight.stream.finish(flight, result)

    def _blank(self, flight: FrameInFlight) -> FrameResult:
        state = self._admission.state()
        return FrameResult(flight.header, model=self._model, governor=state.level, governor_detail=state.detail)


def _tensors(returns: Returns, row: int | None, response: Response, buffer: Array) -> tuple[Tensor, ...]:
    """Return the requested outputs, with a batch dimension of 1 if the model has one.

    An output that may share memory with the input buffer (the model returns its input) is copied, because the next
    frame overwrites that buffer.
    """
    wanted = returns.tensors
    found = []
    for tensor in response.outputs:
        if "*" in wanted or tensor.name in wanted:
            array = tensor.array if row is None else tensor.array[row : row + 1]
            if np.may_share_memory(array, buffer):
                array = array.copy()
            found.append(Tensor(tensor.name, tensor.dtype, array))
    return tuple(found)


def _as_server_error(error: Exception) -> EdgeServerError:
    """Return the error for the client without its traceback, whose frames would keep the pixels alive."""
    if isinstance(error, EdgeServerError):
        return error.detached()
    _LOG.error("unexpected error in a frame", exc_info=error)
    return ServingFault(f"internal error: {type(error).__name__}")


def sequence_step(spec: ModelSpec, stream_id: str, *, has_begun: bool) -> SequenceStep | None:
    """Return the sequence step of the stream's next frame, for a model that keeps state from frame to frame.

    Return None for a model without sequences, and for an iterative one: there each request is a sequence.

    The sequence begins with the first frame that runs and ends with the stream. It does not include dropped frames. The
    next frame begins it again if the server no longer knows the sequence (the camera paused for longer than
    max_sequence_idle_microseconds, or the model was reloaded), or if another version serves by now. The correlation id
    is the stream's id, or a hash of it if the model takes numbers.
    """
    if spec.sequence is None or spec.sequence.is_iterative:
        return None
    return SequenceStep(correlation_id(spec, stream_id), is_start=not has_begun)


def correlation_id(spec: ModelSpec, stream_id: str) -> int | str:
    """Return the correlation id of a stream's frames. Two streams get the same number with a probability of one in two
    billion."""
    batching = spec.sequence
    takes_numbers = batching is not None and any(
        control.kind is ControlKind.CORRID and control.dtype is not DType.BYTES for control in batching.controls
    )
    if not takes_numbers:
        return stream_id
    digest = hashlib.blake2b(stream_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _LARGEST + 1
