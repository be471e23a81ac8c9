"""Python models in child processes: the same behaviour, and crashes that fail one batch."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_server.backends.isolation import child_process
from edge_server.backends.isolation.process_channel import Arena, ArenaReader
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import LoadError, Refusal, SessionLost

TENSORS = """
input { name: "IN" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
"""
PROCESS = 'parameters { key: "isolation" value { string_value: "process" } }\n'
ISOLATED = TENSORS + PROCESS

CALLER = """
class TritonPythonModel:
    def execute(self, requests):
        inner = pb_utils.InferenceRequest(
            model_name=TARGET, requested_output_names=["OUT"], inputs=requests[0].inputs())
        response = inner.exec()
        if response.has_error():
            return [pb_utils.InferenceResponse(error=response.error())]
        return [answer(response.output_tensors()[0].as_numpy() + 1)]
"""

CRASHER = """
import ctypes
class TritonPythonModel:
    def execute(self, requests):
        value = given(requests[0])[0]
        if value == -1: os._exit(7)
        if value == -2: ctypes.string_at(0)
        if value == -3: os.kill(os.getpid(), 9)
        return [answer([os.getpid()]) for request in requests]
"""


def test_an_isolated_model_runs_in_another_process_with_equal_outputs(python_core: Any) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def initialize(self, args):
                pb_utils.Logger.log_warn("hello from " + args["model_instance_name"])
            def execute(self, requests):
                return [answer(given(r) * 2, parameters={"pid": os.getpid(), "said": r.parameters()}) for r in requests]
        """,
        ISOLATED,
    )
    for size in (1, 3, 50_000, 3_000_000, 10):
        (response,) = python_core.ask("m", np.arange(size), parameters={"a": 1})
        np.testing.assert_array_equal(response.outputs[0].array, np.arange(size, dtype=np.float32) * 2)
        assert response.parameters["pid"] != os.getpid()
        assert response.parameters["said"] == '{"a": 1}'


def test_strings_and_errors_pass_between_the_processes(python_core: Any) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                words = requests[0].inputs()[0].as_numpy()
                if words[0] == b"bad":
                    error = pb_utils.TritonError("so", pb_utils.TritonError.NOT_FOUND)
                    return [pb_utils.InferenceResponse(error=error)]
                if words[0] == b"worse":
                    raise ValueError("why")
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", words[::-1])])]
        """,
        PROCESS + TENSORS.replace("TYPE_FP32", "TYPE_STRING"),
    )

    def ask(*words: bytes) -> Any:
        array = np.array(words, dtype=object)
        return python_core.ask("m", inputs={"IN": Tensor("IN", DType.BYTES, array)})[-1]

    assert ask(b"a", b"b").outputs[0].array.tolist() == [b"b", b"a"]
    assert (ask(b"bad").error.message, ask(b"bad").error.code.value) == ("so", "NOT_FOUND")
    assert "ValueError: why" in ask(b"worse").error.message


# A killed process ends as one that crashes does: by a signal.
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (-1.0, "ended with exit code 7"),
        (-2.0, "signal SIGSEGV"),
        pytest.param(-3.0, "signal SIGKILL", marks=pytest.mark.full),
    ],
)
def test_a_crash_fails_one_batch_with_its_reason_and_the_process_restarts(
    python_core: Any, value: float, expected: str
) -> None:
    python_core.add("m", CRASHER, ISOLATED)
    (first,) = python_core.value("m")
    (response,) = python_core.ask("m", [value])
    assert isinstance(response.error, SessionLost)
    assert expected in response.error.message
    (second,) = python_core.value("m")
    assert second != first


def test_restarts_after_repeated_crashes_are_delayed_exponentially(python_core: Any) -> None:
    python_core.add("m", CRASHER, ISOLATED)
    # The first restart comes at once, the second after half a second: there is time to be refused, or the third has it.
    errors = [python_core.ask("m", [-1.0])[0].error for _ in range(2)]
    while not isinstance(errors[-1], Refusal) and len(errors) < 8:
        errors.append(python_core.ask("m", [-1.0])[0].error)
    *lost, error = errors
    assert all(isinstance(one, SessionLost) for one in lost)
    assert isinstance(error, Refusal)
    assert len(lost) >= 2
    assert 0 < error.retry_after_s <= 0.5 * 2 ** (len(lost) - 2)
    end = time.monotonic() + 20
    while (response := python_core.ask("m")[0]).error is not None and time.monotonic() < end:
        time.sleep(0.05)
    assert response.error is None


@contextlib.contextmanager
def limited(what: int, soft: int) -> Iterator[None]:
    """Let this process have no more of a resource than that."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def test_a_failed_process_start_is_retried(python_core: Any, eventually: Callable[[Callable[[], bool]], bool]) -> None:
    python_core.add("m", CRASHER, ISOLATED)
    said: list[str] = []

    def refused() -> bool:
        said.append(python_core.error("m"))
        return "cannot be started: [Errno 24] Too many open files" in said[-1]

    with limited(resource.RLIMIT_NOFILE, 3):
        assert isinstance(python_core.ask("m", [-1.0])[0].error, SessionLost)
        assert eventually(refused), said
    assert eventually(lambda: python_core.ask("m")[0].error is None)


