"""Warm-up of a new version: runs sample requests on every instance before it serves, as Triton's model_warmup
declares."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from edge_server.backends.base import Array, RequestSession, Session
from edge_server.core.batch import BatchPlan
from edge_server.core.gpu_fault import classify_gpu_fault
from edge_server.core.model_spec import ModelSpec, WarmupInput, WarmupSample
from edge_server.core.request_response import NO_PARAMETERS, Parameter, Request
from edge_server.core.tensor import DType, Tensor, split_strings
from edge_server.core.version_lifecycle import SampleRun
from edge_server.errors import (
    BackendError,
    BadModelConfig,
    EdgeServerError,
    LoadError,
    NotWarmedUp,
    SessionLost,
    WarmupFailed,
    WrongOutput,
)
from edge_server.serving.sequence.control_tensors import initial_inputs

log = logging.getLogger(__name__)

AnySession: TypeAlias = Session | RequestSession

PROBE = "probe"
"""Name of the sample made from the inputs alone, if the configuration declares none."""

_SHOWN_ERROR = 300
"""Most characters of a runtime's error that are shown if the inputs were generated."""

_WIDE = 64
"""A multiple of the strides of most networks for pictures, and a short sentence."""

_MAX_WIDE_NUMBERS = 2**22
"""Of a generated input with wide dimensions: an input of five dimensions of any size would take 4 GB."""

_GENERATED_ANSWER_S = 60.0
"""Wait for the last response to generated inputs. A model that is asked for no responses may send them for ever."""


class WarmupRules(NamedTuple):
    """`allows_nan`: floats may be NaN or infinite. `probes`: a generated inference replaces missing samples."""

    allows_nan: bool
    probes: bool


def warmup_rules(spec: ModelSpec) -> WarmupRules:
    """Return the rules of the parameters `warmup_allow_nan` and `warmup_probe`. Raises BadModelConfig."""
    return WarmupRules(_is_set(spec, "warmup_allow_nan", False), _is_set(spec, "warmup_probe", True))


def warm(session: AnySession, spec: ModelSpec, plan: BatchPlan, model_dir: Path) -> None:
    """Run every declared sample. The first one that fails raises WarmupFailed with its name and the reason.

    A sample fails if the runtime fails, if an output has not the declared shape and type, or if a float of it is NaN or
    infinite although the inputs are finite.
    """
    for sample in spec.warmup:
        if sample.batch_size > 0:
            _try(session, spec, plan, sample, model_dir)


def check_opened(session: AnySession, spec: ModelSpec, plan: BatchPlan, model_dir: Path) -> bool:
    """Run one generated inference on a model without samples. Return whether it answered; False if none was run.

    None is run if no sensible inputs can be made: a dimension of any size, strings, shape tensors, optional inputs, a
    session that gets whole requests. If zeros fail, ones and random numbers are tried too: a size cannot be 0, and a
    vector of length 0, or a mask that hides everything, has no finite answer in many correct models.

    Raises NotWarmedUp if the model may work with other inputs, and WarmupFailed if it does not.
    """
    is_checked = _is_checked_at_load(session, spec)
    if is_checked:
        _run_generated(session, spec, plan, model_dir, (probe_sample(spec), probe_sample(spec, is_zero=False)))
    return is_checked


def sample_run(session: AnySession, spec: ModelSpec, plan: BatchPlan, model_dir: Path) -> SampleRun | None:
    """Return a function that runs the session once with given inputs, or None if a model is not run without a request:
    with `warmup_probe` false, more than one response, or a session that gets whole requests."""
    if not warmup_rules(spec).probes or spec.is_decoupled or isinstance(session, RequestSession):
        return None

    def run(inputs: Mapping[str, Tensor]) -> dict[str, Array]:
        request = Request(spec.name, {**inputs, **initial_inputs(spec, 1, model_dir)}, id="warmup sample")
        outputs = session.run(plan.gather([request]), plan.output_names([request]))
        return {tensor.name: tensor.array for tensor in plan.scatter(outputs, [request], [1])[0]}

    return run


