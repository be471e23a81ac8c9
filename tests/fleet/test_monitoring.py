"""The files of fleet/monitoring; promtool and a real Prometheus, if installed. That every metric exists is
tested in tests/e2e/test_governor_interfaces.py."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

MONITORING = Path(__file__).parents[2] / "fleet" / "monitoring"
PROGRAMS = os.pathsep.join([os.environ.get("EDGE_TEST_PROMETHEUS", ""), *os.get_exec_path()])


def read_yaml(name: str) -> Any:
    return yaml.safe_load((MONITORING / name).read_text())


def program(name: str) -> str:
    found = shutil.which(name, path=PROGRAMS)
    if found is None:
        pytest.skip(f"there is no {name}; tests/fleet/fetch_prometheus.sh brings one")
    return found


def test_alerts_name_the_problem_and_its_severity() -> None:
    groups = read_yaml("alert-rules.yml")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_dashboard_panels_do_not_overlap() -> None:
    panels = json.loads((MONITORING / "grafana-dashboard.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_alerts_are_loaded_and_name_jobs_that_prometheus_scrapes() -> None:
    config = read_yaml("prometheus.yml")
    assert config["rule_files"] == ["alert-rules.yml"]
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    named = set(re.findall(r'job="(\w+)"', (MONITORING / "alert-rules.yml").read_text()))
    assert named
    assert named <= jobs


def test_the_dashboard_finds_the_provisioned_data_source() -> None:
    (source,) = read_yaml("grafana-datasource.yml")["datasources"]
    (provider,) = read_yaml("grafana-dashboards.yml")["providers"]
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    # The dashboard asks for any source of this type; Grafana chooses the default one.
    (variable,) = [item for item in dashboard["templating"]["list"] if item["type"] == "datasource"]
    assert (source["type"], source["isDefault"]) == (variable["query"], True)
    assert source["jsonData"]["timeInterval"] == read_yaml("prometheus.yml")["global"]["scrape_interval"]
    assert provider["type"] == "file"
    assert provider["options"]["path"]


@pytest.mark.full
def test_promtool_accepts_the_configuration_the_alerts_and_the_targets() -> None:
    done = subprocess.run(
        [program("promtool"), "check", "config", str(MONITORING / "prometheus.yml")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    count = sum(len(group["rules"]) for group in read_yaml("alert-rules.yml")["groups"])
    assert f"SUCCESS: {count} rules found" in done.stdout, done.stdout


@pytest.mark.full
def test_the_rule_of_the_adapter_sums_the_waiting_requests_of_each_pod(tmp_path: Path) -> None:
    (rule,) = read_yaml("prometheus-adapter.yml")["rules"]["custom"]
    name = rule["name"]["as"]
    query = rule["metricsQuery"]
    for placeholder, text in (("Series", name), ("LabelMatchers", 'namespace="a"'), ("GroupBy", "pod")):
        query = query.replace(f"<<.{placeholder}>>", text)
    series = [
        {"series": f'{name}{{namespace="{namespace}",pod="{pod}",model="{model}"}}', "values": values}
        for namespace, pod, model, values in (("a", "p", "x", "3"), ("a", "p", "y", "4"), ("b", "p", "x", "50"))
    ]
    check = {"expr": query, "eval_time": "0m", "exp_samples": [{"labels": '{pod="p"}', "value": 7}]}
    (tmp_path / "test.yml").write_text(
        yaml.safe_dump({"tests": [{"input_series": series, "promql_expr_test": [check]}]})
    )
    done = subprocess.run(
        [program("promtool"), "test", "rules", str(tmp_path / "test.yml")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def get(self, path: str, **parameters: str) -> Any:
        with urllib.request.urlopen(f"{self._url}{path}?{urllib.parse.urlencode(parameters)}", timeout=20) as reply:
            return json.load(reply)["data"]

    def query(self, expression: str) -> list[Any]:
        """Return the series. Raises ValueError with Prometheus' message when it rejects the expression."""
        try:
            return list(self.get("query", query=expression)["result"])
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(f"{expression}: {error.read().decode()}") from None


@pytest.fixture
def prometheus(tmp_path: Path, free_ports: Callable[[int], list[int]]) -> Iterator[Prometheus]:
    """Prometheus with the shipped files. It scrapes what tmp_path/targets/*.yml name."""
    shutil.copytree(MONITORING, tmp_path, dirs_exist_ok=True)
    (port,) = free_ports(1)
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                program("prometheus"), f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield Prometheus(port)
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.full
def test_prometheus_scrapes_a_machine_of_the_targets_and_understands_every_panel(
    tmp_path: Path,
    prometheus: Prometheus,
    serve_with_client_memory: Callable[..., contextlib.AbstractContextManager[tuple[str, str, str]]],
) -> None:
    (tmp_path / "models").mkdir()
    with serve_with_client_memory(tmp_path / "models", {}) as (_, _, metrics):
        # Prometheus is running: the file alone adds the machine.
        (tmp_path / "targets" / "machines.yml").write_text(f"- targets: ['{metrics}']\n")
        end = time.monotonic() + 90
        found: list[Any] = []
        while not found:
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.2)
            with contextlib.suppress(OSError):
                found = prometheus.query('up{job="edge_server"} == 1 and on (instance) edge_build_info')
        assert found[0]["metric"]["instance"] == metrics
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            prometheus.query(target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m"))
    (group,) = prometheus.get("rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
