"""Instance groups on a machine that has lost a GPU: groups without a fixed GPU go elsewhere, groups that name it
fail."""

from __future__ import annotations

from edge_server.repository.model_config.config_defaults import KIND_CPU, KIND_GPU, Devices, normalise
from edge_server.repository.model_config.pbtxt import parse_json


def groups(text: str, devices: Devices) -> list[tuple[int, list[int]]]:
    config = parse_json(f'{{"name": "m", "backend": "onnxruntime"{text}}}', "m")
    normalise(config, "m", devices)
    return [(group.kind, list(group.gpus)) for group in config.instance_group]


def test_only_what_leaves_the_choice_open_leaves_a_lost_gpu() -> None:
    table = [
        ("", (), [(KIND_GPU, [0, 1])]),
        ("", (0,), [(KIND_GPU, [1])]),
        ("", (0, 1), [(KIND_CPU, [])]),
        (', "instance_group": [{"kind": "KIND_GPU"}]', (1,), [(KIND_GPU, [0])]),
        (', "instance_group": [{"kind": "KIND_GPU"}]', (0, 1), [(KIND_GPU, [0, 1])]),
        (', "instance_group": [{"kind": "KIND_GPU", "gpus": [1]}]', (1,), [(KIND_GPU, [1])]),
        (', "instance_group": [{"kind": "KIND_CPU"}]', (0,), [(KIND_CPU, [])]),
    ]
    assert [(text, lost, groups(text, Devices(2, True, 1, frozenset(lost)))) for text, lost, _ in table] == table
