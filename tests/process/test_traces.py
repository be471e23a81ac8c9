"""Traces with all front ends: settings over HTTP and gRPC, trace files, children of ensembles and models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.kit.eventually import eventually
from tests.kit.infer_input import infer_input
from tests.kit.model_folder import model_folder
from tests.kit.models import REPEAT, identity_config
from tests.kit.server import serve_here
from tests.kit.triton_stream import TritonStream

IDENTITY = identity_config("FP32", "4")


CHAIN = """
platform: "ensemble"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }
ensemble_scheduling { step [
  { model_name: "same" model_version: -1
    input_map { key: "INPUT0" value: "X" } output_map { key: "OUTPUT0" value: "between" } },
  { model_name: "asks" model_version: -1
    input_map { key: "INPUT0" value: "between" } output_map { key: "OUTPUT0" value: "Y" } }
] }
"""

ASKS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            self.context = request.trace().get_context()
            given = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            for trace in ({"trace": request.trace()}, {}):
                asked = pb_utils.InferenceRequest(
                    model_name="same", requested_output_names=["OUTPUT0"], inputs=[given], request_id="inner", **trace
                )
                outputs = asked.exec().output_tensors()
            answers.append(pb_utils.InferenceResponse(outputs))
        return answers
"""

STEPS = ["chain", "same", "asks", "same"]
"""The traces of one request to `chain`: of what `asks` asks, only the request that it gave its trace."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server that can trace, and traces nothing yet. `server.folder` is where to."""
    folder, models = tmp_path_factory.mktemp("traces"), tmp_path_factory.mktemp("models")
    model_folder(models / "same", IDENTITY)
    model_folder(models / "chain", CHAIN)
    model_folder(models / "repeat", REPEAT)
    model_folder(models / "asks", IDENTITY.replace('"identity"', '"python"'), {"1/model.py": ASKS})
    with serve_here(models, trace_config=[f"triton,file={folder}/t", "rate=1"]) as running:
        running.folder = folder
        yield running


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Any) -> Iterator[Any]:
    module = triton_http if request.param == "http" else triton_grpc
    made = module.InferenceServerClient(server.http if request.param == "http" else server.grpc)
    made.module = module
    made.wire = request.param
    yield made
    made.close()


def plain(settings: Any) -> dict[str, Any]:
    """Return settings of either client in one form."""
    if isinstance(settings, dict):
        return settings
    found = {key: list(value.value) for key, value in settings.settings.items()}
    return {key: value if key == "trace_level" else value[0] for key, value in found.items()}


def infer(client: Any, model: str = "same", name: str = "INPUT0", **more: Any) -> Any:
    given = infer_input(client.module, name, np.array([[1, 2, 3, 4]], np.float32))
    return client.infer(model, [given], **more)


