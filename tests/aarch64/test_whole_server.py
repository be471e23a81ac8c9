"""An aarch64 server, emulated: what the short case of test_serving.py leaves out."""

from __future__ import annotations

import json
import queue
import shlex
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as shm

from edge_server.client import FrameStream, Returns

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SOURCE = Path(__file__).parents[2]
CLIENT_LIMIT_S = 120.0
WIRES = {"http": tritonclient.http, "grpc": tritonclient.grpc}

TENSORS = """
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
"""
PYTHON = f'backend: "python"\n{TENSORS}'
ISOLATED = PYTHON + 'parameters { key: "isolation" value { string_value: "process" } }\n'
DECOUPLED = PYTHON + "model_transaction_policy { decoupled: true }\n"
REPLACED = f'backend: "identity"\n{TENSORS}' + "version_policy { latest { num_versions: 1 } }\n"

DOUBLES = """
import os, platform
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        assert platform.machine() == "aarch64"
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() * 2),
            ])
            for request in requests
        ]
"""

COUNTS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            sender = request.get_response_sender()
            for factor in (1, 2, 3):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array * factor)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def add(models: Path, name: str, config: str, code: str = "") -> None:
    (models / name / "1").mkdir(parents=True)
    (models / name / "config.pbtxt").write_text(config)
    if code:
        (models / name / "1/model.py").write_text(code)


@pytest.fixture(scope="module")
def models(machine: Any) -> Path:
    """The models that this file adds to the bundled ones."""
    folder = machine.project / "models"
    add(folder, "doubles", PYTHON, DOUBLES)
    add(folder, "doubles_isolated", ISOLATED, DOUBLES)
    add(folder, "counts", DECOUPLED, COUNTS)
    add(folder, "replaced", REPLACED)
    return Path(folder)


@pytest.fixture(scope="module")
def server(machine: Any, models: Path, readme: Callable[[str], str]) -> Iterator[Any]:
    """The README's command as a newcomer's shell runs it: a new environment, pip, the server."""
    *install, serve = readme("serve-command").split("&&")
    machine.run("sh", "-c", "&&".join(install), timeout_s=1500)
    with machine.serve(*shlex.split(serve), "--model-repository=models", "--allow-client-shm") as server:
        yield server


def given(wire: str, values: list[float]) -> Any:
    tensor = WIRES[wire].InferInput("INPUT0", [len(values)], "FP32")
    tensor.set_data_from_numpy(np.array(values, np.float32))
    return tensor


def client_of(server: Any, wire: str) -> Any:
    limit = {"network_timeout": CLIENT_LIMIT_S} if wire == "http" else {}
    return WIRES[wire].InferenceServerClient(getattr(server, wire), **limit)


def test_the_commands_of_the_readme_install_serve_and_answer(server: Any, readme: Callable[[str], str]) -> None:
    words = [word.replace("127.0.0.1:8000", server.http) for word in shlex.split(readme("curl-command"))]
    done = subprocess.run(
        [*words, "-sS"], cwd=SOURCE, capture_output=True, text=True, timeout=CLIENT_LIMIT_S, check=True
    )
    print("\n" + done.stdout)
    found = [item.split(":") for item in json.loads(done.stdout)["outputs"][0]["data"]]
    assert [label for _, _, label in found] == ["espresso", "cup", "consomme", "chocolate sauce", "coffee mug"]
    assert float(found[0][0]) == pytest.approx(0.950914, abs=2e-5)


def test_the_doctor_finds_an_aarch64_machine_that_can_serve(machine: Any, server: Any) -> None:
    report = json.loads(machine.run(".venv/bin/edge-server", "doctor", "--json"))
    print("\n" + json.dumps(report, indent=1))
    assert report["can_serve"]
    texts = {item["name"]: item["text"] for section in report["sections"].values() for item in section}
    assert texts["system"].endswith(", aarch64")
    for runtime in ("onnxruntime", "openvino"):
        assert texts[runtime].endswith(" on CPU, f32")