def test_a_batch_that_exceeds_shared_memory_is_refused_and_its_process_goes_on(python_core: Any) -> None:
    python_core.add("m", CRASHER, ISOLATED)
    (first,) = python_core.value("m")
    with limited(resource.RLIMIT_FSIZE, 2 << 20):
        error = python_core.ask("m", np.ones(3 << 20))[0].error
    assert isinstance(error, Refusal)
    assert "no memory for 12288 KiB of tensors: File too large" in error.message
    (second,) = python_core.value("m")
    assert second == first


def test_other_instances_continue_while_one_crashes(python_core: Any) -> None:
    python_core.add("m", CRASHER, ISOLATED + "instance_group { count: 2 }")
    started = [python_core.start("m", [-1.0 if number == 3 else 1.0]) for number in range(10)]
    assert all(final.wait(20) for _, final, _ in started)
    assert [number for number, (responses, _, _) in enumerate(started) if responses[0].error] == [3]


def test_processes_and_their_shared_memory_are_removed(
    python_core: Any, caplog: pytest.LogCaptureFixture, eventually: Callable[[Callable[[], bool]], bool]
) -> None:
    def held() -> tuple[int, int]:
        """Return how many files are open, and how many mappings of such memory there are."""
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("/memfd:edge-isolated-model")

    code = """
    class TritonPythonModel:
        def execute(self, requests):
            return [answer([os.getpid()]) for request in requests]
        def finalize(self):
            pb_utils.Logger.log_warn("finalized in %d" % os.getpid())
    """
    python_core.add("m", code, ISOLATED)
    (files, mappings), threads = held(), threading.active_count()
    assert mappings
    pids = []
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            pids.append(int(python_core.value("m", np.zeros(100_000))[0]))
            path = python_core.path / "m" / "config.pbtxt"
            path.write_text(path.read_text() + "\n#")
            python_core.service.load_model("m")
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert eventually(lambda: held()[0] <= files), held()
    assert eventually(lambda: held()[1] <= mappings), held()
    assert eventually(lambda: threading.active_count() <= threads + 1), threading.enumerate()
    for pid in pids:
        assert any(f"finalized in {pid}" in line for line in caplog.messages)


def test_a_model_that_fails_or_crashes_while_loading_has_its_reason(python_core: Any) -> None:
    python_core.write("m", "class TritonPythonModel:\n    def initialize(self, args): raise ValueError('no weights')\n"
                            "    def execute(self, requests): pass", ISOLATED)  # fmt: skip
    with pytest.raises(LoadError, match="ValueError: no weights"):
        python_core.service.load_model("m")
    python_core.write("n", "os._exit(5)", ISOLATED)
    with pytest.raises(LoadError, match="its process ended with exit code 5"):
        python_core.service.load_model("n")


