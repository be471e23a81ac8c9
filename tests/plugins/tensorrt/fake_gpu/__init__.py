"""A fake GPU: a driver compiled from C, and TensorRT's runtime with onnxruntime behind its last call.

Everything up to that call is real: libraries, engines, streams, copies, graphs, the server and its builder. A process
of one's own gets it by `FakeGpu.environment`, this one by `FakeGpu.install`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
LIBRARY = "libcuda.so.1"


class FakeGpu:
    """`engines` is a folder in which plans made by tests are registered."""

    def __init__(self, folder: Path) -> None:
        self.library = build(folder)
        self.engines = folder / "engines"
        self.engines.mkdir()
        self.tally = folder / "tally"
        self.tally.write_bytes(bytes(32))
        self.driver = ctypes.CDLL(str(self.library))
        self.double = _load("fake_gpu_runtime_double", HERE / "runtime_double.py")

    def environment(self, *engines: Path, **more: str) -> dict[str, str]:
        """Return what a process needs to have the GPU; `engines` are folders of engine caches."""
        folders = os.pathsep.join(map(str, [self.engines, *engines]))
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
        return {
            "PYTHONPATH": path, "FAKE_CUDA_LIBRARY": str(self.library), "FAKE_ENGINES": folders,
            "FAKE_CUDA_TALLY": str(self.tally), **more,
        }  # fmt: skip

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Give this process the GPU for one test."""
        import tensorrt_rtx

        from edge_server.backends.cuda import cuda_ctypes, cuda_driver

        patch.setattr(cuda_driver, "LIBRARY", str(self.library))
        made = cuda_ctypes.CudaDriver(str(self.library))
        patch.setattr(cuda_driver, "driver", lambda: made)
        patch.setattr(cuda_driver, "devices", lambda: made.devices())
        patch.setenv("FAKE_ENGINES", str(self.engines))
        patch.setenv("FAKE_CUDA_TALLY", str(self.tally))
        patch.setattr(tensorrt_rtx, "Runtime", tensorrt_rtx.Runtime)
        patch.setattr(tensorrt_rtx, "Builder", tensorrt_rtx.Builder)
        self.double.install(tensorrt_rtx, str(self.library))

    def register(
        self,
        plan: bytes,
        onnx: Path,
        profiles: list[dict[str, list[list[int]]]],
        formats: Mapping[str, str] | None = None,
    ) -> None:
        self.double.register(self.engines, plan, onnx, profiles, formats)

    def copies(self) -> tuple[int, int]:
        """Return how many copies there were between host and device, and on the device, in all processes so far."""
        host, device, _, _ = struct.unpack("<4Q", self.tally.read_bytes())
        return host, device

    def live(self) -> int:
        """Return how many things of the driver's are in use in this process: memory, streams, graphs, contexts."""
        return int(self.driver.fake_cuda_live())

    def launches(self) -> int:
        """Return how many graphs were launched in this process."""
        return int(self.driver.fake_cuda_launches())


def build(folder: Path) -> Path:
    """Compile the driver into `folder`; skips without a compiler, or without TensorRT for RTX."""
    pytest.importorskip("tensorrt_rtx")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler for the driver that stands in for NVIDIA's")
    library = folder / LIBRARY
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(library)]
    done = subprocess.run(
        [*command, str(HERE / "fake_cuda.c"), "-ldl", "-lpthread", "-lrt"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return library


def _load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
