"""Text in images, through the installed server: a Python model that finds lines by one network and reads by another.

The networks are real and come from `fetch_pipeline_models.sh`; the model folders are in `pipelines/text_in_images`.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from PIL import Image, ImageDraw, ImageFont
from tritonclient.utils import InferenceServerException

from edge_server.cli.main import main
from edge_server.plugins.add.text_trial import DRAWN_LINES
from tests.kit.infer_input import infer_input
from tests.kit.model_folder import parameters
from tests.kit.server import serve
from tests.kit.together import together

PIPELINE = Path(__file__).parent / "pipelines" / "text_in_images"
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


READS_LINES = "".join(
    f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
    for key, value in {
        "network_image_width": "640", "network_image_height": "960", "image_fit": "letterbox", "image_color": "bgr",
        "image_scale": "1/255", "image_mean": "0.485,0.456,0.406", "image_stddev": "0.229,0.224,0.225",
        "detection_head": "dbnet", "detection_score_threshold": "0.5", "detection_text_model": "text_recogniser",
    }.items()
)  # fmt: skip


def write_pipeline(path: Path) -> None:
    """Copy the model folders and put the networks into them."""
    for name in ("read_text", *NETWORKS):
        shutil.copytree(PIPELINE / name, path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, variable in NETWORKS.items():
        (path / name / "1").mkdir()
        shutil.copy(os.environ[variable], path / name / "1" / "model.onnx")


@pytest.fixture(scope="module")
def server(module_repository: Any, shared_server: Callable[..., Any]) -> Iterator[Any]:
    write_pipeline(module_repository.path)
    # The same pipeline whose Python part lives in a process of its own, and calls the networks from there.
    isolated = module_repository.path / "isolated_read_text"
    shutil.copytree(module_repository.path / "read_text", isolated)
    with (isolated / "config.pbtxt").open("a") as config:
        config.write(parameters(isolation="process"))
    lines = module_repository.path / "text_lines"
    shutil.copytree(module_repository.path / "text_detector", lines)
    (lines / "config.pbtxt").write_text(READS_LINES)
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


def read(client: Any, library: Any, picture: bytes, model: str = "read_text") -> Any:
    given = infer_input(library, "IMAGE", np.array([picture], dtype=np.object_))
    return client.infer(model, [given])


def texts(answer: Any) -> list[str]:
    return [text.decode() for text in answer.as_numpy("TEXT")]


@pytest.mark.parametrize("library", [triton_http, triton_grpc])
@pytest.mark.parametrize("model", ["read_text", "isolated_read_text"])
def test_any_number_of_rendered_lines_is_read_exactly(server: Any, library: Any, model: str) -> None:
    address = server.http if library is triton_http else server.grpc
    with library.InferenceServerClient(address) as client:
        for count in (0, 1, 2, 5, 12):
            answer = read(client, library, page(LINES[:count]), model)
            assert texts(answer) == LINES[:count]
            corners, scores = answer.as_numpy("CORNERS"), answer.as_numpy("SCORE")
            assert (corners.shape, scores.shape) == ((count, 4, 2), (count,))
            assert ((scores > 0.6) & (scores <= 1)).all()
            tops = corners[:, 0, 1]
            assert (np.abs(tops - (30 + 64 * np.arange(count))) < 16).all(), tops


def test_a_detector_that_names_the_recogniser_reads_the_same_lines(server: Any) -> None:
    status, body = server.request("POST", "/edge/v1/models/text_lines/perception", page(LINES))
    assert status == 200, body
    found = sorted(json.loads(body)["detections"], key=lambda line: line["y_min"])
    assert [line["text"] for line in found] == LINES


@pytest.mark.parametrize("size", [20, 28, 44])
@pytest.mark.parametrize("degrees", [-4.0, 0.0, 4.0])
def test_lines_of_several_sizes_and_angles_are_read(server: Any, size: int, degrees: float) -> None:
    wanted = LINES[:4]
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        assert texts(read(client, triton_grpc, page(wanted, size, degrees))) == wanted


def test_requests_at_the_same_time_each_get_their_own_text(server: Any) -> None:
    before = server.statistics("text_recogniser")
    wrong: list[object] = []
    barrier = threading.Barrier(4)

    def work(index: int) -> None:
        library = (triton_http, triton_grpc)[index % 2]
        address = (server.http, server.grpc)[index % 2]
        with library.InferenceServerClient(address) as client:
            barrier.wait(20)
            for turn in range(5):
                # Twelve lines in an order of one's own.
                wanted = [LINES[(3 * index + turn + place) % 12] for place in range(1 + (index + turn) % 5)]
                found = texts(read(client, library, page(wanted)))
                if found != wanted:
                    wrong.append((wanted, found))

    together(work, range(4))
    assert wrong == []
    after = server.statistics("text_recogniser")
    lines = sum(1 + (index + turn) % 5 for index in range(4) for turn in range(5))
    assert after["inference_count"] - before["inference_count"] == lines
    assert after["execution_count"] - before["execution_count"] < lines


def test_lines_of_one_width_go_through_the_recogniser_as_one_batch(server: Any) -> None:
    before = server.statistics("text_recogniser")
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        assert texts(read(client, triton_grpc, page(["Maximum load 250 kg"] * 8))) == ["Maximum load 250 kg"] * 8
    after = server.statistics("text_recogniser")
    assert after["inference_count"] - before["inference_count"] == 8
    assert after["execution_count"] - before["execution_count"] == 1


@pytest.mark.parametrize("body", [b"", b"no picture", b"\x89PNG\r\n\x1a\n" + b"\0" * 64], ids=["empty", "text", "png"])
def test_an_invalid_image_is_a_client_error_and_the_next_one_is_read(server: Any, body: bytes) -> None:
    with triton_http.InferenceServerClient(server.http) as client:
        with pytest.raises(InferenceServerException, match=f"{len(body)} bytes that are not a picture") as caught:
            read(client, triton_http, body)
        assert caught.value.status() == "400"
        assert texts(read(client, triton_http, page(LINES[:1]))) == LINES[:1]


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


def test_an_unloaded_network_is_named_in_the_error(tmp_path: Path) -> None:
    write_pipeline(tmp_path)
    flags = ("--model-control-mode=explicit", "--load-model=*")
    with serve(tmp_path, *flags) as server, triton_http.InferenceServerClient(server.http) as client:
        assert texts(read(client, triton_http, page(LINES[:2]))) == LINES[:2]
        client.unload_model("text_recogniser")
        with pytest.raises(InferenceServerException, match="text_recogniser"):
            read(client, triton_http, page(LINES[:2]))
        # A page without lines asks only the detector.
        assert texts(read(client, triton_http, page([]))) == []
        client.load_model("text_recogniser")
        assert texts(read(client, triton_http, page(LINES[:2]))) == LINES[:2]
