"""Images over HTTP: as bodies of inference requests, alone and in forms, and the results of an image file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edge_server.config import HttpConfig
from edge_server.errors import InvalidRequest
from edge_server.frontends.http.multipart_form import form_parts
from edge_server.plugins.vision.plugin import Vision
from tests.frontends.conftest import Site, StubService

PERCEPTION = "/edge/v1/models/image/perception"


@pytest.fixture
def site():
    service, vision = StubService(), Vision()
    vision.build(SimpleNamespace(service=service))
    started = Site(service, HttpConfig(port=0), None, vision.routes(), vision.body_decoders)
    yield started
    started.close()


@pytest.fixture
def png() -> bytes:
    cv2 = pytest.importorskip("cv2")
    picture = np.zeros((4, 4, 3), np.uint8)
    picture[:, :, 1] = 200
    picture[:, :, 2] = 100
    return cv2.imencode(".png", picture)[1].tobytes()


def test_an_image_body_is_answered_with_the_best_labels(site, png):
    reply = site.post("/v2/models/image/infer", png, {"Content-Type": "image/png"})
    assert reply.status == 200
    assert reply.json["outputs"] == [
        {
            "name": "scores",
            "datatype": "BYTES",
            "shape": [1, 2],
            "data": ["200.000000:1:green", "100.000000:0:red"],
        }
    ]


def test_images_that_cannot_be_used_are_refused_by_name(site, png):
    damaged = site.post("/v2/models/image/infer", png[:40], {"Content-Type": "image/png"})
    assert damaged.status == 400
    assert "model 'image'" in damaged.error
    none = site.post("/v2/models/float/infer", png, {"Content-Type": "image/jpeg"})
    assert none.status == 400
    assert "model 'float' does not take an image as a body" in none.error
    assert "'image_...'" in none.error


FORM = {"Content-Type": 'multipart/form-data; boundary="x+y"'}


def form(*parts):
    head = b'Content-Disposition: form-data; name="image"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'
    return b"".join(b"--x+y\r\n" + head + part + b"\r\n" for part in parts) + b"--x+y--\r\n"


def test_an_image_may_come_as_the_one_file_of_a_form(site, png):
    plain = site.post("/v2/models/image/infer", png, {"Content-Type": "image/png"})
    reply = site.post("/v2/models/image/infer", form(png), FORM)
    assert (reply.status, reply.json["outputs"]) == (200, plain.json["outputs"])
    assert site.post(PERCEPTION, form(png), FORM).json == site.post(PERCEPTION, png).json
    refused = site.post(PERCEPTION, form(b"GIF89a"), FORM)
    assert "expected a JPEG, PNG, BMP or WebP image, given 6 bytes beginning with 0x474946383961" in refused.error


@pytest.mark.parametrize(
    "body", [b"", b"x", form(), form(b"a", b"b"), form(b"a")[:-6], b"--x+y\r\n--x+y--\r\n", b"--x+y--\r\n--x+y\r\n"]
)
def test_a_form_that_is_not_one_file_is_refused(site, body):
    reply = site.post("/v2/models/image/infer", body, FORM)
    assert reply.status == 400
    assert reply.error.startswith("a body of type multipart/form-data must have ")
    bare = site.post("/v2/models/image/infer", form(b"a"), {"Content-Type": "multipart/form-data"})
    assert bare.status == 400


@pytest.mark.parametrize(
    "parameter",
    [
        "; boundary*=\u07dd\xff", "; boundary*0=a; boundary*=b", "; boundary=\u00e4\udcff", '; boundary="',
        "; boundary*=''x", "; boundary=" + "x" * 5000,
    ],
)  # fmt: skip
def test_a_content_type_that_cannot_be_read_is_a_clients_error(parameter):
    with pytest.raises(InvalidRequest, match="must have 1 to 16 parts"):
        form_parts(form(b"a"), f"multipart/form-data{parameter}")


@pytest.mark.parametrize(
    "parameter", ['; charset=x; Boundary = "x+y"', ";boundary=x+y; a=b", r'; boundary="x\+y"', "; boundary=x+y ;a"]
)
def test_a_boundary_is_a_token_or_a_quoted_string(parameter):
    assert form_parts(form(b"a"), f"multipart/form-data{parameter}") == [("image", b"a")]


def test_an_image_is_answered_with_classes(site):
    body = (Path(__file__).parents[2] / "data/coffee.jpg").read_bytes()
    reply = site.post(PERCEPTION, body, headers={"Content-Type": "image/jpeg"})
    assert reply.status == 200, reply.body
    assert (reply.json["width"], reply.json["height"], reply.json["detections"]) == (600, 400, [])
    assert {item["label"] for item in reply.json["classes"]} <= {"red", "green", "blue"}
    assert len(reply.json["classes"]) == 2


@pytest.mark.parametrize(
    ("model", "body", "status", "text"),
    [
        ("image", b"not a picture", 400, "image"),
        ("image", b"", 400, "image"),
        ("add", b"x", 400, "does not give classes or detections"),
        ("absent", b"x", 404, "unknown model"),
    ],
)
def test_an_invalid_image_or_a_model_without_image_input_is_refused(site, model, body, status, text):
    reply = site.post(f"/edge/v1/models/{model}/perception", body)
    assert (reply.status, text in reply.error) == (status, True), reply.error


def test_a_page_of_another_site_gets_no_results(site):
    for content_type in ("image/jpeg", "text/plain"):
        reply = site.post(PERCEPTION, b"x", {"Origin": "http://evil.example", "Content-Type": content_type})
        assert (reply.status, site.service.requests) == (403, [])
        assert "--http-allowed-origin" in reply.error
