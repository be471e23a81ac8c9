"""OpenTelemetry export: spans to an OTLP/HTTP receiver on a real socket, also a slow or absent one."""

from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from edge_server.config import ServerConfig, TraceConfig
from edge_server.core.trace_settings import CarriedTrace, parse_trace_change
from edge_server.plugins.tracing.plugin import PLUGIN
from edge_server.telemetry.trace_record import TracedRequest
from edge_server.telemetry.tracing import Traces
from tests.kit.site import Handler, Site

pytestmark = pytest.mark.full

otlp = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


class Receiver(Site):
    """Records the posted data. `delay_s`: duration of each response."""

    def __init__(self) -> None:
        self.spans: list[tuple[dict[str, str], str, Any]] = []
        self.released = threading.Event()
        self.released.set()
        super().__init__(_Handler)

    @property
    def target(self) -> str:
        return f"opentelemetry,url={self.url}/v1/traces"

    def close(self) -> None:
        self.released.set()
        super().close()


class _Handler(Handler):
    server: Receiver

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        message = otlp.ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.released.wait(30)
        for resource in message.resource_spans:
            attributes = {item.key: item.value.string_value for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.server.spans += [(attributes, scope.scope.name, span) for span in scope.spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def traces_to(url: str, *more: str) -> Traces:
    words = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=1", url, "opentelemetry,bsp_schedule_delay=20", *more)
    config = TraceConfig(words)
    running = PLUGIN.prepare(ServerConfig(trace=config))
    assert running is not None
    return Traces(config, running.make_trace_export)


def run(traces: Traces, *headers: tuple[str, str]) -> TracedRequest | None:
    """Trace an ensemble of one step, as a front end and two versions do."""
    trace = traces.sample("outer", headers)
    if trace is None:
        return None
    trace.stamp("HTTP_RECV_START")
    now = time.monotonic_ns()
    trace.first.begin("outer", 1, "r1", now, ())
    child = trace.first.new_child()
    child.begin("inner", 2, "r1", time.monotonic_ns(), ())
    now = time.monotonic_ns()
    child.record_computation(now, now + 1, now + 2, now + 3)
    child.end(time.monotonic_ns())
    trace.first.end(time.monotonic_ns())
    trace.finish()
    return trace


def attributes(span: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


def test_a_request_gives_tritons_nested_spans(receiver: Receiver) -> None:
    traces = traces_to(receiver.target, "opentelemetry,resource=service.name=box", "opentelemetry,resource=site=north")
    before_ns = time.time_ns()
    run(traces)
    traces.close(10)
    spans = {span.name: span for _, _, span in receiver.spans}
    assert sorted(spans) == ["InferRequest", "compute", "inner", "outer"]
    root, outer, inner, compute = (spans[name] for name in ("InferRequest", "outer", "inner", "compute"))
    assert len({span.trace_id for span in spans.values()}) == 1
    assert root.parent_span_id == b""
    assert (outer.parent_span_id, inner.parent_span_id) == (root.span_id, outer.span_id)
    assert compute.parent_span_id == inner.span_id
    assert [event.name for event in root.events] == ["HTTP_RECV_START"]
    assert [event.name for event in inner.events] == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert [event.name for event in compute.events] == [
        "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END",
    ]  # fmt: skip
    for span in spans.values():
        assert span.kind == span.SPAN_KIND_SERVER
        assert before_ns - 10**9 < span.start_time_unix_nano <= span.end_time_unix_nano < time.time_ns() + 10**9
    assert attributes(outer) == {
        "triton.model_name": "outer", "triton.model_version": 1, "triton.trace_id": 1, "triton.trace_parent_id": 0,
        "triton.request_id": "r1",
    }  # fmt: skip
    resource, scope, _ = receiver.spans[0]
    assert (resource["service.name"], resource["site"], scope) == ("box", "north", "triton-server")


def test_the_default_service_name_is_tritons(receiver: Receiver) -> None:
    traces = traces_to(receiver.target)
    run(traces)
    traces.close(10)
    assert receiver.spans[0][0]["service.name"] == "triton-inference-server"


def test_a_request_with_a_trace_context_is_part_of_its_callers_trace(receiver: Receiver) -> None:
    traces = traces_to(receiver.target, "rate=0", "count=1")
    assert run(traces) is None
    run(traces, ("traceparent", PARENT), ("tracestate", "vendor=x"))
    run(traces, ("Traceparent", PARENT))
    traces.close(10)
    roots = [span for _, _, span in receiver.spans if span.name == "InferRequest"]
    assert [root.trace_id.hex() for root in roots] == ["0af7651916cd43dd8448eb211c80319c"] * 2
    assert [root.parent_span_id.hex() for root in roots] == ["b7ad6b7169203331"] * 2
    assert sorted(root.trace_state for root in roots) == ["", "vendor=x"]


def test_a_model_gets_the_context_of_its_own_span(receiver: Receiver) -> None:
    traces = traces_to(receiver.target)
    trace = run(traces, ("traceparent", PARENT), ("tracestate", 'v="\\'))
    assert trace is not None
    told = json.loads(trace.first.context() or "")
    traces.close(10)
    outer = next(span for _, _, span in receiver.spans if span.name == "outer")
    assert told == {"traceparent": f"00-0af7651916cd43dd8448eb211c80319c-{outer.span_id.hex()}-01",
                    "tracestate": 'v="\\'}  # fmt: skip
    carried = pickle.loads(pickle.dumps(trace.first))
    assert carried == CarriedTrace(1, trace.first.context())


def test_settings_can_be_changed_while_tracing_and_show_no_file(receiver: Receiver) -> None:
    traces = traces_to(receiver.target)
    shown = traces.update("", parse_trace_change({"trace_rate": "0"}))
    assert shown["trace_mode"] == "opentelemetry"
    assert shown["url"].startswith("http://127.0.0.1:")  # type: ignore[union-attr]
    assert "trace_file" not in shown
    assert run(traces) is None
    traces.close(10)


def test_an_unreachable_collector_loses_spans_but_does_not_delay_the_stop(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        traces = traces_to(f"opentelemetry,url=http://127.0.0.1:{taken.getsockname()[1]}/v1/traces")
        for _ in range(20):
            assert run(traces) is not None
        traces.close(0.3)
    assert not any(thread.name == "edge-trace" for thread in threading.enumerate())


def test_for_a_slow_collector_the_oldest_spans_are_dropped(receiver: Receiver) -> None:
    receiver.released.clear()
    bounds = ("opentelemetry,bsp_max_queue_size=8", "opentelemetry,bsp_max_export_batch_size=4")
    traces = traces_to(receiver.target, *bounds)
    for _ in range(100):
        run(traces)
    receiver.released.set()
    traces.close(20)
    assert 4 <= len(receiver.spans) < 100


def test_without_the_libraries_the_error_names_the_missing_extra() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from edge_server.config import ServerConfig, TraceConfig\n"
        "from edge_server.errors import BackendMissing\n"
        "from edge_server.plugins.tracing.plugin import PLUGIN\n"
        "PLUGIN.prepare(ServerConfig(trace=TraceConfig(('level=TIMESTAMPS', 'triton,file=t'))))\n"
        "try:\n    PLUGIN.prepare(ServerConfig(trace=TraceConfig(('mode=opentelemetry',))))\n"
        "except BackendMissing as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install '.[otel]'" in done.stdout
