"""PngSuite (in the source of PyPI's package pypng) and the pictures of scikit-image and scikit-learn: each is decoded
to the pixels that Pillow has."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from edge_server.plugins.vision.decode import decode_image

pytestmark = pytest.mark.full


def pixels_of(data: bytes) -> Any:
    """Return RGB as Pillow has it, without transparency, and of 16 bits the upper byte."""
    image = Image.open(io.BytesIO(data))
    image.load()
    if image.mode.startswith("I"):
        return np.repeat((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8)[..., None], 3, axis=2)
    has_alpha = "A" in image.mode or "transparency" in image.info
    return np.asarray(ImageOps.exif_transpose(image).convert("RGBA" if has_alpha else "RGB"))[..., :3]


def different(pictures: dict[str, bytes]) -> set[str]:
    found = {
        name: decode_image(memoryview(data), as_gray=False, error_prefix=name)[..., ::-1]
        for name, data in pictures.items()
    }
    return {name for name, pixels in found.items() if not np.array_equal(pixels, pixels_of(pictures[name]))}


def test_each_picture_of_pngsuite_is_decoded_as_by_pillow(suites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(suites))
    pictures = importlib.import_module("pngsuite").png
    assert len(pictures) == 28
    assert different(pictures) == set()


@pytest.mark.parametrize("package", ["skimage", "sklearn"])
def test_the_pictures_of_a_package_are_decoded_as_by_pillow(package: str) -> None:
    folder = Path(pytest.importorskip(package).__file__).parent
    files = [file for file in folder.rglob("*") if file.suffix in (".png", ".jpg")]
    assert len(files) >= {"skimage": 26, "sklearn": 2}[package]
    assert different({file.name: file.read_bytes() for file in files}) == set()
