"""ONNX models through onnxruntime.

Keys in config.pbtxt's `parameters` (server-wide ones through `--backend-config=onnxruntime,key=value`):

- `intra_op_thread_count` (default: every usable core), `inter_op_thread_count`, `execution_mode` 0 or 1;
- `enable_mem_arena`, `enable_mem_pattern`: 0 or 1; `memory.enable_memory_arena_shrinkage`: "cpu:0";
- `session.*`, `optimization.*`, `mlas.*`, `ep.*`: handed to onnxruntime as session configuration entries;
- `optimization.graph.level` (or the field of that name): -1 basic, 1 extended, 2 none, unset all;
- `cudnn_conv_algo_search`, `gpu_mem_limit` and the like: see `onnxruntime_providers`;
- `precision`: `f32` and `auto` take the file as it is, `int8` and `f16` insist that the file is; `bf16` on aarch64.

All instances of a version run on one InferenceSession, which may be entered by many threads: weights are held once, and
one request alone still gets every core. Threads of its pool sleep while they wait rather than spin, for the cores
belong to other models, decoders and the front ends as well.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_server.backends import onnx_file
from edge_server.backends import onnxruntime_providers as providers
from edge_server.backends.base import Array, Backend, ModelFile, OpenJob, Session, SessionInfo, Signature
from edge_server.backends.onnxruntime_binding import BoundRun
from edge_server.backends.onnxruntime_providers import Pairs
from edge_server.backends.runtime import (
    SharedModels,
    existing_file,
    file_title,
    fingerprint,
    import_runtime,
    is_batchable,
    load_error,
    precision_of_tensors,
    readable,
    usable_cores,
    whole_number,
    words,
    yes_or_no,
)
from edge_server.backends.tensorrt import cuda
from edge_server.core.device import DeviceArray, DevicePiece, on_host
from edge_server.core.model import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, LoadError
from edge_server.records import dataclass

_TYPES = {
    "tensor(bfloat16)": DType.BF16,
    "tensor(bool)": DType.BOOL,
    "tensor(double)": DType.FP64,
    "tensor(float)": DType.FP32,
    "tensor(float16)": DType.FP16,
    "tensor(int16)": DType.INT16,
    "tensor(int32)": DType.INT32,
    "tensor(int64)": DType.INT64,
    "tensor(int8)": DType.INT8,
    "tensor(string)": DType.BYTES,
    "tensor(uint16)": DType.UINT16,
    "tensor(uint32)": DType.UINT32,
    "tensor(uint64)": DType.UINT64,
    "tensor(uint8)": DType.UINT8,
}

_ENTRY_PREFIXES = ("session.", "optimization.", "mlas.", "ep.")
_SPINNING = "session.intra_op.allow_spinning"
_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
_ARM_BF16 = "mlas.enable_gemm_fastmath_arm64_bfloat16"
_LEVEL = "optimization.graph.level"
_LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}

_LOG_FATAL = 4
"""Severity that keeps onnxruntime off stderr; what went wrong arrives as an exception in any case."""

_ONNX_BF16 = 16
"""TensorProto.BFLOAT16."""


def make(name: str) -> OnnxRuntimeBackend:
    return OnnxRuntimeBackend(name)


@dataclass(frozen=True, slots=True)
class _Options:
    """How a session is opened; equal options on the same file may share one. None and 0 leave it to onnxruntime."""

    intra_threads: int
    inter_threads: int
    is_parallel: bool
    graph_level: str
    arena: bool | None
    pattern: bool | None
    entries: Pairs
    providers: tuple[tuple[str, Pairs], ...]

    def as_text(self) -> dict[str, str]:
        """Return the options for people and metrics."""
        text = {
            "intra_op_thread_count": str(self.intra_threads),
            "inter_op_thread_count": str(self.inter_threads),
            "execution_mode": "1" if self.is_parallel else "0",
            "graph_optimization": self.graph_level,
            **dict(self.entries),
        }
        if self.arena is not None:
            text["enable_mem_arena"] = str(int(self.arena))
        if self.pattern is not None:
            text["enable_mem_pattern"] = str(int(self.pattern))
        return text


def _weights_beside(path: Path) -> dict[str, bytes]:
    """Return the files that an ONNX file names as holders of its weights, as it names them, with their contents."""
    others = [other for other in sorted(path.parent.rglob("*")) if other != path and other.is_file()]
    if not others:
        return {}
    model = path.read_bytes()
    names = {other: other.relative_to(path.parent).as_posix() for other in others}
    return {name: other.read_bytes() for other, name in names.items() if name.encode() in model}


class OnnxRuntimeBackend(Backend):
    """The onnxruntime library, the sessions that instances share, and what its exceptions look like."""

    default_filename = "model.onnx"
    default_instance_count = 2

    def __init__(self, name: str) -> None:
        self.name = name
        # From 1.29 on its Linux wheels report model names, hashes and timings to their maker unless told not to before
        # the import; they leave a file in the folder for temporary files as well.
        os.putenv("ORT_DISABLE_TELEMETRY", "1")
        self._ort = import_runtime("onnxruntime", "InferenceSession")
        self._ort.set_default_logger_severity(_LOG_FATAL)
        self._failures = _exceptions(self._ort)
        self._shared: SharedModels[Any] = SharedModels()
        self._starts_cuda: bool | None = None

    @property
    def runs_on_gpu(self) -> bool:  # type: ignore[override]  # of the base class it is a constant
        """Whether CUDA works here; found out the first time, which makes a CUDA context where there is a GPU."""
        if self._starts_cuda is None:
            available = self._ort.get_available_providers()
            no_gpu = cuda.missing() if providers.CUDA in available else "it has no CUDA"
            self._starts_cuda = providers.cuda_starts(available, no_gpu, self._open_probe)
        return self._starts_cuda

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> Signature:
        options = self._ort.SessionOptions()
        options.log_severity_level = _LOG_FATAL
        options.graph_optimization_level = self._ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.disable_prepacking", "1")
        session = self._load(file, options, [providers.CPU])
        inputs = tuple(InputSpec(*_declared(file, "input", node)) for node in session.get_inputs())
        outputs = tuple(OutputSpec(*_declared(file, "output", node)) for node in session.get_outputs())
        return Signature(inputs, outputs, is_batchable(inputs, outputs))

    def open(self, job: OpenJob) -> OnnxSession:
        merged = {**job.settings, **job.spec.parameters}
        options = _options(job, merged, self._ort.get_available_providers())
        path = existing_file(job.file, self.default_filename)
        precision, options = _precision(job, merged, onnx_arithmetic(job.file, path), options)
        # Only the CPU provider is known to take many threads in one session under every option.
        alone = "" if providers.is_cpu_only(options.providers) else job.instance_name
        key: Hashable = (fingerprint(path), options, alone)
        session = self._shared.take(key, lambda: self._open_shared(job.file, options))
        self._require_bf16(job, key, session)
        device = "CPU" if job.device_id is None else f"GPU:{job.device_id}"
        in_force = {**options.as_text(), "providers": ",".join(session.get_providers())}
        info = SessionInfo(f"onnxruntime {self._ort.__version__}", device, precision, in_force)
        run_options = self._ort.RunOptions()
        run_options.log_severity_level = _LOG_FATAL
        if _SHRINKAGE in merged:
            run_options.add_run_config_entry(_SHRINKAGE, merged[_SHRINKAGE])
        bound = None if alone == "" else BoundRun.of(session, run_options, "cuda", job.device_id)
        return OnnxSession(self, job.spec.name, info, key, session, run_options, bound)

    def _require_bf16(self, job: OpenJob, key: Hashable, session: Any) -> None:
        """Raise LoadError when the model has bfloat16 tensors and this onnxruntime is too old to pass them."""
        if hasattr(self._ort.OrtValue, "ortvalue_from_numpy_with_onnx_type"):
            return
        wide = [node.name for node in (*session.get_inputs(), *session.get_outputs()) if "bfloat16" in node.type]
        if wide:
            self._shared.give_back(key)
            raise LoadError(
                f"{file_title(job.file)}: tensor '{wide[0]}' is bfloat16, which onnxruntime {self._ort.__version__} "
                "cannot be given from Python; a newer one can"
            )

    def _open_shared(self, file: ModelFile, wanted: _Options) -> Any:
        options = self._ort.SessionOptions()
        options.log_severity_level = _LOG_FATAL
        options.intra_op_num_threads = wanted.intra_threads
        options.inter_op_num_threads = wanted.inter_threads
        modes = self._ort.ExecutionMode
        options.execution_mode = modes.ORT_PARALLEL if wanted.is_parallel else modes.ORT_SEQUENTIAL
        options.graph_optimization_level = getattr(self._ort.GraphOptimizationLevel, wanted.graph_level)
        if wanted.arena is not None:
            options.enable_cpu_mem_arena = wanted.arena
        if wanted.pattern is not None:
            options.enable_mem_pattern = wanted.pattern
        for entry, value in wanted.entries:
            options.add_session_config_entry(entry, value)
        session = self._load(file, options, [(provider, dict(pairs)) for provider, pairs in wanted.providers])
        missing = providers.missing_of(wanted.providers, session.get_providers())
        if missing:
            raise LoadError(f"{file_title(file)}: onnxruntime lists {', '.join(missing)} but could not start it here")
        return session

    def _open_probe(self, model: bytes, wanted: list[Any]) -> Any:
        options = self._ort.SessionOptions()
        options.log_severity_level = _LOG_FATAL
        return self._ort.InferenceSession(model, options, providers=wanted)

    def _load(self, file: ModelFile, options: Any, wanted: Sequence[Any]) -> Any:
        """Open an InferenceSession, translating whatever it raises."""
        path = existing_file(file, self.default_filename)
        try:
            weights = _weights_beside(path)
            if weights and hasattr(options, "add_external_initializers_from_files_in_memory"):
                # Left to itself onnxruntime maps them, and a file that is then cut off or written over in place kills
                # the process. It copies what it is given.
                lengths = [len(content) for content in weights.values()]
                options.add_external_initializers_from_files_in_memory(list(weights), list(weights.values()), lengths)
            return self._ort.InferenceSession(str(path), options, providers=wanted)
        except self._failures as error:
            failure = load_error(file, "onnxruntime", error)
        except OSError as error:  # replaced or removed while it was read
            failure = LoadError(f"{file_title(file)}: its weights cannot be read: {words(error)}")
        raise failure

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """Exception classes that the library raises."""
        return self._failures

    def ort_value(self, array: Array, is_bf16: bool) -> Any:
        """Return an OrtValue over `array` (bf16 patterns arrive as uint16)."""
        make_value = self._ort.OrtValue
        if is_bf16:
            return make_value.ortvalue_from_numpy_with_onnx_type(array, _ONNX_BF16)
        return make_value.ortvalue_from_numpy(array)

    def give_back(self, key: Hashable) -> None:
        self._shared.give_back(key)


class OnnxSession(Session):
    """One instance's use of a shared InferenceSession."""

    def __init__(
        self,
        backend: OnnxRuntimeBackend,
        model: str,
        info: SessionInfo,
        key: Hashable,
        session: Any,
        run_options: Any,
        bound: BoundRun | None = None,
    ) -> None:
        """`bound` runs a session on a GPU that is this instance's alone."""
        self.info = info
        self.takes_device_memory = bound is not None
        self._bound = bound
        self._backend = backend
        self._failures = backend.failures
        self._model = model
        self._key = key
        self._session = session
        self._run_options = run_options
        types = {node.name: _TYPES.get(node.type) for node in (*session.get_inputs(), *session.get_outputs())}
        self._strings = frozenset(name for name, dtype in types.items() if dtype is DType.BYTES)
        self._bf16 = frozenset(name for name, dtype in types.items() if dtype is DType.BF16)

    def run_on_device(
        self, inputs: Mapping[str, Array | DeviceArray], outputs: Sequence[str], targets: Mapping[str, DevicePiece]
    ) -> Mapping[str, Array | DeviceArray]:
        bound = self._bound
        if bound is None:
            return super().run_on_device(inputs, outputs, targets)
        names = list(outputs)
        feeds = {
            name: array if isinstance(array, DeviceArray) and bound.can_take(array) else readable(on_host(array))
            for name, array in inputs.items()
        }
        try:
            return dict(zip(names, bound.run(names, feeds, targets), strict=True))
        except self._failures as error:
            said = words(error)
        raise BackendError(f"model '{self._model}': onnxruntime failed: {said}")

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        names = list(outputs)
        feeds = {name: readable(array) for name, array in inputs.items()}
        if self._strings:
            feeds.update({name: self._decoded(name, feeds[name]) for name in feeds.keys() & self._strings})
        try:
            arrays = self._run(names, feeds)
        except self._failures as error:
            said = words(error)
        else:
            found = dict(zip(names, arrays, strict=True))
            found.update({name: _encoded(found[name]) for name in found.keys() & self._strings})
            return found
        # Raised outside the handler: the runtime's exception would keep its frames, and the batch with them, alive.
        raise BackendError(f"model '{self._model}': onnxruntime failed: {said}")

    def _run(self, names: list[str], feeds: Mapping[str, Array]) -> list[Array]:
        if self._bound is not None:
            # Without targets all of it comes back as arrays of the host.
            return self._bound.run(names, feeds)  # type: ignore[return-value]
        if self._bf16:
            return self._run_bf16(names, feeds)
        arrays: list[Array] = self._session.run(names, feeds, self._run_options)
        return arrays

    def _run_bf16(self, names: list[str], feeds: Mapping[str, Array]) -> list[Array]:
        """Run with OrtValues, the only form in which onnxruntime takes and gives bfloat16."""
        values = {name: self._backend.ort_value(array, name in self._bf16) for name, array in feeds.items()}
        results = self._session.run_with_ort_values(names, values, self._run_options)
        return [
            _bf16_patterns(value) if name in self._bf16 else np.array(value.numpy())
            for name, value in zip(names, results, strict=True)
        ]

    def _decoded(self, name: str, array: Array) -> Array:
        """Return strings as onnxruntime wants them: str in place of UTF-8 bytes."""
        decoded = np.empty(array.shape, dtype=object)
        try:
            decoded.reshape(-1)[:] = [value.decode() if isinstance(value, bytes) else value for value in array.flat]
        except UnicodeDecodeError as error:
            said = words(error)
        else:
            return decoded
        raise BackendError(f"model '{self._model}': input '{name}' holds a string that is not UTF-8: {said}")

    def close(self) -> None:
        self._session = self._bound = None
        self._backend.give_back(self._key)


