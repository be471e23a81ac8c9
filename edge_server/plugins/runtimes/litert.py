"""Backends `litert` and `tflite`: run TensorFlow Lite models (model.tflite) with LiteRT.

If the configuration names no backend, OpenVINO serves such files. Keys in config.pbtxt's `parameters` (for all
models with `--backend-config=litert,key=value`):

- `num_threads` (default: every usable core);
- `xnnpack` no: the plain kernels, without the XNNPACK delegate.

Inputs and outputs have the names of the file's tensors. Quantised tensors are passed as integers. Each instance has its
own interpreter; weights are in memory once. The file is read, not mapped, because overwriting a mapped file in place
kills the process.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_server.backends.align_array import readable
from edge_server.backends.base import Array, Backend, ModelFile, ModelSignature, OpenJob, Session, SessionInfo
from edge_server.backends.describe_model import is_batchable, precision_of_tensors
from edge_server.backends.option_parsers import whole_number, yes_or_no
from edge_server.backends.runtime_errors import (
    existing_file,
    file_title,
    import_runtime,
    load_error,
    message_line,
    run_error,
)
from edge_server.backends.shared_models import SharedModels, fingerprint
from edge_server.backends.tflite_metadata import read_tflite_metadata
from edge_server.cgroup_limits import usable_cores
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import LoadError

_TYPES = {
    np.dtype(kind): dtype
    for kind, dtype in {
        "bool": DType.BOOL, "f2": DType.FP16, "f4": DType.FP32, "f8": DType.FP64, "i1": DType.INT8, "i2": DType.INT16,
        "i4": DType.INT32, "i8": DType.INT64, "u1": DType.UINT8, "u2": DType.UINT16, "u4": DType.UINT32,
        "u8": DType.UINT64,
    }.items()
}  # fmt: skip

_FAILURES = (RuntimeError, ValueError, TypeError, KeyError, OSError, MemoryError)
"""Exceptions of the library, which has no classes of its own."""

_IDENTIFIER = b"TFL3"
"""Bytes 4 to 8 of every TensorFlow Lite file."""


def make(name: str) -> LiteRtBackend:
    return LiteRtBackend(name)


class LiteRtBackend(Backend):
    """The LiteRT library, and the files that instances share."""

    default_filename = "model.tflite"
    no_gpu_reason = "computes on the CPU"
    needs_every_input = True

    def __init__(self, name: str) -> None:
        self.name = name
        self._litert = import_runtime("ai_edge_litert.interpreter", "Interpreter", "litert")
        self._version = importlib.metadata.version("ai-edge-litert")
        self._shared: SharedModels[bytes] = SharedModels()

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature:
        path = self._path(file)
        interpreter = self._make_interpreter(file, _read_file(file, path), 1, False)
        inputs = tuple(InputSpec(*_declared(file, "input", one)) for one in interpreter.get_input_details())
        outputs = tuple(OutputSpec(*_declared(file, "output", one)) for one in interpreter.get_output_details())
        opened = _outputs_with_rows(inputs, outputs)
        return ModelSignature(inputs, opened, is_batchable(inputs, opened), metadata=read_tflite_metadata(path))

    def open(self, job: OpenJob) -> LiteRtSession:
        merged = {**job.settings, **job.spec.parameters}
        threads = whole_number(job.spec.name, merged, "num_threads", 0) or usable_cores()
        has_xnnpack = yes_or_no(job.spec.name, merged, "xnnpack", True)
        path = self._path(job.file)
        key = fingerprint(path)
        content = self._shared.take(key, lambda: _read_file(job.file, path))
        try:
            interpreter = self._make_interpreter(job.file, content, threads, has_xnnpack)
            precision = _precision(interpreter) or precision_of_tensors(job.spec)
        except LoadError:
            self._shared.give_back(key)
            raise
        in_force = {"num_threads": str(threads), "xnnpack": str(int(has_xnnpack))}
        info = SessionInfo(f"litert {self._version}", "CPU", precision, in_force, is_bound=False, only_computes=True)
        return LiteRtSession(job.spec.name, info, interpreter, lambda: self._shared.give_back(key))

    def _path(self, file: ModelFile) -> Path:
        return existing_file(file, self.default_filename)

    def _make_interpreter(self, file: ModelFile, content: bytes, threads: int, has_xnnpack: bool) -> Any:
        """Return a new interpreter with memory for its tensors. Raises LoadError."""
        kinds = self._litert.OpResolverType
        kind = kinds.AUTO if has_xnnpack else kinds.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        try:
            interpreter = self._litert.Interpreter(
                model_content=content, num_threads=threads, experimental_op_resolver_type=kind
            )
            interpreter.allocate_tensors()
        except _FAILURES as error:
            failure = load_error(file, "litert", error)
        else:
            return interpreter
        raise failure


def _read_file(file: ModelFile, path: Path) -> bytes:
    """Return the contents of the file. Raises LoadError, also if it is no TensorFlow Lite file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        failure = load_error(file, "litert", error)
    else:
        if content[4:8] == _IDENTIFIER:
            return content
        failure = LoadError(f"{file_title(file)}: litert cannot load it: it is not a TensorFlow Lite file")
    raise failure


