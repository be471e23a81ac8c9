"""The page's files, what it may show to whom, and the OpenAPI document."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edge_server.config import CATEGORIES, RestrictedGroup, parse_serve
from edge_server.frontends.access_control import picture_access
from edge_server.frontends.auth_tokens import Tokens

FOLDER = Path(__file__).parents[3] / "edge_server/plugins/dashboard/page"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".html", ".css", ".js", ".svg"))
GUARDED = (RestrictedGroup(("model-repository", "view"), "x-key", "s3cret"),)


def test_the_page_comes_with_a_strict_policy(site: Any) -> None:
    for path in ("/", "/docs/api"):
        reply = site.get(path)
        assert (reply.status, reply.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        policy = dict(part.strip().split(" ", 1) for part in reply.headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'self'"
        assert not re.search(r"unsafe|https?:|\*", str(policy))
        assert reply.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file_is_served_and_names_no_other_site(site: Any, path: Path) -> None:
    reply = site.get(f"/page/{path.name}")
    assert (reply.status, reply.body) == (200, path.read_bytes())
    assert set(re.findall(r"https?://[\w./]+", path.read_text())) <= {"http://www.w3.org/2000/svg"}
    if path.suffix == ".html":
        assert not re.search(r"<style|style=|<script(?![^>]*src=)| on\w+=", path.read_text())


def test_all_files_together_have_at_most_150_kb() -> None:
    assert sum(path.stat().st_size for path in FILES) <= 150_000


@pytest.mark.parametrize("name", ["__init__.py", "..%2findex.html", "%2e%2e", "none.js", "%00.js", "%2fetc%2fpasswd"])
def test_no_other_file_is_served(site: Any, name: str) -> None:
    reply = site.get(f"/page/{name}")
    assert (reply.status, "has no file" in reply.error) == (404, True)


def test_nothing_for_pages_and_pictures_is_imported_before_somebody_asks() -> None:
    code = "import sys, edge_server.process.http_routes; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    late = (
        "edge_server.frontends.http.openapi",
        "edge_server.plugins.cameras.streams",
        "edge_server.plugins.vision",
        "aiohttp",
        "cv2",
    )
    assert [name for name in loaded if name.startswith(late)] == []


def test_every_route_is_in_the_openapi_document(site: Any) -> None:
    document = site.get("/openapi.json").json
    paths = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    router = site.frontend._router
    assert paths == {(route.method, route.path) for route in router.routes}
    assert all(route.summary for route in router.routes)
    # What the document names is what the server answers.
    for method, path in paths:
        route, names = router.find(method, re.sub(r"\{(\w+)\}", r"\1", path))
        operation = document["paths"][path][method.lower()]
        assert operation["summary"] == route.summary
        declared = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
        assert declared == set(names)
    ids = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
    assert len(set(ids)) == len(ids)


@pytest.mark.full
def test_the_openapi_document_is_valid(site: Any) -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(site.get("/openapi.json").json)


def test_without_keys_the_page_shows_everything_here_and_changes_nothing(site: Any) -> None:
    found = site.get("/edge/v1/page").json
    assert found["allowed"] == dict.fromkeys(CATEGORIES, True)
    assert not found["may_change_models"]
    assert (found["takes_tokens"], found["key_headers"], found["metrics_port"]) == (False, [], None)


def test_with_a_key_the_page_may_change_models(open_site: Any) -> None:
    site = open_site(restricted=GUARDED)
    closed = site.get("/edge/v1/page").json
    assert not closed["may_change_models"]
    assert [name for name, is_allowed in closed["allowed"].items() if not is_allowed] == ["model-repository", "view"]
    assert closed["key_headers"] == ["x-key"]
    for key in ("wrong", "s3cret"):
        found = site.get("/edge/v1/page", headers={"x-key": key}).json
        assert found["may_change_models"] == found["allowed"]["view"] == (key == "s3cret")


def test_the_version_needs_what_the_metadata_need(open_site: Any) -> None:
    site = open_site(restricted=(RestrictedGroup(("metadata", "health"), "x-key", "s3cret"),))
    found = site.get("/edge/v1/page").json
    assert (found["version"], found["is_ready"]) == ("", None)
    found = site.get("/edge/v1/page", headers={"x-key": "s3cret"}).json
    assert (found["version"], found["is_ready"]) == ("1.2.3", True)


def test_guessed_tokens_at_the_page_are_counted(open_site: Any, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"anna {hashlib.sha256(b'word').hexdigest()} model-repository\n")
    tokens = Tokens(str(file))
    site = open_site(tokens=tokens)
    assert site.get("/edge/v1/page").json["takes_tokens"]
    assert "edge_auth_refused_total{" not in "".join(tokens.families()[1].render())
    assert not site.get("/edge/v1/page", headers={"Authorization": "Bearer guess"}).json["may_change_models"]
    assert 'edge_auth_refused_total{category="model-repository"}' in "".join(tokens.families()[1].render())
    assert site.get("/edge/v1/page", headers={"Authorization": "Bearer word"}).json["may_change_models"]


def test_activity_counts_requests_and_tokens(site: Any) -> None:
    found = site.get("/edge/v1/activity").json
    assert found["models"][0]["name"] == "add"
    assert found["models"][0]["succeeded"] == 2
    assert found["tokens"] == {"chat": {"prompt": 3, "generated": 7, "running": 1, "waiting": 0}}


def test_an_image_is_answered_with_classes(site: Any) -> None:
    body = (Path(__file__).parents[2] / "data/coffee.jpg").read_bytes()
    reply = site.post("/edge/v1/models/image/perception", body, headers={"Content-Type": "image/jpeg"})
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
def test_what_is_no_image_or_no_model_for_images_is_refused(
    site: Any, model: str, body: bytes, status: int, text: str
) -> None:
    reply = site.post(f"/edge/v1/models/{model}/perception", body)
    assert (reply.status, text in reply.error) == (status, True), reply.error


OPEN = "--http-address=0.0.0.0"


@pytest.mark.parametrize(
    ("flags", "needs_token", "told"),
    [
        ([], False, ""),
        ([OPEN, "--allow-http=false"], False, ""),
        ([OPEN], False, "camera pictures: this machine only; --view-open shows them to others"),
        ([OPEN, "--view-open"], False, "any machine sees camera pictures without a key: --view-open"),
        ([OPEN, "--view-open"], True, "camera pictures need a key"),
        ([OPEN, "--http-restricted-api=view:k=v"], False, "camera pictures need a key"),
    ],
)
def test_the_start_line_says_who_sees_camera_pictures(flags: list[str], needs_token: bool, told: str) -> None:
    config = parse_serve(["--model-repository=/m", *flags], {}).config
    assert picture_access(config, needs_token=needs_token) == told
