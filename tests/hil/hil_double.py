"""Plugin of pytest, for a process of its own: puts a fake GPU (see tests/plugins/tensorrt) under hil_tests."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import pytest

from edge_server.backends.cuda import cuda_driver
from edge_server.plugins.tensorrt.builds import onnx_to_engine as builds

_PATH = Path(__file__).parents[1] / "plugins/tensorrt/fake_gpu/__init__.py"


def pytest_configure(config: pytest.Config) -> None:
    spec = importlib.util.spec_from_file_location("tensorrt_fake_gpu", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tempfile.TemporaryDirectory()
    patch = pytest.MonkeyPatch()
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(patch.undo)
    gpu = module.FakeGpu(Path(folder.name))
    gpu.install(patch)
    patch.setattr(cuda_driver, "unavailable_reason", lambda: "")
    build = builds.build_engine

    def build_engine(order: Any, *more: Any) -> Any:
        built = build(order, *more)
        profiles = [
            {name: [list(shape) for shape in (one.least, one.best, one.most)] for name, one in profile.items()}
            for profile in order.profiles
        ]
        gpu.register(built.plan.read_bytes(), order.path, profiles)
        return built

    patch.setattr(builds, "build_engine", build_engine)
