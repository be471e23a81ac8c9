"""The installed server in its own process, and repositories of small real models for it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.kit.eventually import eventually

COMMAND = Path(sys.executable).parent / "edge-server"
PACKAGES = Path(__file__).parents[1] / "kit/packages"
"""Backends of another package, for each server; see tests/README.md."""
READY = re.compile(r"edge-server \S+ is ready: (.*)")
START_LIMIT_S = 120.0


@dataclass
class ServerProcess:
    """One `edge-server serve`. `http`, `grpc` and `metrics` are "host:port"."""

    process: subprocess.Popen[str]
    http: str = ""
    grpc: str = ""
    metrics: str = ""
    banner: list[str] = field(default_factory=list)
    stderr_path: Path = Path(os.devnull)
    _reader: threading.Thread = field(default_factory=threading.Thread)

    def read_ahead(self) -> None:
        """Collect the rest of the standard output as it comes, so that the server never waits for a reader."""

        def collect() -> None:
            assert self.process.stdout is not None
            with self.process.stdout as lines:
                self.banner.extend(line.rstrip() for line in lines)

        self._reader = threading.Thread(target=collect)
        self._reader.start()

    def output(self) -> str:
        """Return everything the server printed, once it has ended."""
        self.process.wait(30)
        self._reader.join(30)
        return "\n".join(self.banner)

    def url(self, path: str) -> str:
        return f"http://{self.http}{path}"

    def get(self, path: str) -> tuple[int, bytes]:
        return self.request("GET", path)

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Return status and body, whatever the status is."""
        request = urllib.request.Request(self.url(path), data=body, headers=headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def ask(self, path: str, body: object = None, *, method: str | None = None) -> tuple[int, Any]:
        """Send JSON (POST) or nothing (GET); return the status and the answer read as JSON, None when it is empty."""
        data = None if body is None else json.dumps(body).encode()
        status, text = self.request(method or ("GET" if body is None else "POST"), path, data)
        return status, json.loads(text) if text else None

    def infer(self, model: str, body: dict[str, Any]) -> tuple[int, Any]:
        return self.ask(f"/v2/models/{model}/infer", body)

    def connection(self) -> http.client.HTTPConnection:
        """Return a separate connection, for requests that urllib would correct. The caller closes it."""
        return http.client.HTTPConnection(self.http, timeout=30)

    def read_counters(self, model: str) -> dict[str, float]:
        """Return the metrics of one model: name (with ` reason` where it has one) -> value."""
        found = {}
        for name, labels, value in re.findall(r"^(\w+)\{(.*)\} (\S+)$", self.read_metrics(), re.MULTILINE):
            if f'model="{model}"' in labels:
                reason = re.search(r'reason="(\w+)"', labels)
                found[f"{name} {reason[1]}" if reason else name] = float(value)
        return found

    def statistics(self, model: str) -> dict[str, Any]:
        status, answer = self.ask(f"/v2/models/{model}/stats")
        assert status == 200, answer
        return answer["model_stats"][0]

    def notes(self, model: str) -> list[str]:
        loaded = self.ask("/edge/v1/models")[1]["models"]
        return next(item["notes"] for item in loaded if item["name"] == model)

    def read_metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=30) as reply:
            return reply.read().decode()

    def log(self) -> str:
        return self.stderr_path.read_text()

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


