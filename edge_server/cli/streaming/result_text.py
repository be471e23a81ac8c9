"""Results as text for people, and as JSON objects for programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from edge_server.core.frame_stream_types import ClassScore, Detection, DropReason, FrameDropped, FrameResult, Mask
from edge_server.core.tensor import DType, Tensor

MAX_ELEMENTS = 10_000
"""Larger tensors are reported without data."""
_MAX_NAMED = 4
REASONS = {
    DropReason.NEWER: "newer",
    DropReason.MAX_AGE: "max-age",
    DropReason.DEADLINE: "deadline",
    DropReason.MAX_FPS: "max-fps",
    DropReason.SLOW_READER: "slow-reader",
    DropReason.GOVERNOR: "governor",
    DropReason.CLOSED: "closed",
    DropReason.OTHER: "other",
}


def result_in_words(result: FrameResult) -> str:
    """Return a result as one line of text."""
    if result.error_code:
        return f"{result.error_code}: {result.error}"
    parts = []
    if result.classes:
        parts.append(", ".join(_class_in_words(item) for item in result.classes[:_MAX_NAMED]))
    if result.detections:
        parts.append(_detections_in_words(result.detections))
    if result.mask is not None:
        shares = sorted(mask_shares(result.mask).items(), key=lambda item: -item[1])
        parts.append(", ".join(f"{name} {share:.0%}" for name, share in shares[:_MAX_NAMED]))
    if not parts and result.tensors:
        parts.append(", ".join(f"{item.name} {item.dtype.value}{list(item.shape)}" for item in result.tensors))
    return "; ".join(parts) or "nothing found"


def _class_in_words(item: ClassScore) -> str:
    return f"{item.label or f'class {item.index}'} {item.score:.2f}"


def _detections_in_words(detections: tuple[Detection, ...]) -> str:
    counts = Counter(item.label or f"class {item.class_index}" for item in detections)
    best: dict[str, float] = {}
    for item in detections:
        name = item.label or f"class {item.class_index}"
        best[name] = max(best.get(name, 0.0), item.score)
    named = [f"{count} {name} {best[name]:.2f}" for name, count in counts.most_common(_MAX_NAMED)]
    more = len(counts) - len(named)
    return ", ".join(named) + (f" and {more} more kinds" if more else "")


def mask_shares(mask: Mask) -> dict[str, float]:
    """Return the fraction of the picture that each class of a mask covers, without absent classes."""
    kind = np.dtype("u1") if mask.encoding == "mono8" else np.dtype("<u2")
    values, counts = np.unique(np.frombuffer(mask.data, kind), return_counts=True)
    whole = int(counts.sum())
    return {
        mask.labels[value] if value < len(mask.labels) else f"class {value}": count / whole
        for value, count in zip(values.tolist(), counts.tolist(), strict=True)
    }


def drops_in_words(client_drops: int, server_drops: Mapping[DropReason, int]) -> str:
    """Return the number of drops by the server per reason, and of those by the client, which were never sent."""
    parts = [f"{REASONS[reason]} {server_drops[reason]}" for reason in REASONS if server_drops.get(reason)]
    parts += [f"never sent {client_drops}"] if client_drops else []
    return ", ".join(parts) or "none"


def result_as_json(stream: str, result: FrameResult, age_s: float) -> dict[str, Any]:
    """Return a result as a JSON object with the fields of core/frame_stream_types.py; pictures only as sizes."""
    header, times = result.header, result.times
    fields: dict[str, Any] = {
        "kind": "result",
        "stream": stream,
        "seq": header.seq,
        "stamp": {"sec": header.sec, "nanosec": header.nanosec},
        "frame_id": header.frame_id,
        "age_ms": _milliseconds(age_s),
        "times": {
            "received_unix_ns": times.received_unix_ns,
            "taken_us": times.taken_us,
            "queued_us": times.queued_us,
            "started_us": times.started_us,
            "finished_us": times.finished_us,
        },
        "dropped": {REASONS[reason]: count for reason, count in result.dropped.items()},
    }
    if result.error_code:
        return {**fields, "error": {"code": result.error_code, "message": result.error}}
    fields |= {"model": result.model, "version": result.version, "runtime": result.runtime}
    fields |= {key: text for key in ("variant", "governor", "governor_detail") if (text := getattr(result, key))}
    fields |= {"height": result.height, "width": result.width, "batch_size": result.batch_size}
    return fields | _findings_as_json(result)


def _findings_as_json(result: FrameResult) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if result.classes:
        fields["classes"] = [
            {"index": item.index, "score": _number(item.score), "label": item.label} for item in result.classes
        ]
    # A detector that finds nothing gets an empty list. A classifier gets no list.
    if result.detections or not (result.classes or result.tensors or result.mask):
        fields["detections"] = [_detection_as_json(item) for item in result.detections]
    if result.mask is not None:
        mask = result.mask
        fields["mask"] = {"height": mask.height, "width": mask.width, "shares": mask_shares(mask)}
    if result.tensors:
        fields["tensors"] = [_tensor_as_json(item) for item in result.tensors]
    if result.annotated_jpeg:
        fields["annotated_jpeg_bytes"] = len(result.annotated_jpeg)
    return fields


def _detection_as_json(item: Detection) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "box": [_number(value) for value in (item.x_min, item.y_min, item.x_max, item.y_max)],
        "score": _number(item.score),
        "class_index": item.class_index,
        "label": item.label,
    }
    if item.track_id:
        fields["track_id"] = item.track_id
    if item.keypoints:
        fields["keypoints"] = [[_number(point.x), _number(point.y), _number(point.score)] for point in item.keypoints]
    return fields


def _tensor_as_json(item: Tensor) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": item.name, "datatype": item.dtype.value, "shape": list(item.shape)}
    if item.array.size > MAX_ELEMENTS:
        return fields
    if item.dtype is DType.BYTES:
        return {**fields, "data": [value.decode(errors="replace") for value in item.array.ravel().tolist()]}
    array = item.array
    if item.dtype is DType.BF16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    values = array.ravel().tolist()
    return {**fields, "data": [_number(value) if isinstance(value, float) else value for value in values]}


def drop_as_json(stream: str, notice: FrameDropped) -> dict[str, Any]:
    """Return the server's notice of a dropped frame as a JSON object."""
    return {
        "kind": "dropped",
        "stream": stream,
        "seq": notice.header.seq,
        "reason": REASONS[notice.reason],
        "detail": notice.detail,
    }


def _milliseconds(seconds: float) -> float | None:
    return round(seconds * 1000, 3) if math.isfinite(seconds) else None


def _number(value: float) -> float | None:
    """Return the value with seven significant digits, as in a 32-bit float; None for NaN and infinity."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
