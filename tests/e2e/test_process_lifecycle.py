"""Start and stop of the server, and every reason why it cannot start: one clear line and the right exit code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc

from tests.kit.eventually import eventually
from tests.kit.infer_input import infer_input
from tests.kit.model_folder import parameters
from tests.kit.models import identity_body, identity_config
from tests.kit.server import COMMAND, serve

IDLE_LIMIT_BYTES = 56_000_000
RUNTIME_LIBRARIES = ("onnxruntime", "openvino", "cv2", "opencv", "numpy")


def slow_config(delay_ms: int) -> str:
    return identity_config(more=parameters(execute_delay_ms=delay_ms))


def occupy(server: Any, pool: ThreadPoolExecutor) -> tuple[Any, Any]:
    """Ask the model `slow` twice, and return both answers to come once one request runs and the other waits for it."""
    asked = (pool.submit(server.infer, "slow", identity_body()), pool.submit(server.infer, "slow", identity_body()))
    assert eventually(lambda: server.read_counters("slow")["nv_inference_pending_request_count"] == 1)
    return asked


def test_the_banner_names_models_runtimes_and_addresses(repository: Any) -> None:
    repository.add_sub("plus", 'backend: "onnxruntime"')
    with serve(repository.path) as server:
        assert server.stop() == 0
        output = server.output()
    head, *lines = output.splitlines()
    assert f"http://{server.http}" in head
    assert server.grpc in head
    assert f"http://{server.metrics}/metrics" in head
    # Loopback by default, and how to open it.
    assert server.http.startswith("127.0.0.1:")
    assert "--http-address=0.0.0.0" in head
    assert len(lines) == 1
    assert "plus version 1: onnxruntime" in lines[0]
    assert "instance(s), loaded in" in lines[0]


def test_the_banner_of_many_models_has_a_line_for_those_that_run_alike(repository: Any) -> None:
    for number in range(9):
        repository.add_sub(f"plus_{number}", 'backend: "onnxruntime"')
    with serve(repository.path) as server:
        assert server.stop() == 0
        lines = server.output().splitlines()[1:]
    assert [line.partition(":")[0] for line in lines] == ["  9 models (plus_0, plus_1, plus_2, ...)"]


def test_an_idle_server_is_small_and_imports_a_runtime_with_its_first_model(repository: Any) -> None:
    repository.add_sub("plus", 'backend: "onnxruntime"')
    with serve(repository.path, "--model-control-mode=explicit") as server:
        for _ in range(3):
            assert server.get("/v2/health/ready")[0] == 200
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            assert client.is_server_ready()
        server.read_metrics()
        mapped = Path(f"/proc/{server.process.pid}/maps").read_text()
        loaded = [name for name in RUNTIME_LIBRARIES if name in mapped]
        assert loaded == [], f"libraries of runtimes are mapped: {loaded}"
        resident = server.resident_bytes()
        assert resident < IDLE_LIMIT_BYTES, (
            f"{resident / 1e6:.1f} MB resident with no model loaded, limit {IDLE_LIMIT_BYTES / 1e6:g} MB"
        )
        # The first model that needs a runtime has it imported, and no other.
        assert server.ask("/v2/repository/models/plus/load", {})[0] == 200
        mapped = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "onnxruntime" in mapped
        assert "openvino" not in mapped


# The next test drains by SIGINT.
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_signal_drains_running_requests_and_exits_zero(repository: Any, number: int) -> None:
    repository.add("slow", slow_config(1500))
    with (
        serve(repository.path) as server,
        ThreadPoolExecutor(3) as pool,
        contextlib.closing(server.connection()) as kept,
        tritonclient.grpc.InferenceServerClient(server.grpc) as grpc_client,
    ):
        tensor = infer_input(tritonclient.grpc, "INPUT0", np.zeros((1, 1), np.int32))
        kept.request("GET", "/v2/health/ready")
        kept.getresponse().read()
        first = pool.submit(server.infer, "slow", identity_body())
        second = pool.submit(grpc_client.infer, "slow", [tensor])
        assert eventually(lambda: server.read_counters("slow")["nv_inference_pending_request_count"] == 1)
        server.process.send_signal(number)
        assert eventually(lambda: "refusing new requests" in server.log())

        def status_on_kept_connection() -> int:
            try:
                kept.request("POST", "/v2/models/slow/infer", json.dumps(identity_body()))
                reply = kept.getresponse()
                reply.read()
                return reply.status
            except OSError:
                return 0

        # An open connection gets an error; a new one may not be accepted at all.
        assert eventually(lambda: status_on_kept_connection() in (0, 503), 1.0)
        assert first.result()[0] == 200
        assert second.result().as_numpy("OUTPUT0").tolist() == [[0]]
        assert server.process.wait(20) == 0
        with pytest.raises(OSError):
            server.get("/v2/health/live")
        assert "Traceback" not in server.log(), server.log()


def test_a_second_signal_ends_the_server_at_once(repository: Any) -> None:
    repository.add("slow", slow_config(60_000))
    with serve(repository.path) as server, ThreadPoolExecutor(2) as pool:
        asked, _ = occupy(server, pool)
        server.process.terminate()
        assert eventually(lambda: "refusing new requests" in server.log())
        assert server.process.poll() is None
        server.process.terminate()
        assert server.process.wait(5) != 0
        assert isinstance(asked.exception(30), OSError)


def test_requests_that_outlast_the_exit_timeout_fail_and_set_the_exit_code(repository: Any) -> None:
    repository.add("slow", slow_config(60_000))
    with serve(repository.path, "--exit-timeout-secs=0.3") as server, ThreadPoolExecutor(2) as pool:
        asked, _ = occupy(server, pool)
        server.process.terminate()
        assert server.process.wait(15) == 1
        if asked.exception(30) is None:
            assert asked.result()[0] == 503


def test_an_idle_server_stops_at_once_and_leaves_no_files(repository: Any) -> None:
    repository.add("same", identity_config())
    with serve(repository.path) as server:
        pid = server.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert server.infer("same", identity_body())[0] == 200
        assert server.stop(timeout_s=10) == 0
        assert not Path(f"/proc/{pid}/task").exists()
        assert not [child for child in children if Path(f"/proc/{child}").exists()]
        # The ports are free again.
        for address in (server.http, server.grpc, server.metrics):
            host, port = address.rsplit(":", 1)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, int(port)))


def test_an_unclosed_client_connection_does_not_delay_the_stop(repository: Any) -> None:
    repository.add("same", identity_config())
    with serve(repository.path) as server:
        host, port = server.http.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as idle, grpc.insecure_channel(server.grpc) as channel:
            idle.sendall(b"POST /v2/models/same/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            grpc.channel_ready_future(channel).result(10)
            assert server.stop(timeout_s=15) == 0


def serve_once(*flags: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a `serve` that is expected to end by itself."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("EDGE_SERVER_")}
    return subprocess.run(
        [str(COMMAND), "serve", *flags], capture_output=True, text=True, timeout=30, env={**kept, **(environment or {})}
    )


def is_one_clear_line(done: subprocess.CompletedProcess[str], *words: str, code: int = 78) -> bool:
    """78: only a change of the configuration helps, and a service manager does not try again. 2: trying may help."""
    lines = done.stderr.strip().splitlines()
    assert done.returncode == code, done
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0], lines[0]
    return True


@pytest.mark.parametrize("which", ["http", "grpc", "metrics"])
def test_a_port_in_use_is_one_line_and_exit_code_2(tmp_path: Path, which: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = dict.fromkeys(("http", "grpc", "metrics"), "0") | {which: str(port)}
        flags = [f"--{name}-port={number}" for name, number in ports.items()]
        assert is_one_clear_line(serve_once(f"--model-repository={tmp_path}", *flags), str(port), code=2)


def test_a_missing_repository_is_one_line_and_exit_code_2(tmp_path: Path, run_command: Any) -> None:
    assert is_one_clear_line(serve_once(f"--model-repository={tmp_path}/nowhere"), "nowhere", code=2)
    file = tmp_path / "file"
    file.touch()
    assert is_one_clear_line(run_command("serve", f"--model-repository={file}"), str(file), code=2)
    assert is_one_clear_line(run_command("serve"), "--model-repository")


def test_an_unavailable_address_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    done = serve_once(f"--model-repository={tmp_path}", *ports, "--http-address=300.1.2.3")
    assert is_one_clear_line(done, "300.1.2.3", code=2)


def test_a_failed_model_fails_the_start_on_request(repository: Any) -> None:
    repository.add("bad", 'backend: "no_such_runtime"')
    ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    done = serve_once(f"--model-repository={repository.path}", "--exit-on-error", *ports)
    assert done.returncode == 1
    assert "no_such_runtime" in done.stderr + done.stdout


def test_the_log_warns_of_flags_without_effect_and_omits_single_requests(repository: Any) -> None:
    repository.add("same", identity_config())
    flags = ["--http-thread-count=8", "--pinned-memory-pool-byte-size=0", "--backend-directory=/opt"]
    with serve(repository.path, "--log-format=json", *flags) as server:
        for flag in flags:
            assert flag.split("=")[0] in server.log()
        before = len(server.log().splitlines())
        for number in range(20):
            server.infer("same" if number % 2 else "nobody", identity_body())
        assert len(server.log().splitlines()) == before
        assert server.stop() == 0
        for line in server.log().splitlines():
            assert isinstance(json.loads(line), dict), line


def test_python_m_edge_server_is_the_same_command() -> None:
    version = subprocess.run([str(COMMAND), "--version"], capture_output=True, text=True, timeout=30, check=True)
    same = subprocess.run(
        [sys.executable, "-m", "edge_server", "--version"], capture_output=True, text=True, timeout=30, check=True
    )
    assert version.stdout == same.stdout
    assert version.stdout.startswith("edge-server ")
