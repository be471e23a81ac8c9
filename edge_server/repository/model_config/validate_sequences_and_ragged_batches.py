"""Check of the parts of a model configuration about sequences (sequence_batching) and ragged batches (batch_input,
batch_output).

The rules are Triton's, and those that its backends detect only at the first request. Every error is a BadModelConfig
that names model, field, expected and given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from edge_server.backends.base import ModelSignature
from edge_server.core.ensemble_and_sequence_spec import ControlKind
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.ragged_batch import BATCH_INPUT_DTYPES
from edge_server.core.tensor import DType
from edge_server.errors import BadModelConfig
from edge_server.repository.disk.safe_paths import check_relative
from edge_server.repository.model_config.pbtxt import ConfigMessage, dtype_name

_FLAGS = ("int32_false_true", "fp32_false_true", "bool_false_true")
_FLAG_TYPES = {"int32_false_true": DType.INT32, "fp32_false_true": DType.FP32, "bool_false_true": DType.BOOL}
_ID_TYPES = (DType.UINT64, DType.INT64, DType.UINT32, DType.INT32, DType.BYTES)


def bad_field(model: str, field: str, expected: str, given: object) -> BadModelConfig:
    """Return the error for one field of a model's configuration."""
    return BadModelConfig(f"model '{model}': {field}: expected {expected}, given {given}")


def hidden_inputs(config: ConfigMessage) -> set[str]:
    """Return the inputs that the server fills for sequences: controls and states."""
    batching = config.sequence_batching
    return {item.name for item in batching.control_input} | {item.input_name for item in batching.state}


def state_outputs(config: ConfigMessage) -> set[str]:
    """Return the outputs that are states."""
    return {item.output_name for item in config.sequence_batching.state}


def check_sequences(config: ConfigMessage, model: str) -> None:
    """Check sequence_batching as written. Raises BadModelConfig."""
    if not config.HasField("sequence_batching"):
        return
    if config.response_cache.enable:
        raise bad_field(model, "response_cache.enable", "false for a model with sequence_batching", "true")
    batching = config.sequence_batching
    _check_strategy(batching, config.max_batch_size, model)
    _check_controls(batching, model)
    _check_states(batching, model)
    _check_names(batching, model)
    if "variant" in config.parameters:
        # It would send some requests of a sequence to another model.
        raise bad_field(model, "parameters 'variant'", "none for a model with sequence_batching", "one")


def check_sequences_complete(config: ConfigMessage, model: str, *, is_program: bool) -> None:
    """Check that sequence_batching fits the rest of a completed configuration. Raises BadModelConfig."""
    if not config.HasField("sequence_batching"):
        return
    for name in sorted(hidden_inputs(config) & {item.name for item in config.input}):
        expected = "names of inputs that the server fills, which input does not list"
        raise bad_field(model, "sequence_batching control_input and state", expected, f"'{name}'")
    states = config.sequence_batching.state
    if states and (is_program or config.model_transaction_policy.decoupled):
        expected = "none for a model in Python or a decoupled one, which keeps what it needs itself"
        raise bad_field(model, "sequence_batching.state", expected, [item.input_name for item in states])
    if config.sequence_batching.iterative_sequence and not is_program:
        expected = "false for a backend whose models cannot ask to be run again, as those of backend 'python' can"
        given = f"true with backend '{config.backend}'"
        raise bad_field(model, "sequence_batching.iterative_sequence", expected, given)
    is_ragged = config.batch_input or config.batch_output or any(item.allow_ragged_batch for item in config.input)
    if config.sequence_batching.WhichOneof("strategy_choice") != "oldest" and is_ragged:
        raise bad_field(model, "allow_ragged_batch", "none for the direct strategy, whose rows are slots", "one")
    outputs = {item.name: item for item in config.output}
    for item in states:
        seen = outputs.get(item.output_name)
        if seen is not None and (seen.data_type != item.data_type or list(seen.dims) != list(item.dims)):
            given = f"{dtype_name(seen.data_type)} {list(seen.dims)}"
            expected = f"{dtype_name(item.data_type)} {list(item.dims)}, as its state says"
            raise bad_field(model, f"output '{item.output_name}'", expected, given)


def check_sequences_against_file(config: ConfigMessage, model: str, signature: ModelSignature) -> None:
    """Raise BadModelConfig if a control or state differs from the tensor of the model file."""
    batching = config.sequence_batching
    inputs = {spec.name: spec for spec in signature.inputs}
    outputs = {spec.name: spec for spec in signature.outputs}
    batch = [-1] if config.max_batch_size > 0 else []
    for item in batching.control_input:
        dtype = _control_type(item.control[0])
        _check_tensor(inputs, item.name, dtype, [*batch, 1], f"model '{model}': control input '{item.name}'")
    for item in batching.state:
        dtype, dims = _dtype(item.data_type), [*batch, *item.dims]
        _check_tensor(inputs, item.input_name, dtype, dims, f"model '{model}': state input '{item.input_name}'")
        _check_tensor(outputs, item.output_name, dtype, dims, f"model '{model}': state output '{item.output_name}'")


