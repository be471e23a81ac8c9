"""Sequences through the installed server: Triton's clients, ids of both kinds, ensembles, Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from onnx import TensorProto, helper

from tests.kit.infer_input import infer_input
from tests.kit.models import finish
from tests.kit.server import serve
from tests.kit.triton_stream import TritonStream

CONTROLS = """
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 1 ] } }
"""
ID = 'control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }\n'
STATE = """
  state { input_name: "SUM" output_name: "NEW_SUM" data_type: TYPE_FP32 dims: [ 1 ]
          initial_state { name: "begin" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } }
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input { name: "A" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "B" data_type: TYPE_FP32 dims: [ 1 ] }
ensemble_scheduling {
  step [ { model_name: "direct_onnxruntime" input_map { key: "IN" value: "A" } output_map { key: "OUT" value: "m" } },
         { model_name: "python" input_map { key: "IN" value: "m" } output_map { key: "OUT" value: "B" } } ]
}
"""
PYTHON_CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }, { name: "WHO" data_type: TYPE_STRING dims: [ 3 ] } ]
instance_group { count: 1 kind: KIND_CPU }
PARAMETERS
"""
PYTHON = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        id, flags = request.correlation_id(), request.flags()
        start, ready = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0, 0] for name in ("START", "READY"))
        assert bool(start) == bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
        value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        if ready:
            self.sums[id] = value + (0 if start else self.sums[id])
        total = self.sums.get(id, value)
        if flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
            del self.sums[id]
        who = np.array([[type(id).__name__, str(id), str(flags)]], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", total), pb_utils.Tensor("WHO", who)])
"""


def accumulator(rows: list[Any]) -> onnx.ModelProto:
    """OUT = IN + SUM (IN alone where START), NEW_SUM = OUT, FLAGS = START, READY, END, ID."""
    kinds = dict.fromkeys(("IN", "SUM", "START", "READY", "END"), TensorProto.FLOAT) | {"ID": TensorProto.UINT64}
    nodes = [
        helper.make_node("Add", ["IN", "SUM"], ["OUT"]),
        helper.make_node("Identity", ["OUT"], ["NEW_SUM"]),
        helper.make_node("Cast", ["ID"], ["ID_FP32"], to=TensorProto.FLOAT),
        helper.make_node("Concat", ["START", "READY", "END", "ID_FP32"], ["FLAGS"], axis=-1),
    ]
    inputs = [helper.make_tensor_value_info(name, kind, [*rows, 1]) for name, kind in kinds.items()]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [*rows, size])
        for name, size in (("OUT", 1), ("NEW_SUM", 1), ("FLAGS", 4))
    ]
    graph = helper.make_graph(nodes, "accumulator", inputs, outputs)
    return finish(graph)


def config(backend: str, strategy: str, batch: int = 4) -> str:
    return (
        f'backend: "{backend}"\nmax_batch_size: {batch}\ninstance_group {{ count: 2 kind: KIND_CPU }}\n'
        f"sequence_batching {{ max_sequence_idle_microseconds: 60000000\n{strategy}\n{CONTROLS}{ID}" + STATE + "}\n"
    )


def python_config(parameters: str = "") -> str:
    batching = "sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 8 }"
    return PYTHON_CONFIG.replace("PARAMETERS", parameters) + batching + CONTROLS + "}\n"


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    oldest = "oldest { max_candidate_sequences: 3 }"
    for backend in ("onnxruntime", "openvino"):
        for strategy, words, batch in (("direct", "direct { }", 4), ("oldest", oldest, 4), ("single", "", 0)):
            rows: list[Any] = ["batch"] if batch else []
            module_repository.add(f"{strategy}_{backend}", config(backend, words, batch), model=accumulator(rows))
    apart = 'parameters { key: "isolation" value { string_value: "process" } }'
    for name, parameters in (("python", ""), ("python_apart", apart)):
        module_repository.add(name, python_config(parameters))
        (module_repository.path / name / "1" / "model.py").write_text(PYTHON)
    module_repository.add("both", ENSEMBLE)
    with serve(module_repository.path) as process:
        yield process


class Stream(TritonStream):
    """A stream of single values."""

    def send_value(
        self, model: str, value: float, tag: str, *, has_rows: bool = True, name: str = "IN", **flags: Any
    ) -> None:
        array = np.full((1, 1) if has_rows else (1,), value, np.float32)
        self.send(model, [infer_input(grpcclient, name, array)], request_id=tag, **flags)

    def read(self, count: int) -> list[Any]:
        return [self.result() for _ in range(count)]


def totals(results: list[Any], tag: str, output: str = "OUT") -> list[float]:
    return [float(one.as_numpy(output).ravel()[0]) for one in results if one.get_response().id == tag]


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("strategy", ["direct", "oldest", "single"])
def test_interleaved_sequences_on_one_stream_each_keep_their_own_state_and_order(
    server: Any, strategy: str, backend: str
) -> None:
    model, ids = f"{strategy}_{backend}", (1001, 1002)
    with Stream(server.grpc) as stream:
        for i in range(12):
            for id in ids:
                flags = {"sequence_id": id, "sequence_start": i == 0, "sequence_end": i == 11}
                stream.send_value(model, i + id, str(id), has_rows=strategy != "single", **flags)
        results = stream.read(24)
    for id in ids:
        assert totals(results, str(id)) == np.cumsum([i + id for i in range(12)]).tolist()
        mine = [one.as_numpy("FLAGS").ravel().tolist() for one in results if one.get_response().id == str(id)]
        assert mine == [[i == 0, 1, i == 11, id] for i in range(12)]
    assert [output.name for output in results[0].get_response().outputs] == ["OUT", "FLAGS"]


@pytest.mark.parametrize("model", ["python", "python_apart"])
def test_a_sequence_over_http_with_an_id_that_is_a_string(server: Any, model: str) -> None:
    def ask(client: Any, value: float, **flags: Any) -> Any:
        given = infer_input(httpclient, "IN", np.full((1, 1), value, np.float32))
        return client.infer(model, [given], sequence_id="camera/front", **flags)

    with httpclient.InferenceServerClient(server.http) as client:
        first = ask(client, 2, sequence_start=True)
        second = ask(client, 5)
        last = ask(client, 1, sequence_end=True)
        metadata = client.get_model_metadata(model)
    assert [float(one.as_numpy("OUT")[0, 0]) for one in (first, second, last)] == [2, 7, 8]
    assert first.as_numpy("WHO").tolist() == [[b"str", b"camera/front", b"1"]]
    assert last.as_numpy("WHO")[0, 2] == b"2"
    assert [item["name"] for item in metadata["inputs"]] == ["IN"], "the server makes the controls"


def test_an_ensemble_passes_the_sequence_to_its_steps(server: Any) -> None:
    with Stream(server.grpc) as stream:
        for i in range(4):
            stream.send_value("both", 1, "e", name="A", sequence_id=66, sequence_start=i == 0, sequence_end=i == 3)
        results = stream.read(4)
    assert totals(results, "e", "B") == [1, 3, 6, 10]
    told = [one.get_response().parameters for one in results]
    assert [one["sequence_id"].int64_param for one in told] == [66] * 4
    assert [one["sequence_start"].bool_param for one in told] == [True, False, False, False]
    assert [one["sequence_end"].bool_param for one in told] == [False, False, False, True]
