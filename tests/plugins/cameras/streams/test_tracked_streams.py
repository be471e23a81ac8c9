"""Track ids of objects in frame streams. The frames hold the detections: the model returns its input."""

from __future__ import annotations

import numpy as np

from edge_server.plugins.vision.tracking import ByteTracker
from edge_server.protocol.frame_messages import Frame, FrameHeader

ROWS = 64
"""Height of a frame, and most detections in it: each row of six pixels is one of them."""

CONFIG = f"""
    backend: "stub"
    max_batch_size: 0
    input {{ name: "IN" data_type: TYPE_FP32 dims: [1, {ROWS}, 6] }}
    output {{ name: "OUT" data_type: TYPE_FP32 dims: [1, {ROWS}, 6] }}
    parameters {{ key: "stub_op" value {{ string_value: "identity" }} }}
    parameters {{ key: "image_color" value {{ string_value: "depth" }} }}
    parameters {{ key: "detection_head" value {{ string_value: "yolov10" }} }}
    parameters {{ key: "track" value {{ string_value: "bytetrack" }} }}
"""


def frame(seq: int, *tops: float, at_s: float | None = None) -> Frame:
    """Return a frame with a detection, 6 wide and 10 high, at each of `tops`."""
    pixels = np.zeros((ROWS, 6), np.float32)
    for row, top in enumerate(tops):
        pixels[row] = (0, top, 6, top + 10, 0.9 - 0.01 * row, 0)
    nanosec = 0 if at_s is None else round(at_s * 1e9)
    header = FrameHeader(nanosec // 10**9, nanosec % 10**9, "camera", seq)
    return Frame(header, ROWS, 6, "32FC1", data=pixels.tobytes())


def ids(results) -> list[list[int]]:
    assert [result.error for result in results] == [""] * len(results)
    return [[found.track_id for found in result.detections] for result in results]


def test_moving_objects_keep_their_track_ids(stream_server) -> None:
    stream_server.serve("finder", CONFIG)
    camera = stream_server.camera("finder", depth=64)
    # The first is the best detection at first, and the second-best in the end.
    camera.send(*(frame(seq, 2 + seq, 40 - seq, at_s=seq / 30) for seq in range(5)))
    camera.send(*(frame(seq, 40 - seq, 2 + seq, at_s=seq / 30) for seq in range(5, 10)))
    assert ids(camera.finish()) == [[0, 0]] + [[1, 2]] * 4 + [[2, 1]] * 5


def test_each_stream_has_its_own_track_ids_which_are_not_reused_after_a_reconnect(stream_server) -> None:
    stream_server.serve("finder", CONFIG)
    for expected in (1, 2):
        camera, other = (
            stream_server.camera("finder", depth=64, stream_id="north"),
            stream_server.camera("finder", depth=64),
        )
        for each in (camera, other):
            each.send(*(frame(seq, 20, at_s=seq / 30) for seq in range(3)))
        assert ids(camera.finish()) == [[0], [expected], [expected]]
        assert ids(other.finish()) == [[0], [1], [1]]


def test_the_time_between_frames_follows_their_timestamps(stream_server) -> None:
    stream_server.serve("finder", CONFIG)
    for gap, expected in ((0.2, [1]), (1 / 30, [0])):
        camera = stream_server.camera("finder", depth=64)
        camera.send(*(frame(seq, 2 * seq, at_s=seq / 30) for seq in range(10)))
        # Six frames are missing. Without the gap in the stamps the object would be too far away.
        camera.send(frame(16, 18 + 60 * gap + (0 if expected == [1] else 10), at_s=9 / 30 + gap))
        assert ids(camera.finish())[-1] == expected


def test_frames_without_timestamps_are_tracked_by_arrival_time(stream_server) -> None:
    stream_server.serve("finder", CONFIG)
    camera = stream_server.camera("finder", depth=64)
    camera.send(*(frame(seq, 20) for seq in range(3)))
    assert ids(camera.finish()) == [[0], [1], [1]]


def test_several_instances_track_the_frames_of_a_stream_in_order(stream_server, monkeypatch) -> None:
    tops, update = [], ByteTracker.update

    def record_numbers(self: ByteTracker, boxes, scores, step_s: float) -> list[int]:
        tops.append(round(float(boxes[0, 1]), 1))
        return update(self, boxes, scores, step_s)

    monkeypatch.setattr(ByteTracker, "update", record_numbers)
    more = 'instance_group { count: 3 kind: KIND_CPU } parameters { key: "stub_delay_ms" value { string_value: "1" } }'
    stream_server.serve("finder", CONFIG + more)
    camera = stream_server.camera("finder", depth=64)
    camera.send(*(frame(seq, 0.5 * seq, at_s=seq / 30) for seq in range(60)))
    assert ids(camera.finish()) == [[0]] + [[1]] * 59
    assert tops == [0.5 * seq for seq in range(60)]


def test_an_empty_frame_or_an_error_ends_no_track(stream_server) -> None:
    stream_server.serve("finder", CONFIG)
    camera = stream_server.camera("finder", depth=64)
    camera.send(*(frame(seq, 20, at_s=seq / 30) for seq in range(3)))
    camera.send(frame(3, at_s=3 / 30), Frame(FrameHeader(seq=4), 5, 5, "no such encoding", data=b"x"))
    camera.send(frame(5, 20, at_s=5 / 30))
    results = camera.finish()
    assert results[4].error_code == "INVALID_ARG"
    assert ids(results[:4] + results[5:]) == [[0], [1], [1], [], [1]]
