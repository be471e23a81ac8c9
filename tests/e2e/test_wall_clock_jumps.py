"""A wall clock that is set while the server runs: nothing hangs, and no deadline uses the wall clock.

libfaketime moves the server's wall clock alone: its monotonic clock goes on, and files keep the times that the kernel
wrote (NO_FAKE_STAT), as where a real clock is set. It does not show one thing: a wait of the C library until a moment
of the wall clock, which libfaketime turns into a duration when the wait begins.
"""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from edge_server.client import FrameStream
from tests.kit.eventually import eventually
from tests.kit.infer_input import infer_input
from tests.kit.model_folder import parameters
from tests.kit.models import REPEAT, identity_config
from tests.kit.server import serve

pytestmark = pytest.mark.skipif(
    "EDGE_TEST_FAKETIME" not in os.environ, reason="there is no libfaketime; tests/e2e/fetch_faketime.sh brings one"
)

HOUR, DAY = 3600, 86_400
JUMPS_S = (HOUR, -HOUR, DAY, -DAY)
"""The first jump of a test. The second goes back."""

EACH_JUMP = pytest.mark.parametrize("jump_s", [pytest.param(jump_s, marks=pytest.mark.long) for jump_s in JUMPS_S])

LONG_US, SHORT_US = 900_000_000, 1_000_000
"""Longer than a test, shorter than any jump; and so short that a test waits for it."""


SLEEP = """
import threading, time
time.sleep = lambda seconds: threading.Event().wait(seconds)
"""
"""The server's sleep: libfaketime 0.9.10 fails to sleep until a monotonic time, as Python does since 3.11."""


class WallClock:
    """The wall clock of one server."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        (folder / "python").mkdir()
        (folder / "python" / "sitecustomize.py").write_text(SLEEP)
        self.environment = {
            "PYTHONPATH": str(folder / "python"),
            "LD_PRELOAD": os.environ.get("EDGE_TEST_FAKETIME", ""),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "NO_FAKE_STAT": "1",
        }
        self.jump(0)

    def jump(self, seconds: int) -> None:
        """Set the clock to so many seconds beside the true time."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.rename(self._file)

    @staticmethod
    def seconds_ahead(server: Any) -> float:
        """Return the error of the server's clock."""
        connection = server.connection()
        connection.request("GET", "/v2/health/live")
        reply = connection.getresponse()
        reply.read()
        connection.close()
        return parsedate_to_datetime(reply.headers["Date"]).timestamp() - time.time()


@pytest.fixture
def clock(tmp_path: Path) -> WallClock:
    return WallClock(tmp_path)


@pytest.fixture
def set_clock(clock: WallClock) -> Callable[[Any, int], None]:
    """`set_clock(server, seconds)`, and see it arrive."""

    def set_and_see(server: Any, seconds: int) -> None:
        clock.jump(seconds)
        assert abs(clock.seconds_ahead(server) - seconds) < 30

    return set_and_see


def body(value: int = 7, **parameters: Any) -> dict[str, Any]:
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [value]}
    return {"inputs": [tensor], "parameters": parameters}


def pending(server: Any, model: str) -> int:
    return int(server.read_counters(model)["nv_inference_pending_request_count"])


def state_of(server: Any, model: str) -> str:
    return str(server.index().get(model, {}).get("state", ""))


