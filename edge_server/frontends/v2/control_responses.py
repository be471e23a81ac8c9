"""Encoder of the JSON responses about metadata, statistics, repository and shared memory, in Triton's format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from edge_server.core.metric_family import MetricFamilyView
from edge_server.core.model_statistics import (
    BatchStatistics,
    Duration,
    LatencyStatistics,
    ResponseStatistics,
    VersionStatistics,
)
from edge_server.core.status_reports import (
    CudaRegion,
    IndexEntry,
    InstanceReport,
    ModelMetadata,
    PinReport,
    ServerMetadata,
    SharedRegion,
    TensorMetadata,
    VersionReport,
)

Json = dict[str, object]


def server_metadata(metadata: ServerMetadata) -> Json:
    """Return the server's name, version and extensions."""
    return {"name": metadata.name, "version": metadata.version, "extensions": list(metadata.extensions)}


def model_metadata(metadata: ModelMetadata) -> Json:
    """Return a model's versions, platform, inputs and outputs."""
    return {
        "name": metadata.name,
        "versions": list(metadata.versions),
        "platform": metadata.platform,
        "inputs": _tensors(metadata.inputs),
        "outputs": _tensors(metadata.outputs),
    }


def _tensors(tensors: Sequence[TensorMetadata]) -> list[Json]:
    return [{"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)} for tensor in tensors]


def instance_reports(reports: Iterable[InstanceReport]) -> Json:
    """Return backend, device, precision and memory of each loaded version (not in Triton); used by `edge-server
    status`."""
    return {
        "models": [
            {
                "name": report.name,
                "version": str(report.version),
                "backend": report.backend,
                "runtime": report.runtime,
                "device": report.device,
                "precision": report.precision,
                "instance_count": report.instance_count,
                "load_s": report.load_s,
                "load_rss_bytes": report.load_rss_bytes,
                "gpu_bytes": {str(gpu): count for gpu, count in sorted(report.gpu_bytes.items())},
                "notes": list(report.notes),
                "routine_notes": list(report.routine_notes),
                "warnings": list(report.warnings),
                "digest": report.digest,
                "recognised": dict(report.recognised),
                "live_sequences": report.live_sequences,
                "waiting_sequences": report.waiting_sequences,
            }
            for report in reports
        ]
    }


def repository_index(entries: Iterable[IndexEntry]) -> list[Json]:
    """Return the repository index; empty fields are omitted."""
    index: list[Json] = []
    for entry in entries:
        optional = {
            "version": entry.version, "state": entry.state, "reason": entry.reason, "digest": entry.digest,
        }  # fmt: skip
        index.append({"name": entry.name, **{key: value for key, value in optional.items() if value}})
    return index


def version_reports(versions: Iterable[VersionReport], pins: Mapping[str, int]) -> list[Json]:
    """Return versions with their history (not in Triton). `since_s` is null for a version that was never loaded."""
    return [
        {
            "name": item.name,
            "version": item.version,
            "state": item.state,
            "generation": item.generation,
            "since_s": item.since_s or None,
            "served_count": item.served_count,
            "share": item.share,
            "is_pinned": pins.get(item.name) == item.version,
            "reason": item.reason,
        }
        for item in versions
    ]


def pin_report(report: PinReport) -> Json:
    """Return the result of a rollback or unpin (not in Triton)."""
    return {
        "name": report.name,
        "pin": report.pin,
        "before": report.before,
        "serves": report.serves,
        "survives_restart": report.survives_restart,
        "problem": report.problem,
    }


_TOKEN_COUNTS = {
    "vllm:prompt_tokens_total": "prompt",
    "vllm:generation_tokens_total": "generated",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
}
"""Metric of a language model -> its member in the response of GET /edge/v1/activity."""


def activity(versions: Iterable[VersionStatistics], families: Iterable[MetricFamilyView]) -> Json:
    """Return the response of GET /edge/v1/activity (not in Triton): counts since the load of each version, the
    quantiles of its latency where `--metrics-config` has them recorded, and of language models the tokens since the
    load and the requests now."""
    tokens: dict[str, dict[str, int]] = {}
    for family in families:
        member = _TOKEN_COUNTS.get(family.name)
        if member is not None:
            for sample in family.samples:
                counts = tokens.setdefault(sample.labels["model"], dict.fromkeys(_TOKEN_COUNTS.values(), 0))
                counts[member] += int(sample.value)
    return {
        "models": [
            {
                "name": version.name,
                "version": str(version.version),
                "waiting": version.pending_count,
                "succeeded": version.success.count,
                "failed": version.fail.count,
                "failures": dict(version.failures),
                "queue_ns": version.queue.ns,
                "compute_ns": version.compute_input.ns + version.compute_infer.ns + version.compute_output.ns,
                "computed": version.compute_infer.count,
                "is_cached": version.is_cached,
                "cache_hits": version.cache_hit.count,
                "cache_misses": version.cache_miss.count,
                "request_quantiles_ms": _request_quantiles_ms(version.latencies),
            }
            for version in versions
        ],
        "tokens": tokens,
    }


def _request_quantiles_ms(latencies: LatencyStatistics | None) -> dict[str, float]:
    """Return the quantiles of the last minute's requests. Empty without a request, or if they are not recorded."""
    summary = latencies.summaries.get("request") if latencies is not None else None
    values_us = summary.quantiles_us if summary is not None else {}
    return {f"{quantile:g}": round(value / 1000, 6) for quantile, value in values_us.items() if math.isfinite(value)}


def shared_memory_status(regions: Iterable[SharedRegion]) -> list[Json]:
    """Return the registered regions of system shared memory."""
    return [
        {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}
        for region in regions
    ]


def cuda_memory_status(regions: Iterable[CudaRegion]) -> list[Json]:
    """Return the registered regions of CUDA shared memory."""
    return [{"name": region.name, "device_id": region.device_id, "byte_size": region.byte_size} for region in regions]


def statistics(versions: Iterable[VersionStatistics]) -> Json:
    """Return the statistics of versions."""
    return {"model_stats": [_version_statistics(version) for version in versions]}


def _version_statistics(version: VersionStatistics) -> Json:
    return {
        "name": version.name,
        "version": str(version.version),
        "last_inference": version.last_inference_ms,
        "inference_count": version.inference_count,
        "execution_count": version.execution_count,
        "inference_stats": _durations(version, _INFERENCE_PARTS),
        "response_stats": {
            str(position): _durations(response, _RESPONSE_PARTS)
            for position, response in sorted(version.responses.items())
        },
        "batch_stats": [
            {"batch_size": batch.batch_size, **_durations(batch, _BATCH_PARTS)}
            for _, batch in sorted(version.batches.items())
        ],
        "memory_usage": [
            {"type": "GPU", "id": gpu, "byte_size": count} for gpu, count in sorted(version.gpu_bytes.items())
        ],
    }


_BATCH_PARTS = ("compute_input", "compute_infer", "compute_output")
_INFERENCE_PARTS = ("success", "fail", "queue", *_BATCH_PARTS, "cache_hit", "cache_miss")
_RESPONSE_PARTS = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")


def _durations(counters: VersionStatistics | BatchStatistics | ResponseStatistics, parts: Sequence[str]) -> Json:
    durations: dict[str, Duration] = {part: getattr(counters, part) for part in parts}
    return {part: {"count": duration.count, "ns": duration.ns} for part, duration in durations.items()}