@functools.cache
def machine_without_sensors() -> str:
    """Return a folder with this machine's /proc and /etc. Without its /sys: no test depends on the heat of this one."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    os.chmod(folder.name, 0o755)
    for name in ("proc", "etc"):
        os.symlink(f"/{name}", f"{folder.name}/{name}")
    return folder.name


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without what would configure a server. The server finds no sensors."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("EDGE_SERVER_")}
    kept["EDGE_SERVER_SYSFS_ROOT"] = machine_without_sensors()
    return {**kept, **(more or {})}


def start(
    repository: Path, *flags: str, stderr_path: Path, environment: Mapping[str, str] | None = None, ulimit: str = ""
) -> ServerProcess:
    """Start a server on free ports and wait for its ready line. `ulimit` are arguments of the shell's command."""
    variables = clean_environment(environment)
    packages = (variables.get("PYTHONPATH"), str(PACKAGES))
    limited = ["sh", "-c", f'ulimit {ulimit} && exec "$0" "$@"'] if ulimit else []
    with open(stderr_path, "w") as stderr:
        process = subprocess.Popen(
            [
                *limited, str(COMMAND), "serve", f"--model-repository={repository}",
                "--http-port=0", "--grpc-port=0", "--metrics-port=0", *flags,
            ],
            stdout=subprocess.PIPE, stderr=stderr, text=True,
            env={"PYTHONFAULTHANDLER": "1", **variables, "PYTHONPATH": os.pathsep.join(filter(None, packages))},
        )  # fmt: skip
    server = ServerProcess(process, stderr_path=stderr_path)
    # A server that hangs while starting is ended, so that the read below ends too, and says where its threads are.
    limit = threading.Timer(START_LIMIT_S, process.send_signal, (signal.SIGABRT,))
    limit.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            server.banner.append(line.rstrip())
            found = READY.match(line)
            if found:
                addresses = found[1]
                server.read_ahead()
                server.http = re.search(r"HTTP https?://([^;\s]+)", addresses)[1] if "HTTP" in addresses else ""
                server.grpc = re.search(r"gRPC ([^;\s]+)", addresses)[1] if "gRPC" in addresses else ""
                server.metrics = re.search(r"metrics https?://([^/]+)/", addresses)[1] if "metrics" in addresses else ""
                return server
    finally:
        limit.cancel()
    process.stdout.close()
    raise AssertionError(f"the server ended with {process.wait()} before it was ready:\n{stderr_path.read_text()}")


@contextlib.contextmanager
def running(
    repository: Path, *flags: str, environment: Mapping[str, str] | None = None, ulimit: str = ""
) -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stderr.log"
        server = start(repository, *flags, stderr_path=log, environment=environment, ulimit=ulimit)
        try:
            yield server
        finally:
            if server.process.poll() is None:
                server.process.terminate()
                try:
                    server.process.wait(30)
                except subprocess.TimeoutExpired:
                    server.process.kill()
                    server.process.wait()
            server.output()


@pytest.fixture(scope="session")
def serve() -> Callable[..., contextlib.AbstractContextManager[ServerProcess]]:
    """`with serve(repository, *flags) as server:`"""
    return running


class SharedServers:
    """One server for each set of flags, in explicit mode, started when a test first asks for it.

    `with shared_server(repository, *flags) as server:` adds the models in the folder `repository` under their own
    names, loads them, and removes them at the end. So tests share a server and do not see each other's models.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[tuple[str, ...], tuple[ServerProcess, Path]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> SharedServers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def __call__(self, repository: Path, *flags: str) -> Iterator[ServerProcess]:
        server, models = self._running.get(flags) or self._start(flags)
        names = sorted(folder.name for folder in repository.iterdir() if folder.is_dir())
        for name in names:
            shutil.copytree(repository / name, models / name, symlinks=True)
        try:
            for name in names:
                status, text = server.request("POST", f"/v2/repository/models/{name}/load", b"{}")
                assert status == 200, text
            yield server
        finally:
            for name in names:
                server.request("POST", f"/v2/repository/models/{name}/unload", b"{}")
            # Orders are answered before versions have ended; the next test may load a model of the same name.
            eventually(lambda: not self._unloading(server).intersection(names))
            for name in names:
                shutil.rmtree(models / name)

    @staticmethod
    def _unloading(server: ServerProcess) -> set[str]:
        _, index = server.ask("/v2/repository/index", {})
        return {entry["name"] for entry in index if entry.get("state") == "UNLOADING"}

    def _start(self, flags: tuple[str, ...]) -> tuple[ServerProcess, Path]:
        models = self._folder / str(len(self._running))
        models.mkdir()
        server = self._stack.enter_context(running(models, "--model-control-mode=explicit", *flags))
        self._stack.callback(self._check, server)
        self._running[flags] = server, models
        return self._running[flags]

    @staticmethod
    def _check(server: ServerProcess) -> None:
        assert server.stop() == 0
        assert "Traceback" not in server.log(), server.log()


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServers]:
    with SharedServers(tmp_path_factory.mktemp("shared")) as servers:
        yield servers


class Repository:
    """A model repository being written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, name: str, config: str = "", version: int = 1, model: onnx.ModelProto | None = None) -> Path:
        folder = self.path / name
        (folder / str(version)).mkdir(parents=True, exist_ok=True)
        if config:
            (folder / "config.pbtxt").write_text(config)
        if model is not None:
            (folder / str(version) / "model.onnx").write_bytes(model.SerializeToString())
        return folder

    def add_sub(self, name: str = "add_sub", config: str = "", version: int = 1) -> Path:
        """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, FP32 [batch, 16]."""
        return self.add(name, config, version, add_sub_model())


