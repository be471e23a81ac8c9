"""Zones of a camera, read and changed over HTTP in the installed server."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[4] / "model_repository"
CAMERAS = """# by hand
[[sources]]
name = "door"
url = "pattern"
model = "face_detection_yunet"
fps = 2

[[sources.zones]]
name = "yard"

[[sinks]]
name = "log"
url = "{log}"
required_zones = ["yard"]
"""
TIMEOUT_S = 60.0
"""How long a test waits for what must happen; only a failing one waits that long."""
ZONE = {"name": "yard", "points": [[0, 0], [1, 0], [0.5, 1]], "classes": ["face"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cameras")
    (path / "cameras.toml").write_text(CAMERAS.format(log=path / "log.jsonl"))
    return path


@pytest.fixture(scope="module")
def http(start_server, folder):
    return start_server(
        MODELS, "--load-model=face_detection_yunet", "--model-control-mode=explicit",
        f"--sources-file={folder / 'cameras.toml'}", "--source=name=flag,url=pattern,model=face_detection_yunet,fps=2",
        f"--state-dir={folder / 'state'}", environment=dict(os.environ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def ask(http):
    """Return a function that sends a request, and returns the status and the JSON object of the answer."""

    def send(source: str, body: object = None, **headers: str):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://{http}/edge/v1/cameras/{source}/zones", data, headers, method="PUT" if data else "GET"
        )
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    return send


def test_a_change_is_in_the_file_and_used_at_once(ask, folder):
    line = {"name": "gate", "points": [[0, 0.5], [1, 0.5]]}
    status, answer = ask("door", {"zones": [ZONE], "lines": [line]})
    assert (status, answer["stored_in"]) == (200, "sources_file")
    assert (answer["zones"], answer["lines"]) == ([ZONE], [line])
    assert ask("door")[1]["zones"] == [ZONE]
    text = (folder / "cameras.toml").read_text()
    assert text.startswith("# by hand")
    assert "[[sources.lines]]" in text


def test_zones_of_a_source_without_a_file_are_kept_in_the_state_folder(ask, folder):
    assert ask("flag", {"zones": [ZONE]})[1]["stored_in"] == "state_folder"
    assert json.loads((folder / "state/camera_zones.json").read_text())["flag"]["zones"] == [ZONE]


def test_a_zone_whose_sides_cross_is_taken_and_reported(ask, http):
    def wait_for(reason: str) -> None:
        until = time.monotonic() + TIMEOUT_S
        found = None
        while found != reason and time.monotonic() < until:
            time.sleep(0.02)
            with urllib.request.urlopen(f"http://{http}/edge/v1/cameras") as answer:
                (found,) = (item["reason"] for item in json.load(answer)["sources"] if item["name"] == "flag")
        assert found == reason

    assert ask("flag", {"zones": [{**ZONE, "points": [[0, 0], [1, 1], [1, 0], [0, 1]]}]})[0] == 200
    wait_for("zone 'yard': its sides cross each other, is the order of its points right?")
    assert ask("flag", {"zones": [ZONE]})[0] == 200
    wait_for("")


@pytest.mark.parametrize(
    ("source", "body", "status", "reason"),
    [
        ("nobody", {"zones": []}, 404, "the server opens no camera 'nobody'"),
        ("door", {"zones": [{"name": "yard", "points": [[0, 0]]}]}, 400, "zone 'yard': points: expected at least 3"),
        ("door", {"zones": {}}, 400, "expected tables [[sources.zones]]"),
        ("door", {"zone": []}, 400, "unexpected member 'zone', expected zones, lines"),
        ("door", {"zones": [{"name": f"z{number}"} for number in range(33)]}, 400, "at most 32 zones, given 33"),
        ("door", {"zones": [{"name": "lawn"}]}, 400, "sink 'log': no source has the zone 'yard'"),
    ],
)
def test_a_wrong_change_is_refused_with_its_reason_and_changes_nothing(ask, folder, source, body, status, reason):
    if source == "door":
        assert ask("flag", {"zones": []})[0] == 200
    before = (folder / "cameras.toml").read_text()
    found, answer = ask(source, body)
    assert found == status
    assert reason in answer["error"]
    assert (folder / "cameras.toml").read_text() == before


def test_a_page_of_another_site_cannot_change_zones(ask):
    assert ask("door", {"zones": [ZONE]}, Origin="http://elsewhere.example")[0] == 403
