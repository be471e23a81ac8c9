"""Execution thread of Python models: its choice, and the rules for models on request threads."""

from __future__ import annotations

import inspect
import math
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BadModelConfig, Cancelled, LoadError
from edge_server.plugins.python_models.execution_thread_choice import needs_own_thread

SCALE = """
import json
import logging
import os.path
import sys
import numpy as np
from os import environ
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.path = os.path.join(args["model_repository"], "table.json")
        self.factor = float(environ.get("NOT_SET_ANYWHERE", "2"))
        print("ready", file=sys.stderr)

    def execute(self, requests):
        answers = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "IN")
            array = tensor.as_numpy() * self.factor
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array.astype(np.float32))]))
        return answers
"""

TELLS = """
{imports}
import threading
import triton_python_backend_utils as pb_utils
import numpy as np

class TritonPythonModel:
    def initialize(self, args):
        self.first = threading.get_ident()

    def execute(self, requests):
        same = np.array([threading.get_ident(), self.first], np.float64)
        {body}
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", same)]) for request in requests]

    def finalize(self):
        assert threading.get_ident() == self.first
"""

CONFIG = """
input { name: "IN" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
"""

THREADS = """
input { name: "IN" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUT" data_type: TYPE_FP64 dims: [-1] }
"""


def parameter(value: str, name: str = "execution_thread") -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'


def add(models: Any, name: str, code: str, config: str = CONFIG) -> None:
    """Load a model without the tests' usual imports, of which some belong to threads."""
    models.write(name, "", config)
    (models.path / name / "1" / "model.py").write_text(textwrap.dedent(code))
    models.service.load_model(name)


def ask_here(models: Any, model: str, **more: Any) -> Response:
    """Return the answer, which the calling thread may compute."""
    came: list[Response] = []
    final = threading.Event()

    def take(response: Response) -> None:
        came.append(response)
        if response.is_final:
            final.set()

    inputs = {"IN": Tensor("IN", DType.FP32, np.ones(4, np.float32))}
    models.service.submit(Request(model, inputs, **more), take, hold_us=math.inf)
    assert final.wait(20), "no final answer came"
    return came[-1]


def executed_by(models: Any, model: str) -> tuple[int, int]:
    """Return the threads that executed and that initialized."""
    response = ask_here(models, model)
    assert response.error is None, response.error
    executed, initialized = response.outputs[0].array.tolist()
    return int(executed), int(initialized)


def doubt(tmp_path: Path, code: str, parameters: dict[str, str] | None = None, **spec: Any) -> str:
    file = tmp_path / "model.py"
    file.write_text(textwrap.dedent(code))

    def execute(requests: object) -> None: ...

    model = ModelSpec(
        name="m", backend="python", platform="", max_batch_size=0, inputs=(), outputs=(), instance_groups=(),
        parameters=parameters or {}, **spec,
    )  # fmt: skip
    return needs_own_thread(model, execute, file, lambda name: (tmp_path / f"{name}.py").exists())


def test_a_model_of_plain_arithmetic_runs_inline(python_core: Any) -> None:
    add(python_core, "m", SCALE)
    threads: list[int] = []

    def take(response: Response) -> None:
        assert response.error is None, response.error
        assert response.outputs[0].array.tolist() == [2.0, 4.0]
        threads.append(threading.get_ident())

    request = Request("m", {"IN": Tensor("IN", DType.FP32, np.array([1, 2], np.float32))})
    python_core.service.submit(request, take, hold_us=math.inf)
    assert threads == [threading.get_ident()]


def test_a_model_with_unknown_imports_runs_on_the_thread_that_initialized_it(python_core: Any) -> None:
    add(python_core, "m", TELLS.format(imports="", body=""), THREADS)
    executed, initialized = executed_by(python_core, "m")
    assert executed == initialized != threading.get_ident()


