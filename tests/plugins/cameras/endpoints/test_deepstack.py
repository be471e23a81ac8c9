"""DeepStack's object detection: the forms of its clients, the choice of the model, and errors in its form."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.status_reports import IndexEntry
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import Throttled

PATH = "/v1/vision/detection"
SIZE = 64
"""Side of the network's input, in pixels. The pictures are twice as wide and high."""

FINDER = ModelSpec(
    "finder",
    "stub",
    "",
    inputs=(InputSpec("pixels", DType.FP32, (3, SIZE, SIZE)),),
    outputs=(OutputSpec("found", DType.FP32, (-1, 6), labels=("person", "car")),),
    instance_groups=(),
    max_batch_size=4,
    parameters={"image_color": "rgb", "image_scale": "1", "detection_head": "yolov10"},
)

ROWS = [(1, 2, 30, 40, 0.5, 1), (10.2, 10.4, 20, 20, 0.875, 0), (0, 0, 5, 5, 0.1, 0), (7, 7, 9, 9, 0.3, 7)]


def compute(request: Request, rows: list[Any] | None = None) -> list[Response]:
    found = np.array([ROWS if rows is None else rows], np.float32)
    return [Response(request.model, 1, request.id, outputs=(Tensor("found", DType.FP32, found),))]


@pytest.fixture
def recorder(site: Any) -> Any:
    """A site with one ready detection model, beside others."""
    serve(site, finder={})
    return site


def serve(site: Any, **models: dict[str, str]) -> None:
    for name, parameters in models.items():
        spec = replace(FINDER, parameters={**FINDER.parameters, **parameters})
        site.service.models[name] = (spec, compute)
    site.service.repository_index = lambda *, only_ready=False: [
        IndexEntry(name, "1", "READY") for name in ("add", "image", *models)
    ]


def jpeg(side: int = 2 * SIZE) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), (90, 120, 60)).save(file, "JPEG")
    return file.getvalue()


def form(**parts: bytes) -> tuple[bytes, dict[str, str]]:
    """Return a form as Python's `requests` sends it, for Frigate and the Home Assistant integration."""
    body = b""
    for name, content in parts.items():
        file = b'; filename="image"' if name == "image" else b""
        body += b'--5f0e\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name.encode(), file, content)
    return body + b"--5f0e--\r\n", {"Content-Type": "multipart/form-data; boundary=5f0e"}


def test_objects_are_returned_best_first_in_image_pixels_with_labels(recorder: Any) -> None:
    reply = recorder.post(PATH, *form(api_key=b"", image=jpeg()))
    assert (reply.status, reply.json["success"]) == (200, True)
    first, second, third = reply.json["predictions"]
    assert first == {"label": "person", "confidence": 0.875, "x_min": 20, "y_min": 21, "x_max": 40, "y_max": 40}
    assert second == {"label": "car", "confidence": 0.5, "x_min": 2, "y_min": 4, "x_max": 60, "y_max": 80}
    assert (third["label"], third["confidence"]) == ("class 7", pytest.approx(0.3))


def test_a_client_may_set_a_minimum_confidence(recorder: Any) -> None:
    reply = recorder.post(PATH, *form(image=jpeg(), min_confidence=b"0.6"))
    assert [found["label"] for found in reply.json["predictions"]] == ["person"]


def test_at_most_twenty_objects_are_returned_as_frigate_accepts_no_more(recorder: Any) -> None:
    rows = [(index, 0, index + 2, 2, 0.5 + index / 100, 0) for index in range(30)]
    recorder.service.models["finder"] = (FINDER, lambda request: compute(request, rows))
    scores = [found["confidence"] for found in recorder.post(PATH, *form(image=jpeg())).json["predictions"]]
    assert len(scores) == 20
    assert min(scores) == pytest.approx(0.6)


