"""Backend `tensorflow`: runs SavedModels (the folder model.savedmodel) with TensorFlow, on the CPU.

If the configuration names neither backend nor platform, OpenVINO serves such folders, with a tenth of the memory. With
`platform: "tensorflow_savedmodel"` TensorFlow serves them, or OpenVINO if TensorFlow is not installed. Only TensorFlow
supports strings.

Tensors have the names in the signature. Keys in config.pbtxt's `parameters`, named as in Triton's TensorFlow backend:

- `TF_SIGNATURE_DEF` (default serving_default, or the only one);
- `TF_GRAPH_TAG` (default serve).

TensorFlow has one thread pool for the process. All instances share one loaded model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_server.backends.align_array import readable
from edge_server.backends.base import Array, Backend, ModelFile, ModelSignature, OpenJob, Session, SessionInfo
from edge_server.backends.describe_model import is_batchable, precision_of_tensors
from edge_server.backends.runtime_errors import (
    existing_file,
    file_title,
    import_runtime,
    load_error,
    message_line,
    run_error,
)
from edge_server.backends.shared_models import SharedModels, fingerprint
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import LoadError

_TYPES = {
    "bfloat16": DType.BF16, "bool": DType.BOOL, "float16": DType.FP16, "float32": DType.FP32, "float64": DType.FP64,
    "int16": DType.INT16, "int32": DType.INT32, "int64": DType.INT64, "int8": DType.INT8, "string": DType.BYTES,
    "uint16": DType.UINT16, "uint32": DType.UINT32, "uint64": DType.UINT64, "uint8": DType.UINT8,
}  # fmt: skip
_FAILURES = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError, ImportError,
             OSError, MemoryError)  # fmt: skip
"""Exceptions of TensorFlow beside its own classes."""

_DEFAULT_SIGNATURE = "serving_default"
_GRAPH = "saved_model.pb"


def make(name: str) -> TensorFlowBackend:
    return TensorFlowBackend(name)


class TensorFlowBackend(Backend):
    """The TensorFlow library, and the models that instances share."""

    default_filename = "model.savedmodel"
    no_gpu_reason = "computes on the CPU"

    def __init__(self, name: str) -> None:
        self.name = name
        # For the C library in this process: it logs errors, but no start messages.
        os.putenv("TF_CPP_MIN_LOG_LEVEL", "2")
        self._tf: Any = import_runtime("tensorflow", "saved_model")
        self._failures = (*_FAILURES, self._tf.errors.OpError)
        self._shared: SharedModels[_SignatureFunction] = SharedModels()

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """Exception classes of the library."""
        return self._failures

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature:
        return self._load(file, parameters).signature

    def open(self, job: OpenJob) -> TensorFlowSession:
        merged = {**job.settings, **job.spec.parameters}
        chosen = (merged.get("TF_GRAPH_TAG"), merged.get("TF_SIGNATURE_DEF"))
        key = (fingerprint(existing_file(job.file, _GRAPH)), *chosen)
        function = self._shared.take(key, lambda: self._load(job.file, merged))
        info = SessionInfo(f"tensorflow {self._tf.__version__}", "CPU", precision_of_tensors(job.spec), is_bound=False)
        return TensorFlowSession(self, job.spec.name, info, function, lambda: self._shared.give_back(key))

    def _load(self, file: ModelFile, parameters: Mapping[str, str]) -> _SignatureFunction:
        """Return the configured signature of a SavedModel as a function. Raises LoadError."""
        folder = _folder(file)
        try:
            with self._tf.device("/CPU:0"):
                model = self._tf.saved_model.load(str(folder), tags=[parameters.get("TF_GRAPH_TAG", "serve")])
            return _SignatureFunction(self._tf, file, model, parameters.get("TF_SIGNATURE_DEF", ""))
        except self._failures as error:
            failure = load_error(file, "tensorflow", error)
        raise failure


def _folder(file: ModelFile) -> Path:
    """Return the SavedModel's folder. Raises LoadError if it is none."""
    if not file.path.is_dir():
        raise LoadError(f"{file_title(file)}: a SavedModel is a folder that holds {_GRAPH}, and this is a file")
    return existing_file(file, _GRAPH).parent


class _SignatureFunction:
    """One signature of a loaded SavedModel. Any number of threads may call it. Raises LoadError."""

    def __init__(self, tf: Any, file: ModelFile, model: Any, wanted: str) -> None:
        signatures = dict(model.signatures)
        name = wanted or (next(iter(signatures)) if len(signatures) == 1 else _DEFAULT_SIGNATURE)
        if name not in signatures:
            there = ", ".join(sorted(signatures)) or "none"
            raise LoadError(f"{file_title(file)}: it has no signature '{name}'; there are: {there}")
        self._tf = tf
        self._model = model
        self._call = signatures[name]
        inputs = tuple(
            InputSpec(*_declared(file, "input", one, spec))
            for one, spec in self._call.structured_input_signature[1].items()
        )
        outputs = tuple(
            OutputSpec(*_declared(file, "output", one, spec)) for one, spec in self._call.structured_outputs.items()
        )
        self.signature = ModelSignature(inputs, outputs, is_batchable(inputs, outputs))
        self._types = {one: spec.dtype for one, spec in self._call.structured_input_signature[1].items()}

    def __call__(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        with self._tf.device("/CPU:0"):
            given = {}
            for name, array in inputs.items():
                kind = self._types[name]
                dense = readable(array)
                if kind == self._tf.bfloat16:
                    dense = dense.view(kind.as_numpy_dtype)
                given[name] = self._tf.constant(dense, dtype=kind)
            results = self._call(**given)
        # Copies, because TensorFlow may return the memory of its inputs.
        return {name: np.array(results[name].numpy()) for name in outputs}


def _declared(file: ModelFile, role: str, name: str, spec: Any) -> tuple[str, DType, tuple[int, ...]]:
    dtype = _TYPES.get(spec.dtype.name)
    if dtype is None:
        raise LoadError(
            f"{file_title(file)}: {role} '{name}' is of type {spec.dtype.name}, which requests cannot carry"
        )
    if spec.shape.rank is None:
        raise LoadError(f"{file_title(file)}: {role} '{name}' has no fixed number of dimensions")
    return str(name), dtype, tuple(-1 if size is None else int(size) for size in spec.shape)


class TensorFlowSession(Session):
    """One instance, on a model that all instances share."""

    def __init__(
        self, backend: TensorFlowBackend, model: str, info: SessionInfo, function: _SignatureFunction,
        give_back: Callable[[], None],
    ) -> None:  # fmt: skip
        self.info = info
        self._failures = backend.failures
        self._model = model
        self._function: _SignatureFunction | None = function
        self._dtypes = {one.name: one.dtype for one in function.signature.outputs}
        self._give_back = give_back

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        assert self._function is not None
        try:
            found = self._function(inputs, outputs)
        except self._failures as error:
            said = message_line(error)
        else:
            return {
                name: array.view(DType.BF16.numpy) if self._dtypes[name] is DType.BF16 else array
                for name, array in found.items()
            }
        accepted = {one.name: one.dims for one in self._function.signature.inputs}
        # Raised outside the handler: a chained traceback would keep the batch in memory.
        raise run_error(self._model, "tensorflow", said, inputs, accepted)

    def close(self) -> None:
        self._function = None
        self._give_back()
