"""Fixtures for Python models: a serving core for them, and waiting."""

from __future__ import annotations

import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends.base import ModelFile
from edge_server.config.merge_settings import parse_serve
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.plugins.python_models import backend
from edge_server.plugins.python_models.auto_complete_config import auto_complete_in_process
from edge_server.process.composition_root import build
from edge_server.telemetry.log import LogSettings


class PythonCore:
    """The whole serving core over a repository of Python models, without front ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config = parse_serve([f"--model-repository={path}", "--model-control-mode=explicit"], {}).config
        self.core = build(config, LogSettings(config.log))
        self.service = self.core.service
        self.service.started()

    def write(self, name: str, code: str, config: str = "", version: int = 1) -> Path:
        """Write a model's files; without a configuration it is FP32 IN [-1] -> FP32 OUT [-1], no batching."""
        folder = self.path / name / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.py").write_text(PROLOGUE + textwrap.dedent(code))
        (self.path / name / "config.pbtxt").write_text('backend: "python"\n' + (config or ONE_TO_ONE))
        return folder

    def add(self, name: str, code: str, config: str = "") -> None:
        self.write(name, code, config)
        self.service.load_model(name)

    def ask(self, model: str, values: Any = (1.0,), **more: Any) -> list[Response]:
        """Return all responses to one request, the final one last."""
        responses, final, _ = self.start(model, values, **more)
        assert final.wait(20), "no final answer came"
        return responses

    def start(self, model: str, values: Any = (1.0,), **more: Any) -> tuple[list[Response], threading.Event, Any]:
        """Submit; return the list of responses, the event set after the final one, and the ticket."""
        array = np.array(values, dtype=np.float32)
        responses: list[Response] = []
        final = threading.Event()

        def take(response: Response) -> None:
            responses.append(response)
            if response.is_final:
                final.set()

        more.setdefault("inputs", {"IN": Tensor("IN", DType.FP32, array)})
        return responses, final, self.service.submit(Request(model, **more), take)

    def value(self, model: str, values: Any = (1.0,), **more: Any) -> list[float]:
        (response,) = self.ask(model, values, **more)
        assert response.error is None, response.error
        return response.outputs[0].array.tolist()

    def error(self, model: str, values: Any = (1.0,), **more: Any) -> str:
        response = self.ask(model, values, **more)[-1]
        assert response.error is not None
        return response.error.message


PROLOGUE = """\
import json, os, sys, threading, time, asyncio
import numpy as np
import triton_python_backend_utils as pb_utils

def answer(array, **more):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.asarray(array, dtype=np.float32))], **more)

def given(request):
    return pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()

"""

ONE_TO_ONE = """
input { name: "IN" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
"""


def complete_if_defined(file: ModelFile, config_json: str, complete_alone: Callable[..., str | None]) -> str | None:
    """Start no process for the configuration of a model that does not complete it, which costs as much as its load."""
    if b"auto_complete_config" not in file.path.read_bytes():
        return None
    return auto_complete_in_process(file, config_json, complete_alone)


@pytest.fixture
def python_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PythonCore]:
    monkeypatch.setattr(backend, "auto_complete_in_process", complete_if_defined)
    path = tmp_path / "models"
    path.mkdir()
    models = PythonCore(path)
    yield models
    models.core.close(5.0)
    left = [name for name in sys.modules if name.startswith("_edge_model_")]
    assert left == []


@pytest.fixture
def one_to_one() -> str:
    return ONE_TO_ONE


@pytest.fixture
def decoupled() -> str:
    return ONE_TO_ONE + "model_transaction_policy { decoupled: true }\n"
