"""The governor reads this machine's sensors, and their values are plausible under load and consistent."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def test_temperature_and_power_are_read_and_stay_below_their_limits(
    serve: Any, measure: Any, hardware: Any, bundled: Path
) -> None:
    seconds = 3.0 if hardware.is_short else 120.0
    with serve(bundled) as server:
        time.sleep(1.5)
        idle = server.get("/edge/v1/governor")
        assert idle["enabled"]
        if idle["temperature_c"] is None:
            assert not hardware.has_cuda, f"no temperature of this hardware is read: {idle['box']['missing']}"
            pytest.skip(f"this box tells no temperature: {idle['box']['missing'].get('zones', 'no zones')}")
        name = server.get("/v2/models/efficientnet_lite0")["inputs"][0]["name"]
        image = np.zeros((1, 3, 224, 224), np.float32)
        heat, power, share = [], [], []
        began_s = time.monotonic()
        while (at_s := time.monotonic() - began_s) < seconds:
            for _ in range(5):
                server.infer("efficientnet_lite0", {name: image})
            now = server.get("/edge/v1/governor")
            heat.append((at_s, now["temperature_c"] or float("nan")))
            power.append((at_s, now["power_w"] or float("nan")))
            share.append((at_s, now["share"]))
        zones = {zone["name"]: zone for zone in now["box"]["zones"]}
    measure.series("temperature", heat, "°C")
    measure.series("power", power, "W")
    measure.series("work allowed", share, "")
    assert all(0 < value < 125 for _, value in heat)
    assert now["set_point_c"] is None or now["temperature_c"] < now["set_point_c"] + 5
    if hardware.kind == "jetson":
        assert "tj" in zones
        assert now["power_w"] is not None
        assert now["box"]["power_mode"] is not None
        assert now["box"]["gpus"][0]["utilization"] is not None
