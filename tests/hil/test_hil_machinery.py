"""The hardware tests themselves: they skip with a reason, run shortened on a CPU, and write their report."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from edge_server.plugins.doctor.collect import collect
from edge_server.telemetry.sysfs import SysfsFiles

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("EDGE_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *arguments]
    # With the common temporary folder it would end with the removal of other runs' folders: for minutes, and with a
    # warning when another one removes the same.
    with tempfile.TemporaryDirectory() as folder:
        try:
            return subprocess.run(
                [*command, "-o", "faulthandler_timeout=60", f"--basetemp={folder}/pytest"],
                cwd=ROOT, capture_output=True, text=True, timeout=110, env={**kept, **environment}, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as hang:
            pytest.fail(f"no end: {hang.stdout!r}\n{hang.stderr!r}")


def has_hardware() -> bool:
    """Ask what the tests themselves ask, in a process of its own: it looks for a driver."""
    code = (
        "import sys; sys.path.insert(0, 'hil_tests'); import conftest; print(conftest.find_hardware().kind or 'none')"
    )
    kept = {key: value for key, value in os.environ.items() if not key.startswith("EDGE_")}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, env=kept, check=True
    )
    return found.stdout.strip() != "none"


@pytest.mark.full
def test_on_other_machines_every_test_skips_with_the_reason(tmp_path: Path) -> None:
    if has_hardware():
        pytest.skip("this box has hardware that they run on")
    done = run("hil_tests", f"--report={tmp_path / 'report'}", "--ignore-glob=*/test_tensorrt*.py")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    report = json.loads((tmp_path / "report/report.json").read_text())
    assert report["counts"]["passed"] == report["counts"]["failed"] == 0
    assert report["counts"]["skipped"] >= 18
    assert (report["hardware"], "needs a Jetson or an NVIDIA GPU: " in report["not_run"]) == (None, True)
    page = (tmp_path / "report/index.html").read_text()
    assert "<h1>edge_server on hardware</h1>" in page
    assert "Nothing was run: it needs a Jetson or an NVIDIA GPU: " in page
    for name, item in report["tests"].items():
        assert item["outcome"] == "skipped", name
        assert "needs a Jetson or an NVIDIA GPU: " in item["reason"], name


@pytest.mark.full
@pytest.mark.parametrize("name", ["orin_nano_jp6", "agx_orin_jp6", "thor_jp7"])
def test_an_archive_of_a_board_is_read_on_any_machine(make_board: Any, tmp_path: Path, name: str) -> None:
    root, archive = make_board(name).root, tmp_path / "board.tar.gz"
    collect(SysfsFiles(root), root, archive)
    done = run("hil_tests/test_board_archive.py", f"--board={archive}")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.startswith("....  "), done.stdout


class Page(HTMLParser):
    """Collects the text of a page, and the addresses that it would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.full
