"""Fixtures of a fake NVML library for pynvml in this process."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest


@pytest.fixture
def install_nvidia(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path | None], None]:
    """Makes a fresh pynvml find this library instead of the machine's; None: it finds none."""

    def install(library: Path | None) -> None:
        def load(name: str) -> ctypes.CDLL:
            if library is None:
                raise OSError(f"{name}: cannot open shared object file: No such file or directory")
            return ctypes.CDLL(str(library))

        monkeypatch.setattr(pynvml, "CDLL", load)
        monkeypatch.setattr(pynvml, "nvmlLib", None)
        monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    return install


@pytest.fixture
def nvidia(
    fake_nvml: Any,
    nvidia_library: Path,
    install_nvidia: Callable[[Path | None], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """A `FakeNvml` without GPUs, seen by pynvml in this process."""
    # A copy of its own: what the library remembers is not to reach the next test.
    library = shutil.copy(nvidia_library, tmp_path / fake_nvml.LIBRARY)
    state = tmp_path / "nvidia"
    monkeypatch.setenv("FAKE_NVML_STATE", str(state))
    install_nvidia(Path(library))
    return fake_nvml.FakeNvml(state)
