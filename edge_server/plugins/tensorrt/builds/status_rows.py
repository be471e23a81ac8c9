"""Part of `edge-server status` about TensorRT engines: built ones, running builds, and reasons for missing ones."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from edge_server.plugin import StatusPart, StatusRow


def engine_rows(report: Mapping[str, Any]) -> Sequence[StatusPart]:
    """Return the rows for a response of GET /edge/v1/engines."""
    if not report["enabled"]:
        return ()
    cached, now_s = report["cached"], time.time()
    text = f"{cached['count']} cached, {cached['bytes'] / 1e6:.0f} MB"
    text += f"; builds are paused: {report['detail']}" if report["detail"] else ""
    return (
        StatusRow("engines", "ok", text),
        *(StatusRow("", "ok", _engine_text(item, now_s)) for item in report["engines"]),
    )


def _engine_text(item: Mapping[str, Any], now_s: float) -> str:
    title = f"{item['model']} version {item['version']}, {item['library']} {item['precision']}"
    state = item["state"]
    if state == "ready":
        difference = item["difference"]
        compared = "" if difference is None else f", outputs within {difference:.1g} of the previous runtime"
        layers = item["dla_layers"]
        on_dla = "" if layers is None else f", {layers[0]} of {layers[1]} layers can run on the DLA"
        return f"{title}: ready, built in {item['took_s']:.1f} s{compared}{on_dla}"
    if state in ("building", "verifying"):
        return f"{title}: {state}, {item['percent']:.0f} % ({item['phase']})"
    if state == "waiting" and item["phase"]:
        return f"{title}: {item['phase']}"
    retry_s = item["retry_s"]
    retry = "" if retry_s is None else f"; retry in {max(retry_s - now_s, 0):.0f} s"
    return f"{title}: {state}, {item['reason']}{retry}"
