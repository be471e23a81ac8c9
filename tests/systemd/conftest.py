"""The Debian packages, built once, and the helper that boots them."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def machine() -> Any:
    """The module machine.py beside this file."""
    path = Path(__file__).parent / "machine.py"
    spec = importlib.util.spec_from_file_location("systemd_machine", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["systemd_machine"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def packages(machine: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The Debian packages with the Python packages that this Python has, without any runtime."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("needs dpkg-deb: apt-get install dpkg")
    return machine.build_packages(tmp_path_factory.mktemp("packages"))
