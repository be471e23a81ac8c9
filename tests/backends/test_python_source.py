"""A model's modules come and go while other models' do."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from edge_server.backends.python.source import ModelSource


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_model_is_unloaded_while_other_threads_import(tmp_path: Path, quick_switches: None) -> None:
    (tmp_path / "1").mkdir()
    path = tmp_path / "1" / "model.py"
    path.write_text("import json\nTritonPythonModel = object\n")
    is_over = threading.Event()

    def import_and_forget(number: int) -> None:
        while not is_over.is_set():
            for name in [f"_edge_test_{number}_{index}" for index in range(50)]:
                sys.modules[name] = ModuleType(name)
            for name in [f"_edge_test_{number}_{index}" for index in range(50)]:
                del sys.modules[name]

    others = [threading.Thread(target=import_and_forget, args=(number,)) for number in range(2)]
    for thread in others:
        thread.start()
    try:
        for _ in range(200):
            source = ModelSource(path, tmp_path)
            source.load()
            source.unload()
            assert source.package not in sys.modules
    finally:
        is_over.set()
        for thread in others:
            thread.join()
