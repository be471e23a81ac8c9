"""`edge-server fleet page` in a real browser: servers that follow a signed repository, and stand-ins for many more.

tests/e2e/fetch_chromium.sh fetches the browser; without it the tests skip.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.models import identity_config
from tests.kit.server import COMMAND, serve
from tests.plugins.fleet.page.stand_in_boxes import StandIn, StandIns, followed, mixed_fleet

BROKEN = """
backend: "python"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [1] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [1] }
"""
NAMES = "return [...document.querySelectorAll('[data-box]')].map((one) => one.dataset.box)"
PICK = (
    "const field = document.querySelector(arguments[0]); field.value = arguments[1];"
    "for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind))"
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


@contextlib.contextmanager
def page_of(urls: list[str], folder: Path, *flags: str) -> Iterator[str]:
    """Yield the address of a page of boxes, as the command prints it."""
    boxes = folder / "boxes.txt"
    boxes.write_text("".join(f"{url}\n" for url in urls))
    command = [str(COMMAND), "fleet", "page", f"--boxes={boxes}", "--page-port=0", "--timeout=2", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(2 if any("--keys" in flag for flag in flags) else 1)]
            yield lines[-1].split()[-1]
        finally:
            process.terminate()
            rest = process.stdout.read()
            assert process.wait(30) == 0, rest
            assert "Traceback" not in rest


@contextlib.contextmanager
def shown(browser: Any, fleet: list[StandIn], folder: Path, *flags: str) -> Iterator[None]:
    """Show stand-ins, and wait until each has answered or has not."""
    boxes = StandIns(fleet)
    try:
        with page_of([box.url for box in fleet], folder, *flags) as url:
            browser.look(1280, 900)
            browser.console()
            browser.open(url)
            browser.wait("document.querySelectorAll('[data-box]').length > 0")
            browser.wait("!/asking|connecting/.test(document.querySelector('#fleet-state').textContent)")
            browser.wait(
                "![...document.querySelectorAll('#boxes-rows td.state')].some((cell) => cell.textContent === 'asking')"
            )
            yield
            assert browser.console() == [], "the page leaves nothing in the console"
            browser.open("about:blank")
    finally:
        boxes.close()


def row(name: str) -> str:
    return f"document.querySelector('[data-box=\"{name}\"]')"


def test_servers_show_their_releases_and_a_failed_rollout_is_stopped_on_the_page(browser: Any, tmp_path: Path) -> None:
    pytest.importorskip("tuf")
    models, site = tmp_path / "models", tmp_path / "site"
    (models / "m" / "1").mkdir(parents=True)
    (models / "rollout.toml").write_text('waves = ["box-1", "all"]\n')

    def publish(config: str) -> None:
        (models / "m" / "config.pbtxt").write_text(config)
        command = [str(COMMAND), "publish", "models", "site", "--keys=keys"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)

    publish(identity_config())
    root = tmp_path / "site" / "metadata" / "1.root.json"
    flags = (f"--follow={site.as_uri()}", f"--follow-root={root}", "--follow-interval-secs=1", "--box-groups=yard")
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    with (
        serve(folders[0], *flags, "--box-id=box-1") as first,
        serve(folders[1], *flags, "--box-id=box-2") as second,
        page_of(
            [first.url(""), second.url("")], tmp_path, f"--repository={site}", f"--keys={tmp_path / 'keys'}"
        ) as url,
    ):
        browser.look(1280, 900)
        browser.open(url)
        browser.wait(f"{row('box-1')}?.innerText.includes('m/1')")
        browser.wait(f"{row('box-2')}?.querySelector('td.state').textContent === 'ok'")
        browser.wait("document.querySelector('[data-release=\"m/1\"]').innerText.includes('1 of 2: box-1')")
        assert browser.run("return location.hash") == "", "the key is not kept in the address"
        browser.run("window.confirm = () => true")
        browser.wait("document.querySelector('[data-action=continue]:enabled')")
        browser.click("[data-action=continue]")
        browser.wait(f"{row('box-2')}.innerText.includes('m/1')")

        (models / "m" / "1" / "model.py").write_text("raise RuntimeError('it is broken')")
        publish(BROKEN)
        browser.wait("document.querySelector('[data-release=\"m/2\"]')?.innerText.includes('failed on box-1')")
        assert "it is broken" in browser.run("return document.querySelector('#releases').innerText")
        browser.wait(f"{row('box-1')}.innerText.includes('it serves m/1')")
        browser.click("[data-action=stop]")
        browser.wait("document.querySelector('[data-release=\"m/2\"] .badge').textContent === 'stopped'")
        browser.click("[data-action=rollback]")
        browser.wait("document.querySelector('[data-release=\"m/1\"]')")
        browser.wait("document.querySelector('#fleet-state').textContent === 'all 2 well'")

        # Without the key the same page changes nothing.
        browser.run("sessionStorage.clear()")
        browser.open(url.partition("#")[0])
        browser.wait("document.querySelector('[data-release]')")
        assert not browser.run("return Boolean(document.querySelector('[data-action]:not([hidden])'))")
        browser.open("about:blank")


def test_boxes_in_trouble_are_first_and_are_filtered(browser: Any, tmp_path: Path) -> None:
    with shown(browser, mixed_fleet(50), tmp_path):
        browser.wait("document.querySelector('#fleet-state').textContent === '11 of 50 in trouble'")
        states = browser.run(
            "return [...document.querySelectorAll('#boxes-rows td.state')].map((cell) => cell.textContent)"
        )
        order = ["no answer", "failed", "not ready", "behind", "hot", "unknown", "ok"]
        assert states == sorted(states, key=order.index)
        assert len(states) == 50
        assert "unknown" in states, "and it is none of the 11"
        browser.click("[data-kind=failed]")
        assert sorted(browser.run(NAMES)) == ["box-003", "box-019", "box-028"]
        assert browser.run("return document.querySelector('#boxes-count').textContent") == "3 of 50"
        assert browser.run("return document.querySelector('[data-kind=failed]').getAttribute('aria-pressed')") == "true"
        browser.run(PICK, "#group", "line-4")
        assert sorted(browser.run(NAMES)) == ["box-003", "box-028"]
        browser.click("[data-kind=failed]")
        browser.run(PICK, "#group", "")
        browser.run(PICK, "#search", "clock signed")
        assert browser.run(NAMES) == ["box-017"]
        browser.open(browser.run("return location.href"))
        browser.wait("document.querySelectorAll('[data-box]').length === 1")
        assert browser.run("return document.querySelector('#search').value") == "clock signed"
        browser.run(PICK, "#search", "nothing at all")
        assert browser.run("return document.querySelector('#boxes-empty').textContent") == "No box is like this."
        browser.run(PICK, "#search", "")
        browser.click("#wrong-list button")
        assert len(browser.run(NAMES)) == 2


def test_a_box_changes_without_a_reload_and_the_focus_stays(browser: Any, tmp_path: Path) -> None:
    fleet = [StandIn(f"box-{number}") for number in range(3)]
    with shown(browser, fleet, tmp_path):
        browser.wait("document.querySelector('#fleet-state').textContent === 'all 3 well'")
        browser.run(f"{row('box-1')}.querySelector('button').focus()")
        browser.run("document.activeElement.click()")
        assert "release detector/2" in browser.run(f"return {row('box-1')}.querySelector('.details').innerText")
        fleet[2].models["detector"] = followed("detector", 3, state="failed", reason="too slow", installed=2)
        browser.wait(f"{row('box-2')}.innerText.includes('too slow; it serves detector/2')")
        assert browser.run(NAMES)[0] == "box-2"
        assert browser.run("return document.activeElement.closest('tbody').dataset.box") == "box-1"
        assert browser.run("return document.activeElement.getAttribute('aria-expanded')") == "true"
        assert browser.run("return document.title") == "(1) Fleet - edge-server"
        fleet[2].models["detector"] = followed("detector", 3)
        browser.wait("document.querySelector('#fleet-state').textContent === 'all 3 well'")


def test_a_box_with_unknown_files_is_named_in_words_and_is_in_no_trouble(browser: Any, tmp_path: Path) -> None:
    fleet = [StandIn(f"box-{number}") for number in range(3)]
    fleet[2].knows_files = False
    with shown(browser, fleet, tmp_path):
        browser.wait("document.querySelector('#fleet-state').textContent === '1 of 3 not known to be equal'")
        assert browser.run("return document.title") == "Fleet - edge-server"
        assert browser.run("return document.querySelector('#wrong').hidden")
        assert browser.run("return document.querySelector('[data-kind=trouble]').hidden")
        assert browser.run(NAMES)[0] == "box-2"
        assert browser.run(f"return {row('box-2')}.querySelector('td.state').textContent") == "unknown"
        assert browser.run(f"return {row('box-2')}.querySelector('td.reason').innerText").startswith(
            "not known to be equal: detector: version 1, without the SHA-256 of its files\nIt knows the SHA-256 "
        )
        browser.click("[data-kind=unknown]")
        assert browser.run(NAMES) == ["box-2"]
        fleet[2].knows_files = True
        browser.wait("document.querySelector('#fleet-state').textContent === 'all 3 well'")


def test_the_page_is_used_with_the_keyboard(browser: Any, tmp_path: Path) -> None:
    with shown(browser, mixed_fleet(10), tmp_path):
        browser.type("#search", "box-003")
        browser.wait("document.querySelectorAll('[data-box]').length === 1")
        browser.type("[data-box] button", "\ue007")
        browser.wait("document.querySelector('.details').offsetHeight > 0")
        browser.type("[data-kind=trouble]", " ")
        browser.wait("document.querySelector('[data-kind=trouble]').getAttribute('aria-pressed') === 'true'")


def test_untrusted_texts_are_shown_as_text(browser: Any, tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    box = StandIn(evil, {evil: followed(evil, 2, state="failed", reason=evil, installed=1)}, groups=(evil,))
    box.version = evil
    with shown(browser, [box, StandIn("box-1")], tmp_path):
        browser.wait("document.querySelector('#boxes-rows td.name a')?.textContent === arguments[0]", evil)
        browser.click("#boxes-rows td.actions button")
        assert browser.run("return document.querySelectorAll('main img').length") == 0
        assert evil in browser.run("return document.querySelector('td.groups').textContent")


def test_among_five_hundred_boxes_only_the_changed_row_is_touched(browser: Any, tmp_path: Path) -> None:
    fleet = [StandIn(f"box-{number}") for number in range(500)]
    keeps_ticks = (
        "window.ticks = []; const set = window.setInterval;"
        "window.setInterval = (tick, ms) => { window.ticks.push(tick); return set(tick, ms); };"
    )
    browser.command("Page.enable")
    script = browser.command("Page.addScriptToEvaluateOnNewDocument", source=keeps_ticks)
    # They answer from one process beside the page and the browser: on a busy machine later than after 2 s.
    with shown(browser, fleet, tmp_path, "--timeout=60"):
        browser.wait("document.querySelector('#fleet-state').textContent === 'all 500 well'")
        assert len(browser.run(NAMES)) == 100
        browser.click("#boxes-more")
        assert len(browser.run(NAMES)) == 500
        browser.run("""
        window.touched = new Set();
        new MutationObserver((changes) => changes.forEach(({ target }) => {
          const row = (target.closest ? target : target.parentElement)?.closest("[data-box]");
          if (row) window.touched.add(row.dataset.box);
        })).observe(document.querySelector("#boxes-rows"),
                    { childList: true, subtree: true, characterData: true, attributes: true });
        """)
        fleet[333].heat = ("HOT", 99.0, 0.5)
        browser.wait("document.querySelector('[data-box]').dataset.box === 'box-333'")
        # Neither does what happens each minute touch others: it renews the ages that are shown.
        assert browser.run("window.ticks.forEach((tick) => tick()); return window.ticks.length") == 1
        assert browser.run("return [...window.touched]") == ["box-333"]
    browser.command("Page.removeScriptToEvaluateOnNewDocument", **script)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1920])
def test_axe_reports_no_serious_violation_and_the_page_fits(
    browser: Any, tmp_path: Path, width: int, is_dark: bool
) -> None:
    axe = os.environ.get("EDGE_TEST_AXE", "")
    if not axe:
        pytest.skip("no axe-core: tests/e2e/fetch_chromium.sh fetches it from npm's registry")
    with shown(browser, mixed_fleet(50), tmp_path):
        browser.look(width, 900, is_dark=is_dark)
        browser.wait("document.querySelector('#fleet-state').textContent === '11 of 50 in trouble'")
        browser.click("[data-box] button")
        browser.run(Path(axe).read_text())
        found = browser.run_async("axe.run().then((found) => arguments[0](found.violations))")
        faults = [f"{item['id']}: {[node['html'][:200] for node in item['nodes'][:3]]}" for item in found
                  if item["impact"] in ("serious", "critical")]  # fmt: skip
        assert faults == []
        assert browser.run("return document.documentElement.scrollWidth") <= width


def test_boxes_are_added_to_the_file_while_the_page_runs(browser: Any, tmp_path: Path) -> None:
    boxes = StandIns([StandIn("box-0"), StandIn("box-1")])
    first, second = (box.url for box in boxes.boxes)
    with page_of([first], tmp_path) as url:
        browser.open(url)
        browser.wait("document.querySelector('#fleet-state').textContent === 'all 1 well'")
        (tmp_path / "boxes.txt").write_text(f"{second}\n")
        browser.wait(f"{row('box-1')} && !{row('box-0')}")
        (tmp_path / "boxes.txt").write_text("not an address: x y\n")
        browser.wait("document.querySelector('#problem').textContent.includes('expected http://HOST:PORT')")
        assert browser.run(NAMES) == ["box-1"]
        browser.open("about:blank")
    boxes.close()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--boxes=a b"], "--boxes: expected http://HOST:PORT"),
        (["--boxes=/nowhere/boxes"], "--boxes: expected http://HOST:PORT"),
        (["--boxes=127.0.0.1", "--keys=keys"], "--keys needs --repository"),
        (["--boxes=127.0.0.1", "--repository=."], "is no signed repository"),
        (["--boxes=127.0.0.1", "--page-key-file=x"], "--page-key-file needs --keys"),
        ([], "expected --boxes or --mqtt"),
    ],
)
def test_wrong_arguments_end_the_start_with_the_reason(
    run_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = run_command("fleet", "page", "--page-port=0", *flags)
    assert found.returncode == 2
    assert message in found.stderr