@pytest.mark.parametrize(
    "jump_s",
    [pytest.param(jump_s, marks=pytest.mark.soak if jump_s == HOUR else pytest.mark.long) for jump_s in JUMPS_S],
)
def test_batches_deadlines_and_the_cache_do_not_use_the_wall_clock(
    repository: Any, clock: WallClock, set_clock: Any, jump_s: int
) -> None:
    def batching(delay_us: int) -> str:
        return f"dynamic_batching {{ preferred_batch_size: [2] max_queue_delay_microseconds: {delay_us} }}"

    def timed_out_after(timeout_us: int) -> str:
        policy = f"timeout_action: REJECT default_timeout_microseconds: {timeout_us}"
        return parameters(execute_delay_ms=3000) + f"dynamic_batching {{ default_queue_policy {{ {policy} }} }}"

    repository.add("pair", identity_config(more=batching(LONG_US)))
    repository.add("alone", identity_config(more=batching(SHORT_US)))
    repository.add("patient", identity_config(batch=1, more=timed_out_after(LONG_US)))
    repository.add("hasty", identity_config(batch=1, more=timed_out_after(SHORT_US)))
    repository.add("cached", identity_config(more="response_cache { enable: true }"))
    flags = ("--cache-config=local,size=1000000", "--governor=false")
    with serve(repository.path, *flags, environment=clock.environment) as server, ThreadPoolExecutor(8) as pool:
        for here, there in ((0, jump_s), (jump_s, 0)):
            set_clock(server, here)
            runs = server.statistics("pair")["execution_count"]
            assert server.infer("cached", body(here))[0] == 200
            hits = server.read_counters("cached")["nv_cache_num_hits_per_model"]
            first = pool.submit(server.infer, "pair", body())
            alone = pool.submit(server.infer, "alone", body())
            waiting = [pool.submit(server.infer, model, body()) for model in ("patient", "hasty") for _ in range(2)]
            # On a slow machine the hasty one is over by now.
            assert eventually(lambda: [pending(server, name) for name in ("pair", "patient")] == [1, 1])
            set_clock(server, there)
            assert server.statistics("pair")["execution_count"] == runs
            assert not first.done()
            assert [server.infer("pair", body())[0], first.result(60)[0]] == [200, 200]
            assert server.statistics("pair")["execution_count"] == runs + 1
            assert alone.result(60)[0] == 200
            assert sorted(item.result(60)[0] for item in waiting) == [200, 200, 200, 503]
            assert server.infer("cached", body(here))[0] == 200
            assert server.read_counters("cached")["nv_cache_num_hits_per_model"] == hits + 1
        server.stop_cleanly()