def test_an_sqlite_connection_of_initialize_works_in_execute(python_core: Any) -> None:
    code = """
        import sqlite3
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def initialize(self, args):
                self.base = sqlite3.connect(":memory:")

            def execute(self, requests):
                (row,) = self.base.execute("select 3.0")
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(row, np.float32))])]
    """
    add(python_core, "m", code)
    response = ask_here(python_core, "m")
    assert response.error is None, response.error
    assert response.outputs[0].array.tolist() == [3.0]


def test_the_configured_execution_thread_overrides_the_detected_one(python_core: Any) -> None:
    code = TELLS.format(imports="", body="")
    add(python_core, "caller", code, THREADS + parameter("caller"))
    add(python_core, "own", code, THREADS + parameter("own"))
    assert executed_by(python_core, "caller")[0] == threading.get_ident()
    assert executed_by(python_core, "own")[0] != threading.get_ident()


def test_a_model_instance_never_executes_concurrently(python_core: Any) -> None:
    code = TELLS.format(
        imports="inside = []",
        body="inside.append(1); assert len(inside) == 1; sum(range(2000)); inside.pop()",
    )
    add(python_core, "m", code, THREADS + parameter("caller"))
    errors: list[object] = []

    def work() -> None:
        for _ in range(50):
            errors.append(ask_here(python_core, "m").error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [None] * 300
    (counted,) = python_core.service.statistics("m", None)
    assert counted.success.count == 300


def test_a_model_has_its_own_context_on_any_thread(python_core: Any) -> None:
    code = TELLS.format(
        imports="import contextvars\nseen = contextvars.ContextVar('seen', default=0)",
        body="seen.set(seen.get() + 1); same = np.array([seen.get(), 0], np.float64)",
    )
    add(python_core, "m", code, THREADS + parameter("caller"))
    counts = [executed_by(python_core, "m")[0]]
    thread = threading.Thread(target=lambda: counts.append(executed_by(python_core, "m")[0]))
    thread.start()
    thread.join()
    assert counts == [1, 2]


CALLS_OTHERS = {
    "exec": 'pb_utils.InferenceRequest(model_name="m", requested_output_names=["OUT"], inputs=[]).exec()',
    "load_model": 'pb_utils.load_model("m")',
}


@pytest.mark.parametrize("what", CALLS_OTHERS)
def test_an_inline_model_that_calls_others_gets_an_error(python_core: Any, what: str) -> None:
    add(python_core, "m", TELLS.format(imports="", body=CALLS_OTHERS[what]), THREADS + parameter("caller"))
    response = ask_here(python_core, "m")
    assert response.error is not None
    assert 'execution_thread: "own"' in response.error.message


def test_a_model_that_calls_others_runs_on_its_own_thread(python_core: Any) -> None:
    add(python_core, "scale", SCALE)
    code = """
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                (request,) = requests
                inner = pb_utils.InferenceRequest(
                    model_name="scale", requested_output_names=["OUT"], inputs=request.inputs())
                return [inner.exec()]
    """
    add(python_core, "m", code)
    response = ask_here(python_core, "m")
    assert response.error is None, response.error
    assert response.outputs[0].array.tolist() == [2.0] * 4


def test_an_exception_of_an_inline_model_fails_only_its_request(python_core: Any) -> None:
    add(python_core, "m", TELLS.format(imports="import sys", body="sys.exit(3)"), THREADS + parameter("caller"))
    first = ask_here(python_core, "m")
    assert first.error is not None
    assert "SystemExit" in first.error.message
    assert ask_here(python_core, "m").error is not None


def test_a_request_can_be_cancelled_while_it_executes_inline(python_core: Any) -> None:
    code = TELLS.format(imports="import sys", body="entered, go = sys.gates; entered.set(); assert go.wait(20)")
    add(python_core, "m", code, THREADS + parameter("caller"))
    entered, go = threading.Event(), threading.Event()
    import sys

    sys.gates = (entered, go)  # type: ignore[attr-defined]
    answered = threading.Event()
    came: list[Response] = []

    def take(response: Response) -> None:
        came.append(response)
        answered.set()

    def submit() -> None:
        inputs = {"IN": Tensor("IN", DType.FP32, np.ones(1, np.float32))}
        python_core.service.submit(Request("m", inputs), take, hold_us=math.inf)

    try:
        thread = threading.Thread(target=submit)
        thread.start()
        assert entered.wait(20)
        (version,) = python_core.core.service.router.ready_versions("m")
        (ticket,) = version._scheduler._in_flight
        ticket.cancel()
        assert answered.wait(20), "the caller was not told while its thread executes"
        assert isinstance(came[0].error, Cancelled)
    finally:
        go.set()
        thread.join(20)
        del sys.gates  # type: ignore[attr-defined]
    assert len(came) == 1
    assert python_core.service.statistics("m", None)[0].failures["CANCELED"] == 1


def test_a_reload_waits_for_inline_execution_and_finalizes_on_the_models_thread(python_core: Any) -> None:
    code = TELLS.format(imports="", body="")
    for _ in range(3):
        add(python_core, "m", code, THREADS + parameter("caller"))
        assert executed_by(python_core, "m")[0] == threading.get_ident()
        code += "\n# changed\n"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import numpy, json, re, math, os.path", ""),
        ("import numpy as np\nfrom os.path import join\nfrom collections.abc import Mapping\nx = np.random.rand()", ""),
        ("import os\nx = os.environ", ""),
        ("import re\nx = re.compile('a')", ""),
        ("x = compile('a', '', 'exec')", "it uses compile"),
        ("import os\nos.sched_setaffinity(0, {1})", "it uses os in a way that is not known"),
        ("import os as o\nx = o\nx.fork()", "it uses o in a way that is not known"),
        ("from os import fork", "it imports os"),
        ("from os import *", "it imports files of its own"),
        ("import sys\nsys.settrace(None)", "it uses sys in a way that is not known"),
        ("import torch", "it imports torch"),
        ("import numpy, sqlite3", "it imports sqlite3"),
        ("def f():\n    import asyncio", "it imports asyncio"),
        ("from . import helper", "it imports files of its own"),
        ("import threading as json", "it imports threading"),
        ("import numpy as np\nnp.seterr(all='raise')", "it uses seterr"),
        ("from numpy import seterr", "it uses seterr"),
        ("import time\ntime.sleep(1)", "it uses sleep"),
        ("__import__('torch')", "it uses __import__"),
        ("eval('1')", "it uses eval"),
        ("request.exec()", "it uses exec"),
        ("async def execute(): pass", "it has coroutines"),
        ("def f(:", "its file cannot be read as a program"),
    ],
)
def test_unknown_code_is_not_run_inline(tmp_path: Path, code: str, reason: str) -> None:
    assert doubt(tmp_path, code) == reason


