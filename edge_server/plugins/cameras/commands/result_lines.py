"""Output lines of `edge-server stream`: results and drop notices in words, and the writer of JSON lines.
`sinks/result_json` makes the JSON of results."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any, TextIO

from edge_server.plugins.cameras.sinks.result_json import REASONS, label_counts, mask_shares
from edge_server.protocol.frame_messages import DenseMap, DropReason, FrameDropped, FrameResult

_MAX_NAMED = 4


def result_in_words(result: FrameResult) -> str:
    """Return a result as one line of text."""
    if result.error_code:
        return f"{result.error_code}: {result.error}"
    parts = []
    if result.classes:
        parts.append(", ".join(f"{item.class_name} {item.score:.2f}" for item in result.classes[:_MAX_NAMED]))
    if result.detections:
        parts.append(_detections_in_words(result))
    if result.mask is not None:
        shares = sorted(mask_shares(result.mask).items(), key=lambda item: -item[1])
        parts.append(", ".join(f"{name} {share:.0%}" for name, share in shares[:_MAX_NAMED]))
    if result.dense_map is not None:
        parts.append(_describe_map(result.dense_map))
    if not parts and result.tensors:
        parts.append(", ".join(f"{item.name} {item.dtype.value}{list(item.shape)}" for item in result.tensors))
    return "; ".join(parts) or "nothing found"


def _detections_in_words(result: FrameResult) -> str:
    counts = label_counts(result.detections)
    best: dict[str, float] = {}
    pixels: dict[str, int] = {}
    for item in result.detections:
        name = item.class_name
        best[name] = max(best.get(name, 0.0), item.score)
        if item.mask is not None:
            pixels[name] = pixels.get(name, 0) + int(item.mask.pixels().sum())
    named = [
        f"{count} {name} {best[name]:.2f}"
        + (f" on {pixels[name] / (result.width * result.height):.0%} of the picture" if name in pixels else "")
        for name, count in counts.most_common(_MAX_NAMED)
    ]
    more = len(counts) - len(named)
    texts = [repr(item.text) for item in result.detections if item.text]
    read = f": {', '.join(texts[:_MAX_NAMED])}" + (", ..." if len(texts) > _MAX_NAMED else "") if texts else ""
    return ", ".join(named) + (f" and {more} more kinds" if more else "") + read


def _describe_map(dense: DenseMap) -> str:
    if dense.kind == "anomaly":
        return f"anomaly of the picture {dense.score:.2f}"
    unit = " m" if dense.kind == "metric_depth" else ""
    return f"{dense.kind.replace('_', ' ')} {dense.minimum:.3g} to {dense.maximum:.3g}{unit}"


def drops_in_words(client_drops: int, server_drops: Mapping[DropReason, int]) -> str:
    """Return the number of drops by the server per reason, and of those by the client, which were never sent."""
    parts = [f"{REASONS[reason]} {server_drops[reason]}" for reason in REASONS if server_drops.get(reason)]
    parts += [f"never sent {client_drops}"] if client_drops else []
    return ", ".join(parts) or "none"


def drop_as_json(stream: str, notice: FrameDropped) -> dict[str, Any]:
    """Return the server's notice of a dropped frame as a JSON object."""
    return {
        "kind": "dropped",
        "stream": stream,
        "seq": notice.header.seq,
        "reason": REASONS[notice.reason],
        "detail": notice.detail,
    }


class JsonLines:
    """Writes one JSON object per line, from several threads. If the reader closes the output, sets `is_broken` and
    writes nothing more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self.is_broken = False

    def write(self, document: Mapping[str, Any]) -> None:
        line = json.dumps(document, allow_nan=False)
        with self._lock:
            if self.is_broken:
                return
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except BrokenPipeError:
                self.is_broken = True
