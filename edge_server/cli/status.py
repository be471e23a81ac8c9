"""`edge-server status`: what a running server serves, asked over the wire."""

from __future__ import annotations

import argparse
import sys
import urllib.parse
from collections.abc import Sequence
from typing import Any, cast

from edge_server.cli import wire
from edge_server.cli.box import box_lines
from edge_server.cli.check import describe, reason_line
from edge_server.cli.engines import engine_lines
from edge_server.cli.table import render
from edge_server.core.view import TensorMetadata

HEADS = (
    "MODEL", "VERSION", "STATE", "BACKEND", "PRECISION", "INPUTS", "OUTPUTS",
    "LOAD MS", "INFER MS", "MEMORY MB", "REQUESTS", "FAILED",
)  # fmt: skip

STREAM_HEADS = ("STREAM", "MODEL", "CLIENT", "FPS IN", "FPS OUT", "DROPPED", "AGE P50 MS", "AGE P99 MS")


def run(arguments: Sequence[str]) -> int:
    """Print a table of the server at `--url`; 0 when it is ready, 1 when it is not or does not answer."""
    parser = argparse.ArgumentParser(
        prog="edge-server status",
        description="Ask a running server what it serves. INFER MS is the mean since the model was loaded. Exits with "
        "0 when it is ready, with 1 when it is not or does not answer.",
        allow_abbrev=False,
    )
    wire.add_options(parser, timeout_s=5.0)
    options = parser.parse_args(arguments)
    try:
        is_ready, lines = _report(options)
    except wire.Refused as error:
        print(f"edge-server status: {error}", file=sys.stderr)
        return 1
    except (*wire.NO_ANSWER, KeyError, TypeError) as error:
        print(f"edge-server status: no answer from {options.url}: {wire.reason_of(error)}", file=sys.stderr)
        return 1
    # Not before all is known: an output that nobody reads is not a server that does not answer.
    print("\n".join(lines))
    return 0 if is_ready else 1


def _report(options: argparse.Namespace) -> tuple[bool, list[str]]:
    """Return whether it is ready, and the lines to print. Raises as wire.ask does."""
    server = wire.ask(options, "/v2")
    is_ready = _is_ready(options)
    index = cast("list[dict[str, str]]", wire.ask(options, "/v2/repository/index", {}))
    reports = {(item["name"], str(item["version"])): item for item in wire.ask(options, "/edge/v1/models")["models"]}
    rows = [_row(options, entry, reports.get((entry["name"], entry.get("version", "")))) for entry in index]
    lines = [f"{server['name']} {server['version']} at {options.url} is {'ready' if is_ready else 'NOT ready'}"]
    if rows:
        lines.append(render(HEADS, rows))
    else:
        lines.append("there is no model")
    lines += [words for report in reports.values() if (words := _sequences(report))]
    streams = _ask_if_told(options, "/edge/v1/streams")
    if streams is not None and streams["streams"]:
        lines += ["", render(STREAM_HEADS, [_stream_row(stream) for stream in streams["streams"]])]
    governor = _ask_if_told(options, "/edge/v1/governor")
    if governor is not None:
        lines.append(box_lines(governor))
    engines = _ask_if_told(options, "/edge/v1/engines")
    if engines is not None and engines["enabled"]:
        lines.append(engine_lines(engines))
    for entry in index:
        if entry.get("reason"):
            lines.append(reason_line(entry["name"], entry.get("version", ""), entry["reason"]))
    return is_ready, lines


def _ask_if_told(options: argparse.Namespace, path: str) -> dict[str, Any] | None:
    """Return what the server tells; None where it is of a version that tells nothing of that, or may not be asked."""
    try:
        return cast("dict[str, Any]", wire.ask(options, path))
    except wire.Refused:
        return None


def _sequences(report: dict[str, Any]) -> str:
    """Tell of a version's sequences; "" where there are none, or the server tells nothing of them."""
    live, waiting = report.get("live_sequences", 0), report.get("waiting_sequences", 0)
    if not live and not waiting:
        return ""
    return f"{report['name']} version {report['version']}: sequences: {live} live, {waiting} waiting for a slot"


def _stream_row(stream: dict[str, Any]) -> tuple[str, ...]:
    """Tell of an open frame stream; each drop with its reason, since the stream's id was first seen."""
    return (
        stream["stream_id"],
        stream["model"],
        stream["client"],
        f"{stream['fps_in']:.1f}",
        f"{stream['fps_out']:.1f}",
        ", ".join(f"{count} {reason}" for reason, count in stream["dropped"].items() if count) or "0",
        f"{stream['age_p50_ms']:.1f}",
        f"{stream['age_p99_ms']:.1f}",
    )


def _memory(report: dict[str, Any]) -> str:
    """Return what a model took of the machine's memory, and of each GPU's: "92", "92 +64 GPU 0"."""
    on_gpus = [f" +{count / 1e6:.0f} GPU {gpu}" for gpu, count in report.get("gpu_bytes", {}).items() if count]
    return f"{report['load_rss_bytes'] / 1e6:.0f}" + "".join(on_gpus)


def _row(options: argparse.Namespace, entry: dict[str, str], report: dict[str, Any] | None) -> tuple[str, ...]:
    name, version = entry["name"], entry.get("version", "")
    state = entry.get("state", "not loaded")
    without = (name, version, state, *[""] * (len(HEADS) - 3))
    if report is None or state != "READY":
        return without
    base = f"/v2/models/{urllib.parse.quote(name, safe='')}/versions/{version}"
    metadata, stats = _ask_if_told(options, base), _ask_if_told(options, f"{base}/stats")
    if metadata is None or stats is None:  # unloaded since it was listed
        return without
    statistics = stats["model_stats"][0]["inference_stats"]
    infer = statistics["compute_infer"]
    return (
        name,
        version,
        state,
        report["backend"],
        report["precision"],
        _tensors(metadata["inputs"]),
        _tensors(metadata["outputs"]),
        f"{report['load_s'] * 1000:.0f}",
        f"{infer['ns'] / infer['count'] / 1e6:.1f}" if infer["count"] else "-",
        _memory(report),
        str(statistics["success"]["count"]),
        str(statistics["fail"]["count"]),
    )


def _tensors(items: list[dict[str, Any]]) -> str:
    return "\n".join(describe(TensorMetadata(item["name"], item["datatype"], tuple(item["shape"]))) for item in items)


def _is_ready(options: argparse.Namespace) -> bool:
    try:
        with wire.open_answer(options, "/v2/health/ready"):
            return True
    except wire.Refused as error:
        # 400 is Triton's word for not ready.
        if error.status not in (400, 503):
            raise
        return False
