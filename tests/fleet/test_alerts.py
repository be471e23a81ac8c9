"""The alerts and the dashboard of fleet/monitoring beside a real server's metrics page; promtool tries each alert."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.kit.certificates import self_signed
from tests.kit.eventually import eventually
from tests.kit.models import Repository, identity_config, picture_sum_config
from tests.kit.server import serve

MONITORING = Path(__file__).parents[2] / "fleet/monitoring"
RULES = MONITORING / "alert-rules.yml"
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
TARGET = {"instance": "box-a:8002", "job": "edge_server"}
"""Labels that Prometheus adds to all series of a target."""
OTHER = {**TARGET, "instance": "box-b:8002"}


class Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float

    def at(self, values: str, target: Mapping[str, str] = TARGET, **other_labels: str) -> dict[str, str]:
        """Return the series as promtool reads it, with these values, one a minute."""
        labels = {**self.labels, **target, **other_labels}
        text = ",".join(f"{key}={json.dumps(value)}" for key, value in labels.items())
        return {"series": f"{self.name}{{{text}}}", "values": values}


class Page:
    """Samples of a metrics page."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = [
            Sample(name, dict(re.findall(r'(\w+)="(.*?)"', labels)), float(value))
            for name, labels, value in re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE)
        ]

    def find(self, name: str, **labels: str) -> Sample:
        """Return the first sample of that name with at least these labels."""
        found = [item for item in self.samples if item.name == name and labels.items() <= item.labels.items()]
        assert found, f"the page has no {name} {labels}"
        return found[0]


@dataclass(frozen=True)
class Pages:
    """The pages of one server: twice while all is well, and once after a broken version was copied to it."""

    first: Page
    later: Page
    broken: Page


def promtool() -> str:
    path = os.pathsep.join([os.environ.get("EDGE_TEST_PROMETHEUS", ""), *os.get_exec_path()])
    found = shutil.which("promtool", path=path)
    if found is None:
        pytest.skip("there is no promtool; tests/fleet/fetch_prometheus.sh brings one")
    return found


