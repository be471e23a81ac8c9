"""The HTTP server of the page: files, what changed, and who may lead rollouts."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_server.plugins.fleet.page import page_server
from edge_server.plugins.fleet.page.fleet_state import FleetState
from edge_server.plugins.fleet.page.page_server import PageServer
from edge_server.plugins.fleet.page.rollout_state import RolloutState
from edge_server.plugins.fleet.reports.box_report import BoxReport
from tests.plugins.fleet.page.stand_in_boxes import StandIn, followed
from tests.plugins.fleet.page.test_box_record import report_of

FILES = sorted((Path(page_server.__file__).parent / "files").iterdir())
KEY = "k" * 32


class Site:
    """The page in a thread. `ask` returns status, headers and body."""

    def __init__(self, boxes: list[StandIn], rollouts: RolloutState, key: str = "") -> None:
        self.state = FleetState()
        self.keys = [f"http://{box.name}:8000" for box in boxes]
        self.state.set_boxes(self.keys)
        for name, box in zip(self.keys, boxes, strict=True):
            self.state.set_report(BoxReport(name, "", report_of(box)))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = PageServer(self.state, rollouts, key, lambda: "")
        self.port: int = self._run(self.server.start("127.0.0.1", 0))

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> SimpleNamespace:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        data = None if body is None else json.dumps(body)
        if data is not None:
            sent.setdefault("Content-Type", "application/json")
        connection.request(method, path, data, sent)
        reply = connection.getresponse()
        found = SimpleNamespace(status=reply.status, headers=reply.headers, body=reply.read())
        connection.close()
        return found

    def fleet(self, query: str = "") -> Any:
        return json.loads(self.ask("GET", f"/edge/v1/fleet{query}").body)

    def close(self) -> None:
        self._run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def open_site() -> Iterator[Callable[..., Site]]:
    sites = []

    def start(boxes: list[StandIn], rollouts: RolloutState | None = None, key: str = "") -> Site:
        sites.append(Site(boxes, rollouts or RolloutState(), key))
        return sites[-1]

    yield start
    for site in sites:
        site.close()


@pytest.fixture
def site(open_site: Callable[..., Site]) -> Site:
    return open_site([StandIn("box-0"), StandIn("box-1")])


def test_the_page_and_each_file_are_served_with_a_strict_policy(site: Site) -> None:
    for path in FILES:
        reply = site.ask("GET", "/" if path.name == "index.html" else f"/page/fleet/{path.name}")
        assert (reply.status, reply.body) == (200, path.read_bytes())
        assert "default-src 'self'" in reply.headers["Content-Security-Policy"]
        assert not re.search(r"unsafe|https?:|\*", reply.headers["Content-Security-Policy"])
    for name in ("style.css", "dom.js", "api.js", "key.js", "icon.svg"):
        assert site.ask("GET", f"/page/{name}").status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/page/fleet/..%2fpage_server.py",
        "/page/fleet/page_server.py",
        "/page/..%2fplugin.py",
        "/page/fleet/none.js",
        "/etc",
        "/v2",
    ],
)
def test_no_other_file_is_served(site: Site, path: str) -> None:
    assert site.ask("GET", path).status == 404


def test_no_file_names_another_site() -> None:
    for path in FILES:
        assert set(re.findall(r"https?://[\w./]+", path.read_text())) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<style|style=|<script(?![^>]*src=)| on\w+=", FILES[0].with_name("index.html").read_text())


def test_the_files_have_at_most_50_kb() -> None:
    assert sum(path.stat().st_size for path in FILES) <= 50_000


def test_changes_are_asked_by_revision_and_run(site: Site) -> None:
    found = site.fleet()
    assert [box["name"] for box in found["boxes"]] == ["box-0", "box-1"]
    assert site.fleet(f"?after={found['revision']}&run={found['run']}")["boxes"] == []
    assert len(site.fleet(f"?after={found['revision']}&run=another")["boxes"]) == 2
    assert site.ask("GET", "/edge/v1/fleet?after=x").status == 400


def test_a_thousand_forged_reports_make_no_answer_of_megabytes(open_site: Callable[..., Site]) -> None:
    boxes = []
    for number in range(1000):
        models = {
            f"m{number}-{place}": followed(f"m{number}-{place}", 2, state="failed", reason="x" * 450, installed=0)
            for place in range(8)
        }
        boxes.append(StandIn(f"box-{number}", models))
    site = open_site(boxes)
    names: set[str] = set()
    revision, run, is_complete = 0, "", False
    while not is_complete:
        reply = site.ask("GET", f"/edge/v1/fleet?after={revision}&run={run}")
        assert len(reply.body) < 700_000
        found = json.loads(reply.body)
        names.update(box["name"] for box in found["boxes"])
        revision, run, is_complete = found["revision"], found["run"], found["is_complete"]
        assert len(found["releases"]) == 100
        assert "100 of 8000 releases are shown" in found["problem"]
    assert len(names) == 1000


def test_the_refusal_of_a_host_names_the_flag_of_the_page(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    reply = site.ask("GET", "/", Host="evil.example")
    assert reply.status == 421
    refused = site.ask("POST", "/edge/v1/rollouts/x/stop", {}, Host="fleet.example", Origin="http://fleet.example")
    assert b"--page-allowed-host=evil.example adds this one" in reply.body
    assert "--page-allowed-host=evil.example admits it" in caplog.text
    foreign = site.ask("POST", "/edge/v1/rollouts/x/stop", {}, Origin="http://evil.example")
    assert foreign.status == 403
    for text in (reply.body, refused.body, foreign.body, caplog.text.encode()):
        assert b"--http-" not in text


def test_the_names_of_a_releases_boxes_have_a_bound(open_site: Callable[..., Site]) -> None:
    boxes = [
        StandIn(f"box-{number}", {"m": followed("m", 2, state="failed", reason=f"{number}" + "x" * 480, installed=1)})
        for number in range(300)
    ]
    (release,) = open_site(boxes).fleet()["releases"]
    assert release["failed_count"] == 300
    assert 100 < len(release["failed"]) <= 200


def test_without_a_repository_the_boxes_say_which_releases_there_are(open_site: Callable[..., Site]) -> None:
    boxes = [StandIn(f"box-{number}") for number in range(4)]
    boxes[1].models["detector"] = followed("detector", 3)
    boxes[2].models["detector"] = followed("detector", 3, state="failed", reason="too slow", installed=2)
    boxes[3].models = {"../x": {**followed("x", 1), "wanted": "no release"}}
    (release,) = open_site(boxes).fleet()["releases"]
    assert (release["release"], release["installed_count"], release["failed"]) == (
        "detector/3",
        1,
        [["box-2", "too slow"]],
    )
    assert release["digest"] == f"{3:064x}"
    assert not release["is_led"]


@pytest.fixture
def signed(tmp_path: Path) -> SimpleNamespace:
    pytest.importorskip("tuf")
    from edge_server.plugins.fleet.publish import command as publish_command

    models, repository, keys = tmp_path / "models", tmp_path / "site", tmp_path / "keys"
    (models / "detector" / "1").mkdir(parents=True)
    (models / "rollout.toml").write_text('waves = ["box-0", "box-0, box-1", "all"]\n')

    def publish() -> None:
        publish_command.run([str(models), str(repository), f"--keys={keys}"])

    for text in ("one", "two"):
        (models / "detector" / "1" / "model.py").write_text(text)
        (models / "detector" / "config.pbtxt").write_text('backend: "python"\n')
        publish()
    return SimpleNamespace(repository=repository, keys=keys, publish=publish, models=models)


def order(site: Site, action: str, wave: int = 0, *, release: str = "detector/2", **headers: str) -> SimpleNamespace:
    headers.setdefault("Authorization", f"Bearer {KEY}")
    return site.ask("POST", f"/edge/v1/rollouts/detector/{action}", {"release": release, "wave": wave}, **headers)


def test_a_rollout_is_continued_stopped_and_rolled_back(
    open_site: Callable[..., Site], signed: SimpleNamespace
) -> None:
    boxes = [StandIn("box-0"), StandIn("box-1"), StandIn("box-2")]
    site = open_site(boxes, RolloutState(signed.repository, signed.keys), KEY)
    (release,) = site.fleet()["releases"]
    assert (release["release"], release["wave"], release["can_continue"], release["is_led"]) == (
        "detector/2",
        0,
        True,
        True,
    )
    assert json.loads(order(site, "continue").body) == {"changes": ["detector/2: wave 2 of 3, box-0, box-1"]}
    (release,) = site.fleet()["releases"]
    assert (release["wave"], release["installed_count"]) == (1, 2)

    repeated = order(site, "continue")
    assert (repeated.status, b"look again" in repeated.body) == (400, True)
    changes = ["detector/2: stopped; boxes that have it keep it (2 reported)"]
    assert json.loads(order(site, "stop", 1).body) == {"changes": changes}
    assert site.fleet()["releases"][0]["is_stopped"]
    assert json.loads(order(site, "rollback", 1).body) == {"changes": ["detector/2: withdrawn"]}
    assert site.fleet()["releases"][0]["release"] == "detector/1"


def test_a_wave_with_a_failed_box_is_not_continued(open_site: Callable[..., Site], signed: SimpleNamespace) -> None:
    box = StandIn("box-0", {"detector": followed("detector", 2, state="failed", reason="too slow", installed=1)})
    site = open_site([box], RolloutState(signed.repository, signed.keys), KEY)
    (release,) = site.fleet()["releases"]
    assert (release["failed"], release["can_continue"]) == ([["box-0", "too slow"]], False)
    refused = order(site, "continue")
    assert (refused.status, b"none that waits or failed" in refused.body) == (400, True)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer guess"}, 401),
        ({"Authorization": ""}, 401),
        ({"Origin": "https://evil.example"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Host": "evil.example"}, 421),
        ({"Content_Type": "text/plain"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
    ],
)
def test_orders_of_other_pages_and_without_the_key_are_refused(
    open_site: Callable[..., Site], signed: SimpleNamespace, headers: dict[str, str], status: int
) -> None:
    site = open_site([StandIn("box-0")], RolloutState(signed.repository, signed.keys), KEY)
    assert order(site, "rollback", **headers).status == status
    assert site.fleet()["releases"][0]["release"] == "detector/2"


def test_the_own_page_may_order(open_site: Callable[..., Site], signed: SimpleNamespace) -> None:
    site = open_site([StandIn("box-0")], RolloutState(signed.repository, signed.keys), KEY)
    assert order(site, "stop", Origin=f"http://127.0.0.1:{site.port}", Sec_Fetch_Site="same-origin").status == 200


@pytest.mark.parametrize(
    "body", [[], {}, {"release": 1, "wave": 0}, {"release": "detector/2", "wave": True}, {"release": "detector/2"}]
)
def test_an_order_of_another_form_is_refused(
    open_site: Callable[..., Site], signed: SimpleNamespace, body: Any
) -> None:
    site = open_site([StandIn("box-0")], RolloutState(signed.repository, signed.keys), KEY)
    reply = site.ask("POST", "/edge/v1/rollouts/detector/stop", body, Authorization=f"Bearer {KEY}")
    assert reply.status == 400


def test_without_keys_nobody_may_order(open_site: Callable[..., Site], signed: SimpleNamespace) -> None:
    site = open_site([StandIn("box-0")], RolloutState(signed.repository))
    assert not json.loads(site.ask("GET", "/edge/v1/page").body)["takes_tokens"]
    for authorization in (f"Bearer {KEY}", "Bearer "):
        assert order(site, "stop", Authorization=authorization).status == 403


def test_unknown_actions_and_methods_are_refused(open_site: Callable[..., Site], signed: SimpleNamespace) -> None:
    site = open_site([StandIn("box-0")], RolloutState(signed.repository, signed.keys), KEY)
    assert order(site, "status").status == 400
    assert site.ask("GET", "/edge/v1/rollouts/detector/stop").status == 405


def test_a_new_release_is_seen_without_a_restart(open_site: Callable[..., Site], signed: SimpleNamespace) -> None:
    rollouts = RolloutState(signed.repository)
    site = open_site([StandIn("box-0")], rollouts)
    (signed.models / "detector" / "1" / "model.py").write_text("three")
    signed.publish()
    rollouts.refresh()
    assert site.fleet()["releases"][0]["release"] == "detector/3"
    (signed.repository / "metadata" / "timestamp.json").write_text("damaged")
    rollouts.refresh()
    assert "timestamp.json" in site.fleet()["problem"]
