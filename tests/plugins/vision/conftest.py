"""Specifications of small image models, and images encoded by a library other than the one under test."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from PIL import Image

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.plugins.vision.image_plan import ImagePlan, make_image_plan
from edge_server.plugins.vision.resize import FitMode, FitRule, FittedPicture, make_fitted_picture, place
from edge_server.protocol.frame_messages import Detection, Frame, FrameHeader
from edge_server.repository.model_config import pbtxt
from edge_server.repository.model_config.config_to_spec import to_spec
from edge_server.repository.model_config.labels import read_labels


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., ModelSpec]:
    def make(
        parameters: dict[str, str],
        dims: tuple[int, ...] = (3, 224, 224),
        dtype: DType = DType.FP32,
        layout: str = "FORMAT_NONE",
        max_batch_size: int = 4,
    ) -> ModelSpec:
        return ModelSpec(
            name="net",
            backend="onnxruntime",
            platform="",
            max_batch_size=max_batch_size,
            inputs=(InputSpec("pixels", dtype, dims, format=layout),),
            outputs=(),
            instance_groups=(),
            parameters=parameters,
        )

    return make


@pytest.fixture(scope="session")
def make_plan(make_spec: Callable[..., ModelSpec]) -> Callable[..., ImagePlan]:
    def make(parameters: dict[str, str], **rest: Any) -> ImagePlan:
        plan = make_image_plan(make_spec(parameters, **rest))
        assert plan is not None
        return plan

    return make


@pytest.fixture(scope="session")
def encode() -> Callable[..., bytes]:
    def encode(pixels: np.ndarray[Any, Any] | Image.Image, form: str, **options: Any) -> bytes:
        picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
        file = io.BytesIO()
        picture.save(file, form, **options)
        return file.getvalue()

    return encode


@pytest.fixture(scope="session")
def noise() -> Callable[[int, int], np.ndarray[Any, Any]]:
    """RGB noise of a height and a width, the same every time."""

    def noise(height: int, width: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng(7).integers(0, 256, (height, width, 3), np.uint8)

    return noise


@pytest.fixture(scope="session")
def repository_root() -> Path:
    return Path(__file__).parents[3]


BT601 = np.array([[65.481, 128.553, 24.966], [-37.797, -74.203, 112.0], [112.0, -93.786, -18.214]]) / 255
"""Y, U and V of R, G and B in ITU-R BT.601, limited range, without the offsets 16, 128, 128."""

Array: TypeAlias = "np.ndarray[Any, Any]"


@pytest.fixture(scope="session")
def expose() -> Callable[..., Frame]:
    """The bytes of a camera for an 8-bit RGB image, by the definition of each encoding, in numpy."""

    def expose(rgb: Array, encoding: str, *, padding: int = 0, is_bigendian: bool = False) -> Frame:
        height, width = rgb.shape[:2]
        if encoding in ("nv12", "nv21", "nv24"):
            parts = _two_planes(rgb, encoding)
        else:
            numbers = _packed(rgb, encoding)
            numbers = numbers.astype(numbers.dtype.newbyteorder(">" if is_bigendian else "<"))
            parts = [np.ascontiguousarray(numbers).view(np.uint8).reshape(height, -1)]
        step = parts[0].shape[1] + padding
        # A row of twice the length has twice the padding, so that every row is one or two steps.
        padded = [
            np.pad(p, ((0, 0), (0, padding * p.shape[1] // parts[0].shape[1])), constant_values=201) for p in parts
        ]
        return Frame(
            FrameHeader(frame_id=encoding), height, width, encoding, step if padding else 0, is_bigendian,
            data=b"".join(part.tobytes() for part in padded),
        )  # fmt: skip

    return expose


def yuv_of(rgb: Array) -> Array:
    return rgb @ BT601.T + (16, 128, 128)


def _to_bytes(values: Array) -> Array:
    return np.rint(values).clip(0, 255).astype(np.uint8)


def _two_planes(rgb: Array, encoding: str) -> list[Array]:
    yuv, height = yuv_of(rgb), rgb.shape[0]
    chroma = yuv[:, :, 1:]
    if encoding != "nv24":
        chroma = chroma.reshape(height // 2, 2, -1, 2, 2).mean(axis=(1, 3))
    if encoding == "nv21":
        chroma = chroma[:, :, ::-1]
    return [_to_bytes(yuv[:, :, 0]), _to_bytes(chroma).reshape(chroma.shape[0], -1)]


def _packed(rgb: Array, encoding: str) -> Array:
    bgr, alpha = rgb[:, :, ::-1], np.full((*rgb.shape[:2], 1), 9, np.uint8)
    luma = _to_bytes(rgb @ [0.299, 0.587, 0.114])
    if encoding.startswith("bayer_"):
        sites = encoding.removeprefix("bayer_")[:4]
        mosaic = np.empty(rgb.shape[:2], np.uint8)
        for place, letter in enumerate(sites):
            y, x = divmod(place, 2)
            mosaic[y::2, x::2] = rgb[y::2, x::2, "rgb".index(letter)]
        return _sixteen(mosaic) if encoding.endswith("16") else mosaic
    if encoding in ("uyvy", "yuv422", "yuyv", "yuv422_yuy2"):
        yuv = yuv_of(rgb)
        pairs = yuv[:, :, 1:].reshape(rgb.shape[0], -1, 2, 2).mean(axis=2).reshape(rgb.shape[0], -1)
        is_chroma_first = encoding in ("uyvy", "yuv422")
        both = (pairs, yuv[:, :, 0]) if is_chroma_first else (yuv[:, :, 0], pairs)
        return _to_bytes(np.stack(both, axis=-1))
    return {
        "rgb8": lambda: rgb,
        "bgr8": lambda: bgr,
        "8UC3": lambda: bgr,
        "rgba8": lambda: np.concatenate([rgb, alpha], axis=2),
        "bgra8": lambda: np.concatenate([bgr, alpha], axis=2),
        "8UC4": lambda: np.concatenate([bgr, alpha], axis=2),
        "mono8": lambda: luma,
        "8UC1": lambda: luma,
        "mono16": lambda: _sixteen(luma),
        "rgb16": lambda: _sixteen(rgb),
        "bgr16": lambda: _sixteen(bgr),
        "16UC3": lambda: _sixteen(bgr),
        "rgba16": lambda: _sixteen(np.concatenate([rgb, alpha], axis=2)),
        "bgra16": lambda: _sixteen(np.concatenate([bgr, alpha], axis=2)),
        "16UC4": lambda: _sixteen(np.concatenate([bgr, alpha], axis=2)),
    }[encoding]()


def _sixteen(values: Array) -> Array:
    """16 bits whose upper half is `values`, and whose lower half is something else."""
    return values.astype(np.uint16) << 8 | (255 - values)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., ModelSpec]:
    """A model that takes a picture of a width and a height, and yields outputs of given names and dims."""

    def make(
        parameters: dict[str, str],
        outputs: dict[str, tuple[int, ...]],
        *,
        size: tuple[int, int] = (64, 64),
        max_batch_size: int = 4,
        labels: dict[str, tuple[str, ...]] | None = None,
        dtypes: dict[str, DType] | None = None,
    ) -> ModelSpec:
        return ModelSpec(
            name="net",
            backend="onnxruntime",
            platform="",
            max_batch_size=max_batch_size,
            inputs=(InputSpec("pixels", DType.FP32, (3, size[1], size[0])),),
            outputs=tuple(
                OutputSpec(name, (dtypes or {}).get(name, DType.FP32), dims, labels=(labels or {}).get(name, ()))
                for name, dims in outputs.items()
            ),
            instance_groups=(),
            parameters={"image_fit": "letterbox", **parameters},
        )

    return make


Find = tuple[list[float], float, int, list[tuple[float, float, float]]]
"""Corners in pixels of the input, score, class, keypoints."""


@pytest.fixture(scope="session")
def expected_detections() -> Callable[..., list[Find]]:
    """Expected detections for the network's rows, by plain loops over plain numbers."""

    def overlap(a: list[float], b: list[float]) -> float:
        width = min(a[2], b[2]) - max(a[0], b[0])
        height = min(a[3], b[3]) - max(a[1], b[1])
        if width <= 0 or height <= 0:
            return 0.0
        common = width * height
        return common / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common)

    def expected(
        finds: list[Find], fit: FittedPicture, *, iou: float | None = 0.45, is_agnostic: bool = False, most: int = 100
    ) -> list[Find]:
        stays: list[Find] = []
        for box, score, index, points in sorted(finds, key=lambda find: -find[1]):
            x_min, y_min = fit.to_original(box[0], box[1])
            x_max, y_max = fit.to_original(box[2], box[3])
            moved = [x_min, y_min, x_max, y_max]
            if min(x_max, fit.width) <= max(x_min, 0) or min(y_max, fit.height) <= max(y_min, 0):
                continue
            rivals = [other for other in stays if is_agnostic or other[2] == index]
            if iou is not None and any(overlap(moved, other[0]) > iou for other in rivals):
                continue
            stays.append((moved, score, index, [(*fit.to_original(x, y), part) for x, y, part in points]))
        limits = (fit.width, fit.height, fit.width, fit.height)
        return [
            ([min(max(value, 0.0), limit) for value, limit in zip(box, limits, strict=True)], score, index, points)
            for box, score, index, points in stays[:most]
        ]

    return expected