def test_a_traceback_reaches_the_log_from_a_process(python_core: Any, caplog: pytest.LogCaptureFixture) -> None:
    python_core.add(
        "m",
        """
        import logging
        class TritonPythonModel:
            def execute(self, requests):
                try:
                    {}["absent"]
                except KeyError:
                    logging.getLogger("edge_server.model").exception("looked up")
                raise ValueError("so")
        """,
        ISOLATED,
    )
    with caplog.at_level(logging.ERROR):
        assert "ValueError: so" in python_core.error("m")
        found = {record.message: str(record.exc_text) for record in caplog.records}
    assert found["looked up"].endswith("KeyError: 'absent'")
    assert found["model 'm' failed: ValueError: so"].endswith("ValueError: so")


def test_auto_complete_config_runs_in_a_process_too(python_core: Any) -> None:
    python_core.write(
        "m",
        f"""
        assert os.getpid() != {os.getpid()}
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                config.add_input({{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}})
                config.add_output({{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}})
                return config
            def execute(self, requests):
                return [answer(given(request)) for request in requests]
        """,
        PROCESS,
    )
    python_core.service.load_model("m")
    assert python_core.value("m", [3.0]) == [3.0]


def test_an_isolated_model_calls_others_and_a_call_to_itself_is_an_error(python_core: Any) -> None:
    python_core.add(
        "double",
        """
        class TritonPythonModel:
            def execute(self, requests):
                return [answer(given(request) * 2) for request in requests]
        """,
    )
    python_core.add("caller", "TARGET = 'double'" + CALLER, ISOLATED)
    np.testing.assert_array_equal(python_core.value("caller", np.full(40_000, 2)), np.full(40_000, 5))
    python_core.add("absent", "TARGET = 'nobody'" + CALLER, ISOLATED)
    assert "unknown model: 'nobody'" in python_core.error("absent")
    python_core.add("self", "TARGET = 'self'" + CALLER, ISOLATED)
    assert "every instance of 'self' is waiting" in python_core.error("self")


def test_an_isolated_decoupled_model_streams_and_sees_cancellation(
    python_core: Any, decoupled: str, eventually: Callable[[Callable[[], bool]], bool]
) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                for request in requests:
                    threading.Thread(target=self.run, args=(request.get_response_sender(), given(request))).start()
            def run(self, sender, array):
                count = int(array[0])
                for number in range(count if count >= 0 else 1_000_000):
                    if sender.is_cancelled():
                        pb_utils.Logger.log_error("stopped early")
                        break
                    sender.send(answer(np.full(30_000, number)))
                    time.sleep(0.001)
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """,
        decoupled + PROCESS,
    )
    responses = python_core.ask("m", [4.0])
    assert [item.outputs[0].array[0] for item in responses[:-1]] == [0, 1, 2, 3]
    assert responses[-1].is_empty
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("edge_server.model").addHandler(handler)
    try:
        got, final, ticket = python_core.start("m", [-1.0])
        assert eventually(lambda: len(got) > 3)
        ticket.cancel()
        assert final.wait(20)
        assert eventually(lambda: any("stopped early" in line for line in records))
    finally:
        logging.getLogger("edge_server.model").removeHandler(handler)


def test_metrics_of_an_isolated_model_are_on_the_metrics_page(
    python_core: Any, eventually: Callable[[Callable[[], bool]], bool]
) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def initialize(self, args):
                self.calls = pb_utils.MetricFamily("far_calls", "Calls", pb_utils.MetricFamily.COUNTER).Metric()
            def execute(self, requests):
                self.calls.increment(1)
                return [answer([1]) for request in requests]
        """,
        ISOLATED,
    )
    python_core.value("m")
    assert eventually(lambda: [view.samples[0].value for view in python_core.service.model_families()] == [1.0])
    python_core.service.unload_model("m")
    assert eventually(lambda: python_core.service.model_families() == [])


def test_shared_memory_is_reused_and_grows_if_needed() -> None:
    arena = Arena()
    reader = ArenaReader(os.dup(arena.fd))
    first = arena.write([memoryview(b"a" * 1000), memoryview(b"b" * 10)])
    second = arena.write([memoryview(b"c" * (3 << 20))])
    views = reader.read(first, [1000, 10], arena.size)
    assert [bytes(view[:2]) for view in views] == [b"aa", b"bb"]
    assert bytes(reader.read(second, [3 << 20], arena.size)[0][-1:]) == b"c"
    arena.free(first)
    assert arena.write([memoryview(b"d" * 900)]) == first
    assert arena.used_bytes == 960 + (3 << 20)
    del views
    arena.close()
    reader.close()