def test_an_image_without_objects_is_no_error(recorder: Any) -> None:
    recorder.service.models["finder"] = (FINDER, lambda request: compute(request, [(0, 0, 0, 0, 0, 0)]))
    assert recorder.post(PATH, *form(image=jpeg())).json == {"success": True, "predictions": []}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"image": b"no picture"}, "model 'finder', image for input 'pixels'"),
        ({"image": b""}, "expected a form with a file named 'image', given 'image'"),
        ({"picture": b"x"}, "expected a form with a file named 'image', given 'picture'"),
        ({"image": b"x", "min_confidence": b"high"}, "expected min_confidence from 0 to 1, given 'high'"),
        ({"image": b"x", "min_confidence": b"nan"}, "expected min_confidence from 0 to 1, given 'nan'"),
        ({f"field{index}": b"x" for index in range(17)}, "must have 1 to 16 parts"),
    ],
)
def test_errors_of_a_form_have_deepstacks_format(recorder: Any, parts: dict[str, bytes], message: str) -> None:
    reply = recorder.post(PATH, *form(**parts))
    assert (reply.status, reply.json["success"]) == (400, False)
    assert message in reply.json["error"]


def test_a_body_that_is_no_form_is_refused(recorder: Any) -> None:
    for headers in ({"Content-Type": "image/jpeg"}, {}, {"Content-Type": "multipart/form-data"}):
        reply = recorder.post(PATH, jpeg(), headers)
        assert (reply.status, reply.json["success"]) == (400, False)
        assert "multipart/form-data" in reply.json["error"]


def test_a_body_above_the_size_limit_is_refused(open_site: Any) -> None:
    small = open_site(max_input_size_bytes=1000)
    serve(small, finder={})
    assert small.post(PATH, *form(image=bytes(2000))).status == 400


def test_the_model_is_the_declared_the_only_detector_or_the_one_in_the_path(site: Any) -> None:
    def asked(path: str = PATH) -> tuple[int, str]:
        reply = site.post(path, *form(image=jpeg()))
        return reply.status, site.service.requests[-1].model if reply.status == 200 else reply.json["error"]

    serve(site)
    status, words = asked()
    assert (status, "given none" in words) == (404, True)
    serve(site, one={})
    assert asked() == (200, "one")
    serve(site, one={}, two={})
    status, words = asked()
    assert status == 404
    assert "expected one ready model with the parameter 'deepstack: true'" in words
    assert "given 'one', 'two'" in words
    assert asked("/v1/vision/custom/one") == (200, "one")
    serve(site, one={}, two={"deepstack": "true"})
    assert asked() == (200, "two")
    serve(site, one={"deepstack": "true"}, two={"deepstack": "true"})
    assert asked()[0] == 404


@pytest.mark.parametrize("path", ["/v1/vision/custom/list", "//v1/vision/custom/list"])
def test_blue_iris_gets_the_names_of_the_detectors(recorder: Any, path: str) -> None:
    reply = recorder.post(path, b"")
    assert (reply.status, reply.json) == (200, {"success": True, "models": ["finder"]})


def test_a_base_url_that_ends_in_a_slash_makes_no_difference(recorder: Any) -> None:
    for path in (PATH, "/v1/vision/custom/finder"):
        found = recorder.post(f"/{path}", *form(image=jpeg()))
        assert (found.status, found.json) == (200, recorder.post(path, *form(image=jpeg())).json)


def test_a_named_model_must_be_loaded_and_detect_objects(recorder: Any) -> None:
    for name, status, words in (
        ("nothing", 404, "unknown model: 'nothing'"),
        ("image", 400, "model 'image' does not detect objects: its configuration has no parameter 'detection_head'"),
        ("add", 400, "model 'add' does not detect objects"),
        ("repeat", 501, "decoupled"),
    ):
        reply = recorder.post(f"/v1/vision/custom/{name}", *form(image=jpeg()))
        assert (reply.status, reply.json["success"]) == (status, False)
        assert words in reply.json["error"]


def test_a_refusal_of_the_governor_has_a_retry_time(recorder: Any) -> None:
    def too_hot(request: Request) -> list[Response]:
        return [Response(request.model, 1, request.id, error=Throttled("too hot", retry_after_s=2.5))]

    recorder.service.models["finder"] = (FINDER, too_hot)
    reply = recorder.post(PATH, *form(image=jpeg()))
    assert (reply.status, reply.headers["Retry-After"], reply.json) == (
        429,
        "3",
        {"success": False, "error": "too hot"},
    )


@pytest.mark.parametrize("path", [PATH, "/v1/vision/custom/finder"])
def test_a_page_of_another_site_gets_nothing(recorder: Any, path: str) -> None:
    body, headers = form(image=jpeg())
    reply = recorder.post(path, body, {**headers, "Origin": "http://evil.example"})
    assert (reply.status, recorder.service.requests) == (403, [])
