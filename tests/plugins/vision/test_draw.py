"""Annotated frames: what is drawn where, and that odd sizes and values work."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from PIL import Image

from edge_server.errors import InvalidRequest
from edge_server.plugins.vision.draw import annotated, annotated_jpeg
from edge_server.plugins.vision.perception_decoder import Overlay, Perception
from edge_server.protocol.frame_messages import ClassScore, DenseMap, Detection, Keypoint, Mask, ObjectMask, RotatedBox

GRAY = 90


def frame(width: int = 640, height: int = 480) -> np.ndarray:
    return np.full((height, width, 3), GRAY, np.uint8)


def changed(picture: np.ndarray) -> np.ndarray:
    return (picture != GRAY).any(axis=2)


def test_a_jpeg_of_the_frames_size_is_returned_and_the_frame_is_not_changed() -> None:
    picture = frame()
    picture.flags.writeable = False
    found = Perception(detections=(Detection(10, 50, 100, 90, 0.9, 0, "cat"),))
    read = Image.open(io.BytesIO(annotated_jpeg(picture, found)))
    assert (read.format, read.size) == ("JPEG", (640, 480))
    assert (picture == GRAY).all()


def test_quality_makes_the_file_larger() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (120, 160, 3), np.uint8)
    sizes = [len(annotated_jpeg(picture, Perception(), quality)) for quality in (1, 50, 85, 100)]
    assert sizes == sorted(set(sizes))
    assert len(annotated_jpeg(picture, Perception(), 0)) == sizes[2]


def test_without_detections_the_image_is_not_changed() -> None:
    assert not changed(annotated(frame(), Perception())).any()


@pytest.mark.parametrize(("width", "height", "line"), [(640, 480, 2), (1920, 1080, 5)])
def test_a_box_is_drawn_along_its_edges_and_scales_with_the_image(width: int, height: int, line: int) -> None:
    box = Detection(width * 0.25, height * 0.25, width * 0.75, height * 0.75, 0.5, 1)
    marks = changed(annotated(frame(width, height), Perception(detections=(box,))))
    middle = marks[height // 2]
    columns = np.flatnonzero(middle)
    assert columns.min() == pytest.approx(width * 0.25, abs=line)
    assert columns.max() == pytest.approx(width * 0.75 - 1, abs=line)
    assert 2 * line - 2 <= columns.size <= 2 * line + 4, "lines are about as wide as stated, their ends rounded off"
    assert not marks[int(height * 0.8) :].any()


def test_a_mask_of_an_object_tints_its_pixels_in_the_colour_of_the_box() -> None:
    left = np.zeros((80, 100), bool)
    left[:, :50] = True
    mask = ObjectMask(200, 200, 100, 80, np.packbits(left).tobytes())
    picture = annotated(frame(), Perception(detections=(Detection(200, 200, 300, 280, 0.5, 1, mask=mask),)))
    marks = changed(picture)
    assert marks[205:275, 205:250].all()
    assert not marks[205:275, 252:295].any()
    box, inside = picture[240, 200].astype(int) - GRAY, picture[240, 225].astype(int) - GRAY
    assert inside == pytest.approx(box * 0.45, abs=2)


def test_an_oriented_box_is_drawn_along_its_own_edges() -> None:
    rotated = RotatedBox(320, 240, 200, 100, math.pi / 6)
    corners = rotated.corners()
    columns, rows = zip(*corners, strict=True)
    box = Detection(min(columns), min(rows), max(columns), max(rows), 0.5, 1, rotated=rotated)
    marks = changed(annotated(frame(), Perception(detections=(box,))))
    for (x, y), (end_x, end_y) in zip(corners, (*corners[1:], corners[0]), strict=True):
        for part in (0.1, 0.35, 0.6, 0.85):
            assert marks[int(y + part * (end_y - y)), int(x + part * (end_x - x))]
    assert not marks[250:330, 200:215].any(), "the upright box is not drawn"
    left, top = min(corners, key=lambda corner: corner[1])
    assert marks[int(top) - 16 : int(top) - 3, int(left) : int(left) + 60].mean() > 0.9, "the label is at the top"


def test_the_label_is_above_the_box_or_inside_it_at_the_upper_edge() -> None:
    lower = changed(annotated(frame(), Perception(detections=(Detection(200, 200, 300, 300, 0.5, 1, "dog"),))))
    assert lower[180:198, 200:250].mean() > 0.9
    upper = changed(annotated(frame(), Perception(detections=(Detection(200, 0, 300, 300, 0.5, 1, "dog"),))))
    assert upper[2:16, 202:250].mean() > 0.9


def test_the_track_id_is_beside_the_label() -> None:
    plain, tracked = (
        changed(annotated(frame(), Perception(detections=(Detection(200, 200, 300, 300, 0.5, 1, "dog", (), track),))))
        for track in (0, 12)
    )
    assert tracked[180:198].any(axis=0).sum() > plain[180:198].any(axis=0).sum() + 20


def test_a_label_at_the_right_edge_is_moved_into_the_image() -> None:
    marks = changed(annotated(frame(), Perception(detections=(Detection(630, 200, 640, 300, 0.5, 1, "a long name"),))))
    assert marks[185:198, 540:640].mean() > 0.9


def test_keypoints_are_dots_and_omitted_outside_the_frame() -> None:
    points = (Keypoint(300.5, 240.5), Keypoint(-40, 10), Keypoint(1e30, 5))
    marks = changed(annotated(frame(), Perception(detections=(Detection(200, 150, 400, 400, 0.5, 0, "", points),))))
    rows, columns = np.nonzero(marks[160:390, 210:390])
    assert rows.mean() + 160 == pytest.approx(240, abs=0.5)
    assert columns.mean() + 210 == pytest.approx(300, abs=0.5)


@pytest.mark.parametrize(("encoding", "kind", "classes"), [("mono8", "u1", (1, 255)), ("mono16", "<u2", (1, 65535))])
def test_a_mask_tints_all_classes_but_0(encoding: str, kind: str, classes: tuple[int, int]) -> None:
    picture = np.zeros((480, 640), kind)
    picture[:, 200:400], picture[:, 400:] = classes
    mask = Mask(480, 640, encoding, memoryview(picture.tobytes()))
    drawn = annotated(frame(), Perception(mask=mask))
    assert not changed(drawn)[:, :200].any()
    assert changed(drawn)[:, 200:].all()
    assert drawn[5, 300].tolist() != drawn[5, 500].tolist()


def test_a_map_of_depth_is_drawn_in_colours_from_far_to_near_except_where_it_has_no_numbers() -> None:
    depth = np.tile(np.linspace(1, 9, 640, dtype=np.float32), (480, 1))
    depth[:100] = np.nan
    dense = DenseMap("metric_depth", 480, 640, "32FC1", depth.tobytes(), 1.0, 9.0)
    drawn = annotated(frame(), Perception(dense_map=dense)).astype(int)
    assert not changed(drawn)[:100].any()
    assert changed(drawn)[100:].all()
    (near_blue, _, near_red), (far_blue, _, far_red) = drawn[300, 60], drawn[300, 560]
    assert near_red > near_blue
    assert far_blue > far_red


def test_classes_are_listed_in_the_corner_with_score_bars() -> None:
    best = (ClassScore(1, 1.0, "espresso"), ClassScore(2, 0.0, "cup"))
    drawn = annotated(frame(), Perception(classes=best))
    marks = changed(drawn)
    assert marks[:40, :80].mean() > 0.98
    assert not marks[200:].any()
    assert drawn[8, 4].tolist() != drawn[35, 4].tolist()


def test_a_zone_is_outlined_and_filled_only_while_it_is_active() -> None:
    corners = ((0.25, 0.25), (0.75, 0.25), (0.75, 0.75), (0.25, 0.75))
    for is_active in (False, True):
        zone = Overlay("yard", corners, is_closed=True, is_active=is_active)
        marks = changed(annotated(frame(), Perception(overlays=(zone,))))
        assert marks[240, 158:163].any()
        assert marks[240, 478:483].any()
        assert marks[240, 200:440].any() == is_active
        assert not marks[:110].any()
        assert not marks[370:].any()


def test_the_arrow_of_a_line_points_to_its_right() -> None:
    level = ((0.1, 0.5), (0.9, 0.5))
    for points, below in ((level, True), (level[::-1], False)):
        marks = changed(annotated(frame(), Perception(overlays=(Overlay("gate", points, is_closed=False),))))
        assert marks[250:262, 318:323].any() == below
        assert marks[218:230, 318:323].any() != below


def test_the_name_of_a_line_does_not_cover_that_of_a_zone_at_the_same_height() -> None:
    corners = ((0.25, 0.25), (0.75, 0.25), (0.75, 0.75), (0.25, 0.75))
    zone, line = Overlay("yard", corners, is_closed=True), Overlay("gate", ((0.26, 0.25), (0.7, 0.7)), is_closed=False)
    name = np.s_[121:137, 161:200]
    alone = annotated(frame(), Perception(overlays=(zone,)))[name]
    both = annotated(frame(), Perception(overlays=(zone, line)))
    assert np.array_equal(both[name], alone)
    below = annotated(frame(), Perception(overlays=(line,)))
    assert np.array_equal(both[146:168, 167:200], below[121:143, 167:200])


EVERYTHING = (
    Detection(-1e6, -1e6, 1e6, 1e6, float("1e30"), 2**32 - 1, "ünïcode 顔" * 50, (Keypoint(0, 0),)),
    Detection(0, 0, 1e-3, 1e-3, 0.0, 0),
    Detection(0, 0, 1, 1, 0.5, 0, rotated=RotatedBox(1e30, -1e30, 1e30, 1e-30, 1.0)),
)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (2, 300), (300, 2), (17, 13), (160, 120), (5000, 3)])
def test_results_of_any_type_are_drawn_on_images_of_any_size(width: int, height: int) -> None:
    mask = Mask(height, width, "mono8", bytes(range(256)) * (width * height // 256) + bytes(width * height % 256))
    names = tuple(ClassScore(index, -5.0 + index, "x" * 300) for index in range(20))
    overlays = (Overlay("x" * 300, ((0, 0), (1, 1), (0, 1)), True, True), Overlay("", ((0, 0), (1e-3, 1e-3)), False))
    data = annotated_jpeg(frame(width, height), Perception(names, EVERYTHING, mask, overlays))
    assert Image.open(io.BytesIO(data)).size == (width, height)


def test_a_frame_too_long_for_jpeg_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at most 65500 pixels, given 65501x1"):
        annotated_jpeg(frame(65501, 1), Perception())


def test_a_strided_view_of_a_frame_is_drawn_too() -> None:
    whole = frame(1280, 960)
    found = Perception(detections=(Detection(10, 50, 100, 90, 0.9, 0, "cat"),))
    assert (annotated(whole[::2, ::-2], found) == annotated(frame(), found)).all()
