"""Measurements of the README: `python tests/bench/figures.py [ROUNDS]`, with the package and its test extra installed.

Start to ready and resident memory of the installed server, empty and with the bundled classifier; then requests a
second through the server beside the bare runtime in this process, in turns, one request at a time. Quote the ratios:
absolute times belong to the machine. The client (tritonclient) and the server share the machine's cores, so the
client's own cost is part of the server's side.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import harness
import numpy as np
import onnxruntime
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

CLASSIFIER = harness.ROOT / "model_repository/efficientnet_lite0/1/model.onnx"
TURN_S = 2.0


def rate(call: Callable[[], object]) -> float:
    """Return calls a second over one turn."""
    count, end, started = 0, time.perf_counter() + TURN_S, time.perf_counter()
    while time.perf_counter() < end:
        call()
        count += 1
    return count / (time.perf_counter() - started)


def start_and_memory(title: str, repository: Path, rounds: int) -> None:
    seconds, megabytes = [], []
    for _ in range(rounds):
        with harness.server(repository) as where:
            seconds.append(where.start_s)
            megabytes.append(where.memory_mb()["Rss"])
    print(f"{title}: start to ready {statistics.median(seconds):.2f} s, {statistics.median(megabytes):.0f} MB resident")


def beside_the_runtime(rounds: int) -> None:
    """Compare HTTP, gRPC and the process itself with the bare runtime on the classifier, with the same settings."""
    frame = np.random.default_rng(0).random((1, 3, 224, 224), np.float32)
    picture = (harness.ROOT / "tests/data/coffee.jpg").read_bytes()
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.intra_op.spin_duration_us", "30")
    session = onnxruntime.InferenceSession(str(CLASSIFIER), options, providers=["CPUExecutionProvider"])
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        model = repository / "classifier"
        (model / "1").mkdir(parents=True)
        shutil.copy(CLASSIFIER, model / "1")
        shutil.copy(CLASSIFIER.parents[1] / "labels.txt", model)
        config = (CLASSIFIER.parents[1] / "config.pbtxt").read_text().replace('"efficientnet_lite0"', '"classifier"', 1)
        (model / "config.pbtxt").write_text(config + '\nbackend: "onnxruntime"\n')
        with harness.server(repository) as where:
            calls = {
                "bare onnxruntime": lambda: session.run(None, {"input": frame}),
                **calls_by_protocol(where.http, where.grpc, frame, picture),
            }
            results: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(rounds):
                for name, call in calls.items():
                    call()
                    results[name].append(rate(call))
    bare = results["bare onnxruntime"]
    for name, rates in results.items():
        ratio = statistics.median(one / other for one, other in zip(rates, bare, strict=True))
        print(f"{name}: {statistics.median(rates):.1f} requests a second, {ratio:.2f} of the bare runtime")


def calls_by_protocol(http: str, grpc: str, frame: np.ndarray, picture: bytes) -> dict[str, Callable[[], object]]:
    over_grpc = triton_grpc.InferenceServerClient(grpc)
    over_http = triton_http.InferenceServerClient(http)
    grpc_input = triton_grpc.InferInput("input", list(frame.shape), "FP32")
    grpc_input.set_data_from_numpy(frame)
    http_input = triton_http.InferInput("input", list(frame.shape), "FP32")
    http_input.set_data_from_numpy(frame)
    request = urllib.request.Request(
        f"http://{http}/v2/models/classifier/infer", data=picture, headers={"Content-Type": "image/jpeg"}
    )
    return {
        "gRPC, FP32 tensor of 602 KB": lambda: over_grpc.infer("classifier", [grpc_input]),
        "HTTP, FP32 tensor of 602 KB": lambda: over_http.infer("classifier", [http_input]),
        "HTTP, JPEG of 72 KB decoded by the server": lambda: urllib.request.urlopen(request).read(),
    }


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as empty:
        start_and_memory("no model", Path(empty), rounds)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(CLASSIFIER.parents[1], Path(folder) / CLASSIFIER.parents[1].name)
        start_and_memory("the bundled classifier", Path(folder), rounds)
    beside_the_runtime(rounds)


if __name__ == "__main__":
    main()
