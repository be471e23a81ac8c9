"""The section of docs/models.md about a scikit-learn model: its export, the file in a repository, and the request."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import COMMAND, clean_environment

PAGE = Path(__file__).parents[2] / "docs/models.md"


@pytest.mark.full
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("skl2onnx", "sklearn")),
    reason="needs skl2onnx and scikit-learn, of the extra test-all",
)
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")
def test_the_classifier_of_the_page_is_exported_served_and_asked_as_written(serve: Any, tmp_path: Path) -> None:
    section = PAGE.read_text().partition("\n## A scikit-learn model\n")[2].partition("\n## ")[0]
    export, add_and_serve, request = re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)
    add = add_and_serve.splitlines()[0].replace("edge-server", str(COMMAND))

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(sys.executable, "-c", export)
    run("bash", "-c", add)
    with serve(tmp_path / "model_repository") as server:
        answer = json.loads(run("bash", "-c", request.replace("127.0.0.1:8000", server.http)))
    outputs = {output["name"]: output for output in answer["outputs"]}
    assert outputs["label"]["data"] == [0, 2]
    assert outputs["probabilities"]["shape"] == [2, 3]
