"""Conversion of a file's bytes to the tensor that a configuration declares."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from edge_server.core.model_spec import InputSpec, ModelSpec
from edge_server.core.tensor import DType
from edge_server.errors import BadModelConfig, InvalidRequest
from edge_server.plugins.vision.image_plan import IMAGE_TYPES, make_image_plan
from edge_server.plugins.vision.resize import Color

COLORS = {"rgb": (0, 1, 2), "bgr": (2, 1, 0)}
MEAN, STDDEV = (123.0, 117.0, 104.0), (58.0, 57.0, 56.0)
NORMALISED = {"image_scale": "1", "image_mean": "123, 117, 104", "image_stddev": "[58, 57, 56]"}


def values_of(array: np.ndarray, dtype: DType) -> np.ndarray:
    return array.view(ml_dtypes.bfloat16).astype(float) if dtype is DType.BF16 else array.astype(float)


@pytest.mark.sample
@pytest.mark.parametrize("max_batch_size", [0, 8])
@pytest.mark.parametrize("color", COLORS)
@pytest.mark.parametrize("layout", ["FORMAT_NCHW", "FORMAT_NHWC", "FORMAT_NONE"])
@pytest.mark.parametrize("dtype", IMAGE_TYPES)
def test_every_type_layout_and_colour_gives_the_declared_values(
    make_plan, encode, noise, dtype, layout, color, max_batch_size
) -> None:
    pixels = noise(10, 14)
    is_signed_or_float = dtype not in (DType.UINT8, DType.UINT16)
    parameters = {"image_color": color, **(NORMALISED if is_signed_or_float else {})}
    dims = (3, 10, 14) if layout != "FORMAT_NHWC" else (10, 14, 3)
    plan = make_plan(parameters, dims=dims, dtype=dtype, layout=layout, max_batch_size=max_batch_size)
    tensor = plan.tensor(encode(pixels, "PNG"), model="net")

    expected = pixels[:, :, COLORS[color]].astype(float)
    if is_signed_or_float:
        expected = (expected - MEAN) / STDDEV
    if dtype.numpy.kind in "iu" and dtype is not DType.BF16:
        expected = np.rint(expected)
    elif dtype is DType.BF16:
        expected = expected.astype(np.float32).astype(ml_dtypes.bfloat16).astype(float)
    else:
        expected = expected.astype(dtype.numpy).astype(float)
    if layout != "FORMAT_NHWC":
        expected = expected.transpose(2, 0, 1)
    if max_batch_size:
        expected = expected[None]
    assert (tensor.name, tensor.dtype, tensor.array.dtype) == ("pixels", dtype, dtype.numpy)
    assert tensor.array.flags.c_contiguous
    np.testing.assert_array_equal(values_of(tensor.array, dtype), expected)


@pytest.mark.parametrize(
    ("dims", "layout", "shape"),
    [
        ((1, 10, 14), "FORMAT_NONE", (1, 1, 10, 14)),
        ((10, 14, 1), "FORMAT_NONE", (1, 10, 14, 1)),
        ((10, 14), "FORMAT_NONE", (1, 10, 14)),
    ],
)
def test_a_gray_network_gets_the_luma_of_a_colour_image(make_plan, encode, noise, dims, layout, shape) -> None:
    plan = make_plan({"image_fit": "stretch"}, dims=dims, layout=layout, dtype=DType.UINT8)
    array = plan.tensor(encode(noise(10, 14), "PNG"), model="net").array
    assert array.shape == shape
    assert np.abs(array.reshape(10, 14) - noise(10, 14) @ [0.299, 0.587, 0.114]).max() <= 1


@pytest.mark.parametrize(("leading", "shape"), [(1, (1, 3, 8, 8)), (-1, (1, 3, 8, 8))])
def test_a_batch_dimension_in_the_dims_is_kept(make_plan, encode, noise, leading, shape) -> None:
    plan = make_plan({"image_fit": "stretch"}, dims=(leading, 3, 8, 8), max_batch_size=0)
    assert plan.tensor(encode(noise(8, 8), "PNG"), model="net").shape == shape


def test_dynamic_dims_get_the_declared_size(make_plan, encode, noise) -> None:
    plan = make_plan({"network_image_width": "20", "network_image_height": "12"}, dims=(3, -1, -1))
    assert plan.tensor(encode(noise(30, 30), "PNG"), model="net").shape == (1, 3, 12, 20)


@pytest.mark.parametrize("layout", ["FORMAT_NCHW", "FORMAT_NHWC"])
def test_borders_have_the_declared_colour_scaled_like_the_image(make_plan, encode, layout) -> None:
    dims = (3, 40, 40) if layout == "FORMAT_NCHW" else (40, 40, 3)
    parameters = {"image_fit": "letterbox", "image_pad_value": "114,115,116", **NORMALISED}
    plan = make_plan(parameters, dims=dims, layout=layout)
    array = plan.tensor(encode(np.full((20, 40, 3), 200, np.uint8), "PNG"), model="net").array[0]
    picture = array.transpose(1, 2, 0) if layout == "FORMAT_NCHW" else array
    border = (np.array([114, 115, 116]) - MEAN) / STDDEV
    inside = (200 - np.array(MEAN)) / STDDEV
    np.testing.assert_allclose(picture[:10], np.broadcast_to(border, (10, 40, 3)), rtol=1e-6)
    np.testing.assert_allclose(picture[30:], np.broadcast_to(border, (10, 40, 3)), rtol=1e-6)
    np.testing.assert_allclose(picture[10:30], np.broadcast_to(inside, (20, 40, 3)), rtol=1e-6)


def test_a_scale_of_one_over_255_puts_mean_and_stddev_into_units_of_0_to_1(make_plan, encode, noise) -> None:
    parameters = {"image_scale": "1/255", "image_mean": "0.485,0.456,0.406", "image_stddev": "0.229,0.224,0.225"}
    plan = make_plan(parameters, dims=(3, 10, 14))
    array = plan.tensor(encode(noise(10, 14), "PNG"), model="net").array[0].transpose(1, 2, 0)
    expected = (noise(10, 14) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(array, expected, rtol=1e-6, atol=1e-7)


def test_the_names_of_isaac_ros_choose_the_fit(make_plan) -> None:
    cases = {
        ("false", "true"): "stretch",
        ("False", "false"): "stretch",
        ("true", "true"): "letterbox",
        ("1", "0"): "crop",
    }
    for (keeps, pads), mode in cases.items():
        parameters = {"image_color": "rgb", "keep_aspect_ratio": keeps, "enable_padding": pads, "crop_mode": "CENTER"}
        assert make_plan(parameters).rule.mode.value == mode


def test_a_camera_frame_and_the_same_file_give_equal_values(make_plan, encode, noise) -> None:
    plan = make_plan({"image_fit": "letterbox"}, dims=(3, 32, 32))
    pixels = noise(48, 64)
    expected = plan.tensor(encode(pixels, "PNG"), model="net").array
    from_rgb, fit = plan.fit(pixels, Color.RGB, model="net")
    from_bgr, _ = plan.fit(pixels[:, :, ::-1], Color.BGR, model="net")
    np.testing.assert_array_equal(from_rgb.array, expected)
    np.testing.assert_array_equal(from_bgr.array, expected)
    assert fit.to_original(16, 16) == (32, 24)
    gray, _ = plan.fit(pixels[:, :, 1], Color.GRAY, model="net")
    np.testing.assert_array_equal(gray.array[0, 0], gray.array[0, 2])


@pytest.mark.parametrize("color", [Color.RGB, Color.BGR])
def test_a_colour_frame_for_a_gray_network_is_converted_by_luma(make_plan, noise, color) -> None:
    plan = make_plan({"image_fit": "stretch"}, dims=(1, 10, 14), dtype=DType.UINT8)
    frame = noise(10, 14) if color is Color.RGB else noise(10, 14)[:, :, ::-1]
    found = plan.fit(frame, color, model="net")[0].array[0, 0]
    assert np.abs(found - noise(10, 14) @ [0.299, 0.587, 0.114]).max() <= 1


def test_bytes_and_views_are_read_and_not_kept(make_plan, encode, noise) -> None:
    plan = make_plan({"image_fit": "stretch"}, dims=(3, 10, 14))
    data = encode(noise(10, 14), "BMP")
    expected = plan.tensor(data, model="net").array
    buffer = bytearray(b"odd" + data + bytes(4 - len(data) % 4))
    views = [memoryview(data), memoryview(buffer)[3:], memoryview(buffer)[3:].toreadonly()]
    for view in views:
        found = plan.tensor(view, model="net").array
        np.testing.assert_array_equal(found, expected)
        assert found.flags.owndata or found.base is None
    view.release()
    views.clear()
    buffer[:] = bytes(1)  # a resize is refused while anything still views the buffer


def test_one_plan_serves_many_threads(make_plan, encode, noise) -> None:
    plan = make_plan({"image_fit": "letterbox", **NORMALISED}, dims=(3, 64, 64))
    files = [encode(noise(40 + 7 * n, 90 - 5 * n), "PNG") for n in range(8)]
    expected = [plan.tensor(data, model="net").array for data in files]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda data: plan.tensor(data, model="net").array, files * 5))
    for array, wanted in zip(found, itertools.cycle(expected), strict=False):
        np.testing.assert_array_equal(array, wanted)


def test_a_refusal_names_the_model_and_its_input(make_plan) -> None:
    with pytest.raises(InvalidRequest, match=r"model 'net', image for input 'pixels': expected a JPEG.* given 5 bytes"):
        make_plan({"image_fit": "stretch"}).tensor(b"hello", model="net")


def test_without_a_declaration_there_is_no_plan(make_spec) -> None:
    assert make_image_plan(make_spec({})) is None
    assert make_image_plan(make_spec({"execution_mode": "0", "crop_mode": "CENTER", "imagery": "1"})) is None


def test_top_k_is_read(make_plan) -> None:
    assert make_plan({"image_top_k": "5"}).top_k == 5
    assert make_plan({"image_fit": "crop"}).top_k is None


def two_inputs(parameters: dict[str, str]) -> ModelSpec:
    inputs = (InputSpec("a", DType.FP32, (3, 8, 8)), InputSpec("b", DType.FP32, (3, 6, 6)))
    return ModelSpec("net", "onnxruntime", "", 1, inputs, (), (), parameters=parameters)


def test_of_several_inputs_the_image_input_is_named() -> None:
    plan = make_image_plan(two_inputs({"image_input": "b"}))
    assert plan is not None
    assert (plan.input_name, plan.shape) == ("b", (1, 3, 6, 6))
    for parameters in ({"image_fit": "crop"}, {"image_input": "c"}):
        with pytest.raises(BadModelConfig, match=r"'image_input': expected the name .* one of 'a', 'b', given"):
            make_image_plan(two_inputs(parameters))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"image_means": "1"}, "'image_means': did you mean 'image_mean'\\? Expected one of those in docs/"),
        ({"network_image_widht": "9"}, "did you mean 'network_image_width'"),
        ({"image_fit": "squeeze"}, "'image_fit': expected one of stretch, letterbox, crop, given 'squeeze'"),
        ({"image_color": "yuv"}, "'image_color': expected one of rgb, bgr, gray"),
        ({"image_interpolation": "lanczos"}, "'image_interpolation': expected one of auto, nearest"),
        ({"image_fit": "crop", "image_resize": "0"}, "'image_resize': expected a whole number from 1 to 16384"),
        ({"image_fit": "crop", "image_resize": "-1"}, "'image_resize'"),
        ({"image_fit": "crop", "image_resize": "9" * 5000}, "'image_resize'"),
        ({"image_fit": "crop", "image_resize": "²"}, "'image_resize'"),
        ({"image_resize": "256"}, "'image_resize': expected only together with image_fit crop"),
        ({"image_fit": "crop", "image_resize": "200"}, "expected image_resize of at least 224.* given 200"),
        ({"image_pad_value": "114"}, "'image_pad_value': expected only together with image_fit letterbox"),
        ({"image_fit": "letterbox", "image_pad_value": "300"}, "whole numbers from 0 to 255, given '300'"),
        ({"image_fit": "letterbox", "image_pad_value": "0.5"}, "whole numbers from 0 to 255"),
        ({"image_mean": "0.5"}, "'image_mean': expected image_scale beside it"),
        ({"image_stddev": "0.5"}, "'image_stddev': expected image_scale beside it"),
        ({"image_scale": "0"}, "'image_scale': expected one number or fraction other than 0"),
        ({"image_scale": "1/0"}, "'image_scale'"),
        ({"image_scale": "1,1,1"}, "'image_scale'"),
        ({"image_scale": "nan"}, "'image_scale'"),
        ({"image_scale": "1", "image_mean": "1,2"}, "'image_mean': expected one number, or one for each channel"),
        ({"image_scale": "1", "image_mean": ""}, "'image_mean'"),
        ({"image_scale": "1", "image_mean": "inf"}, "'image_mean'"),
        ({"image_scale": "1", "image_stddev": "1,0,1"}, "'image_stddev': expected numbers other than 0"),
        ({"image_scale": "1e300", "image_stddev": "1e-300"}, "values that FP32 holds, given"),
        ({"image_top_k": "0"}, "'image_top_k': expected a whole number from 1 to 1000, given '0'"),
        ({"image_top_k": "five"}, "'image_top_k'"),
        ({"network_image_width": "320"}, r"expected network_image_width 224, as dims \[3, 224, 224\] say, given 320"),
        ({"image_color": "gray"}, "expected image_color rgb or bgr for 3 channels, given gray"),
        ({"image_fit": "crop", "input_encoding": "bgr8"}, "'input_encoding': expected it to be left out"),
        ({"image_fit": "crop", "enable_padding": "true"}, "either image_fit or the names of Isaac ROS"),
        ({"image_color": "rgb", "crop_mode": "LEFT"}, "'crop_mode': expected CENTER"),
        ({"image_color": "rgb", "keep_aspect_ratio": "maybe"}, "'keep_aspect_ratio': expected true or false"),
    ],
)
def test_an_invalid_declaration_is_refused_with_key_expected_and_given(make_spec, parameters, message) -> None:
    with pytest.raises(BadModelConfig, match=message) as caught:
        make_image_plan(make_spec(parameters))
    assert "model 'net'" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dims": (16,)}, r"expected dims of a picture .* given \[16\]"),
        ({"dims": (4, 8, 8)}, r"expected format .* given \[4, 8, 8\]"),
        ({"dims": (4, 8, 8), "layout": "FORMAT_NCHW"}, "expected 3 channels, or 1 for gray, given 4 in dims"),
        ({"dims": (3, 8, 3)}, "expected format FORMAT_NCHW or FORMAT_NHWC stated"),
        ({"dims": (-1, -1, -1)}, "expected format FORMAT_NCHW or FORMAT_NHWC stated"),
        ({"dims": (3, -1, 8)}, "expected network_image_height stated"),
        ({"dims": (3, 8, 8), "dtype": DType.BYTES}, "expected a data type out of UINT8, .* given BYTES"),
        ({"dims": (3, 8, 8), "dtype": DType.BOOL}, "given BOOL"),
        ({"dims": (3, 8, 100_000)}, "expected sides from 1 to 16384, given 100000"),
        ({"dims": (2, 3, 8, 8), "max_batch_size": 0}, "expected dims of a picture"),
    ],
)
def test_an_input_that_is_no_image_is_refused(make_spec, changes, message) -> None:
    with pytest.raises(BadModelConfig, match=message):
        make_image_plan(make_spec({"image_fit": "stretch"}, **changes))


@pytest.mark.parametrize(
    ("dtype", "scale", "mean"),
    [
        (DType.UINT8, "1", "1"),
        (DType.UINT8, "2", "0"),
        (DType.INT8, "1", "0"),
        (DType.FP16, "1000", "0"),
        (DType.BF16, "1e38", "0"),
        (DType.INT32, "1e30", "0"),
    ],
)
def test_values_that_the_type_cannot_hold_are_refused(make_spec, dtype, scale, mean) -> None:
    with pytest.raises(BadModelConfig, match=f"to give values that {dtype.value} holds, given"):
        make_image_plan(make_spec({"image_scale": scale, "image_mean": mean}, dtype=dtype))


def test_a_quantised_input_gets_bytes_minus_its_zero_point(make_plan, encode, noise) -> None:
    plan = make_plan({"image_scale": "1", "image_mean": "128"}, dims=(3, 10, 14), dtype=DType.INT8)
    array = plan.tensor(encode(noise(10, 14), "PNG"), model="net").array[0].transpose(1, 2, 0)
    np.testing.assert_array_equal(array.astype(int), noise(10, 14).astype(int) - 128)