def add_sub_model() -> onnx.ModelProto:
    tensors = {
        key: helper.make_tensor_value_info(key, TensorProto.FLOAT, ["batch", 16])
        for key in ("INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1")
    }
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
            helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
        ],
        "add_sub",
        [tensors["INPUT0"], tensors["INPUT1"]],
        [tensors["OUTPUT0"], tensors["OUTPUT1"]],
    )
    return finish(graph)


def conv_model(channels: int = 8) -> onnx.ModelProto:
    """A small convolutional net: FP32 [batch, 3, 32, 32] -> FP32 [batch, 10], seeded weights."""
    generator = np.random.default_rng(7)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(generator.standard_normal(shape, np.float32) * 0.2, name)

    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["image", "w0", "b0"], ["c0"], kernel_shape=[3, 3], strides=[2, 2]),
            helper.make_node("Relu", ["c0"], ["r0"]),
            helper.make_node("GlobalAveragePool", ["r0"], ["p0"]),
            helper.make_node("Flatten", ["p0"], ["f0"]),
            helper.make_node("Gemm", ["f0", "w1", "b1"], ["scores"]),
        ],
        "conv",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 32, 32])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 10])],
        [weight("w0", channels, 3, 3, 3), weight("b0", channels), weight("w1", channels, 10), weight("b1", 10)],
    )
    return finish(graph)


def finish(graph: onnx.GraphProto) -> onnx.ModelProto:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.checker.check_model(model)
    return model


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    path = tmp_path / "models"
    path.mkdir()
    return Repository(path)


@pytest.fixture(scope="module")
def module_repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return Repository(tmp_path_factory.mktemp("models"))


BUNDLED = Path(__file__).parents[2] / "model_repository"
COFFEE = Path(__file__).parents[1] / "data" / "coffee.jpg"

DTYPES = {
    "BOOL": "BOOL", "UINT8": "UINT8", "UINT16": "UINT16", "UINT32": "UINT32", "UINT64": "UINT64",
    "INT8": "INT8", "INT16": "INT16", "INT32": "INT32", "INT64": "INT64",
    "FP16": "FP16", "BF16": "BF16", "FP32": "FP32", "FP64": "FP64", "BYTES": "STRING",
}  # fmt: skip
"""Every data type: its name on the wire -> its name in config.pbtxt, without TYPE_."""


def identity_config(
    datatype: str = "INT32", dims: str = "-1", *, inputs: int = 1, batch: int = 8, more: str = ""
) -> str:
    """Return the config.pbtxt of a model that gives INPUTn back as OUTPUTn."""
    kind = f"TYPE_{DTYPES[datatype]}"
    lines = ['backend: "identity"', f"max_batch_size: {batch}"]
    for index in range(inputs):
        lines.append(f'input {{ name: "INPUT{index}" data_type: {kind} dims: [{dims}] }}')
        lines.append(f'output {{ name: "OUTPUT{index}" data_type: {kind} dims: [{dims}] }}')
    return "\n".join([*lines, more])


REPEAT = """
backend: "repeat"
model_transaction_policy { decoupled: true }
max_batch_size: 0
input { name: "IN" data_type: TYPE_INT32 dims: [-1] }
input { name: "DELAY" data_type: TYPE_UINT32 dims: [-1] }
input { name: "WAIT" data_type: TYPE_UINT32 dims: [1] }
output { name: "OUT" data_type: TYPE_INT32 dims: [1] }
output { name: "IDX" data_type: TYPE_UINT32 dims: [1] }
"""

LABELLED = """
backend: "identity"
max_batch_size: 4
input { name: "INPUT0" data_type: TYPE_FP32 dims: [4] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [4] label_filename: "labels.txt" }
"""


