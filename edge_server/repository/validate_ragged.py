"""What a configuration may not say of ragged batches: batch_input, batch_output and the inputs they speak of.

The rules are Triton's, and those that its backends find out at the first request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from edge_server.core.ragged_batch import BATCH_INPUT_DTYPES
from edge_server.errors import BadModelConfig
from edge_server.repository.pbtxt import ConfigMessage, dtype_name


def check_ragged(config: ConfigMessage, model: str) -> None:
    """Refuse tensors of the batch that cannot be made or cut as stated. Raises BadModelConfig."""
    for item in config.input:
        if item.allow_ragged_batch and config.max_batch_size > 0 and not item.dims:
            expected = "the shape of an item, which the model's file does not tell of a ragged input"
            raise _bad(model, f"input '{item.name}' dims", expected, "none")
    if not config.batch_input and not config.batch_output:
        return
    if config.max_batch_size < 1:
        field = "batch_input" if config.batch_input else "batch_output"
        raise _bad(model, field, "none, for a model without batches (max_batch_size 0)", "some")
    inputs = {item.name: item for item in config.input}
    for item in config.batch_input:
        _check_source(item, "batch_input", inputs, model)
        if item.data_type not in {dtype.number for dtype in BATCH_INPUT_DTYPES}:
            allowed = " or ".join(dtype.config_name for dtype in BATCH_INPUT_DTYPES)
            raise _bad(model, f"batch_input {list(item.target_name)} data_type", allowed, dtype_name(item.data_type))
        if not item.target_name:
            raise _bad(model, "batch_input target_name", "at least one input of the model", "none")
    taken = [name for item in config.batch_input for name in item.target_name]
    _check_targets("batch_input", taken, model)
    for name in taken:
        if name in inputs:
            raise _bad(model, "batch_input target_name", "an input that requests do not carry", f"'{name}'")
    outputs = {item.name: item for item in config.output}
    for item in config.batch_output:
        _check_batch_output(item, inputs, outputs, model)
    _check_targets("batch_output", [name for item in config.batch_output for name in item.target_name], model)


def batch_input_targets(config: ConfigMessage) -> set[str]:
    """Return the model's inputs that are made from the batch."""
    return {name for item in config.batch_input for name in item.target_name}


def flat_inputs(config: ConfigMessage) -> set[str]:
    """Return the inputs that the model gets in one dimension."""
    return {item.name for item in config.input if item.allow_ragged_batch and config.max_batch_size > 0}


def cut_outputs(config: ConfigMessage) -> set[str]:
    """Return the outputs that are cut by the shapes of inputs, so that the file's shapes do not matter."""
    return {name for item in config.batch_output for name in item.target_name}


def _check_source(item: ConfigMessage, field: str, inputs: Mapping[str, ConfigMessage], model: str) -> ConfigMessage:
    """Return the one input that an entry speaks of. Raises BadModelConfig."""
    what = f"{field} {list(item.target_name)} source_input"
    if len(item.source_input) != 1:
        raise _bad(model, what, "exactly one input", list(item.source_input) or "none")
    (name,) = item.source_input
    found = inputs.get(name)
    if found is None:
        raise _bad(model, what, f"one of the inputs {list(inputs)}", f"'{name}'")
    if found.optional:
        raise _bad(model, what, "an input that every request has", f"'{name}', which is optional")
    return found


def _check_targets(field: str, names: Sequence[str], model: str) -> None:
    if not all(names):
        raise _bad(model, f"{field} target_name", "a name for every one", "an empty one")
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise _bad(model, f"{field} target_name", "each name once", f"'{twice[0]}' twice")


def _check_batch_output(
    item: ConfigMessage, inputs: Mapping[str, ConfigMessage], outputs: Mapping[str, ConfigMessage], model: str
) -> None:
    source = _check_source(item, "batch_output", inputs, model)
    if not item.target_name:
        raise _bad(model, "batch_output target_name", "at least one output", "none")
    for name in item.target_name:
        output = outputs.get(name)
        if output is None:
            raise _bad(model, "batch_output target_name", f"one of the outputs {sorted(outputs)}", f"'{name}'")
        what = f"batch_output '{name}'"
        if not output.dims or output.HasField("reshape"):
            raise _bad(model, what, "an output with dims and without reshape", f"dims {list(output.dims)}")
        if any(size == -1 and place >= len(source.dims) for place, size in enumerate(output.dims)):
            of_source = f"dims whose -1 have their place in those of '{source.name}', {list(source.dims)}"
            raise _bad(model, what, of_source, list(output.dims))


def _bad(model: str, field: str, expected: str, given: object) -> BadModelConfig:
    return BadModelConfig(f"model '{model}': {field}: expected {expected}, given {given}")