def read(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def by_trace(records: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return each trace: its head, its stamps by name, its tensors."""
    found: dict[int, dict[str, Any]] = {}
    for record in records:
        trace = found.setdefault(record["id"], {"stamps": {}, "tensors": []})
        trace.update({key: record[key] for key in ("model_name", "model_version", "parent_id", "request_id")
                      if key in record})  # fmt: skip
        trace["stamps"].update({stamp["name"]: stamp["ns"] for stamp in record.get("timestamps", ())})
        if "tensor" in record:
            trace["tensors"].append((record["activity"], record["tensor"]))
    return found


def next_file(server: Any) -> Path:
    """Return the numbered file that the next trace ends up in."""
    number = len(list(server.folder.glob("t.[0-9]*")))
    path: Path = server.folder / f"t.{number}"
    assert not path.exists()
    return path


@pytest.fixture
def traced(client: Any, server: Any) -> Callable[..., dict[int, dict[str, Any]]]:
    """Trace what a call does, as one trace, and return it."""

    def trace(act: Callable[[], Any], *level: str, model: str = "") -> dict[int, dict[str, Any]]:
        path = next_file(server)
        wanted = {"trace_level": list(level or ("TIMESTAMPS",)), "trace_count": "1"}
        client.update_trace_settings(model, wanted)
        try:
            act()
            assert eventually(path.exists)
        finally:
            client.update_trace_settings(model, {"trace_level": None, "trace_count": None})
        return by_trace(read(path))

    return trace


def test_settings_are_read_changed_and_cleared_alike_over_http_and_grpc(client: Any, server: Any) -> None:
    start = {
        "trace_level": ["OFF"], "trace_rate": "1", "trace_count": "-1", "log_frequency": "0",
        "trace_file": f"{server.folder}/t", "trace_mode": "triton",
    }  # fmt: skip
    assert plain(client.get_trace_settings()) == plain(client.get_trace_settings("same")) == start
    given = plain(client.update_trace_settings("same", {"trace_rate": "7", "trace_count": "3"}))
    assert given == plain(client.get_trace_settings("same")) == {**start, "trace_rate": "7", "trace_count": "3"}
    assert plain(client.get_trace_settings()) == start
    everybody = plain(client.update_trace_settings(settings={"log_frequency": "5", "trace_rate": "2"}))
    assert everybody == {**start, "log_frequency": "5", "trace_rate": "2"}
    assert plain(client.get_trace_settings("same"))["log_frequency"] == "5"
    assert plain(client.update_trace_settings("same", {"trace_rate": None, "trace_count": None})) == everybody
    assert plain(client.update_trace_settings(settings={"log_frequency": None, "trace_rate": None})) == start


def test_a_request_is_traced_from_its_arrival_to_its_answer(client: Any, traced: Any) -> None:
    ((_, trace),) = traced(lambda: infer(client, request_id="r9")).items()
    assert (trace["model_name"], trace["model_version"], trace["request_id"]) == ("same", 1, "r9")
    stamps = trace["stamps"]
    front = {"http": ("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END"),
             "grpc": ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END")}  # fmt: skip
    arrived, read_all, sending, sent = front[client.wire]
    order = [arrived, read_all, "REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END",
             "COMPUTE_OUTPUT_START", "COMPUTE_END", "INFER_RESPONSE_COMPLETE", sending, sent]  # fmt: skip
    assert set(stamps) == {*order, "REQUEST_END"}
    assert [stamps[name] for name in order] == sorted(stamps[name] for name in order)
    assert stamps["REQUEST_END"] >= stamps["COMPUTE_END"]


def test_ensemble_steps_and_nested_calls_are_child_traces_with_tensors(client: Any, traced: Any) -> None:
    found = traced(lambda: infer(client, "chain", "X"), "TIMESTAMPS", "TENSORS")
    assert [trace["model_name"] for trace in found.values()] == STEPS
    chain, same, asks, asked = found
    assert [trace.get("parent_id") for trace in found.values()] == [None, chain, chain, asks]
    assert same < asks < asked
    assert {"COMPUTE_START", "COMPUTE_END"} <= set(found[asks]["stamps"])
    assert "COMPUTE_START" not in found[chain]["stamps"]
    assert found[chain]["stamps"]["REQUEST_START"] <= found[asked]["stamps"]["REQUEST_START"]
    expected = {"data": "1,2,3,4", "shape": "1,4", "dtype": "FP32"}
    assert found[chain]["tensors"] == [
        ("TENSOR_QUEUE_INPUT", {"name": "X", **expected}), ("TENSOR_BACKEND_OUTPUT", {"name": "Y", **expected}),
    ]  # fmt: skip
    assert [activity for activity, _ in found[asked]["tensors"]] == ["TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"]


def test_a_request_that_fails_is_traced_too(client: Any, traced: Any) -> None:
    def ask() -> None:
        with pytest.raises(InferenceServerException):
            infer(client, "same", "WRONG")

    ((_, trace),) = traced(ask).items()
    assert trace["model_name"] == "same"
    assert "COMPUTE_START" not in trace["stamps"]


def repeat_inputs(values: list[int], delay_ms: int) -> list[Any]:
    arrays = {
        "IN": np.array(values, np.int32),
        "DELAY": np.full(len(values), delay_ms, np.uint32),
        "WAIT": np.zeros(1, np.uint32),
    }
    return [infer_input(triton_grpc, name, array) for name, array in arrays.items()]


def test_a_stream_of_responses_is_one_trace_with_each_output(server: Any, client: Any, traced: Any) -> None:
    def ask() -> None:
        with TritonStream(server.grpc) as stream:
            stream.send("repeat", repeat_inputs([4, 5, 6], 0))
            assert [stream.result().as_numpy("OUT").tolist() for _ in range(3)] == [[4], [5], [6]]

    ((_, trace),) = traced(ask, "TIMESTAMPS", "TENSORS").items()
    outputs = [tensor["data"] for activity, tensor in trace["tensors"]
               if activity == "TENSOR_BACKEND_OUTPUT" and tensor["name"] == "OUT"]  # fmt: skip
    assert outputs == ["4", "5", "6"]
    assert {"GRPC_WAITREAD_START", "GRPC_SEND_END", "COMPUTE_END", "REQUEST_END"} <= set(trace["stamps"])


def test_a_stream_that_the_client_ends_completes_its_traces(server: Any, client: Any, traced: Any) -> None:
    def ask() -> None:
        stream = TritonStream(server.grpc)
        stream.send("repeat", repeat_inputs([1] * 50, 100))
        stream.result()
        stream.close(cancels=True)

    ((_, trace),) = traced(ask).items()
    assert {"REQUEST_START", "REQUEST_END"} <= set(trace["stamps"])


def test_generate_is_traced(server: Any, client: Any, traced: Any) -> None:
    def ask() -> None:
        status, answer = server.ask("/v2/models/same/generate", {"INPUT0": [[1, 2, 3, 4]]})
        assert (status, "OUTPUT0" in answer) == (200, True)

    ((_, trace),) = traced(ask).items()
    assert {"HTTP_RECV_START", "HTTP_RECV_END", "COMPUTE_START", "INFER_RESPONSE_COMPLETE"} <= set(trace["stamps"])


def test_a_log_and_traces_that_cannot_be_written_are_lines_of_status(tmp_path: Path, run_command: Any) -> None:
    model_folder(tmp_path / "models/same", IDENTITY)
    traces = tmp_path / "no" / "t"
    words = ["level=TIMESTAMPS", "rate=1", f"triton,file={traces}"]
    with serve_here(tmp_path / "models", log_file="/dev/full", trace_config=words) as server:
        for _ in range(20):
            assert server.ask("/v2/models/same/generate", {"INPUT0": [[1, 2, 3, 4]]})[0] == 200

        def status() -> str:
            return str(run_command("status", f"--url=http://{server.http}").stdout)

        assert eventually(lambda: "; 20 trace(s) were lost" in status())
        text = status()
    assert f"WARNING traces: '{traces}' cannot be written: No such file or directory; 20 trace(s) were lost" in text
