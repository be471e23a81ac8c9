"""The page's drop zone for a model file, in a real browser, which tests/e2e/fetch_chromium.sh fetches."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_add_command import brightness
from tests.e2e.test_dashboard import faults
from tests.e2e.yolo_exports import ULTRALYTICS, detect, export
from tests.kit.server import serve

PICTURE = Path(__file__).parents[1] / "data/coffee.jpg"
DROP = """
const dataTransfer = new DataTransfer();
for (const [text, name, type] of arguments[0]) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  dataTransfer.items.add(new File([bytes], name, { type }));
}
document.querySelector("#add-drop").dispatchEvent(new DragEvent("drop", { dataTransfer, cancelable: true }));
"""

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


def test_a_dropped_model_is_added_and_the_page_says_what_it_sees(
    browsers: Any, repository: Any, tmp_path: Path
) -> None:
    model, undecided = (
        base64.b64encode(export(detect(), metadata).SerializeToString()).decode() for metadata in (ULTRALYTICS, {})
    )
    (tmp_path / "tokens").write_text(f"anna {hashlib.sha256(b'open sesame').hexdigest()} *\n")
    flag = f"--auth-tokens-file={tmp_path / 'tokens'}"
    with browsers.open_browser(tmp_path) as page, serve(repository.path, flag) as server:
        page.look(1280, 900)
        page.open(server.url("/"))
        page.wait("document.querySelector('#add-refusal')?.innerText.includes('only with a key')")
        page.click("#add-refusal button")
        page.run("document.querySelector('#key-value').value = 'open sesame'")
        page.click('#key-dialog button[value="save"]')
        page.wait("document.querySelector('#add-drop')?.hidden === false")
        notes = (base64.b64encode(b"text").decode(), "notes.txt", "")
        page.run(DROP, [notes])
        page.wait("document.querySelector('#add-state').textContent === 'not added'")
        report = page.run("return document.querySelector('#add-report').innerText")
        assert "expected a file that ends in .onnx" in report
        picture = base64.b64encode(PICTURE.read_bytes()).decode()
        page.run(DROP, [(picture, "coffee.jpg", "image/jpeg"), (model, "yolo11n.onnx", "")])
        page.run(DROP, [(undecided, "bare.onnx", "")])
        shown = page.run("return [...document.querySelectorAll('#add-report > p')].map((one) => one.innerText)")
        assert shown[0] == "bare.onnx: waits"
        assert shown[1].startswith("yolo11n.onnx: it is copied")
        assert page.run("return document.querySelector('#add-picture-text').innerText").endswith("coffee.jpg.")
        page.wait("document.querySelector('#add-report').innerText.includes('did not decide')")
        page.wait("document.querySelector('#add-state').textContent === 'added'")
        report = page.run("return document.querySelector('#add-report').textContent")
        assert "in the repository, then add the model with a picture." in report
        assert "--picture" not in report
        assert str(repository.path) not in report
        table = page.run("return document.querySelector('[aria-label=\"Report about yolo11n\"] table').innerText")
        assert "kind\tyolo detect, 3 classes" in table
        assert "picture\tperson 0.90" in table
        page.wait("document.querySelector('[data-model=\"yolo11n\"]')?.innerText.includes('READY')")
        # Each candidate has a button, which has the model loaded again with it.
        scales = base64.b64encode(brightness().SerializeToString()).decode()
        page.run(DROP, [(scales, "net.onnx", "")])
        report = "document.querySelector('[aria-label=\"Report about net\"]')"
        buttons = f"[...{report}?.querySelectorAll('.candidate button') ?? []]"
        names = page.wait(f"{buttons}.length && {buttons}.map((one) => one.ariaLabel)")
        scales_shown = {name.partition("rgb, ")[2] for name in names}
        assert scales_shown > {"pixels / 255", "pixels 0 to 255", "ImageNet's mean", "-1 to 1"}
        if axe := os.environ.get("EDGE_TEST_AXE"):
            assert faults(page, Path(axe)) == []
        if "EDGE_TEST_SCREENSHOTS" in os.environ:
            page.run("document.querySelector('#add-report').scrollIntoView()")
            page.screenshot(Path(os.environ["EDGE_TEST_SCREENSHOTS"]) / "add_candidates.png")
        index = next(index for index, name in enumerate(names) if name.endswith("pixels / 255"))
        page.run(f"{buttons}[arguments[0]].click()", index)
        page.wait(f"{report}?.querySelectorAll('.candidate')[arguments[0]]?.innerText.includes('chosen')", index)
        assert page.run(f"return {buttons}.length") == 0
        config = (repository.path / "net/config.pbtxt").read_text()
        assert '\nparameters { key: "image_scale" value { string_value: "1/255" } }' in config
        assert ("undecided" in config, "image_mean" in config.partition("# Not chosen")[0]) == (False, False)
        page.run(DROP, [(model, "again.onnx", ""), notes])
        page.wait("document.querySelector('#add-state').textContent === '1 of 2 added'")
        if "EDGE_TEST_SCREENSHOTS" in os.environ:
            page.run("document.querySelector('#add-model').scrollIntoView()")
            page.screenshot(Path(os.environ["EDGE_TEST_SCREENSHOTS"]) / "add_model.png")
        page.open("about:blank")
