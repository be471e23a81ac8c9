"""fleet/haproxy/haproxy.cfg in a real HAProxy before two servers: restarts, kills and rollouts lose no request."""

from __future__ import annotations

import collections
import contextlib
import csv
import http.client
import itertools
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.kit.infer_input import infer_input
from tests.kit.server import COMMAND

SHIPPED = Path(__file__).parents[2] / "fleet" / "haproxy" / "haproxy.cfg"
HAPROXY = os.environ.get("EDGE_TEST_HAPROXY") or shutil.which("haproxy") or ""
MIN_REQUESTS = 1700
"""Of each wire, in a round of restarts."""

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not HAPROXY, reason="there is no haproxy; tests/fleet/fetch_haproxy.sh brings one"),
]

IDENTITY = """
backend: "identity"
max_batch_size: 8
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [-1] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [-1] }}
parameters {{ key: "execute_delay_ms" value {{ string_value: "{delay_ms}" }} }}
"""
ECHO = """
backend: "python"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [-1, -1] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [-1, -1] }
"""
SUM = """
backend: "python"
max_batch_size: 1
input { name: "IN" data_type: TYPE_FP32 dims: [1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [1] }
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } }
}
"""
SUM_CODE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy()[0, 0]
        value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        id = request.correlation_id()
        self.sums[id] = value if start else self.sums[id] + value
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.sums[id])])
"""


class Replica:
    """One server with a repository of its own, on ports that it keeps when it is started again."""

    def __init__(self, name: str, folder: Path, ports: list[int]) -> None:
        self.name = name
        self.models = folder / "models"
        self.http, self.grpc, self._metrics = ports
        self._log = folder / "log"
        self.process: subprocess.Popen[bytes] | None = None
        for model, config in (
            ("fast", IDENTITY.format(delay_ms=0)),
            ("slow", IDENTITY.format(delay_ms=50)),
            ("stuck", IDENTITY.format(delay_ms=3000)),
            ("sum", SUM),
        ):
            (self.models / model / "1").mkdir(parents=True)
            (self.models / model / "config.pbtxt").write_text(config)
        (self.models / "sum" / "1" / "model.py").write_text(SUM_CODE)

    def start(self) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("EDGE_SERVER_")}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    str(COMMAND), "serve", f"--model-repository={self.models}", "--drain-delay-secs=5",
                    f"--http-port={self.http}", f"--grpc-port={self.grpc}", f"--metrics-port={self._metrics}",
                ],
                stdout=log, stderr=log, env=environment,
            )  # fmt: skip

    def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def log(self) -> str:
        return self._log.read_text()

    def is_ready(self, path: str) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.http}{path}", timeout=20):
            return True
        return False

    def index(self) -> dict[tuple[str, str], str]:
        """Return (model, version) -> state."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}/v2/repository/index", method="POST", data=b"")
        with urllib.request.urlopen(request, timeout=20) as reply:
            return {(entry["name"], entry.get("version", "")): entry.get("state", "") for entry in json.load(reply)}


