"""Generator of metrics.md, from the metric families that the code of the server makes.

A family is found in the source text, as a call or a row of a table: name, kind, meaning, all as literals. So those are
found too that a running server has only with a GPU, a camera or a language model.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_SOURCE = Path(__file__).parents[2] / "edge_server"
_KINDS = ("counter", "gauge", "histogram", "summary")
_NAME = re.compile(r"(nv_|edge_|vllm:)\w+")
_QUOTED_NAME = re.compile(rf"[\"']{_NAME.pattern}[\"']")
_INTRODUCTION = """\
`http://127.0.0.1:8002/metrics` has them in Prometheus' text format. A counter grows from 0, since the start of the
server or the load of the version: look at its rate. A gauge is a value of now. A histogram has `_bucket`, `_sum` and
`_count`. A summary has quantiles of the last minute, and `_sum` and `_count`; summaries and the histogram of first
responses are there with `--metrics-config`. A metric is absent while there is nothing to count or to read: no GPU, no
camera.
[Monitoring](../operations.md#monitoring) names a configuration of Prometheus, alerts and a dashboard.

Also on that page: `process_*` of Prometheus' Python client (memory, processor time and open files of the server's
process), and the metrics that Python models define.
"""


class _Group(NamedTuple):
    """A section of the page: the families whose names match `names`."""

    title: str
    names: str
    text: str


_GROUPS = (
    _Group(
        "Requests and models", "(nv_inference|nv_model|edge_model|edge_sequences|edge_batch)_",
        "Labels: `model`; `version`, except for the counts of loads; the model's `metric_tags`. The mean time "
        "of a request is the rate of `nv_inference_request_duration_us` divided by that of "
        "`nv_inference_request_success`. The mean batch is the rate of `nv_inference_count` divided by that of "
        "`nv_inference_exec_count`.",
    ),
    _Group(
        "Response cache", "(nv|edge)_cache_",
        "Those that end in `_per_model` have the labels `model` and `version`. Durations are sums.",
    ),
    _Group(
        "Server", "edge_(build|http|auth|certificate|disk|cuda)_",
        "Of the whole process. The disk is that of `--state-dir`.",
    ),
    _Group("Machine", "nv_(cpu|gpu|energy)_", "Those of a GPU have the label `gpu_uuid`."),
    _Group(
        "Heat, power and the governor",
        "edge_(temperature|power|energy|over_current|governor|throttle|shed|joules|llm|variant)_",
        "See [the governor](../operations.md#heat-and-power).",
    ),
    _Group("Signed releases", "edge_follow_", "See [fleet](../fleet.md)."),
    _Group(
        "Frame streams, cameras, sinks and questions", "edge_(frame|source|sink|zone|line|question|questions)_",
        "Those of frames have the label `model`, and count the frames of clients and of cameras. "
        "See [cameras](../cameras.md).",
    ),
    _Group("Robot policies", "edge_policy_", "Labels: `model` and `wire`. See [robots](../robots.md)."),
    _Group(
        "TensorRT engines", "edge_engine_",
        "Those of one engine have the labels `model` and `version`. See [TensorRT](../tensorrt-and-jetson.md).",
    ),
    _Group(
        "Language models", "vllm:",
        "Labels: `model`, `model_name` and `version`. See [language models](../language-models.md#measure).",
    ),
)  # fmt: skip


class _Family(NamedTuple):
    name: str
    kind: str
    meaning: str


def generate() -> str:
    """Return the text of the page below its note."""
    families = [family for path in sorted(_SOURCE.rglob("*.py")) for family in _families_in(path)]
    lines = ["# Metrics\n", _INTRODUCTION]
    for group in _GROUPS:
        lines += [f"## {group.title}\n", group.text, "", "| Metric | Kind | Meaning |", "|---|---|---|"]
        members = sorted(family for family in families if re.match(group.names, family.name))
        lines += [f"| `{name}` | {kind} | {meaning.rstrip('.')} |" for name, kind, meaning in members]
        lines.append("")
        families = [family for family in families if family not in members]
    if families:
        raise ValueError(f"metrics of no group in {Path(__file__).name}: {[family.name for family in families]}")
    return "\n".join(lines)


def _families_in(path: Path) -> Iterator[_Family]:
    text = path.read_text()
    # Without the quotes, nearly every file has one: `edge_server`.
    if not _QUOTED_NAME.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        items = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.Tuple) else []
        texts = [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]
        if len(texts) < 2 or not _NAME.fullmatch(texts[0]) or " " not in texts[-1]:
            continue
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        # Rows without a kind stand in tables of counters.
        kind = texts[1] if texts[1] in _KINDS else called if called in _KINDS else "counter"
        yield _Family(texts[0], kind, texts[-1])
