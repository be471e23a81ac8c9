"""Cameras that the server opens itself, on real frame streams and a real core: counted, reopened, replaced, removed."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from edge_server.errors import AlreadyExists, NotReady, Superseded
from edge_server.plugins.cameras.source_and_sink_settings import SourceEntry
from edge_server.plugins.cameras.sources import source_runner
from edge_server.plugins.cameras.sources.source_interface import SourceError, SourcePicture
from edge_server.protocol.frame_messages import DropReason, StreamRequest


def entry(name="cam", url="pattern", model="sum", **fields) -> SourceEntry:
    return SourceEntry(name=name, url=str(url), model=model, **fields)


def test_a_looped_folder_has_every_frame_answered_or_counted(cameras, folder, eventually):
    cameras.apply(entry(url=folder, fps=500))
    assert eventually(lambda: len(cameras.of()) >= 20)
    assert cameras.is_exact()
    assert len({round(float(result.tensors[0].array.item())) for result in cameras.of()}) == 3
    numbers = [result.header.seq for result in cameras.of()]
    assert numbers == sorted(set(numbers))
    assert {result.header.frame_id for result in cameras.of()} == {"cam"}
    assert {clock for _, _, clock in cameras.results} == {"server"}
    report = cameras.report()
    assert (report.state, report.reason, report.failures) == ("RUNNING", "", 0)
    assert cameras.events[0] == ("source.running", {"source": "cam", "model": "sum"})


def test_results_come_with_the_picture_of_their_own_frame_where_that_is_wanted(cameras, folder, eventually):
    cameras.apply(entry(url=folder, fps=200), pictured={"cam"})
    assert eventually(lambda: len(cameras.pictures) > 20)
    cameras.apply(entry(url=folder, fps=200))
    assert cameras.report().failures == 0
    seen = len(cameras.pictures)
    assert eventually(lambda: len(cameras.pictures) > seen + 20)
    assert cameras.pictures[-1][1] is None
    wanted = cameras.pictures[:20]
    assert {round(float(make().mean()), -1) for _, make in wanted} == {10, 50, 90}
    for result, make in wanted:
        assert make() is make(), "several sinks share the pixels"
        assert float(make().sum()) == pytest.approx(float(result.tensors[0].array.item()), rel=0.01)


def test_two_hundred_reconnections_leak_nothing(cameras, camera, jpeg, eventually):
    camera.plays(jpeg(7))
    cameras.apply(entry(url=camera.url))
    assert eventually(lambda: cameras.report().failures >= 20)
    threads = threading.active_count()
    assert eventually(lambda: cameras.report().failures >= 200)
    assert threading.active_count() <= threads
    assert len(cameras.core.streams.reports()) == 1
    assert eventually(lambda: cameras.is_exact())


def test_sources_are_added_changed_and_removed(cameras, folder, eventually):
    cameras.apply(entry("a", folder, fps=200), entry("b", fps=200))
    assert eventually(lambda: cameras.of("a") and cameras.of("b"))
    kept = cameras.stream("a").open_s
    cameras.apply(entry("a", folder, fps=200), entry("b", folder, fps=100), entry("c", fps=200))
    assert eventually(lambda: cameras.of("c"))
    assert eventually(lambda: cameras.report("b").state == "RUNNING")
    assert cameras.report("b").url == str(folder)
    assert cameras.stream("a").open_s >= kept
    cameras.apply(entry("c", fps=200))
    assert eventually(lambda: [report.stream_id for report in cameras.core.streams.reports()] == ["c"])
    assert [report.name for report in cameras.set.reports()] == ["c"]


def test_a_source_opens_its_camera_only_once_its_model_serves(cameras, camera, jpeg, eventually):
    camera.plays(*[jpeg(7)] * 100)
    cameras.apply(entry(url=camera.url, model="late"))
    assert eventually(lambda: cameras.report().failures >= 3)
    assert "late" in cameras.report().reason
    assert camera.heads == []


def test_the_reason_of_a_source_with_an_unknown_model_has_the_nearest_name(cameras, folder, eventually):
    cameras.apply(entry(url=folder, model="summ"))
    assert eventually(
        lambda: cameras.report().reason == "Request for unknown model: 'summ' is not found, did you mean 'sum'?"
    )


def test_a_source_waits_for_a_model_that_loads_without_counting_failures(cameras, folder, eventually, monkeypatch):
    monkeypatch.setattr(source_runner, "MODEL_POLL_S", 0.001)
    opens, reason = cameras.core.streams.open, "it is LOADING"

    def refuse(request, *, is_source):
        raise NotReady(reason)

    monkeypatch.setattr(cameras.core.streams, "open", refuse)
    cameras.apply(entry(url=folder, fps=500))
    assert eventually(lambda: cameras.report().state == "WAITING")
    assert cameras.report().reason == "waiting for model 'sum': it is LOADING"
    monkeypatch.setattr(cameras.core.streams, "open", opens)
    assert eventually(lambda: cameras.of())
    assert cameras.report().failures == 0
    assert cameras.states == [("cam", "WAITING"), ("cam", "CONNECTING"), ("cam", "RUNNING")]
    assert [kind for kind, _ in cameras.events] == ["source.running"]


def test_a_model_that_refuses_the_frames_is_reported(cameras, camera, jpeg, eventually):
    # A JPEG by its first bytes only.
    camera.plays(*[b"\xff\xd8garbage"] * 1000)
    cameras.apply(entry(url=camera.url))
    assert eventually(lambda: "answered with errors" in cameras.report().reason)
    assert eventually(lambda: cameras.of() and cameras.of()[-1].error_code == "INVALID_ARG")


def test_frames_above_the_size_limit_are_answered_with_the_limit(cameras, eventually):
    cameras.apply(entry(url="pattern", fps=100))
    assert eventually(lambda: "at most 200000 bytes" in cameras.report().reason)


def test_the_frame_size_may_change_within_a_stream(cameras, camera, jpeg, eventually):
    camera.plays(*[jpeg(7, side) for side in (8, 64, 8, 128) * 20])
    cameras.apply(entry(url=camera.url))
    assert eventually(lambda: {result.width for result in cameras.of()} >= {8, 64, 128})
    assert {result.error for result in cameras.of()} == {""}


def test_a_client_cannot_take_over_the_stream_of_a_source(cameras, folder, eventually):
    streams = cameras.core.streams
    before = streams.open(StreamRequest("sum", stream_id="cam"))
    cameras.apply(entry(url=folder, fps=200))
    assert eventually(lambda: before.is_over)
    assert before.next_message() is not None  # the first message
    with pytest.raises(Superseded):
        before.next_message()
    with pytest.raises(AlreadyExists, match="expected another one"):
        streams.open(StreamRequest("sum", stream_id="cam"))
    cameras.apply()
    streams.open(StreamRequest("sum", stream_id="cam")).end()


def test_the_rate_limits_a_camera_and_excess_frames_are_counted(cameras, camera, jpeg, eventually):
    camera.plays(*[jpeg(7)] * 200)
    cameras.apply(entry(url=camera.url, fps=1))
    assert eventually(lambda: cameras.report().failures >= 1)
    dropped = cameras.stream().counts.dropped
    assert dropped[DropReason.MAX_FPS] >= 190


def test_each_result_names_the_clock_of_its_timestamp(cameras, jpeg, eventually, monkeypatch):
    class Stamped:
        title, fps, length, is_live = "stamped", 0.0, 0, False
        count = 0

        def read(self):
            self.count += 1
            stamp_ns = 5_000_000_007 * self.count if self.count % 20 >= 10 else 0
            return SourcePicture(file=picture, format="jpeg", stamp_ns=stamp_ns)

        def close(self):
            pass

    picture = jpeg(1)
    monkeypatch.setattr(source_runner, "open_source", lambda *args, **kwargs: Stamped())
    cameras.apply(entry(fps=300))
    assert eventually(lambda: len(cameras.of()) > 60)
    for _, result, clock in list(cameras.results):
        number = result.header.seq
        if number % 20 >= 10:
            assert (clock, result.header.sec) == ("camera", 5 * number)
        else:
            assert clock == "server"


def test_the_metrics_contain_the_state_of_each_source(cameras, folder, eventually):
    cameras.apply(entry("a", folder, fps=200), entry("b", "/nowhere"))
    assert eventually(lambda: cameras.report("a").state == "RUNNING" and cameras.report("b").failures > 0)
    text = "".join(line for family in cameras.set.families() for line in family.render())
    assert 'edge_source_running{source="a",model="sum"} 1' in text
    assert 'edge_source_running{source="b",model="sum"} 0' in text
    assert 'edge_source_failures_total{source="a",model="sum"} 0' in text
    assert 'edge_source_offline_seconds_total{source="b"' in text


def test_an_unexpected_error_is_reported_without_its_text_and_the_source_continues(
    cameras, folder, eventually, monkeypatch, caplog
):
    url = "rtsp://me:geheim@cam"

    def fail(*args, **kwargs):
        raise KeyError(url)

    with monkeypatch.context() as patch:
        patch.setattr(source_runner, "open_source", fail)
        cameras.apply(entry(url=folder, fps=500))
        assert eventually(lambda: cameras.report().reason == "internal error: KeyError")
    assert eventually(lambda: cameras.report().state == "RUNNING")
    assert "failed unexpectedly" in caplog.text
    assert "geheim" not in caplog.text


def test_only_frames_that_run_are_converted(cameras, eventually, monkeypatch):
    class Live:
        title, fps, length, is_live = "live", 0.0, 0, True
        read_count = convert_count = 0

        def read(self):
            if self.read_count == 2000:
                raise SourceError("the camera is off")
            self.read_count += 1
            return SourcePicture(convert=self.convert)

        def convert(self):
            self.convert_count += 1
            return np.zeros((8, 8, 3), np.uint8)

        def close(self):
            pass

    live = Live()
    monkeypatch.setattr(source_runner, "open_source", lambda *args, **kwargs: live)
    cameras.apply(entry())
    assert eventually(lambda: cameras.report().failures > 0)
    assert eventually(lambda: cameras.stream().waiting_count == 0)
    counts = cameras.stream().counts
    assert counts.received == 2000
    assert live.convert_count == counts.answered < 2000
    assert cameras.is_exact()
