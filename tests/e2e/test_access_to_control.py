"""Control requests to an open server: Triton's own clients and curl may send them, a web page of another site may
not."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import pytest
import tritonclient.grpc
import tritonclient.http

from tests.kit.models import identity_config
from tests.kit.server import serve


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    module_repository.add("one", identity_config())
    with serve(
        module_repository.path, "--model-control-mode=explicit", "--allow-client-shm", "--http-allowed-host=box.test"
    ) as running:
        yield running
        running.stop_cleanly()


def curl(server: Any, *arguments: str) -> str:
    """Run curl against the server under the name box.test; return the status."""
    port = server.http.rpartition(":")[2]
    resolve = f"box.test:{port}:127.0.0.1"
    command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--noproxy", "*", "--resolve", resolve]
    arguments = tuple(argument.replace("PORT", port) for argument in arguments)
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=30, check=True).stdout


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_tritonclient_loads_unloads_and_registers(server: Any, wire: str) -> None:
    segment = SharedMemory(create=True, size=64)
    module = {"http": tritonclient.http, "grpc": tritonclient.grpc}[wire]
    try:
        with module.InferenceServerClient(getattr(server, wire)) as client:
            client.load_model("one")
            assert client.is_model_ready("one")
            client.register_system_shared_memory("r", segment.name, 64)
            client.unregister_system_shared_memory("r")
            client.update_log_settings({"log_verbose_level": 0})
            client.update_trace_settings(settings={"trace_rate": "1000"})
            client.unload_model("one")
            assert not client.is_model_ready("one")
    finally:
        segment.close()
        segment.unlink()


@pytest.mark.parametrize("host", ["box.test", "localhost", "127.0.0.1"])
def test_curl_controls_models_under_any_host_name(server: Any, host: str) -> None:
    url = f"http://{host}:PORT/v2/repository/models/one"
    assert curl(server, "-X", "POST", "-d", "{}", f"{url}/load") == "200"
    assert curl(server, "-X", "POST", "-d", "", f"{url}/unload") == "200"
    assert curl(server, "-X", "POST", f"{url}/load") == "200"
    assert curl(server, "-H", "Content-Type: text/plain", "-d", "{}", f"{url}/load") == "403"


def test_a_page_of_another_site_loads_nothing(server: Any) -> None:
    url = "http://box.test:PORT/v2/repository/models/one/load"
    json = ("-H", "Content-Type: application/json", "-d", "{}", url)
    assert curl(server, "-H", "Origin: http://evil.example", *json) == "403"
    assert curl(server, "-H", "Origin: http://box.test:PORT", *json) == "200"
