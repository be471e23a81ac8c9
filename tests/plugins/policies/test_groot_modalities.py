"""Parts of an observation by kind, as GR00T's clients ask for them."""

from __future__ import annotations

import json

import pytest

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.plugins.policies.policy import Policy, make_policy

groot_port = pytest.importorskip("edge_server.plugins.policies.groot_port", reason="needs msgpack, of policies")


def policy(**keys: str) -> Policy:
    inputs = tuple(InputSpec(name, DType.FP32, (2,)) for name in keys)
    parameters = {
        "policy_action_key": "arm",
        "policy_inputs": ", ".join(f"{name}={key}" for name, key in keys.items()),
    }
    return make_policy(
        ModelSpec("act", "stub", "", 0, inputs, (OutputSpec("a", DType.FP32, (5, 2)),), (), parameters=parameters)
    )


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