def _is_checked_at_load(session: AnySession, spec: ModelSpec) -> bool:
    if not warmup_rules(spec).probes or spec.is_decoupled or isinstance(session, RequestSession):
        return False
    can_be_generated = bool(spec.inputs) and all(
        min(item.dims, default=1) > 0
        and item.dtype is not DType.BYTES
        and not (item.is_optional or item.is_shape_tensor or item.allow_ragged_batch)
        for item in spec.inputs
    )
    return can_be_generated and _first_sample(spec) is None


def _first_sample(spec: ModelSpec) -> WarmupSample | None:
    return next((sample for sample in spec.warmup if sample.batch_size > 0), None)


def _run_generated(
    session: AnySession, spec: ModelSpec, plan: BatchPlan, model_dir: Path, samples: Sequence[WarmupSample]
) -> float:
    """Run generated samples until one works; return when that inference began. Raises NotWarmedUp, or WarmupFailed for
    an error that other inputs do not change."""
    failures: list[WarmupFailed] = []
    for sample in samples:
        started = time.monotonic()
        try:
            _try(session, spec, plan, sample, model_dir)
        except WarmupFailed as failure:
            cause = failure.__cause__
            if isinstance(cause, WrongOutput):
                raise WarmupFailed(cause.message) from failure
            if isinstance(cause, SessionLost | LoadError) or classify_gpu_fault(failure) is not None:
                raise
            failures.append(failure)
        else:
            return started
    raise not_tried_error(spec, failures[0].__cause__ or failures[0]) from failures[0]


def probe(session: AnySession, spec: ModelSpec, plan: BatchPlan, model_dir: Path) -> float:
    """Run one inference and return its seconds: the first declared sample, or generated inputs.

    A declared sample must work; else WarmupFailed. Generated inputs are those of `check_opened`, or for models that it
    does not run zeros: every dimension of any size is set to 1, and after a failure to `_WIDE`, because a picture of
    one pixel is too small for many networks. If they fail, NotWarmedUp is raised and the model is served, because its
    valid inputs are unknown. An output that the configuration rules out raises WarmupFailed: other inputs do not change
    it.
    """
    declared = _first_sample(spec)
    started = time.monotonic()
    if declared is not None:
        _try(session, spec, plan, dataclasses.replace(declared, count=1), model_dir)
    else:
        other = {"is_zero": False} if _is_checked_at_load(session, spec) else {"free_dim": _wide_dim(spec)}
        samples = dict.fromkeys((probe_sample(spec), probe_sample(spec, **other)))
        started = _run_generated(session, spec, plan, model_dir, tuple(samples))
    return time.monotonic() - started


def not_tried_error(spec: ModelSpec, error: BaseException) -> NotWarmedUp:
    """Return the message for a model that failed with generated inputs, first with `error`."""
    lead = [1] if spec.max_batch_size > 0 else []
    shapes = ", ".join(f"{item.name} {[*lead, *item.dims]}" for item in probe_sample(spec).inputs) or "none"
    has_free = any(-1 in item.dims for item in spec.inputs)
    sizes = f"; then {_wide_dim(spec)} for each dimension of any size" if has_free else ""
    return NotWarmedUp(
        f"it loads and is served, but was not tried: it does not run with generated inputs ({shapes}{sizes}). To have "
        "it tried, declare a model_warmup in its config.pbtxt; the parameter warmup_probe false leaves this out. The "
        f"error was: {str(error)[:_SHOWN_ERROR]}"
    )