@pytest.mark.parametrize("wire", sorted(WIRES))
@pytest.mark.parametrize("model", ["doubles", "doubles_isolated"])
def test_a_python_model_answers_in_process_and_isolated(server: Any, wire: str, model: str) -> None:
    with client_of(server, wire) as client:
        answer = client.infer(model, [given(wire, [1, -2, 3.5, 0])])
    assert answer.as_numpy("OUTPUT0").tolist() == [2, -4, 7, 0]


def test_a_grpc_stream_brings_each_response_of_a_decoupled_model(server: Any) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with client_of(server, "grpc") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for start in (1, 10):
            client.async_stream_infer("counts", [given("grpc", [start] * 4)], request_id=str(start))
        found: dict[str, list[float]] = {"1": [], "10": []}
        while sum(map(len, found.values())) < 6:
            result, error = answers.get(timeout=CLIENT_LIMIT_S)
            assert error is None
            found[result.get_response().id].append(float(result.as_numpy("OUTPUT0")[0]))
        client.stop_stream()
    assert found == {"1": [1, 2, 3], "10": [10, 20, 30]}


def test_a_frame_stream_finds_the_face_where_x86_finds_it(server: Any) -> None:
    picture = (SOURCE / "edge_server/plugins/vision/demo.jpg").read_bytes()
    with FrameStream(
        server.grpc, "face_detection_yunet", returns=Returns(has_detections=True), keeps_all=True
    ) as stream:
        results = list(stream.results([picture] * 3))
    assert [result.header.seq for result in results] == [1, 2, 3]
    for result in results:
        (face,) = result.detections
        print(f"\nface {face} after {result.times.finished_us / 1000:.0f} ms")
        assert (face.x_min, face.y_min) == pytest.approx((178, 63), abs=3)


@pytest.mark.parametrize("wire", sorted(WIRES))
def test_tensors_travel_through_shared_memory_of_an_x86_client(server: Any, wire: str) -> None:
    key, array = f"/edge-aarch64-{uuid.uuid4().hex}", np.array([1.5, -2, 3, 0.25], np.float32)
    handle = shm.create_shared_memory_region(key, key, 32)
    try:
        shm.set_shared_memory_region(handle, [array])
        with client_of(server, wire) as client:
            client.register_system_shared_memory("region", key, 32)
            tensor = WIRES[wire].InferInput("INPUT0", [4], "FP32")
            tensor.set_shared_memory("region", 16)
            wanted = WIRES[wire].InferRequestedOutput("OUTPUT0")
            wanted.set_shared_memory("region", 16, 16)
            client.infer("doubles", [tensor], outputs=[wanted])
            client.unregister_system_shared_memory("region")
        np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.float32, [4], 16), array * 2)
    finally:
        shm.destroy_shared_memory_region(handle)


def test_ten_reloads_under_load_of_both_wires_lose_no_request(server: Any, models: Path) -> None:
    last, changed = "11", threading.Event()
    answered: dict[str, list[str]] = {wire: [] for wire in WIRES}

    def ask(wire: str) -> None:
        versions = answered[wire]
        with client_of(server, wire) as client:
            while not versions or versions[-1] != last:
                answer = client.infer("replaced", [given(wire, [1, 2, 3, 4])])
                assert answer.as_numpy("OUTPUT0").tolist() == [1, 2, 3, 4]
                response = answer.get_response()
                versions.append(response["model_version"] if wire == "http" else response.model_version)
                changed.set()

    threads = [threading.Thread(target=ask, args=(wire,)) for wire in WIRES]
    for thread in threads:
        thread.start()
    try:
        for version in range(2, int(last) + 1):
            previous = str(version - 1)
            while previous not in [versions[-1] for versions in answered.values() if versions]:
                changed.clear()
                assert changed.wait(CLIENT_LIMIT_S), server.errors.read_text()
            (models / "replaced" / str(version)).mkdir()
    finally:
        (models / "replaced" / last).mkdir(exist_ok=True)
        for thread in threads:
            thread.join(CLIENT_LIMIT_S)
    print("\nrequests:", {wire: len(versions) for wire, versions in answered.items()})
    for versions in answered.values():
        assert versions == sorted(versions, key=int)
        assert versions[-1] == last