@pytest.fixture(scope="module")
def pages(boards: Any, tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """The server has all that has an alert: a board, a camera, TLS, a state folder, a model."""
    folder = tmp_path_factory.mktemp("alerts")
    (folder / "state").mkdir()
    repository = Repository(folder / "models")
    cert, key = self_signed(folder, days=90)
    repository.add("good", identity_config("FP32", "4"))
    repository.add("eyes", picture_sum_config())
    board = boards.Board("orin_nano_jp6", folder / "board")
    flags = [
        f"--sysfs-root={board.root}", "--governor-interval-ms=100", f"--state-dir={folder / 'state'}",
        "--grpc-use-ssl=true", f"--grpc-server-cert={cert}", f"--grpc-server-key={key}",
        "--source=name=door,url=demo,model=eyes,fps=20",
    ]  # fmt: skip
    try:
        with serve(repository.path, *flags) as server:
            seen: list[Page] = []

            def read(condition: Callable[[Page], bool]) -> Page:
                def holds() -> bool:
                    seen.append(Page(server.read_metrics()))
                    return condition(seen[-1])

                assert eventually(holds)
                return seen[-1]

            def frames(page: Page) -> float:
                return page.find("edge_frame_received_total").value

            first = read(
                lambda page: (
                    page.find("edge_source_running").value == 1
                    and frames(page) > 0
                    and all(item.labels["digest"] for item in page.samples if item.name == "edge_model_info")
                    and any(item.name == "edge_temperature_celsius" for item in page.samples)
                )
            )
            later = read(lambda page: frames(page) > frames(first))
            (repository.path / "good/2").mkdir()
            repository.add("good", identity_config("FP32", "4").replace('"identity"', '"nothing"'))
            after = read(lambda page: any(item.name == "edge_model_failed" and item.value for item in page.samples))
    finally:
        board.close()
    return Pages(first, later, after)


@dataclass(frozen=True)
class Case:
    """Series, the minute at which the alert must not fire yet, the minute at which it must, and for which labels, by
    the value that its text shows."""

    series: list[dict[str, str]]
    quiet: int
    fires: int
    labels: list[dict[str, str]]
    value: str = ""


def cases(pages: Pages) -> dict[str, Case]:
    find = pages.later.find

    def one(sample: Sample, values: str, quiet: int, fires: int, value: str = "", more: Any = ()) -> Case:
        """A case of one series, or of others beside it, whose labels the alert has."""
        return Case([sample.at(values), *more], quiet, fires, [{**sample.labels, **TARGET}], value)

    box = [{"instance": TARGET["instance"]}]
    model = [{**box[0], "model": "good"}]
    level, info = find("edge_governor_level"), find("edge_model_info", model="good")
    success, failure = find("nv_inference_request_success", model="good"), "nv_inference_request_failure"
    frames = find("edge_frame_streams", model="eyes")
    failed = next(item for item in pages.broken.samples if item.name == "edge_model_failed" and item.value == 1)
    return {
        "EdgeServerDown": one(Sample("up", {}, 1), "0+0x100", 1, 3),
        "EdgeNoServers": Case([], 1, 3, [{"job": "edge_server"}]),
        "EdgeServerRestarts": one(
            find("process_start_time_seconds"), "1000+0x5 1100+0x5 1200+0x5 1300+0x5", 17, 19, "3"
        ),
        "EdgeBoxHot": one(level, "2+0x100", 9, 11),
        "EdgeBoxCritical": one(level, "4+0x100", 0, 1),
        "EdgeBoxThrottled": Case([find("edge_throttle_state", cause="thermal").at("1+0x100")], 0, 2, box),
        "EdgeSensorLost": one(find("edge_throttle_state", cause="sensor_lost"), "1+0x100", 0, 2),
        "EdgeControlWorkRefused": one(find("edge_shed_total", **{"class": "control"}), "0+0x5 1+0x10", 5, 7),
        "EdgeMuchWorkRefused": Case(
            [find("edge_shed_total", **{"class": "bulk"}).at("0+60x60"), success.at("0+60x60")], 9, 15, box
        ),
        "EdgeOverPowerBudget": Case(
            [find("edge_power_watts", rail="total").at("20+0x60"), find("edge_power_budget_watts").at("10+0x60")],
            1, 3, box, "20.0",
        ),
        "EdgeSupplyAlarms": one(find("edge_over_current_events_total", input="oc1"), "0+1x60", 1, 5),
        "EdgeModelDoesNotLoad": one(failed, f"{failed.value}+0x100", 4, 6),
        # One in eleven. The cancelled ones alone, at first, are no failures.
        "EdgeRequestsFail": Case(
            [find(failure, model="good", reason="BACKEND").at("0+0x30 0+1x60"),
             find(failure, model="good", reason="CANCELED").at("0+5x90"), success.at("0+10x90")],
            30, 45, model,
        ),
        # 10 ms for a day, then 100 ms.
        "EdgeSlow": Case(
            [success.at("0+60x1500"),
             find("nv_inference_request_duration_us", model="good").at("0+600000x1440 870000000+6000000x60")],
            1440, 1465, model, "100000",
        ),
        "EdgeVersionSkew": Case(
            [info.at("1+0x100"), info.at("1+0x100", OTHER, version="2")], 59, 61,
            [{"model": "good", "version": "1"}, {"model": "good", "version": "2"}], "1",
        ),
        "EdgeDigestSkew": Case(
            [info.at("1+0x400"), info.at("1+0x400", OTHER, digest="sha256:0"),
             info.at("1+0x400", {**OTHER, "instance": "box-c:8002"}, digest="")],
            359, 361, [{"model": "good", "version": "1"}], "2",
        ),
        # The server of `pages` follows no repository. One that waits for its hours is no failure.
        "EdgeReleaseFailed": Case(
            [Sample("edge_follow_releases", {"state": state}, 0).at(values)
             for state, values in (("failed", "0+0x10 1+0x30"), ("foreign", "0+0x10 1+0x30"), ("waiting", "1+0x40"))],
            14, 20, box, "2",
        ),
        # promtool's clock begins at 0: read after five minutes, and not since.
        "EdgeRepositoryNotRead": one(
            Sample("edge_follow_last_complete_seconds", {}, 300), "300+0x100", 65, 75
        ),
        "EdgeDiskFull": one(
            find("edge_disk_free_bytes"), "8000000000+0x60", 4, 6, "7.451Gi",
            [find("edge_disk_size_bytes").at("100000000000+0x60")],
        ),
        # promtool's clock begins at 0: ten days are left.
        "EdgeCertificateExpires": one(
            find("edge_certificate_expiry_timestamp_seconds", wire="grpc"), "864600+0x60", 4, 10, "10d 0h 0m 0s"
        ),
        "EdgeCameraDark": one(find("edge_source_running", source="door"), "0+0x100", 4, 6),
        "EdgeNoFrames": one(
            find("edge_frame_received_total", model="eyes"), "0+20x10 200+0x60", 15, 25, "", [frames.at("1+0x70")]
        ),
    }  # fmt: skip


def rendered(text: str, labels: Mapping[str, str], value: str) -> str:
    """Return an annotation as Prometheus makes it. Raises KeyError for a label that the alert does not have."""
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: labels[match[1]], text)
    return re.sub(r"\{\{ \$value.*?\}\}", value, text)


