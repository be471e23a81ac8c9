"""A box whose disk fills up: a real file system of 48 MB, at every write of a follower, and under a server."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.plugins.fleet.follow.trial import Trial
from edge_server.repository.disk import free_space
from tests.kit.server import serve
from tests.plugins.fleet.conftest import PAGE_BYTES, BoxUnderTest, filled

pytest.importorskip("tuf")
pytestmark = pytest.mark.full

COMMAND = Path(sys.executable).parent / "edge-server"


def test_a_disk_that_is_full_at_any_write_leaves_a_complete_model_and_room_and_is_tried_again(
    publication: Any, disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(Trial, "run", lambda *arguments, is_return: "")
    # Another program takes the last bytes after each check.
    monkeypatch.setattr(free_space, "RESERVE_BYTES", -(1 << 40))
    publication.release(0.5)
    box = BoxUnderTest(disk / "box", publication)
    box.follow()
    template = publication.site.with_name("template")
    shutil.copytree(box.folder, template)
    publication.release(0.25, filler=10 * PAGE_BYTES)
    folders = [box.folder / ".follow" / name for name in ("parts", "staged")]
    steps = set()
    for pages in range(200):
        shutil.rmtree(box.folder)
        shutil.copytree(template, box.folder)
        with filled(disk, pages * PAGE_BYTES):
            report = box.follow().report
            is_installed = bool(report.models) and report.models["m"].installed == "m/2.json"
            assert box.factor() == (0.25 if is_installed else 0.5)
            if not is_installed:
                assert "No space left on device" in report.problem
                assert [path for folder in folders for path in folder.iterdir()] == []
                steps.add(bool(report.models))
        state = box.follow().report.models["m"]
        assert (state.state, state.installed, box.factor()) == ("installed", "m/2.json", 0.25), f"{pages} pages"
        if is_installed and not any(record.levelno >= logging.WARNING for record in caplog.records):
            break
        caplog.clear()
    assert 10 < pages < 100
    assert steps == {False, True}, "it was full for the metadata, and for the files"


def test_a_box_starts_on_a_full_disk_and_puts_back_what_did_not_serve_yet(
    publication: Any, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publication.release(0.5)
    box = BoxUnderTest(disk / "box", publication)
    box.follow()
    publication.release(0.25)
    with box.models.locked(), monkeypatch.context() as patch:
        follower = box.follower()
        # As if the process were killed before its server has loaded the release.
        patch.setattr(follower, "_judge_exchanged", lambda model: "")
        follower.follow_once()
    assert box.factor() == 0.25
    with filled(disk, 0), box.models.locked():
        box.follower().begin()
        assert box.factor() == 0.5
    assert box.follow().report.models["m"].installed == "m/2.json"


def test_a_part_of_a_release_counts_when_the_disk_is_measured(publication: Any, disk: Path) -> None:
    publication.release(0.5, filler=10 << 20)
    publication.cut_after = 9 << 20
    box = BoxUnderTest(disk / "box", publication)
    assert "bytes came" in box.follow().report.problem
    publication.cut_after = None
    assert os.statvfs(disk).f_bavail * PAGE_BYTES < free_space.RESERVE_BYTES + (10 << 20)
    assert box.follow().report.models["m"].installed == "m/1.json"


def test_a_server_keeps_serving_when_another_program_fills_the_disk_during_a_download(
    publication: Any, disk: Path, add_model: Callable[..., None], eventually: Callable[..., bool]
) -> None:
    publication.release(0.5)
    (disk / "models").mkdir()
    flags = [
        f"--follow={publication.url}", f"--follow-root={publication.root}", "--follow-interval-secs=1",
        "--follow-max-kbytes-per-sec=2000",
    ]  # fmt: skip
    parts = disk / "models" / ".follow" / "parts"
    body = {"inputs": [{"name": "X", "shape": [1, 4], "datatype": "FP32", "data": [1.0] * 4}]}

    def factor() -> float | None:
        status, answer = server.infer("m", body)
        return answer["outputs"][0]["data"][0] if status == 200 else None

    def followed() -> Any:
        command = [str(COMMAND), "status", f"--url={server.url('')}", "--json"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return json.loads(found.stdout)["follow"]["models"]["m"]

    with serve(disk / "models", *flags) as server:
        assert eventually(lambda: factor() == 0.5)
        add_model(publication.models / "m", 0.25)
        (publication.models / "m" / "notes.bin").write_bytes(np.random.default_rng(0).bytes(6 << 20))
        publication.publish()
        assert eventually(lambda: any(path.stat().st_size > 1 << 20 for path in parts.glob("*.part")))
        with filled(disk, 33 << 20):
            assert eventually(lambda: "does not fit on the disk" in followed()["reason"])
            assert (followed()["state"], factor(), list(parts.iterdir())) == ("waiting", 0.5, [])
        assert eventually(lambda: factor() == 0.25)