class Fleet:
    """Two replicas, or three, and HAProxy with the shipped configuration."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        self.http, self.grpc, self.http_sequences, self.grpc_sequences, self._stats = ports[:5]
        self.replicas = [
            Replica(name, folder / name, list(own))
            for name, own in zip("abc", zip(*[iter(ports[5:])] * 3, strict=True), strict=False)
        ]
        self.socket = folder / "admin.sock"
        text = SHIPPED.read_text()
        for shipped, here in (
            (":9000", f"127.0.0.1:{self.http}"),
            (":9001", f"127.0.0.1:{self.grpc}"),
            (":9010", f"127.0.0.1:{self.http_sequences}"),
            (":9011", f"127.0.0.1:{self.grpc_sequences}"),
            ("dst_port 9010", f"dst_port {self.http_sequences}"),
            ("dst_port 9011", f"dst_port {self.grpc_sequences}"),
            ("127.0.0.1:8404", f"127.0.0.1:{self._stats}"),
            ("/run/haproxy/admin.sock", str(self.socket)),
            ("192.0.2.11:8000", f"127.0.0.1:{self.replicas[0].http}"),
            ("192.0.2.11:8001", f"127.0.0.1:{self.replicas[0].grpc}"),
            ("192.0.2.12:8000", f"127.0.0.1:{self.replicas[1].http}"),
            ("192.0.2.12:8001", f"127.0.0.1:{self.replicas[1].grpc}"),
        ):
            assert shipped in text
            text = text.replace(shipped, here)
        for third in self.replicas[2:]:
            for port, own in ((self.replicas[1].http, third.http), (self.replicas[1].grpc, third.grpc)):
                line = rf"^  server b (127.0.0.1:){port}( track http/)?(b?)$"
                text, count = re.subn(
                    line,
                    lambda m, own=own: f"{m[0]}\n  server c {m[1]}{own}{m[2] or ''}{m[3] and 'c'}",
                    text,
                    flags=re.M,
                )
                assert count == 2
        self._config = folder / "haproxy.cfg"
        self._config.write_text(text)
        self._log = folder / "haproxy.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        for replica in self.replicas:
            replica.start()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([HAPROXY, "-db", "-f", str(self._config)], stdout=log, stderr=log)
        for replica in self.replicas:
            self.wait_until_up(replica)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for replica in self.replicas:
            if replica.process is not None and replica.process.poll() is None:
                replica.end(signal.SIGKILL)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._stats}{path}", timeout=20) as reply:
            return str(reply.read().decode())

    def servers(self, field: str) -> dict[str, str]:
        """Return "backend/server" -> one column of HAProxy's statistics."""
        rows = csv.DictReader(self.get("/;csv").removeprefix("# ").splitlines())
        return {f"{row['pxname']}/{row['svname']}": row[field] for row in rows}

    def wait_until_up(self, replica: Replica) -> None:
        """Wait until a replica is ready and HAProxy sends requests of all kinds to it."""

        def is_up() -> bool:
            assert replica.process is not None
            assert replica.process.poll() is None, replica.log()
            # HAProxy may not have noticed yet that the replica was away.
            if not replica.is_ready("/v2/health/ready"):
                return False
            with contextlib.suppress(OSError):
                states = [state for name, state in self.servers("status").items() if name.endswith(f"/{replica.name}")]
                return len(states) == 4 and all(state.startswith("UP") for state in states)
            return False

        wait_until(is_up)

    def log(self) -> str:
        return self._log.read_text()


def wait_until(condition: Callable[[], bool], limit_s: float = 120.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def fleet(free_ports: Callable[[int], list[int]]) -> Iterator[Fleet]:
    # The path of a socket has 107 characters at most, which pytest's folders can exceed.
    with tempfile.TemporaryDirectory() as folder:
        made = Fleet(Path(folder), free_ports(5 + 2 * 3))
        try:
            made.start()
            yield made
        finally:
            made.stop()


# -- clients


SMALL = np.arange(4, dtype=np.float32).reshape(1, 4)
LARGE = np.arange(25_000, dtype=np.float32).reshape(1, -1)
"""100 kB, the size of a small picture."""

CUT_ANSWER = re.compile(rf" fast {LARGE.size} .*(END_STREAM flag received|IncompleteRead)")
"""What the clients say of an answer larger than a window of HTTP/2, 64 KiB, which ended before it was complete."""

KINDS = (("fast", SMALL), ("fast", SMALL), ("fast", LARGE), ("fast", SMALL), ("slow", SMALL))


def triton_infer(module: Any, client: Any, model: str, data: Any, **more: Any) -> tuple[Any, str]:
    """Return OUTPUT0 and the version that answered."""
    given = infer_input(module, "INPUT0", data)
    result = client.infer(model, [given], **more)
    response = result.get_response()
    version = response["model_version"] if isinstance(response, dict) else response.model_version
    return result.as_numpy("OUTPUT0"), version


def plain_infer(connection: http.client.HTTPConnection, model: str, data: Any) -> tuple[Any, str]:
    """Without a client's own repeats: what a connection refuses or loses is lost."""
    values = data.ravel().tolist()
    body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": list(data.shape), "data": values}]}
    connection.request("POST", f"/v2/models/{model}/infer", json.dumps(body))
    reply = connection.getresponse()
    text = reply.read()
    if reply.status != 200:
        raise InferenceServerException(f"{reply.status}: {text[:300]!r}")
    answer = json.loads(text)
    output = answer["outputs"][0]
    return np.array(output["data"], np.float32).reshape(output["shape"]), answer["model_version"]


class Load:
    """Requests over HTTP and gRPC, four clients each, until the end of the `with` block."""

    def __init__(self, fleet: Fleet, kinds: Sequence[tuple[str, Any]] = KINDS) -> None:
        self._fleet = fleet
        self._kinds = kinds
        self._is_over = threading.Event()
        self.counts: collections.Counter[str] = collections.Counter()
        self.versions: collections.Counter[str] = collections.Counter()
        self.lost: list[str] = []
        clients = [self._plain_http, self._plain_http, self._triton_http, self._triton_http, *[self._triton_grpc] * 4]
        self._threads = [threading.Thread(target=client) for client in clients]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)

    def wait_for_more(self, count: int) -> None:
        """Wait for `count` more requests over each wire."""
        goal = {wire: self.counts[wire] + count for wire in ("http", "grpc")}
        wait_until(lambda: all(self.counts[wire] >= goal[wire] for wire in goal), 300)

    def _repeat(self, wire: str, infer: Callable[[str, Any], tuple[Any, str]]) -> None:
        for model, data in itertools.cycle(self._kinds):
            if self._is_over.is_set():
                return
            try:
                output, version = infer(model, data)
                assert np.array_equal(output, data)
                self.versions[f"{model} {version}"] += 1
            except (OSError, http.client.HTTPException, InferenceServerException, AssertionError) as error:
                self.lost.append(f"{time.time():.3f} {wire} {model} {data.size} {type(error).__name__}: {error}")
            self.counts[wire] += 1

    def _plain_http(self) -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._fleet.http, timeout=60)) as connection:
            self._repeat("http", lambda model, data: plain_infer(connection, model, data))

    def _triton_http(self) -> None:
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{self._fleet.http}") as client:
            self._repeat("http", lambda model, data: triton_infer(tritonclient.http, client, model, data))

    def _triton_grpc(self) -> None:
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{self._fleet.grpc}") as client:
            self._repeat("grpc", lambda model, data: triton_infer(tritonclient.grpc, client, model, data))


