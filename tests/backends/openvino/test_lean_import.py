"""Import of OpenVINO without its model converters, which are imported when they are used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openvino")
onnx = pytest.importorskip("onnx")

SERVE = """
import sys
from edge_server.process.composition_root import build
from edge_server.config.merge_settings import parse_serve
from edge_server.telemetry.log import LogSettings

config = parse_serve([f"--model-repository={sys.argv[1]}", "--model-control-mode=explicit"], {}).config
core = build(config, LogSettings(config.log))
core.service.started()
core.service.load_model("negate")
print(*sys.modules)
core.close(10.0)
"""
CONVERT = """
import sys
from edge_server.backends.openvino.lean_import import import_openvino
openvino = import_openvino()
assert not [name for name in sys.modules if name.startswith("openvino.tools.ovc")]
print(len(openvino.convert_model(sys.argv[1]).outputs))
import openvino.tools.ovc
assert openvino.tools.ovc.convert_model.__module__ == "openvino.tools.ovc.convert"
"""
OTHERS_FIRST = """
import openvino
from edge_server.backends.openvino.lean_import import import_openvino
assert import_openvino() is openvino
print(openvino.convert_model.__module__)
"""


def run(code: str, *arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def write_model(repository: Path, runtime: str) -> Path:
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    x, y = (helper.make_tensor_value_info(name, floats, [4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "negate", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    file = repository / "negate/1/model.onnx"
    file.parent.mkdir(parents=True)
    file.write_bytes(model.SerializeToString())
    (repository / "negate/config.pbtxt").write_text(f'backend: "{runtime}"\ndefault_model_filename: "model.onnx"\n')
    return file


@pytest.mark.parametrize(
    ("runtime", "other"),
    [
        # Without OpenVINO there are no converters to leave out.
        pytest.param("onnxruntime", "openvino", marks=pytest.mark.full),
        ("openvino", "onnxruntime"),
    ],
)
def test_a_served_model_imports_its_runtime_but_no_converters(tmp_path: Path, runtime: str, other: str) -> None:
    pytest.importorskip(runtime)
    write_model(tmp_path, runtime)
    modules = set(run(SERVE, str(tmp_path)))
    assert runtime in modules
    assert other not in modules
    assert not [name for name in modules if name.startswith(("openvino.tools.ovc", "openvino_telemetry"))]


def test_a_model_may_still_convert(tmp_path: Path) -> None:
    assert run(CONVERT, str(write_model(tmp_path, "openvino"))) == ["1"]


def test_a_library_that_is_already_imported_is_not_changed() -> None:
    assert run(OTHERS_FIRST) == ["openvino.tools.ovc.convert"]
