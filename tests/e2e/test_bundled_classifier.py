"""The bundled classifier from picture to labels, and answers equal to the runtimes called directly."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.kit.infer_input import infer_input
from tests.kit.models import BUNDLED, COFFEE
from tests.kit.server import serve

CLASSIFIER = "efficientnet_lite0"
RUNTIMES = ("onnxruntime", "openvino")


@pytest.fixture(scope="module")
def server(module_repository: Any, conv: onnx.ModelProto) -> Iterator[Any]:
    source = BUNDLED / CLASSIFIER
    for name in (CLASSIFIER, *(f"{CLASSIFIER}_{runtime}" for runtime in RUNTIMES)):
        folder = module_repository.path / name
        shutil.copytree(source, folder)
        config = (folder / "config.pbtxt").read_text()
        runtime = name.removeprefix(CLASSIFIER).removeprefix("_")
        chosen = f'backend: "{runtime}"\n' if runtime else ""
        (folder / "config.pbtxt").write_text(config.replace(f'name: "{CLASSIFIER}"', chosen))
    for runtime in RUNTIMES:
        module_repository.add(f"conv_{runtime}", f'backend: "{runtime}"\nmax_batch_size: 8', model=conv)
    with serve(module_repository.path) as server:
        yield server


def run_directly(runtime: str, model: bytes, name: str, array: np.ndarray) -> np.ndarray:
    if runtime == "onnxruntime":
        import onnxruntime

        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        return session.run(None, {name: array})[0]
    import openvino

    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return compiled({name: array})[0]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_outputs_of_the_classifier_equal_its_runtimes(server: Any, runtime: str) -> None:
    model = (BUNDLED / CLASSIFIER / "1" / "model.onnx").read_bytes()
    image = np.random.default_rng(0).uniform(-1, 1, (2, 3, 224, 224)).astype(np.float32)
    expected = run_directly(runtime, model, "input", image)
    found = infer(server, "grpc", f"{CLASSIFIER}_{runtime}", "input", image, "probabilities")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert found.argmax(1).tolist() == expected.argmax(1).tolist()


def infer(server: Any, wire: str, model: str, name: str, array: np.ndarray, output: str) -> np.ndarray:
    library = {"http": tritonclient.http, "grpc": tritonclient.grpc}[wire]
    tensor = infer_input(library, name, array)
    with library.InferenceServerClient(getattr(server, wire)) as client:
        return client.infer(model, [tensor]).as_numpy(output)


def best(answer: dict[str, Any]) -> list[str]:
    return answer["outputs"][0]["data"]


@pytest.mark.parametrize("model", [CLASSIFIER, *(f"{CLASSIFIER}_{runtime}" for runtime in RUNTIMES)])
def test_an_image_body_is_answered_with_the_five_best_labels(server: Any, model: str) -> None:
    status, text = server.request(
        "POST", f"/v2/models/{model}/infer", COFFEE.read_bytes(), {"Content-Type": "image/jpeg"}
    )
    assert status == 200, text
    answer = json.loads(text)
    assert answer["model_name"] == model
    labels = best(answer)
    assert len(labels) == 5
    assert labels[0].split(":")[2] == "espresso"
    scores = [float(label.split(":")[0]) for label in labels]
    assert scores == sorted(scores, reverse=True)
    assert 0 < sum(scores) <= 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")
def test_curl_gets_the_labels_of_a_picture(server: Any) -> None:
    command = [
        "curl", "-sS", "--data-binary", f"@{COFFEE}", "-H", "Content-Type: image/jpeg",
        server.url(f"/v2/models/{CLASSIFIER}/infer"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert best(json.loads(done.stdout))[0].split(":")[2] == "espresso"


def test_without_a_stated_backend_the_runtime_in_use_is_shown(server: Any) -> None:
    assert server.ask(f"/v2/models/{CLASSIFIER}/config")[1]["backend"] in RUNTIMES
    line = next(line for line in server.banner if f"  {CLASSIFIER} version 1:" in line)
    assert any(runtime in line for runtime in RUNTIMES)
    assert "f32" in line
