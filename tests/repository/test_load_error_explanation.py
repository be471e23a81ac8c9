"""Files that are not what their names say, and folders that are not where they should be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from edge_server.errors import LoadError
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.resolve_version import ResolveOptions, resolve

MODEL = Path(__file__).parents[2] / "model_repository/face_detection_yunet/1/model.onnx"
GGUF = Path(__file__).parents[1] / "data/tiny_llm/tiny.gguf"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
CLASSIFIER = helper.make_model(
    helper.make_graph(
        [helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])],
        "classifier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 2])],
        [
            helper.make_value_info(
                "y",
                helper.make_sequence_type_proto(
                    helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
                ),
            )
        ],
    ),
    ir_version=8,
    opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)],
).SerializeToString()
WITH_ZIPMAP = (
    "was exported with ZipMap, whose output requests cannot carry: export it with "
    'options={"zipmap": False} of skl2onnx\'s to_onnx'
)
IR = b"<?xml version='1.0'?><net name='a' version='11'/>"


@pytest.fixture
def failure(root: Path) -> Callable[[dict[str, bytes]], str]:
    """`failure(files)`: why the model "m" with these files of version 1 does not load."""

    def call(files: dict[str, bytes]) -> str:
        folder = root / "m" / "1"
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        model = Scanner([root]).find("m")
        assert model is not None
        with pytest.raises(LoadError) as caught:
            resolve(model, 1, ResolveOptions())
        return caught.value.message

    return call


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (
            {"model.onnx": POINTER},
            "file 'model.onnx' is a Git LFS pointer to the file of 12345 bytes, not the file itself: "
            "run 'git lfs pull' where it was cloned",
        ),
        (
            {"model.onnx": b"\n<!DOCTYPE html>\n<html>404</html>"},
            "file 'model.onnx' is an HTML page: a download returned a web page in place of the file",
        ),
        ({"model.onnx": b""}, "file 'model.onnx' is empty"),
        (
            {"model.onnx": b"See our page: " + "\N{EURO SIGN}".encode() * 400},
            "file 'model.onnx' is text, not an ONNX model",
        ),
        (
            {"model.onnx": b"\x43\x00\x99\x10"},
            "file 'model.onnx' is not an ONNX model: no field of one begins with the byte 0x43",
        ),
        (
            {"model.tflite": b"\x1c\x00\x00\x00TFL2\x99\x10"},
            "file 'model.tflite' is not a TensorFlow Lite file: expected 'TFL3' at byte 4, given b'TFL2'",
        ),
        ({"model.onnx": CLASSIFIER}, f"file 'model.onnx' {WITH_ZIPMAP}"),
        (
            {"model.onnx": MODEL.read_bytes()[:50_000]},
            "file 'model.onnx' is cut short: it has 50000 bytes, and its content ends at byte 232583 or later",
        ),
        (
            {"model.py": POINTER},
            "file 'model.py' is a Git LFS pointer to the file of 12345 bytes, not the file itself: "
            "run 'git lfs pull' where it was cloned",
        ),
        (
            {"model.xml": IR, "model.bin": POINTER},
            "file 'model.bin' is a Git LFS pointer to the file of 12345 bytes, not the file itself: "
            "run 'git lfs pull' where it was cloned",
        ),
    ],
)
def test_a_file_that_is_no_model_is_reported_with_its_type(
    failure: Callable[[dict[str, bytes]], str], files: dict[str, bytes], reason: str
) -> None:
    assert failure(files) == f"model 'm' version 1, {reason}"


def test_weights_of_openvino_that_are_cut_short_are_called_so(
    failure: Callable[[dict[str, bytes]], str], tmp_path: Path
) -> None:
    openvino = pytest.importorskip("openvino")
    openvino.save_model(openvino.Core().read_model(MODEL), tmp_path / "model.xml")
    weights = (tmp_path / "model.bin").read_bytes()
    assert failure({"model.xml": (tmp_path / "model.xml").read_bytes(), "model.bin": weights[:-1]}) == (
        f"model 'm' version 1, file 'model.bin' is cut short: it has {len(weights) - 1} bytes, "
        f"and 'model.xml' names {len(weights)}"
    )


def test_another_damage_keeps_the_reason_of_the_runtimes(failure: Callable[[dict[str, bytes]], str]) -> None:
    content = bytearray(MODEL.read_bytes())
    content[100:2000] = bytes(1900)
    assert "cannot load it" in failure({"model.onnx": bytes(content)})


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_file_without_permission_is_named_with_its_owner_and_mode(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(MODEL.read_bytes())
    (tmp_path / "model.onnx").chmod(0o600)
    tmp_path.chmod(0o755)
    code = """
