"""What settings make of the server, where no front end takes part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import edge_server
from edge_server.errors import UnknownModel
from tests.kit.model_folder import model_folder
from tests.kit.models import identity_config

INPUTS = {"INPUT0": np.zeros((1, 1), np.int32)}


def test_the_resources_of_the_rate_limiter_are_those_of_the_flag(tmp_path: Path) -> None:
    for name, count in (("greedy", 4), ("modest", 3)):
        group = f'rate_limiter {{ resources {{ name: "hands" count: {count} }} }}'
        model_folder(tmp_path / name, identity_config(more=f"instance_group {{ kind: KIND_CPU {group} }}"))
    with edge_server.Server(tmp_path, rate_limit="execution_count", rate_limit_resource="hands:3") as server:
        reasons = {entry.name: entry.reason for entry in server.models()}
        assert "asks for 4 of resource 'hands' of the CPU, and --rate-limit-resource grants 3" in reasons["greedy"]
        assert reasons["modest"] == ""


@pytest.mark.parametrize("settings", [{"http_restricted_api": "trace:key=secret"}, {"auth_tokens_file": "tokens"}, {}])
def test_names_are_suggested_only_where_each_client_may_list_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens").write_text("protect inference\n")
    model_folder(tmp_path / "models/same", identity_config())
    expected = r"'smae' is not found$" if settings else "did you mean 'same'"
    with edge_server.Server(tmp_path / "models", **settings) as server, pytest.raises(UnknownModel, match=expected):  # type: ignore[arg-type]
        server.infer("smae", INPUTS)


def test_latencies_are_histograms_and_summaries_in_place_of_counters(tmp_path: Path) -> None:
    model_folder(tmp_path / "same", identity_config())
    wanted = ["histogram_latencies=true", "summary_latencies=true", "summary_quantiles=0.5:0.05,0.99:0.001"]
    with edge_server.Server(tmp_path, metrics_config=[*wanted, "counter_latencies=false"]) as server:
        for _ in range(5):
            server.infer("same", INPUTS)
        page = server.metrics()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert not [name for name in families if name.endswith("_duration_us")]
    first, summary = (
        families[f"nv_inference_{name}"] for name in ("first_response_histogram_ms", "request_summary_us")
    )
    buckets = {sample.labels["le"]: sample.value for sample in first.samples if "le" in sample.labels}
    assert buckets["+Inf"] == 5
    quantiles = {sample.labels["quantile"]: sample.value for sample in summary.samples if "quantile" in sample.labels}
    assert 0 < quantiles["0.5"] <= quantiles["0.99"]
    reference = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text()
    for family in (first, summary):
        assert f"| `{family.name}` | {family.type} | {family.documentation} |" in reference
