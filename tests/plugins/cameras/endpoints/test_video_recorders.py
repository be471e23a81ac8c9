"""Protocols of video recorders against a server in this process: DeepStack's, and the detector plug-in for Frigate."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_server.client import Frame, FrameHeader, FrameStream
from tests.kit.models import BUNDLED, Repository
from tests.kit.server import serve_here

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[4]
DETECTOR = "face_detection_yunet"
WIDTH, HEIGHT = 30, 32
ROWS = WIDTH * HEIGHT * 3 // 6

SSD_BOXES = np.array([[[0.1, 0.2, 0.5, 0.6], [0.3, 0.3, 0.4, 0.4], [0, 0, 1, 1]]], np.float32)
SSD_REST = (np.array([[2, 0, 7]], np.float32), np.array([[0.5, 0.75, 0.9]], np.float32), np.array([2], np.float32))


def finish(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def rows_model() -> onnx.ModelProto:
    """Each six values of the picture are a detection: x_min, y_min, x_max, y_max, score, class."""
    nodes = [
        helper.make_node("Cast", ["image"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["floats", "shape"], ["found"]),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.UINT8, [1, HEIGHT, WIDTH, 3])
    found = helper.make_tensor_value_info("found", TensorProto.FLOAT, [1, ROWS, 6])
    shape = numpy_helper.from_array(np.array([1, ROWS, 6]), "shape")
    return finish(helper.make_graph(nodes, "rows", [image], [found], [shape]))


def ssd_model() -> onnx.ModelProto:
    """Three boxes whatever the picture holds, two of them valid."""
    names = ("boxes", "classes", "scores", "count")
    values = [
        numpy_helper.from_array(array, f"{name}_value")
        for name, array in zip(names, (SSD_BOXES, *SSD_REST), strict=True)
    ]
    nodes = [helper.make_node("Identity", [f"{name}_value"], [name]) for name in names]
    image = helper.make_tensor_value_info("image", TensorProto.UINT8, [1, HEIGHT, WIDTH, 3])
    outputs = [
        helper.make_tensor_value_info(value.name.removesuffix("_value"), TensorProto.FLOAT, value.dims)
        for value in values
    ]
    return finish(helper.make_graph(nodes, "ssd", [image], outputs, values))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    repository = Repository(tmp_path_factory.mktemp("models"))
    repository.add("rows", model=rows_model())
    repository.add("ssd", model=ssd_model())
    repository.add(
        "slow",
        f"""backend: "stub"
        input {{ name: "image" data_type: TYPE_UINT8 dims: [1, {HEIGHT}, {WIDTH}, 3] }}
        output {{ name: "found" data_type: TYPE_UINT8 dims: [1, {HEIGHT}, {WIDTH}, 3] }}
        parameters {{ key: "stub_delay_ms" value {{ string_value: "3000" }} }}""",
    )
    repository.add(
        "shapeless",
        f"""backend: "identity"
        input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [1, {HEIGHT}, {WIDTH}, 3] }}
        output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [1, {HEIGHT}, {WIDTH}, 3] }}""",
    )
    shutil.copytree(BUNDLED / DETECTOR, repository.path / DETECTOR)
    with serve_here(repository.path) as server:
        yield server


@pytest.fixture
def detector(server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes a detector of the plug-in, loaded over doubles of Frigate's base classes."""
    for name, members in {
        "frigate": {},
        "frigate.detectors": {},
        "frigate.detectors.detection_api": {"DetectionApi": object},
        "frigate.detectors.detector_config": {"BaseDetectorConfig": object},
        "pydantic": {"Field": lambda default=None, title="": default},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("frigate_kserve", ROOT / "docs/examples/frigate_kserve.py")
    assert spec is not None
    assert spec.loader is not None
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)

    detectors = []

    def make(model: str, *, timeout: float = 10.0, address: str = server.http) -> Any:
        size = SimpleNamespace(width=WIDTH, height=HEIGHT)
        made = plugin.KServeDetector(SimpleNamespace(model=size, model_name=model, timeout=timeout, address=address))
        detectors.append(made)
        return made

    yield make
    for made in detectors:
        made.connection.close()


