"""Rolling restarts of three servers lose no gRPC request: with grpc's own balancing, nginx, Caddy and Envoy.

The service config is that of docs/deployment.md, the proxies' configurations are those of fleet/grpc.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from edge_server.protocol import messages
from tests.kit.server import COMMAND

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    name: os.environ.get(f"EDGE_TEST_{name.upper()}") or shutil.which(name) or ""
    for name in ("nginx", "caddy", "envoy")
}
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
INFER = "/inference.GRPCInferenceService/ModelInfer"
LIMIT_S = 120

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

TENSORS = 'input { name: "x" data_type: TYPE_FP32 dims: [1] } output { name: "y" data_type: TYPE_FP32 dims: [1] }'
CODE = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        time.sleep(1.5)  # as long as a model of some size

    def execute(self, requests):
        time.sleep(0.005)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy())])
            for r in requests
        ]
"""


class Servers:
    """Servers of the same ports, each on an address of its own."""

    def __init__(self, folder: Path, ports: list[int], *flags: str) -> None:
        self.http, self.grpc = ports
        models = folder / "models"
        (models / "m" / "1").mkdir(parents=True)
        (models / "m" / "config.pbtxt").write_text(f'backend: "python" {TENSORS}')
        (models / "m" / "1" / "model.py").write_text(CODE)
        self._command = [
            str(COMMAND), "serve", f"--model-repository={models}", f"--http-port={self.http}",
            f"--grpc-port={self.grpc}", "--allow-metrics=false", "--drain-delay-secs=1", *flags,
        ]  # fmt: skip
        self._log = folder / "servers.log"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, address: str) -> None:
        with self._log.open("ab") as log:
            self._processes[address] = subprocess.Popen(
                [*self._command, f"--http-address={address}", f"--grpc-address={address}"], stdout=log, stderr=log
            )

    def wait_until_ready(self, address: str) -> None:
        def is_ready() -> bool:
            assert self._processes[address].poll() is None, self._log.read_text()
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://{address}:{self.http}/v2/health/ready", timeout=20),
            ):
                return True
            return False

        wait_until(is_ready)

    def answered(self, address: str) -> int:
        """Return how many requests a server has answered since its start."""
        with urllib.request.urlopen(f"http://{address}:{self.http}/v2/models/m/stats", timeout=20) as reply:
            return int(json.load(reply)["model_stats"][0]["inference_count"])

    def stop(self, address: str) -> None:
        self._processes[address].send_signal(signal.SIGTERM)
        assert self._processes[address].wait(60) == 0

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


class Load:
    """Threads that send one request after the other on one channel until the end of the `with` block."""

    def __init__(self, target: str, options: list[tuple[str, Any]], thread_count: int = 4) -> None:
        request = messages.ModelInferRequest(model_name="m", raw_input_contents=[bytes(4)])
        request.inputs.add(name="x", datatype="FP32", shape=[1])
        self._message = request.SerializeToString()
        self._channel = grpc.insecure_channel(target, [*options, ("grpc.use_local_subchannel_pool", 1)])
        self._is_over = threading.Event()
        self.counts = [0] * thread_count
        self.lost: list[str] = []
        self._threads = [threading.Thread(target=self._send, args=(index,)) for index in range(len(self.counts))]

    def __enter__(self) -> Load:
        # A proxy that has just started may refuse the first connection.
        grpc.channel_ready_future(self._channel).result(LIMIT_S)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)
        self._channel.close()

    def wait_for_more(self, count: int) -> None:
        goals = [before + count for before in self.counts]
        wait_until(lambda: all(now >= goal for now, goal in zip(self.counts, goals, strict=True)))

    def _send(self, index: int) -> None:
        call = self._channel.unary_unary(INFER)
        while not self._is_over.is_set():
            try:
                call(self._message, timeout=30)
            except grpc.RpcError as error:
                self.lost.append(f"{time.time():.3f} {error.code()}: {error.details()}")
            self.counts[index] += 1
            time.sleep(0.01)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.05)


def roll(servers: Servers, load: Load) -> None:
    load.wait_for_more(20)
    for address in ADDRESSES:
        servers.stop(address)
        servers.start(address)
        servers.wait_until_ready(address)
        # Clients and proxies may wait before they connect again. Without this server the next stop would leave fewer.
        wait_until(lambda address=address: servers.answered(address) > 0)
    print(f"requests: {sum(load.counts)}, lost: {len(load.lost)}")


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], list[int]]
) -> Iterator[Callable[..., Servers]]:
    """Return the three servers with these flags; the first call starts them."""
    made: dict[tuple[str, ...], Servers] = {}

    def start_all(*flags: str) -> Servers:
        if flags not in made:
            made[flags] = Servers(tmp_path_factory.mktemp("servers"), free_ports(2), *flags)
            for address in ADDRESSES:
                made[flags].start(address)
        for address in ADDRESSES:
            made[flags].wait_until_ready(address)
        return made[flags]

    yield start_all
    for servers in made.values():
        servers.kill()


