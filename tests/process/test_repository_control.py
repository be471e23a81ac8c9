"""The repository API over HTTP in explicit mode, and files that change without a sign of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.kit.eventually import eventually
from tests.kit.models import finish, identity_body, identity_config
from tests.kit.server import serve_here


@pytest.fixture(scope="module")
def explicit(module_repository: Any) -> Iterator[Any]:
    """One server for all tests. `at_start`: its index, before any of them loads something."""
    module_repository.add("named_at_start", identity_config())
    module_repository.add("two", identity_config())
    module_repository.add_sub("add_sub", 'backend: "onnxruntime"')
    (module_repository.add("broken", 'backend: "onnxruntime"') / "1" / "model.onnx").write_bytes(b"not a model")
    with serve_here(module_repository.path, model_control_mode="explicit", load_model="named_at_start") as server:
        server.at_start = server.index(), server.index(ready=True)
        yield server


@pytest.fixture
def one(explicit: Any, module_repository: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a loaded model that no other test uses."""
    name = f"of_{request.node.originalname}"
    module_repository.add(name, identity_config())
    assert load(explicit, name)[0] == 200
    yield name
    assert unload(explicit, name)[0] == 200


def load(server: Any, name: str, **parameters: str) -> tuple[int, Any]:
    return server.ask(f"/v2/repository/models/{name}/load", {"parameters": parameters} if parameters else {})


def unload(server: Any, name: str) -> tuple[int, Any]:
    return server.ask(f"/v2/repository/models/{name}/unload", {})


def test_only_the_named_model_is_loaded_at_the_start_and_the_rest_is_listed(explicit: Any) -> None:
    listed, ready = explicit.at_start
    # The SHA-256 of its files comes a moment later.
    listed["named_at_start"].pop("digest", None)
    assert listed["named_at_start"] == {"name": "named_at_start", "version": "1", "state": "READY"}
    assert listed["two"] == {"name": "two"}
    assert set(ready) == {"named_at_start"}
    assert explicit.get("/v2/health/ready")[0] == 200


def test_load_and_unload_change_the_served_models(explicit: Any) -> None:
    assert explicit.infer("two", identity_body())[0] == 404
    assert load(explicit, "two") == (200, None)
    assert explicit.infer("two", identity_body())[0] == 200
    assert unload(explicit, "two") == (200, None)
    status, answer = explicit.infer("two", identity_body())
    assert status == 404
    assert "'two' has no available versions" in answer["error"]
    # The order is answered before the version has ended.
    assert eventually(lambda: explicit.index()["two"]["state"] != "UNLOADING")
    entry = explicit.index()["two"]
    assert (entry["state"], entry["reason"]) == ("UNAVAILABLE", "unloaded")
    # A model that was unloaded on purpose does not make the server unready.
    assert explicit.get("/v2/health/ready")[0] == 200
    assert explicit.get("/v2/models/two/ready")[0] == 400


def test_a_failed_load_has_its_reason_and_does_not_disturb_other_models(explicit: Any, one: str) -> None:
    status, answer = load(explicit, "broken")
    assert status == 400
    assert "load failed for model 'broken'" in answer["error"]
    entry = explicit.index()["broken"]
    assert entry["state"] == "UNAVAILABLE"
    assert entry["reason"]
    assert explicit.infer(one, identity_body())[0] == 200


BROKEN = 'backend: "no_such_runtime"\nmax_batch_size: 0'


# tests/e2e/test_repository_control.py has it the other way round.
@pytest.mark.full
def test_strict_readiness_at_request_fails_in_mode_poll(repository: Any) -> None:
    repository.add("bad", BROKEN)
    with serve_here(repository.path, strict_readiness=True, model_control_mode="poll") as server:
        assert server.get("/v2/health/ready")[0] == 400


def times_model(factor: float) -> bytes:
    """A model of one multiplication: for each factor a file of the same size."""
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Mul", ["x", "factor"], ["y"])],
        "times",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["rows", 1])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["rows", 1])],
        [onnx.numpy_helper.from_array(np.float32([factor]), "factor")],
    )
    return finish(graph).SerializeToString()


def times(server: Any) -> float:
    """The answer of that model for 1."""
    status, answer = server.infer(
        "times", {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    )
    assert status == 200, answer
    return float(answer["outputs"][0]["data"][0])


@pytest.mark.sample  # Each runtime and each mode: how a file is read anew does not depend on both.
@pytest.mark.parametrize("mode", ["poll", "explicit"])
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_other_weights_of_the_same_size_and_time_are_served(
    repository: Any, caplog: pytest.LogCaptureFixture, backend: str, mode: str
) -> None:
    """As tools write them that give each file the same time; renamed into place, and written in place."""
    pytest.importorskip(backend)
    file = repository.add("times", f'backend: "{backend}"') / "1/model.onnx"

    def write(factor: float, path: Path) -> None:
        path.write_bytes(times_model(factor))
        os.utime(path, (1, 1))

    caplog.set_level("INFO")
    write(1, file)
    control = {"model_control_mode": mode, "repository_poll_secs": 0.1} | (
        {"load_model": "times"} if mode == "explicit" else {}
    )
    with serve_here(repository.path, **control) as server:
        assert times(server) == 1
        assert eventually(lambda: "digest" in server.index()["times"])
        write(2, repository.path / "new")
        (repository.path / "new").rename(file)
        assert mode == "poll" or load(server, "times")[0] == 200
        assert eventually(lambda: times(server) == 2)
        write(3, file)
        assert mode == "poll" or load(server, "times")[0] == 200
        assert eventually(lambda: times(server) == 3)
        assert eventually(lambda: "digest" in server.index()["times"])
        file.chmod(0o600)
        os.link(file, repository.path.parent / "backup")
        # A load call reads the files anew, and so does the scan that finds another model.
        repository.add("later", 'backend: "identity"')
        assert load(server, "times")[0] == 200 if mode == "explicit" else eventually(lambda: "later" in server.index())
        assert times(server) == 3
    assert caplog.text.count("'times' version 1 is loaded") == 3
