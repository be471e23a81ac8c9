"""Parts of an observation by kind, as GR00T's clients ask for them."""

from __future__ import annotations

import json

import pytest

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.plugins.policies.policy import Policy, make_policy

groot_port = pytest.importorskip("edge_server.plugins.policies.groot_port", reason="needs msgpack, of policies")


def policy(*, dims: dict[str, tuple[int, ...]] | None = None, batch: int = 0, steps: str = "", **keys: str) -> Policy:
    inputs = tuple(InputSpec(name, DType.FP32, (dims or {}).get(name, (2,))) for name in keys)
    parameters = {
        **({"policy_frame_steps": steps} if steps else {}),
        "policy_action_key": "arm",
        "policy_inputs": ", ".join(f"{name}={key}" for name, key in keys.items()),
    }
    return make_policy(
        ModelSpec("act", "stub", "", batch, inputs, (OutputSpec("a", DType.FP32, (5, 2)),), (), parameters=parameters)
    )


def find_steps(policy: Policy) -> tuple[list[int], list[int]]:
    configs = (groot_port.describe_modalities(policy)[kind]["as_json"] for kind in ("video", "state"))
    video, state = (json.loads(config) if isinstance(config, str) else config for config in configs)
    return video["delta_indices"], state["delta_indices"]


def test_a_kind_without_parts_is_left_out_because_clients_refuse_it() -> None:
    found = groot_port.describe_modalities(policy(arm="state/arm", hand="state/hand"))
    assert {kind: config["as_json"] for kind, config in found.items()} == {
        "state": {"delta_indices": [0], "modality_keys": ["arm", "hand"]},
        "action": {"delta_indices": [0, 1, 2, 3, 4], "modality_keys": ["arm"]},
    }


def test_a_policy_with_the_names_of_n1_5_is_described_in_its_form() -> None:
    found = groot_port.describe_modalities(policy(arm="state.arm", task="annotation.human.task"))
    assert {kind: json.loads(config["as_json"])["modality_keys"] for kind, config in found.items()} == {
        "state": ["state.arm"],
        "language": ["annotation.human.task"],
        "action": ["arm"],
    }


def test_both_markers_of_the_class_are_sent() -> None:
    for config in groot_port.describe_modalities(policy(arm="state/arm")).values():
        assert config["__ModalityConfig_class__"] is config["__ModalityConfig__"] is True


@pytest.mark.parametrize("batch", [0, 4])
@pytest.mark.parametrize("sign", "/.")
def test_a_client_is_told_how_many_frames_the_inputs_take(batch: int, sign: str) -> None:
    keys = {"top": f"video{sign}top", "wrist": f"video{sign}wrist", "arm": f"state{sign}arm"}
    lead = () if batch else (1,)

    def find(video: tuple[int, ...], state: tuple[int, ...], steps: str = "") -> tuple[list[int], list[int]]:
        dims = {"top": lead + video, "wrist": lead + video, "arm": lead + state}
        return find_steps(policy(dims=dims, batch=batch, steps=steps, **keys))

    assert find((1, 8, 8, 3), (1, 7)) == ([0], [0])
    assert find((8, 8, 3), (7,)) == ([0], [0])
    assert find((-1, -1, -1, 3), (-1, 7)) == ([0], [0])
    assert find((3, 8, 8, 3), (2, 7)) == ([-2, -1, 0], [-1, 0])
    assert find((2, 8, 8, 3), (1, 7), "-15, 0") == ([-15, 0], [0])
    assert find((2, 8, 8, 3), (4, 7), "-15, 0") == ([-15, 0], [-3, -2, -1, 0])
