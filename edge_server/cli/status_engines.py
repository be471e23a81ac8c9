"""Engine part of `edge-server status`: built engines, running builds, and reasons for missing ones."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


def engine_lines(report: Mapping[str, Any], now_s: float | None = None) -> str:
    """Return the lines for a response of GET /edge/v1/engines with `enabled` true. `now_s` is Unix time."""
    now_s = time.time() if now_s is None else now_s
    cached = report["cached"]
    heading = f"engines: {cached['count']} cached, {cached['bytes'] / 1e6:.0f} MB"
    lines = [heading + (f"; builds are paused: {_clean(report['detail'])}" if report["detail"] else "")]
    return "\n".join([*lines, *(f"  {_line(item, now_s)}" for item in report["engines"])])


def _line(item: Mapping[str, Any], now_s: float) -> str:
    title = _clean(f"{item['model']} version {item['version']}, {item['library']} {item['precision']}")
    state = item["state"]
    if state == "ready":
        difference = item["difference"]
        compared = "" if difference is None else f", outputs within {difference:.1g} of the previous runtime"
        return f"{title}: ready, built in {item['took_s']:.1f} s{compared}"
    if state in ("building", "verifying"):
        return f"{title}: {state}, {item['percent']:.0f} % ({_clean(item['phase'])})"
    if state == "waiting" and item["phase"]:
        return f"{title}: {_clean(item['phase'])}"
    retry_s = item["retry_s"]
    retry = "" if retry_s is None else f"; retry in {max(retry_s - now_s, 0):.0f} s"
    return f"{title}: {state}, {_clean(item['reason'])}{retry}"


def _clean(text: object) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))
