"""The page at `/` in Firefox. `test_dashboard` has the details, in Chromium."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.firefox import Firefox, open_firefox
from tests.kit.models import identity_config
from tests.kit.server import serve

ROOT = Path(__file__).parents[2]
DROP = """
(() => {
  const bytes = Uint8Array.from(atob(%s), (character) => character.charCodeAt(0));
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([bytes], "picture.jpg", { type: "image/jpeg" }));
  document.querySelector("#try-drop").dispatchEvent(new DragEvent("drop", { dataTransfer, cancelable: true }));
})()
"""
FAULTS = """
axe.run().then(({ violations }) => JSON.stringify(violations.filter(({ impact }) => /serious|critical/.test(impact))))
"""
CAMERA = """
[[sources]]
name = "door"
url = "demo"
model = "face_detection_yunet"
fps = 10
"""

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]


def test_the_page_works_in_firefox(repository: Any, tmp_path: Path) -> None:
    for name in ("efficientnet_lite0", "face_detection_yunet"):
        shutil.copytree(ROOT / "model_repository" / name, repository.path / name)
    repository.add("tensor", identity_config("FP32", "3, 32, 32"))
    cameras = tmp_path / "cameras.toml"
    cameras.write_text(CAMERA)
    profile = tmp_path / "profile"
    profile.mkdir()

    async def visit(url: str) -> None:
        async with open_firefox(profile) as firefox:
            await firefox.open(url)
            await models_and_cameras(firefox)
            await pictures(firefox)
            await accessible(firefox)
            await firefox.look(390, 844)
            assert await firefox.run("document.documentElement.scrollWidth") <= 390
            assert firefox.problems == []

    with serve(repository.path, f"--sources-file={cameras}") as server:
        asyncio.run(visit(server.url("/")))


async def models_and_cameras(firefox: Firefox) -> None:
    await firefox.wait("document.querySelector('#ready').textContent === 'ready'")
    await firefox.wait("document.querySelector('#models-count').textContent === '3 of 3 ready'")
    await firefox.wait("document.querySelector('.camera img')?.naturalWidth > 0")
    await firefox.wait("document.querySelector('[data-chart=waiting] .line')?.getAttribute('d').includes('L')")
    await firefox.run("document.querySelector('.camera .picture').click()")
    await firefox.wait("document.querySelector('dialog.large .found')?.textContent === '1 face'")
    await firefox.run("document.querySelector('dialog.large button').click()")


async def pictures(firefox: Firefox) -> None:
    picture = json.dumps(base64.b64encode((ROOT / "tests/data/coffee.jpg").read_bytes()).decode())
    for model, seen in (("efficientnet_lite0", "espresso"), ("tensor", "OUTPUT0")):
        await firefox.run(f"document.querySelector('[data-model={model}] .link').click()")
        await firefox.wait("document.querySelector('#try-drop')")
        await firefox.run(DROP % picture)
        await firefox.wait(f"document.querySelector('#try-result').innerText.includes('{seen}')")


async def accessible(firefox: Firefox) -> None:
    axe = os.environ.get("EDGE_TEST_AXE", "")
    if axe:
        await firefox.run(f"{Path(axe).read_text()};0")
        assert json.loads(await firefox.run(FAULTS)) == []