def test_the_process_ends_with_the_server(python_core: Any, eventually: Callable[[Callable[[], bool]], bool]) -> None:
    python_core.add(
        "m",
        """
        class TritonPythonModel:
            def execute(self, requests):
                threading.Thread(target=time.sleep, args=(600,)).start()
                return [answer([os.getpid()])]
        """,
        ISOLATED,
    )
    pid = int(python_core.value("m")[0])
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    assert int(python_core.value("m")[0]) == pid
    python_core.core.close(5.0)
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())


LEAVES_A_PROCESS = """
import multiprocessing, signal

def outlive():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(300)

class TritonPythonModel:
    def initialize(self, args):
        self.left = multiprocessing.get_context("fork").Process(target=outlive)
        self.left.start()
    def execute(self, requests):
        if given(requests[0])[0] < 0: os.kill(os.getpid(), signal.SIGKILL)
        return [answer([os.getpid(), self.left.pid]) for request in requests]
"""


def runs(pid: float) -> bool:
    """Return whether a process runs. One whose parent has not asked for its exit code does not."""
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("end", ["unload", "reload", "stop", "crash"])
def test_no_process_that_an_isolated_model_started_outlives_it(
    python_core: Any, eventually: Callable[[Callable[[], bool]], bool], end: str
) -> None:
    path = python_core.write("m", LEAVES_A_PROCESS, ISOLATED) / "model.py"
    python_core.service.load_model("m")
    _, left = python_core.value("m")
    try:
        assert runs(left)
        if end == "unload":
            python_core.service.unload_model("m")
        elif end == "reload":
            path.write_text(path.read_text() + "# changed")
            python_core.service.load_model("m")
        elif end == "stop":
            python_core.core.close(5.0)
        else:
            assert isinstance(python_core.ask("m", [-1.0])[0].error, SessionLost)
        assert eventually(lambda: not runs(left))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(left), signal.SIGKILL)


HANGING = """
class TritonPythonModel:
    def initialize(self, args): threading.Event().wait()
    def execute(self, requests): pass
"""


def test_an_initialize_that_hangs_fails_the_load_and_its_process_is_killed(
    python_core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def start(*arguments: Any, **options: Any) -> Any:
        started.append(subprocess.Popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(child_process, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start}))
    limit = 'parameters { key: "initialize_timeout_s" value { string_value: "1" } }\n'
    python_core.write("m", HANGING, ISOLATED + limit)
    with pytest.raises(LoadError, match=r"model 'm'.*for 1 s it read nothing and took no more.*initialize_timeout_s"):
        python_core.service.load_model("m")
    # The last one; another may have been asked to complete the configuration.
    assert started[-1].returncode == -signal.SIGKILL


SLOW = """
class TritonPythonModel:
    def initialize(self, args):
        self.weights = []
        for _ in range(12):
            time.sleep(0.25)
            self.weights.append(b"x" * (8 << 20))
    def execute(self, requests): return [answer(given(request)) for request in requests]
"""


def test_an_initialize_above_the_time_limit_that_makes_progress_may_finish(python_core: Any) -> None:
    limit = 'parameters { key: "initialize_timeout_s" value { string_value: "2" } }\n'
    python_core.write("m", SLOW, ISOLATED + limit)
    python_core.service.load_model("m")
    assert python_core.value("m") == [1.0]


@pytest.mark.parametrize("word", ["0", "-1", "soon"])
def test_an_invalid_limit_on_initialize_is_refused(python_core: Any, word: str) -> None:
    limit = f'parameters {{ key: "initialize_timeout_s" value {{ string_value: "{word}" }} }}\n'
    python_core.write("m", HANGING, ISOLATED + limit)
    before = children()
    with pytest.raises(LoadError, match="initialize_timeout_s must be a whole number from 1"):
        python_core.service.load_model("m")
    assert children() <= before


def children() -> set[str]:
    """Return the processes that threads of this one started and that are not gone."""
    found: set[str] = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread ended meanwhile; its children are now another's
            found.update((thread / "children").read_text().split())
    return found
