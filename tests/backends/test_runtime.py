"""Functions that all backends share: failing imports, shared models, and reading of ONNX files."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edge_server.backends import load_backend, onnx_file_info
from edge_server.backends.base import ModelFile
from edge_server.backends.runtime_errors import load_error
from edge_server.backends.shared_models import SharedModels
from edge_server.errors import BackendMissing, LoadError, OutOfMemory

ASK = """
from edge_server.backends import load_backend
from edge_server.errors import BackendMissing
for attempt in range(2):
    try:
        load_backend("{name}")
    except BackendMissing as error:
        print(error.message)
"""


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("raise ImportError('no such\\nlibrary')", "ImportError: no such library"),
        ("raise OSError('libx.so.1: wrong ELF class')", "OSError: libx.so.1: wrong ELF class"),
        ("raise RuntimeError('built against another numpy')", "RuntimeError: built against another numpy"),
        ("", "the installation is incomplete"),
    ],
)
def test_a_broken_runtime_is_reported_with_the_command_that_installs_it(
    name: str, content: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / f"{name}.py").write_text(content)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})" + ASK.format(name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert f"runtime {name} does not import" in line
        assert reason in line
        assert f"pip install '.[{name}]'" in line


def test_importing_the_backends_package_imports_no_runtime() -> None:
    code = (
        "import sys, edge_server.backends; print([m for m in ('numpy', 'onnxruntime', 'openvino') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "onnxruntime" not in done.stdout
    assert "openvino" not in done.stdout


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BackendMissing, match=r"no backend is called 'caffe'; there are .*onnxruntime") as caught:
        load_backend("caffe")
    assert "stub" not in caught.value.message


def test_a_misspelt_backend_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(BackendMissing, match="no backend is called 'onxruntime', did you mean 'onnxruntime'"):
        load_backend("onxruntime")
    with pytest.raises(BackendMissing, match="no backend is called 'onnx', did you mean 'onnxruntime'"):
        load_backend("onnx")


def test_running_out_of_memory_is_recognised(tmp_path: Path) -> None:
    file = ModelFile(tmp_path / "m" / "1" / "model.onnx", tmp_path / "m", 1)
    assert isinstance(load_error(file, "openvino", MemoryError()), OutOfMemory)
    assert isinstance(load_error(file, "openvino", RuntimeError("std::bad_alloc")), OutOfMemory)
    other = load_error(file, "openvino", RuntimeError("no\nsuch operator " + "x" * 5000))
    assert type(other) is LoadError
    assert "no such operator" in other.message
    assert len(other.message) < 1000


def test_a_shared_model_is_loaded_once_and_dropped_after_its_last_holder() -> None:
    shared: SharedModels[object] = SharedModels()
    loads: list[object] = []
    together = threading.Barrier(8)

    def load() -> object:
        loads.append(object())
        return loads[-1]

    def take(_: int) -> object:
        together.wait()
        return shared.take("key", load)

    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(take, range(8)))
    assert len(loads) == 1
    assert all(model is loads[0] for model in taken)
    for _ in range(7):
        shared.give_back("key")
    assert shared.take("key", load) is loads[0]
    shared.give_back("key")
    shared.give_back("key")
    assert shared.take("key", load) is loads[1]


def test_a_failed_load_is_tried_again_by_the_next_holder() -> None:
    shared: SharedModels[str] = SharedModels()

    def fail() -> str:
        raise LoadError("no")

    for _ in range(2):
        with pytest.raises(LoadError):
            shared.take("key", fail)
    assert shared.take("key", lambda: "loaded") == "loaded"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "content",
    [
        b"hello world, this is no protobuf at all",
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x3a\x80",
        b"\x3a" + b"\x80" * 20,
        b"\x0b",
        b"\x3a\x04\x2a\x7f\x10\x01",
        bytes(64),
    ],
)
def test_a_file_that_is_not_onnx_raises_or_yields_nothing(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    try:
        found = onnx_file_info.arithmetic(path)
    except ValueError:
        return
    assert found is None
