"""Specifications of small image models, and pictures encoded by a library other than the one under test."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from edge_server.core.model import InputSpec, ModelSpec
from edge_server.core.tensor import DType
from edge_server.vision.plan import ImagePlan, image_plan


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
        plan = image_plan(make_spec(parameters, **rest))
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
    return Path(__file__).parents[2]
