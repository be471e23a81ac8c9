"""Traces as OpenTelemetry spans, for `--trace-config=mode=opentelemetry`. The core records the traces."""
