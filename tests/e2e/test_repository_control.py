"""The repository API: index, load and unload in explicit mode, overrides; refused in the other modes; poll mode."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.kit.eventually import eventually
from tests.kit.models import identity_config
from tests.kit.server import serve


@pytest.fixture(scope="module")
def explicit(module_repository: Any) -> Iterator[Any]:
    """One server for all tests. `at_start`: its index, before any of them loads something."""
    module_repository.add("named_at_start", identity_config())
    module_repository.add("two", identity_config())
    module_repository.add_sub("add_sub", 'backend: "onnxruntime"')
    (module_repository.add("broken", 'backend: "onnxruntime"') / "1" / "model.onnx").write_bytes(b"not a model")
    with serve(module_repository.path, "--model-control-mode=explicit", "--load-model=named_at_start") as server:
        server.at_start = index(server), index(server, {"ready": True})
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log(), server.log()


@pytest.fixture
def one(explicit: Any, module_repository: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a loaded model that no other test uses."""
    name = f"of_{request.node.originalname}"
    module_repository.add(name, identity_config())
    assert load(explicit, name)[0] == 200
    yield name
    assert unload(explicit, name)[0] == 200


def index(server: Any, body: dict[str, Any] | None = None) -> dict[str, dict[str, str]]:
    status, answer = server.ask("/v2/repository/index", body or {})
    assert status == 200, answer
    return {item["name"]: item for item in answer}


def load(server: Any, name: str, **parameters: str) -> tuple[int, Any]:
    return server.ask(f"/v2/repository/models/{name}/load", {"parameters": parameters} if parameters else {})


def unload(server: Any, name: str) -> tuple[int, Any]:
    return server.ask(f"/v2/repository/models/{name}/unload", {})


def body(rows: int = 1) -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [rows, 1], "data": [7] * rows}]}


def test_only_the_named_model_is_loaded_at_the_start_and_the_rest_is_listed(explicit: Any) -> None:
    listed, ready = explicit.at_start
    # The SHA-256 of its files comes a moment later.
    listed["named_at_start"].pop("digest", None)
    assert listed["named_at_start"] == {"name": "named_at_start", "version": "1", "state": "READY"}
    assert listed["two"] == {"name": "two"}
    assert set(ready) == {"named_at_start"}
    assert explicit.get("/v2/health/ready")[0] == 200


def test_load_and_unload_change_the_served_models(explicit: Any) -> None:
    assert explicit.infer("two", body())[0] == 404
    assert load(explicit, "two") == (200, None)
    assert explicit.infer("two", body())[0] == 200
    assert unload(explicit, "two") == (200, None)
    status, answer = explicit.infer("two", body())
    assert status == 404
    assert "'two' has no available versions" in answer["error"]
    # The order is answered before the version has ended.
    assert eventually(lambda: index(explicit)["two"]["state"] != "UNLOADING")
    entry = index(explicit)["two"]
    assert (entry["state"], entry["reason"]) == ("UNAVAILABLE", "unloaded")
    # A model that was unloaded on purpose does not make the server unready.
    assert explicit.get("/v2/health/ready")[0] == 200
    assert explicit.get("/v2/models/two/ready")[0] == 400


def test_both_clients_load_and_unload(explicit: Any) -> None:
    with tritonclient.http.InferenceServerClient(explicit.http) as client:
        client.load_model("add_sub")
        assert client.is_model_ready("add_sub")
        client.unload_model("add_sub")
        assert not client.is_model_ready("add_sub")
    with tritonclient.grpc.InferenceServerClient(explicit.grpc) as client:
        client.load_model("add_sub")
        assert client.is_model_ready("add_sub")
        states = {item.name: item.state for item in client.get_model_repository_index().models}
        assert states["add_sub"] == "READY"
        client.unload_model("add_sub", unload_dependents=True)
        assert not client.is_model_ready("add_sub")


def test_loading_an_absent_model_fails_with_the_reason(explicit: Any) -> None:
    status, answer = load(explicit, "nobody")
    assert status == 500
    assert answer["error"] == "failed to load 'nobody', failed to poll from model repository"
    assert "nobody" not in index(explicit)


def test_a_failed_load_has_its_reason_and_does_not_disturb_other_models(explicit: Any, one: str) -> None:
    status, answer = load(explicit, "broken")
    assert status == 400
    assert "load failed for model 'broken'" in answer["error"]
    entry = index(explicit)["broken"]
    assert entry["state"] == "UNAVAILABLE"
    assert entry["reason"]
    assert explicit.infer(one, body())[0] == 200


