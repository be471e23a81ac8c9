"""Isolated Python models: faults of the child process, of its connection and of the system."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_server.backends.base import ModelFile, OpenJob
from edge_server.backends.isolation import isolated_session, model_process_client
from edge_server.backends.isolation.child_process import RequestsInProcess
from edge_server.backends.isolation.model_process_client import ModelProcess
from edge_server.backends.isolation.process_channel import Arena, Channel, MalformedMessage
from edge_server.core.device_tensor import DeviceArray, DeviceTensor
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import LoadError, Refusal, ServingFault, SessionLost
from edge_server.plugins.python_models.backend import open_alone

ISOLATED = """
input { name: "IN" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
parameters { key: "isolation" value { string_value: "process" } }
"""

PLAIN = """
class TritonPythonModel:
    def execute(self, requests):
        return [answer(given(request) * 2) for request in requests]
"""

OWN_TYPES = """
import enum
class Word(str, enum.Enum):
    OUT = "OUT"
class Number(enum.IntEnum):
    SEVEN = 7
class Half(float): pass
class Array(np.ndarray): pass
class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily(
            name="own_types_total", description=Word.OUT, kind=pb_utils.MetricFamily.COUNTER)
        self.metric = self.family.Metric(labels={Word.OUT: Word.OUT})
        self.metric.increment(Number.SEVEN)
    def execute(self, requests):
        array = np.asarray(given(requests[0]) * 2).view(Array)
        parameters = {Word.OUT: Word.OUT, "seven": Number.SEVEN, "half": Half(0.5), "yes": True}
        return [pb_utils.InferenceResponse([pb_utils.Tensor(Word.OUT, array)], parameters=parameters)]
"""

CALLER = """
import enum
class Word(str, enum.Enum):
    ID, TARGET, OUT, IN = "id", "target", "OUT", "IN"
class TritonPythonModel:
    def execute(self, requests):
        inner = pb_utils.InferenceRequest(
            request_id=Word.ID, model_name=Word.TARGET, requested_output_names=[Word.OUT],
            inputs=[pb_utils.Tensor(Word.IN, given(requests[0]))], parameters={Word.ID: Word.ID})
        response = inner.exec()
        if response.has_error():
            return [pb_utils.InferenceResponse(error=response.error())]
        return [answer(response.output_tensors()[0].as_numpy() + 1)]
"""

BABBLER = """
import socket
class TritonPythonModel:
    def execute(self, requests):
        if given(requests[0])[0] != 1:
            return [answer([os.getpid()]) for request in requests]
        for name in os.listdir("/proc/self/fd"):
            try:
                line = socket.socket(fileno=os.dup(int(name)))
                if line.family == socket.AF_UNIX:
                    line.sendall(b"nonsense" * 9)
            except OSError:
                pass
        return [answer([1]) for request in requests]
"""


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a connection, in one process."""
    lines, arenas = socket.socketpair(), (Arena(), Arena())
    others = [os.dup(arena.fd) for arena in reversed(arenas)]
    ends = [Channel(line, arena, other) for line, arena, other in zip(lines, arenas, others, strict=True)]
    yield ends[0], ends[1]
    for end in ends:
        end.cut()
        end.close()


def refusing(granted: int, module: Any) -> Any:
    """Return what a module finds in place of `threading` where the system grants no thread beyond so many."""

    class Thread(threading.Thread):
        def start(self) -> None:
            nonlocal granted
            if not granted:
                raise RuntimeError("can't start new thread")
            granted -= 1
            super().start()

    return SimpleNamespace(**{**vars(module.threading), "Thread": Thread})


def test_subclasses_of_str_int_and_ndarray_reach_the_server(python_core: Any) -> None:
    python_core.add("m", OWN_TYPES, ISOLATED)
    (response,) = python_core.ask("m", [1.5])
    assert response.error is None
    assert response.outputs[0].array.tolist() == [3.0]
    assert response.parameters == {"OUT": "OUT", "seven": 7, "half": 0.5, "yes": True}
    assert [type(value) for value in response.parameters.values()] == [str, int, float, bool]


def test_a_call_with_subclasses_of_str_reaches_the_other_model(python_core: Any) -> None:
    python_core.add("target", PLAIN)
    python_core.add("m", CALLER, ISOLATED)
    assert python_core.value("m", [4.0]) == [9.0]


def test_a_process_that_sends_invalid_data_fails_its_batch_and_is_replaced(python_core: Any) -> None:
    python_core.add("m", BABBLER, ISOLATED)
    (first,) = python_core.value("m", [2.0])
    (response,) = python_core.ask("m", [1.0])
    assert isinstance(response.error, SessionLost)
    (second,) = python_core.value("m", [2.0])
    assert second != first


def test_invalid_data_at_the_start_of_a_message_is_detected(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    one._socket.sendall(b"nonsense" * 4)
    with pytest.raises(MalformedMessage, match="nons"):
        other.receive()


def test_an_isolated_model_ignores_gpu_output_memory(python_core: Any) -> None:
    piece = SimpleNamespace(device_id=0, address=4096, byte_size=4, lock=threading.Lock())
    with pytest.raises(TypeError):
        pickle.dumps(piece)
    python_core.add("m", PLAIN, ISOLATED)
    assert python_core.value("m", [4.0], targets={"OUT": piece}) == [8.0]


class LostPiece:
    """Memory of a GPU that went away."""

    device_id, address, byte_size = 0, 4096, 4

    @property
    def view(self) -> memoryview:
        raise ServingFault("failed to read CUDA shared memory region 'r': unspecified launch failure")


def test_an_unreadable_input_fails_its_request_and_leaks_nothing(
    python_core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RequestsInProcess] = []
    monkeypatch.setattr(
        model_process_client, "RequestsInProcess", lambda arena: made.append(RequestsInProcess(arena)) or made[-1]
    )
    python_core.add("m", PLAIN, ISOLATED)
    lost = DeviceTensor("IN", DType.FP32, DeviceArray(DType.FP32.numpy, (1,), (LostPiece(),)))  # type: ignore[arg-type]
    assert "launch failure" in python_core.error("m", inputs={"IN": lost})
    assert made[-1].open_executions() == {}
    assert python_core.value("m", [4.0]) == [8.0]


def test_after_a_failed_write_freed_memory_is_reported_with_the_next_message(
    pair: tuple[Channel, Channel],
) -> None:
    one, other = pair
    offset = one.send(("array", np.zeros(1 << 20, np.uint8)))
    message, place = other.receive()
    assert place == offset
    del message
    other.free(place)
    with pytest.raises(TypeError):
        other.send(("lock", threading.Lock()))
    other.send(("next",))
    assert one.receive()[0] == ("next",)
    assert one.arena.used_bytes == 0


def no_pages(fd: int, offset: int, size: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_message_that_the_shared_memory_cannot_hold_is_refused_and_the_next_one_passes(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    other.send(("array", np.ones(1 << 18, np.uint8)))
    _, place = one.receive()
    one.free(place)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_pages)
        with pytest.raises(Refusal, match="no memory for 4096 KiB of tensors: No space left on device"):
            one.send(("array", np.ones(4 << 20, np.uint8)))
    assert one.arena.used_bytes == 0
    one.send(("array", np.ones(4 << 20, np.uint8)))
    message, _ = other.receive()
    assert message is not None
    assert message[1].sum() == 4 << 20
    assert other.arena.used_bytes == 0


def test_shared_memory_allocates_the_pages_that_it_writes_and_no_other() -> None:
    arena = Arena()
    arena.write([memoryview(bytes(3 << 20))])
    assert (arena.size, os.fstat(arena.fd).st_blocks * 512) == (4 << 20, 3 << 20)
    arena.close()


FULL = """
import errno
def no_pages(fd, offset, size):
    raise OSError(errno.ENOSPC, "No space left on device")
allocate = os.posix_fallocate
class TritonPythonModel:
    def execute(self, requests):
        is_full = given(requests[0])[0] == 1
        os.posix_fallocate = no_pages if is_full else allocate
        return [answer(np.full(1 << 22 if is_full else 1 << 20, os.getpid())) for request in requests]
"""


def test_outputs_that_the_shared_memory_cannot_hold_fail_their_request_and_the_process_goes_on(
    python_core: Any,
) -> None:
    python_core.add("m", FULL, ISOLATED)
    process_id = python_core.value("m", [2.0])[0]
    (response,) = python_core.ask("m", [1.0])
    assert isinstance(response.error, Refusal)
    assert python_core.value("m", [2.0])[0] == process_id


def test_a_call_whose_answer_the_shared_memory_cannot_hold_fails_and_the_process_goes_on(
    python_core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    python_core.add("target", PLAIN.replace("given(request) * 2", "np.full(1 << 20, 7)"))
    python_core.add("m", CALLER, ISOLATED)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_pages)
        assert "no memory for 4096 KiB of tensors" in python_core.error("m", [1.0])
    assert python_core.value("m", [1.0])[0] == 8.0


def test_a_blocked_writer_does_not_delay_the_reader(pair: tuple[Channel, Channel]) -> None:
    """Else both ends could wait for each other for ever, each with a message that the other does not read."""
    one, other = pair
    one.send(("array", np.zeros(1 << 20, np.uint8)))
    _, place = other.receive()
    sender = threading.Thread(target=other.send, args=(("much", b"x" * (8 << 20)),), daemon=True)
    sender.start()
    one._socket.recv(1, socket.MSG_PEEK)  # it is at it
    reader = threading.Thread(target=other.free, args=(place,), daemon=True)
    reader.start()
    reader.join(60)
    assert not reader.is_alive()
    assert sender.is_alive()
    assert one.receive()[0] == ("much", b"x" * (8 << 20))
    sender.join(60)


def test_inputs_do_not_change_until_execute_returns(
    python_core: Any, caplog: pytest.LogCaptureFixture, eventually: Callable[[Callable[[], bool]], bool]
) -> None:
    """Also those of requests that have had their last answer by then."""
    python_core.add("filler", PLAIN.replace("given(request) * 2", "np.full(1 << 16, 7)"))
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                sender = requests[0].get_response_sender()
                sender.send(answer([1]))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                call = pb_utils.InferenceRequest(model_name="filler", requested_output_names=["OUT"],
                                                 inputs=[pb_utils.Tensor("IN", np.zeros(1, np.float32))])
                kept = [call.exec() for _ in range(3)]
                seen = given(requests[0])
                pb_utils.Logger.log_error(f"seen {seen.min()} {seen.max()}")
        """,
        ISOLATED + "model_transaction_policy { decoupled: true }\n",
    )  # fmt: skip
    python_core.ask("m", np.full(1 << 16, 3.0))
    assert eventually(lambda: "seen" in caplog.text)
    assert "seen 3.0 3.0" in caplog.text


@pytest.fixture
def model_job(tmp_path: Path, job: Callable[..., OpenJob], python_core: Any) -> OpenJob:
    folder = python_core.write("m", PLAIN, ISOLATED)
    return job(ModelFile(folder / "model.py", folder.parent, 1))


def test_a_process_that_stopped_reading_is_killed_on_close(model_job: OpenJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_process_client, "EXIT_TIMEOUT_S", 0.2)
    one = ModelProcess(model_job, open_alone, lambda lost, why: None)
    one.open()
    os.kill(one.pid, signal.SIGSTOP)
    request = Request("m", {"IN": Tensor("IN", DType.BYTES, np.array([b"x" * (8 << 20)], dtype=object))})
    failures: list[Any] = []
    execution: Any = SimpleNamespace(request=request, fail=failures.append, is_cancelled=lambda: False)
    sender = threading.Thread(target=one.execute, args=([execution],), daemon=True)
    sender.start()
    while not one._child.channel._send_lock.locked():  # until it has started to send data that is not read
        pass
    closer = threading.Thread(target=one.close, daemon=True)
    closer.start()
    closer.join(60)
    assert not closer.is_alive()
    sender.join(60)
    assert [type(failure) for failure in failures] == [SessionLost]


def test_without_available_threads_the_process_is_ended_and_the_load_fails(
    model_job: OpenJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    child = model_process_client.ModelChildProcess

    class Noted(child):  # type: ignore[misc, valid-type]
        def __init__(self, file: ModelFile) -> None:
            super().__init__(file)
            started.append(self.pid)

    monkeypatch.setattr(model_process_client, "ModelChildProcess", Noted)
    for granted in (0, 1):
        with monkeypatch.context() as patched:
            patched.setattr(model_process_client, "threading", refusing(granted, model_process_client))
            with pytest.raises(LoadError, match="can't start new thread"):
                ModelProcess(model_job, open_alone, lambda lost, why: None)
    assert len(started) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


def test_without_an_available_thread_a_crashed_process_restarts_later(
    python_core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                if given(requests[0])[0] == -1: os._exit(7)
                return [answer(given(request) * 2) for request in requests]
        """,
        ISOLATED,
    )
    with monkeypatch.context() as patched:
        patched.setattr(isolated_session, "threading", refusing(0, isolated_session))
        (response,) = python_core.ask("m", [-1.0])
        assert isinstance(response.error, SessionLost)
        assert "started again" in python_core.error("m", [2.0])
    assert python_core.value("m", [2.0]) == [4.0]
