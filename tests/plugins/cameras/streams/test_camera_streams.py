"""Camera streams without a network: every frame is answered, in order, or counted as dropped, with the reason."""

from __future__ import annotations

import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from edge_server.errors import Draining, InvalidRequest, NotReady, Superseded, Throttled, UnknownModel, Unsupported
from edge_server.plugins.cameras.reports import streams_as_json
from edge_server.plugins.cameras.streams import model_workers
from edge_server.plugins.cameras.streams.camera_stream import FrameInFlight
from edge_server.plugins.cameras.streams.frame_pipeline import FramePipeline
from edge_server.plugins.cameras.streams.stream_registry import MAX_REMEMBERED
from edge_server.protocol.frame_messages import (
    Delivery,
    DropReason,
    FrameDropped,
    FrameHeader,
    FrameTimes,
    RegionSlice,
    Returns,
    StreamRequest,
)
from edge_server.service import Handle


def is_exact(counts):
    return counts.received == counts.answered + sum(counts.dropped.values())


def test_every_frame_is_answered_in_order_with_its_own_result(served, tools):
    camera = served.camera(depth=64)
    for value in range(1, 60):
        camera.send(tools.frame(value))
    results = camera.finish()
    assert tools.values(results) == [tools.sum_of(value) for value in range(1, 60)]
    assert [result.header.seq for result in results] == [*range(1, 60)]
    assert results[-1].counts.received == results[-1].counts.answered == 59
    assert {result.error for result in results} == {""}


def test_a_skipped_stage_has_the_time_of_the_one_before():
    frame = FrameInFlight(None, FrameHeader(1), None, 1_000_000, 5)
    assert frame.times(9_000_000) == FrameTimes(5, 0, 0, 0, 8000)
    frame.taken_ns, frame.queued_ns = 2_000_000, 3_000_000
    assert frame.times(9_000_000) == FrameTimes(5, 1000, 2000, 2000, 8000)
    frame.started_ns = 4_000_000
    assert frame.times(9_000_000) == FrameTimes(5, 1000, 2000, 3000, 8000)


def test_the_log_states_the_delivery_policy_in_words(served, tools, caplog):
    caplog.set_level("INFO")
    camera = served.camera(depth=2, max_age_ms=500, max_fps=12.5)
    camera.finish()
    (opened,) = [record.getMessage() for record in caplog.records if "is open" in record.message]
    assert opened.endswith(" for model 'sum' is open: depth 2, max_age_ms 500, max_fps 12.5, weight 1, priority 2")


def test_a_result_has_model_version_and_times(served, tools):
    camera = served.camera()
    camera.send(tools.frame(3))
    result = camera.wait(1)[0]
    times = result.times
    assert (result.model, result.version, result.variant, result.batch_size) == ("sum", 1, "", 1)
    assert (result.height, result.width) == (8, 8)
    assert (result.governor, result.governor_detail) == ("HOT", "the test is warm")
    assert 0 <= times.taken_us <= times.queued_us <= times.started_us <= times.finished_us
    assert times.received_unix_ns > 10**18
    assert camera.opened.runtime == result.runtime
    assert result.runtime
    assert result.tensors[0].array.shape == (1, 1)


def test_of_a_burst_the_newest_frames_stay_and_the_others_are_counted(stream_server, tools):
    stream_server.serve("sum", tools.config(delay_ms=30))
    camera = stream_server.camera(depth=2, notifies_drops=True)
    camera.send(*[tools.frame(value) for value in range(100)])
    results = camera.finish()
    assert results[-1].header.seq == 99
    assert [result.header.seq for result in results] == sorted(result.header.seq for result in results)
    counts = results[-1].counts
    assert is_exact(counts)
    assert counts.dropped == {DropReason.NEWER: 100 - len(results)}
    assert sum(sum(result.dropped.values()) for result in results) == 100 - len(results)
    noticed = {drop.header.seq for drop in camera.drops}
    assert not noticed & {result.header.seq for result in results}