def run_promtool(folder: Path, test: dict[str, Any]) -> None:
    (folder / "rules.yml").write_text(RULES.read_text())
    whole = {"rule_files": ["rules.yml"], "evaluation_interval": "10s", "tests": [test]}
    (folder / "test.yml").write_text(yaml.safe_dump(whole))
    done = subprocess.run(
        [promtool(), "test", "rules", str(folder / "test.yml")], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_document_has_a_row_for_each_alert_with_the_metrics_of_its_rule() -> None:
    page = (MONITORING.parents[1] / "docs/operations.md").read_text()
    rows = dict(re.findall(r"^\| `(Edge\w+)` \| (.*?) \|", page, re.MULTILINE))
    assert list(rows) == list(ALERTS)
    for alert, threshold in rows.items():
        assert all(metric in ALERTS[alert]["expr"] for metric in re.findall(r"`(\w+)`", threshold)), alert


@pytest.mark.full
@pytest.mark.parametrize("alert", ALERTS)
def test_the_alert_fires_in_time_and_names_its_subject(alert: str, pages: Pages, tmp_path: Path) -> None:
    tried, rule = cases(pages)[alert], ALERTS[alert]
    expected = [
        {
            "exp_labels": {**labels, **rule["labels"]},
            "exp_annotations": {key: rendered(text, labels, tried.value) for key, text in rule["annotations"].items()},
        }
        for labels in tried.labels
    ]
    checks = [
        {"eval_time": f"{tried.quiet}m", "alertname": alert},
        {"eval_time": f"{tried.fires}m", "alertname": alert, "exp_alerts": expected},
    ]
    run_promtool(tmp_path, {"interval": "1m", "input_series": tried.series, "alert_rule_test": checks})


@pytest.mark.full
def test_a_healthy_server_raises_no_alert(pages: Pages, tmp_path: Path) -> None:
    before = {(item.name, *item.labels.items()): item.value for item in pages.first.samples}
    series = [Sample("up", {}, 1).at("1+0x120")]
    for item in pages.later.samples:
        if item.name == "edge_disk_free_bytes":
            # The disk of the machine that runs this test may well be nearly full.
            item = item._replace(value=pages.later.find("edge_disk_size_bytes", **item.labels).value / 2)
        # What has grown goes on growing.
        growth = item.value - before.get((item.name, *item.labels.items()), item.value)
        is_counter = item.name.endswith(("_total", "_count", "_sum", "_bucket"))
        series.append(item.at(f"{item.value:.6f}+{growth if is_counter and growth > 0 else 0:.6f}x120"))
    checks = [{"eval_time": "110m", "alertname": alert} for alert in ALERTS]
    run_promtool(tmp_path, {"interval": "1m", "input_series": series, "alert_rule_test": checks})


ONLY_AT_TIMES = {
    "edge_follow_releases", "edge_follow_last_complete_seconds",
    "edge_variant_in_force", "edge_joules_per_inference", "edge_llm_joules_per_token", "edge_governor_clock_cap_hertz",
}  # fmt: skip
"""Families that have samples only once something happened, or with some options."""


def test_every_metric_of_alerts_and_dashboard_is_on_the_metrics_page(pages: Pages) -> None:
    found = re.findall(r"^# TYPE ([\w:]+) (\w+)", pages.later.text, re.MULTILINE)
    known = {f"{name}_bucket" if kind == "histogram" else name for name, kind in found} | ONLY_AT_TIMES
    panels = json.loads((MONITORING / "grafana-dashboard.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    expressions += [rule["expr"] for rule in ALERTS.values()]
    bare = [re.sub(r'"[^"]*"', "", text) for text in expressions]
    assert {name for text in bare for name in re.findall(r"\b(?:edge|nv|process)_\w+", text)} <= known


@pytest.mark.full
def test_promtool_accepts_the_metrics_page(pages: Pages) -> None:
    done = subprocess.run([promtool(), "check", "metrics"], input=pages.later.text, capture_output=True, text=True)
    # Warnings about Triton's own names (counters without _total) end it with 3; a page that does not parse with 1.
    assert done.returncode in (0, 3), done.stdout + done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("edge_")] == []
