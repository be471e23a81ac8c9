"""What each receiver of results promises: order, counts, a loss and its end, reasons without passwords, no leftover."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from edge_server.core.back_off import BackOff
from edge_server.plugins.cameras.sinks import mqtt_connection, sink_runner, webhook
from edge_server.plugins.cameras.sinks.sink_interface import SinkMessage
from edge_server.plugins.cameras.sinks.sink_runner import SinkRunner
from edge_server.plugins.cameras.source_and_sink_settings import SinkEntry
from edge_server.protocol.frame_messages import Detection, FrameHeader, FrameResult, FrameTimes
from tests.kit.site import Handler, Site

PATIENCE_S = 60.0


class Receiver(NamedTuple):
    """A receiver that can be lost. `labels` are those that it got, in order; `shown` is its address in reasons."""

    url: str
    labels: Callable[[], list[str]]
    lose: Callable[[], Any]
    find: Callable[[], Any]
    shown: str


@pytest.fixture(params=["file", "folder", "webhook", pytest.param("mqtt", marks=pytest.mark.full)])
def receiver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Receiver]:
    out = tmp_path / "out"
    out.mkdir()
    if request.param == "file":
        path = out / "results.jsonl"

        def read() -> list[str]:
            return [json.loads(line)["detections"][0]["label"] for line in path.read_text().splitlines()]

        yield Receiver(str(path), read, lambda: shutil.rmtree(out), out.mkdir, str(path))
    elif request.param == "folder":

        def names() -> list[str]:
            return [name.split("_")[2] for name in sorted(os.listdir(out / "pictures"))]

        yield Receiver(
            f"{out}/pictures/", names, lambda: shutil.rmtree(out), out.mkdir, f"{out}/pictures: pictures cannot be"
        )
    elif request.param == "webhook":
        got, statuses = list[str](), [204]

        class Hook(Handler):
            def do_POST(self) -> None:
                label = json.loads(self.body())["detections"][0]["label"]
                if statuses[-1] == 204:
                    got.append(label)
                self.answer(status=statuses[-1])

        with Site(Hook) as site:
            url = f"http://me:geheim@127.0.0.1:{site.server_port}/geheim?key=geheim"
            shown = f"{site.url}: expected a status of 200 to 299, given 500"
            yield Receiver(url, lambda: got, lambda: statuses.append(500), lambda: statuses.append(204), shown)
    else:
        broker = request.getfixturevalue("broker")
        listener = request.getfixturevalue("listen")()

        def find() -> None:
            nonlocal listener
            broker.start()
            listener = request.getfixturevalue("listen")()

        def counted() -> list[str]:
            return [topic.split("/")[-1] for topic in listener.topics if topic.startswith("t/door/count/")]

        shown = f"mqtt://127.0.0.1:{broker.port}"
        yield Receiver(shown.replace("//", "//me:geheim@"), counted, broker.kill, find, shown)


class Runner(SinkRunner):
    """A sink, and the states and reasons that it told. Each message has another label and another object."""

    def __init__(self, url: str, **fields: Any) -> None:
        self.told: list[tuple[str, str]] = []
        self.count = 0
        entry = SinkEntry("s", url, 0.0, topic="t", **fields)
        super().__init__(entry, lambda runner: self.told.append((runner.state, runner.reason)))

    def show(self) -> None:
        self.count += 1
        found = Detection(10, 20, 30, 50, 0.9, 0, f"label{self.count:03}", (), self.count)
        times = FrameTimes(received_unix_ns=(1_769_869_501 + self.count) * 1_000_000_000)
        result = FrameResult(FrameHeader(seq=self.count), times, detections=(found,))
        self.put(SinkMessage("door", result, picture=lambda: np.zeros((60, 80, 3), np.uint8)))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Runner]]:
    monkeypatch.setattr(sink_runner, "BACK_OFF", BackOff(0.01, 0.05))
    monkeypatch.setattr(mqtt_connection, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(webhook, "TIMEOUT_S", 1.0)
    made: list[Runner] = []

    def make(url: str, **fields: Any) -> Runner:
        made.append(Runner(url, **fields))
        return made[-1]

    yield make
    for runner in made:
        runner.close(PATIENCE_S)
        report = runner.report()
        assert report.received == report.delivered + report.suppressed + report.dropped
        assert report.waiting == 0
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("sink")] == []


def test_messages_arrive_in_order_also_those_that_wait_at_the_end(
    receiver: Receiver, start: Callable[..., Runner], eventually: Callable[..., bool]
) -> None:
    runner = start(receiver.url)
    for _ in range(3):
        runner.show()
    runner.close(PATIENCE_S)
    report = runner.report()
    assert (report.received, report.delivered, report.state, report.reason) == (3, 3, "RUNNING", "")
    assert eventually(lambda: receiver.labels() == ["label001", "label002", "label003"])


def test_a_lost_receiver_is_told_once_and_gets_the_next_messages_when_it_is_back(
    receiver: Receiver, start: Callable[..., Runner], eventually: Callable[..., bool], caplog: pytest.LogCaptureFixture
) -> None:
    runner = start(receiver.url)
    runner.show()
    assert eventually(lambda: runner.report().delivered == 1)
    receiver.lose()
    assert eventually(lambda: runner.show() or runner.report().state == "FAILED")
    assert runner.report().reason.startswith(receiver.shown)
    receiver.find()
    assert eventually(lambda: runner.show() or runner.report().state == "RUNNING")
    delivered = runner.report().delivered
    runner.show()
    assert eventually(lambda: runner.report().delivered > delivered)
    assert eventually(lambda: receiver.labels()[-1] == f"label{runner.count:03}")
    assert receiver.labels() == sorted(receiver.labels())
    assert (runner.told[0][0], runner.told[-1][0]) == ("RUNNING", "RUNNING")
    assert all(before != after for before, after in itertools.pairwise(runner.told))
    assert "geheim" not in f"{runner.told} {runner.report()} {caplog.text}"


def test_an_absent_receiver_delays_neither_who_sends_nor_the_end(
    receiver: Receiver, start: Callable[..., Runner], eventually: Callable[..., bool]
) -> None:
    receiver.lose()
    runner = start(receiver.url)
    for _ in range(5):
        runner.show()
    assert eventually(lambda: runner.report().state == "FAILED")
    runner.close(PATIENCE_S)
    report = runner.report()
    assert (report.delivered, report.dropped, report.waiting) == (0, 5, 0)
    receiver.find()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("{folder}/no/out.jsonl", "{folder}/no/out.jsonl: cannot be written: the folder {folder}/no must exist"),
        ("{folder}/no/p/", "{folder}/no/p: pictures cannot be written: the folder {folder}/no must exist"),
        ("http://me:geheim@127.0.0.1:{port}/x", "http://127.0.0.1:{port}: Connection refused"),
        ("http://me:geheim@hook.invalid/x", "http://hook.invalid: the host name 'hook.invalid' is not known: "),
        ("http://me:geheim@127.0.0.1:{mute}/x", "http://127.0.0.1:{mute}: no answer within 1 s"),
        ("mqtt://me:geheim@127.0.0.1:{port}", "mqtt://127.0.0.1:{port}: Connection refused"),
        ("mqtt://me:geheim@broker.invalid", "mqtt://broker.invalid: the host name 'broker.invalid' is not known: "),
        ("mqtt://me:geheim@127.0.0.1:{mute}", "mqtt://127.0.0.1:{mute}: the broker does not accept the connection: no"),
    ],
)
def test_a_receiver_that_cannot_be_reached_is_named_with_the_reason(
    start: Callable[..., Runner], eventually: Callable[..., bool], tmp_path: Path, url: str, reason: str,
    free_ports: Callable[[int], list[int]],
) -> None:  # fmt: skip
    if url.startswith("mqtt"):
        pytest.importorskip("paho.mqtt.client")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        place = {"folder": tmp_path, "port": free_ports(1)[0], "mute": mute.getsockname()[1]}
        runner = start(url.format(**place))
        runner.show()
        assert eventually(lambda: runner.report().reason)
        assert runner.report().reason.startswith(reason.format(**place))
        assert "geheim" not in f"{runner.report()}"
        runner.close(PATIENCE_S)
