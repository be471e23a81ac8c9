"""Check of a model configuration by those of Triton's rules that the protobuf schema cannot express.

`check_stated` checks the configuration as written, before any model file is opened. `check_complete` checks it after
the model file and the defaults have filled it. Every error is a BadModelConfig that names model, field, expected,
given.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from edge_server.core.shape_tensors import SHAPE_DTYPES
from edge_server.core.tensor import DType
from edge_server.repository.disk.safe_paths import check_relative
from edge_server.repository.model_config.pbtxt import ConfigMessage, dtype_name
from edge_server.repository.model_config.validate_sequences_and_ragged_batches import (
    bad_field,
    check_ragged,
    check_sequences,
    check_sequences_complete,
)

MAX_RANK = 32
MAX_INSTANCES = 1024
MAX_PRIORITY_LEVELS = 1024
"""Each level has its own queue."""

_FORMAT_NONE = 0
_TYPE_INVALID = 0


def check_stated(config: ConfigMessage, model: str) -> None:
    """Reject contradictions in a configuration as written. Missing fields are allowed here. Raises BadModelConfig."""
    if config.name and config.name != model:
        raise bad_field(model, "name", f"the name of its directory, '{model}'", f"'{config.name}'")
    if is_ensemble(config):
        check_ensemble(config, model)
    check_sequences(config, model)
    check_ragged(config, model)
    if config.max_batch_size < 0:
        raise bad_field(model, "max_batch_size", "0 or more", config.max_batch_size)
    _check_unique("input", [item.name for item in config.input], model)
    _check_unique("output", [item.name for item in config.output], model)
    for item in config.input:
        _check_tensor(item, f"input '{item.name}'", model)
        if item.format != _FORMAT_NONE and item.dims and len(item.dims) != 3:
            expected = "3 dimensions for FORMAT_NHWC and FORMAT_NCHW"
            raise bad_field(model, f"input '{item.name}' dims", expected, list(item.dims))
    for item in config.output:
        _check_tensor(item, f"output '{item.name}'", model)
    _check_version_policy(config, model)
    _check_file_names(config, model)
    _check_instance_counts(config, model)
    _check_unique("instance_group", [group.name for group in config.instance_group if group.name], model)
    if config.response_cache.enable and config.model_transaction_policy.decoupled:
        raise bad_field(model, "response_cache.enable", "false for a decoupled model", "true")


def _check_version_policy(config: ConfigMessage, model: str) -> None:
    policy = config.version_policy
    if policy.HasField("latest") and policy.latest.num_versions == 0:
        raise bad_field(model, "version_policy.latest.num_versions", "1 or more", "0")
    if policy.HasField("specific"):
        if not policy.specific.versions:
            raise bad_field(model, "version_policy.specific.versions", "at least one version", "none")
        for version in policy.specific.versions:
            if version < 0:
                raise bad_field(model, "version_policy.specific.versions", "versions of 0 or more", version)


def _check_instance_counts(config: ConfigMessage, model: str) -> None:
    for index, group in enumerate(config.instance_group):
        if not 0 <= group.count <= MAX_INSTANCES:
            raise bad_field(model, f"instance_group[{index}] count", f"1 to {MAX_INSTANCES}", group.count)
    total = sum(max(group.count, 1) * max(len(group.gpus), 1) for group in config.instance_group)
    if total > MAX_INSTANCES:
        raise bad_field(model, "instance_group", f"at most {MAX_INSTANCES} instances in all", total)


def check_complete(config: ConfigMessage, model: str, *, is_program: bool = False) -> None:
    """Reject a completed configuration with missing or contradicting fields. `is_program`: see
    `Backend.runs_programs`. Raises BadModelConfig."""
    for kind, items in (("input", config.input), ("output", config.output)):
        if not items and not is_program:
            raise bad_field(
                model, kind, f"at least one {kind}", f"none; state the {kind}s, the model file does not tell them"
            )
        for item in items:
            _check_known(item, f"{kind} '{item.name}'", model)
    if config.HasField("dynamic_batching"):
        _check_dynamic_batching(config.dynamic_batching, config.max_batch_size, model)
    check_sequences_complete(config, model, is_program=is_program)
    for sample in config.model_warmup:
        _check_warmup(sample, config, model)


def _check_unique(kind: str, names: Sequence[str], model: str) -> None:
    seen: set[str] = set()
    for name in names:
        if not name:
            raise bad_field(model, kind, "a name for every one", "one without a name")
        if name in seen:
            raise bad_field(model, kind, "each name once", f"'{name}' twice")
        seen.add(name)


def _check_tensor(item: ConfigMessage, where: str, model: str) -> None:
    _check_dims(item.dims, f"{where} dims", model)
    if not item.HasField("reshape"):
        return
    shape = item.reshape.shape
    _check_dims(shape, f"{where} reshape", model)
    if not item.dims:
        raise bad_field(model, f"{where} dims", "the shape that clients see beside the reshape", "none")
    if not _have_same_size(item.dims, shape):
        raise bad_field(model, f"{where} reshape", f"as many elements as dims {list(item.dims)}", list(shape))


def _check_dims(dims: Sequence[int], where: str, model: str) -> None:
    if len(dims) > MAX_RANK:
        raise bad_field(model, where, f"at most {MAX_RANK} dimensions", len(dims))
    for size in dims:
        if size < -1 or size == 0:
            raise bad_field(model, where, "each dimension to be 1 or more, or -1 for any size", size)


def _have_same_size(dims: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a reshape keeps the number of elements, judged by the fixed dimensions."""
    fixed_dims, fixed_shape = (prod(size for size in side if size > 0) for side in (dims, shape))
    variable_dims, variable_shape = (sum(size == -1 for size in side) for side in (dims, shape))
    return variable_dims == variable_shape and fixed_dims == fixed_shape


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


