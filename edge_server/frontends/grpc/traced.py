"""Traces of gRPC calls: Triton's names for what the front end does, and the settings' message as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edge_server.core.message import Request

if TYPE_CHECKING:
    from edge_server.telemetry.trace import Traces
    from edge_server.telemetry.trace_record import TracedRequest

RECEIVED = "GRPC_WAITREAD_START"
READ = "GRPC_WAITREAD_END"
COMPLETE = "INFER_RESPONSE_COMPLETE"
SEND_START = "GRPC_SEND_START"
SEND_END = "GRPC_SEND_END"


def begin_trace(traces: Traces, request: Request, metadata: Any, received_ns: int) -> TracedRequest | None:
    """Return the trace of a request that was just read, None for most. `received_ns` is when its bytes were there."""
    trace = traces.sample(request.model, metadata)
    if trace is not None:
        trace.stamps.append((RECEIVED, received_ns))
        trace.start_ns = received_ns
        trace.stamp(READ)
        request.trace = trace.first
    return trace


def wanted_settings(settings: Mapping[str, Any]) -> dict[str, object]:
    """Return the settings of a TraceSettingRequest by name; a setting without a value is to be cleared."""
    return {name: list(setting.value) for name, setting in settings.items()}
