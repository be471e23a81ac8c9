"""Backend `jax`: runs JAX functions exported by jax.export (model.jaxexport), compiled by XLA for the CPU.

Write the file with `path.write_bytes(jax.export.export(jax.jit(function))(*shapes).serialize())`; it runs without the
code that created it. With a symbolic first dimension the model can batch:

    rows, = jax.export.symbolic_shape("rows")
    shapes = [jax.ShapeDtypeStruct((rows, 224, 224, 3), "float32")]

Names: tensors have the names of keyword arguments and dictionary keys, joined by dots if they are nested. Positional
arguments are INPUT__0 and so on, results without a key are OUTPUT__0 and so on, counted over all tensors. If two
tensors would have the same name, all of them are numbered.

XLA compiles the function for each new shape. A `model_warmup` sample for each batch size does this before the first
request. XLA has one thread pool for the process. All instances share the compiled functions.

A damaged file may crash XLA's reader: it refuses a truncated file, but changed bits in the program ended the process in
tests. If files may be damaged in transfer, put SHA256SUMS beside them. The server checks it first.
"""

from __future__ import annotations

import importlib
import struct
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
from edge_server.core.tensor import BY_NAME, DType
from edge_server.errors import LoadError

_TYPES = {
    "bool": DType.BOOL, "bfloat16": DType.BF16, "float16": DType.FP16, "float32": DType.FP32, "float64": DType.FP64,
    **{name.lower(): BY_NAME[name] for name in BY_NAME if name.startswith(("INT", "UINT"))},
}  # fmt: skip
"""JAX's name of an element type -> DType. Requests cannot carry its other types (int4, float8, keys)."""

_FAILURES = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, OSError,
             AssertionError, ImportError, MemoryError, struct.error)  # fmt: skip
"""Exceptions of JAX. Its own classes derive from these."""


def make(name: str) -> JaxBackend:
    return JaxBackend(name)


class JaxBackend(Backend):
    """The JAX library, and the functions that instances share."""

    default_filename = "model.jaxexport"
    no_gpu_reason = "computes on the CPU"

    def __init__(self, name: str) -> None:
        self.name = name
        self._jax: Any = import_runtime("jax", "jit")
        self._export = import_runtime("jax.export", "deserialize")
        # jax.export needs it to read files, but jax does not depend on it.
        import_runtime("flatbuffers", "Builder", "jax")
        self._shared: SharedModels[_ExportedFunction] = SharedModels()

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature:
        return self._read_function(file, self._path(file)).signature

    def open(self, job: OpenJob) -> JaxSession:
        path = self._path(job.file)
        key = fingerprint(path)
        function = self._shared.take(key, lambda: self._load(job.file, path))
        info = SessionInfo(
            f"jax {self._jax.__version__}", "CPU", precision_of_tensors(job.spec), is_bound=False, only_computes=True
        )
        return JaxSession(job.spec.name, info, function, lambda: self._shared.give_back(key))

    def _path(self, file: ModelFile) -> Path:
        return existing_file(file, self.default_filename)

    def _read_function(self, file: ModelFile, path: Path) -> _ExportedFunction:
        """Return the exported function without compiling it. Raises LoadError."""
        try:
            exported = self._export.deserialize(bytearray(path.read_bytes()))
            return _ExportedFunction(self._jax, file, exported)
        except _FAILURES as error:
            failure = load_error(file, "jax", error)
        raise failure

    def _load(self, file: ModelFile, path: Path) -> _ExportedFunction:
        """Return the exported function, with its program checked. Raises LoadError."""
        function = self._read_function(file, path)
        try:
            function.check_program()
        except _FAILURES as error:
            failure = load_error(file, "jax", error)
        else:
            return function
        raise failure


