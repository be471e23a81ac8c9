"""Reports on models in the form of ollama's API: the members of `tags`, `ps` and `show`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import PurePath
from typing import Any

from edge_server.core.model_spec import ModelSpec
from edge_server.errors import NotReady, UnknownModel
from edge_server.plugins.language.engines.model_size import MODEL_FILE, quantization_name
from edge_server.service import Handle, InferenceService

_NO_DIGEST = "0" * 64
"""Of a model whose files have not been hashed. ollama's command prints the first 12 characters."""


def list_models(
    service: InferenceService,
    find: Callable[[str], tuple[Handle, str]],
    names: Sequence[str],
    *,
    only_loaded: bool = False,
) -> list[dict[str, Any]]:
    """Return the entries of `tags`, or of `ps`, for models and their adapters, which `find` finds. *Blocking.*

    `size` is the memory that a model takes, 0 while it is not loaded. `modified_at` is the time of its load.
    """
    reports = {report.name: report for report in service.instance_reports()}
    times = {item.name: item.since_s for item in service.versions() if item.state == "READY"}
    found = []
    for name in names:
        try:
            handle, adapter = find(name)
        except (UnknownModel, NotReady):  # removed since
            continue
        spec = handle.spec
        report = reports.get(spec.name)
        if report is None and only_loaded:
            continue
        tagged = name if ":" in name else f"{name}:latest"
        entry: dict[str, Any] = {
            "name": tagged,
            "model": tagged,
            "size": report.load_rss_bytes if report else 0,
            "digest": (report.digest.removeprefix("sha256:") if report else "") or _NO_DIGEST,
            "details": {**model_details(spec), "parent_model": spec.name if adapter else ""},
        }
        if only_loaded and report is not None:
            entry["size_vram"] = sum(report.gpu_bytes.values())
        elif spec.name in times:
            entry["modified_at"] = datetime.fromtimestamp(times[spec.name], timezone.utc).isoformat()
        found.append(entry)
    return found


def show_model(spec: ModelSpec) -> dict[str, Any]:
    """Return the answer of `show`."""
    is_for_text = spec.output("text_output") is not None
    abilities = {
        "completion": is_for_text,
        "tools": spec.output("tool_calls") is not None,
        "vision": spec.input("image") is not None,
        "embedding": not is_for_text,
    }
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": model_details(spec),
        "model_info": {"general.architecture": spec.backend, "general.basename": spec.name, **_model_file(spec)},
        "capabilities": [name for name, has_it in abilities.items() if has_it],
    }


def model_details(spec: ModelSpec) -> dict[str, Any]:
    """Return the member `details`. What the model's files do not say is empty."""
    said = _model_file(spec)
    architecture, count = said.get("general.architecture") or spec.backend, said.get("general.parameter_count")
    return {
        "parent_model": "",
        "format": PurePath(spec.default_model_filename).suffix.removeprefix("."),
        "family": architecture,
        "families": [architecture],
        "parameter_size": _short_number(count) if count else "",
        "quantization_level": quantization_name(said.get("general.file_type")),
    }


def _model_file(spec: ModelSpec) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(spec.parameters.get(MODEL_FILE, "{}"))
    return said


def _short_number(count: int) -> str:
    """Return a number as ollama writes it: 1.5B, 134.52M, 148K."""
    if count >= 1_000_000_000:
        return f"{count / 1e9:.1f}B"
    return f"{count / 1e6:.2f}M" if count >= 1_000_000 else f"{count / 1e3:.0f}K"