def probe_sample(spec: ModelSpec, *, is_zero: bool = True, free_dim: int = 1) -> WarmupSample:
    """Return a sample made from the inputs alone: zeros, or random floats of 0 to 1 and ones. Shape tensors get ones,
    because a size cannot be 0."""
    inputs = tuple(
        WarmupInput(
            item.name,
            item.dtype,
            tuple(free_dim if dim == -1 else dim for dim in item.dims),
            "zero" if is_zero and not item.is_shape_tensor else "random" if _is_float(item.dtype) else "one",
        )
        for item in spec.inputs
        if not item.is_optional
    )
    return WarmupSample(PROBE, 1, inputs)


def _wide_dim(spec: ModelSpec) -> int:
    """Return the size to try for dimensions of any size: `_WIDE`, or less where an input would exceed the limit."""

    def numbers(wide: int) -> int:
        return max((math.prod(wide if dim == -1 else dim for dim in item.dims) for item in spec.inputs), default=0)

    wide = _WIDE
    while wide > 1 and numbers(wide) > _MAX_WIDE_NUMBERS:
        wide //= 2
    return wide


def build(spec: ModelSpec, sample: WarmupSample, model_dir: Path) -> Request:
    """Return the sample as one request of `batch_size` rows. Raises WarmupFailed for unusable data."""
    inputs = {item.name: Tensor(item.name, item.dtype, _data(spec, sample, item, model_dir)) for item in sample.inputs}
    inputs.update(initial_inputs(spec, sample.batch_size if spec.max_batch_size > 0 else 1, model_dir))
    return Request(spec.name, inputs, id=f"warmup {sample.name}")


def _data(spec: ModelSpec, sample: WarmupSample, item: WarmupInput, model_dir: Path) -> Array:
    declared = spec.input(item.name)
    has_rows = spec.max_batch_size > 0 and not (declared is not None and declared.is_shape_tensor)
    shape = (sample.batch_size, *item.dims) if has_rows else item.dims
    if item.dtype is DType.BYTES and item.source != "file":
        # Random strings would be noise to any tokenizer; Triton sends empty ones as well.
        return np.full(shape, b"", dtype=object)
    if item.source == "zero":
        return np.zeros(shape, item.dtype.numpy)
    if item.source == "one":
        return np.ones(shape, item.dtype.numpy)
    if item.source == "random":
        return _random(item.dtype, shape)
    return _from_file(spec, sample, item, shape, model_dir)


def _random(dtype: DType, shape: tuple[int, ...]) -> Array:
    generator = np.random.default_rng(0)
    kind = dtype.numpy.kind
    if dtype is DType.BF16:
        bits = generator.random(shape, np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16)
    if kind == "f":
        return generator.random(shape).astype(dtype.numpy)
    if kind == "b":
        return generator.integers(0, 2, shape).astype(np.bool_)
    limits = np.iinfo(dtype.numpy)  # type: ignore[type-var]
    return generator.integers(limits.min, limits.max, shape, dtype=dtype.numpy, endpoint=True)


def _from_file(
    spec: ModelSpec, sample: WarmupSample, item: WarmupInput, shape: tuple[int, ...], model_dir: Path
) -> Array:
    path = model_dir / "warmup" / item.file_name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _failed(sample.name, f"cannot read {path}: {error.strerror}") from error
    item_elements = int(np.prod(item.dims, dtype=np.int64))
    rows = shape[0] if len(shape) > len(item.dims) else 1
    if item.dtype is DType.BYTES:
        strings: list[bytes] = []
        with contextlib.suppress(ValueError):  # one is cut off
            strings += itertools.islice(split_strings(data), item_elements)
        if len(strings) < item_elements:
            raise _failed(sample.name, f"{path} does not hold {item_elements} length-prefixed strings")
        one = np.empty(item_elements, dtype=object)
        one[:] = strings
    else:
        need = item_elements * item.dtype.itemsize
        if len(data) < need:
            raise _failed(sample.name, f"input '{item.name}' needs {need} bytes for an item, {path} has {len(data)}")
        one = np.frombuffer(data, item.dtype.numpy, item_elements)
    return np.tile(one, rows).reshape(shape)


