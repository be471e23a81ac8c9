"""The poller over HTTP: boxes that hang, send without end or send garbage delay no others, and each has its reason."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_server.plugins.fleet.page.box_poller import BoxPoller
from edge_server.plugins.fleet.reports.box_report import BoxReport
from tests.plugins.fleet.page.stand_in_boxes import StandIn, StandIns

OPTIONS = argparse.Namespace(header=[("x-key", "s3cret")], timeout=30.0, tls_root=None, tls_cert=None, tls_key=None)


@pytest.fixture
def fleet() -> Iterator[StandIns]:
    made = StandIns([StandIn(f"box-{number}") for number in range(6)])
    yield made
    made.close()


async def poll(urls: list[str], options: argparse.Namespace, wanted: int) -> list[BoxReport]:
    """Return the first reports of `wanted` boxes."""
    found: dict[str, BoxReport] = {}
    is_done = asyncio.Event()

    def note(report: BoxReport) -> None:
        found.setdefault(report.name, report)
        if len(found) == wanted:
            is_done.set()

    poller = BoxPoller(options, note)
    try:
        poller.set_urls(urls)
        await asyncio.wait_for(is_done.wait(), 60)
    finally:
        await poller.close()
    return [found[url] for url in urls if url in found]


def test_boxes_answer_while_another_hangs(fleet: StandIns) -> None:
    fleet.boxes[0].manner = "hang"
    reports = asyncio.run(poll([box.url for box in fleet.boxes], OPTIONS, 5))
    assert [report.error for report in reports] == [""] * 5
    assert [report.report["follow"]["box"] for report in reports if report.report] == [
        box.name for box in fleet.boxes[1:]
    ]


def test_each_failure_has_its_reason(fleet: StandIns) -> None:
    hanging, endless, garbage, closed, refusing, _ = fleet.boxes
    hanging.manner, endless.manner, garbage.manner = "hang", "endless", "garbage"
    fleet.stop(closed)
    refusing.manner = "refuse"
    options = argparse.Namespace(**{**vars(OPTIONS), "timeout": 2.0})
    reports = asyncio.run(poll([box.url for box in fleet.boxes], options, 6))
    assert [report.error for report in reports] == [
        "no complete answer within 2 s",
        "its answer to /v2/health/ready has more than 1 MB",
        "the server at this address is no edge-server",
        "connection refused: nothing listens there",
        "HTTP 403 for /v2/health/ready",
        "",
    ]


def test_a_box_that_is_not_listed_any_more_is_not_asked(fleet: StandIns) -> None:
    first, second = fleet.boxes[:2]

    async def work() -> int:
        poller = BoxPoller(OPTIONS, lambda report: None)
        poller.set_urls([first.url, second.url])
        poller.set_urls([second.url])
        while not second.requests:
            await asyncio.sleep(0.01)
        await poller.close()
        return len(asyncio.all_tasks())

    assert asyncio.run(work()) == 1
    assert first.requests == []


def test_files_of_tls_need_https(fleet: StandIns, tmp_path: Path) -> None:
    async def work() -> None:
        poller = BoxPoller(argparse.Namespace(**{**vars(OPTIONS), "tls_root": tmp_path}), lambda report: None)
        try:
            poller.set_urls([fleet.boxes[0].url])
        finally:
            await poller.close()

    with pytest.raises(Exception, match="need an address with https://"):
        asyncio.run(work())
