"""Text in images, through the installed server: lines are found by one network and read by another.

The networks are real and come from `fetch_pipeline_models.sh`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from edge_server.cli.main import main
from edge_server.plugins.add.text_trial import DRAWN_LINES
from tests.kit.model_folder import parameters
from tests.kit.server import serve

NETWORKS = {"text_detector": "EDGE_TEST_TEXT_DETECTOR", "text_recogniser": "EDGE_TEST_TEXT_RECOGNISER"}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not all(os.environ.get(variable) for variable in NETWORKS.values()),
        reason="the networks are not here: tests/e2e/fetch_pipeline_models.sh fetches them",
    ),
]

LINES = [
    "Emergency stop 4711", "Battery 87 percent", "Speed limit 30 km/h", "Room B-204, left door", "Serial no. X7-90210",
    "Do not enter", "Maximum load 250 kg", "Exit", "Gate 12 opens at 06:45", "Water pressure is low",
    "Robot cell 3 is locked", "Press the green button",
]  # fmt: skip


READS_LINES = parameters(
    network_image_width=640, network_image_height=960, image_fit="letterbox", image_color="bgr", image_scale="1/255",
    image_mean="0.485,0.456,0.406", image_stddev="0.229,0.224,0.225", detection_head="dbnet",
    detection_score_threshold=0.5, detection_text_model="text_recogniser",
)  # fmt: skip
READER = """
# A score for each of 6905 letters and the blank at each step along the line.
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 3, 48, -1 ] }
output { name: "fetch_name_0" data_type: TYPE_FP32 dims: [ -1, 6906 ] }
"""


@pytest.fixture(scope="module")
def server(module_repository: Any, shared_server: Callable[..., Any]) -> Iterator[Any]:
    for name, variable in NETWORKS.items():
        config = READER if name == "text_recogniser" else READS_LINES
        module_repository.add(name, config, files={"1/model.onnx": Path(os.environ[variable]).read_bytes()})
    with shared_server(module_repository.path) as running:
        yield running


def page(lines: list[str], size: int = 32, degrees: float = 0.0) -> bytes:
    """Return a PNG of dark letters on light paper, one line below the other, turned around its middle."""
    picture = Image.new("RGB", (640, max(96, 2 * size * len(lines) + 60)), (250, 248, 240))
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(size=size)
    for number, line in enumerate(lines):
        pen.text((40 + 7 * (number % 4), 30 + number * 2 * size), line, font=font, fill=(20, 20, 30))
    turned = picture.rotate(degrees, resample=Image.Resampling.BICUBIC, fillcolor=(250, 248, 240))
    return bytes(cv2.imencode(".png", np.asarray(turned)[:, :, ::-1])[1])


def test_a_detector_that_names_the_recogniser_reads_the_same_lines(server: Any) -> None:
    status, body = server.request("POST", "/edge/v1/models/text_detector/perception", page(LINES))
    assert status == 200, body
    found = sorted(json.loads(body)["detections"], key=lambda line: line["y_min"])
    assert [line["text"] for line in found] == LINES


@pytest.mark.parametrize("source", ["PP-OCRv6, two files", "PP-OCRv4, a folder with a third network"])
def test_networks_that_one_command_adds_read_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    given = [os.environ[variable] for variable in NETWORKS.values()]
    if "v4" in source:
        given = [os.environ.get("EDGE_TEST_RAPIDOCR") or pytest.skip("fetch_pipeline_models.sh fetches PP-OCRv4")]
    assert main(["add", *given, "--name=page", f"--model-repository={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert [line.rpartition(" ")[0] for line in said.splitlines() if line.startswith("reads")] == [
        f"reads   '{line}'" for line in DRAWN_LINES
    ]
    with serve(tmp_path) as server:
        status, body = server.request("POST", "/edge/v1/models/page/perception", page(LINES[:4]))
    assert status == 200, body
    found = sorted(json.loads(body)["detections"], key=lambda line: line["y_min"])
    assert [line["text"] for line in found] == LINES[:4]