def _try(session: AnySession, spec: ModelSpec, plan: BatchPlan, sample: WarmupSample, model_dir: Path) -> None:
    try:
        request = build(spec, sample, model_dir)
        for _ in range(max(sample.count, 1)):
            _run(session, spec, plan, sample, request)
    except WarmupFailed:
        raise
    except EdgeServerError as error:
        raise _failed(sample.name, error.message) from error
    except Exception as error:
        log.exception("model '%s': warm-up failed in a way that its backend does not know", spec.name)
        raise _failed(sample.name, f"{type(error).__name__}: {error}") from error


def _run(session: AnySession, spec: ModelSpec, plan: BatchPlan, sample: WarmupSample, request: Request) -> None:
    if isinstance(session, RequestSession):
        _run_request(session, plan, request, _GENERATED_ANSWER_S if sample.name == PROBE else None)
    else:
        outputs = session.run(plan.gather([request]), plan.output_names([request]))
        (answer,) = plan.scatter(outputs, [request], [sample.batch_size if spec.max_batch_size > 0 else 1])
        if warmup_rules(spec).allows_nan or not all(map(_is_finite, request.inputs.values())):
            return
        for tensor in answer:
            if not _is_finite(tensor):
                raise WarmupFailed(
                    f"failed to run warmup sample '{sample.name}': output '{tensor.name}' holds NaN or infinity though "
                    "all inputs are finite; the parameter warmup_allow_nan permits that"
                )


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype is DType.BF16:
        # An exponent of all ones is infinity or NaN.
        return not bool(((tensor.array.view(np.uint16) & 0x7F80) == 0x7F80).any())
    return not _is_float(tensor.dtype) or bool(np.isfinite(tensor.array).all())


def _is_float(dtype: DType) -> bool:
    return dtype is DType.BF16 or dtype.numpy.kind == "f"


def _run_request(session: RequestSession, plan: BatchPlan, request: Request, limit_s: float | None) -> None:
    """Run a request to its last response. After `limit_s` it is cancelled; then BackendError is raised."""
    execution = _WarmupExecution(request, plan, limit_s)
    session.execute([execution])
    execution.closed.wait()
    if execution.is_cancelled():
        raise BackendError(f"the last response did not come within {limit_s:.0f} s")
    if execution.error is not None:
        raise execution.error


class _WarmupExecution:
    """A request whose responses are checked for their shapes and then dropped."""

    def __init__(self, request: Request, plan: BatchPlan, limit_s: float | None) -> None:
        self.request = request
        self.error: EdgeServerError | None = None
        self._end_s = None if limit_s is None else time.monotonic() + limit_s
        self.closed = threading.Event()
        self._plan = plan

    def is_cancelled(self) -> bool:
        return self._end_s is not None and time.monotonic() > self._end_s

    def send(
        self,
        outputs: Mapping[str, Array],
        *,
        is_final: bool = False,
        parameters: Mapping[str, Parameter] = NO_PARAMETERS,
    ) -> None:
        try:
            self._plan.answer(outputs, self.request)
        except EdgeServerError as error:
            self.fail(error)
            return
        if is_final:
            self.closed.set()

    def fail(self, error: EdgeServerError, *, is_final: bool = True) -> None:
        self.error = self.error or error
        if is_final:
            self.closed.set()

    def finish(self) -> None:
        self.closed.set()

    def reschedule(self) -> None:
        # The run is proven to work; its duration is in no sample.
        self.finish()


def _is_set(spec: ModelSpec, key: str, default: bool) -> bool:
    text = spec.parameters.get(key)
    if text is None:
        return default
    if text.strip().lower() not in ("true", "false", "1", "0"):
        raise BadModelConfig(f"model '{spec.name}': parameter {key} must be true or false, got '{text[:80]}'")
    return text.strip().lower() in ("true", "1")


def _failed(sample: str, reason: str) -> WarmupFailed:
    return WarmupFailed(f"failed to run warmup sample '{sample}': {reason}")