def test_frames_of_several_cameras_run_as_one_batch(stream_server, tools):
    stream_server.serve("sum", tools.config(delay_ms=40, rows=8))
    cameras = [stream_server.camera(depth=64) for _ in range(4)]
    for value in range(1, 21):
        for index, camera in enumerate(cameras):
            camera.send(tools.frame(value + 50 * index))
    for index, camera in enumerate(cameras):
        results = camera.finish()
        assert tools.values(results) == [tools.sum_of(value + 50 * index) for value in range(1, 21)]
    assert max(result.batch_size for result in cameras[0].results) == 4
    (statistics,) = stream_server.service.statistics("sum", None)
    assert statistics.execution_count < 80 / 2


@pytest.mark.parametrize(
    ("depths", "rows", "is_delayed"),
    [([1], 1, True), ([1], 8, True), ([8], 1, False), ([8], 8, False), ([8, 8], 1, False), ([8, 8], 2, True),
     ([8, 1], 1, True)],
)  # fmt: skip
def test_the_choice_is_delayed_only_where_that_may_give_a_newer_frame_or_a_fuller_batch(depths, rows, is_delayed):
    workers = model_workers.ModelWorkers(threading.Lock(), None, None, "sum", 1)
    workers._streams = [SimpleNamespace(settings=SimpleNamespace(delivery=Delivery(depth=depth))) for depth in depths]
    workers._max_rows = rows
    workers._estimate.add(100_000_000, 1_000_000)
    workers._chosen_ns = [0]
    assert (workers._pause_s(1) is not None) is is_delayed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoding": "rgb9"}, "rgb9"),
        ({"step": 5}, "step"),
        ({"height": 4000}, "8x4000"),
        ({"encoding": "", "format": "jpeg", "data": b"\xff\xd8\xff\xe0 cut off"}, "JPEG"),
        ({"encoding": ""}, "encoding"),
        ({"data": b"", "region": RegionSlice("nowhere", 0, 192)}, "nowhere"),
        ({"region": RegionSlice("nowhere", 0, 192)}, "both data and"),
    ],
)
def test_an_invalid_frame_gets_an_error_and_the_others_their_results(stream_server, tools, fields, message):
    stream_server.serve("sum", tools.config(delay_ms=20, rows=8))
    good, bad = stream_server.camera(depth=64), stream_server.camera(depth=64)
    for value in range(1, 6):
        good.send(tools.frame(value))
        bad.send(tools.frame(value, **fields) if value == 3 else tools.frame(value))
    assert tools.values(good.finish()) == [tools.sum_of(value) for value in range(1, 6)]
    results = bad.finish()
    assert [result.header.seq for result in results] == [1, 2, 3, 4, 5]
    assert [bool(result.error_code) for result in results] == [False, False, True, False, False]
    assert message in results[2].error
    assert not results[2].tensors
    assert results[-1].counts.answered == 5


def test_a_frame_above_the_size_limit_is_refused_in_order(served, tools):
    camera = served.camera(depth=4)
    big = tools.frame(2, data=b"x" * 5000)
    fault = served.streams.fault_of(big)
    assert fault is not None
    camera.stream.receive(tools.frame(1))
    camera.stream.receive(big, fault)
    results = camera.finish()
    assert "at most 4096 bytes, given 5000" in results[1].error
    assert results[1].error_code == "INVALID_ARG"
    assert served.streams.fault_of(tools.frame(1)) is None


def test_a_failing_model_answers_each_frame_with_its_error(stream_server, tools):
    fails = 'parameters { key: "stub_fail_after" value { string_value: "2" } }'
    fails += 'parameters { key: "warmup_probe" value { string_value: "false" } }'
    stream_server.serve("sum", tools.config(more=fails))
    camera = stream_server.camera(depth=64)
    camera.send(*[tools.frame(value) for value in range(1, 6)])
    results = camera.finish()
    assert len(results) == 5
    assert sorted(result.error_code for result in results) == ["", "", "INTERNAL", "INTERNAL", "INTERNAL"]
    assert all("failed as told" in result.error for result in results if result.error_code)