class _ExportedFunction:
    """An exported function with named tensors. Any number of threads may call it. Raises LoadError."""

    def __init__(self, jax: Any, file: ModelFile, exported: Any) -> None:
        if exported.nr_devices != 1:
            raise LoadError(f"{file_title(file)}: it is exported for {exported.nr_devices} devices, not for one")
        if "cpu" not in exported.platforms:
            raise LoadError(
                f"{file_title(file)}: it is exported for {', '.join(exported.platforms)}, not for the CPU; "
                "export it with platforms=['cpu']"
            )
        self._jax = jax
        self._exported = exported
        self.inputs = _names(jax, exported.in_tree, "INPUT")
        self.outputs = _names(jax, exported.out_tree, "OUTPUT")
        self._dtypes = [_dtype(file, name, aval) for name, aval in zip(self.inputs, exported.in_avals, strict=True)]
        declared = [_dtype(file, name, aval) for name, aval in zip(self.outputs, exported.out_avals, strict=True)]
        given = zip(self.inputs, self._dtypes, exported.in_avals, strict=True)
        made = zip(self.outputs, declared, exported.out_avals, strict=True)
        inputs = tuple(InputSpec(name, dtype, _dims(aval)) for name, dtype, aval in given)
        outputs = tuple(OutputSpec(name, dtype, _dims(aval)) for name, dtype, aval in made)
        self.signature = ModelSignature(inputs, outputs, is_batchable(inputs, outputs))
        self._types = [np.dtype(aval.dtype) for aval in exported.in_avals]
        self._device = jax.devices("cpu")[0]

        def call_positional(leaves: Sequence[Any]) -> list[Any]:
            arguments, keywords = jax.tree_util.tree_unflatten(exported.in_tree, leaves)
            return list(jax.tree_util.tree_leaves(exported.call(*arguments, **keywords)))

        self._call = jax.jit(call_positional)
        # Its module differs between versions of JAX.
        home = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")
        self._enable_x64 = home.enable_x64

    def check_program(self) -> None:
        """Parse the StableHLO program, which `deserialize` does not."""
        self._exported.mlir_module()

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        # Otherwise JAX converts 64-bit types to 32 bits. It applies to this thread and this call.
        with self._enable_x64(True):
            leaves = [
                self._jax.device_put(readable(inputs[name]).view(kind), self._device)
                for name, kind in zip(self.inputs, self._types, strict=True)
            ]
            results = self._call(leaves)
            # Copies, because on the CPU a JAX array may use the memory of the inputs.
            return {name: np.array(result) for name, result in zip(self.outputs, results, strict=True)}


def _names(jax: Any, tree: Any, role: str) -> list[str]:
    """Return the names of a tree's tensors, in order."""
    places = jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(places)[0]]
    numbered = [f"{role}__{place}" for place in range(len(paths))]
    keys = [[str(getattr(step, "key", getattr(step, "name", ""))) for step in path] for path in paths]
    named = [".".join(filter(None, path)) or number for path, number in zip(keys, numbered, strict=True)]
    return named if len(set(named)) == len(named) else numbered


def _dtype(file: ModelFile, name: str, aval: Any) -> DType:
    found = _TYPES.get(str(aval.dtype))
    if found is None:
        raise LoadError(f"{file_title(file)}: '{name}' is of type {aval.dtype}, which requests cannot carry")
    return found


def _dims(aval: Any) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else -1 for size in aval.shape)


class JaxSession(Session):
    """One instance, on a function that all instances share."""

    def __init__(
        self, model: str, info: SessionInfo, function: _ExportedFunction, give_back: Callable[[], None]
    ) -> None:
        self.info = info
        self._model = model
        self._function: _ExportedFunction | None = function
        self._bf16 = frozenset(one.name for one in function.signature.outputs if one.dtype is DType.BF16)
        self._give_back = give_back

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        assert self._function is not None
        try:
            found = self._function(inputs)
        except _FAILURES as error:
            said = message_line(error)
        else:
            found.update({name: found[name].view(DType.BF16.numpy) for name in self._bf16})
            return {name: found[name] for name in outputs}
        accepted = {one.name: one.dims for one in self._function.signature.inputs}
        # Raised outside the handler: a chained traceback would keep the batch in memory.
        raise run_error(self._model, "jax", said, inputs, accepted)

    def close(self) -> None:
        self._function = None
        self._give_back()
