"""Files whose content does not match their names, found when a model's own code opens them."""

from __future__ import annotations

from typing import Any

import pytest

from edge_server.errors import EdgeServerError

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


def failure(models: Any, model: str) -> str:
    with pytest.raises(EdgeServerError) as caught:
        models.service.load_model(model)
    return caught.value.message


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_weights_that_a_python_model_reads_are_named_before_its_own_error(python_core: Any, isolation: str) -> None:
    folder = python_core.write("m", READS_WEIGHTS)
    with open(folder.parent / "config.pbtxt", "a") as config:
        config.write(f'parameters {{ key: "isolation" value {{ string_value: "{isolation}" }} }}')
    (folder / "page.html").write_text("<!doctype html><html></html>")
    (folder / "weights.pt").write_bytes(b"PK")
    assert ": model 'm' version 1, file 'model.py': ValueError: no weights: b'PK'" in failure(python_core, "m")
    (folder / "weights.pt").write_bytes(POINTER)
    message = failure(python_core, "m")
    assert f": model 'm' version 1, file 'weights.pt' {NAMED}; " in message
    assert "ValueError: no weights: b'vers'" in message
