"""Fixtures for tests on real hardware: detection of the hardware, the report, and an installed server."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hil_machine import COMPATIBLE, cuda_devices, is_jetson
from hil_report import Report
from hil_server import ServerProcess, running

from edge_server.backends.cuda import cuda_driver
from edge_server.plugins.tensorrt.library_adapter import load_library

FORCED = os.environ.get("EDGE_HIL_FORCE", "")
REPORT: pytest.StashKey[Report] = pytest.StashKey()


@dataclass(frozen=True)
class Hardware:
    """`kind`: "jetson", "nvidia", "cpu" (forced) or "" (none). `is_short`: checks the tests, not the machine."""

    kind: str
    name: str

    @property
    def is_short(self) -> bool:
        return self.kind == "cpu"

    @property
    def has_cuda(self) -> bool:
        return self.kind in ("jetson", "nvidia")


def find_hardware() -> Hardware:
    if FORCED == "cpu":
        return Hardware("cpu", "the processor, because EDGE_HIL_FORCE=cpu says so")
    if FORCED:
        raise pytest.UsageError(f"EDGE_HIL_FORCE: expected cpu, given '{FORCED}'")
    if is_jetson():
        return Hardware("jetson", COMPATIBLE.with_name("model").read_text(errors="replace").rstrip("\0"))
    count, problem = cuda_devices()
    if count:
        return Hardware("nvidia", f"{count} GPU(s) of NVIDIA")
    return Hardware("", f"needs a Jetson or an NVIDIA GPU: {problem}")


HARDWARE = find_hardware()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report", type=Path, help="folder for report.json and index.html")
    parser.addoption("--board", type=Path, help="archive of another board, by edge-server doctor --collect")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPORT] = Report(HARDWARE.name, bool(HARDWARE.kind), HARDWARE.is_short)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        # A soak takes half an hour; pytest-timeout, where it is installed, is set for unit tests.
        item.add_marker(pytest.mark.timeout(7200))
        if not HARDWARE.kind and not ("board" in item.fixturenames and item.config.getoption("--board")):  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.skip(reason=HARDWARE.name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    made = yield
    report = item.config.stash[REPORT]
    if made.when == "call" or made.outcome != "passed":
        reason = ""
        if made.skipped:
            reason = made.longrepr[2] if isinstance(made.longrepr, tuple) else str(made.longrepr)
        elif made.failed:
            reason = made.longreprtext[-4000:]
        report.add_outcome(item.nodeid, made.outcome, reason, made.duration)
    return made


def pytest_sessionfinish(session: pytest.Session) -> None:
    folder = session.config.getoption("--report")
    if folder is None:
        return
    report = session.config.stash[REPORT]
    # `run` asks once for all parts: it takes up to a minute.
    if not report.box and "EDGE_HIL_NO_BOX" not in os.environ:
        report.box = box_identity()
    report.write(folder)
    print(f"\nreport: {(folder / 'index.html').resolve()}")


def box_identity() -> dict[str, Any]:
    command = [sys.executable, "-m", "edge_server", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return {"problem": f"edge-server doctor ended with {done.returncode}: {done.stderr[-400:]}"}


@pytest.fixture(scope="session")
def box(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the doctor says of this machine."""
    report = request.config.stash[REPORT]
    report.box = box_identity()
    return report.box


@pytest.fixture(scope="session")
def hardware() -> Hardware:
    return HARDWARE


class Measure:
    """Records the values of one test in the report."""

    def __init__(self, report: Report, test: str) -> None:
        self._report = report
        self._test = test

    def value(self, name: str, value: float, unit: str) -> None:
        self._report.add_value(self._test, name, value, unit)

    def series(self, name: str, points: list[tuple[float, float]], unit: str, x: str = "s") -> None:
        """Note a curve: x, y."""
        self._report.add_series(self._test, name, points, unit, x)


@pytest.fixture
def measure(request: pytest.FixtureRequest) -> Measure:
    return Measure(request.config.stash[REPORT], request.node.nodeid)


@pytest.fixture(scope="session")
def serve() -> Callable[..., AbstractContextManager[ServerProcess]]:
    """`with serve(repository, *flags) as server:`"""
    return running


@pytest.fixture(scope="session")
def board(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked archive of `--board`, or of this machine: a folder for `--sysfs-root`."""
    folder = tmp_path_factory.mktemp("board")
    archive = request.config.getoption("--board")
    if archive is None:
        archive = folder / "board.tar.gz"
        command = [sys.executable, "-m", "edge_server", "doctor", f"--collect={archive}"]
        subprocess.run(command, timeout=300, check=True)
    with tarfile.open(archive) as file:
        file.extraction_filter = getattr(tarfile, "data_filter", None)  # not in every patch release of 3.10 and 3.11
        file.extractall(folder / "root")
    return folder / "root"


@pytest.fixture(scope="session")
def bundled() -> Path:
    return Path(__file__).parent.parent / "model_repository"


@pytest.fixture(params=["tensorrt", "tensorrt_rtx"])
def library(request: pytest.FixtureRequest) -> str:
    """The name of a TensorRT library that is installed and builds engines for this GPU."""
    name = str(request.param)
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    if reason := cuda_driver.unavailable_reason():
        pytest.skip(f"needs a GPU: {reason}")
    capability = "SM{}{}".format(*cuda_driver.devices()[0].capability)
    known = getattr(load_library(name).trt, "ComputeCapability", None)
    if name == "tensorrt_rtx" and not hasattr(known, capability):
        pytest.skip(f"{name} builds no engines for {capability}")
    return name