def test_a_forced_run_writes_a_report_marked_as_forced(tmp_path: Path) -> None:
    report = tmp_path / "report"
    done = run(
        "hil_tests/test_soak.py", "hil_tests/test_frame_streams.py", "hil_tests/test_shared_memory.py", "-k", "not 4",
        f"--report={report}", EDGE_HIL_FORCE="cpu", EDGE_HIL_SOAK_SECONDS="8",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads((report / "report.json").read_text())
    assert found["is_proof_of_the_tests_only"]
    assert (found["counts"]["passed"], found["counts"]["failed"]) == (3, 0)
    # The machine of the report.
    assert {"board", "runtimes", "memory", "sensors"} <= found["box"]["sections"].keys()
    values = {item["name"]: item["value"] for item in found["values"]}
    assert values["requests"] > 0
    assert values["camera 1 of 1: results"] > 0
    series = {item["name"]: item["points"] for item in found["series"]}
    assert {"p50", "p99", "memory"} <= series.keys()
    assert all(len(points) >= 2 for points in series.values())
    page = Page()
    page.feed((report / "index.html").read_text())
    assert page.tags.count("svg") >= 4
    assert page.links == [], "the page needs a network"
    text = "".join(page.text)
    assert "this proves the tests, not any hardware" in text
    assert "test_half_an_hour_of_load_loses_no_request_and_leaks_no_memory" in text


@pytest.mark.full
def test_a_test_that_fails_is_in_the_report_with_its_reason(tmp_path: Path) -> None:
    # A limit that nothing keeps: memory may shrink by a terabyte.
    code = f"""
import sys, pytest
sys.path.insert(0, {str(ROOT / "hil_tests")!r})
class Plugin:
    def pytest_collection_finish(self, session):
        for item in session.items:
            item.module.MAX_GROWTH_MB = -1e6
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", {str(ROOT / "hil_tests/test_soak.py")!r},
    "--report={tmp_path}"], plugins=[Plugin()]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
        env={**os.environ, "EDGE_HIL_FORCE": "cpu", "EDGE_HIL_SOAK_SECONDS": "2"},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    found = json.loads((tmp_path / "report.json").read_text())
    (item,) = found["tests"].values()
    assert item["outcome"] == "failed"
    assert "-1000000" in item["reason"]
    assert re.search(r"<td class=failed>failed", (tmp_path / "index.html").read_text())


@pytest.mark.full
def test_the_tests_of_tensorrt_pass_over_its_double(fake_gpu: Any, tmp_path: Path) -> None:
    """They would be the first to meet a real GPU: at the least they fit the code of today."""
    double = ("-p", "hil_double", "hil_tests/test_tensorrt.py", f"--report={tmp_path}")
    done = run(*double, EDGE_HIL_FORCE="cpu", EDGE_HIL_NO_BOX="1", PYTHONPATH=str(Path(__file__).parent))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert json.loads((tmp_path / "report.json").read_text())["counts"]["passed"] >= 5


@pytest.mark.full
def test_parity_waits_for_the_engine_and_does_not_measure_the_runtime_that_serves_until_then(
    fake_gpu: Any, tmp_path: Path
) -> None:
    there = fake_gpu.environment(tmp_path, CACHE_DIRECTORY=str(tmp_path), FAKE_CUDA_CAPABILITY="89")
    done = run(
        "hil_tests/test_parity.py", "-k", "tensorrt_rtx", f"--report={tmp_path}", EDGE_HIL_NO_BOX="1",
        LD_LIBRARY_PATH=str(Path(fake_gpu.library).parent), **there,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads((tmp_path / "report.json").read_text())
    reasons = {name.partition("[")[2]: test["reason"] for name, test in found["tests"].items()}
    assert reasons["tensorrt_rtx-f32]"] == ""
    assert "the types that the file has, which are f32" in reasons["tensorrt_rtx-f16]"]
    assert "tensorrt_rtx f32: an answer took" in [item["name"] for item in found["values"]]


@pytest.mark.full
def test_a_gpu_that_tensorrt_for_rtx_does_not_know_skips_its_tests(fake_gpu: Any, tmp_path: Path) -> None:
    there = fake_gpu.environment(tmp_path, CACHE_DIRECTORY=str(tmp_path), FAKE_CUDA_CAPABILITY="90")
    done = run(
        "hil_tests/test_parity.py", "hil_tests/test_tensorrt.py", "hil_tests/test_tensorrt_shape_tensors.py",
        "-k", "tensorrt_rtx and not f16", f"--report={tmp_path}", EDGE_HIL_NO_BOX="1",
        LD_LIBRARY_PATH=str(Path(fake_gpu.library).parent), **there,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["counts"]["passed"] == 0
    assert all("builds no engines for" in test["reason"] for test in found["tests"].values())


def test_an_invalid_force_option_is_refused() -> None:
    done = run("hil_tests/test_energy.py", EDGE_HIL_FORCE="gpu")
    assert done.returncode != 0
    assert "expected cpu, given 'gpu'" in done.stdout + done.stderr


def test_nan_values_are_null_in_the_report_and_gaps_in_the_plot(tmp_path: Path) -> None:
    """A reading that failed is one: the report is JSON all the same."""
    code = (
        "import sys; sys.path.insert(0, 'hil_tests')\n"
        "from pathlib import Path; from hil_report import Report\n"
        "report, nan = Report('a box'), float('nan')\n"
        "report.add_series('t', 'power', [(0.0, nan), (1.0, 5.0), (2.0, 6.0)], 'W', 's')\n"
        "report.add_value('t', 'largest', float('inf'), 'W')\n"
        "report.write(Path(sys.argv[1]))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True, timeout=60)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert report["series"][0]["points"] == [[0.0, None], [1.0, 5.0], [2.0, 6.0]]
    assert report["values"][0]["value"] is None
    page = (tmp_path / "index.html").read_text()
    assert "<polyline" in page
    assert "nan" not in page
