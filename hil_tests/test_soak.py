"""Half an hour of load: no request fails, memory does not grow; temperature, power and clocks are recorded."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

MAX_GROWTH_MB = 40.0
"""Between the end of the first fifth, when everything has been allocated once, and the end."""


def test_half_an_hour_of_load_loses_no_request_and_leaks_no_memory(
    serve: Any, measure: Any, hardware: Any, bundled: Path
) -> None:
    given = os.environ.get("EDGE_HIL_SOAK_SECONDS")
    seconds = float(given) if given else 8.0 if hardware.is_short else 1800.0
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in ("p50", "p99", "memory", "heat", "power")}
    count = 0
    with serve(bundled) as server:
        name = server.get("/v2/models/efficientnet_lite0")["inputs"][0]["name"]
        image = np.random.default_rng(1).standard_normal((1, 3, 224, 224)).astype(np.float32)
        first = server.infer("efficientnet_lite0", {name: image})
        began_s = time.monotonic()
        window = max(seconds / 120, 0.5)
        while time.monotonic() - began_s < seconds:
            took = []
            end_s = time.monotonic() + window
            while time.monotonic() < end_s:
                at_s = time.perf_counter()
                answer = server.infer("efficientnet_lite0", {name: image})
                took.append((time.perf_counter() - at_s) * 1000)
            count += len(took)
            for key, output in answer.items():
                np.testing.assert_allclose(output, first[key], atol=1e-4)
            at_s = time.monotonic() - began_s
            took.sort()
            now = server.get("/edge/v1/governor")
            curves["p50"].append((at_s, statistics.median(took)))
            curves["p99"].append((at_s, took[int(len(took) * 0.99)]))
            curves["memory"].append((at_s, server.resident_mb()))
            for curve, key in (("heat", "temperature_c"), ("power", "power_w")):
                if now[key] is not None:
                    curves[curve].append((at_s, now[key]))
        metrics = server.get("/v2/models/efficientnet_lite0/stats")["model_stats"][0]["inference_stats"]
    for key, unit in (("p50", "ms"), ("p99", "ms"), ("memory", "MB"), ("heat", "°C"), ("power", "W")):
        if curves[key]:
            measure.series(key, curves[key], unit)
    measure.value("requests", count, "")
    memory = [value for _, value in curves["memory"]]
    grown = memory[-1] - memory[len(memory) // 5]
    measure.value("memory grown", grown, "MB")
    assert metrics["fail"]["count"] == 0
    assert grown < MAX_GROWTH_MB
