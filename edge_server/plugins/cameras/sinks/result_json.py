"""Conversion of a frame's results to a JSON object, for `edge-server stream --json` and for the sinks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from edge_server.core.tensor import DType, Tensor
from edge_server.protocol.frame_messages import (
    LINE_CROSSED,
    ZONE_ENTERED,
    Detection,
    DropReason,
    FrameResult,
    Mask,
    ZoneEvent,
    ZoneReport,
)

MAX_ELEMENTS = 10_000
"""Larger tensors are reported without data."""

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


def result_as_json(stream: str, result: FrameResult, age_s: float) -> dict[str, Any]:
    """Return a result as a JSON object with the fields of protocol/frame_messages.py; pictures only as sizes, the masks
    of objects as polygons."""
    header, times = result.header, result.times
    fields: dict[str, Any] = {
        "kind": "result",
        "stream": stream,
        "seq": header.seq,
        "stamp": {"sec": header.sec, "nanosec": header.nanosec},
        "frame_id": header.frame_id,
        "age_ms": round(age_s * 1000, 3) if math.isfinite(age_s) else None,
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
    if result.is_late:
        fields["is_late"] = True
    fields |= {"height": result.height, "width": result.width, "batch_size": result.batch_size}
    return fields | _findings_as_json(result)


def _findings_as_json(result: FrameResult) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if result.classes:
        fields["classes"] = [
            {"index": item.index, "score": _number(item.score), "label": item.label} for item in result.classes
        ]
    # A detector that finds nothing gets an empty list. A classifier gets no list.
    if result.detections or not (result.classes or result.tensors or result.mask or result.dense_map):
        fields["detections"] = [_detection_as_json(item) for item in result.detections]
    if result.mask is not None:
        mask = result.mask
        fields["mask"] = {"height": mask.height, "width": mask.width, "shares": mask_shares(mask)}
    if result.dense_map is not None:
        summary = result.dense_map.summary().items()
        fields["map"] = {key: _number(value) if isinstance(value, float) else value for key, value in summary}
    if result.zones is not None:
        fields |= _zones_as_json(result.zones)
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
    if item.rotated is not None:
        fields["rotated"] = {name: _number(value) for name, value in asdict(item.rotated).items()}
    if item.zones:
        fields["zones"] = [
            {"zone": one.zone, "seconds": round(one.seconds, 3), "loitering": one.is_loitering} for one in item.zones
        ]
    if item.keypoints:
        fields["keypoints"] = [[_number(point.x), _number(point.y), _number(point.score)] for point in item.keypoints]
    if item.text:
        fields |= {"text": item.text, "text_score": _number(item.text_score)}
    if item.mask is not None:
        from edge_server.plugins.vision.outputs.instance_masks import outline_polygons

        fields["polygons"] = outline_polygons(item.mask)
    return fields


def _zones_as_json(report: ZoneReport) -> dict[str, Any]:
    zones = {
        zone.zone: {"counts": dict(zone.counts), "entered": zone.entered}
        | ({} if zone.loitering is None else {"loitering": dict(zone.loitering)})
        for zone in report.zones
    }
    lines = {line.line: {"in": line.in_count, "out": line.out_count} for line in report.lines}
    return {key: found for key, found in (("zones", zones), ("lines", lines)) if found}


def zone_event_fields(event: ZoneEvent) -> dict[str, str | int | float]:
    """Return an event of a zone or a line as JSON, without its kind."""
    crosses = event.kind == LINE_CROSSED
    fields: dict[str, str | int | float] = {
        "line" if crosses else "zone": event.name, "label": event.label, "track_id": event.track_id
    }  # fmt: skip
    if crosses:
        return {**fields, "direction": event.direction}
    return fields if event.kind == ZONE_ENTERED else {**fields, "seconds": round(event.seconds, 3)}


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


def mask_shares(mask: Mask) -> dict[str, float]:
    """Return the fraction of the picture that each class of a mask covers, without absent classes."""
    kind = np.dtype("u1") if mask.encoding == "mono8" else np.dtype("<u2")
    values, counts = np.unique(np.frombuffer(mask.data, kind), return_counts=True)
    whole = int(counts.sum())
    return {
        mask.labels[value] if value < len(mask.labels) else f"class {value}": count / whole
        for value, count in zip(values.tolist(), counts.tolist(), strict=True)
    }


def _number(value: float) -> float | None:
    """Return the value with seven significant digits, as in a 32-bit float; None for NaN and infinity."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def label_counts(detections: Iterable[Detection]) -> Counter[str]:
    """Return how many objects there are of each class."""
    return Counter(detection.class_name for detection in detections)


def best_class(result: FrameResult) -> str:
    """Return the class with the best score, "" if there is none."""
    best = max(result.classes, key=lambda item: item.score, default=None)
    return "" if best is None else best.class_name
