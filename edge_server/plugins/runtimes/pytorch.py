"""Backend `pytorch`: runs TorchScript (model.pt), and programs saved by torch.export (a .pt2 file).

Names: a TorchScript file contains neither types nor shapes, so the configuration declares all tensors. Inputs have the
names of the arguments of `forward`, or NAME__INDEX with the argument's number. Outputs are NAME__INDEX with the
position in the returned tuple, or the keys of a returned dictionary; a single output may have any name. A .pt2 file
declares its tensors: inputs have the names of forward's arguments, outputs are OUTPUT__0 and so on.

Keys in config.pbtxt's `parameters`, named as in Triton's PyTorch backend:

- `INFERENCE_MODE` (default yes), `DISABLE_OPTIMIZED_EXECUTION`, `DISABLE_CUDNN`;
- `INTRA_OP_THREAD_COUNT`: threads of an operator. torch has one such number for the whole process, which the last
  loaded model with this key sets.

All instances on a device share one module, so weights are in memory once; `ENABLE_WEIGHT_SHARING` has no effect.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_server.backends.align_array import writable
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
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import LoadError

_TYPES = {
    "bfloat16": DType.BF16,
    "bool": DType.BOOL,
    "float16": DType.FP16,
    "float32": DType.FP32,
    "float64": DType.FP64,
    "int16": DType.INT16,
    "int32": DType.INT32,
    "int64": DType.INT64,
    "int8": DType.INT8,
    "uint8": DType.UINT8,
}
_BY_INDEX = re.compile(r".*__(\d{1,4})")
_EXPORTED = ".pt2"


def make(name: str) -> PyTorchBackend:
    return PyTorchBackend(name)


class PyTorchBackend(Backend):
    """The torch library, and the modules that instances share."""

    default_filename = "model.pt"

    def __init__(self, name: str) -> None:
        self.name = name
        self._torch: Any = import_runtime("torch", "jit", "pytorch")
        self.runs_on_gpu = bool(self._torch.cuda.is_available())
        self._failures = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, OSError,
                          AssertionError, ImportError, MemoryError, self._torch.jit.Error)  # fmt: skip
        self._shared: SharedModels[_LoadedModule] = SharedModels()

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """Exception classes of the library and of models that it runs."""
        return self._failures

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature | None:
        path = existing_file(file, self.default_filename)
        module = self._load(file, path, "cpu")
        return module.signature

    def open(self, job: OpenJob) -> PyTorchSession:
        spec, merged = job.spec, {**job.settings, **job.spec.parameters}
        path = existing_file(job.file, self.default_filename)
        device = "cpu" if job.device_id is None else f"cuda:{job.device_id}"
        threads = whole_number(spec.name, merged, "INTRA_OP_THREAD_COUNT", 0)
        modes = self._run_mode(spec.name, merged)
        key = (fingerprint(path), device)
        module = self._shared.take(key, lambda: self._load(job.file, path, device))
        try:
            order = _TensorOrder(spec, module)
        except LoadError:
            self._shared.give_back(key)
            raise
        if threads:
            self._torch.set_num_threads(threads)
        in_force = {"intra_op_thread_count": str(self._torch.get_num_threads()), "format": module.format}
        shown = "CPU" if job.device_id is None else f"GPU:{job.device_id}"
        info = SessionInfo(
            f"pytorch {self._torch.__version__}",
            shown,
            precision_of_tensors(spec),
            in_force,
            is_bound=shown != "CPU",
            only_computes=True,
        )
        return PyTorchSession(self, info, spec, module, order, device, modes, lambda: self._shared.give_back(key))

    def _run_mode(self, model: str, merged: Mapping[str, str]) -> Callable[[], Any]:
        """Return a function that creates the context manager for a run."""
        torch = self._torch
        infers = yes_or_no(model, merged, "INFERENCE_MODE", True)
        is_plain = yes_or_no(model, merged, "DISABLE_OPTIMIZED_EXECUTION", False)
        has_no_cudnn = yes_or_no(model, merged, "DISABLE_CUDNN", False)

        @contextlib.contextmanager
        def modes() -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.inference_mode() if infers else torch.no_grad())
                if is_plain:
                    stack.enter_context(torch.jit.optimized_execution(False))
                if has_no_cudnn:
                    stack.enter_context(torch.backends.cudnn.flags(enabled=False))
                yield

        return modes

    def _load(self, file: ModelFile, path: Path, device: str) -> _LoadedModule:
        """Read a file. Raises LoadError."""
        try:
            if path.suffix == _EXPORTED:
                return self._load_exported(file, path, device)
            module = self._torch.jit.load(str(path), map_location=device)
            module.eval()
            arguments = [argument.name for argument in module.forward.schema.arguments[1:]]
            return _LoadedModule(module, arguments, None, "torchscript")
        except self._failures as error:
            failure = load_error(file, "pytorch", error)
        raise failure

    def _load_exported(self, file: ModelFile, path: Path, device: str) -> _LoadedModule:
        if not zipfile.is_zipfile(path):
            raise LoadError(f"{file_title(file)}: pytorch cannot load it: it is not a .pt2 archive")
        with zipfile.ZipFile(path) as archive:
            if any("/aotinductor/" in name for name in archive.namelist()):
                raise LoadError(
                    f"{file_title(file)}: it is compiled ahead of time by AOTInductor; "
                    "save the exported program itself, with torch.export.save"
                )
            self._check_pickles(file, archive)
        program = self._torch.export.load(str(path))
        if device != "cpu":
            program = self._torch.export.passes.move_to_device_pass(program, device)
        signature = _exported_signature(file, program)
        return _LoadedModule(program.module(), [one.name for one in signature.inputs], signature, "torch.export")

    def _check_pickles(self, file: ModelFile, archive: zipfile.ZipFile) -> None:
        """Raise LoadError for a pickle in a .pt2 archive that names more than tensors and containers.

        `torch.export.load` would unpickle it without a limit, and so call any function that it names.
        """
        for name in _pickled_members(archive):
            content = archive.read(name)
            if not content:
                continue
            try:
                self._torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            except (*self._failures, pickle.UnpicklingError, EOFError):
                failure = LoadError(
                    f"{file_title(file)}: '{name[-80:]}' in it is a pickle that names more than tensors, or is "
                    "damaged; export the model with plain tensors as weights, constants and sample inputs"
                )
            else:
                continue
            raise failure

    def make_tensor(self, array: Array, is_bf16: bool, device: str) -> Any:
        """Return a torch tensor over the array's own memory, or a copy of it on a GPU."""
        tensor = self._torch.from_numpy(writable(array))
        if is_bf16:
            tensor = tensor.view(self._torch.bfloat16)
        return tensor if device == "cpu" else tensor.to(device)

    def make_array(self, tensor: Any, dtype: DType) -> Array:
        """Return a copy of a tensor as an array. Raises ValueError if it has another type than `dtype`."""
        if not isinstance(tensor, self._torch.Tensor):
            raise ValueError(f"expected a tensor, got a {type(tensor).__name__}")
        kind = _TYPES.get(str(tensor.dtype).removeprefix("torch."))
        if kind is not dtype:
            raise ValueError(f"expected {dtype.config_name}, as configured, got {tensor.dtype}")
        tensor = tensor.detach().cpu()
        if kind is DType.BF16:
            tensor = tensor.view(self._torch.int16)
        # A copy, because a model may return its inputs or its weights.
        return np.array(tensor.numpy(), dtype=dtype.numpy if kind is not DType.BF16 else None).view(dtype.numpy)