def balanced(servers: Servers, *names: str) -> tuple[str, list[tuple[str, Any]]]:
    """Return target and options of a channel with these parts of the documented service config."""
    section = (ROOT / "docs/deployment.md").read_text().partition("## gRPC clients")[2]
    found = re.search(r"```json\n(.*?)```", section, re.DOTALL)
    assert found is not None
    config = json.loads(found[1])
    chosen = {name: config[name] for name in ("loadBalancingConfig", *names)}
    options = [
        ("grpc.service_config", json.dumps(chosen)),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    return "ipv4:" + ",".join(f"{address}:{servers.grpc}" for address in ADDRESSES), options


@pytest.mark.parametrize(
    ("flag", "parts", "loses"),
    [
        ("when-loaded", (), False),
        # Of the settings that help, one; each takes 20 s.
        pytest.param("when-loaded", ("healthCheckConfig",), False, marks=pytest.mark.long),
        # What the two others do is needed: without them requests are lost.
        ("at-start", (), True),
        pytest.param("at-start", ("healthCheckConfig",), False, marks=pytest.mark.long),
        pytest.param("at-start", ("methodConfig",), False, marks=pytest.mark.long),
    ],
)
def test_clients_that_balance_by_round_robin_lose_no_request(
    start: Callable[..., Servers], flag: str, parts: tuple[str, ...], loses: bool
) -> None:
    servers = start(f"--grpc-listen={flag}")
    with Load(*balanced(servers, *parts)) as load:
        roll(servers, load)
    assert bool(load.lost) is loses, "\n".join(load.lost[:20])


def shipped(name: str) -> str:
    return (ROOT / "fleet/grpc" / name).read_text()


def replaced(text: str, pairs: dict[str, str]) -> str:
    for old, new in pairs.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize(
    "kind", ["nginx", pytest.param("caddy", marks=pytest.mark.long), pytest.param("envoy", marks=pytest.mark.long)]
)
def test_clients_of_a_proxy_with_the_shipped_configuration_lose_no_request_while_a_server_starts(
    start: Callable[..., Servers], tmp_path: Path, free_ports: Callable[[int], list[int]], kind: str
) -> None:
    if not PROGRAMS[kind]:
        pytest.skip(f"there is no {kind}; tests/fleet/fetch_proxies.sh brings one")
    servers = start("--grpc-listen=when-loaded")
    (port,) = free_ports(1)
    pairs = {f"192.0.2.1{index}:8001": f"{address}:{servers.grpc}" for index, address in enumerate(ADDRESSES, 1)}
    if kind == "nginx":
        text = replaced(shipped("nginx.conf"), {**pairs, "listen 9001": f"listen 127.0.0.1:{port}"})
        folders = "".join(
            f"{name}_temp_path {tmp_path}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        config = tmp_path / "nginx.conf"
        config.write_text(
            f"daemon off; master_process off; pid {tmp_path}/pid; error_log stderr;\n"
            f"events {{}}\nhttp {{ access_log off; {folders}\n{text}\n}}\n"
        )
        command = [PROGRAMS[kind], "-p", str(tmp_path), "-e", "stderr", "-c", str(config)]
    elif kind == "envoy":
        pairs = {f"192.0.2.1{index}": address for index, address in enumerate(ADDRESSES, 1)}
        pairs |= {
            "port_value: 8001": f"port_value: {servers.grpc}",
            "0.0.0.0, port_value: 9001": f"127.0.0.1, port_value: {port}",
        }
        config = tmp_path / "envoy.yaml"
        config.write_text(replaced(shipped("envoy.yaml"), pairs))
        command = [PROGRAMS[kind], "-c", str(config), "--concurrency", "1", "--disable-hot-restart", "-l", "warning"]
    else:
        pairs |= {"http://:9001": f"http://:{port}"}
        config = tmp_path / "Caddyfile"
        config.write_text(replaced(shipped("Caddyfile"), {**pairs, "{\n    servers": "{\n    admin off\n    servers"}))
        command = [PROGRAMS[kind], "run", "--adapter", "caddyfile", "--config", str(config)]
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    log_path = tmp_path / "proxy.log"
    with log_path.open("wb") as log:
        proxy = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        # So many that Envoy has to repeat more requests at once than it does by default.
        with Load(f"127.0.0.1:{port}", [], 32 if kind == "envoy" else 4) as load:
            roll(servers, load)
    finally:
        proxy.terminate()
        proxy.wait(30)
    # nginx repeats no gRPC request that it has sent: one on its way to a server that closes is lost.
    most = len(ADDRESSES) if kind == "nginx" else 0
    assert len(load.lost) <= most, "\n".join([*load.lost[:20], log_path.read_text()[:5000]])