def _check_strategy(batching: ConfigMessage, max_batch_size: int, model: str) -> None:
    if batching.WhichOneof("strategy_choice") == "oldest":
        oldest = batching.oldest
        if oldest.max_candidate_sequences < 1:
            given = oldest.max_candidate_sequences
            raise bad_field(model, "sequence_batching.oldest.max_candidate_sequences", "1 or more", given)
        for size in oldest.preferred_batch_size:
            if not 1 <= size <= max(1, max_batch_size):
                expected = f"sizes of 1 to max_batch_size {max_batch_size}"
                raise bad_field(model, "sequence_batching.oldest.preferred_batch_size", expected, size)
        return
    utilization = batching.direct.minimum_slot_utilization
    if not 0.0 <= utilization <= 1.0:
        raise bad_field(model, "sequence_batching.direct.minimum_slot_utilization", "0 to 1", utilization)


def _check_controls(batching: ConfigMessage, model: str) -> None:
    kinds: dict[ControlKind, str] = {}
    for item in batching.control_input:
        where = f"sequence_batching.control_input '{item.name}'"
        if len(item.control) != 1:
            raise bad_field(model, where, "one control, because an input holds one value", len(item.control))
        control = item.control[0]
        kind = ControlKind(control.kind)
        if kind in kinds:
            raise bad_field(model, where, f"CONTROL_SEQUENCE_{kind.name} once", f"it for '{kinds[kind]}' as well")
        kinds[kind] = item.name
        stated = [name for name in _FLAGS if getattr(control, name)]
        if kind is ControlKind.CORRID:
            names = [dtype.config_name for dtype in _ID_TYPES]
            if stated:
                raise bad_field(model, where, "data_type alone for CONTROL_SEQUENCE_CORRID", ", ".join(stated))
            if _dtype(control.data_type) not in _ID_TYPES:
                raise bad_field(
                    model, f"{where} data_type", f"one of {', '.join(names)}", dtype_name(control.data_type)
                )
        elif len(stated) != 1:
            raise bad_field(model, where, f"one of {', '.join(_FLAGS)}", ", ".join(stated) or "none")
        elif len(getattr(control, stated[0])) != 2:
            values = list(getattr(control, stated[0]))
            raise bad_field(model, f"{where} {stated[0]}", "two values, for false and for true", values)


def _check_states(batching: ConfigMessage, model: str) -> None:
    for item in batching.state:
        where = f"sequence_batching.state '{item.input_name}'"
        if _dtype(item.data_type) is None:
            raise bad_field(model, f"{where} data_type", "a type such as TYPE_FP32", "none")
        if not item.dims:
            raise bad_field(model, f"{where} dims", "at least one dimension", "none")
        _check_dims(item.dims, f"{where} dims", model, allows_any=True)
        if len(item.initial_state) > 1:
            raise bad_field(model, f"{where} initial_state", "at most one", len(item.initial_state))
        for initial in item.initial_state:
            _check_initial(initial, item, f"{where} initial_state", model)


def _check_initial(initial: ConfigMessage, state: ConfigMessage, where: str, model: str) -> None:
    if initial.data_type != state.data_type:
        given = dtype_name(initial.data_type) if _dtype(initial.data_type) else "none"
        raise bad_field(model, f"{where} data_type", f"{dtype_name(state.data_type)}, the state's", given)
    _check_dims(initial.dims, f"{where} dims", model, allows_any=False)
    if not _fits(initial.dims, state.dims):
        raise bad_field(model, f"{where} dims", f"a shape that fits the state's {list(state.dims)}", list(initial.dims))
    source = initial.WhichOneof("state_data")
    if source is None or (source == "zero_data" and not initial.zero_data):
        raise bad_field(model, where, "zero_data: true or a data_file", "neither")
    if source == "data_file":
        check_relative(initial.data_file, f"model '{model}': {where} data_file")


def _check_dims(dims: Sequence[int], where: str, model: str, *, allows_any: bool) -> None:
    for size in dims:
        if size < 1 and not (allows_any and size == -1):
            more = ", or -1 for any size" if allows_any else ""
            raise bad_field(model, where, f"each dimension to be 1 or more{more}", size)


def _check_names(batching: ConfigMessage, model: str) -> None:
    inputs = [item.name for item in batching.control_input] + [item.input_name for item in batching.state]
    outputs = [item.output_name for item in batching.state]
    for kind, names in (("control_input and state input_name", inputs), ("state output_name", outputs)):
        if "" in names:
            raise bad_field(model, f"sequence_batching {kind}", "a name for every one", "one without a name")
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise bad_field(model, f"sequence_batching {kind}", "each name once", f"'{twice[0]}' twice")


def _dtype(number: int) -> DType | None:
    return next((dtype for dtype in DType if dtype.number == number), None)


def _control_type(control: ConfigMessage) -> DType | None:
    if ControlKind(control.kind) is ControlKind.CORRID:
        return _dtype(control.data_type)
    return next((dtype for name, dtype in _FLAG_TYPES.items() if getattr(control, name)), None)


