"""Levels and values of a bridge's diagnostics."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from edge_server.plugins.ros.bridge_counts import BridgeCounts
from edge_server.plugins.ros.diagnostics import Diagnostics
from edge_server.plugins.ros.messages.message_conversion import DiagnosticLevel, DiagnosticStatus
from edge_server.protocol.frame_messages import StreamOpened
from tests.kit.site import Handler, Site

OK, WARN, ERROR, STALE = DiagnosticLevel
REPORT = {"enabled": True, "state": "NORMAL", "detail": "", "temperature_c": 61.5}


@pytest.mark.parametrize(
    ("counts", "level", "message"),
    [
        (BridgeCounts(5, received=50, answered=50), OK, "in 10.0/s, out 10.0/s"),
        (BridgeCounts(5, received=50, answered=9, drops=Counter(newer=41)), OK, "in 10.0/s, out 1.8/s"),
        (BridgeCounts(5, received=5, answered=4, drops=Counter(governor=1)), WARN, "in 1.0/s, out 0.8/s: 1 governor"),
        (BridgeCounts(5, received=5, answered=4, late=1), WARN, "in 1.0/s, out 0.8/s: 1 too late"),
        (
            BridgeCounts(5, received=5, answered=4, refused=1, last_error="no image"), WARN,
            "in 1.0/s, out 0.8/s: 1 failed: no image",
        ),
        (BridgeCounts(5, received=5, failed=5, last_error="INTERNAL: x"), ERROR, "in 1.0/s, out 0.0/s: INTERNAL: x"),
        (BridgeCounts(5, received=5), ERROR, "in 1.0/s, out 0.0/s: no results"),
        (BridgeCounts(5), ERROR, "no images in the last 5 s: nobody publishes it"),
    ],
)  # fmt: skip
def test_the_level_of_the_frames(counts: BridgeCounts, level: DiagnosticLevel, message: str) -> None:
    status = Diagnostics("/diagnostics", "/eyes", "box:8001").frames_status("/image", counts, "nobody publishes it")
    assert (status.level, status.name, status.hardware_id) == (level, "eyes: frames", "box:8001")
    assert status.message.startswith(message)


def test_the_values_of_the_frames_have_rates_drops_and_latencies() -> None:
    counts = BridgeCounts(4, received=8, answered=2, latencies_s=[0.01, 0.03], drops=Counter(newer=6))
    values = Diagnostics("/diagnostics", "eyes", "box:8001").frames_status("/image", counts, "").values
    assert values == {
        "image topic": "/image", "images per second": "2.00", "results per second": "0.50", "too late": "0",
        "failed": "0", "last error": "", "dropped: newer": "6", "latency p50 (ms)": "30.0", "latency p99 (ms)": "30.0",
    }  # fmt: skip


def test_with_several_cameras_the_names_of_statuses_have_the_image_topic() -> None:
    diagnostics = Diagnostics("/diagnostics", "eyes", "box:8001", names_cameras=True)
    assert diagnostics.frames_status("/front/image_raw", BridgeCounts(5), "").name == "eyes: frames of /front/image_raw"
    assert diagnostics.server_status("/front/image_raw", None, "").name == "eyes: server of /front/image_raw"


def test_the_server_is_an_error_until_a_connection_and_after_it_is_lost() -> None:
    diagnostics, opened = (
        Diagnostics("/diagnostics", "eyes", "box:8001"),
        StreamOpened("cam", "finder", 2, "openvino", server="box"),
    )
    assert diagnostics.server_status("/image", None, "").level is ERROR
    status = diagnostics.server_status("/image", opened, "")
    assert (status.level, status.message, status.values["version"]) == (OK, "finder version 2 on openvino", "2")
    status = diagnostics.server_status("/image", opened, "refused")
    assert (status.level, status.message, status.values["model"]) == (ERROR, "refused", "finder")


@pytest.fixture
def read_status() -> Callable[[Any], DiagnosticStatus]:
    """`read_status(report)` is the governor's status by a server that answers with the report."""

    def read(report: Any) -> DiagnosticStatus:
        class Answers(Handler):
            def do_GET(self) -> None:
                self.answer(json.dumps(report).encode())

        with Site(Answers) as site:
            return wait_for_status(f"{site.url}/")

    return read


def wait_for_status(http_url: str) -> DiagnosticStatus:
    diagnostics = Diagnostics("/diagnostics", "eyes", "127.0.0.1:1", http_url)
    diagnostics.start()
    while (status := diagnostics.make_message().statuses[0]).message == "not read yet":
        time.sleep(0.001)
    diagnostics.close()
    return status


@pytest.mark.parametrize(
    ("state", "level"), [("NORMAL", OK), ("WARM", OK), ("HOT", WARN), ("CRITICAL", ERROR), ("of a newer server", WARN)]
)
def test_the_level_of_the_governor(read_status: Any, state: str, level: DiagnosticLevel) -> None:
    status = read_status({**REPORT, "state": state})
    assert (status.level, status.name, status.message) == (level, "eyes: governor", state)
    assert status.values["temperature (C)"] == "61.5"


def test_a_server_without_a_governor_is_well(read_status: Any) -> None:
    status = read_status({"enabled": False, "detail": "the server was started with --governor=false"})
    assert (status.level, status.message) == (OK, "off: the server was started with --governor=false")


@pytest.mark.parametrize("report", [["a list"], {}, {**REPORT, "box": 7}, {**REPORT, "shed": [3]}])
def test_the_report_of_another_program_is_named(read_status: Any, report: Any) -> None:
    status = read_status(report)
    assert status.level is STALE
    assert "/edge/v1/governor is not of an edge-server" in status.message


def test_a_governor_that_cannot_be_read_is_stale_with_the_reason() -> None:
    status = wait_for_status("http://127.0.0.1:1")
    assert status.level is STALE
    assert status.message.startswith("http://127.0.0.1:1/edge/v1/governor: ")
