"""Fixture for LeRobot's wire: modules with the names of its classes, which this environment does not have."""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module")
def lerobot() -> Iterator[Any]:
    """Modules with LeRobot's names, whose classes have its fields."""
    helpers = types.ModuleType("lerobot.async_inference.helpers")
    kinds = types.ModuleType("lerobot.configs.types")
    torch = types.ModuleType("torch")
    fields: dict[str, list[Any]] = {
        "RemotePolicyConfig": [
            "policy_type",
            "pretrained_name_or_path",
            "lerobot_features",
            "actions_per_chunk",
            "device",
        ],
        "TimedObservation": ["timestamp", "timestep", "observation", "must_go"],
        "TimedAction": ["timestamp", "timestep", "action"],
    }
    for name, names in fields.items():
        setattr(helpers, name, dataclasses.make_dataclass(name, names, namespace={"__module__": helpers.__name__}))
    kinds.FeatureType = enum.Enum("FeatureType", {"STATE": "STATE"}, module=kinds.__name__)  # type: ignore[attr-defined]
    kinds.PolicyFeature = dataclasses.make_dataclass(  # type: ignore[attr-defined]
        "PolicyFeature", ["type", "shape"], namespace={"__module__": kinds.__name__}
    )
    torch.tensor = lambda values: np.float32(values)  # type: ignore[attr-defined]
    modules = {module.__name__: module for module in (helpers, kinds, torch)}
    modules |= {name: types.ModuleType(name) for name in ("lerobot", "lerobot.async_inference", "lerobot.configs")}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    yield types.SimpleNamespace(**{**vars(kinds), **vars(helpers)})
    for name, module in before.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module
