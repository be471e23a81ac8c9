"""Geometry against independent formulas, pixels against independent resizers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edge_server.errors import InvalidRequest
from edge_server.plugins.vision.resize import (
    Color,
    FitMode,
    FitRule,
    Interpolation,
    ResizedPicture,
    channel_order,
    make_fitted_picture,
    place,
    resized,
)

sides = st.integers(1, 5000)
inputs = st.integers(1, 700)
modes = st.sampled_from(FitMode)


def fitted(image: np.ndarray, rule: FitRule) -> np.ndarray:
    return resized(image, place(rule, image.shape[1], image.shape[0]), rule, "model 'm'")


def test_known_images_are_placed_at_known_positions() -> None:
    table = [
        (FitRule(FitMode.STRETCH, 320, 240), (1280, 720), ResizedPicture(320, 240, 0, 0)),
        (FitRule(FitMode.LETTERBOX, 640, 640), (1280, 720), ResizedPicture(640, 360, 0, 140)),
        (FitRule(FitMode.LETTERBOX, 640, 640), (720, 1280), ResizedPicture(360, 640, 140, 0)),
        (FitRule(FitMode.LETTERBOX, 640, 640), (640, 480), ResizedPicture(640, 480, 0, 80)),
        (FitRule(FitMode.LETTERBOX, 10, 10), (4000, 3), ResizedPicture(10, 1, 0, 4)),
        (FitRule(FitMode.CROP, 224, 224, 256), (600, 400), ResizedPicture(384, 256, -80, -16)),
        (FitRule(FitMode.CROP, 224, 224, 256), (640, 480), ResizedPicture(341, 256, -58, -16)),
        (FitRule(FitMode.CROP, 224, 224), (640, 480), ResizedPicture(299, 224, -38, 0)),
        (FitRule(FitMode.CROP, 200, 100), (100, 200), ResizedPicture(200, 400, 0, -150)),
        (FitRule(FitMode.CROP, 224, 224, 224), (224, 224), ResizedPicture(224, 224, 0, 0)),
        (
            FitRule(FitMode.CROP, 224, 224, cuts_first=True),
            (451, 300),
            ResizedPicture(224, 224, 0, 0, (75, 0, 300, 300)),
        ),
        (FitRule(FitMode.CROP, 200, 100, cuts_first=True), (99, 200), ResizedPicture(200, 100, 0, 0, (0, 75, 99, 49))),
        (FitRule(FitMode.CROP, 10, 10, cuts_first=True), (4000, 1), ResizedPicture(10, 10, 0, 0, (1999, 0, 1, 1))),
    ]
    assert [(rule, size, place(rule, *size)) for rule, size, _ in table] == table


def test_a_picture_that_is_cut_before_it_is_resized_keeps_its_coordinates() -> None:
    rule = FitRule(FitMode.CROP, 50, 50, interpolation=Interpolation.LINEAR, cuts_first=True)
    image = np.tile(np.arange(240, dtype=np.uint8), (100, 1))
    placement = place(rule, 240, 100)
    visible = resized(image, placement, rule, "model 'm'")
    np.testing.assert_allclose(visible[0].astype(int), np.arange(50) * 2 + 70.5, atol=0.5)
    fit = make_fitted_picture(placement, 240, 100)
    assert fit.to_original(0, 0) == (70, 0)
    assert fit.to_original(50, 50) == (170, 100)
    assert fit.to_input(120, 50) == (25, 25)


@given(sides, sides, st.integers(1, 700), st.integers(0, 100))
def test_resize_and_centre_crop_agree_with_the_formula_of_training_code(width, height, side, more) -> None:
    shorter = side + more
    long, short = max(width, height), min(width, height)
    longer = int(Fraction(shorter * long, short))
    new = (shorter, longer) if width <= height else (longer, shorter)
    found = place(FitRule(FitMode.CROP, side, side, shorter), width, height)
    assert (found.width, found.height) == new
    assert (-found.left, -found.top) == (round((new[0] - side) / 2.0), round((new[1] - side) / 2.0))


@given(sides, sides, inputs, inputs)
def test_a_letterboxed_image_touches_two_borders_keeps_its_aspect_ratio_and_is_centred(w, h, to_w, to_h) -> None:
    found = place(FitRule(FitMode.LETTERBOX, to_w, to_h), w, h)
    assert found.width == to_w or found.height == to_h
    assert 1 <= found.width <= to_w
    assert 1 <= found.height <= to_h
    scale = min(Fraction(to_w, w), Fraction(to_h, h))
    assert abs(found.width - w * scale) <= 1
    assert abs(found.height - h * scale) <= 1
    assert abs(found.left - (to_w - found.width - found.left)) <= 1
    assert abs(found.top - (to_h - found.height - found.top)) <= 1


@given(sides, sides, inputs, inputs)
def test_a_cropped_image_covers_the_input(w, h, to_w, to_h) -> None:
    found = place(FitRule(FitMode.CROP, to_w, to_h), w, h)
    assert found.left <= 0
    assert found.top <= 0
    assert found.left + found.width >= to_w
    assert found.top + found.height >= to_h
    assert found.width == to_w or found.height == to_h


@given(modes, sides, sides, inputs, inputs, st.floats(-1000, 6000), st.floats(-1000, 6000))
def test_coordinates_map_to_the_input_and_back(mode, w, h, to_w, to_h, x, y) -> None:
    fit = make_fitted_picture(place(FitRule(mode, to_w, to_h), w, h), w, h)
    back = fit.to_original(*fit.to_input(x, y))
    assert back == pytest.approx((x, y), abs=1e-6 * max(1, to_w, to_h) / min(fit.scale_x, fit.scale_y, 1))


@given(modes, sides, sides, inputs, inputs)
def test_image_corners_map_to_the_corners_of_the_placed_image(mode, w, h, to_w, to_h) -> None:
    placement = place(FitRule(mode, to_w, to_h), w, h)
    fit = make_fitted_picture(placement, w, h)
    assert fit.to_original(placement.left, placement.top) == pytest.approx((0, 0), abs=1e-9)
    corner = fit.to_original(placement.left + placement.width, placement.top + placement.height)
    assert corner == pytest.approx((w, h))


@pytest.mark.sample
@pytest.mark.parametrize("interpolation", Interpolation)
@pytest.mark.parametrize("mode", FitMode)
@pytest.mark.parametrize("size", [(480, 640), (300, 200), (96, 96), (40, 64)])
def test_a_marker_in_the_input_maps_back_to_its_position(mode, interpolation, size) -> None:
    image = np.zeros((*size, 3), np.uint8)
    height, width = size
    top, bottom, left, right = int(height * 0.4), int(height * 0.6), int(width * 0.45), int(width * 0.7)
    image[top:bottom, left:right] = 255
    rule = FitRule(mode, 160, 128, interpolation=interpolation)
    placement = place(rule, width, height)
    picture = resized(image, placement, rule, "m")[:, :, 0].astype(float)
    rows, columns = np.mgrid[0 : picture.shape[0], 0 : picture.shape[1]] + 0.5
    x = (columns * picture).sum() / picture.sum() + max(0, placement.left)
    y = (rows * picture).sum() / picture.sum() + max(0, placement.top)
    fit = make_fitted_picture(placement, width, height)
    # Edges of the mark fall between pixels: half a pixel of the coarser of the two grids.
    tolerance = max(0.5, 0.5 / min(fit.scale_x, fit.scale_y))
    assert fit.to_original(x, y) == pytest.approx(((left + right) / 2, (top + bottom) / 2), abs=tolerance)


def test_nearest_agrees_with_another_resizer(noise) -> None:
    image = noise(57, 91)
    rule = FitRule(FitMode.STRETCH, 40, 30, interpolation=Interpolation.NEAREST)
    expected = np.asarray(Image.fromarray(image).resize((40, 30), Image.Resampling.NEAREST))
    np.testing.assert_array_equal(fitted(image, rule), expected)


@pytest.mark.full
@pytest.mark.parametrize("size", [(30, 40), (114, 182), (57, 10)])
def test_linear_agrees_with_another_resizer(noise, size) -> None:
    image = noise(57, 91)
    rule = FitRule(FitMode.STRETCH, size[1], size[0], interpolation=Interpolation.LINEAR)
    expected = pytest.importorskip("skimage.transform").resize(
        image, size, order=1, mode="edge", anti_aliasing=False, preserve_range=True
    )
    assert np.abs(fitted(image, rule) - expected).max() <= 2


PILLOW = {
    Interpolation.LINEAR_ANTIALIAS: Image.Resampling.BILINEAR,
    Interpolation.CUBIC_ANTIALIAS: Image.Resampling.BICUBIC,
}


@pytest.mark.parametrize("interpolation", PILLOW)
@pytest.mark.parametrize("mode", FitMode)
@pytest.mark.parametrize("size", [(480, 640), (480, 361), (120, 90), (1, 70), (300, 224), (160, 300), (1500, 1100)])
def test_antialiased_pixels_are_those_of_pillow(noise, mode, interpolation, size) -> None:
    image = noise(*size)
    image[: size[0] // 2, ::2] = 255 * (np.arange(size[0] // 2) % 3 == 0)[:, None, None]
    rule = FitRule(mode, 224, 160, interpolation=interpolation)
    placement = place(rule, size[1], size[0])
    # In two steps: from version 13 on, Pillow begins with the columns of some pictures, which torchvision never does.
    narrow = Image.fromarray(image).resize((placement.width, size[0]), PILLOW[interpolation])
    expected = np.asarray(narrow.resize((placement.width, placement.height), PILLOW[interpolation]))
    left, top = max(0, -placement.left), max(0, -placement.top)
    expected = expected[top : top + 160, left : left + 224].astype(int)
    assert np.abs(fitted(image, rule) - expected).max() <= 1
    assert np.abs(fitted(image[:, :, 1], rule) - expected[:, :, 1]).max() <= 1


@pytest.mark.parametrize("interpolation", PILLOW)
def test_antialiased_depth_keeps_its_type_and_its_range(interpolation) -> None:
    for dtype in (np.uint16, np.int16, np.float32, np.float64):
        step = np.zeros((40, 60), dtype)
        step[:, 30:] = 32767
        found = fitted(step, FitRule(FitMode.STRETCH, 21, 11, interpolation=interpolation))
        assert found.dtype == dtype
        assert (found[:, 0], found[:, -1]) == (pytest.approx(0, abs=1), pytest.approx(32767, abs=1))


@given(sides, sides, st.integers(1, 700), st.integers(0, 100))
def test_a_cut_of_transformers_rounds_half_a_pixel_down(width, height, side, more) -> None:
    even, down = (
        place(FitRule(FitMode.CROP, side, side, side + more, cuts_down=cuts), width, height) for cuts in (False, True)
    )
    assert (even.width, even.height) == (down.width, down.height)
    # transformers' image_transforms.center_crop
    assert (-down.left, -down.top) == ((down.width - side) // 2, (down.height - side) // 2)


def test_enlarging_by_area_is_linear(noise) -> None:
    pictures = [
        fitted(noise(20, 30), FitRule(FitMode.STRETCH, 60, 50, interpolation=way))
        for way in (Interpolation.AREA, Interpolation.LINEAR, Interpolation.AUTO)
    ]
    np.testing.assert_array_equal(pictures[0], pictures[1])
    np.testing.assert_array_equal(pictures[0], pictures[2])


@pytest.mark.sample
@pytest.mark.parametrize("interpolation", [Interpolation.AREA, Interpolation.AUTO])
@pytest.mark.parametrize("factor", [2, 4, 8])
def test_shrinking_by_a_power_of_two_is_the_mean_of_blocks(noise, interpolation, factor) -> None:
    image = noise(8 * factor, 12 * factor)
    found = fitted(image, FitRule(FitMode.STRETCH, 12, 8, interpolation=interpolation))
    means = image.reshape(8, factor, 12, factor, 3).mean(axis=(1, 3))
    # Each halving rounds once, by half a step at most.
    assert np.abs(found - means).max() <= 0.5 * np.log2(factor) + 0.5


def test_the_default_reduction_skips_no_pixel(noise) -> None:
    """A pattern of single dark columns would vanish or blacken everything if pixels were skipped."""
    image = np.full((720, 1280, 3), 255, np.uint8)
    image[:, ::8] = 0
    found = fitted(image, FitRule(FitMode.LETTERBOX, 160, 160))
    assert np.abs(found.astype(float) - 255 * 7 / 8).max() < 8


def test_a_crop_takes_the_middle_pixels(noise) -> None:
    image = noise(100, 140)
    np.testing.assert_array_equal(fitted(image, FitRule(FitMode.CROP, 60, 50, 100)), image[25:75, 40:100])


def test_equal_sizes_are_passed_on_without_a_copy(noise) -> None:
    image = noise(50, 60)
    assert np.shares_memory(fitted(image, FitRule(FitMode.STRETCH, 60, 50)), image)
    assert np.shares_memory(fitted(image, FitRule(FitMode.CROP, 30, 30, 50)), image)


def test_rows_with_padding_bytes_are_read_correctly(noise) -> None:
    padded = noise(50, 70)
    view = padded[:, :60]
    rule = FitRule(FitMode.STRETCH, 33, 21)
    np.testing.assert_array_equal(fitted(view, rule), fitted(view.copy(), rule))


@pytest.mark.parametrize("size", [(1, 60000), (60000, 1)])
def test_a_strip_that_would_exceed_the_size_limit_is_refused(size) -> None:
    strip = np.zeros((*size, 3), np.uint8)
    with pytest.raises(InvalidRequest, match=r"cut to 1024x1024, given .*60000"):
        fitted(strip, FitRule(FitMode.CROP, 1024, 1024))


@pytest.mark.sample
@pytest.mark.parametrize("mode", [FitMode.STRETCH, FitMode.LETTERBOX])
@pytest.mark.parametrize("interpolation", Interpolation)
@pytest.mark.parametrize("size", [(1, 60000), (60000, 1), (1, 1)])
def test_a_strip_or_a_dot_is_accepted_without_cropping(mode, size, interpolation) -> None:
    strip = np.full((*size, 3), 77, np.uint8)
    found = fitted(strip, FitRule(mode, 64, 64, interpolation=interpolation))
    assert (found == 77).all()
    assert max(found.shape) == 64


@pytest.mark.sample
@pytest.mark.parametrize("interpolation", Interpolation)
@pytest.mark.parametrize("size", [(1, 270), (270, 1)])
def test_a_very_long_strip_is_cropped_correctly(size, interpolation) -> None:
    strip = np.full((*size, 3), 77, np.uint8)
    found = fitted(strip, FitRule(FitMode.CROP, 224, 224, interpolation=interpolation))
    assert found.shape == (224, 224, 3)
    assert (found == 77).all()


def test_channels_are_taken_in_the_right_order() -> None:
    table = [
        (Color.BGR, Color.RGB, (2, 1, 0)),
        (Color.RGB, Color.BGR, (2, 1, 0)),
        (Color.RGB, Color.RGB, (0, 1, 2)),
        (Color.BGR, Color.BGR, (0, 1, 2)),
        (Color.GRAY, Color.RGB, (0, 0, 0)),
        (Color.GRAY, Color.GRAY, (0,)),
    ]
    assert [(given, wanted, channel_order(given, wanted)) for given, wanted, _ in table] == table