COUNTER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.counts = {}

    def execute(self, requests):
        answers = []
        for request in requests:
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self.counts[request.correlation_id()] = 0
            self.counts[request.correlation_id()] += 1
            count = np.array([[self.counts[request.correlation_id()]]], np.int32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", count)]))
        return answers
"""


def counter_config(idle_us: int) -> str:
    return (
        'backend: "python" max_batch_size: 4 input { name: "INPUT0" data_type: TYPE_INT32 dims: [1] } '
        'output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [1] } sequence_batching '
        f"{{ max_sequence_idle_microseconds: {idle_us} oldest {{ max_candidate_sequences: 4 }} }}"
    )


CAMERA = """
backend: "onnxruntime"
max_batch_size: 4
input { name: "image" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [3, 32, 32] }
output { name: "scores" data_type: TYPE_FP32 dims: [10] }
parameters { key: "image_fit" value { string_value: "stretch" } }
"""


@EACH_JUMP
def test_sequences_streams_and_idle_models_do_not_use_the_wall_clock(
    repository: Any, conv: Any, clock: WallClock, set_clock: Any, jump_s: int
) -> None:
    for name, idle_us in (("counter", LONG_US), ("forgetful", SHORT_US)):
        (repository.add(name, counter_config(idle_us)) / "1" / "model.py").write_text(COUNTER)
    repository.add("repeat", REPEAT)
    repository.add("camera", CAMERA, model=conv)
    (repository.add("talker", 'backend: "scripted_llm"') / "1" / "script.json").write_text(
        json.dumps({"answers": {"hello": "Hello!"}})
    )
    for name, idle_s in (("kept", LONG_US // 1_000_000), ("forgotten", 1)):
        repository.add(name, identity_config(more=parameters(idle_unload_s=idle_s)))

    def count(model: str, **flags: Any) -> int | None:
        status, answer = server.infer(model, body(sequence_id=5, **flags))
        return answer["outputs"][0]["data"][0] if status == 200 else None

    answers: queue.Queue[Any] = queue.Queue()
    tensors = []
    for name, values, kind in (
        ("IN", [3, 4, 5], "INT32"),
        ("DELAY", [0, 2000, 500], "UINT32"),
        ("WAIT", [0], "UINT32"),
    ):
        tensors.append(infer_input(grpcclient, name, np.array(values, np.dtype(kind.lower())), kind))
    picture = np.full((32, 32, 3), 90, np.uint8)
    chat = {"model": "talker", "messages": [{"role": "user", "content": "hello"}], "keep_alive": "15m"}

    with (
        serve(repository.path, "--governor=false", environment=clock.environment) as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
        FrameStream(server.grpc, "camera", keeps_all=True) as camera,
    ):
        client.start_stream(lambda result, error: answers.put((result, error)))
        results = camera.results()
        for here, there in ((0, jump_s), (jump_s, 0)):
            set_clock(server, here)
            assert [count(name, sequence_start=True) for name in ("counter", "forgetful")] == [1, 1]
            assert [server.infer(name, body())[0] for name in ("kept", "forgotten")] == [200, 200]
            assert server.ask("/v1/chat/completions", chat)[0] == 200
            camera.send(picture)
            assert not next(results).error
            client.async_stream_infer("repeat", tensors)
            assert answers.get(timeout=60)[1] is None
            set_clock(server, there)
            assert [answers.get(timeout=60)[0].as_numpy("OUT").tolist() for _ in range(2)] == [[4], [5]]
            camera.send(picture)
            assert not next(results).error
            assert count("counter") == 2
            assert eventually(lambda: state_of(server, "forgotten") == "UNAVAILABLE")
            assert [state_of(server, name) for name in ("kept", "talker")] == ["READY", "READY"]
            # Each try that still meets the sequence keeps it alive.
            pause_s = SHORT_US / 1e6
            while count("forgetful") is not None:
                pause_s *= 2
                time.sleep(pause_s)
                assert pause_s < 30
            assert count("counter", sequence_end=True) == 3
        client.stop_stream()
        server.stop_cleanly()


@EACH_JUMP
def test_loads_and_upload_detection_do_not_use_the_wall_clock(
    repository: Any, clock: WallClock, set_clock: Any, jump_s: int
) -> None:
    whole = repository.add_sub("whole", 'backend: "onnxruntime"') / "1" / "model.onnx"
    content = whole.read_bytes()
    slow = parameters(creation_delay_sec=3)
    flags = ("--governor=false", "--repository-poll-secs=0.3")
    with serve(repository.path, *flags, environment=clock.environment) as server:
        loads = server.read_counters("whole")["edge_model_loads_total"]
        assert loads == 1
        for here, there in ((0, jump_s), (jump_s, 0)):
            set_clock(server, here)
            before = server.log().count("half")
            repository.add(f"slow{here}", identity_config(more=slow))
            folder = repository.path / f"half{here}" / "1"
            assert eventually(lambda name=f"slow{here}": state_of(server, name) == "LOADING")
            # As rsync writes: a hidden neighbour, which takes the name when it is complete.
            hidden = folder / ".model.onnx.AbC123"
            folder.mkdir(parents=True)
            (folder / "LICENCE").write_text("the first file of the version")
            (folder.parent / "config.pbtxt").write_text('backend: "onnxruntime"')
            hidden.write_bytes(content[: len(content) // 2])
            set_clock(server, there)
            assert eventually(lambda name=f"slow{here}": state_of(server, name) == "READY")
            # Longer than files must rest, and some looks more.
            time.sleep(2)
            assert server.log().count("half") == before, server.log()
            hidden.write_bytes(content)
            hidden.rename(folder / "model.onnx")
            assert eventually(lambda name=f"half{here}": state_of(server, name) == "READY")
            assert [server.infer(f"slow{here}", body())[0], state_of(server, "whole")] == [200, "READY"]
        assert server.read_counters("whole")["edge_model_loads_total"] == loads, "the jump changed no file"
        server.stop_cleanly()


@EACH_JUMP
@pytest.mark.parametrize(("exit_timeout_s", "is_answered"), [(900, True), (1, False)])
def test_the_drain_does_not_use_the_wall_clock(
    repository: Any, clock: WallClock, jump_s: int, exit_timeout_s: int, is_answered: bool
) -> None:
    repository.add(
        "slow", identity_config(batch=1, more=parameters(execute_delay_ms=2000 if is_answered else 3_600_000))
    )
    flags = (f"--exit-timeout-secs={exit_timeout_s}", "--governor=false")
    with serve(repository.path, *flags, environment=clock.environment) as server, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(server.infer, "slow", body()) for _ in range(2)]
        assert eventually(lambda: pending(server, "slow") == 1)
        server.process.terminate()
        assert eventually(lambda: "draining 2 request(s)" in server.log())
        clock.jump(jump_s)
        server.process.wait(60)
        answers = [None if item.exception(60) else item.result()[0] for item in asked]
        assert answers == [200, 200] if is_answered else 200 not in answers
