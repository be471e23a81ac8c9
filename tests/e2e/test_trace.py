"""Traces of an installed server: spans for a collector, and a file that is whole after a signal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests.kit.infer_input import infer_input
from tests.kit.model_folder import parameters
from tests.kit.models import identity_config
from tests.kit.server import serve
from tests.kit.site import Handler, Site

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


def write(repository: Any, isolation: str = "") -> Path:
    repository.add("same", IDENTITY)
    repository.add("chain", CHAIN)
    more = parameters(isolation=isolation) if isolation else ""
    repository.add("asks", IDENTITY.replace('"identity"', '"python"') + more, files={"1/model.py": ASKS})
    path: Path = repository.path
    return path


def infer(client: Any, model: str = "same", name: str = "INPUT0", **more: Any) -> Any:
    given = infer_input(client.module, name, np.array([[1, 2, 3, 4]], np.float32))
    return client.infer(model, [given], **more)


class Collector(Site):
    def __init__(self) -> None:
        self.spans: list[Any] = []
        super().__init__(_Handler)


class _Handler(Handler):
    server: Collector

    def do_POST(self) -> None:
        import opentelemetry.proto.collector.trace.v1.trace_service_pb2 as trace_service

        message = trace_service.ExportTraceServiceRequest.FromString(self.body())
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.answer()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


@pytest.mark.full
@pytest.mark.parametrize("isolation", ["", "process"])
def test_spans_are_exported_below_the_callers_span_over_http_and_grpc(
    repository: Any, collector: Collector, isolation: str
) -> None:
    flags = ["mode=opentelemetry", "level=TIMESTAMPS", "rate=0", "opentelemetry,bsp_schedule_delay=100",
             f"opentelemetry,url=http://127.0.0.1:{collector.server_address[1]}/v1/traces"]  # fmt: skip
    callers = {"http": "00-" + "1" * 32 + "-" + "a" * 16 + "-01", "grpc": "00-" + "2" * 32 + "-" + "b" * 16 + "-01"}
    with serve(write(repository, isolation), *(f"--trace-config={flag}" for flag in flags)) as server:
        for wire, module in (("http", triton_http), ("grpc", triton_grpc)):
            with module.InferenceServerClient(getattr(server, wire)) as client:
                client.module = module
                infer(client, "chain", "X")
                infer(client, "chain", "X", headers={"traceparent": callers[wire]})
        assert server.stop() == 0
    for parent in callers.values():
        trace_id, span_id = parent.split("-")[1:3]
        mine = {span.span_id.hex(): span for span in collector.spans if span.trace_id.hex() == trace_id}
        root = next(span for span in mine.values() if span.name == "InferRequest")
        assert root.parent_span_id.hex() == span_id

        def way(span: Any, mine: dict[str, Any] = mine) -> list[str]:
            above = mine.get(span.parent_span_id.hex())
            return [*([] if above is None else way(above)), span.name]

        assert sorted(map(way, mine.values())) == [
            ["InferRequest"],
            ["InferRequest", "chain"],
            ["InferRequest", "chain", "asks"],
            ["InferRequest", "chain", "asks", "compute"],
            ["InferRequest", "chain", "asks", "same"],
            ["InferRequest", "chain", "asks", "same", "compute"],
            ["InferRequest", "chain", "same"],
            ["InferRequest", "chain", "same", "compute"],
        ]
    assert {span.trace_id.hex() for span in collector.spans} == {"1" * 32, "2" * 32}


def test_a_server_stopped_by_signal_has_written_every_trace(repository: Any, tmp_path: Path) -> None:
    repository.add("same", IDENTITY)
    words = [f"triton,file={tmp_path}/t", "triton,log-frequency=100", "level=TIMESTAMPS", "rate=1"]
    with serve(repository.path, *(f"--trace-config={word}" for word in words)) as server:
        with triton_grpc.InferenceServerClient(server.grpc) as client:
            client.module = triton_grpc
            for _ in range(7):
                infer(client)
        assert server.stop() == 0
    assert len({record["id"] for record in json.loads((tmp_path / "t.0").read_text())}) == 7
