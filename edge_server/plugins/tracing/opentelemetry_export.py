"""Exporter of request traces as OpenTelemetry spans, sent to a collector over OTLP/HTTP (extra `otel`).

Spans, attributes and events have Triton's names: `InferRequest` for the request, one span named after each model, and
`compute` inside it. The SDK keeps a bounded queue of spans and sends them on its own thread: with a slow or absent
collector only spans are lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from functools import partial

from edge_server.config import TraceConfig
from edge_server.errors import BackendMissing, install_hint
from edge_server.plugin import RunningPlugin
from edge_server.telemetry.trace_record import REQUEST_END, REQUEST_START, Stamp, TracedModel, TracedRequest, new_id

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
except ImportError as error:
    raise BackendMissing(f"trace mode opentelemetry needs its libraries ({error}); {install_hint('otel')}") from error

SERVICE_NAME = "triton-inference-server"
"""Triton's default of the resource attribute service.name."""

_SCOPE = InstrumentationScope("triton-server")
_ROOT = "InferRequest"
_COMPUTE = "compute"
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Tracing(RunningPlugin):
    def __init__(self, config: TraceConfig) -> None:
        self.make_trace_export = partial(SpanExport, config)


class SpanExport:
    """Makes spans of finished traces and gives them to the SDK. Implements telemetry.trace_record.TraceExport."""

    def __init__(self, config: TraceConfig) -> None:
        self._resource = Resource.create({"service.name": SERVICE_NAME, **dict(config.resource)})
        self._exporter = OTLPSpanExporter(endpoint=config.url)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=config.bsp_max_queue_size,
            schedule_delay_millis=config.bsp_schedule_delay_ms,
            max_export_batch_size=min(config.bsp_max_export_batch_size, config.bsp_max_queue_size),
        )

    def add(self, trace: TracedRequest) -> None:
        for span in self.spans(trace):
            self._processor.on_end(span)

    def close(self, timeout_s: float) -> None:
        sending = threading.Thread(target=self._processor.shutdown, name="edge-otel-end", daemon=True)
        sending.start()
        sending.join(timeout_s)
        if sending.is_alive():
            # Ends the thread's wait for a collector that does not answer.
            self._exporter.shutdown()

    def spans(self, trace: TracedRequest) -> Iterable[ReadableSpan]:
        """Return the spans of a trace, outermost first."""
        parent = trace.parent
        state = TraceState.from_header([parent.state]) if parent is not None and parent.state else TraceState()

        def context(span_id: int, *, is_remote: bool = False) -> SpanContext:
            return SpanContext(trace.trace_id, span_id, is_remote, _SAMPLED, state)

        def span(
            name: str,
            span_id: int,
            parent: SpanContext | None,
            stamps: list[Stamp],
            bounds: tuple[int, int],
            attributes: Mapping[str, str | int] | None = None,
        ) -> ReadableSpan:
            return ReadableSpan(
                name,
                context(span_id),
                parent,
                self._resource,
                dict(attributes or {}),
                [Event(name, timestamp=ns + trace.epoch_ns) for name, ns in stamps],
                kind=SpanKind.SERVER,
                start_time=bounds[0] + trace.epoch_ns,
                end_time=bounds[1] + trace.epoch_ns,
                instrumentation_scope=_SCOPE,
            )

        outer = None if parent is None else context(parent.span_id, is_remote=True)
        bounds = (trace.start_ns, trace.end_ns)
        yield span(_ROOT, trace.span_id, outer, trace.stamps, bounds)
        span_ids = {0: trace.span_id} | {model.id: model.span_id for model in trace.models}
        for model in trace.models:
            if not model.stamps:
                continue
            stamps = dict(model.stamps)
            bounds = (stamps[REQUEST_START], stamps.get(REQUEST_END, trace.end_ns))
            parent_context = context(span_ids.get(model.parent_id, trace.span_id))
            yield span(model.model, model.span_id, parent_context, model.stamps, bounds, _attributes(model))
            if model.compute:
                bounds = (model.compute[0][1], model.compute[-1][1])
                yield span(_COMPUTE, new_id(64), context(model.span_id), model.compute, bounds)


def _attributes(model: TracedModel) -> dict[str, str | int]:
    found: dict[str, str | int] = {
        "triton.model_name": model.model,
        "triton.model_version": model.version,
        "triton.trace_id": model.id,
        "triton.trace_parent_id": model.parent_id,
    }
    if model.request_id:
        found["triton.request_id"] = model.request_id
    return found