def test_a_failed_reload_keeps_the_old_version_serving(explicit: Any, module_repository: Any) -> None:
    folder = module_repository.add_sub("spoiled", 'backend: "onnxruntime"')
    assert load(explicit, "spoiled")[0] == 200
    (folder / "1" / "model.onnx").write_bytes(b"damaged")
    assert load(explicit, "spoiled")[0] == 400
    tensor = {"datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}
    inputs = [{"name": name, **tensor} for name in ("INPUT0", "INPUT1")]
    assert explicit.infer("spoiled", {"inputs": inputs})[0] == 200


def test_loading_a_loaded_unchanged_model_changes_nothing(explicit: Any, one: str) -> None:
    explicit.infer(one, body())
    assert load(explicit, one)[0] == 200
    # The statistics of a reloaded model start at zero; these did not.
    assert explicit.statistics(one)["inference_count"] == 1


def test_a_config_sent_with_the_load_overrides_the_one_on_disk(explicit: Any, one: str) -> None:
    config = {
        "backend": "identity",
        "max_batch_size": 2,
        "input": [{"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [1]}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_INT32", "dims": [1]}],
    }
    assert load(explicit, one, config=json.dumps(config)) == (200, None)
    assert explicit.ask(f"/v2/models/{one}/config")[1]["max_batch_size"] == 2
    status, answer = explicit.infer(one, body(rows=3))
    assert status == 400
    assert f"batch-size must be <= 2 for '{one}'" in answer["error"]
    assert load(explicit, one) == (200, None)
    assert explicit.ask(f"/v2/models/{one}/config")[1]["max_batch_size"] == 8
    assert explicit.infer(one, body(rows=3))[0] == 200


def test_an_invalid_config_is_refused_and_the_model_continues_to_serve(explicit: Any, one: str) -> None:
    for config in ("not json", '{"no_such_field": 1}', '{"max_batch_size": -1}', "[]"):
        status, answer = load(explicit, one, config=config)
        assert 400 <= status < 600, config
        assert answer["error"], config
        assert explicit.infer(one, body())[0] == 200


def test_files_sent_with_the_load_override_those_on_disk(explicit: Any, module_repository: Any) -> None:
    model = (module_repository.path / "add_sub" / "1" / "model.onnx").read_bytes()
    with tritonclient.http.InferenceServerClient(explicit.http) as client:
        client.load_model("sent", config='{"backend":"onnxruntime"}', files={"file:1/model.onnx": model})
        assert client.is_model_ready("sent", "1")
    assert not (module_repository.path / "sent").exists()
    with tritonclient.grpc.InferenceServerClient(explicit.grpc) as client:
        client.load_model("sent2", config='{"backend":"onnxruntime"}', files={"file:3/model.onnx": model})
        assert client.is_model_ready("sent2", "3")


@pytest.mark.parametrize("path", ["../escape", "/etc/escape", "1/../../escape", "", "1/"])
def test_a_file_path_outside_the_model_is_refused(explicit: Any, one: str, module_repository: Any, path: str) -> None:
    content = base64.b64encode(b"x").decode()
    status, answer = load(explicit, one, **{"config": '{"backend":"identity"}', f"file:{path}": content})
    assert 400 <= status < 600
    assert answer["error"]
    assert not list(module_repository.path.parent.rglob("escape"))
    assert explicit.infer(one, body())[0] == 200


def test_files_without_a_config_are_refused(explicit: Any, one: str) -> None:
    status, answer = load(explicit, one, **{"file:1/model.onnx": base64.b64encode(b"x").decode()})
    assert 400 <= status < 600
    assert "config" in answer["error"]


def test_a_model_name_outside_the_repository_is_refused(explicit: Any, one: str) -> None:
    for name in ("..%2F..%2Fetc", "%2Fetc", "..", "%2e%2e"):
        assert load(explicit, name)[0] >= 400
        assert explicit.infer(one, body())[0] == 200


def test_unloading_a_model_that_is_not_loaded_is_no_error(explicit: Any) -> None:
    assert unload(explicit, "two")[0] == 200


def test_a_named_repository_is_unsupported(explicit: Any, one: str) -> None:
    for path in ("index", f"models/{one}/load", f"models/{one}/unload"):
        status, answer = explicit.ask(f"/v2/repository/mine/{path}", {})
        assert status == 501, path
        assert "repository_name" in answer["error"]


def test_requests_are_answered_throughout_a_reload(explicit: Any, one: str) -> None:
    def reload(number: int) -> int:
        config = {
            "backend": "identity",
            "max_batch_size": 2 + number,
            "input": [{"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [1]}],
            "output": [{"name": "OUTPUT0", "data_type": "TYPE_INT32", "dims": [1]}],
        }
        return load(explicit, one, config=json.dumps(config))[0]

    with ThreadPoolExecutor(5) as pool:
        reloads = pool.submit(lambda: [reload(number) for number in range(10)])
        asked = []
        while not reloads.done():
            asked += list(pool.map(lambda _: explicit.infer(one, body()), range(20)))
        assert reloads.result() == [200] * 10
    assert [answer for answer in asked if answer[0] != 200] == []


def test_load_and_unload_are_refused_in_mode_none(zoo: Any) -> None:
    for ask in (load, unload):
        status, answer = ask(zoo, "labelled")
        assert status == 503
        assert "explicit model load / unload is not allowed" in answer["error"]
    with (
        tritonclient.http.InferenceServerClient(zoo.http) as client,
        pytest.raises(InferenceServerException, match=r"explicit model load / unload is not allowed"),
    ):
        client.load_model("labelled")


BROKEN = 'backend: "no_such_runtime"\nmax_batch_size: 0'


def test_a_broken_model_is_listed_with_its_reason_and_makes_the_server_unready_unless_told_otherwise(
    repository: Any,
) -> None:
    repository.add("good", identity_config())
    repository.add("bad", BROKEN)
    with serve(repository.path, "--model-control-mode=none") as server:
        entry = index(server)["bad"]
        assert entry["state"] == "UNAVAILABLE"
        assert "no_such_runtime" in entry["reason"]
        assert server.get("/v2/health/live")[0] == 200
        assert server.get("/v2/health/ready")[0] == 400
        assert server.infer("good", body())[0] == 200
        assert server.stop() == 0
        assert "/v2/health/ready answers 400" in server.output()
    with serve(repository.path, "--strict-readiness=false") as server:
        assert server.get("/v2/health/ready")[0] == 200
        assert server.stop() == 0
        assert "/v2/health/ready" not in server.output()


# That the flag counts before the mode is shown above, the other way round.
@pytest.mark.full
@pytest.mark.parametrize("mode", ["none", "poll"])
def test_strict_readiness_at_request_fails_in_each_mode(repository: Any, mode: str) -> None:
    repository.add("bad", BROKEN)
    with serve(repository.path, "--strict-readiness=true", f"--model-control-mode={mode}") as server:
        assert server.get("/v2/health/ready")[0] == 400


def test_poll_mode_follows_the_folders_and_is_ready_without_a_broken_model(repository: Any, tmp_path: Any) -> None:
    repository.add("first", identity_config())
    repository.add("bad", BROKEN)
    other = type(repository)(tmp_path / "other")
    other.add("there", identity_config())
    flags = (f"--model-repository={other.path}", "--model-control-mode=poll", "--repository-poll-secs=0.1")
    with serve(repository.path, *flags) as server:
        states = {name: item["state"] for name, item in index(server).items()}
        assert states == {"first": "READY", "there": "READY", "bad": "UNAVAILABLE"}
        assert server.get("/v2/health/ready")[0] == 200
        assert server.infer("first", body())[0] == 200
        repository.add("second", identity_config())
        assert eventually(lambda: server.infer("second", body())[0] == 200)
        shutil.rmtree(repository.path / "first")
        assert eventually(lambda: server.infer("first", body())[0] == 404)
        assert load(server, "second")[0] == 503
        assert server.stop() == 0
        assert "/v2/health/ready" not in server.output()


def times_model(factor: float) -> bytes:
    """A model of one multiplication: for each factor a file of the same size."""
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Mul", ["x", "factor"], ["y"])],
        "times",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["rows", 1])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["rows", 1])],
        [onnx.numpy_helper.from_array(np.float32([factor]), "factor")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    return model.SerializeToString()


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
def test_other_weights_of_the_same_size_and_time_are_served(repository: Any, backend: str, mode: str) -> None:
    """As tools write them that give each file the same time; renamed into place, and written in place."""
    pytest.importorskip(backend)
    file = repository.add("times", f'backend: "{backend}"') / "1/model.onnx"

    def write(factor: float, path: Path) -> None:
        path.write_bytes(times_model(factor))
        os.utime(path, (1, 1))

    write(1, file)
    control = ["--model-control-mode=explicit", "--load-model=times"] if mode == "explicit" else []
    with serve(repository.path, *control, "--repository-poll-secs=0.1") as server:
        assert times(server) == 1
        assert eventually(lambda: "digest" in index(server)["times"])
        write(2, repository.path / "new")
        (repository.path / "new").rename(file)
        assert mode == "poll" or load(server, "times")[0] == 200
        assert eventually(lambda: times(server) == 2)
        write(3, file)
        assert mode == "poll" or load(server, "times")[0] == 200
        assert eventually(lambda: times(server) == 3)
        assert eventually(lambda: "digest" in index(server)["times"])
        file.chmod(0o600)
        os.link(file, repository.path.parent / "backup")
        # A load call reads the files anew, and so does the scan that finds another model.
        repository.add("later", 'backend: "identity"')
        assert load(server, "times")[0] == 200 if mode == "explicit" else eventually(lambda: "later" in index(server))
        assert times(server) == 3
        assert server.log().count("'times' version 1 is loaded") == 3


def test_labels_follow_the_repository_into_classification(explicit: Any, module_repository: Any) -> None:
    folder = module_repository.add(
        "named",
        'backend: "identity"\ninput { name: "INPUT0" data_type: TYPE_FP32 dims: [2] }\n'
        'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [2] label_filename: "names.txt" }',
    )
    (folder / "names.txt").write_text("left\nright\n")
    assert load(explicit, "named")[0] == 200
    tensor = tritonclient.http.InferInput("INPUT0", [2], "FP32")
    tensor.set_data_from_numpy(np.array([1, 2], np.float32))
    wanted = tritonclient.http.InferRequestedOutput("OUTPUT0", class_count=1)
    with tritonclient.http.InferenceServerClient(explicit.http) as client:
        answer = client.infer("named", [tensor], outputs=[wanted])
    assert answer.as_numpy("OUTPUT0").tolist() == [b"2.000000:1:right"]
