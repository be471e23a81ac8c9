"""What a configuration may not say: the rules of Triton's model configuration that the schema cannot express.

`check_stated` judges what somebody wrote, before any model file is opened; `check_complete` judges the whole, once
the file and the defaults have filled it. Every refusal is a BadModelConfig that names model, field, expected, given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from edge_server.errors import BadModelConfig
from edge_server.repository.pbtxt import ConfigMessage, dtype_name
from edge_server.repository.safe_paths import check_relative
from edge_server.repository.validate_ensemble import check_ensemble, is_ensemble
from edge_server.repository.validate_ragged import check_ragged
from edge_server.repository.validate_sequences import check_sequences, check_sequences_complete

MAX_RANK = 32
MAX_INSTANCES = 1024
MAX_PRIORITY_LEVELS = 1024
"""Each level has a queue of its own from the start on."""

_MAY_HAVE_NO_TENSORS = ("python",)
"""Backends whose models may have no inputs, or no outputs: a program may make data of its own, or only take it."""

_FORMAT_NONE = 0
_TYPE_INVALID = 0


def check_stated(config: ConfigMessage, model: str) -> None:
    """Refuse contradictions in a configuration as written; fields left out are not missed here."""
    _check_name(config, model)
    _check_scheduling(config, model)
    if config.max_batch_size < 0:
        raise _bad(model, "max_batch_size", "0 or more", config.max_batch_size)
    _check_unique("input", [item.name for item in config.input], model)
    _check_unique("output", [item.name for item in config.output], model)
    for item in config.input:
        _check_tensor(item, f"input '{item.name}'", config.max_batch_size, model)
        _check_format(item, model)
    for item in config.output:
        _check_tensor(item, f"output '{item.name}'", config.max_batch_size, model)
    _check_version_policy(config, model)
    _check_file_names(config, model)
    _check_instance_groups(config, model)
    _check_cache(config, model)


def check_complete(config: ConfigMessage, model: str) -> None:
    """Refuse a completed configuration that lacks something or whose parts do not fit together."""
    for kind, items in (("input", config.input), ("output", config.output)):
        if not items and config.backend not in _MAY_HAVE_NO_TENSORS:
            raise _bad(
                model, kind, f"at least one {kind}", f"none; state the {kind}s, the model file does not tell them"
            )
        for item in items:
            _check_known(item, f"{kind} '{item.name}'", model)
    if config.HasField("dynamic_batching"):
        _check_dynamic_batching(config.dynamic_batching, config.max_batch_size, model)
    check_sequences_complete(config, model)
    for sample in config.model_warmup:
        _check_warmup(sample, config, model)


def _bad(model: str, field: str, expected: str, given: object) -> BadModelConfig:
    return BadModelConfig(f"model '{model}': {field}: expected {expected}, given {given}")


def _check_name(config: ConfigMessage, model: str) -> None:
    if config.name and config.name != model:
        raise _bad(model, "name", f"the name of its directory, '{model}'", f"'{config.name}'")


def _check_scheduling(config: ConfigMessage, model: str) -> None:
    """Refuse the schedulers that change results and are not there, rather than serve wrong answers."""
    if is_ensemble(config):
        check_ensemble(config, model)
    check_sequences(config, model)
    check_ragged(config, model)


def _check_unique(kind: str, names: Sequence[str], model: str) -> None:
    seen: set[str] = set()
    for name in names:
        if not name:
            raise _bad(model, kind, "a name for every one", "one without a name")
        if name in seen:
            raise _bad(model, kind, "each name once", f"'{name}' twice")
        seen.add(name)


def _check_tensor(item: ConfigMessage, what: str, max_batch_size: int, model: str) -> None:
    _check_dims(item.dims, f"{what} dims", model)
    if not item.HasField("reshape"):
        return
    shape = item.reshape.shape
    _check_dims(shape, f"{what} reshape", model)
    if not item.dims:
        raise _bad(model, f"{what} dims", "the shape that clients see beside the reshape", "none")
    if not shape and max_batch_size == 0:
        raise _bad(model, f"{what} reshape", "a shape, for a model without batch dimension", "an empty one")
    if not _have_same_size(item.dims, shape):
        raise _bad(model, f"{what} reshape", f"as many elements as dims {list(item.dims)}", list(shape))


def _check_dims(dims: Sequence[int], what: str, model: str) -> None:
    if len(dims) > MAX_RANK:
        raise _bad(model, what, f"at most {MAX_RANK} dimensions", len(dims))
    for size in dims:
        if size < -1 or size == 0:
            raise _bad(model, what, "each dimension to be 1 or more, or -1 for any size", size)


def _have_same_size(dims: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a reshape keeps the number of elements, as far as the fixed dimensions tell."""
    fixed_dims, fixed_shape = (prod(size for size in side if size > 0) for side in (dims, shape))
    variable_dims, variable_shape = (sum(size == -1 for size in side) for side in (dims, shape))
    return variable_dims == variable_shape and fixed_dims == fixed_shape


def _check_format(item: ConfigMessage, model: str) -> None:
    if item.format != _FORMAT_NONE and item.dims and len(item.dims) != 3:
        raise _bad(model, f"input '{item.name}' dims", "3 dimensions for FORMAT_NHWC and FORMAT_NCHW", list(item.dims))


