"""New versions of a model, copied in under load: no request is lost, and each version takes over."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

SHAPE = (1, 3, 224, 224)


def test_reloads_under_load_lose_no_request(
    serve: Any, measure: Any, hardware: Any, bundled: Path, tmp_path: Path
) -> None:
    model = tmp_path / "classifier"
    model.mkdir()
    (model / "config.pbtxt").write_text("version_policy { latest { num_versions: 1 } }\n")
    copy(bundled, model, 1)
    rounds = 2 if hardware.is_short else 20
    failures: list[str] = []
    latencies: list[tuple[float, float]] = []
    stop = threading.Event()
    with serve(tmp_path) as server:
        name = server.get("/v2/models/classifier")["inputs"][0]["name"]
        image = np.zeros(SHAPE, np.float32)
        began_s = time.perf_counter()

        def ask() -> None:
            while not stop.is_set():
                at_s = time.perf_counter()
                try:
                    server.infer("classifier", {name: image})
                except Exception as error:  # noqa: BLE001 - whatever it is: a request was lost, and this thread goes on
                    failures.append(f"{at_s - began_s:.2f} s: {type(error).__name__}: {error}")
                else:
                    latencies.append((at_s - began_s, (time.perf_counter() - at_s) * 1000))

        clients = [threading.Thread(target=ask) for _ in range(2)]
        for client in clients:
            client.start()
        try:
            for version in range(2, rounds + 2):
                copy(bundled, model, version)
                assert comes(server, version), f"version {version} did not take over: {server.log()[-800:]}"
        finally:
            stop.set()
            for client in clients:
                client.join()
    measure.series("latency while versions are replaced", sorted(latencies), "ms")
    measure.value("requests during the reloads", len(latencies), "")
    assert failures == []


def copy(bundled: Path, model: Path, version: int) -> None:
    (model / str(version)).mkdir()
    shutil.copy(bundled / "efficientnet_lite0/1/model.onnx", model / str(version) / "model.onnx")


def comes(server: Any, version: int, timeout_s: float = 600) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if str(version) in server.get("/v2/models/classifier")["versions"]:
            return True
        time.sleep(0.1)
    return False
