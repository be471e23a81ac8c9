"""The installed server with a service manager of the test: its notifications, and missing watchdog messages."""

from __future__ import annotations

import contextlib
import itertools
import os
import pty
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.certificates import self_signed
from tests.kit.eventually import eventually
from tests.kit.model_folder import parameters
from tests.kit.models import identity_body, identity_config
from tests.kit.server import COMMAND, serve

WATCHDOG_S = 1.0
HAS_INTERPRETER_LOCK = not sysconfig.get_config_var("Py_GIL_DISABLED")

HOLDS_EVERYTHING = """
import ctypes
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        # PyDLL keeps the interpreter's lock: no other thread runs meanwhile, the event loop's neither.
        ctypes.PyDLL(None).sleep(2)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(
            request, "INPUT0").as_numpy())]) for request in requests]
"""


class Manager:
    """Receives the notifications of a server to its service manager, from the start."""

    def __init__(self, path: Path) -> None:
        self.environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))}
        self.heard: list[tuple[float, list[str]]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while data := self._socket.recv(65536):
            self.heard.append((time.monotonic(), data.decode("utf-8").split("\n")))

    def close(self) -> None:
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as last:
            last.sendto(b"", self.environment["NOTIFY_SOCKET"])
        self._thread.join(10)
        self._socket.close()

    def states(self) -> list[str]:
        """Return the notifications, in order, without status lines, watchdog messages and extensions."""
        return [lines[0] for _, lines in list(self.heard) if lines[0].startswith(("READY", "RELOADING", "STOPPING"))]

    def status(self) -> str:
        """Return the latest status line."""
        lines = [line for _, message in list(self.heard) for line in message if line.startswith("STATUS=")]
        return lines[-1].removeprefix("STATUS=") if lines else ""

    def watchdog_times(self) -> list[float]:
        return [at for at, lines in list(self.heard) if lines == ["WATCHDOG=1"]]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    item = Manager(tmp_path / "notify")
    yield item
    item.close()


def stub(**values: str) -> str:
    return identity_config(more=parameters(**values)).replace('"identity"', '"stub"')


def test_ready_is_sent_after_the_loads_and_stopping_before_the_drain(repository: Any, manager: Manager) -> None:
    repository.add("same", identity_config())
    repository.add("late", stub(stub_open_delay_ms="500"))
    repository.add("broken", stub(stub_fail_open="no such weights"))
    with serve(repository.path, environment=manager.environment) as server:
        assert eventually(lambda: manager.states() == ["READY=1"])
        before = list(itertools.takewhile(lambda lines: lines[0] != "READY=1", (lines for _, lines in manager.heard)))
        assert ["EXTEND_TIMEOUT_USEC=30000000"] in before
        assert any(lines[0].startswith("STATUS=starting: ") for lines in before)
        assert server.stop() == 0
    assert manager.states() == ["READY=1", "STOPPING=1"]
    ready = next(lines for _, lines in manager.heard if lines[0] == "READY=1")
    assert ready[1].startswith("STATUS=2 models served, 1 NOT: broken")
    assert "no such weights" in ready[1]
    stopping = next(lines for _, lines in manager.heard if lines[0] == "STOPPING=1")
    assert "EXTEND_TIMEOUT_USEC=45000000" in stopping


@dataclass
class Watched:
    """A server with a watchdog and a configuration file."""

    server: Any
    manager: Manager
    file: Path
    repository: Any


@pytest.fixture(scope="module")
def watched(module_repository: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    module_repository.add("same", identity_config())
    no_probe = 'parameters { key: "warmup_probe" value { string_value: "false" } }'
    module_repository.add(
        "greedy",
        identity_config(more=no_probe).replace('"identity"', '"python"'),
        files={"1/model.py": HOLDS_EVERYTHING},
    )
    file = folder / "config.toml"
    file.write_text('[log]\nformat = "default"\n')
    manager = Manager(folder / "notify")
    try:
        flags = (f"--config={file}", "--repository-poll-secs=86400")
        with serve(module_repository.path, *flags, environment=manager.environment) as server:
            yield Watched(server, manager, file, module_repository)
    finally:
        manager.close()


def test_the_watchdog_is_notified_in_time_under_load(watched: Watched) -> None:
    count = len(watched.manager.watchdog_times())

    def has_enough() -> bool:
        assert watched.server.infer("same", identity_body())[0] == 200
        return len(watched.manager.watchdog_times()) >= count + 5

    assert eventually(has_enough)


@pytest.mark.skipif(not HAS_INTERPRETER_LOCK, reason="the model holds the lock, which this Python does not have")
def test_a_blocked_event_loop_stops_watchdog_notifications_until_it_runs_again(watched: Watched) -> None:
    manager = watched.manager
    first = len(manager.watchdog_times())
    assert eventually(lambda: len(manager.watchdog_times()) >= first + 2)
    assert watched.server.infer("greedy", identity_body())[0] == 200
    count = len(manager.watchdog_times())
    assert eventually(lambda: len(manager.watchdog_times()) >= count + 2)
    watchdog_times = manager.watchdog_times()[first:]
    longest_s = max(after - before for before, after in itertools.pairwise(watchdog_times))
    # The loop stood still for 2 s: no meal came for longer than the watchdog waits.
    assert longest_s > WATCHDOG_S


def test_a_hung_instance_stops_watchdog_notifications_and_is_named_in_the_status(
    repository: Any, manager: Manager
) -> None:
    repository.add("same", identity_config())
    repository.add("stuck", stub(stub_hang="true", warmup_probe="false"))
    with serve(
        repository.path, "--watchdog-run-limit-secs=1", "--exit-timeout-secs=0", environment=manager.environment
    ) as server:
        asking = threading.Thread(target=server.infer, args=("stuck", identity_body()))
        asking.start()
        assert eventually(lambda: "NOT WELL" in manager.status())
        assert "instance stuck" in manager.status()
        count, at = len(manager.watchdog_times()), time.monotonic()
        # All others are served, and nothing is fed, for longer than the watchdog waits.
        while time.monotonic() < at + WATCHDOG_S + 0.5:
            assert server.infer("same", identity_body())[0] == 200
        assert len(manager.watchdog_times()) == count
        assert "is not fed" in server.log()
        server.process.terminate()
        asking.join(20)


def sleeps(process: int) -> bool:
    """Return whether no thread of a process runs or could run, or has just ended."""
    try:
        stats = [(thread / "stat").read_text() for thread in Path(f"/proc/{process}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return {stat.rpartition(") ")[2][0] for stat in stats} == {"S"}


def test_the_watchdogs_signal_dumps_the_stacks_of_all_threads(repository: Any, manager: Manager) -> None:
    repository.add("same", identity_config())
    with serve(repository.path, environment=manager.environment) as server:
        # As in a hang. The stack of a thread that runs Python meanwhile may not be readable: it ends the dump.
        assert eventually(lambda: sleeps(server.process.pid))
        assert server.stop(signal.SIGABRT) == -signal.SIGABRT
        assert "Fatal Python error: Aborted" in server.log()
        assert server.log().count("Thread 0x") > 3 or not HAS_INTERPRETER_LOCK
        assert "edge_server/process/server.py" in server.log()


def test_sighup_applies_log_settings_and_names_settings_that_need_a_restart(watched: Watched) -> None:
    server, manager, file = watched.server, watched.manager, watched.file
    before = manager.states()
    file.write_text('[log]\nformat = "json"\nverbose_level = 1\n[lifecycle]\nexit_timeout_s = 3\n')
    server.process.send_signal(signal.SIGHUP)
    assert eventually(lambda: manager.states()[len(before) :] == ["RELOADING=1", "READY=1"])
    _, settings = server.ask("/v2/logging")
    assert (settings["log_format"], settings["log_verbose_level"]) == ("json", 1)
    assert "needs a restart: lifecycle.exit_timeout_s" in server.log()
    file.write_text("[lgo]\n")
    server.process.send_signal(signal.SIGHUP)
    assert eventually(lambda: "nothing was reloaded" in server.log())
    assert server.ask("/v2/logging")[1]["log_format"] == "json"
    assert server.infer("same", identity_body())[0] == 200


class Https:
    """A server of HTTPS, its files of certificate and key, and two pairs for them."""

    def __init__(self, server: Any, folder: Path, pairs: list[tuple[Path, Path]]) -> None:
        self.server = server
        self.cert, self.key = folder / "server.crt", folder / "server.key"
        self.pairs = pairs
        host, _, port = server.http.partition(":")
        self._address = host, int(port)

    def shown(self) -> list[str]:
        return ssl.get_server_certificate(self._address, timeout=30).split()

    def lay_out(self, number: int) -> list[str]:
        """Write a pair, and return the lines of its certificate."""
        return lay_out(self.pairs[number], self.cert, self.key)

    def reload(self) -> None:
        self.server.process.send_signal(signal.SIGHUP)


def lay_out(pair: tuple[Path, Path], cert: Path, key: Path) -> list[str]:
    for source, target in zip(pair, (cert, key), strict=True):
        target.write_bytes(source.read_bytes())
    return pair[0].read_text().split()


@pytest.fixture(scope="module")
def https(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Https]:
    folder = tmp_path_factory.mktemp("https")
    pairs = [self_signed(folder, "first", name="first"), self_signed(folder, "second", name="second")]
    cert, key = folder / "server.crt", folder / "server.key"
    lay_out(pairs[0], cert, key)
    (folder / "models").mkdir()
    with serve(folder / "models", f"--http-tls-cert={cert}", f"--http-tls-key={key}") as server:
        yield Https(server, folder, pairs)


@pytest.fixture
def first_shown(https: Https) -> Https:
    """The server of HTTPS, which shows the first certificate."""
    first = https.lay_out(0)
    https.reload()
    assert eventually(lambda: https.shown() == first)
    return https


def test_sighup_renews_the_certificate_of_https_unless_it_does_not_match_the_key(first_shown: Https) -> None:
    https = first_shown
    first, second = (pair[0].read_text().split() for pair in https.pairs)
    https.cert.write_bytes(https.pairs[1][0].read_bytes())
    https.reload()
    assert eventually(lambda: "http.tls_key, http.client_ca is unchanged" in https.server.log())
    assert https.shown() == first
    https.key.write_bytes(https.pairs[1][1].read_bytes())
    https.reload()
    assert eventually(lambda: https.shown() == second)


def test_sighup_scans_the_repository(watched: Watched) -> None:
    watched.file.write_text('[log]\nformat = "json"\n')
    watched.repository.add("more", identity_config())
    watched.server.process.send_signal(signal.SIGHUP)
    assert eventually(lambda: watched.server.get("/v2/models/more/ready")[0] == 200)


def test_a_server_in_a_terminal_ends_with_the_terminal(repository: Any) -> None:
    repository.add("same", identity_config())
    leader, follower = pty.openpty()
    # A process started where hang-ups are ignored (nohup) goes on ignoring them, and so would the server.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        process = subprocess.Popen(
            [str(COMMAND), "serve", f"--model-repository={repository.path}", "--http-port=0", "--grpc-port=0",
             "--metrics-port=0"],
            stdin=follower, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        with process:
            try:
                assert process.stdout is not None
                assert "is ready" in process.stdout.readline()
                process.send_signal(signal.SIGHUP)
                assert process.wait(20) == -signal.SIGHUP
            finally:
                process.kill()
    finally:
        signal.signal(signal.SIGHUP, before)
        os.close(leader)
        os.close(follower)


ENDS_ITSELF = """
import sys, threading
from edge_server.config.merge_settings import parse_serve
from edge_server.core.exit_code import ExitCode
from edge_server.process import server as module
from edge_server.cli.main import main

inner = module.ServerProcess.__init__
def made(self, *arguments):
    inner(self, *arguments)
    threading.Timer(0.2, self.end.submit, (ExitCode.GPU_LOST, "GPU 0 fell off the bus")).start()
module.ServerProcess.__init__ = made
sys.exit(main(sys.argv[1:]))
"""


def test_a_fatal_gpu_fault_drains_and_sets_its_exit_code(repository: Any) -> None:
    repository.add("same", identity_config())
    done = subprocess.run(
        [sys.executable, "-c", ENDS_ITSELF, "serve", f"--model-repository={repository.path}", "--http-port=0",
         "--grpc-port=0", "--metrics-port=0"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 79, done.stderr
    assert "GPU 0 fell off the bus" in done.stderr
    assert "draining" in done.stderr


def test_handshakes_succeed_while_the_certificate_is_renewed(first_shown: Https) -> None:
    https = first_shown
    is_over, failures = threading.Event(), []

    def shake_hands() -> None:
        while not is_over.is_set():
            try:
                https.shown()
            except OSError as error:
                failures.append(error)

    clients = [threading.Thread(target=shake_hands) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        for number in range(1, 11):
            expected = https.lay_out(number % 2)
            https.reload()
            assert eventually(lambda e=expected: https.shown() == e)
    finally:
        is_over.set()
        for client in clients:
            client.join()
    assert failures == []
