"""Files that are not what their names say, found when a runtime or a model's own code opens them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from edge_server.errors import EdgeServerError

DATA = Path(__file__).parents[2] / "data"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
NAMED = "is a Git LFS pointer to the file of 12345 bytes, not the file itself: run 'git lfs pull' where it was cloned"
READS_WEIGHTS = """
    class TritonPythonModel:
        def initialize(self, args):
            with open(f"{args['model_repository']}/{args['model_version']}/weights.pt", "rb") as file:
                raise ValueError(f"no weights: {file.read(4)}")

        def execute(self, requests):
            return []
"""


def failure(house: Any, model: str) -> str:
    with pytest.raises(EdgeServerError) as caught:
        house.service.load_model(model)
    return caught.value.message


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_weights_that_a_python_model_reads_are_named_before_its_own_error(python_house: Any, isolation: str) -> None:
    folder = python_house.write("m", READS_WEIGHTS)
    with open(folder.parent / "config.pbtxt", "a") as config:
        config.write(f'parameters {{ key: "isolation" value {{ string_value: "{isolation}" }} }}')
    (folder / "page.html").write_text("<!doctype html><html></html>")
    (folder / "weights.pt").write_bytes(b"PK")
    assert ": model 'm' version 1, file 'model.py': ValueError: no weights: b'PK'" in failure(python_house, "m")
    (folder / "weights.pt").write_bytes(POINTER)
    message = failure(python_house, "m")
    assert f": model 'm' version 1, file 'weights.pt' {NAMED}; " in message
    assert "ValueError: no weights: b'vers'" in message


@pytest.mark.full
@pytest.mark.parametrize(
    ("runtime", "source", "file", "backend"),
    [
        ("onnxruntime_genai", "tiny_llm/onnx", "model.onnx", "onnxruntime_genai"),
        ("openvino_genai", "tiny_embeddings", "openvino_model.bin", "openvino_embeddings"),
    ],
)
def test_a_file_of_an_export_is_called_what_it_is(
    python_house: Any, runtime: str, source: str, file: str, backend: str
) -> None:
    pytest.importorskip(runtime)
    folder = python_house.path / "m"
    shutil.copytree(DATA / source, folder / "1", ignore=shutil.ignore_patterns("make.py"))
    (folder / "config.pbtxt").write_text(f'backend: "{backend}"')
    (folder / "1" / file).write_bytes(POINTER)
    assert f": model 'm' version 1, file '{file}' {NAMED};" in failure(python_house, "m")
