"""Build of one TensorRT engine from start to end: runs the build process, compares outputs with those of the serving
runtime, stores the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from edge_server.backends.base import Array
from edge_server.backends.cuda import cuda_driver
from edge_server.backends.isolation.npz_tensor_files import Tensors, save_tensors
from edge_server.core.model_spec import ModelSpec, WarmupInput, WarmupSample
from edge_server.core.request_response import Request, Response, ResponseSink
from edge_server.core.shape_tensors import batched_shape_inputs, batched_shape_outputs, prepend_batch_size
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import EdgeServerError, ServingFault
from edge_server.plugins.tensorrt.builds.build_process import (
    EXPECTED,
    SAMPLES,
    Bounds,
    BuildControl,
    BuildOutcome,
    build_job,
    facts_of,
    run_child,
    verify_job,
)
from edge_server.plugins.tensorrt.builds.build_registry import Build, BuildRegistry
from edge_server.plugins.tensorrt.builds.engine_cache import EngineCache
from edge_server.plugins.tensorrt.engine_order import EngineOrder
from edge_server.serving.execution.served_version import ServedVersion
from edge_server.serving.execution.warmup import build
from edge_server.telemetry.event_bus import PublishEvent

_PROGRESS_STEP_PERCENT = 5.0
"""Smallest progress of a build between two events, unless the phase changed."""


@dataclass(frozen=True, slots=True)
class ServingCallbacks:
    """Functions of the server for engine builds. All may be called from any thread and return at once.

    `serving` returns the serving version, or None. `is_settled`: no load of the model is in progress. `renew` loads a
    version again, with a mark for the reason, and returns whether it will. `may_build` returns why no engine is built
    now, "" if one may be. `lost_gpus` returns the GPUs that this process has lost, with the reason.
    """

    serving: Callable[[str, int], ServedVersion | None]
    is_settled: Callable[[str], bool]
    renew: Callable[[str, int, str], bool]
    may_build: Callable[[], str]
    publish: PublishEvent
    lost_gpus: Callable[[], Mapping[int, str]]

    def lost_gpu(self, order: EngineOrder) -> str:
        """Return why the GPU of an engine is lost to this process, as a sentence; "" if it is not."""
        reason = self.lost_gpus().get(order.device_id)
        return "" if reason is None else f"GPU {order.device_id} is lost to this process: {reason}"


class EngineBuilder:
    """Used by one thread. After `is_closing` is set it cancels the running work."""

    def __init__(
        self,
        cache: EngineCache,
        bounds: Bounds,
        server: ServingCallbacks,
        registry: BuildRegistry,
        is_closing: threading.Event,
    ) -> None:
        self._cache = cache
        self._bounds = bounds
        self._server = server
        self._registry = registry
        self._is_closing = is_closing

    def make(self, build: Build) -> None:
        """Build, verify, store and activate one engine, for which this process has the claim.

        Raises EngineCacheFault, EdgeServerError, OSError.
        """
        entry = self._cache.find(build.key)
        if entry is not None:
            self._registry.note_found(build, entry.facts)
            self._server.renew(*build.name, build.key.digest)
            return
        served = self._server.serving(*build.name)
        self._registry.note_started(build)
        folder = self._cache.work_folder(build.key)
        self._write_samples(build, served, folder)
        facts = self._cache.built(build.key)
        if facts is None:
            device = cuda_driver.devices()[build.order.device_id]
            job = build_job(build.order, folder, self._cache.timing_file(build.key), device)
            outcome = self._run(build, served is not None, job)
            if outcome.end != "built":
                self._end(build, outcome)
                return
            facts = facts_of(build.order, outcome.facts)
            self._cache.note_built(build.key, facts)
        self._registry.note_built(build, float(str(facts["took_s"])))
        outcome = self._run(build, served is not None, verify_job(build.order, folder))
        if outcome.end != "verified":
            # It may have crashed for lack of memory: the plan is kept, and tried again.
            if outcome.is_final:
                self._cache.discard(build.key)
            self._end(build, outcome)
            return
        compared = served.report().runtime if served is not None else ""
        found = {"difference": outcome.facts["difference"], "compared_with": compared}
        entry = self._cache.commit(build.key, {**facts, **found, "tolerance": build.order.tolerance})
        self._registry.note_ready(build, entry.facts, compared)
        self._server.renew(*build.name, build.key.digest)

    def _write_samples(self, build: Build, served: ServedVersion | None, folder: Path) -> None:
        """Write the samples of the check, and the outputs of the serving runtime, none if no version can compute them.
        Raises EdgeServerError, OSError."""
        spec = served.spec if served is not None else build.order.spec
        assert spec is not None
        requests = make_requests(spec, build.order, build.order.path.parent.parent)
        expected = [] if served is None else run_requests(requests, spec, partial(served.submit, hold_us=0.0))
        save_tensors(folder / SAMPLES, [runtime_inputs(spec, request) for request in requests])
        save_tensors(folder / EXPECTED, expected)

    def _run(self, build: Build, was_served: bool, job: dict[str, object]) -> BuildOutcome:
        told: list[tuple[str, float]] = [("", 0.0)]

        def report(phase: str, percent: float) -> None:
            last_phase, last_percent = told[-1]
            is_published = phase != last_phase or percent - last_percent >= _PROGRESS_STEP_PERCENT
            if is_published:
                told[-1] = (phase, percent)
            self._registry.note_progress(build, phase, percent, is_published=is_published)

        orders = BuildControl(
            should_cancel=lambda: self._cancel_reason(build, was_served),
            should_pause=self._server.may_build,
            report=report,
            paused=partial(self._registry.note_paused, build, build.state),
        )
        return run_child(job, self._bounds, orders)

    def _cancel_reason(self, build: Build, was_served: bool) -> str:
        """Return why a build must end, "" if it may continue."""
        if self._is_closing.is_set():
            return "the server stops"
        if not build.cancel_reason:
            # A load that needs another engine has called `find` by now; one that needs the same engine need not stop
            # it.
            is_unloaded = was_served and self._server.serving(*build.name) is None
            if lost := self._server.lost_gpu(build.order):
                build.cancel_reason = lost
            elif is_unloaded and self._server.is_settled(build.order.model):
                build.cancel_reason = "the model was unloaded"
        return build.cancel_reason

    def _end(self, build: Build, outcome: BuildOutcome) -> None:
        if outcome.end != "cancelled":
            self._registry.note_failed(build, outcome.reason, is_final=outcome.is_final)
            return
        self._registry.note_cancelled(build)
        if self._server.serving(*build.name) is None and not self._server.lost_gpu(build.order):
            self._registry.forget(build)


_RESPONSE_TIMEOUT_S = 120.0

Submit = Callable[[Request, ResponseSink], object]


def make_requests(spec: ModelSpec, order: EngineOrder, model_dir: Path) -> list[Request]:
    """Return the requests for checking an engine: every declared warm-up sample, and one of random numbers in the
    shapes that the engine is optimized for. Raises WarmupFailed for data that cannot be read."""
    declared = [sample for sample in spec.warmup if sample.batch_size > 0]
    made = [build(spec, sample, model_dir) for sample in [*declared, _random_sample(spec, order)]]
    made[-1] = Request(spec.name, {**made[-1].inputs, **_shape_tensor_values(spec, order)}, id=made[-1].id)
    return [Request(spec.name, request.inputs, version=order.version, id=request.id) for request in made]


def run_requests(requests: list[Request], spec: ModelSpec, submit: Submit) -> list[Tensors]:
    """Run the requests on the serving version and return the outputs, in the shapes that a runtime returns. Raises its
    errors; ServingFault if there is no response."""
    return [_runtime_outputs(spec, _run_request(request, submit)) for request in requests]


def _random_sample(spec: ModelSpec, order: EngineOrder) -> WarmupSample:
    profile = order.profiles[0]
    skip = 1 if spec.max_batch_size > 0 else 0
    rows = max((profile[item.name].best[0] for item in spec.inputs if item.name in profile), default=1) if skip else 1
    inputs = []
    for item in spec.inputs:
        if item.is_optional or item.is_shape_tensor or item.name not in profile:
            continue
        best = profile[item.name].best[skip:]
        dims = best if item.reshape is None else tuple(1 if size == -1 else size for size in item.dims)
        is_float = item.dtype.numpy.kind == "f" and item.dtype is not DType.BF16
        # Integers are often indices: zero is in every vocabulary.
        inputs.append(WarmupInput(item.name, item.dtype, dims, "random" if is_float else "zero"))
    return WarmupSample("engine check", rows, tuple(inputs))


def _shape_tensor_values(spec: ModelSpec, order: EngineOrder) -> dict[str, Tensor]:
    """Return the values of shape tensors that the engine is optimized for, in the form that a client sends."""
    skip = 1 if spec.max_batch_size > 0 else 0
    profile = order.profiles[0]
    return {
        item.name: Tensor(
            item.name, item.dtype, np.array(profile[item.name].best[skip:], item.dtype.numpy).reshape(item.dims)
        )
        for item in spec.inputs
        if item.is_shape_tensor and item.name in profile
    }


def _run_request(request: Request, submit: Submit) -> Response:
    answered = threading.Event()
    responses: list[Response] = []

    def take(response: Response) -> None:
        responses.append(response)
        answered.set()

    submit(request, take)
    if not answered.wait(_RESPONSE_TIMEOUT_S):
        raise ServingFault(
            f"model '{request.model}' did not answer the check's request within {_RESPONSE_TIMEOUT_S:g} s"
        )
    error: EdgeServerError | None = responses[0].error
    if error is not None:
        raise error
    return responses[0]


def runtime_inputs(spec: ModelSpec, request: Request) -> Tensors:
    """Return a request's inputs in the shapes that a runtime gets."""
    told = batched_shape_inputs(spec)
    rows = next((tensor.shape[0] for name, tensor in request.inputs.items() if name not in told), 1) if told else 1
    return {
        name: prepend_batch_size(tensor.array, rows) if name in told else _reshaped(tensor, _runtime_shape(spec, name))
        for name, tensor in request.inputs.items()
    }


def _runtime_outputs(spec: ModelSpec, response: Response) -> Tensors:
    """Return a response's outputs in the shapes that a runtime returns."""
    told = batched_shape_outputs(spec)
    return {
        tensor.name: prepend_batch_size(tensor.array[0], len(tensor.array))
        if tensor.name in told
        else _reshaped(tensor, _runtime_shape(spec, tensor.name))
        for tensor in response.outputs
    }


def _runtime_shape(spec: ModelSpec, name: str) -> tuple[int, ...] | None:
    item = spec.input(name) or spec.output(name)
    if item is None or item.reshape is None:
        return None
    return (-1, *item.reshape) if spec.max_batch_size > 0 else item.reshape


def _reshaped(tensor: Tensor, shape: tuple[int, ...] | None) -> Array:
    array = np.array(tensor.array)
    if shape is None or shape.count(-1) > 1:
        return array
    rows = (len(array), *shape[1:]) if shape[:1] == (-1,) else shape
    reshaped: Array = array.reshape(rows)
    return reshaped
