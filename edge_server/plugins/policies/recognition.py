"""Recognition of a policy by the names of its inputs and outputs: exports of LeRobot and openpi."""

from __future__ import annotations

from edge_server.core.model_spec import InputSpec, ModelSpec, Recognised
from edge_server.core.tensor import DType

_ACTION_NAMES = ("action", "actions")


def recognise_policy(spec: ModelSpec) -> Recognised | None:
    """Return the parameters of a policy whose inputs have the keys of LeRobot (observation.state,
    observation.images.NAME) or openpi (observation/state, observation/image) and whose output is the action or actions;
    else None. What the configuration states itself wins."""
    output = next((item for item in spec.outputs if item.name in _ACTION_NAMES), None)
    if output is None or "policy_action_key" in spec.parameters or spec.is_decoupled:
        return None
    dims = output.dims if spec.max_batch_size > 0 else output.dims[-2:]
    if len(dims) != 2 or not any(item.name.startswith(("observation.", "observation/")) for item in spec.inputs):
        return None
    parameters = {"policy_action_key": output.name}
    pictures = [item for item in spec.inputs if "image" in item.name and _is_picture(item, spec.max_batch_size > 0)]
    if pictures and not any(key.startswith("image_") for key in spec.parameters):
        parameters["image_input"] = ", ".join(item.name for item in pictures)
        if pictures[0].dtype is not DType.UINT8:
            parameters["image_scale"] = "1/255"
    size = " of ".join((f"{dims[0]} actions" if dims[0] > 0 else "actions", f"{dims[1]} values"))
    return Recognised(parameters, {}, f"recognised by its inputs and outputs: robot policy, {size}")


def _is_picture(item: InputSpec, has_batch: bool) -> bool:
    dims = item.dims if has_batch else item.dims[-3:]
    return len(dims) == 3 and 3 in (dims[0], dims[2]) and item.dtype in (DType.UINT8, DType.FP32, DType.FP16)