def test_a_client_that_reads_no_results_stops_only_its_own_stream(served, tools):
    slow, quick = served.camera(), served.camera()
    slow.reads.clear()
    slow.send(tools.frame(1))
    slow.wait(1)  # taken by the reader, which then waits

    def counts():
        report = next(item for item in served.streams.reports() if item.stream_id == slow.opened.stream_id)
        return report.counts, report.waiting_count

    sent = 1
    while not counts()[0].dropped.get(DropReason.SLOW_READER):
        sent += 1
        assert sent < 10_000, "frames go on being answered that nobody takes"
        slow.send(tools.frame(sent % 200))
        time.sleep(0.0001)  # a loop without a pause would leave workers no chance of a lock that is unfair
    before = counts()[0].dropped[DropReason.SLOW_READER]
    for value in range(1, 200):
        slow.send(tools.frame(value))
        quick.send(tools.frame(value))
        quick.wait(value)
    assert len(slow.results) == 1
    told, waiting = counts()
    assert told.dropped[DropReason.SLOW_READER] == before + 199, "each frame from then on pushes out another"
    # Two workers choose frames, and the later choice may be answered first: then one more is chosen before the results
    # at the head of the order are seen to wait.
    assert waiting <= 5, "a frame in the mailbox, two results, and two that ran before they were ready"
    assert told.received == sent + 199
    results = slow.finish()
    assert is_exact(results[-1].counts)
    assert results[-1].header.seq == 199


def test_frames_refused_by_the_governor_are_dropped_with_its_message(served, tools):
    camera = served.camera(notifies_drops=True, priority=3)
    served.gate.refusal = "the box is too hot for bulk work"
    camera.send(tools.frame(1))
    (drop,) = camera.wait(1, FrameDropped)
    assert (drop.reason, drop.detail, drop.header.seq) == (
        DropReason.GOVERNOR,
        "the box is too hot for bulk work",
        1,
    )
    served.gate.refusal = None
    camera.send(tools.frame(2))
    result = camera.finish()[0]
    assert result.dropped == {DropReason.GOVERNOR: 1}
    assert set(served.gate.asked) == {3}


def test_frames_older_than_the_maximum_age_are_not_run(stream_server, tools):
    stream_server.serve("sum", tools.config(delay_ms=300))
    camera = stream_server.camera(depth=64, max_age_ms=450)
    camera.send(*[tools.frame(value) for value in range(1, 21)])
    results = camera.finish()
    assert 1 <= len(results) < 20
    counts = served_counts(stream_server, camera, tools)
    assert counts.dropped == {DropReason.MAX_AGE: 20 - len(results)}
    assert all(result.times.taken_us <= 450_000 for result in results)


def test_a_frame_that_cannot_meet_its_deadline_is_not_started(stream_server, tools):
    stream_server.serve("sum", tools.config(delay_ms=60))
    camera = stream_server.camera(depth=64, deadline_ms=150)
    camera.send(*[tools.frame(value) for value in range(1, 41)])
    results = camera.finish()
    counts = served_counts(stream_server, camera, tools)
    assert set(counts.dropped) == {DropReason.DEADLINE}
    assert is_exact(counts)
    assert all(result.times.finished_us <= 150_000 or result.is_late for result in results)
    (statistics,) = stream_server.service.statistics("sum", None)
    assert statistics.inference_count < 20, "late frames were dropped before they were run"


def test_a_result_whose_deadline_passed_while_its_frame_ran_is_sent_and_marked_late(stream_server, tools):
    stream_server.serve("sum", tools.config(delay_ms=60))
    camera = stream_server.camera(stream_id="front", deadline_ms=20)
    camera.send(tools.frame(1))  # nothing is known yet of how long the model runs
    (late,) = camera.wait(1)
    assert (late.is_late, tools.values([late])) == (True, [tools.sum_of(1)])
    assert (late.counts.answered, late.counts.late, late.counts.dropped) == (1, 1, {})
    (report,) = streams_as_json(stream_server.streams.reports())
    assert (report["answered"], report["late"], report["dropped"]) == (1, 1, {})
    page = "".join(line for family in stream_server.streams.families() for line in family.render())
    assert 'edge_frame_late_total{model="sum"} 1' in page
    in_time = stream_server.camera(deadline_ms=60_000)
    in_time.send(tools.frame(3))
    (result,) = in_time.finish()
    assert (result.is_late, result.counts.late) == (False, 0)


def served_counts(stream_server, camera, tools):
    """Return the counts of a stream that has ended: a second connection with its id gets them."""
    again = stream_server.camera(stream_id=camera.opened.stream_id)
    return again.opened.counts


