"""`edge-server analyze` on a real ONNX file with labels: table, chart, and a variant that serves."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

pytestmark = pytest.mark.full

COMMAND = Path(sys.executable).parent / "edge-server"
WIDTH = 64


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A dense layer whose output has labels, in a folder below the model's."""
    weights = np.random.default_rng(0).standard_normal((WIDTH, 3)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weights"], ["y"])],
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [onnx.numpy_helper.from_array(weights, "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    folder = tmp_path / "models" / "dense"
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "words" / "more").mkdir(parents=True)
    (folder / "words" / "labels.txt").write_text("cat\ndog\nfox\n")
    (folder / "config.pbtxt").write_text(
        'backend: "onnxruntime"\nmax_batch_size: 4\n'
        'output { name: "y" data_type: TYPE_FP32 dims: [3] label_filename: "words/labels.txt" }\n'
    )
    return tmp_path / "models"


def test_a_real_model_is_compared_in_both_runtimes_and_the_faster_serves(
    command: Any, repository: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "analyze.svg"
    done = command(
        "analyze", "dense", f"--model-repository={repository}", "--runtimes=openvino",
        "--precisions=f32,nonsense", "--instances=1", "--threads=1", "--batch-sizes=1", "--concurrency=1",
        "--measurement-interval=100", "--measurement-request-count=5", "--max-trials=3", "--write=best",
        f"--svg={picture}",
    )  # fmt: skip
    assert done.code == 0, done.errors + done.output
    measured = {item["name"]: item for item in done.report["configurations"] if item["points"]}
    assert sorted(item["runtime"].split()[0] for item in measured.values()) == ["onnxruntime", "openvino"]
    assert all(item["difference"] < 1e-5 for item in measured.values())
    # Reasons are sentences: each is printed once below the table, not in a column.
    table, *refused = done.output.split("\n\n")
    assert all(len(line) < 160 for line in table.splitlines())
    assert len(table.splitlines()) == 2 + len(measured)
    assert len(refused) == 1
    assert refused[0].startswith("not measured: model 'dense': ")
    assert "\n  openvino, nonsense, 1 instance, 1 thread, no batching\n" in refused[0]
    words = " ".join(ET.parse(picture).getroot().itertext())
    assert all(name in words for name in measured)
    assert "1 more could not be measured" in words
    checked = subprocess.run(
        [str(COMMAND), "check", str(repository), "--model-config-name=best"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stderr
    assert f"recommended: {done.report['recommended']}" in done.output


def test_a_label_file_outside_the_model_is_refused(command: Any, repository: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.txt").write_text("cat\ndog\nfox\n")
    labels = repository / "dense" / "words" / "labels.txt"
    labels.unlink()
    labels.symlink_to(tmp_path / "elsewhere.txt")
    done = command("analyze", "dense", f"--model-repository={repository}")
    assert done.code == 2
    assert "outside the model's directory" in done.errors
