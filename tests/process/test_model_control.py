"""Load and unload calls of Triton's own clients over both protocols: overrides, conflicts, no-ops."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.kit.eventually import eventually
from tests.kit.models import identity_config
from tests.kit.server import serve_here

GATED = """
backend: "python"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_INT32 dims: [-1] }
output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [-1] }
parameters { key: "warmup_probe" value { string_value: "false" } }
"""
GATED_MODEL = """
import pathlib
import time


class TritonPythonModel:
    def initialize(self, args):
        while not pathlib.Path(%r).exists():
            time.sleep(0.01)

    def execute(self, requests):
        raise NotImplementedError
"""
CONFLICT = "a related model '{}' to a load/unload request is currently loading or unloading"


def gate_of(repository: Any, name: str) -> Path:
    """Return the file whose appearance lets the load of that model go on."""
    return Path(f"{repository.path}-{name}-may-open")


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    module_repository.add("one", identity_config())
    module_repository.add("two", identity_config())
    module_repository.add_sub("add_sub", 'backend: "onnxruntime"')
    for protocol in ("http", "grpc"):
        name = f"slow_{protocol}"
        module_repository.add(name, GATED, files={"1/model.py": GATED_MODEL % str(gate_of(module_repository, name))})
    with serve_here(module_repository.path, model_control_mode="explicit") as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Any) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        if request.param == "http":
            made = tritonclient.http.InferenceServerClient(server.http, concurrency=4, network_timeout=60)
        else:
            made = tritonclient.grpc.InferenceServerClient(server.grpc)
        made.protocol = request.param
        yield stack.enter_context(made)


def version(server: Any, name: str, number: int = 1) -> dict[str, Any]:
    """Return the state of a version: of its newest generation, as the one before may still be closing."""
    _, answer = server.ask(f"/edge/v1/versions?model={name}")
    return max((item for item in answer["versions"] if item["version"] == number), key=lambda item: item["generation"])


def test_loading_an_unchanged_model_does_not_reload_it(server: Any, client: Any) -> None:
    client.load_model("one")
    before = version(server, "one")["generation"]
    client.load_model("one")
    assert version(server, "one")["generation"] == before
    config = json.dumps({"backend": "identity", "max_batch_size": 3, **tensors()})
    client.load_model("one", config=config)
    assert version(server, "one")["generation"] == before + 1
    client.load_model("one", config=config)
    assert version(server, "one")["generation"] == before + 1
    client.load_model("one")
    assert version(server, "one")["generation"] == before + 2


def tensors() -> dict[str, Any]:
    return {
        "input": [{"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [-1]}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_INT32", "dims": [-1]}],
    }


def test_a_load_after_a_change_on_disk_is_a_new_generation(server: Any, client: Any, module_repository: Any) -> None:
    client.load_model("two")
    before = version(server, "two")["generation"]
    config = module_repository.path / "two" / "config.pbtxt"
    config.write_text(config.read_text() + f"\n# changed over {client.protocol}\n")
    client.load_model("two")
    assert version(server, "two")["generation"] == before + 1
    assert client.is_model_ready("two", "1")


def test_override_files_replace_the_disk_until_the_next_plain_load(
    server: Any, client: Any, module_repository: Any
) -> None:
    model = (module_repository.path / "add_sub" / "1" / "model.onnx").read_bytes()
    client.load_model("add_sub", config='{"backend":"onnxruntime"}', files={"file:4/model.onnx": model})
    assert client.is_model_ready("add_sub", "4")
    assert not client.is_model_ready("add_sub", "1") if client.protocol == "http" else True
    client.load_model("add_sub")
    assert client.is_model_ready("add_sub", "1")
    assert not (module_repository.path / "add_sub" / "4").exists()
    client.unload_model("add_sub", unload_dependents=True)
    client.unload_model("add_sub", unload_dependents=False)
    assert not client.is_model_ready("add_sub")


@pytest.mark.sample
@pytest.mark.parametrize(
    "path",
    [
        "../1/got_out",
        "1/../../got_out",
        "/1/got_out",
        "1",
        "1/",
        "x/model.onnx",
        "01/model.onnx",
        "1/a\\b",
        "config.pbtxt",
    ],
)
def test_a_path_out_of_the_model_is_refused_and_the_loaded_version_serves(
    server: Any, client: Any, module_repository: Any, path: str
) -> None:
    client.load_model("one")
    before = version(server, "one")["generation"]
    with pytest.raises(InferenceServerException, match="files: expected"):
        client.load_model("one", config='{"backend":"identity"}', files={f"file:{path}": b"x"})
    assert client.is_model_ready("one")
    assert version(server, "one")["generation"] == before
    assert not list(module_repository.path.parent.rglob("got_out"))


def test_override_files_need_a_configuration_and_must_stay_in_the_model(server: Any, client: Any) -> None:
    with pytest.raises((InferenceServerException, ValueError), match="config"):
        client.load_model("one", files={"file:1/model.onnx": b"x"})
    for name in ("..", "../one", "%2e%2e", "nobody"):
        with pytest.raises(InferenceServerException):
            client.load_model(name)


def test_a_request_to_control_a_loading_model_fails_and_the_load_continues(
    server: Any, client: Any, module_repository: Any
) -> None:
    name = f"slow_{client.protocol}"
    failures: list[BaseException] = []

    def load() -> None:
        try:
            with opened(server, client.protocol) as own:
                own.load_model(name)
        except InferenceServerException as error:
            failures.append(error)

    loading = threading.Thread(target=load)
    loading.start()
    try:
        assert eventually(lambda: state(server, name) == "LOADING")
        for order in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException) as caught:
                order(name)
            assert CONFLICT.format(name) in caught.value.message()
            assert caught.value.status() in ("500", "StatusCode.INTERNAL")
        assert state(server, name) == "LOADING", "the refusals came while it loaded"
        # Other models are not concerned.
        client.load_model("one")
    finally:
        gate_of(module_repository, name).touch()
        loading.join()
    assert failures == []
    assert client.is_model_ready(name)
    client.unload_model(name)
    assert not client.is_model_ready(name)


def opened(server: Any, protocol: str) -> Any:
    if protocol == "http":
        return tritonclient.http.InferenceServerClient(server.http, network_timeout=60)
    return tritonclient.grpc.InferenceServerClient(server.grpc)


def state(server: Any, name: str) -> str:
    return str(server.index().get(name, {}).get("state", ""))
