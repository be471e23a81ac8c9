"""Child processes import what this process imports, and nothing from the current folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge_server.child_command import child_command
from tests.kit.server import COMMAND

MARKER = "open('ran', 'w')\nraise SystemExit(3)\n"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder whose modules have the names of those that a child process imports first."""
    for name in ("runpy", "pkgutil", "json", "logging", "numpy", "onnxruntime", "edge_server"):
        (tmp_path / f"{name}.py").write_text(MARKER)
    return tmp_path


def test_a_child_process_runs_no_module_of_the_current_folder(hostile: Path) -> None:
    done = subprocess.run(
        child_command("edge_server", "--version"), cwd=hostile, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("edge-server ")
    assert not (hostile / "ran").exists()


def test_a_child_process_imports_by_the_path_of_its_parent(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (hostile / "own.py").write_text("import sys; print(__name__, sys.argv[1:], sys.path[0])")
    monkeypatch.chdir(hostile)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    done = subprocess.run(child_command("own", "a b"), cwd="/", capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split(None, 1) == ["__main__", f"['a b'] {hostile}\n"]


def test_the_folder_of_a_package_hides_no_module_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cv2 puts its folder, in which there is a `typing`, in front while it is imported."""
    (tmp_path / "__init__.py").touch()
    (tmp_path / "typing.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(sys, "path", [*sys.path[:1], str(tmp_path), *sys.path[1:]])
    subprocess.run(child_command("edge_server", "--version"), capture_output=True, timeout=60, check=True)


def test_add_runs_no_module_that_lies_beside_the_model(hostile: Path) -> None:
    onnx = pytest.importorskip("onnx")
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 4]) for name in "XY"]
    node = onnx.helper.make_node("Neg", ["X"], ["Y"])
    graph = onnx.helper.make_graph([node], "negative", value[:1], value[1:])
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8),
        hostile / "m.onnx",
    )
    kept = {key: value for key, value in os.environ.items() if not key.startswith("EDGE_")}
    done = subprocess.run(
        [COMMAND, "add", "m.onnx"], cwd=hostile, env=kept, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (hostile / "model_repository/m/1/model.onnx").is_file()
    assert not (hostile / "ran").exists()
