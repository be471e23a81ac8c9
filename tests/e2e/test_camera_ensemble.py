"""A camera's picture to the names of the objects in it, by an ensemble: decode and fit, classify, label, in one
call."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests.kit.infer_input import infer_input
from tests.kit.models import BUNDLED
from tests.kit.server import serve

pytestmark = pytest.mark.full

pictures = pytest.importorskip("skimage.data", reason="needs scikit-image, of the extra test-all")

PIPELINE = Path(__file__).parent / "pipelines" / "camera"
CLASSIFIER = "efficientnet_lite0"
PICTURES = {"coffee": "espresso", "chelsea": "tiger cat", "rocket": "missile", "camera": "tripod"}
"""Photographs that scikit-image carries -> what the classifier sees in them."""


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    path = module_repository.path
    shutil.copytree(PIPELINE, path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (path / "name_subject" / "1").mkdir()
    (path / CLASSIFIER).symlink_to(BUNDLED / CLASSIFIER)
    shutil.copy(BUNDLED / CLASSIFIER / "labels.txt", path / "name_best")
    with serve(path, "--allow-external-links") as running:
        yield running
        running.stop_cleanly()


def photograph(name: str) -> bytes:
    picture = getattr(pictures, name)()
    picture = np.repeat(picture[:, :, None], 3, axis=2) if picture.ndim == 2 else picture
    return bytes(cv2.imencode(".jpg", picture[:, :, ::-1])[1])


def name_subjects(client: Any, library: Any, files: list[bytes]) -> Any:
    given = infer_input(library, "PICTURE", np.array(files, dtype=np.object_).reshape(-1, 1))
    return client.infer("name_subject", [given])


def built_in(server: Any, file: bytes) -> tuple[list[str], np.ndarray]:
    """Return names and scores as the server's own way with pictures gives them."""
    status, text = server.request("POST", f"/v2/models/{CLASSIFIER}/infer", file, {"Content-Type": "image/jpeg"})
    assert status == 200, text
    entries = [entry.split(":", 2) for entry in json.loads(text)["outputs"][0]["data"]]
    return [name for _, _, name in entries], np.array([float(score) for score, _, _ in entries])


@pytest.mark.parametrize("library", [triton_http, triton_grpc])
@pytest.mark.parametrize("name", PICTURES)
def test_an_image_gets_the_labels_and_scores_of_the_built_in_preprocessing(
    server: Any, library: Any, name: str
) -> None:
    file = photograph(name)
    names, scores = built_in(server, file)
    with library.InferenceServerClient(server.http if library is triton_http else server.grpc) as client:
        answer = name_subjects(client, library, [file])
    assert PICTURES[name] in names[0]
    assert [entry.decode() for entry in answer.as_numpy("SUBJECT")[0]] == names
    np.testing.assert_allclose(answer.as_numpy("SCORE")[0], scores, rtol=1e-3, atol=2e-6)


def test_pictures_of_several_sizes_go_through_all_steps_as_one_batch(server: Any) -> None:
    files = [photograph(name) for name in PICTURES]
    before = server.statistics(CLASSIFIER)
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        answer = name_subjects(client, triton_grpc, files)
    assert answer.as_numpy("SUBJECT").shape == (len(files), 5)
    for row, wanted in zip(answer.as_numpy("SUBJECT"), PICTURES.values(), strict=True):
        assert wanted in row[0].decode()
    after = server.statistics(CLASSIFIER)
    assert after["inference_count"] - before["inference_count"] == len(files)
    assert after["execution_count"] - before["execution_count"] == 1
