"""GPU work of other runtimes, and of clients: PyTorch files, Python models, GPU memory of a client given to ONNX
Runtime as it is, instances that share a session, and the server beside the bare runtime."""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

MODEL = "efficientnet_lite0"
ROWS = 8

SQUARES = """
import torch
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        assert args["model_instance_kind"] == "GPU"
        self.device = "cuda:" + args["model_instance_device_id"]

    def execute(self, requests):
        answers = []
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            for request in requests:
                given = pb_utils.get_input_tensor_by_name(request, "IN")
                found = torch.from_dlpack(given).to(self.device) ** 2
                answers.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", found)]))
        return answers
"""


@pytest.fixture(autouse=True)
def has_gpu(hardware: Any) -> None:
    if not hardware.has_cuda:
        pytest.skip("needs a GPU of NVIDIA")


@pytest.fixture
def classifier(tmp_path: Path, bundled: Path) -> Path:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime-gpu")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("needs an onnxruntime that was built for CUDA: pip install onnxruntime-gpu")
    folder = tmp_path / "models/classifier"
    (folder / "1").mkdir(parents=True)
    shutil.copy(bundled / MODEL / "1/model.onnx", folder / "1/model.onnx")
    (folder / "config.pbtxt").write_text('backend: "onnxruntime"\nmax_batch_size: 8\ninstance_group { kind: KIND_GPU }')
    return tmp_path / "models"


def pictures(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, 3, 224, 224)).astype(np.float32)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_file_answers_on_the_gpu_as_on_the_processor(serve: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a torch that was built for CUDA")
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 5))
    script = torch.jit.script(net.eval())
    for name, kind in (("on_gpu", "KIND_GPU"), ("on_cpu", "KIND_CPU")):
        (tmp_path / name / "1").mkdir(parents=True)
        script.save(str(tmp_path / name / "1/model.pt"))
        (tmp_path / name / "config.pbtxt").write_text(
            f'backend: "pytorch"\ninstance_group {{ kind: {kind} }}\n'
            'input { name: "INPUT__0" data_type: TYPE_FP32 dims: [-1, 3, 8, 8] }\n'
            'output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [-1, 5] }\n'
        )
    given = {"INPUT__0": np.random.default_rng(1).standard_normal((4, 3, 8, 8)).astype(np.float32)}
    with serve(tmp_path) as server:
        shown = {item["name"]: item["device"] for item in server.get("/edge/v1/models")["models"]}
        assert shown == {"on_gpu": "GPU:0", "on_cpu": "CPU"}
        (on_gpu,), (on_cpu,) = (tuple(server.infer(name, given).values()) for name in ("on_gpu", "on_cpu"))
        np.testing.assert_allclose(on_gpu, on_cpu, atol=2e-3)  # TF32