def _dims(detail: Mapping[str, Any]) -> tuple[int, ...]:
    """Return a tensor's shape as declared in the file, -1 for any size."""
    declared = detail["shape_signature"] if len(detail["shape_signature"]) else detail["shape"]
    return tuple(int(size) for size in declared)


def _declared(file: ModelFile, role: str, detail: Mapping[str, Any]) -> tuple[str, DType, tuple[int, ...]]:
    try:
        dtype = _TYPES[np.dtype(detail["dtype"])]
    except (KeyError, TypeError):
        kind = getattr(detail["dtype"], "__name__", str(detail["dtype"]))
    else:
        return str(detail["name"]), dtype, _dims(detail)
    raise LoadError(f"{file_title(file)}: {role} '{detail['name']}' is a {kind}, which this backend does not carry")


def _outputs_with_rows(inputs: Sequence[InputSpec], outputs: Sequence[OutputSpec]) -> tuple[OutputSpec, ...]:
    """Return the outputs with a first dimension of any size, if each input has one.

    Converters write 1 as the outputs' first dimension, but it changes when the inputs are resized.
    """
    if not all(one.dims[:1] == (-1,) for one in inputs):
        return tuple(outputs)
    return tuple(
        OutputSpec(one.name, one.dtype, (-1, *one.dims[1:])) if one.dims[:1] == (1,) else one for one in outputs
    )


def _precision(interpreter: Any) -> str | None:
    """Return "int8" if most tensors are quantised to 8 bits, else None."""
    kinds = [np.dtype(detail["dtype"]) for detail in interpreter.get_tensor_details()]
    narrow = sum(kind in (np.dtype("i1"), np.dtype("u1")) for kind in kinds)
    wide = sum(kind in (np.dtype("f4"), np.dtype("f2")) for kind in kinds)
    return "int8" if narrow > wide else None


class LiteRtSession(Session):
    """One instance: an interpreter, whose tensors are resized for each batch."""

    def __init__(self, model: str, info: SessionInfo, interpreter: Any, give_back: Callable[[], None]) -> None:
        self.info = info
        self._model = model
        self._interpreter = interpreter
        self._give_back = give_back
        details = interpreter.get_input_details()
        self._inputs = {str(detail["name"]): (int(detail["index"]), _dims(detail)) for detail in details}
        self._outputs = {str(one["name"]): int(one["index"]) for one in interpreter.get_output_details()}
        self._shapes = {str(detail["name"]): tuple(map(int, detail["shape"])) for detail in details}

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        try:
            self._resize(inputs)
            for name, array in inputs.items():
                self._interpreter.set_tensor(self._inputs[name][0], readable(array))
            self._interpreter.invoke()
            # get_tensor copies.
            return {name: self._interpreter.get_tensor(self._outputs[name]) for name in outputs}
        except _FAILURES as error:
            said = message_line(error)
        accepted = {name: dims for name, (_, dims) in self._inputs.items()}
        # Raised outside the handler: a chained traceback would keep the batch in memory.
        raise run_error(self._model, "litert", said, inputs, accepted)

    def _resize(self, inputs: Mapping[str, Array]) -> None:
        """Resize the inputs if the batch's shapes differ from the last one's. Raises ValueError."""
        shapes = {name: array.shape for name, array in inputs.items()}
        if shapes == self._shapes:
            return
        for name, shape in shapes.items():
            dims = self._inputs[name][1]
            if len(shape) != len(dims) or any(had not in (-1, size) for size, had in zip(shape, dims, strict=True)):
                raise ValueError(f"input '{name}' must have the shape {list(dims)}, got {list(shape)}")
        # Unknown until all calls have succeeded. After a failure the next batch resizes again.
        self._shapes = {}
        for name, shape in shapes.items():
            self._interpreter.resize_tensor_input(self._inputs[name][0], list(shape))
        self._interpreter.allocate_tensors()
        self._shapes = shapes

    def close(self) -> None:
        self._interpreter = None
        self._give_back()
