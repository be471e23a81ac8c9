"""Energy of an inference, by the machine's own counters."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def test_joules_per_inference(serve: Any, measure: Any, hardware: Any, bundled: Path) -> None:
    seconds = 3.0 if hardware.is_short else 60.0
    with serve(bundled) as server:
        time.sleep(2)
        before = server.get("/edge/v1/governor")
        if before["power_w"] is None and before["energy_j"] is None:
            why = before["box"]["missing"].get("power_mw", "no power of anything can be read")
            assert hardware.kind != "jetson", f"no power of this board is read: {why}"
            pytest.skip(f"this box tells no power: {why}")
        idle_began_s, idle_j = time.monotonic(), before["energy_j"] or 0.0
        time.sleep(seconds / 4)
        now = server.get("/edge/v1/governor")
        idle_w = ((now["energy_j"] or 0.0) - idle_j) / (time.monotonic() - idle_began_s)
        name = server.get("/v2/models/efficientnet_lite0")["inputs"][0]["name"]
        image = np.zeros((1, 3, 224, 224), np.float32)
        count, began_s, began_j = 0, time.monotonic(), now["energy_j"] or 0.0
        while time.monotonic() - began_s < seconds:
            server.infer("efficientnet_lite0", {name: image})
            count += 1
        took_s = time.monotonic() - began_s
        after = server.get("/edge/v1/governor")
    spent_j = (after["energy_j"] or 0.0) - began_j
    measure.value("idle power", idle_w, "W")
    measure.value("power under load", spent_j / took_s, "W")
    measure.value("energy of an inference, all of the box's", spent_j / count, "J")
    measure.value("energy of an inference above idle", (spent_j - idle_w * took_s) / count, "J")
    for cost in after["joules_per_inference"]:
        measure.value(f"the governor's own figure, {cost['model']} batch {cost['batch']}", cost["joules"], "J")
    assert spent_j > 0