def onnx_arithmetic(file: ModelFile, path: Any) -> str | None:
    """Return the arithmetic that a file is written in, None when it does not tell. Raises LoadError."""
    try:
        return onnx_file.arithmetic(path)
    except (ValueError, OSError) as error:
        failure = load_error(file, "onnxruntime", error)
    raise failure


def _exceptions(ort: Any) -> tuple[type[Exception], ...]:
    """Return all classes that the library raises; its own have no base in common."""
    state = ort.capi.onnxruntime_pybind11_state
    own = [item for item in vars(state).values() if isinstance(item, type) and issubclass(item, Exception)]
    return (*own, RuntimeError, ValueError, TypeError, OSError, MemoryError)


def _declared(file: ModelFile, role: str, node: Any) -> tuple[str, DType, tuple[int, ...]]:
    """Return name, type and dims of one input or output as the file declares it."""
    if node.type not in _TYPES:
        hint = "; export the model without ZipMap" if "map" in node.type else ""
        raise LoadError(f"{file_title(file)}: {role} '{node.name}' is a {node.type}, which requests cannot carry{hint}")
    dims = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape or ())
    return node.name, _TYPES[node.type], dims


def _options(job: OpenJob, merged: Mapping[str, str], available: Sequence[str]) -> _Options:
    model = job.spec.name
    entries = {key: value for key, value in merged.items() if key.startswith(_ENTRY_PREFIXES) and key != _LEVEL}
    entries.setdefault(_SPINNING, "0")
    threads = whole_number(model, merged, "intra_op_thread_count", 0)
    return _Options(
        intra_threads=threads or usable_cores(),
        inter_threads=whole_number(model, merged, "inter_op_thread_count", 0),
        is_parallel=whole_number(model, merged, "execution_mode", 0) == 1,
        graph_level=_graph_level(job, merged),
        arena=yes_or_no(model, merged, "enable_mem_arena", True) if "enable_mem_arena" in merged else None,
        pattern=yes_or_no(model, merged, "enable_mem_pattern", True) if "enable_mem_pattern" in merged else None,
        entries=tuple(sorted(entries.items())),
        providers=providers.providers(job, merged, available, gpu="" if job.device_id is None else cuda.missing()),
    )


