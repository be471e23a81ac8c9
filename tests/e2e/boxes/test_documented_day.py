"""The commands of the numbered sections of docs/fleet.md in their order, with three boxes."""

from __future__ import annotations

import functools
import shlex
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.server import serve

pytest.importorskip("tuf")
from tests.e2e.boxes.fleet_of_boxes import Box, Fleet, Site
from tests.e2e.test_documentation import ROOT, Block, Terminal, blocks

# Minutes on a busy machine: it types some thirty commands, each a program that starts, and the trials of releases have
# the lowest priority.
# Five minutes; test_fleet_of_boxes.py and tests/e2e/test_follow.py do the steps of the page with fewer servers.
pytestmark = [pytest.mark.long, pytest.mark.timeout(800)]

MODEL = "efficientnet_lite0"


def test_a_day_from_the_first_key_to_a_release_that_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    terminal = Terminal(tmp_path, SimpleNamespace(http="127.0.0.1:9", grpc="127.0.0.1:9"), serve)
    with Site(tmp_path / "site") as site, ExitStack() as running:
        day = Day(terminal, site, running, tmp_path, serve)
        for block in blocks(ROOT / "docs" / "fleet.md"):
            code = block.code.replace("\\\n", " ")
            if block.mark.startswith("file "):
                (tmp_path / block.mark.removeprefix("file ")).write_text(code)
            elif "edge-server serve " in code:
                day.start_boxes(shlex.split(code)[2:])
                assert day.releases() == [f"{MODEL}/2.json", f"{MODEL}/1.json", f"{MODEL}/1.json"]
            elif "edge-server fleet " in code:
                for line in code.splitlines():
                    day.type(line)
            elif block.mark:
                terminal.type(block)
            if day.typed[-1:] == ["rollback"]:
                break  # The day ends; test_documentation.py runs the sections below.
        assert day.typed == ["status", "continue", "status", "status", "continue", "stop", "rollback"]
        assert day.releases() == [f"{MODEL}/2.json"] * 3


class Day:
    """Boxes box-01 to box-03, and a terminal whose commands wait for them as a person does."""

    def __init__(self, terminal: Terminal, site: Site, running: ExitStack, folder: Path, serve: Any) -> None:
        self._terminal = terminal
        self._site = site
        self._running = running
        self._folder = folder
        self._serve = serve
        self._boxes: list[Box] = []
        self.typed: list[str] = []
        """Actions of `fleet`."""

    def start_boxes(self, flags: list[str]) -> None:
        """Start the box of the page, and two more with other names."""
        written = " ".join(flag for flag in flags if not flag.startswith("--model-repository="))
        for text, here in (
            ("https://models.example.com/site", self._site.url),
            ("/etc/edge_server/root.json", "site/metadata/1.root.json"),
        ):
            assert text in written
            written = written.replace(text, here)
        for name in ("box-01", "box-02", "box-03"):
            folder = self._folder / name
            folder.mkdir()
            more = [*written.replace("box-01", name).split(), "--follow-interval-secs=1"]
            box = Box(folder, name, functools.partial(self._serve, folder, *more))
            box.start()
            self._running.callback(box.stop)
            self._boxes.append(box)
        (self._folder / "boxes.txt").write_text("\n".join(box.address for box in self._boxes))
        Fleet.wait(lambda: all(self.releases()))

    def releases(self) -> list[str]:
        return [box.installed(MODEL) for box in self._boxes]

    def type(self, line: str) -> None:
        """Type a line. A person repeats `status` until it ends with 0, and cron `continue` until all boxes are done."""
        words = shlex.split(line, comments=True)
        if "fleet" not in words:
            self._type(line)
            return
        action = words[3] if words[2] == "rollout" else words[2]
        self.typed.append(action)
        if action == "status":
            Fleet.wait(lambda: self._works(line))
        elif action == "continue":
            newest = max(self.releases())
            assert len(set(self.releases())) == 2
            Fleet.wait(
                lambda: self._works(line.replace("=3600", "=0")) and set(self.releases()) == {newest}, limit_s=300
            )
        else:
            before = self.releases()
            self._type(line)
            if action == "rollback":
                Fleet.wait(lambda: not set(before) & set(self.releases()))

    def _type(self, line: str) -> None:
        self._terminal.type(Block("run", "sh", line))

    def _works(self, line: str) -> bool:
        try:
            self._type(line)
        except AssertionError:
            return False
        return True
