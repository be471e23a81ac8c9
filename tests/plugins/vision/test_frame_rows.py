"""Frames written into preallocated rows: values, untouched memory, refused frames."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from PIL import Image

from edge_server.core.tensor import DType
from edge_server.errors import BadModelConfig, ErrorCode, InvalidRequest, Unsupported
from edge_server.plugins.vision.image_plan import IMAGE_TYPES, ImagePlan, make_image_plan
from edge_server.plugins.vision.picture import Picture
from edge_server.plugins.vision.pixel_values import DepthValues
from edge_server.plugins.vision.raw_encodings import ENCODINGS
from edge_server.plugins.vision.resize import Color
from edge_server.protocol.frame_messages import Frame, FrameHeader, RegionSlice

NORMALISED = {"image_scale": "1/255", "image_mean": "0.485,0.456,0.406", "image_stddev": "0.229,0.224,0.225"}
UNCHANGED: dict[str, str] = {"image_scale": "1"}


def read(plan: ImagePlan, frame: Frame, **options: bool) -> Picture:
    return plan.read_frame(frame, memoryview(frame.data), model="net", **options)


def file_frame(form: str, data: bytes) -> Frame:
    return Frame(FrameHeader(), format=form, data=data)


VALUES = [
    *((dtype, UNCHANGED) for dtype in IMAGE_TYPES if dtype is not DType.INT8),
    *((dtype, {**NORMALISED, "image_stddev": "0.01,0.02,0.03"}) for dtype in IMAGE_TYPES if "UINT" not in dtype.value),
]
"""Types, and parameters whose values each holds."""


@pytest.mark.sample
@pytest.mark.parametrize("color", ["rgb", "bgr"])
@pytest.mark.parametrize("given", [Color.RGB, Color.BGR, Color.GRAY])
@pytest.mark.parametrize("layout", ["FORMAT_NCHW", "FORMAT_NHWC"])
@pytest.mark.parametrize(("dtype", "declared"), VALUES)
def test_every_written_bit_equals_the_lookup_table(make_plan, noise, dtype, declared, layout, given, color) -> None:
    dims = (3, 20, 30) if layout == "FORMAT_NCHW" else (20, 30, 3)
    parameters = {"image_fit": "letterbox", "image_pad_value": "3,4,5", "image_color": color, **declared}
    plan = make_plan(parameters, dims=dims, dtype=dtype, layout=layout)
    pixels = noise(20, 18)
    batch = np.full((3, *plan.item_shape), 77, dtype.numpy)
    plan.write(Picture(pixels[:, :, 0] if given is Color.GRAY else pixels, given), batch[1], model="net")

    table = plan.values.table
    order = (0, 0, 0) if given is Color.GRAY else (0, 1, 2) if given.value == color else (2, 1, 0)
    expected = np.empty((3, 20, 30), dtype.numpy)
    for channel, source in enumerate(order):
        expected[channel] = table[channel, channel + 3]
        expected[channel, :, 6:24] = table[channel][pixels[:, :, source]]
    row = batch[1] if layout == "FORMAT_NCHW" else batch[1].transpose(2, 0, 1)
    assert row.tobytes() == expected.tobytes()
    assert (batch[[0, 2]] == 77).all()


@pytest.mark.sample
@pytest.mark.parametrize("size", [(20, 30), (10, 30), (20, 10), (40, 60), (3, 500), (500, 3)])
@pytest.mark.parametrize("layout", ["FORMAT_NCHW", "FORMAT_NHWC"])
@pytest.mark.parametrize("fit", ["stretch", "letterbox", "crop"])
def test_a_row_is_overwritten_completely(make_plan, noise, fit, layout, size) -> None:
    dims = (3, 20, 30) if layout == "FORMAT_NCHW" else (20, 30, 3)
    plan = make_plan({"image_fit": fit}, dims=dims, layout=layout)
    picture = Picture(noise(*size), Color.RGB)
    dirty, clean = np.full(plan.item_shape, np.nan, np.float32), np.zeros(plan.item_shape, np.float32)
    assert plan.write(picture, dirty, model="net") == plan.write(picture, clean, model="net")
    np.testing.assert_array_equal(dirty, clean)


@pytest.mark.parametrize("max_batch_size", [0, 4])
def test_tensor_and_write_give_equal_values(make_plan, encode, noise, max_batch_size) -> None:
    plan = make_plan({"image_fit": "letterbox", **NORMALISED}, max_batch_size=max_batch_size)
    assert plan.item_shape == (3, 224, 224)
    row = np.empty(plan.item_shape, np.float32)
    fit = plan.write(Picture(noise(300, 500), Color.RGB), row, model="net")
    tensor, same_fit = plan.fit(noise(300, 500), Color.RGB, model="net")
    np.testing.assert_array_equal(tensor.array.reshape(row.shape), row)
    np.testing.assert_array_equal(plan.tensor(encode(noise(300, 500), "PNG"), model="net").array, tensor.array)
    assert fit == same_fit


def test_a_row_of_another_shape_type_or_order_is_a_programming_error(make_plan, noise) -> None:
    plan = make_plan({"image_fit": "stretch"})
    rows = [
        np.empty((1, 3, 224, 224), np.float32),
        np.empty((3, 224, 224), np.float64),
        np.empty((224, 224, 3), np.float32).transpose(2, 0, 1),
    ]
    for row in rows:
        with pytest.raises(ValueError, match=r"expected an item of \(3, 224, 224\) float32, given"):
            plan.write(Picture(noise(4, 4), Color.RGB), row, model="net")


def test_rows_of_one_batch_are_written_by_many_threads_at_once(make_plan, noise) -> None:
    plan = make_plan({"image_fit": "letterbox", **NORMALISED}, dims=(3, 96, 96))
    pictures = [Picture(noise(50 + 9 * n, 120 - 7 * n), Color.BGR) for n in range(8)]
    expected = np.empty((8, *plan.item_shape), np.float32)
    for picture, row in zip(pictures, expected, strict=True):
        plan.write(picture, row, model="net")
    start = threading.Barrier(8)

    def write(n: int, batch: np.ndarray) -> None:
        start.wait(10)
        plan.write(pictures[n], batch[n], model="net")

    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            batch = np.full_like(expected, np.nan)
            list(pool.map(write, range(8), [batch] * 8))
            np.testing.assert_array_equal(batch, expected)


# Depth.

DEPTH = {"image_color": "depth", "image_scale": "0.001", "image_mean": "2", "image_stddev": "0.5"}


def depth_frame(values: np.ndarray, encoding: str) -> Frame:
    return Frame(FrameHeader(), *values.shape, encoding, data=values.tobytes())


def written(plan: ImagePlan, frame: Frame) -> np.ndarray:
    row = np.empty(plan.item_shape, plan.dtype.numpy)
    plan.write(read(plan, frame), row, model="net")
    return row


@pytest.mark.sample
@pytest.mark.parametrize("dims", [(1, 4, 5), (4, 5, 1), (4, 5)])
@pytest.mark.parametrize(
    ("encoding", "dtype"), [("16UC1", "<u2"), ("16SC1", "<i2"), ("32FC1", "<f4"), ("64FC1", "<f8")]
)
def test_depth_values_are_not_reduced_to_eight_bits(make_plan, encoding, dtype, dims) -> None:
    values = np.arange(20).reshape(4, 5).astype(dtype) * 311
    plan = make_plan(DEPTH, dims=dims)
    assert plan.color is Color.DEPTH
    found = written(plan, depth_frame(values, encoding)).reshape(4, 5)
    np.testing.assert_allclose(found, (values * 0.001 - 2) / 0.5, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "scale", "expected"),
    [
        (DType.UINT16, "1", [0, 1000, 40000, 65535]),
        (DType.UINT8, "255/10000", [0, 26, 255, 255]),
        (DType.INT16, "1", [0, 1000, 32767, 32767]),
        (DType.INT32, "1", [0, 1000, 40000, 65535]),
        (DType.FP16, "2", [0, 2000, 65504, 65504]),
        (DType.BF16, "1", [0, 1000, 40000, 65535]),
    ],
)
def test_every_input_type_takes_depth_within_its_range(make_plan, dtype, scale, expected) -> None:
    plan = make_plan({"image_color": "depth", "image_scale": scale}, dims=(1, 2, 2), dtype=dtype)
    found = written(plan, depth_frame(np.array([[0, 1000], [40000, 65535]], np.uint16), "16UC1")).ravel()
    if dtype is DType.BF16:
        expected = np.array(expected, np.float32).astype(ml_dtypes.bfloat16)
        found = found.view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found, np.array(expected, found.dtype))


@pytest.mark.parametrize("given", ["<u2", "<i2", "<f4", "<f8"])
def test_depth_is_the_same_to_the_bit_in_a_part_of_a_tensor_and_in_a_new_one(given) -> None:
    numbers = np.random.default_rng(1).normal(0, 1e4, (7, 9)).astype(given)
    if numbers.dtype.kind == "f":
        numbers[0, :3] = np.nan, np.inf, 1e38
    values = DepthValues(DType.FP32, scale=1e3, mean=0.3, stddev=0.7)
    tensor = np.full((9, 12), 5, np.float32)
    values.write(numbers, tensor[1:8, 2:11])
    with np.errstate(over="ignore"):
        expected = np.where(np.isfinite(numbers), numbers, 0).astype(np.float32) * np.float32(1e3 / 0.7)
    expected = np.clip(expected - np.float32(0.3 / 0.7), -np.finfo(np.float32).max, np.finfo(np.float32).max)
    assert (tensor[1:8, 2:11].view(np.uint32) == expected.view(np.uint32)).all()
    tensor[1:8, 2:11] = 5
    assert (tensor == 5).all()


@pytest.mark.parametrize("interpolation", ["auto", "nearest", "linear", "area", "cubic"])
def test_missing_depth_is_zero_and_does_not_affect_its_neighbours(make_plan, interpolation) -> None:
    values = np.full((8, 8), 3, np.float32)
    values[1, 1], values[4, 5], values[7, 7] = np.nan, np.inf, -np.inf
    holes = values.copy()
    holes[~np.isfinite(holes)] = 0
    plan = make_plan({"image_color": "depth", "image_interpolation": interpolation}, dims=(1, 4, 4))
    found = written(plan, depth_frame(values, "32FC1"))
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, written(plan, depth_frame(holes, "32FC1")))
    if interpolation in ("auto", "nearest"):
        assert set(found.ravel()) <= {0.0, 3.0}


def test_values_above_the_input_type_are_clamped(make_plan) -> None:
    plan = make_plan({"image_color": "depth", "image_scale": "1000"}, dims=(1, 2, 2))
    found = written(plan, depth_frame(np.array([[1e300, -1e300], [1, 0]]), "64FC1"))
    largest = np.finfo(np.float32).max
    np.testing.assert_array_equal(found.ravel(), np.array([largest, -largest, 1000, 0], np.float32))


@pytest.mark.parametrize(("unit", "factor"), [("m", 1), ("mm", 1000)])
def test_millimetres_and_metres_are_converted_to_the_declared_unit(make_plan, unit, factor) -> None:
    plan = make_plan({"image_color": "depth", "image_depth_unit": unit}, dims=(1, 2, 2))
    metres = np.array([[0.5, 1.0], [2.25, 4.0]], np.float32)
    millimetres = (metres * 1000).astype(np.uint16)
    for frame in (depth_frame(metres, "32FC1"), depth_frame(millimetres, "16UC1")):
        np.testing.assert_allclose(written(plan, frame)[0], metres * factor, rtol=1e-6)


def test_depth_in_a_16_bit_png_equals_the_raw_frame(make_plan, encode) -> None:
    values = (np.arange(48).reshape(6, 8) * 999).astype(np.uint16)
    plan = make_plan(DEPTH, dims=(1, 6, 8))
    png = encode(Image.fromarray(values), "PNG")
    expected = written(plan, depth_frame(values, "16UC1"))
    np.testing.assert_array_equal(written(plan, file_frame("16UC1; png compressed", png)), expected)
    np.testing.assert_array_equal(plan.tensor(png, model="net").array[0], expected)


def test_borders_of_depth_are_computed_like_depth(make_plan) -> None:
    parameters = {**DEPTH, "image_fit": "letterbox", "image_pad_value": "250"}
    found = written(make_plan(parameters, dims=(1, 4, 4)), depth_frame(np.full((2, 4), 3000, np.uint16), "16UC1"))
    np.testing.assert_allclose(found[0, [0, 3]], (250 * 0.001 - 2) / 0.5, rtol=1e-6)
    np.testing.assert_allclose(found[0, 1:3], 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("parameters", "dims", "encoding", "size", "message"),
    [
        ({"image_fit": "stretch"}, (3, 8, 8), "16UC1", 128, r"expected colour or gray, given depth \(uint16 .* mono16"),
        ({"image_fit": "stretch"}, (1, 8, 8), "32FC1", 256, "declares image_color depth"),
        ({"image_color": "depth"}, (1, 8, 8), "rgb8", 192, r"expected depth \(16UC1, 32FC1, mono16\), given colour"),
        ({"image_color": "depth"}, (1, 8, 8), "bayer_rggb8", 64, "given colour"),
    ],
)
def test_depth_and_colour_are_not_confused(make_plan, parameters, dims, encoding, size, message) -> None:
    plan = make_plan(parameters, dims=dims)
    with pytest.raises(InvalidRequest, match=f"model 'net', image for input 'pixels': .*{message}"):
        read(plan, Frame(FrameHeader(), 8, 8, encoding, data=bytes(size)))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"image_color": "depth", "image_depth_unit": "cm"}, "'image_depth_unit': expected one of m, mm, given 'cm'"),
        ({"image_color": "gray", "image_depth_unit": "m"}, "image_depth_unit only together with image_color depth"),
        ({"image_color": "depth", "image_scale": "1e38", "image_stddev": "1e-9"}, "that FP32 holds"),
        ({"image_fit": "crop", "image_decode": "quick"}, "'image_decode': expected one of exact, fast, given 'quick'"),
    ],
)
def test_an_invalid_declaration_of_depth_or_decoding_is_refused(make_spec, parameters, message) -> None:
    with pytest.raises(BadModelConfig, match=message):
        make_image_plan(make_spec(parameters, dims=(1, 8, 8)))


def test_depth_for_three_channels_is_refused(make_spec) -> None:
    with pytest.raises(BadModelConfig, match="expected image_color rgb or bgr for 3 channels, given depth"):
        make_image_plan(make_spec({"image_color": "depth"}))


# Files.


@pytest.mark.parametrize(
    "form",
    [
        "jpeg", "JPG", "bgr8; jpeg compressed bgr8",
        "rgb8; jpeg compressed bgr8", "jpeg ", "image/jpeg", "mjpeg", "png",
        "bgr8;", " ", "",
    ],
)  # fmt: skip
def test_a_jpeg_is_read_by_its_bytes_whatever_the_format_calls_it(make_plan, encode, noise, form) -> None:
    picture = read(make_plan({"image_fit": "stretch"}), file_frame(form, encode(noise(20, 30), "JPEG")))
    assert (picture.width, picture.height, picture.color) == (30, 20, Color.BGR)


@pytest.mark.parametrize(
    ("form", "error", "message"),
    [
        (
            "16UC1; compressedDepth png",
            Unsupported,
            "compressedDepth is not offered, given '16UC1; compressedDepth png'",
        ),
        ("x" * 100_000 + ";compressedDepth", Unsupported, "given 'x{60}';"),
        (
            "16UC1; png compressed",
            InvalidRequest,
            "format '16UC1; png compressed': expected a picture in colour or gray",
        ),
        ("16UC1", InvalidRequest, "expected a picture in colour or gray, given depth"),
        ("bayer_xyzw8; png compressed", InvalidRequest, "did you mean 'bayer_"),
    ],
)
def test_other_formats_are_refused_with_a_message(make_plan, encode, noise, form, error, message) -> None:
    with pytest.raises(error, match=message) as caught:
        read(make_plan({"image_fit": "stretch"}), file_frame(form, encode(noise(8, 8)[:, :, 0], "PNG")))
    assert caught.value.code in (ErrorCode.INVALID_ARG, ErrorCode.UNSUPPORTED)


def test_a_frame_of_video_is_refused_with_its_format_and_its_bytes(make_plan) -> None:
    plan = make_plan({"image_fit": "stretch"})
    expected = "format 'h264': expected a JPEG, PNG, BMP or WebP image, given 6 bytes beginning with 0x000000016742"
    with pytest.raises(InvalidRequest, match=expected):
        read(plan, file_frame("h264", b"\x00\x00\x00\x01\x67\x42"))
    with pytest.raises(InvalidRequest, match=r"format 'x{60}': expected a JPEG, .* given no bytes"):
        read(plan, file_frame("x" * 100_000, b""))


@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if name.startswith("bayer_")])
@pytest.mark.parametrize("color", ["rgb", "gray"])
def test_a_mosaic_in_a_png_gives_the_pixels_of_the_raw_frame(make_plan, expose, encode, noise, encoding, color) -> None:
    plan = make_plan({"image_fit": "stretch", "image_color": color}, dims=(1 if color == "gray" else 3, 20, 30))
    raw = expose(noise(20, 30), encoding)
    mosaic = np.frombuffer(raw.data, np.uint16 if encoding.endswith("16") else np.uint8).reshape(20, 30)
    file = file_frame(f"{encoding}; png compressed ", encode(mosaic, "PNG"))
    np.testing.assert_array_equal(written(plan, file), written(plan, raw))
    np.testing.assert_array_equal(read(plan, file, is_drawn=True).bgr(), read(plan, raw, is_drawn=True).bgr())


def test_a_mosaic_in_a_jpeg_is_decoded_in_full_size_and_a_jpeg_in_colour_as_it_is(make_plan, expose, encode) -> None:
    plan = make_plan({"image_fit": "stretch", "image_decode": "fast"}, dims=(3, 20, 30))
    color = np.full((160, 240, 3), (200, 60, 20), np.uint8)
    mosaic = np.frombuffer(expose(color, "bayer_grbg8").data, np.uint8).reshape(160, 240)
    for pixels in (mosaic, color):
        frame = file_frame("bayer_grbg16; jpeg compressed ", encode(pixels, "JPEG", quality=100, subsampling=0))
        found = written(plan, frame).mean(axis=(1, 2))
        np.testing.assert_allclose(found, (200, 60, 20), atol=3)


def test_a_mosaic_is_no_depth(make_plan, encode, noise) -> None:
    plan = make_plan({"image_color": "depth"}, dims=(1, 20, 30))
    with pytest.raises(InvalidRequest, match=r"expected depth .* given colour"):
        read(plan, file_frame("bayer_rggb8; png compressed ", encode(noise(20, 30)[:, :, 0], "PNG")))


def test_a_frame_is_either_raw_or_a_file(make_plan) -> None:
    plan = make_plan({"image_fit": "stretch"})
    with pytest.raises(InvalidRequest, match=r"either an encoding \(raw\) or a format \(a file\), given none"):
        read(plan, Frame(FrameHeader(), 2, 2))
    with pytest.raises(InvalidRequest, match=r"given both \('rgb8', 'jpeg'\)"):
        read(plan, Frame(FrameHeader(), 2, 2, "rgb8", format="jpeg"))


def test_a_frame_is_not_rotated_by_its_exif_orientation(make_plan, encode, noise) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = read(make_plan({"image_fit": "stretch"}), file_frame("jpeg", encode(noise(20, 30), "JPEG", exif=exif)))
    assert (picture.width, picture.height) == (30, 20)


def test_a_file_for_a_gray_network_is_decoded_in_colour_if_it_will_be_drawn(make_plan, encode, noise) -> None:
    plan = make_plan({"image_fit": "stretch"}, dims=(1, 8, 8))
    frame = file_frame("png", encode(noise(16, 16), "PNG"))
    assert read(plan, frame).color is Color.GRAY
    drawn = read(plan, frame, is_drawn=True)
    assert drawn.color is Color.BGR
    np.testing.assert_array_equal(drawn.bgr(), noise(16, 16)[:, :, ::-1])


def test_a_file_in_shared_memory_is_copied_before_decoding(make_plan, encode, noise) -> None:
    """Its header is checked first, and a client that shares the memory might change it after that."""
    plan, data = make_plan({"image_fit": "stretch"}), bytearray(encode(noise(8, 8), "PNG"))
    frame = Frame(FrameHeader(), format="png", region=RegionSlice("r", 0, len(data)), data=memoryview(data))
    picture = read(plan, frame)
    frame.data.release()
    np.testing.assert_array_equal(picture.bgr(), noise(8, 8)[:, :, ::-1])


@pytest.mark.sample
@pytest.mark.parametrize("size", [(480, 640), (481, 643), (242, 646), (720, 1280), (224, 300), (960, 40)])
@pytest.mark.parametrize("fit", ["stretch", "letterbox", "crop"])
def test_fast_decoding_keeps_positions_and_nearly_the_values(make_plan, encode, fit, size) -> None:
    y, x = np.mgrid[0 : size[0], 0 : size[1]]
    waves = np.dstack([128 + 90 * np.sin(x / 9 + c) * np.cos(y / 13 - c) for c in range(3)]).astype(np.uint8)
    frame = file_frame("jpeg", encode(waves, "JPEG", quality=92))
    rows, fits = [], []
    for decode in ("exact", "fast"):
        plan = make_plan({"image_fit": fit, "image_decode": decode}, dims=(3, 112, 112))
        rows.append(written(plan, frame))
        fits.append(plan.write(read(plan, frame), np.empty_like(rows[0]), model="net"))
    assert fits[0] == fits[1]
    assert (fits[0].width, fits[0].height) == (size[1], size[0])
    assert np.abs(rows[0] - rows[1]).mean() <= 1.5
    assert np.abs(rows[0] - rows[1]).max() <= 24


@pytest.mark.parametrize("interpolation", ["nearest", "linear_antialias", "cubic_antialias"])
def test_fast_decoding_reduces_no_jpeg_whose_pixels_are_needed(make_plan, encode, noise, interpolation) -> None:
    parameters = {"image_fit": "crop", "image_interpolation": interpolation}
    frame = file_frame("jpeg", encode(noise(900, 1200), "JPEG"))
    exact, fast = (
        written(make_plan(parameters | {"image_decode": decode}, dims=(3, 100, 100)), frame)
        for decode in ("exact", "fast")
    )
    np.testing.assert_array_equal(exact, fast)


def test_fast_decoding_reduces_only_jpegs_larger_than_needed(make_plan, encode, noise) -> None:
    plan = make_plan({"image_fit": "letterbox", "image_decode": "fast"}, dims=(3, 100, 100))
    jpeg, png = (file_frame(form, encode(noise(304, 404), form)) for form in ("JPEG", "PNG"))
    assert read(plan, jpeg).pixels.shape == (76, 101, 3)
    assert read(plan, jpeg, is_drawn=True).pixels.shape == (304, 404, 3)
    assert read(plan, png).pixels.shape == (304, 404, 3)
    for size in ((150, 198), (301, 404)):
        other = file_frame("jpeg", encode(noise(*size), "JPEG"))
        assert read(plan, other).pixels.shape == (*size, 3)
    exact = make_plan({"image_fit": "letterbox"}, dims=(3, 100, 100))
    assert read(exact, jpeg).pixels.shape == (304, 404, 3)
