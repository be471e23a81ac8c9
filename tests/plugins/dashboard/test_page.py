"""The page's files, and which clients may see what."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from edge_server.config import CATEGORIES, RestrictedGroup
from edge_server.frontends.auth_tokens import Tokens
from edge_server.frontends.http import access_check
from edge_server.plugins.dashboard import page_endpoints
from edge_server.plugins.vision import draw

PLUGINS = Path(__file__).parents[3] / "edge_server/plugins"
FILES = sorted((PLUGINS / "dashboard/page").iterdir())
PANELS = sorted(PLUGINS.glob("*/panel*.js"))
GUARDED = (RestrictedGroup(("model-repository", "view"), "x-key", "s3cret"),)


def test_the_page_has_a_strict_content_security_policy(site: Any) -> None:
    for path in ("/", "/docs/api"):
        reply = site.get(path)
        assert (reply.status, reply.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        policy = dict(part.strip().split(" ", 1) for part in reply.headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'self'"
        assert not re.search(r"unsafe|https?:|\*", str(policy))
        assert reply.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file_is_served(site: Any, path: Path) -> None:
    reply = site.get(f"/page/{path.name}")
    assert (reply.status, reply.body) == (200, path.read_bytes())


def test_the_panels_of_plugins_are_listed_and_served(site: Any) -> None:
    assert site.get("/edge/v1/page").json["panels"] == ["site"]
    reply = site.get("/page/site/panel.js")
    assert (reply.status, reply.body) == (200, b"export const id = 'site';")
    assert reply.headers["Content-Type"] == "text/javascript; charset=utf-8"
    assert site.get("/page/site/panel_more.js").body == b"export const more = 1;"


@pytest.mark.parametrize("path", ["site/plugin.js", "site/panel.py", "site/panel%2f..%2fplugin.js", "none/panel.js"])
def test_no_other_file_of_a_plugin_is_served(site: Any, path: str) -> None:
    assert site.get(f"/page/{path}").status == 404


@pytest.mark.parametrize("path", [*FILES, *PANELS], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_file_names_another_site(path: Path) -> None:
    assert set(re.findall(r"https?://[\w./]+", path.read_text())) <= {"http://www.w3.org/2000/svg"}
    if path.suffix == ".html":
        assert not re.search(r"<style|style=|<script(?![^>]*src=)| on\w+=", path.read_text())


def test_all_files_together_are_at_most_250_kb() -> None:
    assert sum(path.stat().st_size for path in [*FILES, *PANELS]) <= 250_000


@pytest.mark.parametrize("name", ["__init__.py", "..%2findex.html", "%2e%2e", "none.js", "%00.js", "%2fetc%2fpasswd"])
def test_no_other_file_is_served(site: Any, name: str) -> None:
    reply = site.get(f"/page/{name}")
    assert (reply.status, "has no file" in reply.error) == (404, True)


def test_the_page_draws_boxes_in_the_colours_of_the_server() -> None:
    found = re.findall(r'"(#[0-9a-f]{6})"', (PLUGINS / "dashboard/page/draw.js").read_text().partition("];")[0])
    assert found == [f"#{red:02x}{green:02x}{blue:02x}" for blue, green, red in draw._COLORS.tolist()]


def test_the_documents_are_served_as_markdown(site: Any) -> None:
    assert site.get("/docs").status == 200
    docs = PLUGINS.parents[1] / "docs"
    for path in (docs / "README.md", docs / "reference/commands.md"):
        reply = site.get(f"/docs/text/{path.name}")
        assert (reply.status, reply.body) == (200, path.read_bytes())
    assert site.get("/edge/v1/page").json["has_documents"]


@pytest.mark.parametrize(
    "name", ["generate.py", "..%2fREADME.md", "none.md", "examples%2fREADME.md", "%2fetc%2fpasswd"]
)
def test_no_other_file_is_a_document(site: Any, name: str) -> None:
    assert site.get(f"/docs/text/{name}").status == 404


def test_without_the_documents_the_page_says_so(site: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(page_endpoints, "_DOCUMENTS", tmp_path / "docs")
    assert site.get("/docs/text/README.md").status == 404
    assert not site.get("/edge/v1/page").json["has_documents"]


def test_without_keys_the_page_shows_everything_locally_and_changes_nothing(site: Any) -> None:
    found = site.get("/edge/v1/page").json
    assert found["allowed"] == dict.fromkeys(CATEGORIES, True)
    assert not found["may_change_models"]
    assert (found["takes_tokens"], found["key_headers"], found["metrics_port"]) == (False, [], None)


def test_other_machines_see_no_images_without_a_key(open_site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_check, "is_this_machine", lambda address: False)
    for is_view_open in (False, True):
        allowed = open_site(is_view_open=is_view_open).get("/edge/v1/page").json["allowed"]
        assert (allowed["view"], allowed["statistics"]) == (is_view_open, True)


def test_with_a_key_the_page_may_change_models(open_site: Any) -> None:
    site = open_site(restricted=GUARDED)
    closed = site.get("/edge/v1/page").json
    assert not closed["may_change_models"]
    assert [name for name, is_allowed in closed["allowed"].items() if not is_allowed] == ["model-repository", "view"]
    assert closed["key_headers"] == ["x-key"]
    for key in ("wrong", "s3cret"):
        found = site.get("/edge/v1/page", headers={"x-key": key}).json
        assert found["may_change_models"] == found["allowed"]["view"] == (key == "s3cret")


def test_a_key_is_accepted_if_it_allows_something_that_needs_one(open_site: Any) -> None:
    assert not open_site().get("/edge/v1/page", headers={"x-key": "s3cret"}).json["is_key_accepted"]
    groups = (*GUARDED, RestrictedGroup(("statistics",), "y-key", "other"))
    site = open_site(restricted=groups)
    for key, is_accepted in (("wrong", False), ("s3cret", True), ("other", True)):
        found = site.get("/edge/v1/page", headers={"x-key": key, "y-key": key}).json
        assert found["is_key_accepted"] == is_accepted


def test_the_version_needs_the_same_key_as_the_metadata(open_site: Any) -> None:
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
