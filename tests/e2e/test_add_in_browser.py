"""The page's drop zone for a model file, in a real browser, which tests/e2e/fetch_chromium.sh fetches."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

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
        assert page.run("return document.querySelector('#add-report').innerText").startswith(
            "bare.onnx: waits\n\nyolo11n.onnx: it is copied"
        )
        assert page.run("return document.querySelector('#add-picture-text').innerText").endswith("coffee.jpg.")
        page.wait("document.querySelector('#add-report').innerText.includes('Not decided')")
        page.wait("document.querySelector('#add-state').textContent === 'added'")
        report = page.run("return document.querySelector('#add-report').innerText")
        assert "in the repository, then add the model with a picture." in report
        assert "--picture" not in report
        assert "kind    yolo detect, 3 classes" in report
        assert "picture person 0.90" in report
        assert str(repository.path) not in report
        page.wait("document.querySelector('[data-model=\"yolo11n\"]')?.innerText.includes('READY')")
        page.run(DROP, [(model, "again.onnx", ""), notes])
        page.wait("document.querySelector('#add-state').textContent === '1 of 2 added'")
        if "EDGE_TEST_SCREENSHOTS" in os.environ:
            page.run("document.querySelector('#add-model').scrollIntoView()")
            page.screenshot(Path(os.environ["EDGE_TEST_SCREENSHOTS"]) / "add_model.png")
        page.open("about:blank")
