"""Processes forked from one that runs a server: they get an error at once, and the server is not disturbed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.model_folder import model_folder, parameters

ECHO = (
    'backend: "identity" max_batch_size: 8 '
    'input { name: "INPUT0" data_type: TYPE_FP32 dims: [-1] } '
    'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [-1] }'
)
REPEAT = (
    'backend: "repeat" max_batch_size: 0 input [ { name: "IN" data_type: TYPE_INT32 dims: [-1] }, '
    '{ name: "DELAY" data_type: TYPE_UINT32 dims: [-1] }, { name: "WAIT" data_type: TYPE_UINT32 dims: [1] } ] '
    'output [ { name: "OUT" data_type: TYPE_INT32 dims: [1] }, { name: "IDX" data_type: TYPE_UINT32 dims: [1] } ] '
    "model_transaction_policy { decoupled: true }"
)
FORKER = """
import json
import multiprocessing
import numpy as np
import triton_python_backend_utils as pb_utils

def try_calls(results):
    messages = []
    tensor = pb_utils.Tensor("INPUT0", np.ones((1, 1), np.float32))
    request = pb_utils.InferenceRequest(model_name="echo", requested_output_names=["OUTPUT0"], inputs=[tensor])
    for call in (request.exec, lambda: pb_utils.is_model_ready("echo"), lambda: pb_utils.load_model("echo")):
        try:
            messages.append(f"no error: {call()}")
        except pb_utils.TritonModelException as error:
            messages.append(str(error))
    pb_utils.Logger.log_warn("a line of the forked process")
    results.put(messages)

