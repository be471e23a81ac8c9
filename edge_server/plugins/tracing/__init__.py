"""Export of request traces to OpenTelemetry, for `--trace-config=mode=opentelemetry`. The core records the traces."""