def _pickled_members(archive: zipfile.ZipFile) -> Iterator[str]:
    """Yield the names of the members that `torch.export.load` may unpickle.

    Format: torch/export/pt2_archive/_package.py and, up to torch 2.7, torch/export/__init__.py.
    """
    for name in archive.namelist():
        folder, _, own = name.rpartition("/")
        if own.endswith(".pt") or own in ("serialized_state_dict.json", "serialized_constants.json"):
            yield name
        elif own.endswith("_config.json") and folder.endswith(("data/weights", "data/constants")):
            for item in json.loads(archive.read(name))["config"].values():
                path = item["path_name"]
                if item["use_pickle"] or not path.startswith(("weight_", "tensor_")):
                    yield f"{folder}/{path}"


class _LoadedModule:
    """A loaded module, the names of forward's arguments, and its tensors if the file declares them."""

    def __init__(self, call: Any, arguments: Sequence[str], signature: ModelSignature | None, form: str) -> None:
        self.call = call
        self.arguments = arguments
        self.signature = signature
        self.format = form


def _exported_signature(file: ModelFile, program: Any) -> ModelSignature:
    """Return the inputs and outputs of an exported program. Raises LoadError if one is no tensor."""
    names = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    inputs = [InputSpec(name, *_exported(file, name, nodes[name])) for name in map(str, names.user_inputs)]
    outputs = [
        OutputSpec(f"OUTPUT__{number}", *_exported(file, str(name), nodes.get(str(name))))
        for number, name in enumerate(names.user_outputs)
    ]
    return ModelSignature(tuple(inputs), tuple(outputs), is_batchable(inputs, outputs))