class TritonPythonModel:
    def execute(self, requests):
        fork = multiprocessing.get_context("fork")
        results = fork.SimpleQueue()
        child = fork.Process(target=try_calls, args=(results,))
        child.start()
        messages = results.get()
        child.join()
        tensor = pb_utils.Tensor("INPUT0", np.ones((1, 1), np.float32))
        own = pb_utils.InferenceRequest(model_name="echo", requested_output_names=["OUTPUT0"], inputs=[tensor]).exec()
        assert not own.has_error()
        text = np.array([json.dumps([child.exitcode, *messages]).encode()], object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", text)]) for _ in requests]
"""
FORKER_CONFIG = (
    'backend: "python" input { name: "X" data_type: TYPE_FP32 dims: [1] } '
    'output { name: "TEXT" data_type: TYPE_STRING dims: [1] } '
)
PROGRAM = """
import asyncio, json, multiprocessing, os, sys
import numpy as np
import edge_server
from edge_server.errors import NotReady

X = {"INPUT0": np.ones((1, 3), np.float32)}
# Two responses: one at once, the other after the child has ended.
TWO = {"IN": [1, 2], "DELAY": [0, 30_000], "WAIT": [0]}

def own_server(models, results):
    with edge_server.Server(models) as own:
        results.put(own.infer("echo", X).outputs["OUTPUT0"].tolist())

def main():
    server = edge_server.Server(sys.argv[1], http_port=0).start()
    loop = asyncio.new_event_loop()
    made = server.stream("echo", X)
    started, started_async = server.stream("repeat", TWO), server.astream("repeat", TWO)
    next(started)
    loop.run_until_complete(anext(started_async))
    echo = lambda: server.infer("echo", X, deadline_ms=60_000).outputs["OUTPUT0"].tolist()

    async def collect(items):
        return [item async for item in items]

    async def take(items):
        return await asyncio.wait_for(anext(items), 5)

    async def nothing():
        return
        yield b""

    in_child = {
        "start": server.start,
        "infer": echo,
        "ainfer": lambda: asyncio.run(server.ainfer("echo", X)),
        "stream": lambda: list(server.stream("echo", X)),
        "a stream made before": lambda: next(made),
        "a stream begun before": lambda: next(started),
        "astream": lambda: asyncio.run(collect(server.astream("echo", X))),
        "an astream begun before": lambda: asyncio.run(take(started_async)),
        "call": lambda: server.call("ServerLive", b""),
        "acall": lambda: asyncio.run(server.acall("ServerLive", b"")),
        "acall_stream": lambda: asyncio.run(collect(server.acall_stream("ModelStreamInfer", nothing()))),
        "models": server.models,
        "load": lambda: server.load("echo"),
        "unload": lambda: server.unload("echo"),
        "metadata": server.metadata,
        "metadata of a model": lambda: server.metadata("echo"),
        "statistics": server.statistics,
        "metrics": server.metrics,
        "metric_families": server.metric_families,
        "enter": server.__enter__,
        "aenter": lambda: asyncio.run(server.__aenter__()),
    }
    before = echo()
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    spawned = context.Process(target=own_server, args=(sys.argv[1], results))
    spawned.start()
    assert results.get() == before
    spawned.join()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        found = {}
        for name, call in in_child.items():
            try:
                found[name] = f"no error: {call()}"
            except NotReady as error:
                found[name] = error.message
        found["states"] = [server.live(), server.ready(), server.http_port]
        server.stop()
        server.__exit__(None, None, None)
        os.write(writer, json.dumps(found).encode())
        os.close(writer)
        sys.exit(0)  # with all that Python does at its end
    os.close(writer)
    found = json.loads(os.fdopen(reader, "rb").read())
    _, status = os.waitpid(child, 0)
    assert echo() == before
    started.close()
    loop.run_until_complete(started_async.aclose())
    loop.close()
    print(json.dumps({"parent": os.getpid(), "child": child, "status": status, "found": found}))
    server.stop()
    assert not server.live()

if __name__ == "__main__":
    main()
"""
LATER = """
import multiprocessing, sys
import numpy as np
import edge_server

server = edge_server.Server(sys.argv[1])  # made here, started in each process

def work(results):
    with server:
        results.put(server.infer("echo", {"INPUT0": np.ones((1, 2), np.float32)}).outputs["OUTPUT0"].tolist())

if __name__ == "__main__":
    for method, count in (("fork", 2), ("spawn", 1), ("forkserver", 1)):
        context = multiprocessing.get_context(method)
        results = context.SimpleQueue()
        children = [context.Process(target=work, args=(results,)) for _ in range(count)]
        for child in children:
            child.start()
        print([results.get() for _ in children])
        for child in children:
            child.join()
            assert child.exitcode == 0, (method, child.exitcode)
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    model_folder(folder / "echo", ECHO)
    model_folder(folder / "repeat", REPEAT)
    return folder


def run(folder: Path, program: str, models: Path) -> str:
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(folder / "program.py"), str(models)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_each_method_raises_in_a_forked_child_whose_exit_leaves_the_server_running(
    tmp_path: Path, models: Path
) -> None:
    told = json.loads(run(tmp_path, PROGRAM, models))
    assert told["status"] == 0
    assert told["found"].pop("states") == [False, False, None]
    assert told["found"] == dict.fromkeys(
        told["found"],
        f"the server runs in process {told['parent']}, from which this process {told['child']} was forked: start the "
        "server after the fork, in each process that needs one",
    )


def test_a_process_that_a_python_model_forks_gets_an_error_from_each_call(tmp_path: Path, models: Path) -> None:
    isolated = parameters(isolation="process")
    for name, isolation in (("forker", ""), ("isolated", isolated)):
        model_folder(models / name, FORKER_CONFIG + isolation, {"1/model.py": FORKER})
    program = """
import sys
import numpy as np
import edge_server

with edge_server.Server(sys.argv[1]) as server:
    for name in ("forker", "isolated") * 2:
        print(server.infer(name, {"X": np.zeros(1, np.float32)}).outputs["TEXT"][0].decode())
"""
    lines = run(tmp_path, program, models).splitlines()
    for name, line in zip(("forker", "isolated") * 2, lines, strict=True):
        exit_code, *messages = json.loads(line)
        assert exit_code == 0
        assert len(messages) == 3
        for message in messages:
            assert f"model '{name}' runs in process " in message
            assert "was forked: " in message
            assert message.endswith(" only from the process of the model")


def test_a_server_that_is_started_after_the_fork_or_in_a_spawned_process_serves(tmp_path: Path, models: Path) -> None:
    one, two = "[[[1.0, 1.0]]]", "[[[1.0, 1.0]], [[1.0, 1.0]]]"
    assert run(tmp_path, LATER, models).splitlines() == [two, one, one]