def _check_version_policy(config: ConfigMessage, model: str) -> None:
    policy = config.version_policy
    if policy.HasField("specific"):
        if not policy.specific.versions:
            raise _bad(model, "version_policy.specific.versions", "at least one version", "none")
        for version in policy.specific.versions:
            if version < 0:
                raise _bad(model, "version_policy.specific.versions", "versions of 0 or more", version)


def _check_file_names(config: ConfigMessage, model: str) -> None:
    if config.default_model_filename:
        check_relative(config.default_model_filename, f"model '{model}': default_model_filename")
    for capability, name in config.cc_model_filenames.items():
        check_relative(name, f"model '{model}': cc_model_filenames['{capability}']")
    for item in config.output:
        if item.label_filename:
            check_relative(item.label_filename, f"model '{model}': label_filename of output '{item.name}'")
    for sample in config.model_warmup:
        for name, source in sample.inputs.items():
            if source.HasField("input_data_file"):
                check_relative(source.input_data_file, f"model '{model}': model_warmup input '{name}' input_data_file")


def _check_instance_groups(config: ConfigMessage, model: str) -> None:
    for index, group in enumerate(config.instance_group):
        if not 0 <= group.count <= MAX_INSTANCES:
            raise _bad(model, f"instance_group[{index}] count", f"1 to {MAX_INSTANCES}", group.count)
    total = sum(max(group.count, 1) * max(len(group.gpus), 1) for group in config.instance_group)
    if total > MAX_INSTANCES:
        raise _bad(model, "instance_group", f"at most {MAX_INSTANCES} instances in all", total)
    names = [group.name for group in config.instance_group if group.name]
    _check_unique("instance_group", names, model)


def _check_cache(config: ConfigMessage, model: str) -> None:
    if config.response_cache.enable and config.model_transaction_policy.decoupled:
        raise _bad(model, "response_cache.enable", "false for a decoupled model", "true")


def _check_known(item: ConfigMessage, what: str, model: str) -> None:
    if item.data_type == _TYPE_INVALID:
        raise _bad(model, f"{what} data_type", "a type such as TYPE_FP32", "none")
    if not item.dims:
        raise _bad(model, f"{what} dims", "at least one dimension (a scalar is dims [1] with an empty reshape)", "none")


def _check_dynamic_batching(batching: ConfigMessage, max_batch_size: int, model: str) -> None:
    for size in batching.preferred_batch_size:
        if not 1 <= size <= max(1, max_batch_size):
            expected = f"sizes of 1 to max_batch_size {max_batch_size}"
            raise _bad(model, "dynamic_batching.preferred_batch_size", expected, size)
    levels = batching.priority_levels
    if levels > MAX_PRIORITY_LEVELS:
        raise _bad(model, "dynamic_batching.priority_levels", f"at most {MAX_PRIORITY_LEVELS}", levels)
    if levels > 0 and not 1 <= batching.default_priority_level <= levels:
        given = batching.default_priority_level or "none"
        raise _bad(model, "dynamic_batching.default_priority_level", f"1 to priority_levels {levels}", given)
    if levels > 1 and batching.preserve_ordering:
        raise _bad(model, "dynamic_batching.preserve_ordering", "false when priority_levels is above 1", "true")
    _check_levels(batching.priority_queue_policy, levels, model)


def _check_levels(levels_with_policy: Iterable[int], levels: int, model: str) -> None:
    for level in levels_with_policy:
        if not 1 <= level <= levels:
            expected = f"levels of 1 to priority_levels {levels}"
            raise _bad(model, "dynamic_batching.priority_queue_policy", expected, level)


def _check_warmup(sample: ConfigMessage, config: ConfigMessage, model: str) -> None:
    what = f"model_warmup '{sample.name}'"
    if sample.batch_size > max(1, config.max_batch_size):
        raise _bad(model, f"{what} batch_size", f"at most max_batch_size {config.max_batch_size}", sample.batch_size)
    declared = {item.name: item for item in config.input}
    for name, source in sample.inputs.items():
        item = declared.get(name)
        if item is None:
            raise _bad(model, f"{what} inputs", f"names among {sorted(declared)}", f"'{name}'")
        if source.data_type != item.data_type:
            given = dtype_name(source.data_type)
            raise _bad(model, f"{what} input '{name}' data_type", dtype_name(item.data_type), given)
        _check_warmup_shape(source, item, f"{what} input '{name}'", model)
    missing = sorted(name for name, item in declared.items() if not item.optional and name not in sample.inputs)
    if missing:
        raise _bad(model, f"{what} inputs", "every required input", f"none for {missing}")


def _check_warmup_shape(source: ConfigMessage, item: ConfigMessage, what: str, model: str) -> None:
    if any(size < 1 for size in source.dims):
        raise _bad(model, f"{what} dims", "dimensions of 1 or more", list(source.dims))
    fits = len(source.dims) == len(item.dims) and all(
        size in (given, -1) for size, given in zip(item.dims, source.dims, strict=True)
    )
    if not fits:
        raise _bad(model, f"{what} dims", f"a shape that fits {list(item.dims)}", list(source.dims))
    if source.WhichOneof("input_data_type") is None:
        raise _bad(model, what, "one of zero_data, random_data and input_data_file", "none")
