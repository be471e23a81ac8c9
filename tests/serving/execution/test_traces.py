"""Traces that cannot be taken cost no more than themselves: not a request, not an instance, not a version's end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.config import TraceConfig
from edge_server.core.device_tensor import DeviceArray, DeviceTensor
from edge_server.core.model_spec import OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import ServingFault
from edge_server.telemetry.trace_record import TracedRequest
from edge_server.telemetry.tracing import Traces


class LostPiece:
    """Memory of a GPU that went away."""

    device_id, address, byte_size = 0, 4096, 4

    @property
    def view(self) -> memoryview:
        raise ServingFault("failed to read CUDA shared memory region 'r': unspecified launch failure")

    def is_at(self, other: object) -> bool:
        return False

    def copy_from(self, device_id: int, address: int, byte_count: int) -> None:
        raise AssertionError("nothing is written here")


def lost(name: str) -> DeviceTensor:
    return DeviceTensor(name, DType.FP32, DeviceArray(DType.FP32.numpy, (1, 1), (LostPiece(),)))


@pytest.fixture
def traces(tmp_path: Path) -> Iterator[Traces]:
    made = Traces(
        TraceConfig(("level=TIMESTAMPS", "level=TENSORS", "rate=1", f"triton,file={tmp_path / 'trace.json'}"))
    )
    yield made
    made.close(30)


def traced(traces: Traces, request: Any) -> TracedRequest:
    trace = traces.sample(request.model, ())
    assert trace is not None
    request.trace = trace.first
    return trace


def submit(core: Any, request: Any, mailbox: Any) -> Any:
    core.service.submit(request, mailbox)
    return mailbox.final()


def empty(version: Any) -> bool:
    version.stop_accepting()
    version.drain()
    return bool(version.in_flight == 0)


def test_an_input_that_cannot_be_read_for_the_trace_is_the_models_to_fail_on(
    core: Any, traces: Traces, new_mailbox: Any
) -> None:
    version = core.load(core.spec())
    request = dataclasses.replace(core.request(), inputs={"IN": lost("IN")})
    trace = traced(traces, request)
    error = submit(core, request, new_mailbox()).error
    trace.finish()
    assert isinstance(error, ServingFault)
    assert trace.omitted_count == 1
    assert submit(core, core.request(3), new_mailbox()).error is None
    assert empty(version)


@pytest.mark.parametrize("element", [7, None])
def test_an_output_that_no_trace_can_hold_leaves_the_instance_alive(
    core: Any, traces: Traces, new_mailbox: Any, tmp_path: Path, element: Any
) -> None:
    core.script.on_run = lambda name, inputs: {"OUT": np.array([[element]], object)}
    outputs = (OutputSpec("OUT", DType.BYTES, (1,)),)
    version = core.load(core.spec(outputs=outputs, parameters={"warmup_probe": "false"}))
    for _ in range(2):
        request = core.request()
        trace = traced(traces, request)
        submit(core, request, new_mailbox())
        trace.finish()
    assert empty(version)
    traces.close(30)
    assert [one["model_name"] for one in json.loads((tmp_path / "trace.json").read_text()) if "model_name" in one] == [
        "m",
        "m",
    ]