def picture(*rows: tuple[int, ...]) -> np.ndarray:
    flat = np.zeros((ROWS, 6), np.uint8)
    flat[: len(rows)] = np.reshape(rows, (-1, 6))
    return flat.reshape(1, HEIGHT, WIDTH, 3)


def test_deepstack_finds_the_same_boxes_as_a_frame_stream(server: Any) -> None:
    portrait = next((ROOT / "edge_server").rglob("demo.jpg")).read_bytes()
    with FrameStream(server.grpc, DETECTOR) as stream:
        (result,) = stream.results([Frame(FrameHeader(), format="jpeg", data=portrait)])
    (found,) = result.detections
    body = b'--x\r\nContent-Disposition: form-data; name="image"; filename="image"\r\n\r\n%b\r\n--x--\r\n' % portrait
    request = urllib.request.Request(
        f"http://{server.http}/v1/vision/detection", body, {"Content-Type": "multipart/form-data; boundary=x"}
    )
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)
    (seen,) = answer["predictions"]
    assert answer["success"] is True
    assert (seen["label"], seen["confidence"]) == (found.label or "class 0", pytest.approx(found.score, abs=1e-6))
    for side in ("x_min", "y_min", "x_max", "y_max"):
        assert seen[side] == round(getattr(found, side))


def test_frigate_gets_twenty_rows_best_first_from_a_model_with_rows(detector: Any) -> None:
    detections = detector("rows").detect_raw(picture((3, 8, 15, 16, 1, 2), (0, 0, 30, 32, 2, 1)))
    assert (detections.shape, detections.dtype) == ((20, 6), np.float32)
    assert detections[0].tolist() == [1, 2, 0, 0, 1, 1]
    assert detections[1].tolist() == pytest.approx([2, 1, 0.25, 0.1, 0.5, 0.5])
    assert not detections[2:].any()


def test_frigate_gets_the_valid_boxes_of_an_ssd(detector: Any) -> None:
    detections = detector("ssd").detect_raw(picture())
    assert detections[0].tolist() == pytest.approx([0, 0.75, 0.3, 0.3, 0.4, 0.4])
    assert detections[1].tolist() == pytest.approx([2, 0.5, 0.1, 0.2, 0.5, 0.6])
    assert not detections[2:].any()


def test_more_than_twenty_detections_leave_the_best(detector: Any) -> None:
    detections = detector("rows").detect_raw(picture(*((0, 0, 5, 5, score, 0) for score in range(1, 41))))
    assert detections[:, 1].tolist() == [*range(40, 20, -1)]


@pytest.mark.parametrize(
    ("model", "dtype", "message"),
    [
        ("nothing", np.uint8, "unknown model: 'nothing'"),
        ("rows", np.float32, "UINT8"),
        ("shapeless", np.float32, "expected one output [N, 6] or four of SSD, given [(1, 32, 30, 3)]"),
        ("rows", np.complex64, "complex64"),
    ],
)
def test_a_failure_is_logged_once_and_gives_no_detections(
    detector: Any, caplog: pytest.LogCaptureFixture, model: str, dtype: Any, message: str
) -> None:
    made = detector(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not made.detect_raw(picture().astype(dtype)).any()
    (record,) = caplog.records
    assert message in record.getMessage()


def test_a_slow_model_never_delays_frigate_beyond_the_limit(detector: Any) -> None:
    made = detector("slow", timeout=0.2)
    assert not made.detect_raw(picture()).any()
    assert "timed out" in made.failure
    made.path = "/v2/models/rows"
    assert made.detect_raw(picture((0, 0, 30, 32, 2, 1)))[0].tolist() == [1, 2, 0, 0, 1, 1]


def test_a_connection_closed_by_the_server_is_reopened(detector: Any) -> None:
    made = detector("rows")
    made.detect_raw(picture())
    made.connection.sock.shutdown(2)
    assert made.detect_raw(picture((0, 0, 30, 32, 2, 1)))[0].tolist() == [1, 2, 0, 0, 1, 1]
    assert made.failure == ""


def test_an_absent_server_gives_no_detections(detector: Any) -> None:
    made = detector("rows", address="127.0.0.1:1")
    assert not made.detect_raw(picture()).any()
    assert "refused" in made.failure