@pytest.fixture(scope="session")
def check_detections(expected_detections: Callable[..., list[Find]]) -> Callable[..., list[Find]]:
    """Compare detections with what should come of finds."""

    def check(given: tuple[Detection, ...], finds: list[Find], fit: FittedPicture, **rules: Any) -> list[Find]:
        expected = expected_detections(finds, fit, **rules)
        assert [found.class_index for found in given] == [find[2] for find in expected]
        for found, (box, score, _, points) in zip(given, expected, strict=True):
            assert (found.x_min, found.y_min, found.x_max, found.y_max) == pytest.approx(box, abs=1e-3, rel=1e-5)
            assert found.score == pytest.approx(score, abs=1e-6)
            assert len(found.keypoints) == len(points)
            for keypoint, point in zip(found.keypoints, points, strict=True):
                assert (keypoint.x, keypoint.y, keypoint.score) == pytest.approx(point, abs=1e-3, rel=1e-5)
        return expected

    return check


@pytest.fixture(scope="session")
def make_fit() -> Callable[..., FittedPicture]:
    """The position of an image of a size in an input of 64x64, or of another size."""

    def make(mode: str, width: int, height: int, size: tuple[int, int] = (64, 64)) -> FittedPicture:
        rule = FitRule(FitMode(mode), *size)
        return make_fitted_picture(place(rule, width, height), width, height)

    return make


@pytest.fixture(scope="session")
def bundled(repository_root: Path) -> Callable[[str], ModelSpec]:
    """The specification of a bundled model, as its files state it."""

    def read(name: str) -> ModelSpec:
        folder = repository_root / "model_repository" / name
        config = pbtxt.parse_text((folder / "config.pbtxt").read_bytes(), name)
        config.backend = "onnxruntime"
        labels = {
            output.name: read_labels(name, output.name, folder, output.label_filename)
            for output in config.output
            if output.label_filename
        }
        return to_spec(config, labels)

    return read


@pytest.fixture(scope="session")
def picture() -> bytes:
    """A gray JPEG of 640 x 480 pixels."""
    file = io.BytesIO()
    Image.new("RGB", (640, 480), (90, 90, 90)).save(file, "JPEG")
    return file.getvalue()
