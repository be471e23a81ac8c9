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
"""A tensor with more elements is told by name, type and shape alone."""
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
    """Return one line that says what was found."""
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
    """Return which share of the picture each class of a mask covers, those that cover nothing left out."""
    kind = np.dtype("u1") if mask.encoding == "mono8" else np.dtype("<u2")
    values, counts = np.unique(np.frombuffer(mask.data, kind), return_counts=True)
    whole = int(counts.sum())
    return {
        mask.labels[value] if value < len(mask.labels) else f"class {value}": count / whole
        for value, count in zip(values.tolist(), counts.tolist(), strict=True)
    }


def drops_in_words(here: int, there: Mapping[DropReason, int]) -> str:
    """Return the counts of drops by the server's reasons, and of those that never were sent."""
    parts = [f"{REASONS[reason]} {there[reason]}" for reason in REASONS if there.get(reason)]
    parts += [f"never sent {here}"] if here else []
    return ", ".join(parts) or "none"


def result_as_json(stream: str, result: FrameResult, age_s: float) -> dict[str, Any]:
    """Return a result as JSON fields as in core/frame_stream_types.py; pictures and masks as their sizes only."""
    header, times = result.header, result.times
    told: dict[str, Any] = {
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
        return {**told, "error": {"code": result.error_code, "message": result.error}}
    told |= {"model": result.model, "version": result.version, "runtime": result.runtime}
    told |= {key: text for key in ("variant", "governor", "governor_detail") if (text := getattr(result, key))}
    told |= {"height": result.height, "width": result.width, "batch_size": result.batch_size}
    return told | _findings_as_json(result)


def _findings_as_json(result: FrameResult) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if result.classes:
        told["classes"] = [
            {"index": item.index, "score": _number(item.score), "label": item.label} for item in result.classes
        ]
    # A picture in which nothing was found has an empty list; a model that finds classes alone has none of it.
    if result.detections or not (result.classes or result.tensors or result.mask):
        told["detections"] = [_detection_as_json(item) for item in result.detections]
    if result.mask is not None:
        mask = result.mask
        told["mask"] = {"height": mask.height, "width": mask.width, "shares": mask_shares(mask)}
    if result.tensors:
        told["tensors"] = [_tensor_as_json(item) for item in result.tensors]
    if result.annotated_jpeg:
        told["annotated_jpeg_bytes"] = len(result.annotated_jpeg)
    return told


def _detection_as_json(item: Detection) -> dict[str, Any]:
    told: dict[str, Any] = {
        "box": [_number(value) for value in (item.x_min, item.y_min, item.x_max, item.y_max)],
        "score": _number(item.score),
        "class_index": item.class_index,
        "label": item.label,
    }
    if item.keypoints:
        told["keypoints"] = [[_number(point.x), _number(point.y), _number(point.score)] for point in item.keypoints]
    return told


def _tensor_as_json(item: Tensor) -> dict[str, Any]:
    told: dict[str, Any] = {"name": item.name, "datatype": item.dtype.value, "shape": list(item.shape)}
    if item.array.size > MAX_ELEMENTS:
        return told
    if item.dtype is DType.BYTES:
        return {**told, "data": [value.decode(errors="replace") for value in item.array.ravel().tolist()]}
    array = item.array
    if item.dtype is DType.BF16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    values = array.ravel().tolist()
    return {**told, "data": [_number(value) if isinstance(value, float) else value for value in values]}


def drop_as_json(stream: str, notice: FrameDropped) -> dict[str, Any]:
    """Return the server's message about a dropped frame."""
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
    """Return a number that JSON knows, in the seven digits that a 32-bit float has."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