def test_a_models_own_file_is_not_taken_for_the_library_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("")
    assert doubt(tmp_path, "import numpy") == "it imports numpy"


def test_a_decoupled_model_always_has_its_own_thread(tmp_path: Path) -> None:
    assert doubt(tmp_path, "", is_decoupled=True) == "it is decoupled"
    with pytest.raises(BadModelConfig, match="model 'm': parameter execution_thread is caller, but it is decoupled"):
        doubt(tmp_path, "", {"execution_thread": "caller"}, is_decoupled=True)


def test_a_coroutine_always_has_its_own_thread(python_core: Any) -> None:
    code = "class TritonPythonModel:\n    async def execute(self, requests):\n        return []\n"
    with pytest.raises(LoadError, match="its execute is a coroutine"):
        add(python_core, "m", code, CONFIG + parameter("caller"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (parameter("mine"), "parameter execution_thread must be own, caller or auto, got 'mine'"),
        (parameter("caller") + parameter("process", "isolation"), "execution_thread is caller, but with isolation"),
    ],
)
def test_an_invalid_or_contradictory_execution_thread_fails_the_load(python_core: Any, more: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        add(python_core, "m", SCALE, CONFIG + more)


def test_the_example_of_this_file_can_run_inline(tmp_path: Path) -> None:
    assert inspect.cleandoc(SCALE)
    assert doubt(tmp_path, SCALE) == ""