def test_at_most_max_fps_frames_a_second_are_run(served, tools):
    camera = served.camera(depth=64, max_fps=0.01)
    camera.send(*[tools.frame(value) for value in range(1, 6)])
    results = camera.finish()
    assert [result.header.seq for result in results] == [1]
    assert served_counts(served, camera, tools).dropped == {DropReason.MAX_FPS: 4}


def test_a_reconnected_stream_continues_its_counts(served, tools):
    first = served.camera(stream_id="front")
    first.send(tools.frame(1))
    first.finish()
    second = served.camera(stream_id="front")
    assert (second.opened.counts.received, second.opened.counts.answered) == (1, 1)
    second.send(tools.frame(2))
    assert second.wait(1)[0].counts.answered == 2


def test_a_second_connection_ends_the_first_whose_frames_count_as_closed(stream_server, tools):
    stream_server.serve("sum", tools.config(delay_ms=80))
    first = stream_server.camera(stream_id="front", depth=4)
    first.send(*[tools.frame(value) for value in range(1, 5)])
    second = stream_server.camera(stream_id="front", depth=4)
    first.join()
    assert isinstance(first.error, Superseded)
    assert first.error.message == "another client took over the stream 'front': each client needs an id of its own"
    second.send(tools.frame(9))
    result = second.finish()[0]
    assert result.header.seq == 9
    assert is_exact(result.counts)
    assert result.counts.dropped[DropReason.CLOSED] + len(first.results) == 4


def test_frames_of_a_disconnected_client_are_removed(stream_server, tools):
    stream_server.serve("sum", tools.config(delay_ms=200))
    stays, leaves = stream_server.camera(), stream_server.camera(depth=8, stream_id="leaves")
    leaves.send(*[tools.frame(value) for value in range(1, 9)])
    leaves.stream.end()
    leaves.join()
    assert leaves.error is None
    stays.send(tools.frame(5))
    assert tools.values(stays.finish()) == [tools.sum_of(5)]
    counts = served_counts(stream_server, leaves, tools)
    assert is_exact(counts)
    assert counts.dropped[DropReason.CLOSED] >= 4


def test_stopping_answers_running_frames_and_ends_the_streams(stream_server, tools):
    stream_server.serve("sum", tools.config(delay_ms=80))
    camera = stream_server.camera(depth=8)
    camera.send(*[tools.frame(value) for value in range(1, 9)])
    assert tools.wait_until(lambda: stream_server.service.instance_reports()[0].instance_count == 1)
    stream_server.streams.stop()
    camera.join()
    assert isinstance(camera.error, Draining)
    assert len(camera.results) < 8
    page = "".join(line for family in stream_server.streams.families() for line in family.render())
    assert f'edge_frame_answered_total{{model="sum"}} {len(camera.results)}' in page
    assert f'edge_frame_dropped_total{{model="sum",reason="CLOSED"}} {8 - len(camera.results)}' in page
    with pytest.raises(Draining):
        stream_server.camera()


def test_a_reload_during_a_stream_loses_no_frame(stream_server, tools):
    stream_server.serve("sum", tools.config(delay_ms=2))
    camera = stream_server.camera(depth=4)
    stop = threading.Event()

    def send():
        value = 0
        while not stop.wait(0.002):
            value += 1
            camera.send(tools.frame(value))

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for round_number in range(1, 4):
            seen = len(camera.results)
            camera.wait(seen + 5)
            stream_server.add("sum", tools.config(delay_ms=2, rows=0, instances=1 + round_number % 2))
            stream_server.service.load_model("sum")
    finally:
        stop.set()
        sender.join()
    results = camera.finish()
    assert {result.error for result in results} == {""}
    assert is_exact(results[-1].counts)
    assert [result.header.seq for result in results] == sorted(result.header.seq for result in results)


def test_after_a_reload_frames_are_resized_for_the_new_input(stream_server, tools):
    stream_server.serve("sum", tools.config())
    camera = stream_server.camera(depth=4)
    camera.send(tools.frame(1))
    camera.wait(1)
    stream_server.add("sum", tools.config().replace("dims: [3, 8, 8]", "dims: [3, 16, 16]"))
    stream_server.service.load_model("sum")
    camera.send(tools.frame(1))
    results = camera.finish()
    assert tools.values(results) == [tools.sum_of(1), 4 * tools.sum_of(1)]