def _check_known(item: ConfigMessage, where: str, model: str) -> None:
    if item.data_type == _TYPE_INVALID:
        raise bad_field(model, f"{where} data_type", "a type such as TYPE_FP32", "none")
    if not item.dims:
        raise bad_field(
            model, f"{where} dims", "at least one dimension (a scalar is dims [1] with an empty reshape)", "none"
        )


def _check_dynamic_batching(batching: ConfigMessage, max_batch_size: int, model: str) -> None:
    for size in batching.preferred_batch_size:
        if not 1 <= size <= max(1, max_batch_size):
            expected = f"sizes of 1 to max_batch_size {max_batch_size}"
            raise bad_field(model, "dynamic_batching.preferred_batch_size", expected, size)
    levels = batching.priority_levels
    if levels > MAX_PRIORITY_LEVELS:
        raise bad_field(model, "dynamic_batching.priority_levels", f"at most {MAX_PRIORITY_LEVELS}", levels)
    if levels > 0 and not 1 <= batching.default_priority_level <= levels:
        given = batching.default_priority_level or "none"
        raise bad_field(model, "dynamic_batching.default_priority_level", f"1 to priority_levels {levels}", given)
    if levels > 1 and batching.preserve_ordering:
        raise bad_field(model, "dynamic_batching.preserve_ordering", "false when priority_levels is above 1", "true")
    for level in batching.priority_queue_policy:
        if not 1 <= level <= levels:
            expected = f"levels of 1 to priority_levels {levels}"
            raise bad_field(model, "dynamic_batching.priority_queue_policy", expected, level)


def _check_warmup(sample: ConfigMessage, config: ConfigMessage, model: str) -> None:
    where = f"model_warmup '{sample.name}'"
    if sample.batch_size > max(1, config.max_batch_size):
        raise bad_field(
            model, f"{where} batch_size", f"at most max_batch_size {config.max_batch_size}", sample.batch_size
        )
    declared = {item.name: item for item in config.input}
    for name, source in sample.inputs.items():
        item = declared.get(name)
        if item is None:
            raise bad_field(model, f"{where} inputs", f"names among {sorted(declared)}", f"'{name}'")
        if source.data_type != item.data_type:
            given = dtype_name(source.data_type)
            raise bad_field(model, f"{where} input '{name}' data_type", dtype_name(item.data_type), given)
        _check_warmup_shape(source, item, f"{where} input '{name}'", model)
    missing = sorted(name for name, item in declared.items() if not item.optional and name not in sample.inputs)
    if missing:
        raise bad_field(model, f"{where} inputs", "every required input", f"none for {missing}")


