"""Ensembles as Triton's folders describe them, on an installed server, as Triton's clients see them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests.kit.infer_input import infer_input
from tests.kit.server import serve


def step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
    maps += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()]
    return f'{{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}'


def ensemble(inputs: str, outputs: list[str], *steps: str) -> str:
    """Return the config.pbtxt of an ensemble of tensors of 16 numbers."""
    kind = "data_type: TYPE_FP32 dims: [ 16 ] }"
    lines = ['platform: "ensemble"', "max_batch_size: 4", *(f'input {{ name: "{name}" {kind}' for name in inputs)]
    lines += [f'output {{ name: "{name}" {kind}' for name in outputs]
    return "\n".join([*lines, f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}"])


# (x + y, x - y) -> add_sub again: (2x, 2y)
CHAIN = ensemble(
    "XY", ["TWICE_X", "TWICE_Y"],
    step("first", {"INPUT0": "X", "INPUT1": "Y"}, {"OUTPUT0": "sum", "OUTPUT1": "difference"}),
    step("second", {"INPUT0": "sum", "INPUT1": "difference"}, {"OUTPUT0": "TWICE_X", "OUTPUT1": "TWICE_Y"}),
)  # fmt: skip
OUTER = ensemble(
    "AB", ["SUM"],
    step("chain", {"X": "A", "Y": "B"}, {"TWICE_X": "a2", "TWICE_Y": "b2"}),
    step("second", {"INPUT0": "a2", "INPUT1": "b2"}, {"OUTPUT0": "SUM"}),
)  # fmt: skip


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    for name in ("first", "second"):
        module_repository.add_sub(name, 'backend: "onnxruntime"\nmax_batch_size: 4')
    module_repository.add("chain", CHAIN)
    module_repository.add("a_outer", OUTER)
    with serve(module_repository.path) as running:
        yield running
        running.stop_cleanly()


def tensors(client: Any, names: tuple[str, str], rows: int = 2) -> tuple[list[Any], np.ndarray, np.ndarray]:
    left, right = (np.random.default_rng(seed).random((rows, 16), np.float32) for seed in (1, 2))
    made = []
    for name, array in zip(names, (left, right), strict=True):
        made.append(infer_input(client, name, array))
    return made, left, right


@pytest.mark.parametrize("protocol", [triton_http, triton_grpc])
def test_chained_and_nested_ensembles_answer_over_http_and_grpc(server: Any, protocol: Any) -> None:
    url = server.http if protocol is triton_http else server.grpc
    with protocol.InferenceServerClient(url) as client:
        made, left, right = tensors(protocol, ("X", "Y"))
        result = client.infer("chain", made, request_id="7")
        np.testing.assert_allclose(result.as_numpy("TWICE_X"), 2 * left, rtol=1e-5)
        np.testing.assert_allclose(result.as_numpy("TWICE_Y"), 2 * right, rtol=1e-4, atol=1e-5)
        made, left, right = tensors(protocol, ("A", "B"))
        result = client.infer("a_outer", made)
        np.testing.assert_allclose(result.as_numpy("SUM"), 2 * left + 2 * right, rtol=1e-5)
        made, left, _ = tensors(protocol, ("X", "Y"))
        only = client.infer("chain", made, outputs=[protocol.InferRequestedOutput("TWICE_X")])
        np.testing.assert_allclose(only.as_numpy("TWICE_X"), 2 * left, rtol=1e-5)
        assert only.as_numpy("TWICE_Y") is None


def test_an_ensemble_has_metadata_configuration_statistics_and_an_index_entry(server: Any) -> None:
    with triton_http.InferenceServerClient(server.http) as client:
        made, *_ = tensors(triton_http, ("X", "Y"), 3)
        client.infer("chain", made)
        metadata = client.get_model_metadata("chain")
        assert (metadata["platform"], metadata["versions"]) == ("ensemble", ["1"])
        assert metadata["inputs"][0] == {"name": "X", "datatype": "FP32", "shape": [-1, 16]}
        config = client.get_model_config("chain")
        assert (config["platform"], config["backend"]) == ("ensemble", "")
        assert not config.get("instance_group")
        assert [step["model_name"] for step in config["ensemble_scheduling"]["step"]] == ["first", "second"]
        told = client.get_inference_statistics("chain")["model_stats"][0]
        assert told["inference_stats"]["success"]["count"] == told["execution_count"] > 0
        assert told["inference_stats"]["compute_infer"]["ns"] > 0
        assert client.get_inference_statistics("first")["model_stats"][0]["execution_count"] > 0
        index = client.get_model_repository_index()
        assert any({"name": "chain", "version": "1", "state": "READY"}.items() <= item.items() for item in index)
    assert 'nv_inference_request_success{model="chain",version="1"}' in server.read_metrics()