def check_nothing_is_lost(load: Load, fleet: Fleet) -> None:
    print(f"requests: {dict(load.counts)}, lost: {len(load.lost)}, versions: {dict(load.versions)}")
    assert load.lost == [], "\n".join([*load.lost[:20], fleet.log(), *(replica.log() for replica in fleet.replicas)])


# -- tests


def test_haproxy_accepts_the_shipped_file_without_a_warning() -> None:
    done = subprocess.run([HAPROXY, "-c", "-f", str(SHIPPED)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "[WARNING]" not in done.stderr


# Half a minute; test_a_new_version_reaches_one_server_after_the_other restarts each server too.
@pytest.mark.long
@pytest.mark.parametrize("rounds", [1, 3])
def test_rounds_of_restarts_by_sigterm_lose_no_request(fleet: Fleet, rounds: int) -> None:
    with Load(fleet) as load:
        for replica in fleet.replicas * rounds:
            assert replica.end(signal.SIGTERM) == 0
            replica.start()
            fleet.wait_until_up(replica)
        load.wait_for_more(max(MIN_REQUESTS * rounds - min(load.counts.values()), 0))
    check_nothing_is_lost(load, fleet)


@pytest.mark.parametrize("rounds", [1, pytest.param(3, marks=pytest.mark.long)])
def test_rounds_of_kills_lose_only_large_answers_that_had_begun(fleet: Fleet, rounds: int) -> None:
    with Load(fleet) as load:
        for replica in fleet.replicas * rounds:
            load.wait_for_more(250)
            assert replica.end(signal.SIGKILL) == -signal.SIGKILL
            load.wait_for_more(250)
            replica.start()
            fleet.wait_until_up(replica)
    # A request cannot be repeated when a part of its answer has reached the client.
    load.lost = [line for line in load.lost if not CUT_ANSWER.search(line)]
    check_nothing_is_lost(load, fleet)


def test_a_new_version_reaches_one_server_after_the_other_and_loses_no_request(fleet: Fleet) -> None:
    with Load(fleet) as load:
        for replica in fleet.replicas:
            (replica.models / "fast" / "2").mkdir()
            wait_until(lambda replica=replica: replica.is_ready("/v2/models/fast/versions/2/ready"))
            wait_until(lambda before=load.versions["fast 2"]: load.versions["fast 2"] > before + 300)
    assert load.versions["fast 1"] > 0
    check_nothing_is_lost(load, fleet)


def test_a_broken_model_on_every_server_leaves_all_of_them_ready(fleet: Fleet) -> None:
    with Load(fleet) as load:
        for replica in fleet.replicas:
            # A model that is new, and a new version of one that serves.
            for folder in (replica.models / "broken" / "1", replica.models / "slow" / "7"):
                folder.mkdir(parents=True)
            (replica.models / "broken" / "1" / "model.onnx").write_bytes(b"no model")
            (replica.models / "slow" / "config.pbtxt").write_text(IDENTITY.format(delay_ms="a word"))
        for replica in fleet.replicas:
            wait_until(lambda replica=replica: replica.index().get(("broken", "1")) == "UNAVAILABLE")
            wait_until(lambda replica=replica: replica.index().get(("slow", "7")) == "UNAVAILABLE")
        load.wait_for_more(250)
        states = fleet.servers("status")
    assert [states[f"http/{replica.name}"] for replica in fleet.replicas] == ["UP", "UP"]
    check_nothing_is_lost(load, fleet)
    for replica in fleet.replicas:
        shutil.rmtree(replica.models / "broken")
        shutil.rmtree(replica.models / "slow" / "7")
        (replica.models / "slow" / "config.pbtxt").write_text(IDENTITY.format(delay_ms=50))


RELEASED = """
import os
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        while not os.path.exists(GATE):
            time.sleep(0.05)

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
            )
            for request in requests
        ]
"""


def release(replica: Replica, version: int, code: str) -> None:
    """Copy a version of the model "released" to a server as a whole."""
    copy = replica.models.parent / f"copy_{version}"
    copy.mkdir()
    (copy / "model.py").write_text(code)
    copy.rename(replica.models / "released" / str(version))


def fleet_status(fleet: Fleet, *arguments: str) -> tuple[int, str]:
    """Return exit code and text of `edge-server fleet status` for all servers."""
    hosts = [f"127.0.0.1:{replica.http}" for replica in fleet.replicas]
    done = subprocess.run(
        [str(COMMAND), "fleet", "status", "--timeout=30", *arguments, *hosts],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    return done.returncode, done.stdout


def test_rollouts_of_damaged_slow_and_wrong_versions_are_detected_and_lose_no_request(
    free_ports: Callable[[int], list[int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as cleanup:
        fleet = Fleet(Path(folder), free_ports(5 + 3 * 3))
        cleanup.callback(fleet.stop)
        opened, closed = Path(folder) / "opened", Path(folder) / "closed"
        opened.touch()
        good, slow = RELEASED.replace("GATE", repr(str(opened))), RELEASED.replace("GATE", repr(str(closed)))
        for replica in fleet.replicas:
            shutil.rmtree(replica.models)
            (replica.models / "released").mkdir(parents=True)
            (replica.models / "released" / "config.pbtxt").write_text(ECHO)
            release(replica, 1, good)
        fleet.start()
        code, text = fleet_status(fleet, "--expect=released=1", "--wait=60")
        assert code == 0, text
        with Load(fleet, [("released", SMALL), ("released", LARGE)]) as load:
            load.wait_for_more(50)

            for replica in fleet.replicas:
                release(replica, 2, good[: len(good) // 2])
                wait_until(lambda replica=replica: replica.index().get(("released", "2")) == "UNAVAILABLE")
            code, text = fleet_status(fleet, "--expect=released=2", "--wait=2")
            assert code == 1, text
            for replica in fleet.replicas:
                assert f"127.0.0.1:{replica.http}: released version 2: " in text
                assert f"127.0.0.1:{replica.http}: released: version 2 is expected, version 1 serves" in text
                shutil.rmtree(replica.models / "released" / "2")
            load.wait_for_more(50)

            for replica in fleet.replicas:
                release(replica, 3, slow)
                wait_until(lambda replica=replica: replica.index().get(("released", "3")) == "LOADING")
            code, text = fleet_status(fleet, "--expect=released=3", "--wait=2")
            assert code == 1, text
            assert text.count("released: version 3 is expected, version 1 serves") == 3, text
            load.wait_for_more(50)
            closed.touch()
            code, text = fleet_status(fleet, "--expect=released=3", "--wait=90")
            assert code == 0, text

            # The number is right everywhere, the files are not.
            for replica in fleet.replicas:
                release(replica, 4, good if replica.name != "c" else good + "# another build\n")
            code, text = fleet_status(fleet, "--expect=released=4", "--wait=20")
            assert code == 1, text
            assert re.search(rf"^127.0.0.1:{fleet.replicas[2].http} differs: released: version 4 ", text, re.M), text
            assert text.count("differs:") == 1
            load.wait_for_more(50)
        assert {"released 1", "released 3", "released 4"} <= set(load.versions)
        check_nothing_is_lost(load, fleet)


def busy_server(fleet: Fleet, backend: str) -> Replica:
    """Return the replica that has a request of this backend, once there is one."""
    found: list[Replica] = []

    def look() -> bool:
        current = fleet.servers("scur")
        found[:] = [replica for replica in fleet.replicas if current[f"{backend}/{replica.name}"] == "1"]
        return bool(found)

    wait_until(look)
    return found[0]


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_requests_of_a_killed_server_are_retried_except_those_of_sequences(fleet: Fleet, wire: str) -> None:
    module = tritonclient.http if wire == "http" else tritonclient.grpc
    for backend, is_repeated in ((wire, True), (f"{wire}_sequences", False)):
        outcome: list[Any] = []

        def ask(address: str = f"127.0.0.1:{getattr(fleet, backend)}", outcome: list[Any] = outcome) -> None:
            with module.InferenceServerClient(address) as client:
                try:
                    outcome.append(triton_infer(module, client, "stuck", SMALL)[0])
                except InferenceServerException as error:
                    outcome.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        replica = busy_server(fleet, backend)
        replica.end(signal.SIGKILL)
        asking.join(60)
        replica.start()
        fleet.wait_until_up(replica)
        assert isinstance(outcome[0], np.ndarray if is_repeated else InferenceServerException), (
            backend,
            str(outcome[0]),
        )


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_a_request_larger_than_the_balancers_buffer_is_answered(fleet: Fleet, wire: str) -> None:
    module = tritonclient.http if wire == "http" else tritonclient.grpc
    data = np.arange(2_000_000, dtype=np.float32).reshape(1, -1)
    with module.InferenceServerClient(f"127.0.0.1:{getattr(fleet, wire)}") as client:
        assert np.array_equal(triton_infer(module, client, "fast", data)[0], data)


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_all_requests_of_a_sequence_reach_the_same_server(fleet: Fleet, wire: str) -> None:
    module = tritonclient.http if wire == "http" else tritonclient.grpc
    sums = []
    # A client for each request: not the connection but the address of the client decides.
    for number in range(1, 21):
        with module.InferenceServerClient(f"127.0.0.1:{getattr(fleet, f'{wire}_sequences')}") as client:
            given = infer_input(module, "IN", np.array([[number]], np.float32))
            result = client.infer("sum", [given], sequence_id=42, sequence_start=number == 1, sequence_end=number == 20)
            sums.append(int(result.as_numpy("OUT")[0, 0]))
    assert sums == list(itertools.accumulate(range(1, 21)))


def test_a_stream_gets_each_response_before_it_sends_the_next_request(fleet: Fleet) -> None:
    results: queue.Queue[Any] = queue.Queue()
    given = infer_input(tritonclient.grpc, "INPUT0", SMALL)
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{fleet.grpc}") as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        for _ in range(3):
            client.async_stream_infer("fast", [given])
            result, error = results.get(timeout=30)
            assert error is None
            assert np.array_equal(result.as_numpy("OUTPUT0"), SMALL)


def test_the_balancer_refuses_requests_that_affect_one_machine_only(fleet: Fleet) -> None:
    for method, path in (
        ("POST", "/v2/repository/models/fast/unload"),
        ("POST", "/v2/repository/models/fast/%75nload"),
        ("POST", "//v2/repository//models/fast/unload"),
        ("POST", "/v2/%72epository/models/fast/unload"),
        ("GET", "/v2/logging"),
        ("GET", "/v2/trace/setting"),
        ("GET", "/v2/models/fast/trace/setting"),
        ("GET", "/v2/systemsharedmemory/status"),
        ("GET", "/edge/v1/governor"),
    ):
        for port in (fleet.http, fleet.http_sequences):
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
                connection.request(method, path)
                assert connection.getresponse().status == 403, path
    for port in (fleet.grpc, fleet.grpc_sequences):
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            assert client.is_server_ready()
            assert client.get_model_metadata("fast").name == "fast"
            for act in (
                lambda client=client: client.unload_model("fast"),
                client.get_system_shared_memory_status,
                client.get_trace_settings,
                client.get_log_settings,
            ):
                with pytest.raises(InferenceServerException, match="PERMISSION_DENIED"):
                    act()


def test_a_server_drained_at_the_balancer_gets_no_request(fleet: Fleet) -> None:
    def command(line: str) -> None:
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(str(fleet.socket))
            admin.sendall(f"{line}\n".encode())
            assert admin.recv(1000).strip() == b""

    command("set server http/a state drain")
    states = fleet.servers("status")
    assert all(state.startswith("DRAIN") for name, state in states.items() if name.endswith("/a")), states
    command("set server http/a state ready")
    fleet.wait_until_up(fleet.replicas[0])


def test_haproxy_has_metrics_of_each_server(fleet: Fleet) -> None:
    found = re.findall(
        r'^haproxy_server_status\{proxy="(\w+)",server="(\w)",state="UP"\} 1$', fleet.get("/metrics"), re.M
    )
    backends = ("http", "grpc", "http_sequences", "grpc_sequences")
    assert sorted(found) == sorted((backend, name) for backend in backends for name in "ab")