def test_a_stream_stays_open_while_its_model_is_unloaded_and_loaded_again(served, tools):
    camera = served.camera(depth=4)
    served.service.unload_model("sum")
    assert tools.wait_until(lambda: not served.service.instance_reports())
    camera.send(tools.frame(1))
    (gone,) = camera.wait(1)
    assert gone.error_code in ("UNAVAILABLE", "NOT_FOUND")
    served.service.load_model("sum")
    camera.send(tools.frame(2))
    assert tools.values(camera.finish()[1:]) == [tools.sum_of(2)]


def test_workers_end_with_the_last_stream(served, tools):
    cameras = [served.camera() for _ in range(3)]
    names = [thread.name for thread in threading.enumerate() if thread.name == "frames-sum"]
    assert len(names) == 2, "one instance, and one worker that makes the next frame ready"
    for camera in cameras:
        camera.stream.end()
    assert tools.wait_until(lambda: not any(thread.name == "frames-sum" for thread in threading.enumerate()))


def test_a_frame_in_shared_memory_is_read_in_place_and_released(served, tools, tmp_path):
    path = f"/dev/shm/edge_frames_{tmp_path.parent.name}_{id(served)}"
    with open(path, "wb") as segment:
        segment.write(bytes([0]) * 64 + bytes([5]) * 192)
    try:
        served.service.shared_memory.register("camera", path.removeprefix("/dev/shm/"), 0, 256)
        camera = served.camera()
        camera.send(tools.frame(1, data=b"", region=RegionSlice("camera", 64, 192)))
        assert tools.values(camera.finish()) == [tools.sum_of(5)]
        served.service.shared_memory.unregister("camera")
    finally:
        import os

        os.unlink(path)


def test_credit_grows_with_the_frames_that_were_read(stream_server, tools):
    stream_server.serve("sum", tools.config(delay_ms=500))
    camera = stream_server.camera(depth=2)
    assert camera.frames_allowed == 4
    for value in range(40):
        may_send = tools.wait_until(lambda sent=value: camera.frames_allowed > sent)
        assert may_send, "a client that obeys is never stuck"
        camera.send(tools.frame(value))
    assert camera.frames_allowed <= 40 + 4
    assert camera.credits


def test_the_opening_message_is_checked(stream_server, tools):
    stream_server.add("sum", tools.config())
    stream_server.add("plain", 'backend: "identity"\ninput { name: "INPUT0" data_type: TYPE_FP32 dims: [4] }\n'
              'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [4] }')  # fmt: skip
    stream_server.add("many", 'backend: "repeat"\nmodel_transaction_policy { decoupled: true }\n'
              'input { name: "IN" data_type: TYPE_INT32 dims: [-1] }\n'
              'input { name: "DELAY" data_type: TYPE_UINT32 dims: [-1] }\n'
              'input { name: "WAIT" data_type: TYPE_UINT32 dims: [1] }\n'
              'output { name: "OUT" data_type: TYPE_INT32 dims: [1] }\n'
              'output { name: "IDX" data_type: TYPE_UINT32 dims: [1] }')  # fmt: skip
    stream_server.start()
    for kind, words, model, fields in (
        (UnknownModel, "nobody", "nobody", {}),
        (UnknownModel, "9", "sum", {"version": 9}),
        (InvalidRequest, "does not take frames: .* edge-server add wrote has those that may fit", "plain", {}),
        (Unsupported, "decoupled", "many", {}),
        (InvalidRequest, "version", "sum", {"version": -1}),
        (InvalidRequest, "depth", "sum", {"depth": 65}),
        (InvalidRequest, "depth", "sum", {"depth": -1}),
        (InvalidRequest, "weight", "sum", {"weight": 101.0}),
        (InvalidRequest, "weight", "sum", {"weight": float("nan")}),
        (InvalidRequest, "weight", "sum", {"weight": -1.0}),
        (InvalidRequest, "priority", "sum", {"priority": 10}),
        (InvalidRequest, "max_fps", "sum", {"max_fps": float("inf")}),
        (InvalidRequest, "max_fps", "sum", {"max_fps": -3.0}),
        (InvalidRequest, "stream_id", "sum", {"stream_id": "a\nb"}),
        (InvalidRequest, "stream_id", "sum", {"stream_id": "a" * 257}),
        (InvalidRequest, "'NOPE'", "sum", {"returns": Returns(tensors=("NOPE",))}),
        (InvalidRequest, "detections", "sum", {"returns": Returns(has_detections=True)}),
        (InvalidRequest, "jpeg_quality", "sum", {"returns": Returns(jpeg_quality=101)}),
    ):
        with pytest.raises(kind, match=words):
            stream_server.camera(model, **fields)
    assert stream_server.streams.reports() == []


