"""What the configuration of an ensemble may not say, as far as it tells without its members."""

from __future__ import annotations

from edge_server.core.shape_tensors import SHAPE_DTYPES
from edge_server.core.tensor import DType
from edge_server.errors import BadModelConfig
from edge_server.repository.pbtxt import ConfigMessage

PLATFORM = "ensemble"

_HAS_NO_INSTANCES = "none, for an ensemble has no instances"


def is_ensemble(config: ConfigMessage) -> bool:
    """Return whether a configuration describes an ensemble, or tries to."""
    return bool(config.HasField("ensemble_scheduling") or config.platform == PLATFORM)


def check_ensemble(config: ConfigMessage, model: str) -> None:
    """Refuse an ensemble that Triton refuses too. Raises BadModelConfig."""
    if not config.HasField("ensemble_scheduling"):
        raise _bad(model, "ensemble_scheduling", f"the steps, for platform is '{PLATFORM}'", "none")
    if config.platform not in ("", PLATFORM):
        raise _bad(model, "platform", f"'{PLATFORM}' beside ensemble_scheduling", f"'{config.platform}'")
    if config.backend:
        raise _bad(model, "backend", "none, for an ensemble's members have theirs", f"'{config.backend}'")
    for field in ("instance_group", "model_warmup"):
        if len(getattr(config, field)):
            raise _bad(model, field, _HAS_NO_INSTANCES, len(getattr(config, field)))
    if config.HasField("optimization"):
        raise _bad(model, "optimization", _HAS_NO_INSTANCES, "some")
    for kind, items in (("input", config.input), ("output", config.output)):
        for item in items:
            if item.HasField("reshape"):
                raise _bad(model, f"{kind} '{item.name}' reshape", "none, for an ensemble only hands on", "one")
            if item.is_shape_tensor and config.max_batch_size > 0:
                _check_values(item, model, f"{kind} '{item.name}'")
    _check_steps(config, model)


def _check_values(item: ConfigMessage, model: str, what: str) -> None:
    """Refuse a shape tensor that no model which batches has. See core.shape_tensors."""
    if len(item.dims) != 1 or item.dims[0] < 1:
        expected = "one dimension of a fixed size, for it is a shape tensor of a model that batches"
        raise _bad(model, f"{what} dims", expected, list(item.dims))
    if item.data_type not in [dtype.number for dtype in SHAPE_DTYPES]:
        expected = f"{' or '.join(dtype.config_name for dtype in SHAPE_DTYPES)}, for it is a shape tensor"
        given = next((dtype.config_name for dtype in DType if dtype.number == item.data_type), "none")
        raise _bad(model, f"{what} data_type", expected, given)


def _check_steps(config: ConfigMessage, model: str) -> None:
    steps = config.ensemble_scheduling.step
    if not steps:
        raise _bad(model, "ensemble_scheduling", "at least one step", "none")
    for index, step in enumerate(steps, 1):
        what = f"ensemble_scheduling: step {index}"
        if not step.model_name:
            raise _bad(model, what, "a model_name", "none")
        if step.model_name == model:
            raise _bad(model, f"{what} model_name", "another model than the ensemble itself", f"'{model}'")
        if step.model_namespace:
            raise _bad(model, f"{what} model_namespace", "none, there are no namespaces here", step.model_namespace)
        for kind in ("input_map", "output_map"):
            mapped = getattr(step, kind)
            if not mapped:
                raise _bad(model, f"{what} ('{step.model_name}') {kind}", "at least one tensor", "none")
            for name, tensor in mapped.items():
                if not name or not tensor:
                    raise _bad(model, f"{what} ('{step.model_name}') {kind}", "names", f"'{name}': '{tensor}'")


def _bad(model: str, field: str, expected: str, given: object) -> BadModelConfig:
    return BadModelConfig(f"model '{model}': {field}: expected {expected}, given {given}")