def _check_warmup_shape(source: ConfigMessage, item: ConfigMessage, where: str, model: str) -> None:
    if any(size < 1 for size in source.dims):
        raise bad_field(model, f"{where} dims", "dimensions of 1 or more", list(source.dims))
    fits = len(source.dims) == len(item.dims) and all(
        size in (given, -1) for size, given in zip(item.dims, source.dims, strict=True)
    )
    if not fits:
        raise bad_field(model, f"{where} dims", f"a shape that fits {list(item.dims)}", list(source.dims))
    if source.WhichOneof("input_data_type") is None:
        raise bad_field(model, where, "one of zero_data, random_data and input_data_file", "none")


PLATFORM = "ensemble"

_HAS_NO_INSTANCES = "none, because an ensemble has no instances"


def is_ensemble(config: ConfigMessage) -> bool:
    """Return whether a configuration has ensemble steps or the platform "ensemble"."""
    return bool(config.HasField("ensemble_scheduling") or config.platform == PLATFORM)


def check_ensemble(config: ConfigMessage, model: str) -> None:
    """Check an ensemble by Triton's rules, as far as possible without its members. Raises BadModelConfig."""
    if not config.HasField("ensemble_scheduling"):
        raise bad_field(model, "ensemble_scheduling", f"the steps, because platform is '{PLATFORM}'", "none")
    if config.platform not in ("", PLATFORM):
        raise bad_field(model, "platform", f"'{PLATFORM}' beside ensemble_scheduling", f"'{config.platform}'")
    if config.backend:
        raise bad_field(model, "backend", "none, because each member of an ensemble has its own", f"'{config.backend}'")
    for field in ("instance_group", "model_warmup"):
        if len(getattr(config, field)):
            raise bad_field(model, field, _HAS_NO_INSTANCES, len(getattr(config, field)))
    if config.HasField("optimization"):
        raise bad_field(model, "optimization", _HAS_NO_INSTANCES, "some")
    for kind, items in (("input", config.input), ("output", config.output)):
        for item in items:
            if item.HasField("reshape"):
                expected = "none, because an ensemble only passes tensors on"
                raise bad_field(model, f"{kind} '{item.name}' reshape", expected, "one")
            if item.is_shape_tensor and config.max_batch_size > 0:
                _check_values(item, model, f"{kind} '{item.name}'")
    _check_steps(config, model)


def _check_values(item: ConfigMessage, model: str, where: str) -> None:
    """Check the dims and type of a shape tensor of a model that batches. See core.shape_tensors."""
    if len(item.dims) != 1 or item.dims[0] < 1:
        expected = "one dimension of a fixed size, because it is a shape tensor of a model that batches"
        raise bad_field(model, f"{where} dims", expected, list(item.dims))
    if item.data_type not in [dtype.number for dtype in SHAPE_DTYPES]:
        expected = f"{' or '.join(dtype.config_name for dtype in SHAPE_DTYPES)}, because it is a shape tensor"
        given = next((dtype.config_name for dtype in DType if dtype.number == item.data_type), "none")
        raise bad_field(model, f"{where} data_type", expected, given)


def _check_steps(config: ConfigMessage, model: str) -> None:
    steps = config.ensemble_scheduling.step
    if not steps:
        raise bad_field(model, "ensemble_scheduling", "at least one step", "none")
    for index, step in enumerate(steps, 1):
        where = f"ensemble_scheduling: step {index}"
        if not step.model_name:
            raise bad_field(model, where, "a model_name", "none")
        if step.model_name == model:
            raise bad_field(model, f"{where} model_name", "another model than the ensemble itself", f"'{model}'")
        if step.model_namespace:
            raise bad_field(
                model, f"{where} model_namespace", "none, there are no namespaces here", step.model_namespace
            )
        for kind in ("input_map", "output_map"):
            mapped = getattr(step, kind)
            if not mapped:
                raise bad_field(model, f"{where} ('{step.model_name}') {kind}", "at least one tensor", "none")
            for name, tensor in mapped.items():
                if not name or not tensor:
                    raise bad_field(model, f"{where} ('{step.model_name}') {kind}", "names", f"'{name}': '{tensor}'")
