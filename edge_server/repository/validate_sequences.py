"""What a configuration may not say of sequences: the rules of Triton's sequence batcher, with the field, what is
expected and what was given in every refusal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from edge_server.backends.base import ModelSignature
from edge_server.core.composition_spec import ControlKind
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BadModelConfig
from edge_server.repository.pbtxt import ConfigMessage, dtype_name
from edge_server.repository.safe_paths import check_relative

_FLAGS = ("int32_false_true", "fp32_false_true", "bool_false_true")
_FLAG_TYPES = {"int32_false_true": DType.INT32, "fp32_false_true": DType.FP32, "bool_false_true": DType.BOOL}
_ID_TYPES = (DType.UINT64, DType.INT64, DType.UINT32, DType.INT32, DType.BYTES)
_RUN_ONCE = (
    "c_abi", "fil", "forest", "identity", "jax", "litert", "onnxruntime", "openvino", "pytorch", "repeat", "square",
    "stub", "tensorflow", "tensorrt", "tensorrt_rtx", "tflite",
)  # fmt: skip
"""Backends whose models cannot ask to be run again: all that ship, but for `python`."""
_SHARED_OUT = ("canary_share", "variant")
"""Parameters that have another version or model answer some of the requests, which would tear sequences apart."""


def hidden_inputs(config: ConfigMessage) -> set[str]:
    """Return the inputs of the model that the server fills for sequences: controls and states."""
    batching = config.sequence_batching
    return {item.name for item in batching.control_input} | {item.input_name for item in batching.state}


def state_outputs(config: ConfigMessage) -> set[str]:
    """Return the outputs of the model that are states."""
    return {item.output_name for item in config.sequence_batching.state}


def check_sequences(config: ConfigMessage, model: str) -> None:
    """Refuse what a configuration says of sequences against their rules, as written."""
    if not config.HasField("sequence_batching"):
        return
    if config.response_cache.enable:
        raise _bad(model, "response_cache.enable", "false for a model with sequence_batching", "true")
    batching = config.sequence_batching
    _check_strategy(batching, config.max_batch_size, model)
    _check_controls(batching, model)
    _check_states(batching, model)
    _check_names(batching, model)
    for parameter in _SHARED_OUT:
        if parameter in config.parameters:
            raise _bad(model, f"parameters '{parameter}'", "none for a model with sequence_batching", "one")


def check_sequences_complete(config: ConfigMessage, model: str) -> None:
    """Refuse what does not fit the rest of a completed configuration."""
    if not config.HasField("sequence_batching"):
        return
    for name in sorted(hidden_inputs(config) & {item.name for item in config.input}):
        expected = "names of inputs that the server fills, which input does not list"
        raise _bad(model, "sequence_batching control_input and state", expected, f"'{name}'")
    states = config.sequence_batching.state
    if states and (config.backend == "python" or config.model_transaction_policy.decoupled):
        expected = "none for a model in Python or a decoupled one, which keeps what it needs itself"
        raise _bad(model, "sequence_batching.state", expected, [item.input_name for item in states])
    if config.sequence_batching.iterative_sequence and config.backend in _RUN_ONCE:
        expected = "false for a backend whose models cannot ask to be run again, as those of backend 'python' can"
        given = f"true with backend '{config.backend}'"
        raise _bad(model, "sequence_batching.iterative_sequence", expected, given)
    if config.sequence_batching.WhichOneof("strategy_choice") != "oldest" and _is_ragged(config):
        raise _bad(model, "allow_ragged_batch", "none for the direct strategy, whose rows are slots", "one")
    outputs = {item.name: item for item in config.output}
    for item in states:
        seen = outputs.get(item.output_name)
        if seen is not None and (seen.data_type != item.data_type or list(seen.dims) != list(item.dims)):
            given = f"{dtype_name(seen.data_type)} {list(seen.dims)}"
            expected = f"{dtype_name(item.data_type)} {list(item.dims)}, as its state says"
            raise _bad(model, f"output '{item.output_name}'", expected, given)


def check_sequences_against_file(config: ConfigMessage, model: str, signature: ModelSignature) -> None:
    """Raise BadModelConfig where a control or a state is not what the model file has."""
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


def _bad(model: str, field: str, expected: str, given: object) -> BadModelConfig:
    return BadModelConfig(f"model '{model}': {field}: expected {expected}, given {given}")


def _check_strategy(batching: ConfigMessage, max_batch_size: int, model: str) -> None:
    if batching.WhichOneof("strategy_choice") == "oldest":
        oldest = batching.oldest
        if oldest.max_candidate_sequences < 1:
            given = oldest.max_candidate_sequences
            raise _bad(model, "sequence_batching.oldest.max_candidate_sequences", "1 or more", given)
        for size in oldest.preferred_batch_size:
            if not 1 <= size <= max(1, max_batch_size):
                expected = f"sizes of 1 to max_batch_size {max_batch_size}"
                raise _bad(model, "sequence_batching.oldest.preferred_batch_size", expected, size)
        return
    share = batching.direct.minimum_slot_utilization
    if not 0.0 <= share <= 1.0:
        raise _bad(model, "sequence_batching.direct.minimum_slot_utilization", "0 to 1", share)


def _check_controls(batching: ConfigMessage, model: str) -> None:
    kinds: dict[ControlKind, str] = {}
    for item in batching.control_input:
        what = f"sequence_batching.control_input '{item.name}'"
        if len(item.control) != 1:
            raise _bad(model, what, "one control, for an input holds one value", len(item.control))
        control = item.control[0]
        kind = ControlKind(control.kind)
        if kind in kinds:
            raise _bad(model, what, f"CONTROL_SEQUENCE_{kind.name} once", f"it for '{kinds[kind]}' as well")
        kinds[kind] = item.name
        stated = [name for name in _FLAGS if getattr(control, name)]
        if kind is ControlKind.CORRID:
            names = [dtype.config_name for dtype in _ID_TYPES]
            if stated:
                raise _bad(model, what, "data_type alone for CONTROL_SEQUENCE_CORRID", ", ".join(stated))
            if _dtype(control.data_type) not in _ID_TYPES:
                raise _bad(model, f"{what} data_type", f"one of {', '.join(names)}", dtype_name(control.data_type))
        elif len(stated) != 1:
            raise _bad(model, what, f"one of {', '.join(_FLAGS)}", ", ".join(stated) or "none")
        elif len(getattr(control, stated[0])) != 2:
            values = list(getattr(control, stated[0]))
            raise _bad(model, f"{what} {stated[0]}", "two values, for false and for true", values)


def _check_states(batching: ConfigMessage, model: str) -> None:
    for item in batching.state:
        what = f"sequence_batching.state '{item.input_name}'"
        if _dtype(item.data_type) is None:
            raise _bad(model, f"{what} data_type", "a type such as TYPE_FP32", "none")
        if not item.dims:
            raise _bad(model, f"{what} dims", "at least one dimension", "none")
        _check_dims(item.dims, f"{what} dims", model, allows_any=True)
        if len(item.initial_state) > 1:
            raise _bad(model, f"{what} initial_state", "at most one", len(item.initial_state))
        for initial in item.initial_state:
            _check_initial(initial, item, f"{what} initial_state", model)


def _check_initial(initial: ConfigMessage, state: ConfigMessage, what: str, model: str) -> None:
    if initial.data_type != state.data_type:
        given = dtype_name(initial.data_type) if _dtype(initial.data_type) else "none"
        raise _bad(model, f"{what} data_type", f"{dtype_name(state.data_type)}, the state's", given)
    _check_dims(initial.dims, f"{what} dims", model, allows_any=False)
    if not _fits(initial.dims, state.dims):
        raise _bad(model, f"{what} dims", f"a shape that fits the state's {list(state.dims)}", list(initial.dims))
    source = initial.WhichOneof("state_data")
    if source is None or (source == "zero_data" and not initial.zero_data):
        raise _bad(model, what, "zero_data: true or a data_file", "neither")
    if source == "data_file":
        check_relative(initial.data_file, f"model '{model}': {what} data_file")


def _check_dims(dims: Sequence[int], what: str, model: str, *, allows_any: bool) -> None:
    for size in dims:
        if size < 1 and not (allows_any and size == -1):
            more = ", or -1 for any size" if allows_any else ""
            raise _bad(model, what, f"each dimension to be 1 or more{more}", size)


def _check_names(batching: ConfigMessage, model: str) -> None:
    inputs = [item.name for item in batching.control_input] + [item.input_name for item in batching.state]
    outputs = [item.output_name for item in batching.state]
    for kind, names in (("control_input and state input_name", inputs), ("state output_name", outputs)):
        if "" in names:
            raise _bad(model, f"sequence_batching {kind}", "a name for every one", "one without a name")
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise _bad(model, f"sequence_batching {kind}", "each name once", f"'{twice[0]}' twice")


def _is_ragged(config: ConfigMessage) -> bool:
    return bool(config.batch_input or config.batch_output) or any(item.allow_ragged_batch for item in config.input)


def _dtype(number: int) -> DType | None:
    return next((dtype for dtype in DType if dtype.number == number), None)


def _control_type(control: ConfigMessage) -> DType | None:
    if ControlKind(control.kind) is ControlKind.CORRID:
        return _dtype(control.data_type)
    return next((dtype for name, dtype in _FLAG_TYPES.items() if getattr(control, name)), None)


def _check_tensor(
    of_file: dict[str, InputSpec] | dict[str, OutputSpec], name: str, dtype: DType | None, dims: list[int], what: str
) -> None:
    spec = of_file.get(name)
    if spec is None:
        raise BadModelConfig(f"{what}: expected one of the model file's {sorted(of_file)}, given '{name}'")
    if dtype is not spec.dtype:
        given = "none" if dtype is None else dtype.config_name
        raise BadModelConfig(f"{what} data_type: expected the model file's {spec.dtype.config_name}, given {given}")
    if not _fits(dims, spec.dims):
        raise BadModelConfig(
            f"{what} dims: expected a shape that fits the model file's {list(spec.dims)}, given {dims}"
        )


def _fits(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two shapes can be the same; -1 on either side is any size."""
    return len(one) == len(other) and all(a == b or a == -1 or b == -1 for a, b in zip(one, other, strict=True))
