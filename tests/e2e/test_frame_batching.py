"""Frames of several cameras as one batch of the classifier, on the installed server; pictures of scikit-image."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest

from edge_server.client import Delivery, FrameResult, FrameStream, Returns
from tests.kit.models import BUNDLED
from tests.kit.together import together

pytestmark = pytest.mark.full

pictures = pytest.importorskip("skimage.data", reason="needs scikit-image, of the extra test-all")

CLASSIFIER = "efficientnet_lite0"
COUNT = 40
SHOWN = {"coffee": "rgb8", "chelsea": "rgb8", "rocket": "rgb8", "camera": "mono8"}
"""The image of each camera, and its encoding."""


def ask(address: str, name: str, count: int) -> list[FrameResult]:
    picture = np.ascontiguousarray(getattr(pictures, name)())
    options: dict[str, Any] = {"returns": Returns(top_k=3), "delivery": Delivery(depth=4), "keeps_all": True}
    with FrameStream(address, CLASSIFIER, **options) as stream:
        return list(stream.results([picture] * count, encoding=SHOWN[name]))


def test_frames_of_several_cameras_run_as_one_batch_and_each_gets_its_own_result(
    shared_server: Any, repository: Any
) -> None:
    shutil.copytree(BUNDLED / CLASSIFIER, repository.path / CLASSIFIER)
    answers: dict[str, list[FrameResult]] = {}
    with shared_server(repository.path) as server:
        alone = {name: ask(server.grpc, name, 1)[0] for name in SHOWN}
        together(lambda name: answers.update({name: ask(server.grpc, name, COUNT)}), SHOWN)
    assert len({result.classes[0].index for result in alone.values()}) == len(SHOWN)
    for name, expected in alone.items():
        assert expected.batch_size == 1
        assert [result.header.seq for result in answers[name]] == list(range(1, COUNT + 1))
        for result in answers[name]:
            assert [found.index for found in result.classes] == [found.index for found in expected.classes]
            assert result.classes[0].score == pytest.approx(expected.classes[0].score, abs=2e-3)
    # Each camera has at most one frame in a choice of frames; the scheduler may run two choices as one batch.
    assert max(result.batch_size for results in answers.values() for result in results) >= len(SHOWN)