def _exported(file: ModelFile, name: str, node: Any) -> tuple[DType, tuple[int, ...]]:
    value = None if node is None else node.meta.get("val")
    dtype = _TYPES.get(str(getattr(value, "dtype", "")).removeprefix("torch."))
    if dtype is None or value is None:
        raise LoadError(f"{file_title(file)}: '{name}' is no tensor of a type that requests carry")
    return dtype, tuple(size if isinstance(size, int) else -1 for size in value.shape)


class _TensorOrder:
    """Order of the inputs as arguments, and positions of the outputs in the result. Raises LoadError."""

    def __init__(self, spec: ModelSpec, module: _LoadedModule) -> None:
        self.inputs = _input_order(spec, module.arguments)
        self.places = _output_places(spec)
        tensors: tuple[InputSpec | OutputSpec, ...] = (*spec.inputs, *spec.outputs)
        self.dtypes = {one.name: one.dtype for one in tensors}
        self.dtypes.update({name: item.dtype for item in spec.batch_inputs for name in item.target_names})
        for name, dtype in self.dtypes.items():
            if dtype not in _TYPES.values():
                raise LoadError(f"model '{spec.name}': pytorch has no {dtype.config_name}, which '{name}' states")


def _input_order(spec: ModelSpec, arguments: Sequence[str]) -> tuple[str, ...]:
    names = [one.name for one in spec.inputs] + [name for item in spec.batch_inputs for name in item.target_names]
    if set(names) <= set(arguments):
        ordered = sorted(names, key=list(arguments).index)
        if list(arguments)[: len(ordered)] == ordered:
            return tuple(ordered)
    places = {name: int(found[1]) for name in names if (found := _BY_INDEX.fullmatch(name))}
    if sorted(places.values()) == list(range(len(names))) and len(names) <= len(arguments):
        return tuple(sorted(names, key=places.__getitem__))
    raise LoadError(
        f"model '{spec.name}': inputs must be called as the arguments of forward, {list(arguments)}, "
        f"or NAME__0 to NAME__{max(0, len(arguments) - 1)}, got {names}"
    )


def _output_places(spec: ModelSpec) -> dict[str, int] | None:
    """Return each output's position in the returned tuple; None if they can only be keys of a dictionary."""
    names = [one.name for one in spec.outputs]
    places = {name: int(found[1]) for name in names if (found := _BY_INDEX.fullmatch(name))}
    if len(places) == len(names) and len(set(places.values())) == len(names):
        return places
    return {names[0]: 0} if len(names) == 1 else None


class PyTorchSession(Session):
    """One instance, on a module that all instances on the device share."""

    def __init__(
        self, backend: PyTorchBackend, info: SessionInfo, spec: ModelSpec, module: _LoadedModule, order: _TensorOrder,
        device: str, modes: Callable[[], Any], give_back: Callable[[], None],
    ) -> None:  # fmt: skip
        self.info = info
        self._backend = backend
        self._failures = backend.failures
        self._model = spec.name
        self._module: _LoadedModule | None = module
        self._order = order
        declared = () if module.signature is None else module.signature.inputs
        self._accepted = {name: one.dims for name, one in zip(order.inputs, declared, strict=False)}
        """A TorchScript file declares no shapes."""
        self._device = device
        self._modes = modes
        self._give_back = give_back

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        try:
            return self._run(inputs, outputs)
        except self._failures as error:
            said = message_line(error)
        # Raised outside the handler: a chained traceback would keep the batch in memory.
        raise run_error(self._model, "pytorch", said, inputs, self._accepted)

    def _run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        assert self._module is not None
        dtypes = self._order.dtypes
        given = [name for name in self._order.inputs if name in inputs]
        tensors = [self._backend.make_tensor(inputs[name], dtypes[name] is DType.BF16, self._device) for name in given]
        with self._modes():
            results = self._module.call(*tensors)
            return {name: self._backend.make_array(self._result(results, name), dtypes[name]) for name in outputs}

    def _result(self, results: Any, name: str) -> Any:
        """Return one output from the result of forward. Raises ValueError if it is missing."""
        if isinstance(results, dict):
            if name not in results:
                raise ValueError(f"forward returned {sorted(map(str, results))}, without '{name}'")
            return results[name]
        found = results if isinstance(results, (tuple, list)) else (results,)
        places = self._order.places
        if places is None:
            raise ValueError(f"forward returned no dictionary; call output '{name}' NAME__INDEX, by its place")
        if places[name] >= len(found):
            raise ValueError(f"forward returned {len(found)} tensor(s), none for '{name}'")
        return found[places[name]]

    def close(self) -> None:
        self._module = None
        self._give_back()