def _graph_level(job: OpenJob, merged: Mapping[str, str]) -> str:
    level = job.spec.optimization.graph_level
    if level is None:
        level = whole_number(job.spec.name, merged, _LEVEL, 0, least=-1)
    if level not in _LEVELS:
        raise LoadError(f"model '{job.spec.name}': {_LEVEL} must be -1 (basic), 1 (extended) or 2 (none), got {level}")
    return _LEVELS[level]


def _precision(job: OpenJob, merged: Mapping[str, str], written: str | None, options: _Options) -> tuple[str, _Options]:
    """Return the arithmetic in use and the options for it. Raises LoadError when the one asked for is not to be had."""
    asked = merged.get("precision", "f32").strip().lower()
    in_file = providers.precision_of(options.providers) or written or precision_of_tensors(job.spec)
    if asked in ("f32", "auto") or asked == written:
        return in_file, options
    on_arm = platform.machine() == "aarch64"
    if asked == "bf16" and on_arm:
        return "bf16", replace(options, entries=tuple(sorted({**dict(options.entries), _ARM_BF16: "1"}.items())))
    offered = ["f32 or auto (the file as it is)", *([written] if written else []), *(["bf16"] if on_arm else [])]
    raise LoadError(
        f"model '{job.spec.name}': onnxruntime cannot run '{job.file.path.name}' in precision '{asked}' "
        f"on {platform.machine()}; it offers {', '.join(offered)}"
    )


def _encoded(array: Array) -> Array:
    """Return onnxruntime's str elements as UTF-8 bytes."""
    encoded = np.empty(array.shape, dtype=object)
    encoded.reshape(-1)[:] = [str(value).encode() for value in array.flat]
    return encoded


def _bf16_patterns(value: Any) -> Array:
    """Copy a bfloat16 OrtValue's bit patterns; numpy() does not give them."""
    size = value.tensor_size_in_bytes()
    if size == 0:
        return np.empty(value.shape(), dtype=DType.BF16.numpy)
    memory = (ctypes.c_char * size).from_address(value.data_ptr())
    patterns: Array = np.frombuffer(memory, dtype=DType.BF16.numpy).reshape(value.shape()).copy()
    return patterns