import os, pathlib
from edge_server.core.model_spec import ModelFile
from edge_server.errors import LoadError
from edge_server.repository.load_error_explanation import explain_by_content
os.seteuid(65534)
path = pathlib.Path("model.onnx")
print(explain_by_content(LoadError("cannot load it"), ModelFile(path, path.parent, 1)).message.partition(", ")[2])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == (
        "file 'model.onnx' cannot be read by user 65534, as which this server runs: Permission denied "
        "(owner: user 0, mode 0600)"
    ), done.stderr


WITHOUT_PERMISSIONS = """
import pathlib, sys
from edge_server.errors import LoadError
from edge_server.repository.resolve_version import ResolveOptions, resolve
from edge_server.repository.disk.scan import Scanner
root = pathlib.Path(sys.argv[1])
for name in ("file", "folder"):
    model = Scanner([root]).find(name)
    try:
        resolve(model, 1, ResolveOptions())
    except LoadError as error:
        print(error.message)
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv, to read as others do"
)
def test_a_model_without_permission_is_named_with_its_owner_and_mode(root: Path) -> None:
    pytest.importorskip("openvino_genai")
    for name in ("file", "folder"):
        (root / name / "1").mkdir(parents=True)
        shutil.copy(GGUF, root / name / "1/model.gguf")
    (root / "file/1/model.gguf").chmod(0o200)
    (root / "folder/1").chmod(0o300)
    rights = "-dac_override,-dac_read_search"
    command = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}", sys.executable, "-c", WITHOUT_PERMISSIONS]
    done = subprocess.run([*command, root], capture_output=True, text=True, timeout=120)
    reason = "cannot be read by user 0, as which this server runs: Permission denied (owner: user 0, mode"
    assert done.stdout.splitlines() == [
        f"model 'file' version 1, file 'model.gguf' {reason} 0200)",
        f"model 'folder': '{root / 'folder/1'}' {reason} 0300)",
    ], done.stderr


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("v1/model.onnx", "it holds 'v1/', and files of version 1 are expected in '{m}/1' (a number without"),
        ("003/model.onnx", "it holds '003/', and files of version 3 are expected in '{m}/3' (a number without"),
        ("model.onnx", "move 'model.onnx' to '{m}/1/model.onnx'"),
        ("readme.txt", "files of version 1 are expected in '{m}/1'"),
    ],
)
def test_a_folder_without_versions_is_reported_with_its_content(root: Path, path: str, reason: str) -> None:
    file = root / "m" / path
    file.parent.mkdir(parents=True)
    shutil.copy(MODEL, file)
    model = Scanner([root]).find("m")
    assert model is not None
    start = f"model 'm' has no version directories in '{root / 'm'}': "
    assert model.problem.startswith(start + reason.replace("{m}", str(root / "m")))


def test_a_named_pipe_beside_a_broken_model_does_not_hold_up_its_load(
    root: Path, failure: Callable[[dict[str, bytes]], str]
) -> None:
    (root / "m" / "1").mkdir(parents=True)
    os.mkfifo(root / "m" / "1" / "a_pipe")
    assert "file 'model.onnx' is text, not an ONNX model" in failure({"model.onnx": b"text"})


def test_a_repository_that_is_a_model_is_called_one(root: Path) -> None:
    (root / "m" / "1").mkdir(parents=True)
    shutil.copy(MODEL, root / "m" / "1" / "model.onnx")
    model = Scanner([root / "m"]).find("1")
    assert model is not None
    assert model.problem == (
        f"'{root / 'm' / '1'}' is a version of the model 'm': the repository is the folder above, '{root}'"
    )