def test_a_camera_that_connects_before_the_models_are_loaded_is_told_to_retry(stream_server):
    with pytest.raises(NotReady, match=r"is starting.*'sum'") as caught:
        stream_server.camera("sum")
    assert caught.value.retry_after_s is not None


def test_the_number_of_open_streams_is_limited(served):
    cameras = [served.camera(stream_id=f"camera {number}") for number in range(8)]
    with pytest.raises(Throttled, match="8 frame streams"):
        served.camera()
    served.camera(stream_id="camera 3")
    cameras[0].stream.end()
    served.camera()


def no_threads(granted):
    """Return what a module finds in place of `threading` where the system grants no thread beyond so many."""

    class Thread(threading.Thread):
        def start(self):
            nonlocal granted
            if not granted:
                raise RuntimeError("can't start new thread")
            granted -= 1
            super().start()

    return SimpleNamespace(Thread=Thread, Condition=threading.Condition, Lock=threading.Lock)


def test_a_stream_without_an_available_thread_is_refused_and_closed(served, tools, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(model_workers, "threading", no_threads(0))
        for _ in range(9):  # one more than may be open
            with pytest.raises(Throttled, match="no thread"):
                served.streams.open(StreamRequest("sum"))
        assert served.streams.reports() == []
    camera = served.camera()
    camera.send(tools.frame(1))
    assert tools.values(camera.finish()) == [tools.sum_of(1)]


def test_frame_workers_run_with_fewer_threads_than_requested(stream_server, tools, monkeypatch):
    stream_server.serve("sum", tools.config(instances=3))
    monkeypatch.setattr(model_workers, "threading", no_threads(1))
    cameras = [stream_server.camera(depth=8) for _ in range(3)]
    for camera in cameras:
        camera.send(*[tools.frame(value) for value in (1, 2)])
    assert [tools.values(camera.finish()) for camera in cameras] == [[tools.sum_of(1), tools.sum_of(2)]] * 3


def test_strict_priority_runs_first_on_a_busy_model(stream_server, tools):
    stream_server.serve("sum", tools.config(delay_ms=20))
    normal, urgent = stream_server.camera(depth=64), stream_server.camera(depth=64, priority=1)
    for value in range(1, 16):
        normal.send(tools.frame(value))
    for value in range(1, 16):
        urgent.send(tools.frame(value))
    urgent.wait(15)
    assert len(normal.results) <= 4, "what was chosen before the urgent ones came, and one that may have slipped in"
    normal.finish()


def test_with_a_priority_weight_a_busy_urgent_camera_leaves_turns_to_the_others(make_stream_server, tmp_path, tools):
    server = make_stream_server(tmp_path, priority_weight=2)
    try:
        server.serve("sum", tools.config(delay_ms=5))
        urgent = server.camera(depth=64, priority=1)
        others = [server.camera(depth=64) for _ in range(2)]
        for value in range(1, 61):
            for camera in (urgent, *others):
                camera.send(tools.frame(value))
        urgent.wait(60)
        # Two turns for one of theirs, which they share.
        assert all(len(camera.results) >= 10 for camera in others)
    finally:
        server.close()


def test_metrics_and_the_list_of_streams_count_results_and_drops(stream_server, tools):
    stream_server.serve("sum", tools.config(delay_ms=20))
    camera = stream_server.camera(stream_id="front", client="a robot")
    camera.send(*[tools.frame(value) for value in range(1, 11)])
    camera.send(tools.frame(11, encoding="none such"))
    answered = len(camera.finish())
    page = "".join(line for family in stream_server.streams.families() for line in family.render())
    assert 'edge_frame_received_total{model="sum"} 11' in page
    assert f'edge_frame_answered_total{{model="sum"}} {answered}' in page
    assert 'edge_frame_errors_total{model="sum"} 1' in page
    assert f'edge_frame_dropped_total{{model="sum",reason="NEWER"}} {11 - answered}' in page
    assert 'edge_frame_streams{model="sum"} 0' in page
    assert f'edge_frame_age_seconds_bucket{{model="sum",le="+Inf"}} {answered}' in page
    assert f'edge_frame_age_seconds_count{{model="sum"}} {answered}' in page
    again = stream_server.camera(stream_id="front", client="a robot")
    again.send(tools.frame(1))
    again.wait(1)
    (report,) = stream_server.streams.reports()
    assert (report.stream_id, report.model, report.client, report.priority) == ("front", "sum", "a robot", 2)
    assert report.counts.received == 12
    assert report.fps_in > 0
    assert report.fps_out > 0
    assert report.age_p99_ms >= report.age_p50_ms > 0


def test_outputs_that_alias_the_input_are_not_overwritten_by_later_frames(stream_server, tools):
    config = tools.config().replace('"stub"', '"identity"').replace(
        'name: "SUM" data_type: TYPE_FP32 dims: [1]', 'name: "OUTPUT0" data_type: TYPE_FP32 dims: [3, 8, 8]'
    )  # fmt: skip
    stream_server.serve("same", config.replace('name: "IN"', 'name: "INPUT0"'))
    camera = stream_server.camera("same", depth=64, returns=Returns(tensors=("OUTPUT0",)))
    camera.send(*[tools.frame(value) for value in range(1, 40)])
    for value, result in enumerate(camera.finish(), 1):
        assert result.error == ""
        assert np.array_equal(result.tensors[0].array, np.full((1, 3, 8, 8), value, np.float32))


def test_a_frame_looks_up_its_model_once(served, tools, monkeypatch):
    camera, find, asked = served.camera(), served.service.find, []
    monkeypatch.setattr(served.service, "find", lambda *model: asked.append(model) or find(*model))
    for number in range(1, 4):
        camera.send(tools.frame(number))
        camera.wait(number)
    assert asked == [("sum", None)] * 3


def test_one_camera_keeps_one_worker_busy_while_the_others_wait(served, tools, monkeypatch):
    camera, run, threads = served.camera(), FramePipeline.run, []
    monkeypatch.setattr(
        FramePipeline, "run", lambda *arguments: threads.append(threading.get_ident()) or run(*arguments)
    )
    (workers,) = served.streams._workers.values()
    for number in range(1, 10):
        assert tools.wait_until(lambda: len(workers._idle) == 2)
        camera.send(tools.frame(number))
        camera.wait(number)
    assert len(set(threads)) == 1


def test_a_result_is_sent_by_its_worker(served, tools):
    opened = served.streams.open(StreamRequest("sum"))
    changes, sent = [], []

    def send():
        while (message := opened.next_message()) is not None:
            sent.append((threading.current_thread().name, message[0]))

    opened.watch(lambda: changes.append(threading.current_thread().name), send)
    send()
    changes.clear()
    opened.receive(tools.frame(1))
    assert tools.wait_until(lambda: len(sent) == 2)
    name, result = sent[1]
    assert (name, tools.values([result])) == ("frames-sum", [tools.sum_of(1)])
    assert changes == []
    opened.end()


def test_a_stream_that_names_a_version_uses_that_version(stream_server, tools):
    policy = "version_policy { all {} }"
    stream_server.add("sum", tools.config(more=policy))
    stream_server.add("sum", tools.config(more=policy), version=2)
    stream_server.start()
    newest, first = stream_server.camera(), stream_server.camera(version=1)
    for camera in (newest, first):
        camera.send(tools.frame(1))
    assert [camera.finish()[0].version for camera in (newest, first)] == [2, 1]
    assert StreamRequest("sum").version == 0


def test_a_frame_withdrawn_by_the_governor_is_a_drop_and_no_error(served, tools, monkeypatch):
    camera = served.camera(notifies_drops=True)
    submit = Handle.submit

    def refuse(handle, request, sink, *, hold_us=0.0, may_stand_in=True):
        assert request.priority == 2
        request.release()
        raise Throttled("the box is HOT: 81 degrees")

    monkeypatch.setattr(Handle, "submit", refuse)
    camera.send(tools.frame(1))
    (drop,) = camera.wait(1, FrameDropped)
    assert (drop.reason, drop.detail) == (DropReason.GOVERNOR, "the box is HOT: 81 degrees")
    monkeypatch.setattr(Handle, "submit", submit)
    camera.send(tools.frame(2))
    (result,) = camera.finish()
    assert tools.values([result]) == [tools.sum_of(2)]
    assert result.dropped == {DropReason.GOVERNOR: 1}


def test_frames_refused_together_by_the_governor_are_counted_one_by_one(stream_server, tools, monkeypatch):
    stream_server.serve("sum", tools.config(rows=4))
    cameras = [stream_server.camera(notifies_drops=True, depth=8, priority=3) for _ in range(3)]
    all_came, rows = threading.Event(), []

    def refuse(handle, request, sink, *, hold_us=0.0, may_stand_in=True):
        all_came.wait(20)
        rows.append(len(request.inputs["IN"].array))
        request.release()
        raise Throttled("the box is HOT: 81 degrees", state="HOT")

    monkeypatch.setattr(Handle, "submit", refuse)
    for camera in cameras:
        camera.send(*[tools.frame(value) for value in range(1, 4)])
    all_came.set()
    for camera in cameras:
        assert {drop.reason for drop in camera.wait(3, FrameDropped)} == {DropReason.GOVERNOR}
    assert max(rows) > 1, "some ran together"
    assert sum(rows) == 9
    assert stream_server.gate.counted == [3] * (9 - len(rows)), "one of each request was counted when it was refused"


def test_results_of_several_instances_are_sent_in_frame_order(stream_server, tools):
    stream_server.serve("sum", tools.config(delay_ms=5, instances=3))
    camera = stream_server.camera(depth=64)
    camera.send(*[tools.frame(value) for value in range(1, 61)])
    results = camera.finish()
    assert [result.header.seq for result in results] == [*range(1, 61)]
    assert tools.values(results) == [tools.sum_of(value) for value in range(1, 61)]


def test_an_annotated_image_is_returned_on_request(served, tools):
    camera = served.camera(returns=Returns(tensors=("SUM",), has_annotated_jpeg=True))
    camera.send(tools.frame(200))
    (result,) = camera.finish()
    assert result.error == ""
    assert bytes(result.annotated_jpeg[:3]) == b"\xff\xd8\xff"
    assert tools.values([result]) == [tools.sum_of(200)]


def test_the_classes_that_a_model_declares_come_back_with_their_labels(stream_server, tools):
    more = 'parameters { key: "image_top_k" value { string_value: "1" } }'
    config = tools.config(more=more).replace("dims: [1] }", 'dims: [1] label_filename: "labels.txt" }', 1)
    stream_server.add("sum", config)
    (stream_server.path / "sum" / "labels.txt").write_text("brightness\n")
    stream_server.start()
    camera = stream_server.camera()
    camera.send(tools.frame(2))
    (result,) = camera.finish()
    assert [(best.index, best.label, best.score) for best in result.classes] == [(0, "brightness", tools.sum_of(2))]
    assert result.tensors == ()
    assert camera.opened.labels == ("brightness",)


class Pixels(bytearray):
    """Bytes whose end can be seen."""


def test_the_pixels_of_a_frame_are_released_once_it_is_answered_or_dropped(stream_server, tools):
    stream_server.serve("sum", tools.config(delay_ms=2))
    camera = stream_server.camera(depth=2)
    seen = []
    for value in range(1, 31):
        pixels = Pixels(bytes([value]) * 192)
        seen.append(weakref.ref(pixels))
        camera.send(tools.frame(value, data=pixels))
        del pixels
        if value % 3 == 0:
            camera.wait(1)
    camera.finish()
    assert tools.wait_until(lambda: not [ref for ref in seen if ref() is not None])


def test_the_latest_stream_ids_are_remembered_up_to_the_limit(served):
    first = served.streams.open(StreamRequest("sum", stream_id="first"))
    for number in range(MAX_REMEMBERED + 50):
        served.streams.open(StreamRequest("sum", stream_id=f"camera {number}")).end()
    assert len(served.streams._tallies) == MAX_REMEMBERED
    assert "first" in served.streams._tallies, "it is open"
    first.end()