def test_a_python_model_hands_over_what_it_computed_on_the_gpu(serve: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a torch that was built for CUDA")
    (tmp_path / "squares/1").mkdir(parents=True)
    (tmp_path / "squares/1/model.py").write_text(SQUARES)
    (tmp_path / "squares/config.pbtxt").write_text(
        'backend: "python"\ninstance_group { kind: KIND_GPU }\n'
        'input { name: "IN" data_type: TYPE_FP32 dims: [-1] }\noutput { name: "OUT" data_type: TYPE_FP32 dims: [-1] }\n'
    )
    with serve(tmp_path) as server:
        for size in (1, 100_000):
            given = np.random.default_rng(size).standard_normal(size).astype(np.float32)
            assert np.array_equal(server.infer("squares", {"IN": given})["OUT"], given * given)


def test_gpu_memory_of_a_client_goes_to_onnxruntime_and_back_without_a_copy_on_the_host(
    serve: Any, measure: Any, classifier: Path
) -> None:
    client = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient: pip install tritonclient[grpc]")
    cuda_memory = pytest.importorskip(
        "tritonclient.utils.cuda_shared_memory", reason="needs cuda-python: pip install tritonclient[grpc,cuda]"
    )
    given = pictures(ROWS)
    region = cuda_memory.create_shared_memory_region("frames", given.nbytes, 0)
    answers = cuda_memory.create_shared_memory_region("answers", ROWS * 1000 * 4, 0)
    try:
        cuda_memory.set_shared_memory_region(region, [given])
        with (
            serve(classifier, "--allow-client-shm=true") as server,
            client.InferenceServerClient(server.grpc) as asked,
        ):
            metadata = asked.get_model_metadata("classifier")
            wire = client.InferInput(metadata.inputs[0].name, given.shape, "FP32")
            wire.set_data_from_numpy(given)
            output_name = metadata.outputs[0].name
            wanted = asked.infer("classifier", [wire]).as_numpy(output_name)
            asked.register_cuda_shared_memory("frames", cuda_memory.get_raw_handle(region), 0, given.nbytes)
            asked.register_cuda_shared_memory("answers", cuda_memory.get_raw_handle(answers), 0, ROWS * 1000 * 4)
            shared_in = client.InferInput(metadata.inputs[0].name, given.shape, "FP32")
            shared_in.set_shared_memory("frames", given.nbytes)
            shared_out = client.InferRequestedOutput(output_name)
            shared_out.set_shared_memory("answers", ROWS * 1000 * 4)
            asked.infer("classifier", [shared_in], outputs=[shared_out])
            found = cuda_memory.get_contents_as_numpy(answers, np.float32, (ROWS, 1000))
            assert np.abs(found - wanted).max() < 5e-3
            assert sum(server.metric("edge_cuda_shared_memory_copied_bytes_total")) == 0
            by_memory = rate(lambda: asked.infer("classifier", [shared_in], outputs=[shared_out]))
            by_wire = rate(lambda: asked.infer("classifier", [wire]))
            asked.unregister_cuda_shared_memory()
        measure.value(f"{ROWS} pictures in the client's GPU memory", by_memory, "1/s")
        measure.value(f"{ROWS} pictures over gRPC", by_wire, "1/s")
    finally:
        cuda_memory.destroy_shared_memory_region(region)
        cuda_memory.destroy_shared_memory_region(answers)


def test_instances_at_the_same_time_give_the_answers_of_one(serve: Any, measure: Any, classifier: Path) -> None:
    client = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient: pip install tritonclient[grpc]")
    config = classifier / "classifier/config.pbtxt"
    config.write_text(config.read_text().replace("KIND_GPU", "KIND_GPU count: 3"))
    given = [pictures(rows) for rows in (1, 2, 3, 5, 8)]
    with serve(classifier) as server:
        (report,) = server.get("/edge/v1/models")["models"]
        assert report["instance_count"] == 3
        measure.value("GPU memory of three instances", report["gpu_bytes"]["0"] / 1e6, "MB")
        input_name = server.get("/v2/models/classifier")["inputs"][0]["name"]
        wanted = [next(iter(server.infer("classifier", {input_name: rows}).values())) for rows in given]
        wrong: list[float] = []

        def look(first: int) -> None:
            with client.InferenceServerClient(server.grpc) as asked:
                for turn in range(first, first + 100):
                    rows, answer = given[turn % len(given)], wanted[turn % len(given)]
                    tensor = client.InferInput(input_name, rows.shape, "FP32")
                    tensor.set_data_from_numpy(rows)
                    found = asked.infer("classifier", [tensor])
                    name = found.get_response().outputs[0].name
                    wrong.append(float(np.abs(found.as_numpy(name) - answer).max()))

        threads = [threading.Thread(target=look, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(wrong) == 800
    # Another batch size has other orders of summation.
    assert max(wrong) < 5e-3


@pytest.mark.parametrize("concurrency", [1, 4])
def test_rate_beside_the_bare_runtime(serve: Any, measure: Any, classifier: Path, concurrency: int) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    client = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient: pip install tritonclient[grpc]")
    given = pictures(1)
    rounds: list[float] = []
    with serve(classifier) as server:
        if hasattr(onnxruntime, "preload_dlls"):
            onnxruntime.preload_dlls()
        bare = onnxruntime.InferenceSession(
            str(classifier / "classifier/1/model.onnx"),
            providers=[("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"],
        )
        assert "CUDAExecutionProvider" in bare.get_providers()
        input_name = bare.get_inputs()[0].name

        def of_server() -> float:
            def look() -> None:
                with client.InferenceServerClient(server.grpc) as asked:
                    tensor = client.InferInput(input_name, given.shape, "FP32")
                    tensor.set_data_from_numpy(given)
                    counts.append(rate(lambda: asked.infer("classifier", [tensor]), 3.0))

            counts: list[float] = []
            threads = [threading.Thread(target=look) for _ in range(concurrency)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return sum(counts)

        for _ in range(3):
            raw = rate(lambda: bare.run(None, {input_name: given}), 3.0)
            rounds.append(of_server() / raw)
        (statistics_of_model,) = server.get("/v2/models/classifier/stats")["model_stats"]
    measure.value("the bare runtime, one caller", raw, "1/s")
    measure.value(f"the server of the bare runtime, {concurrency} at once", statistics.median(rounds), "")
    runs = statistics_of_model["execution_count"]
    for step in ("queue", "compute_input", "compute_infer", "compute_output"):
        took_ns = statistics_of_model["inference_stats"][step]["ns"] / statistics_of_model["inference_count"]
        measure.value(f"{concurrency} at once, {step} of a request", took_ns / 1e6, "ms")
    measure.value(f"{concurrency} at once, requests a run", statistics_of_model["inference_count"] / runs, "")
    # A new plan of each convolution at each change of the batch size gave 0.004.
    assert min(rounds) > 0.1


def rate(call: Callable[[], object], seconds: float = 5.0) -> float:
    call()
    began_s, count = time.perf_counter(), 0
    while (took_s := time.perf_counter() - began_s) < seconds:
        call()
        count += 1
    return count / took_s
