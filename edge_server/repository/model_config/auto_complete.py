"""Completion of a model's configuration from its model file: fills in missing inputs and outputs, and checks the stated
ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from edge_server.backends import ONNX_ORDER, load_backend
from edge_server.backends.base import Backend, ModelFile, ModelSignature
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.shape_tensors import SHAPE_DTYPES
from edge_server.core.tensor import DType
from edge_server.errors import BackendMissing, BadModelConfig, LoadError
from edge_server.repository.choice.backend_choice import BackendCandidate, candidates, timed_choice
from edge_server.repository.choice.first_opening import FirstOpenings
from edge_server.repository.choice.model_formats import format_of
from edge_server.repository.choice.runtime_times import RuntimeTimes
from edge_server.repository.disk.safe_paths import check_relative, find_inside
from edge_server.repository.load_error_explanation import explain_by_content
from edge_server.repository.model_config.config_defaults import KIND_AUTO, KIND_GPU
from edge_server.repository.model_config.pbtxt import ConfigMessage
from edge_server.repository.model_config.validate_sequences_and_ragged_batches import (
    batch_input_targets,
    check_sequences_against_file,
    flat_inputs,
    hidden_inputs,
    split_outputs,
    state_outputs,
)

_TensorSpec: TypeAlias = InputSpec | OutputSpec
_NOTHING: Mapping[str, str] = {}
_BY_NUMBER = {dtype.number: dtype for dtype in DType}


class InspectedFile(NamedTuple):
    """A version's file, the runtime that will open it, and the inputs and outputs that the runtime read.

    `signature` is None if the runtime cannot read it. `notes` name the memory that it needs, if the backend computes
    it. `skipped` name the runtimes that failed, with the reason.
    `has_alternatives`: there are further runtimes to try, should this one fail to open the file.
    `unlogged_notes` say that the runtime is the first of the fixed order; empty if the configuration names it, no other
    reads the file, or it was chosen for another reason, which is one of the notes.
    """

    backend: Backend
    file: ModelFile
    signature: ModelSignature | None
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    has_alternatives: bool = False
    unlogged_notes: tuple[str, ...] = ()


def inspect_model(
    config: ConfigMessage,
    model: str,
    model_dir: Path,
    version: int,
    passed_over: Mapping[str, str] = _NOTHING,
    onnx_order: tuple[str, ...] = ONNX_ORDER,
    runtime_times: RuntimeTimes | None = None,
    first_openings: FirstOpenings | None = None,
) -> InspectedFile:
    """Choose the runtime, find the file and read its inputs and outputs.

    The first candidate that loads and reads the file is chosen. Those in `passed_over` (name -> reason) failed to open
    it before and are skipped, and so is for an ONNX file one that warns of wrong results, unless it is stated.
    `runtime_times` may change the order for an ONNX or GGUF file whose configuration names no runtime.
    `first_openings` opens a file that could end this process in a child first. Raises BackendMissing, BadModelConfig,
    or LoadError with every candidate's reason.
    """
    failures: list[tuple[str, LoadError]] = []
    version_dir = model_dir / str(version)
    choices = candidates(config, model, version_dir, onnx_order)
    choice, is_usual = "", True
    if len(choices) > 1 and not config.backend and not config.platform:
        choices, choice, is_usual = _order_by_times(choices, config, model_dir, version, runtime_times)
    for candidate in choices:
        try:
            if candidate.backend in passed_over:
                raise LoadError(passed_over[candidate.backend])
            inspected = _inspect_with(candidate, config, model, model_dir, version, first_openings)
            is_chosen = len(choices) > 1 and inspected.file.path.suffix == ".onnx"
            if is_chosen and inspected.signature is not None and inspected.signature.warnings:
                accept = f'backend: "{candidate.backend}" in config.pbtxt accepts that'
                raise LoadError("; ".join((*inspected.signature.warnings, accept)))
        except LoadError as error:
            failures.append((candidate.backend, error))
            continue
        name = inspected.backend.name
        title = f"model '{model}' version {version}, file '{inspected.file.path.name}': "
        skipped = tuple(
            f"backend '{other}' was skipped for '{name}': {error.message.removeprefix(title)}"
            for other, error in failures
        )
        inspected = inspected._replace(skipped=skipped, has_alternatives=candidate is not choices[-1])
        if not choice or failures:
            return inspected
        note = f"{name}: {choice}"
        if is_usual:
            return inspected._replace(unlogged_notes=(note,))
        return inspected._replace(notes=(note, *inspected.notes))
    raise _all_failed(model, failures)


def _order_by_times(
    choices: tuple[BackendCandidate, ...],
    config: ConfigMessage,
    model_dir: Path,
    version: int,
    runtime_times: RuntimeTimes | None,
) -> tuple[tuple[BackendCandidate, ...], str, bool]:
    """Return the candidates in the order in which to try them, its reason, "" for a file that is not timed, and whether
    the first is that of the fixed order."""
    version_dir, file_name = model_dir / str(version), choices[0].file_name
    format = format_of(file_name)
    if format is None or not format.is_timed:
        return choices, "", True
    names = [item.backend for item in choices]
    # Not the order of a plugin, whose backends come first.
    is_timed = set(names) == set(format.backends)
    timing = timed_choice(file_name, version_dir, config)
    if is_timed and timing.problem:
        return choices, f"fixed order for {timing.problem}", True
    measured = None
    if runtime_times is not None and is_timed:
        measured = runtime_times.choose(ModelFile(version_dir / file_name, model_dir, version), names, timing.at_once)
    if measured is None:
        return choices, "fixed order", True
    order = measured.order
    return (
        tuple(sorted(choices, key=lambda item: order.index(item.backend))),
        measured.reason,
        order[0] == choices[0].backend,
    )


def _inspect_with(
    candidate: BackendCandidate,
    config: ConfigMessage,
    model: str,
    model_dir: Path,
    version: int,
    first_openings: FirstOpenings | None,
) -> InspectedFile:
    backend = load_backend(candidate.backend)
    _check_kind(config, model, backend)
    gpu_file = backend.file_for(dict(config.cc_model_filenames)) if config.cc_model_filenames else ""
    if gpu_file:
        check_relative(gpu_file, f"model '{model}': cc_model_filenames")
    file = _find_file(gpu_file or candidate.file_name or backend.default_filename, model, model_dir, version)
    if "model_operations" in backend.used_fields:
        # They run in this process, and are checked with the model's other files.
        prefix = f"model '{model}': model_operations.op_library_filename"
        libraries = [find_inside(model_dir, name, prefix) for name in config.model_operations.op_library_filename]
        file = file._replace(operator_libraries=tuple(libraries))
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    if backend.may_end_process and first_openings is not None:
        first_openings.check(config, model_dir, version, file.path, backend.name)
    try:
        signature = backend.inspect(file, parameters)
        if signature is not None:
            _check_usable(config, model, signature)
        memory = backend.memory_parts(file, model, parameters)
    except BackendMissing:
        raise
    except LoadError as error:
        if explained := explain_by_content(error, file):
            raise explained from error
        raise
    except PermissionError as error:
        reason = LoadError(f"model '{model}' version {version}: {error}")
        raise explain_by_content(reason, file) or reason from error
    notes = signature.notes if signature is not None else ()
    memory_bytes = sum(memory.values())
    if memory:
        each = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in memory.items())
        notes = (f"needs about {memory_bytes / 2**20:.0f} MiB of memory: {each}", *notes)
    return InspectedFile(backend, file._replace(memory_bytes=memory_bytes), signature, notes)


def _check_kind(config: ConfigMessage, model: str, backend: Backend) -> None:
    """Raise BadModelConfig for an instance group that asks for a GPU on a backend that uses none."""
    for index, group in enumerate(config.instance_group):
        asks_gpu = group.kind == KIND_GPU or (group.kind == KIND_AUTO and group.gpus)
        if backend.no_gpu_reason and asks_gpu:
            raise BadModelConfig(
                f"model '{model}': instance_group '{group.name or f'{model}_{index}'}': expected KIND_CPU, given "
                f"KIND_GPU: backend {backend.name} {backend.no_gpu_reason}"
            )


def _check_usable(config: ConfigMessage, model: str, signature: ModelSignature) -> None:
    """Raise BadModelConfig for an output that requests cannot carry, if the configuration selects no others."""
    stated = {item.name for item in config.output}
    for name, reason in signature.unusable.items():
        if not stated or name in stated:
            raise BadModelConfig(
                f"model '{model}': output '{name}' of the model file is a {reason}; to serve the model without it, "
                "list the other outputs in its config.pbtxt"
            )


def _find_file(file_name: str, model: str, model_dir: Path, version: int) -> ModelFile:
    version_dir = model_dir / str(version)
    path = version_dir / file_name
    if not path.exists():
        present = sorted(entry.name for entry in version_dir.iterdir())[:8] if version_dir.is_dir() else []
        held = f"holds {', '.join(map(repr, present))}" if present else "is empty"
        raise LoadError(
            f"model '{model}' version {version}: copy the model's file to '{path}': there is none, the folder {held}"
        )
    return ModelFile(path, model_dir, version)


def _all_failed(model: str, failures: Sequence[tuple[str, LoadError]]) -> LoadError:
    """Return the error for all failed runtimes: a single reason unchanged, several in one sentence."""
    reasons = dict.fromkeys(error.message for _, error in failures)
    kind = BackendMissing if all(isinstance(error, BackendMissing) for _, error in failures) else LoadError
    if len(reasons) == 1:
        error = failures[0][1]
        names_model = f"'{model}'" in error.message
        return error if names_model else type(error)(f"model '{model}': {error.message}")
    return kind(f"model '{model}': no backend could take it: " + "; ".join(f"{n}: {e.message}" for n, e in failures))


def complete(config: ConfigMessage, model: str, signature: ModelSignature, default_max_batch_size: int) -> list[str]:
    """Fill missing fields of the configuration in place. Return a note for each decision.

    max_batch_size is chosen only if the configuration states no dims: stated dims already say whether there is a batch
    dimension. Missing inputs are added, because the model cannot run without them. Outputs are added only if none is
    stated, because a stated list is a selection. As in Triton, dynamic batching is turned on only if inputs or outputs
    came from the file. Raises BadModelConfig if the file cannot batch as configured.
    """
    notes: list[str] = []
    as_stated = [item.SerializeToString() for items in (config.input, config.output) for item in items]
    has_dims = any(item.dims for items in (config.input, config.output) for item in items)
    if config.max_batch_size == 0 and signature.is_batchable and not has_dims and default_max_batch_size > 0:
        config.max_batch_size = default_max_batch_size
        notes.append(f"max_batch_size was set to {default_max_batch_size}: the model file can batch")
    _check_can_batch(config, model, signature)
    server_made = batch_input_targets(config) | hidden_inputs(config)
    request_inputs = [spec for spec in signature.inputs if spec.name not in server_made]
    notes += [
        f"the model file does not declare the number of dimensions of input '{spec.name}': one is taken; state dims in "
        "config.pbtxt for another"
        for spec in request_inputs
        if spec.name in signature.unranked and not any(item.dims for item in config.input if item.name == spec.name)
    ]
    _fill_tensors(config.input, request_inputs, config.max_batch_size, signature.unranked, is_selection=False)
    is_selection = bool(config.output)
    hidden = set() if is_selection else state_outputs(config)
    visible = [spec for spec in signature.outputs if spec.name not in hidden]
    _fill_tensors(config.output, visible, config.max_batch_size, signature.unranked, is_selection=is_selection)
    is_complete = as_stated == [item.SerializeToString() for items in (config.input, config.output) for item in items]
    if config.max_batch_size > 1 and not is_complete and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.SetInParent()
        notes.append(
            "dynamic batching was turned on: max_batch_size is above 1, inputs or outputs come from the model file, "
            "and no scheduler is stated"
        )
    return notes


def _check_can_batch(config: ConfigMessage, model: str, signature: ModelSignature) -> None:
    """Reject max_batch_size for a file with a fixed first dimension, except 1 for a file with one row."""
    allowed = {-1, 1} if config.max_batch_size == 1 else {-1}
    specs: list[_TensorSpec] = [*signature.inputs, *signature.outputs]
    without_batch = batch_input_targets(config) | split_outputs(config)
    marked = {item.name for items in (config.input, config.output) for item in items if item.is_shape_tensor}
    for spec in specs:
        if spec.name in without_batch:
            continue
        if config.max_batch_size > 0 and (spec.is_shape_tensor or spec.name in marked):
            _check_holds_batch_size(config, model, spec)
        elif config.max_batch_size > 0 and (not spec.dims or spec.dims[0] not in allowed):
            raise BadModelConfig(
                f"model '{model}': max_batch_size: expected 0, because '{spec.name}' of the model file has the shape "
                f"{list(spec.dims)} without a leading dimension of any size, given {config.max_batch_size}"
            )


def _check_holds_batch_size(config: ConfigMessage, model: str, spec: _TensorSpec) -> None:
    """Reject max_batch_size for a shape tensor that holds only the batch size, or has another type."""
    if len(spec.dims) != 1 or spec.dims[0] in (0, 1) or spec.dtype not in SHAPE_DTYPES:
        raise BadModelConfig(
            f"model '{model}': max_batch_size: expected 0, because the shape tensor '{spec.name}' of the model file is "
            f"{spec.dtype.config_name} of the shape {list(spec.dims)}; a model that batches has one dimension there, "
            f"of the batch size and then the values, of type {' or '.join(t.config_name for t in SHAPE_DTYPES)}; "
            f"given {config.max_batch_size}"
        )


def _fill_tensors(
    items: ConfigMessage,
    specs: Sequence[_TensorSpec],
    max_batch_size: int,
    unranked: Collection[str],
    *,
    is_selection: bool,
) -> None:
    stated = {item.name: item for item in items}
    for spec in specs:
        item = stated.get(spec.name)
        if item is None:
            if is_selection:
                continue
            item = items.add(name=spec.name)
            if isinstance(spec, InputSpec):
                item.optional = spec.is_optional
        if spec.is_shape_tensor:
            item.is_shape_tensor = True
        if item.data_type == 0:
            item.data_type = spec.dtype.number
        if not item.dims and spec.name in unranked:
            item.dims.append(-1)
        elif not item.dims:
            _fill_dims(item, spec, max_batch_size)


def _fill_dims(item: ConfigMessage, spec: _TensorSpec, max_batch_size: int) -> None:
    """Set the file's dims without the batch dimension. A tensor without further dims becomes [1] reshaped to a scalar.

    A shape tensor has the batch size among its values, which clients do not send.
    """
    if max_batch_size > 0 and item.is_shape_tensor:
        item.dims.append(max(spec.dims[0] - 1, -1))
        return
    has_batch = max_batch_size > 0
    dims = [size if size > 0 else -1 for size in spec.dims[1 if has_batch else 0 :]]
    item.dims.extend(dims or [1])
    if not dims:
        item.reshape.SetInParent()


def unsure_outputs(config: ConfigMessage, signature: ModelSignature) -> frozenset[str]:
    """Return the outputs of a complete configuration whose shape is only what the file declares, if its runtime does
    not enforce that. A shape that the configuration states differently is a promise."""
    of_file = {spec.name: spec for spec in signature.outputs if spec.may_differ}
    unsure = set()
    for item in config.output:
        spec = of_file.get(item.name)
        if spec is None or item.is_shape_tensor:
            continue
        stated = list(item.reshape.shape if item.HasField("reshape") else item.dims)
        has_batch = config.max_batch_size > 0 and item.name not in signature.unranked
        if stated == [size if size > 0 else -1 for size in spec.dims[1 if has_batch else 0 :]]:
            unsure.add(item.name)
    return frozenset(unsure)


def check_against_file(
    config: ConfigMessage,
    model: str,
    signature: ModelSignature,
    *,
    needs_every_input: bool = False,
    compares_output_sizes: bool = False,
) -> None:
    """Raise BadModelConfig if a stated tensor differs from the file in name, data type or dims, or if one is missing.
    With `needs_every_input`, also for an optional input that the file demands; with `compares_output_sizes` for a size
    of an output that the file leaves open."""
    _check_can_batch(config, model, signature)
    flat, split = flat_inputs(config), split_outputs(config)
    for kind, items, specs in (
        ("input", config.input, signature.inputs),
        ("output", config.output, signature.outputs),
    ):
        of_file = {spec.name: spec for spec in specs}
        for item in items:
            spec = of_file.get(item.name)
            if spec is None:
                raise BadModelConfig(
                    f"model '{model}': unexpected {kind} '{item.name}': expected one of the model file's "
                    f"{kind}s {sorted(of_file)}"
                )
            prefix = f"model '{model}': {kind} '{item.name}'"
            if needs_every_input and isinstance(spec, InputSpec) and item.optional and not spec.is_optional:
                raise BadModelConfig(
                    f"{prefix} optional: expected false, because the model file demands it, given true"
                )
            if kind == "input" and item.name in flat:
                _check_flat(item, spec, prefix)
            else:
                has_own_dims = item.name in signature.unranked or (kind == "output" and item.name in split)
                _check_tensor(item, spec, prefix, config.max_batch_size, has_own_dims=has_own_dims)
                if kind == "output" and compares_output_sizes and not has_own_dims:
                    _compare_sizes(item, spec, prefix, config.max_batch_size)
    _check_batch_inputs(config, model, signature)
    check_sequences_against_file(config, model, signature)
    _check_none_missing(config, model, signature)


def _check_flat(item: ConfigMessage, spec: _TensorSpec, prefix: str) -> None:
    """Check a ragged input: the model receives it in one dimension, whatever its dims."""
    _check_tensor(item, spec, prefix, 0, has_own_dims=True)
    if len(spec.dims) != 1:
        raise BadModelConfig(f"{prefix} allow_ragged_batch: expected one dimension in the model file, "
                             f"given {list(spec.dims)}")  # fmt: skip


def _check_batch_inputs(config: ConfigMessage, model: str, signature: ModelSignature) -> None:
    """Raise BadModelConfig if a batch_input target is no input of the file or has another type."""
    of_file = {spec.name: spec for spec in signature.inputs}
    for item in config.batch_input:
        for name in item.target_name:
            if name not in of_file:
                raise BadModelConfig(f"model '{model}': batch_input target_name: expected one of the model file's "
                                     f"inputs {sorted(of_file)}, given '{name}'")  # fmt: skip
            prefix = f"model '{model}': batch_input '{name}'"
            _check_tensor(item, of_file[name], prefix, 0, has_own_dims=True)


def _compare_sizes(item: ConfigMessage, spec: _TensorSpec, prefix: str, max_batch_size: int) -> None:
    """Refuse a size that the file does not promise, as Triton does: clients would rely on it."""
    stated = list(item.reshape.shape if item.HasField("reshape") else item.dims)
    of_file = list(spec.dims[1:] if max_batch_size > 0 else spec.dims)
    if any(size > 0 >= own for size, own in zip(stated, of_file, strict=False)):
        raise BadModelConfig(
            f"{prefix} dims: expected -1 for each dimension that is of any size in the model file's {of_file}, "
            f"given {stated}"
        )


def _check_tensor(
    item: ConfigMessage, spec: _TensorSpec, prefix: str, max_batch_size: int, *, has_own_dims: bool = False
) -> None:
    dtype = _BY_NUMBER.get(item.data_type)
    if dtype is not None and dtype is not spec.dtype:
        raise BadModelConfig(f"{prefix} data_type: expected the model file's {spec.dtype.config_name}, "
                             f"given {dtype.config_name}")  # fmt: skip
    if has_own_dims or not item.dims:
        return
    stated = list(item.reshape.shape if item.HasField("reshape") else item.dims)
    if max_batch_size > 0 and (spec.is_shape_tensor or item.is_shape_tensor):
        _check_values(item, spec, prefix, stated)
        return
    has_batch = max_batch_size > 0
    of_file = list(spec.dims[1:] if has_batch else spec.dims)
    if not _fits(stated, of_file):
        batch = " after the batch dimension" if has_batch else ""
        hint = "" if has_batch or not _fits([-1, *stated], of_file) else "; does it lack max_batch_size?"
        raise BadModelConfig(f"{prefix} dims: expected a shape that fits the model file's {of_file}{batch}, "
                             f"given {stated}{hint}")  # fmt: skip


def _check_values(item: ConfigMessage, spec: _TensorSpec, prefix: str, stated: Sequence[int]) -> None:
    """Check a shape tensor of a model that batches: its dims count the values without the batch size."""
    if not item.is_shape_tensor:
        raise BadModelConfig(
            f"{prefix} is_shape_tensor: expected true, because it is one in the model file, given false"
        )
    size = spec.dims[0]
    if len(stated) != 1 or stated[0] < 1 or size not in (-1, stated[0] + 1):
        expected = f"[{size - 1}]" if size > 0 else "one dimension of a fixed size"
        raise BadModelConfig(
            f"{prefix} dims: expected {expected}, as many as the values of the model file's shape tensor "
            f"{list(spec.dims)} beside the batch size, given {list(stated)}"
        )


def _fits(stated: Sequence[int], of_file: Sequence[int]) -> bool:
    """Return whether two shapes can be equal; -1 on either side means any size."""
    return len(stated) == len(of_file) and all(
        a == b or a == -1 or b <= 0 for a, b in zip(stated, of_file, strict=True)
    )


def _check_none_missing(config: ConfigMessage, model: str, signature: ModelSignature) -> None:
    stated = {item.name for item in config.input} | batch_input_targets(config) | hidden_inputs(config)
    missing = [spec.name for spec in signature.inputs if spec.name not in stated and not spec.is_optional]
    if missing:
        raise BadModelConfig(
            f"model '{model}': expected {len(signature.inputs)} inputs but the configuration states {len(stated)}; "
            f"missing {missing}"
        )