def write_zoo(repository: Repository) -> None:
    """Write one model of every kind that clients ask for."""
    for datatype in DTYPES:
        repository.add(f"same_{datatype}", identity_config(datatype))
    repository.add("same_pair", identity_config("FP32", inputs=2))
    repository.add("fixed", identity_config("INT32", "2, 3", inputs=2, batch=0))
    slow = 'parameters { key: "execute_delay_ms" value { string_value: "300" } }'
    repository.add("slow", identity_config("INT32", more=slow))
    repository.add("failing", 'backend: "stub"\n' + STUB_TENSORS + FAILING)
    repository.add("repeat", REPEAT)
    labelled = repository.add("labelled", LABELLED)
    (labelled / "labels.txt").write_text("cat\ndog\nhen\nowl\n")
    for backend in ("onnxruntime", "openvino"):
        repository.add_sub(f"add_sub_{backend}", f'backend: "{backend}"')
        repository.add(f"conv_{backend}", f'backend: "{backend}"\nmax_batch_size: 4', model=conv_model())
    for version in (1, 2, 4):
        repository.add_sub("versions", 'backend: "onnxruntime"\nversion_policy { all {} }', version)


FAILING = """
parameters { key: "stub_fail" value { string_value: "true" } }
parameters { key: "warmup_probe" value { string_value: "false" } }
"""

STUB_TENSORS = """
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [4] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [4] }
"""


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server of many models, shared by the tests that do not change it."""
    repository = Repository(tmp_path_factory.mktemp("zoo"))
    write_zoo(repository)
    with running(repository.path) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log(), server.log()


@pytest.fixture(scope="session")
def identity() -> Callable[..., str]:
    """`identity("FP32", "-1", inputs=1, batch=8, more="")` is the text of a config.pbtxt."""
    return identity_config


@pytest.fixture(scope="session")
def conv() -> onnx.ModelProto:
    return conv_model()


@pytest.fixture(scope="session")
def repeat_config() -> str:
    return REPEAT


@pytest.fixture(scope="session")
def bundled_repository() -> Path:
    return BUNDLED


@pytest.fixture(scope="session")
def picture() -> bytes:
    """A gray JPEG of 640 x 480 pixels."""
    cv2 = pytest.importorskip("cv2")
    return bytes(cv2.imencode(".jpg", np.full((480, 640, 3), 90, np.uint8))[1])


@pytest.fixture(scope="session")
def coffee() -> Path:
    """A photograph of a cup of espresso, JPEG."""
    return COFFEE


SAMPLED_DTYPES = ("BF16", "BYTES", "UINT64")
"""No JSON form; elements of any length; numbers beyond what a float holds. The codecs are tested with all types."""


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=[] if name in SAMPLED_DTYPES else pytest.mark.full) for name in sorted(DTYPES)],
)
def datatype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Looped:
    """A client of coroutines as plain tests use a client: each call runs until it is answered.

    `make` is called with `address` on the running loop. `aio` is the client itself; `run` runs what uses it.
    """

    def __init__(self, make: Callable[[str], Any], address: str) -> None:
        async def connect() -> Any:
            return make(address)

        self._loop = asyncio.new_event_loop()
        self.aio = self.run(connect())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.aio, name)
        return lambda *arguments, **more: self.run(method(*arguments, **more))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self.aio.close())
        self._loop.close()


@pytest.fixture(scope="session")
def looped() -> type[Looped]:
    return Looped


@pytest.fixture(scope="session")
def sample() -> Callable[[str], np.ndarray]:
    """`sample("INT8")`: values of that type [2, 5] with the extremes among them; BF16 as ml_dtypes.bfloat16."""
    return sample_values


def sample_values(datatype: str) -> np.ndarray:
    if datatype == "BYTES":
        texts = [b"", b"a", "grüß".encode(), b"\x00\xff\xfe", b"x" * 300, b"1", b"\n", b'"', b"\\", b"last"]
        return np.array(texts, dtype=object).reshape(2, 5)
    if datatype == "BOOL":
        return np.array([[True, False, True, True, False], [False, False, True, False, True]])
    if datatype in ("FP16", "BF16", "FP32", "FP64"):
        kind = {"FP16": np.float16, "BF16": ml_dtypes.bfloat16, "FP32": np.float32, "FP64": np.float64}[datatype]
        return np.array([[0.0, -0.0, 1.5, -2.25, 1024], [0.5, -1, 3, 96, -0.125]], dtype=kind)
    kind = np.dtype(datatype.lower())
    limits = np.iinfo(kind)
    return np.array([[limits.min, limits.max, 0, 1, 2], [3, 4, 5, limits.max - 1, limits.min + 1]], dtype=kind)