def _check_tensor(
    of_file: dict[str, InputSpec] | dict[str, OutputSpec],
    name: str,
    dtype: DType | None,
    dims: list[int],
    where: str,
) -> None:
    spec = of_file.get(name)
    if spec is None:
        raise BadModelConfig(f"{where}: expected one of the model file's {sorted(of_file)}, given '{name}'")
    if dtype is not spec.dtype:
        given = "none" if dtype is None else dtype.config_name
        raise BadModelConfig(f"{where} data_type: expected the model file's {spec.dtype.config_name}, given {given}")
    if not _fits(dims, spec.dims):
        raise BadModelConfig(
            f"{where} dims: expected a shape that fits the model file's {list(spec.dims)}, given {dims}"
        )


def _fits(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two shapes can be the same; -1 on either side is any size."""
    return len(one) == len(other) and all(a == b or a == -1 or b == -1 for a, b in zip(one, other, strict=True))


def check_ragged(config: ConfigMessage, model: str) -> None:
    """Check batch_input, batch_output and ragged inputs. Raises BadModelConfig."""
    for item in config.input:
        if item.allow_ragged_batch and config.max_batch_size > 0 and not item.dims:
            expected = "the shape of an item, which the model's file does not tell of a ragged input"
            raise bad_field(model, f"input '{item.name}' dims", expected, "none")
    if not config.batch_input and not config.batch_output:
        return
    if config.max_batch_size < 1:
        field = "batch_input" if config.batch_input else "batch_output"
        raise bad_field(model, field, "none, for a model without batches (max_batch_size 0)", "some")
    inputs = {item.name: item for item in config.input}
    for item in config.batch_input:
        _check_batch_input(item, inputs, model)
    taken = [name for item in config.batch_input for name in item.target_name]
    _check_targets("batch_input", taken, model)
    for name in taken:
        if name in inputs:
            raise bad_field(model, "batch_input target_name", "an input that requests do not carry", f"'{name}'")
    outputs = {item.name: item for item in config.output}
    for item in config.batch_output:
        _check_batch_output(item, inputs, outputs, model)
    _check_targets("batch_output", [name for item in config.batch_output for name in item.target_name], model)


def batch_input_targets(config: ConfigMessage) -> set[str]:
    """Return the inputs that the server makes from the batch (batch_input)."""
    return {name for item in config.batch_input for name in item.target_name}


def flat_inputs(config: ConfigMessage) -> set[str]:
    """Return the ragged inputs, which the model receives in one dimension."""
    return {item.name for item in config.input if item.allow_ragged_batch and config.max_batch_size > 0}


def split_outputs(config: ConfigMessage) -> set[str]:
    """Return the outputs that are split by the shapes of inputs. Their shapes in the file do not matter."""
    return {name for item in config.batch_output for name in item.target_name}


def _check_source(item: ConfigMessage, field: str, inputs: Mapping[str, ConfigMessage], model: str) -> ConfigMessage:
    """Return the input that an entry names as its source. Raises BadModelConfig."""
    where = f"{field} {list(item.target_name)} source_input"
    if len(item.source_input) != 1:
        raise bad_field(model, where, "exactly one input", list(item.source_input) or "none")
    (name,) = item.source_input
    found = inputs.get(name)
    if found is None:
        raise bad_field(model, where, f"one of the inputs {list(inputs)}", f"'{name}'")
    if found.optional:
        raise bad_field(model, where, "an input that every request has", f"'{name}', which is optional")
    return found


def _check_targets(field: str, names: Sequence[str], model: str) -> None:
    if not all(names):
        raise bad_field(model, f"{field} target_name", "a name for every one", "an empty one")
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise bad_field(model, f"{field} target_name", "each name once", f"'{twice[0]}' twice")


def _check_batch_input(item: ConfigMessage, inputs: Mapping[str, ConfigMessage], model: str) -> None:
    _check_source(item, "batch_input", inputs, model)
    if item.data_type not in {dtype.number for dtype in BATCH_INPUT_DTYPES}:
        allowed = " or ".join(dtype.config_name for dtype in BATCH_INPUT_DTYPES)
        raise bad_field(model, f"batch_input {list(item.target_name)} data_type", allowed, dtype_name(item.data_type))
    if not item.target_name:
        raise bad_field(model, "batch_input target_name", "at least one input of the model", "none")


def _check_batch_output(
    item: ConfigMessage, inputs: Mapping[str, ConfigMessage], outputs: Mapping[str, ConfigMessage], model: str
) -> None:
    source = _check_source(item, "batch_output", inputs, model)
    if not item.target_name:
        raise bad_field(model, "batch_output target_name", "at least one output", "none")
    for name in item.target_name:
        output = outputs.get(name)
        if output is None:
            raise bad_field(model, "batch_output target_name", f"one of the outputs {sorted(outputs)}", f"'{name}'")
        where = f"batch_output '{name}'"
        if not output.dims or output.HasField("reshape"):
            raise bad_field(model, where, "an output with dims and without reshape", f"dims {list(output.dims)}")
        if any(size == -1 and axis >= len(source.dims) for axis, size in enumerate(output.dims)):
            of_source = f"dims whose -1 have their place in those of '{source.name}', {list(source.dims)}"
            raise bad_field(model, where, of_source, list(output.dims))
