"""Shared fixtures: profiles of property tests, an S3 server with a relay, Redis, an MQTT broker, ports, and installed
servers."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib.util
import itertools
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.kit.eventually import eventually
from tests.kit.server import serve

if TYPE_CHECKING:
    from edge_server.backends.base import ModelFile, OpenJob
    from edge_server.core.model_spec import InputSpec, OutputSpec

# Read by the runtimes when they are imported, here and in the servers that tests start: several pytest processes share
# the processors, and threads that wait in a loop for each other take them from everybody else.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No folder, so that servers which tests start keep nothing between them in the cache folder of the machine or the user.
os.environ["CACHE_DIRECTORY"] = "/dev/null/edge_server"

# A shell that runs the tests in its background has them ignore Ctrl-C, which every program that they start inherits.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples each time, however slow the machine is: few by default, many in `soak`. `search` draws others.
_STEADY: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("suite", max_examples=25, stateful_step_count=30, **_STEADY)
settings.register_profile("soak", max_examples=150, stateful_step_count=50, **_STEADY)
settings.register_profile("search", settings.get_profile("soak"), derandomize=False, print_blob=True)
settings.load_profile("suite")

FAST_PART = "not full and not soak and not long"
"""The `-m` of pyproject.toml."""


@pytest.fixture(scope="session", name="eventually")
def _eventually() -> Callable[..., bool]:
    return eventually


NEED_TEST_ALL = {"bikes", "fake_gpu", "redis_server", "s3_address"}
"""Fixtures of what only the extra test-all or a fetch script brings."""


_STANDARD_ERROR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    # Before a test's output is captured.
    config.stash[_STANDARD_ERROR] = os.dup(2)
    # Until pytest_collection_finish: collecting makes a million objects and frees few.
    gc.disable()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.option.markexpr == FAST_PART and not config.option.collectonly:
        terminalreporter.write_line(
            "This was the fast part. The rest, other runtimes and services and what takes long: "
            "pip install '.[test-all]', then pytest -m 'full or soak'; see tests/README.md."
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Any:
    """Before pytest selects by marks, mark as `full` what uses such a fixture, and what a test marked `sample` leaves
    out of the fast part.

    Of what is selected, modules with a `serial` test come first: later ones would wait for each test that runs long.
    Modules with a `soak` test follow, so that no process is left with one at the end.
    """
    tables: dict[Any, list[Any]] = {}
    for item in items:
        if NEED_TEST_ALL.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("full")
        if isinstance(item, pytest.Function) and item.get_closest_marker("sample") is not None:
            tables.setdefault((item.parent, item.originalname), []).append(item)
    for table in tables.values():
        kept = _sample(table, *table[0].get_closest_marker("sample").args)
        for item in table:
            if item not in kept:
                item.add_marker("full")
    result = yield
    ranks: dict[Path, int] = {}
    for item in items:
        rank = next((rank for rank, mark in enumerate(("serial", "soak")) if item.get_closest_marker(mark)), 2)
        ranks[item.path] = min(rank, ranks.get(item.path, 2))
    items.sort(key=lambda item: ranks[item.path])
    return result


def pytest_collection_finish() -> None:
    """Hide what collecting made from the garbage collector: it holds the interpreter lock for 0.4 s to search a million
    objects, each time that a Python model is unloaded. They are not searched even once: hardly any is garbage."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let a run end after one of its processes has died in a test. That test counts as failed.

    pytest-xdist 3.8 gives all work of the dead process to others. A process that gets only finished modules then waits
    for ever. The test itself runs again, and if it passes, it is missing from the list of failed tests.
    """
    if config.option.dist != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def remove_node(self, node: Any) -> str | None:
            work = self.assigned_work.pop(node)
            unfinished = [tests for tests in work.values() if not all(tests.values())]
            if not unfinished:
                return None
            crashed: str = next(name for name, done in unfinished[0].items() if not done)
            unfinished[0][crashed] = True
            self.workqueue.update({module: tests for module, tests in work.items() if not all(tests.values())})
            self.schedule()
            return crashed

    return Scheduler(config, log)


def _sample(table: list[Any], count: int = 0) -> list[Any]:
    """Choose `count` items; or, of a product of parameters, so many that each value of each occurs."""
    # In an order of chance, the same each time: in the order of the table a value would always meet the same others.
    order = random.Random(len(table)).sample(table, len(table))
    if count:
        return order[:count]
    kept, seen = [], set()
    for item in order:
        values = {(name, id(value)) for name, value in item.callspec.params.items()}
        if not values <= seen:
            kept.append(item)
            seen |= values
    return kept


HAS_INTERPRETER_LOCK = not sysconfig.get_config_var("Py_GIL_DISABLED")

_CONFTEST_NEEDS = {
    "client": "grpc", "contract": "onnx", "e2e": "onnx", "e2e/grpc_wire": "grpc", "e2e/storm": "tritonclient",
    "plugins/cameras/endpoints": "cv2", "plugins/cameras/sources": "cv2", "plugins/cameras/streams": "cv2",
    "plugins/ros": "grpc", "plugins/vision": "onnx", "process": "onnx",
}  # fmt: skip
"""Folder -> a package that its conftest.py or most of its tests need, and that free-threaded Python has no wheel of."""

collect_ignore = [
    folder
    for folder, package in _CONFTEST_NEEDS.items()
    if not HAS_INTERPRETER_LOCK and importlib.util.find_spec(package) is None
]


def pytest_report_header() -> list[str]:
    return [f"tests/{folder} is left out: {_CONFTEST_NEEDS[folder]} is not installed" for folder in collect_ignore]


_NO_MODULE = re.compile(r"No module named [\\']*(\w+)")


def _missing_package(error: BaseException | None) -> str:
    """Return the package that an error says is missing, in its message or that of a cause, "" if there is none. Servers
    and commands that tests start say it in the same words."""
    while error is not None:
        for name in _NO_MODULE.findall(str(error)):
            if importlib.util.find_spec(name) is None:
                return str(name)
        error = error.__cause__
    return ""


def _skip_without_package(report: Any, call: Any) -> None:
    """Turn the failure for want of a package into a skip by its name, on Python without an interpreter lock: many
    packages have no wheel for it."""
    if HAS_INTERPRETER_LOCK or call is None or call.excinfo is None:
        return
    name = _missing_package(call.excinfo.value)
    if name:
        report.outcome, report.longrepr = "skipped", (report.nodeid, 0, f"Skipped: {name} is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Any:
    report = yield
    _skip_without_package(report, call)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """Import a test module in one pytest process at a time: the first to come compiles it for the others.

    To rewrite the assertions of all modules takes most of the time of collecting, which is several processes' to spend
    at once in a fresh clone.
    """
    if sys.dont_write_bytecode or not isinstance(collector, pytest.Module):
        report = yield
    else:
        module = os.open(collector.path, os.O_RDONLY)
        try:
            fcntl.flock(module, fcntl.LOCK_EX)
            report = yield
        finally:
            os.close(module)
    _skip_without_package(report, getattr(report, "call", None))
    return report


class _SignalStack(ctypes.Structure):
    """stack_t of signal.h."""

    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


_NO_SIGNAL_STACK = _SignalStack(flags=2)  # SS_DISABLE


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Have signals handled on the ordinary stack of this thread.

    Each CPU plugin of OpenVINO (2026.4) gives the thread that makes it a stack for signals, and frees that stack while
    the thread still has it if another thread frees the plugin, or if a later plugin is freed after it. The next signal
    then ends the process, and faulthandler prints nothing.
    """
    ctypes.CDLL(None).sigaltstack(ctypes.byref(_NO_SIGNAL_STACK), None)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Run a test marked `serial` while no other pytest process on this checkout runs one.

    A readers-writer lock of two files that are there anyway: a `serial` test takes both for itself. Every other test
    passes through the first, so that it cannot overtake a waiting `serial` test, and shares the second.
    """
    is_serial = item.get_closest_marker("serial") is not None
    entry = os.open(Path(__file__).parent, os.O_RDONLY)
    running = os.open(__file__, os.O_RDONLY)
    try:
        fcntl.flock(entry, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if is_serial else fcntl.LOCK_SH)
        if not is_serial:
            fcntl.flock(entry, fcntl.LOCK_UN)
        return (yield)
    finally:
        os.close(running)
        os.close(entry)


@pytest.fixture(scope="module", autouse=True)
def _crashes_are_printed(pytestconfig: pytest.Config) -> None:
    """Ray, and a server under systemd, direct the traces of crashes to what pytest captures, and they are lost."""
    faulthandler.enable(pytestconfig.stash[_STANDARD_ERROR], all_threads=HAS_INTERPRETER_LOCK)


@contextlib.contextmanager
def logging_restored() -> Iterator[None]:
    """A server or command in this process sets the levels of two loggers, on which depends what later tests find in the
    log, and writes to an output that is captured for its own test."""
    loggers = [logging.getLogger(name) for name in (None, "edge_server")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    try:
        yield
    finally:
        for logger, (level, handlers) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.handlers[:] = handlers


@pytest.fixture(scope="module", autouse=True)
def _logging_restored() -> Iterator[None]:
    with logging_restored():
        yield


S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


class Relay:
    """A relay to a server on this machine. Cuts connections on request, and counts the bytes that the server sent.

    `cut_after`: bytes that the server may send from now on, after which every connection breaks; None: any number.
    `is_down`: new connections are closed at once. `garble`: (old, new) of equal length, put into the server's answers.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.port = int(self._listener.getsockname()[1])
        self.cut_after: int | None = None
        self.is_down = False
        self.garble: tuple[bytes, bytes] | None = None
        self.sent_bytes = 0
        self.cut_count = 0
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()
        for thread in list(self._threads):
            thread.join(10)

    def drop(self) -> None:
        """Break every connection that is open."""
        with self._lock:
            sockets, self._open = list(self._open), set()
        for item in sockets:
            with contextlib.suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)

    def _begin(self, work: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.is_down:
                client.close()
                continue
            try:
                server = socket.create_connection(self._target, 10)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                self._open |= {client, server}
            self._begin(self._relay, client, server, False)
            self._begin(self._relay, server, client, True)

    def _relay(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_answer:
                    data = self._answer(data)
                target.sendall(data)
                if is_answer and self.cut_after == 0:
                    break
        for item in (source, target):
            with contextlib.suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)
        if is_answer:
            with self._lock:
                self._open -= {source, target}
            source.close()
            target.close()

    def _answer(self, data: bytes) -> bytes:
        with self._lock:
            if self.garble is not None:
                data = data.replace(*self.garble)
            if self.cut_after is not None:
                if len(data) >= self.cut_after:
                    data, self.cut_count = data[: self.cut_after], self.cut_count + 1
                self.cut_after -= len(data)
            self.sent_bytes += len(data)
        return data


class Bucket:
    """One bucket. `url` goes over the relay; the uploads of tests do not."""

    def __init__(self, client: Any, relay: Relay) -> None:
        self._client = client
        self.relay = relay
        self.name = f"models-{uuid.uuid4().hex[:12]}"
        self.url = f"s3://127.0.0.1:{relay.port}/{self.name}/repository"
        self.environment = S3_ENVIRONMENT
        client.create_bucket(Bucket=self.name)

    def put(self, path: str, content: bytes) -> None:
        self._client.put_object(Bucket=self.name, Key=f"repository/{path}", Body=content)

    def delete(self, *paths: str) -> None:
        for path in paths:
            self._client.delete_object(Bucket=self.name, Key=f"repository/{path}")


@pytest.fixture(scope="session")
def s3_address() -> Iterator[tuple[str, int]]:
    """Address of moto's S3 server."""
    for library in ("moto.server", "flask", "s3fs"):
        if importlib.util.find_spec(library.partition(".")[0]) is None:
            pytest.skip(f"needs {library}: pip install '.[test-all]'")
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = next(
            (match for line in process.stdout if (match := re.search(r"http://127\.0\.0\.1:(\d+)", line))), None
        )
        assert found is not None, "moto's server did not start"
        # It writes a line for every request.
        drain = threading.Thread(target=process.stdout.read)
        drain.start()
        yield "127.0.0.1", int(found[1])
        process.terminate()
        drain.join(10)
        process.stdout.close()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def relay(s3_address: tuple[str, int]) -> Iterator[Relay]:
    relay = Relay(s3_address)
    yield relay
    relay.close()


@pytest.fixture
def bucket(s3_address: tuple[str, int], relay: Relay, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    import boto3

    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{s3_address[1]}")
    yield Bucket(client, relay)
    client.close()


def _module(name: str, path: Path) -> Any:
    """Load a helper of the tests that is no package: tests are not imported by name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def boards() -> Any:
    """The module tests/plugins/governor/boards.py."""
    return _module("governor_boards", Path(__file__).parent / "plugins" / "governor" / "boards.py")


@pytest.fixture(scope="session")
def browsers() -> Any:
    """The module tests/e2e/browser.py."""
    return _module("e2e_browser", Path(__file__).parent / "e2e" / "browser.py")


@pytest.fixture(scope="session")
def fake_nvml() -> Any:
    """The module tests/plugins/governor/fake_nvml: GPUs that report what a test sets, in this process or in another."""
    return _module("governor_fake_nvml", Path(__file__).parent / "plugins" / "governor" / "fake_nvml" / "__init__.py")


@pytest.fixture(scope="session")
def nvidia_library(fake_nvml: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libnvidia-ml.so.1 for `FakeNvml.environment`."""
    library: Path = fake_nvml.build(tmp_path_factory.mktemp("nvidia"))
    return library


@pytest.fixture(scope="session")
def fake_gpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An NVIDIA GPU that is not there, see tests/plugins/tensorrt/fake_gpu; skips without TensorRT for RTX."""
    path = Path(__file__).parent / "plugins" / "tensorrt" / "fake_gpu" / "__init__.py"
    return _module("tensorrt_fake_gpu", path).FakeGpu(tmp_path_factory.mktemp("gpu"))


@pytest.fixture
def make_board(boards: Any, tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Creates the files of a board in tests/plugins/governor/boards by its name; its `root` is for --sysfs-root."""
    made = []

    def make(name: str) -> Any:
        made.append(boards.Board(name, tmp_path / f"board{len(made)}"))
        return made[-1]

    yield make
    for item in made:
        item.close()


def find_free_ports(count: int) -> list[int]:
    """Return ports for servers that are stopped and started again on the same one.

    They lie below the range from which the kernel assigns ports: there, any connection could take one while the
    server is away. Each pytest worker has ports of its own, and gives none out twice while others are left.
    """
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < count:
            port = next(_PORTS)
            # A socket that was only bound leaves nothing behind when it is closed.
            with contextlib.suppress(OSError):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
    return found


def _own_ports() -> Iterator[int]:
    """Yield this worker's ports in turns, beginning anywhere: another run on this machine may use the same ones."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    own = range(10_000 + worker, lowest, workers)
    start = random.SystemRandom().randrange(len(own))
    return itertools.cycle([*own[start:], *own[:start]])


_PORTS = _own_ports()


@pytest.fixture(scope="session")
def free_ports() -> Callable[[int], list[int]]:
    """`free_ports(2)`: two ports that stay free while no server listens there."""
    return find_free_ports


LOOPBACK_DDS = (
    "<CycloneDDS><Domain><General><Interfaces><NetworkInterface name='lo' multicast='false'/></Interfaces>"
    "<AllowMulticast>false</AllowMulticast></General><Discovery><ParticipantIndex>auto</ParticipantIndex>"
    "<Peers><Peer Address='127.0.0.1'/></Peers></Discovery></Domain></CycloneDDS>"
)


@pytest.fixture
def ros_domain() -> dict[str, str]:
    """The environment of a ROS domain of this test's own, on the loopback interface."""
    # Discovery listens on UDP 7400 + 250 * domain and a few above; a domain whose port is free is not in use. Each
    # pytest worker has its own domains, as two could find the same one free at the same time.
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = range(20 + worker, 100, workers)
    # From a random one on: other runs of tests on this machine look for a free domain, too.
    start = random.SystemRandom().randrange(len(own))
    for domain in [*own[start:], *own[:start]]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind(("0.0.0.0", 7400 + 250 * domain + 10))
            except OSError:
                continue
        return {"ROS_DOMAIN_ID": str(domain), "CYCLONEDDS_URI": LOOPBACK_DDS}
    pytest.skip("every ROS domain from 20 to 99 is taken on this machine")


class ZenohRouter:
    """Router of Zenoh as a process of its own, on an address that stays the same when it is started again."""

    def __init__(self) -> None:
        self.address = f"tcp/127.0.0.1:{find_free_ports(1)[0]}"
        self._process: subprocess.Popen[str] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which nodes with rmw_zenoh reach it."""
        return {"ZENOH_CONFIG_OVERRIDE": f'connect/endpoints=["{self.address}"]'}

    def start(self) -> None:
        command = [sys.executable, str(Path(__file__).parent / "plugins/ros/zenoh_router.py"), self.address]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@pytest.fixture
def zenoh_router() -> Iterator[ZenohRouter]:
    """A router that runs."""
    pytest.importorskip("zenoh", reason="needs eclipse-zenoh: pip install '.[zenoh]'")
    router = ZenohRouter()
    router.start()
    yield router
    router.kill()


class RedisServer:
    """A Redis server as a process of its own, on a port that stays the same when it is killed and started again."""

    def __init__(self, binary: str, folder: Path) -> None:
        (self.port,) = find_free_ports(1)
        self._command = [
            binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            "--dir", str(folder), "--daemonize", "no",
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        libraries = os.environ.get("EDGE_TEST_REDIS_LIBRARIES", "")
        environment = {**os.environ, "LD_LIBRARY_PATH": libraries} if libraries else None
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, env=environment)
        end = time.monotonic() + 20
        while True:
            assert self._process.poll() is None, "Redis ended while it started"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(16).startswith(b"+PONG"):
                    return
            assert time.monotonic() < end, "Redis did not come up"
            time.sleep(0.01)

    def kill(self) -> None:
        """End it as a crash does. What it held is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        """Send a signal, such as the one that stops it in its tracks."""
        assert self._process is not None
        self._process.send_signal(number)

    def client(self) -> Any:
        """Return a client of its own to look into it."""
        import redis

        return redis.Redis(host="127.0.0.1", port=self.port)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A running Redis server, empty."""
    binary = os.environ.get("EDGE_TEST_REDIS_SERVER") or shutil.which("redis-server")
    if binary is None:
        pytest.skip("there is no redis-server; tests/serving/fetch_redis.sh brings one")
    server = RedisServer(binary, tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def start_server() -> Iterator[Callable[..., str]]:
    """Return a function that starts the installed server with more environment and returns its HTTP address."""
    with contextlib.ExitStack() as running:

        def start(repository: Path, *flags: str, environment: Mapping[str, str]) -> str:
            return running.enter_context(serve(repository, *flags, environment=environment)).http

        yield start


@pytest.fixture
def run_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a command in this process, for tests of its output and exit code."""
    from edge_server.cli.main import main

    for name in [name for name in os.environ if name.startswith("EDGE_SERVER_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            with logging_restored():
                code: Any = main(arguments)
        except SystemExit as end:
            code = end.code
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run


class TrialInThisProcess:
    """A candidate's process without the process."""

    def __init__(self, limits: Any, check: None) -> None:
        self._opened: Any = None

    def open(self, job: Any, report: Any) -> dict[str, Any]:
        from edge_server.plugins.trials.candidate_process_main import OpenedModel

        with self._failing():
            self._opened = OpenedModel(job, sys.stderr)
        return dict(self._opened.facts())

    def execute(self, command: str, **fields: Any) -> dict[str, Any]:
        with self._failing():
            return dict(getattr(self._opened, command)(fields))

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Fail as the process does: for a precision that this machine's processor lacks."""
        from edge_server.errors import EdgeServerError
        from edge_server.plugins.trials.candidate_process import CandidateFailed

        try:
            yield
        except EdgeServerError as error:
            self.end()
            raise CandidateFailed(error.message, type(error).__name__) from error

    def end(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    kill = end


@pytest.fixture
def tried_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries models in this process: for tests of what is said and written, as each process imports its runtime."""
    from edge_server.plugins.trials import comparison

    monkeypatch.setattr(comparison, "CandidateProcess", TrialInThisProcess)


@contextlib.contextmanager
def served_with_client_memory(models: Path, environment: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Start the installed server with more environment; yield the addresses of HTTP, gRPC and metrics."""
    with serve(models, "--allow-client-shm=true", "--governor=false", environment=environment) as server:
        yield server.http, server.grpc, server.metrics


@pytest.fixture
def serve_with_client_memory() -> Callable[..., contextlib.AbstractContextManager[tuple[str, str, str]]]:
    return served_with_client_memory


@pytest.fixture
def write_onnx(tmp_path: Path) -> Callable[..., ModelFile]:
    """Return a function that writes one graph as version 1 of a model; tensors are (name, element type, shape)."""

    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    from edge_server.backends.base import ModelFile

    def write(
        nodes: Sequence[Any],
        inputs: Sequence[tuple[str, int, list[Any] | None]],
        outputs: Sequence[tuple[str, int, list[Any] | None]],
        weights: Sequence[Any] = (),
        *,
        model: str = "made",
        name: str = "model.onnx",
        **save_options: Any,
    ) -> ModelFile:
        graph = helper.make_graph(
            list(nodes),
            "graph",
            [helper.make_tensor_value_info(*one) for one in inputs],
            [helper.make_tensor_value_info(*one) for one in outputs],
            list(weights),
        )
        # Old enough for every runtime that the project supports.
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        path = tmp_path / model / "1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(proto, path, **save_options)
        return ModelFile(path, tmp_path / model, 1)

    return write


@pytest.fixture
def job() -> Callable[..., OpenJob]:
    """Return a function that makes the job of opening one instance of a file."""
    from edge_server.backends.base import OpenJob
    from edge_server.core.model_spec import InstanceGroup, InstanceKind, ModelSpec

    def make(
        file: ModelFile,
        *,
        inputs: Sequence[InputSpec] = (),
        outputs: Sequence[OutputSpec] = (),
        backend: str = "",
        max_batch_size: int = 0,
        instances: int = 1,
        number: int = 0,
        settings: Mapping[str, str] | None = None,
        parameters: Mapping[str, str] | None = None,
        device_id: int | None = None,
        **spec: Any,
    ) -> OpenJob:
        name = file.model_dir.name
        model = ModelSpec(
            name=name,
            backend=backend,
            platform="",
            max_batch_size=max_batch_size,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            instance_groups=(InstanceGroup(name, InstanceKind.CPU, instances),),
            parameters=dict(parameters or {}),
            **spec,
        )
        return OpenJob(model, file, f"{name}_{number}", device_id, dict(settings or {}))

    return make


BROKER_PATIENCE_S = 60.0


class Broker:
    """Mosquitto on a port of its own, which stays the same when it is killed and started again."""

    def __init__(self, binary: str, folder: Path, port: int) -> None:
        self.port = port
        self._binary = binary
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *lines: str) -> None:
        """Start with these lines of configuration, by default for everybody."""
        config = self._folder / "mosquitto.conf"
        lines = lines or ("allow_anonymous true",)
        common = (f"listener {self.port} 127.0.0.1", "persistence false", "user root")
        config.write_text("\n".join([*common, *lines]) + "\n")
        libraries = os.environ.get("EDGE_TEST_CAMERA_SERVER_LIBRARIES", "")
        environment = {**os.environ, "LD_LIBRARY_PATH": libraries} if libraries else None
        self._process = subprocess.Popen(
            [self._binary, "-c", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )
        end_s = time.monotonic() + BROKER_PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), BROKER_PATIENCE_S).close()
                return
            except ConnectionError:
                assert time.monotonic() < end_s, "the broker did not start"
                time.sleep(0.002)

    def stop(self) -> None:
        """End it as its service would."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(BROKER_PATIENCE_S)
        self._process = None

    def freeze(self) -> None:
        """Stop it from running; its connections stay."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(BROKER_PATIENCE_S)
            self._process = None


@pytest.fixture
def broker(tmp_path: Path, free_ports: Callable[[int], list[int]]) -> Iterator[Broker]:
    pytest.importorskip("paho.mqtt.client", reason="needs paho-mqtt: pip install '.[test-all]'")
    binary = Path(os.environ.get("EDGE_TEST_CAMERA_SERVERS", "/")) / "usr/sbin/mosquitto"
    if not binary.exists():
        pytest.skip("needs the broker Mosquitto: tests/e2e/fetch_camera_servers.sh, or apt install mosquitto")
    made = Broker(str(binary), tmp_path, free_ports(1)[0])
    made.start()
    yield made
    made.kill()


class Listener:
    """A client that keeps the last message of each topic, as Home Assistant sees them."""

    def __init__(self, port: int) -> None:
        from paho.mqtt import client

        self.topics: dict[str, str] = {}
        self.payloads: dict[str, bytes] = {}
        self.retained: set[str] = set()
        self.count = 0
        self._client = client.Client(client.CallbackAPIVersion.VERSION2)
        self._client.on_connect = lambda *_: self._client.subscribe("#", qos=1)
        self._client.on_message = self._on_message
        self._client.on_subscribe = lambda *_: ready.set()
        ready = threading.Event()
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        assert ready.wait(BROKER_PATIENCE_S)

    def _on_message(self, client: Any, data: Any, message: Any) -> None:
        self.topics[message.topic] = message.payload.decode(errors="replace")
        self.payloads[message.topic] = message.payload
        self.count += 1
        if message.retain:
            self.retained.add(message.topic)

    def clear(self, topic: str) -> None:
        """Have the broker forget a topic."""
        self._client.publish(topic, "", qos=1, retain=True)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()
        # It closes its last sockets when nothing refers to it, and not in a circle of garbage.
        del self._client


@pytest.fixture
def listen(broker: Broker) -> Iterator[Callable[[], Listener]]:
    made: list[Listener] = []

    def make() -> Listener:
        made.append(Listener(broker.port))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert [thread.name for thread in threading.enumerate() if "paho" in thread.name] == []
