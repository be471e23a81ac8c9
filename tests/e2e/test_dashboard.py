"""The page at `/` in a real browser, with models, a camera and the sensors of a board.

tests/e2e/fetch_chromium.sh fetches the browser; without it the tests skip. With EDGE_TEST_SCREENSHOTS=docs/images they
renew the pictures of the documentation.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from tests.e2e.yolo_exports import ULTRALYTICS, detect, export
from tests.kit.model_folder import model_folder
from tests.kit.models import identity_config
from tests.kit.server import serve

ROOT = Path(__file__).parents[2]
PICTURE, FACE = ROOT / "tests/data/coffee.jpg", ROOT / "edge_server/plugins/vision/demo.jpg"
ANSWER = "An edge server runs neural networks where the data is: beside the camera, without a detour through the cloud."
KEY = "window.confirm = () => true; document.querySelector('#key-value').value = arguments[0];"
DROP = """
const bytes = Uint8Array.from(atob(arguments[0]), (character) => character.charCodeAt(0));
const dataTransfer = new DataTransfer();
dataTransfer.items.add(new File([bytes], "picture.jpg", { type: arguments[1] }));
document.querySelector("#try-drop").dispatchEvent(new DragEvent("drop", { dataTransfer, cancelable: true }));
"""
GREEN_PIXELS = """
const image = document.querySelector(".camera img");
const canvas = document.createElement("canvas");
canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;
if (!canvas.width) return 0;
const pen = canvas.getContext("2d");
pen.drawImage(image, 0, 0);
const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
let count = 0;
for (let at = 0; at < data.length; at += 4) count += data[at] < 110 && data[at + 1] > 180 && data[at + 2] < 130;
return count;
"""
"""Pixels in the colour of the first class's boxes."""

HALVES = """
backend: "python"
input { name: "image" data_type: TYPE_UINT8 dims: [16, 16, 3] }
output { name: "mask" data_type: TYPE_INT64 dims: [16, 16] label_filename: "labels.txt" }
parameters { key: "image_fit" value { string_value: "stretch" } }
parameters { key: "mask_output" value { string_value: "mask" } }
"""
HALVES_CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        mask = np.zeros((16, 16), np.int64)
        mask[:, 12:] = 1
        return [pb_utils.InferenceResponse([pb_utils.Tensor("mask", mask)]) for _ in requests]
"""
"""A segmentation whose class 1 is the right quarter of any picture."""

CHANNELS = """
backend: "python"
input { name: "image" data_type: TYPE_FP32 dims: [1, 3, 16, 16] }
output { name: "logits" data_type: TYPE_FP32 dims: [1, 3] label_filename: "labels.txt" }
"""
CHANNELS_CODE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        images = [pb_utils.get_input_tensor_by_name(request, "image").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("logits", image.mean((2, 3)))]) for image in images]
"""
"""A classifier that answers with logits: the class is the strongest colour."""

SOURCES = """
[[sources]]
name = "gate"
url = "rtsp://127.0.0.1:1/stream"
model = "face_detection_yunet"

[[sources]]
name = "door"
url = "demo"
model = "face_detection_yunet"
fps = 10
"""

QUESTIONS = """
[[sources.questions]]
name = "visitor"
model = "vlm"
prompt = "Who is the {label}?"

[[sources.questions]]
name = "parcel"
model = "absent"
prompt = "Is there a parcel?"
"""
VLM = """
backend: "python"
input { name: "text_input" data_type: TYPE_STRING dims: [1] }
input { name: "image" data_type: TYPE_STRING dims: [1] }
output { name: "text_output" data_type: TYPE_STRING dims: [1] }
"""
VLM_CODE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        prompts = [pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text_output", prompt)]) for prompt in prompts]
"""

IS_IN_SIGHT = """
const element = document.querySelector(arguments[0]);
const { left, top, width, bottom } = element.getBoundingClientRect();
const at = (y) => document.elementFromPoint(left + width / 2, y) === element;
return at(top + 2) && at(bottom - 2);
"""

BOXES = "return [...document.querySelectorAll(arguments[0])].map((one) => one.getBoundingClientRect().toJSON())"

RIGHT_AND_LEFT = """
const canvas = document.querySelector(".answer canvas");
const row = canvas.getContext("2d").getImageData(0, canvas.height / 2, canvas.width, 1).data;
const at = (x) => [...row.slice(4 * Math.floor(x * canvas.width)).slice(0, 4)];
return [at(0.1), at(0.9)];
"""

RESTRICTED = "--http-restricted-api=model-repository:admin-key=secret1"

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def board(boards: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made = boards.Board("orin_nano_jp6", tmp_path_factory.mktemp("board") / "files")
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(browser: Any, board: Any, module_repository: Any) -> Iterator[Any]:
    for name in ("efficientnet_lite0", "face_detection_yunet"):
        shutil.copytree(ROOT / "model_repository" / name, module_repository.path / name)
    module_repository.add("yolo11n", model=export(detect(), ULTRALYTICS))
    module_repository.add("scale", identity_config("FP32", "4"))
    module_repository.add("steps", identity_config("FP32", "4") + "sequence_batching { }")
    module_repository.add("tensor", identity_config("FP32", "3, 32, 32"))
    module_repository.add("halves", HALVES, files={"1/model.py": HALVES_CODE, "labels.txt": "background\nroad\n"})
    module_repository.add("channels", CHANNELS, files={"1/model.py": CHANNELS_CODE, "labels.txt": "red\ngreen\nblue\n"})
    module_repository.add(
        "assistant",
        'backend: "scripted_llm"',
        files={"1/script.json": json.dumps({"answers": {"What is an edge server?": ANSWER}, "step_s": 0.02})},
    )
    flags = (
        f"--sysfs-root={board.root}", "--governor-interval-ms=200", "--cache-config=local,size=1048576",
        "--metrics-config=summary_latencies=true",
    )  # fmt: skip
    with serve(module_repository.path, *flags) as running:
        yield running
        browser.open("about:blank")
        running.stop_cleanly()


@pytest.fixture
def page(server: Any, browser: Any) -> Any:
    browser.look(1280, 900)
    browser.console()
    browser.open(server.url("/"))
    browser.wait("document.querySelector('#ready').textContent === 'ready'")
    yield browser
    # A camera may end between two pictures: the browser logs the 404.
    left = [message for message in browser.console() if not ("/picture - " in message and "404" in message)]
    assert left == [], "the page leaves nothing in the console"


@contextlib.contextmanager
def camera(server: Any, name: str = "front_door") -> Iterator[None]:
    command = [str(Path(sys.executable).parent / "edge-server"), "stream", "--source=demo",
               "--model=face_detection_yunet", f"--address={server.grpc}", f"--name={name}", "--fps=15"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def row(name: str) -> str:
    return f"document.querySelector('[data-model=\"{name}\"]')"


def choose(page: Any, model: str) -> None:
    """Have the form ask a model."""
    page.wait(f"{row(model)}?.innerText.includes('READY')")
    page.click(f'[data-model="{model}"] .link')


def drop(page: Any, content: bytes, media_type: str = "image/jpeg") -> None:
    """Drop a file on the form."""
    page.wait("document.querySelector('#try-drop')")
    page.run(DROP, base64.b64encode(content).decode(), media_type)


@contextlib.contextmanager
def watched(browser: Any, repository: Any, sources: str, *flags: str) -> Iterator[Any]:
    """Serve the face detector with a sources file, and show the page. Yields the server, which ends cleanly."""
    shutil.copytree(ROOT / "model_repository/face_detection_yunet", repository.path / "face_detection_yunet")
    cameras = repository.path.parent / "cameras.toml"
    cameras.write_text(sources)
    with serve(repository.path, f"--sources-file={cameras}", *flags) as server:
        browser.look(1280, 900)
        browser.console()
        browser.open(server.url("/"))
        yield server
        browser.run("sessionStorage.clear()")
        browser.open("about:blank")
        assert server.stop() == 0


def test_the_page_shows_models_sensors_and_events(page: Any) -> None:
    page.wait(f"{row('efficientnet_lite0')}?.innerText.includes('READY')")
    page.wait("document.querySelector('#machine-charts').innerText.includes('°C')")
    page.wait("document.querySelector('#activity-charts').innerText.includes('Tokens of assistant')")
    page.wait("document.querySelector('li[data-kind=\"server.ready\"]')")
    assert "9 of 9 ready" in page.text()


def test_a_copied_model_appears_and_a_failed_one_has_its_reason(page: Any, module_repository: Any) -> None:
    module_repository.add_sub("late", 'backend: "onnxruntime"')
    page.wait(f"{row('late')}?.innerText.includes('READY')")
    model_folder(module_repository.path / "late", files={"2/model.onnx": b"not a model"}, version=2)
    page.wait("document.querySelector('#models-rows').innerText.includes('UNAVAILABLE')")
    failed = "document.querySelector('tr:not([hidden]) .reason.bad')"
    assert page.run(f"return {failed}.closest('tbody').innerText").startswith("late")
    page.wait("document.querySelector('li[data-kind=\"model.failed\"]')")
    event = "return document.querySelector('li[data-kind=\"model.failed\"]').lastChild.innerText"
    assert page.run(event) == "late version 2 has failed: file 'model.onnx' is text, not an ONNX model"
    shutil.rmtree(module_repository.path / "late")
    page.wait(f"!{row('late')}?.innerText.includes('READY')")


def test_failed_requests_before_a_reload_are_not_forgotten_without_a_word(
    page: Any, server: Any, module_repository: Any
) -> None:
    config = VLM.replace('input { name: "image" data_type: TYPE_STRING dims: [1] }', "")
    folder = module_repository.add("failing", config)
    answer = 'pb_utils.InferenceResponse([pb_utils.Tensor("text_output", prompt)])'
    (folder / "1/model.py").write_text(
        VLM_CODE.replace(answer, 'pb_utils.InferenceResponse(error=pb_utils.TritonError("no"))')
    )
    page.wait(f"{row('failing')}?.innerText.includes('READY')")
    shown = "document.querySelector('#activity-charts').innerText"
    before = int(page.wait(f"{shown}.match(/Failed requests[^]*?(\\d+) since each model was loaded/)?.[1]"))
    for _ in range(3):
        assert server.ask("/v2/models/failing/generate", {"text_input": "a"})[0] == 500
    page.wait(f"/Failed requests[^]*?\\b{before + 3} since each model was loaded/.test({shown})")
    (folder / "1/model.py").write_text(VLM_CODE)
    page.wait(f"/Failed requests[^]*?\\b{before} since each model was loaded, 3 before a reload/.test({shown})")
    shutil.rmtree(folder)
    page.wait(f"!{row('failing')}?.innerText.includes('READY')")


def test_failed_models_are_first_and_more_than_twenty_are_folded(browser: Any, repository: Any) -> None:
    names = [f"many_{number:02}" for number in range(23)]
    for name in names:
        repository.add(name, identity_config())
    model_folder(repository.path / "z_broken", files={"1/model.onnx": b"not a model"})
    filter_by = (
        "const filter = document.querySelector('#models-filter'); filter.value = arguments[0];"
        "filter.dispatchEvent(new Event('input'))"
    )
    shown = "return [...document.querySelectorAll('[data-model]')].map((one) => one.dataset.model)"
    with serve(repository.path) as server:
        browser.open(server.url("/"))
        browser.wait("document.querySelector('#models-failed').textContent === '1 failed'")
        browser.wait("document.querySelector('#models-count').textContent === '23 of 24 ready'")
        # The header says what is wrong and leads there.
        pill = browser.run(
            "const pill = document.querySelector('#ready'); return [pill.innerText, pill.getAttribute('href')]"
        )
        assert pill == ["1 failed", "#models"]
        assert browser.run(shown) == ["z_broken", *names[:19]]
        assert browser.run("return document.querySelector('#models-more').textContent") == "Show 4 more"
        browser.click("#models-more")
        assert len(browser.run(shown)) == 24
        browser.click("#models-more")
        browser.run(filter_by, "MANY ready 2")
        assert browser.run(shown) == [name for name in names if "2" in name]
        browser.run(filter_by, "nothing")
        assert (
            browser.run("return document.querySelector('#models-empty').textContent") == "No model matches “nothing”."
        )
        browser.open("about:blank")


def test_a_click_on_a_model_opens_its_card(page: Any, server: Any) -> None:
    page.wait(f"{row('scale')}?.innerText.includes('READY')")
    page.click('[data-model="scale"] .link')
    page.wait("document.querySelector('#model-name').textContent === 'scale'")
    # "Try it" is beside the table, and the card is as high as the window at most.
    beside = "document.querySelector('#model').getBoundingClientRect().left >= "
    assert page.run(f"return {beside}document.querySelector('#models-rows').getBoundingClientRect().right")
    assert page.run("return !document.querySelector('#try').hidden")
    asked = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    assert server.infer("scale", {"inputs": [asked]})[0] == 200
    page.click('[data-part="model-curves"]')
    for chart in ("model requests", "model median", "model most", "model waiting", "model queue"):
        page.wait(f"document.querySelector('[data-chart=\"{chart}\"] .line')?.getAttribute('d').includes('L')")
    value = "parseFloat(document.querySelector(`[data-chart='model ${arguments[0]}'] .value`).innerText)"
    median, most = (page.run(f"return {value}", key) for key in ("median", "most"))
    assert 0 <= median <= most
    page.click('[data-part="model-tensors"]')
    page.wait("/INPUT0\\s+FP32\\s+\\[-1, 4\\]/.test(document.querySelector('#model-tensors').innerText)")
    page.click('[data-part="model-config"]')
    text = page.run("return document.querySelector('#model-config pre').textContent")
    assert "max_batch_size: " in text
    assert "name: INPUT0, data_type: TYPE_FP32, dims: [4]" in text
    page.click('[data-part="model-versions"]')
    page.wait("/1\\s+READY\\s+load 1 of the model/.test(document.querySelector('#model-versions').innerText)")
    page.click('[data-part="model-loads"]')
    page.wait("document.querySelector('#model-loads').innerText.includes('scale version 1 is ready')")
    assert page.run("return document.querySelector('#try').hidden")
    page.click("#try-link")
    page.wait("!document.querySelector('#try').hidden")


@pytest.mark.parametrize(
    ("model", "file", "shown"),
    [
        ("efficientnet_lite0", PICTURE, ".scores')?.innerText.includes('espresso')"),
        ("face_detection_yunet", FACE, ".answer canvas')?.ariaLabel === 'The picture with 1 boxes'"),
        ("yolo11n", PICTURE, ".answer canvas')?.ariaLabel === 'The picture with 2 boxes'"),
    ],
)
def test_a_picture_dropped_on_the_form_is_answered_with_classes_or_boxes(
    page: Any, model: str, file: Path, shown: str, tmp_path: Path
) -> None:
    choose(page, model)
    if "scores" in shown:
        # What asks the same from a terminal is there before the first request.
        page.wait("document.querySelector('#try-drop')")
        shutil.copyfile(PICTURE, tmp_path / "picture.jpg")
        for title in ("curl", "Python"):
            assert "espresso" in copied(page, title, tmp_path)
    drop(page, file.read_bytes())
    page.wait(f"document.querySelector('{shown}")
    if "canvas" in shown:
        page.wait("document.querySelector('.answer').getBoundingClientRect().bottom <= window.innerHeight")


def test_a_segmentation_mask_is_drawn_over_the_image(page: Any) -> None:
    choose(page, "halves")
    _, gray = cv2.imencode(".png", np.full((40, 40, 3), 100, np.uint8))
    drop(page, bytes(gray))
    page.wait("document.querySelector('.scores')?.innerText.includes('road')")
    assert "75.0" in page.run("return document.querySelector('.scores').innerText")
    left, right = page.run(RIGHT_AND_LEFT)
    assert left == [100, 100, 100, 255]
    # Half of the picture's gray and half of the colour of class 1, #3cdc50.
    assert np.abs(np.array(right) - [80, 160, 90, 255]).max() <= 3


@pytest.mark.parametrize("media_type", ["image/jpeg", "image/heic", "text/plain", ""])
def test_a_file_that_is_no_picture_is_answered_with_the_formats(server: Any, browser: Any, media_type: str) -> None:
    browser.open(server.url("/"))
    choose(browser, "efficientnet_lite0")
    drop(browser, b"no picture", media_type)
    reason = browser.wait("document.querySelector('#try-result .error')?.textContent")
    assert reason.endswith("expected a JPEG, PNG, BMP or WebP image, given 10 bytes beginning with 0x6e6f207069637475")
    # The browser itself logs the refusals, of results and of tensors.
    assert len(browser.console()) == 2


def test_enter_sends_a_prompt_and_the_page_says_that_the_model_thinks(page: Any) -> None:
    choose(page, "assistant")
    page.wait("document.querySelector('#try-prompt')")
    script = """
    window.said = [];
    const busy = document.querySelector("#try-busy");
    new MutationObserver(() => window.said.push(busy.textContent)).observe(busy, { childList: true });
    const prompt = document.querySelector("#try-prompt");
    const press = (shiftKey) => {
      const key = new KeyboardEvent("keydown", { key: "Enter", shiftKey, bubbles: true, cancelable: true });
      prompt.dispatchEvent(key);
      return key.defaultPrevented;
    };
    prompt.value = arguments[0];
    return [press(true), press(false)];
    """
    assert page.run(script, "What is an edge server?") == [False, True]
    page.wait(f"document.querySelector('#try-result .output').textContent === {json.dumps(ANSWER)}")
    assert page.run("return window.said")[0] == "Thinking …"
    page.wait("/tokens, .* a second/.test(document.querySelector('#try-result').textContent)")
    page.wait("document.querySelector('#try-busy').hidden")
    assert json.loads(copied(page, "curl"))["choices"][0]["message"]["content"] == ANSWER


def test_tensors_are_filled_and_their_request_can_be_copied(page: Any) -> None:
    choose(page, "scale")
    page.wait("document.querySelector('#try-input-0-values')")
    page.run("document.querySelector('#try-input-0-values').value = '[1, 2.5, -3, 4]'")
    page.click("#try-form button[type=submit]")
    page.wait("document.querySelector('[aria-label=\"Outputs\"]')?.innerText.includes('[1, 2.5, -3, 4]')")
    assert "INPUT0" in page.run("return document.querySelector('[aria-label=\"Inputs\"]').innerText")
    for title in ("curl", "Python"):
        (output,) = json.loads(copied(page, title))["outputs"]
        assert (output["name"], output["data"]) == ("OUTPUT0", [1, 2.5, -3, 4])
    page.run("document.querySelector('#try-input-0-values').value = '[1]'")
    page.click("#try-form button[type=submit]")
    page.wait("document.querySelector('#try-result .error')?.textContent.includes('4 elements, given 1')")


def test_a_sequence_is_asked_from_its_first_request_to_its_last(page: Any) -> None:
    choose(page, "steps")
    page.wait("document.querySelector('#try-first')?.checked")
    for values, is_last in (("[1, 2, 3, 4]", False), ("[5, 6, 7, 8]", True), ("[9, 10, 11, 12]", True)):
        page.run("document.querySelector('#try-input-0-values').value = arguments[0]", values)
        page.run("document.querySelector('#try-last').checked = arguments[0]", is_last)
        page.click("#try-form button[type=submit]")
        page.wait(f"document.querySelector('[aria-label=\"Outputs\"]')?.innerText.includes('{values}')")
        assert page.run("return document.querySelector('#try-first').checked") is is_last
    # The last one is a sequence of its own, which can be sent again.
    for title in ("curl", "Python"):
        assert json.loads(copied(page, title))["outputs"][0]["data"] == [9, 10, 11, 12]


def letterboxed(path: Path) -> np.ndarray[Any, Any]:
    """Return a wide picture as RGB in 32x32 pixels, with borders above and below."""
    picture = cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB)
    height = round(32 * picture.shape[0] / picture.shape[1])
    top = (32 - height) // 2
    small = cv2.resize(picture, (32, height), interpolation=cv2.INTER_AREA)
    return np.pad(small, ((top, 32 - height - top), (0, 0), (0, 0)))


def copied(page: Any, title: str, folder: Path = ROOT) -> str:
    """Return the output, in a folder, of the command or program that the page offers to copy."""
    page.run("document.querySelector('#try-form .copy').open = true")
    text = page.wait(f"document.querySelector('.snippet pre[aria-label=\"{title}\"]')?.textContent")
    command = ["bash", "-c", text] if title == "curl" else [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("fill", ["zeros", "random"])
def test_large_inputs_are_filled_with_zeros_or_random_numbers(page: Any, fill: str) -> None:
    choose(page, "tensor")
    page.wait("document.querySelector('#try-input-0')")
    page.run(
        "const fill = document.querySelector('#try-input-0'); fill.value = arguments[0];"
        "fill.dispatchEvent(new Event('change'))",
        fill,
    )
    page.click("#try-form button[type=submit]")
    output = page.wait("document.querySelector('[aria-label=\"Outputs\"]')?.innerText")
    assert ("0 to 0, mean 0" in output) == (fill == "zeros")
    for title in ("curl", "Python"):
        (found,) = json.loads(copied(page, title))["outputs"]
        assert any(found["data"]) == (fill == "random")


def test_any_picture_fills_a_4_d_input_and_the_lines_shown_make_it_permanent(
    page: Any, server: Any, module_repository: Any
) -> None:
    choose(page, "tensor")
    picture = np.zeros((40, 80, 3), np.uint8)
    picture[:] = (40, 100, 200)  # blue, green, red
    _, png = cv2.imencode(".png", picture)
    drop(page, bytes(png))
    output = page.wait("document.querySelector('[aria-label=\"Outputs\"]')?.innerText")
    assert "0 to 0.78431" in output
    shutil.copyfile(PICTURE, module_repository.path.parent / "picture.jpg")
    values = json.loads(copied(page, "Python", module_repository.path.parent))["outputs"][0]["data"]
    expected = letterboxed(PICTURE).mean((0, 1)) / 255
    assert np.array(values).reshape(3, -1).mean(1) == pytest.approx(expected, abs=0.02)
    lines = page.run("return document.querySelector('pre[aria-label=\"config.pbtxt\"]').textContent")
    config = module_repository.path / "tensor/config.pbtxt"
    config.write_text(f"{config.read_text()}\n{lines}\n")
    page.wait("document.querySelector('#events').innerText.includes('tensor version 1 is unloaded')")
    reply = server.request("POST", "/v2/models/tensor/infer", bytes(png), {"Content-Type": "image/png"})
    sums = np.array(json.loads(reply[-1])["outputs"][0]["data"]).reshape(3, -1).sum(1)
    # Half of the letterbox is the picture.
    assert sums == pytest.approx(np.array([200, 100, 40]) / 255 * 32 * 16, rel=0.01)


def test_the_lines_shown_for_a_classifier_have_it_answer_with_classes(
    page: Any, server: Any, module_repository: Any
) -> None:
    choose(page, "channels")
    _, png = cv2.imencode(".png", np.full((40, 80, 3), (40, 200, 100), np.uint8))
    drop(page, bytes(png))
    lines = page.wait("document.querySelector('pre[aria-label=\"config.pbtxt\"]')?.textContent")
    assert 'key: "image_fit" value { string_value: "stretch" }' in lines
    assert 'key: "class_activation" value { string_value: "softmax" }' in lines
    config = module_repository.path / "channels/config.pbtxt"
    config.write_text(f"{config.read_text()}\n{lines}\n")
    page.wait("document.querySelector('#events').innerText.includes('channels version 1 is unloaded')")
    page.open(server.url("/"))
    choose(page, "channels")
    page.wait("document.querySelector('#try-drop')?.innerText.includes('JPEG, PNG')")
    drop(page, bytes(png))
    assert page.wait("document.querySelector('.scores')?.innerText").startswith("green")


def test_the_command_of_the_empty_camera_card_sends_pictures(page: Any) -> None:
    program, *arguments = shlex.split(page.wait("document.querySelector('#cameras-empty code').textContent"))
    process = subprocess.Popen([Path(sys.executable).parent / program, *arguments], stdout=subprocess.DEVNULL)
    try:
        page.wait("document.querySelector('.camera img')?.naturalWidth > 0")
    finally:
        process.terminate()
        process.wait(30)
    page.wait("!document.querySelector('.camera')")


def test_the_boxes_of_the_demo_camera_appear_live(page: Any, server: Any) -> None:
    with camera(server):
        page.wait("document.querySelector('.camera img')?.naturalWidth > 0")
        page.wait(f"(() => {{ {GREEN_PIXELS} }})() > 300")
        first = page.run("return document.querySelector('.camera img').src")
        page.wait(f"document.querySelector('.camera img').src !== {json.dumps(first)}")
        page.click(".camera button")
        page.wait("document.querySelector('.camera img').hidden")
    page.wait("!document.querySelector('.camera')")


def test_a_click_makes_a_camera_large_with_labels_of_the_size_of_text(page: Any, server: Any) -> None:
    with camera(server):
        page.wait("document.querySelector('.camera img')?.naturalWidth > 0")
        assert page.run("return document.querySelector('main section').id") == "cameras"
        page.click(".camera .picture")
        page.wait("document.querySelector('dialog.large .found')?.textContent === '1 face'")
        width, screen = page.run("return [document.querySelector('.stage canvas').clientWidth, window.innerWidth]")
        assert width > screen / 2
        assert page.run("return document.querySelector('.edit-zones').hidden"), "the server does not open this camera"
        page.click("dialog.large button:not([hidden])")
        page.wait("!document.querySelector('dialog.large')")
    page.wait("document.querySelector('main section').id === 'models'")


def drag(browser: Any, css: str, x: float, y: float) -> None:
    """Drag the middle of an element by x and y pixels, with the mouse."""
    box = browser.run("return document.querySelector(arguments[0]).getBoundingClientRect().toJSON()", css)
    drag_from(browser, box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, x, y)


def drag_from(browser: Any, left: float, top: float, x: float, y: float) -> None:
    button = {"button": "left", "buttons": 1, "clickCount": 1}
    for kind, at in (("mousePressed", 0), ("mouseMoved", 0.5), ("mouseMoved", 1), ("mouseReleased", 1)):
        browser.command("Input.dispatchMouseEvent", type=kind, x=left + at * x, y=top + at * y, **button)


def test_zones_are_drawn_with_the_mouse_and_kept_in_the_sources_file(
    browser: Any, repository: Any, tmp_path: Path
) -> None:
    field = "const input = [...document.querySelectorAll('.zone-row input')].at(arguments[0]);"
    type_into = f"{field} input.value = arguments[1]; input.dispatchEvent(new Event('input'))"
    with watched(browser, repository, f"# The cameras of the house.\n{SOURCES}", RESTRICTED) as server:
        browser.wait("document.querySelector('[data-stream=\"door\"] img')?.naturalWidth > 0")
        browser.click('[data-stream="door"] .picture')
        browser.wait("document.querySelector('dialog.large .found')?.textContent === '1 face'")
        browser.click(".edit-zones:not([hidden])")
        assert "only with a key" in browser.run("return document.querySelector('#zones-refusal').innerText")
        browser.click("#zones-refusal button")
        browser.run(KEY, "secret1")
        browser.click('#key-dialog button[value="save"]')
        browser.wait("document.querySelector('#add-refusal').hidden")
        browser.click(".edit-zones")
        browser.wait("!document.querySelector('.zone-form').hidden")
        browser.click('[data-add="zone"]')
        browser.run(type_into, 0, "yard")
        browser.run(type_into, 1, "cat")
        browser.wait("document.querySelector('.zone-row .warning').textContent.includes('no class “cat”')")
        browser.click(".zone-row .choices button")
        assert browser.run(f"{field} return input.value", 1) == "cat, face"
        # The picture has its new size with the next frame.
        browser.wait(
            "document.querySelector('.stage canvas').clientHeight <= document.querySelector('.stage').clientHeight"
        )
        width, height = browser.run(
            "const canvas = document.querySelector('.stage canvas'); return [canvas.clientWidth, canvas.clientHeight]"
        )
        drag(browser, "circle.point", -0.2 * width, -0.2 * height)
        drag(browser, "circle.between", 0, -0.1 * height)
        browser.click('[data-add="line"]')
        if axe := os.environ.get("EDGE_TEST_AXE"):
            assert faults(browser, Path(axe)) == []
        browser.click(".zone-form button.primary")
        browser.wait("document.querySelector('.zone-form').hidden")
        assert "Saved in the sources file. The model has no class “cat”: zone yard does not count it." in browser.text()
        browser.wait("document.querySelector('.found').textContent === '1 face'")
        assert browser.console() == []
        _, found = server.ask("/edge/v1/cameras/door/zones")
        (yard,), (line,) = found["zones"], found["lines"]
        assert (yard["name"], yard["classes"]) == ("yard", ["cat", "face"])
        wanted = [[0.1, 0.1], [0.4, 0.1], [0.7, 0.3], [0.7, 0.7], [0.3, 0.7]]
        assert np.abs(np.array(yard["points"]) - wanted).max() < 0.01
        assert line == {"name": "line_1", "points": [[0.2, 0.5], [0.8, 0.5]]}
        assert (tmp_path / "cameras.toml").read_text().startswith("# The cameras of the house.\n")

        browser.wait("document.querySelector('[data-stream=\"door\"] .warning').innerText.includes(\"no class 'cat'\")")

        # A mistake is answered in the form, which stays open.
        browser.click(".edit-zones")
        browser.wait("!document.querySelector('.zone-form').hidden")
        browser.click('[data-add="line"]')
        browser.run(type_into, -2, "line_1")
        browser.click(".zone-form button.primary")
        browser.wait("document.querySelector('.zone-form .error').textContent.includes('two lines have the name')")
        assert browser.run(IS_IN_SIGHT, ".zone-form .error")
        assert browser.run(IS_IN_SIGHT, ".zone-form button.primary")
        assert len(browser.console()) == 1, "the browser itself logs the refusal"


CORNERS = """
[[sources.zones]]
name = "left"
points = [[0.1, 0.5], [0.5, 0.5], [0.5, 1], [0.1, 1]]

[[sources.zones]]
name = "right"
points = [[0.5, 0.5], [0.9, 0.5], [0.9, 1], [0.5, 1]]

[[sources.lines]]
name = "entry"
points = [[0.1, 0.5], [0.9, 0.2]]
"""


def test_points_on_the_edge_and_below_others_are_dragged_and_zones_are_moved(browser: Any, repository: Any) -> None:
    with watched(browser, repository, SOURCES + CORNERS, RESTRICTED) as server:
        browser.run("sessionStorage.setItem('edge-server-key', 'secret1')")
        browser.open(server.url("/"))
        browser.wait("document.querySelector('[data-stream=\"door\"] img')?.naturalWidth > 0")
        browser.wait("document.querySelector('#add-refusal').hidden")
        browser.click('[data-stream="door"] .picture')
        browser.wait("document.querySelector('dialog.large .found')?.textContent === '1 face'")
        wide = browser.run("return document.querySelector('.stage canvas').clientWidth")
        browser.click(".edit-zones")
        browser.wait("!document.querySelector('.zone-form').hidden")
        browser.wait("document.querySelector('.stage canvas').clientWidth < arguments[0]", wide)
        box = browser.run("return document.querySelector('.stage canvas').getBoundingClientRect().toJSON()")

        def move(x: float, y: float, wide: float, high: float) -> None:
            drag_from(browser, box["x"] + x * box["width"], box["y"] + y * box["height"],
                      wide * box["width"], high * box["height"])  # fmt: skip

        # The corner of the zone below the end of the line: chosen by a click into the zone.
        move(0.3, 0.7, 0, 0)
        move(0.1, 0.5, -0.05, 0.1)
        # On the lower edge of the picture.
        move(0.1, 1, 0, -0.1)
        # Inside a zone, and no further than the edge; beside a line.
        move(0.7, 0.75, 0.5, -0.2)
        move(0.3, 0.43, 0, 0.1)
        browser.click(".zone-form button.primary")
        browser.wait("document.querySelector('.zone-form').hidden")
        _, found = server.ask("/edge/v1/cameras/door/zones")
        left, right = found["zones"]
        assert np.abs(np.array(left["points"]) - [[0.05, 0.6], [0.5, 0.5], [0.5, 1], [0.1, 0.9]]).max() < 0.01
        assert np.abs(np.array(right["points"]) - [[0.6, 0.3], [1, 0.3], [1, 0.8], [0.6, 0.8]]).max() < 0.01
        assert np.abs(np.array(found["lines"][0]["points"]) - [[0.1, 0.6], [0.9, 0.3]]).max() < 0.01


def test_a_failed_camera_is_red_with_its_reason(browser: Any, repository: Any, tmp_path: Path) -> None:
    working, failing = SOURCES.split("[[sources]]")[:0:-1]
    sink = f'[[sinks]]\nname = "log"\nurl = "{tmp_path / "log"}"\nclasses = ["cat"]\n'
    with watched(browser, repository, f"[[sources]]{working}[[sources]]{failing}{sink}"):
        browser.wait("document.querySelector('#cameras-problem')?.textContent.startsWith(arguments[0])",
                     "Sink log: no source's model has class 'cat'")  # fmt: skip
        browser.wait("document.querySelector('#cameras-failed')?.textContent === '1 failed'")
        browser.wait("document.querySelector('#cameras-count')?.textContent === '1 of 2 open'")
        card = "document.querySelector('[data-stream=\"gate\"]')"
        browser.wait(f"{card}.classList.contains('failed') && {card}.innerText.includes('127.0.0.1')")
        assert browser.run(f"return {card}.previousElementSibling") is None
        assert browser.run(f"return {card}.querySelector('.picture').disabled")
        browser.wait("document.querySelector('[data-stream=\"door\"] img')?.naturalWidth > 0")
        browser.wait("document.querySelector('#events').innerText.includes('door sends pictures')")
        facts = "document.querySelector('[data-stream=\"door\"] .facts').innerText.split(/\\s*\\n\\s*/)"
        browser.wait(f"/^[0-9.]+ ms$/.test({facts}[5]) && /^[0-9]+$/.test({facts}[7])")
        assert browser.run(f"return {facts}")[4::2] == ["Age", "Dropped"]
        # Cards of a row align whether their cameras work or not, and fit a tablet.
        for width in (768, 1024, 1280):
            browser.look(width, 900)
            assert browser.run("return document.documentElement.scrollWidth") <= width
            for part in (".picture", ".facts"):
                boxes = browser.run(BOXES, f"[data-stream] {part}")
                assert len({(round(box["y"]), round(box["height"])) for box in boxes}) == 1, (width, part, boxes)
        browser.click('[data-stream="door"] .picture')
        browser.click(".edit-zones:not([hidden])")
        refusal = browser.run("return document.querySelector('#zones-refusal').innerText")
        assert "Start the server with --http-restricted-api=model-repository:admin-key=SECRET" in refusal
        assert browser.run("return document.querySelector('.zone-form').hidden")


def test_a_camera_shows_the_answers_to_its_questions_and_why_there_is_none(browser: Any, repository: Any) -> None:
    (repository.add("vlm", VLM) / "1/model.py").write_text(VLM_CODE)
    with watched(browser, repository, "[[sources]]" + SOURCES.split("[[sources]]")[2] + QUESTIONS):
        browser.wait("document.querySelector('.camera .answers')?.textContent.endsWith('visitor: Who is the face?')")
        browser.wait("document.querySelector('.camera .warning')?.textContent.startsWith(arguments[0])",
                     "Question parcel: Request for unknown model: 'absent'")  # fmt: skip
        assert browser.console() == []


def test_rows_are_gray_while_the_server_is_gone(browser: Any, repository: Any) -> None:
    repository.add("one", identity_config())
    with serve(repository.path) as server:
        browser.open(server.url("/"))
        browser.wait(f"{row('one')}?.innerText.includes('READY')")
        server.stop()
        browser.wait("document.querySelector('#problem').textContent.startsWith('The server does not answer.')")
        assert browser.run(f"return getComputedStyle({row('one')}).filter") == "grayscale(1)"
        assert browser.run("return document.querySelector('#ready').textContent") == "no answer"
        browser.console()
        browser.open("about:blank")


def test_a_file_dropped_beside_the_zone_does_not_replace_the_page(page: Any) -> None:
    script = """
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File(["x"], "picture.jpg", { type: "image/jpeg" }));
    const drop = new DragEvent("drop", { dataTransfer, cancelable: true, bubbles: true });
    document.querySelector("#events").dispatchEvent(drop);
    return drop.defaultPrevented;
    """
    assert page.run(script)


def test_heat_is_shown_with_its_limits(page: Any, board: Any) -> None:
    board.set_temperature("tj-thermal", 98.5)
    try:
        page.wait("document.querySelector('#machine-state').textContent === 'HOT'")
        page.wait("document.querySelector('#machine-charts').innerText.includes('held back')")
    finally:
        board.set_temperature("tj-thermal", 45.0)


SECONDS_OF_CURVE = r"""
window.secondsOfCurve = () => {
  const words = document.querySelector("[data-chart='temperature'] .foot").innerText.trim().split(/\s+/);
  return Number(words.at(-2)) * { s: 1, min: 60 }[words.at(-1)];
};
"""


def test_curves_have_a_past_when_the_page_is_opened(page: Any, server: Any) -> None:
    page.wait("document.querySelector('[data-chart=\"temperature\"]')")
    history = "fetch('/edge/v1/history').then((reply) => reply.json()).then((found) => arguments[0](found.ages_s))"
    while len(ages := page.run_async(history)) < 3:
        pass
    assert ages == sorted(ages, reverse=True)
    page.open(server.url("/"))
    for chart in ("temperature", "load limit", "busy instances", "waiting", "requests"):
        page.wait(f"document.querySelector('[data-chart=\"{chart}\"] .line')?.getAttribute('d').split('L').length >= 3")
    # The page draws its own readings first, and those from before it was opened when the server has sent them.
    page.run(SECONDS_OF_CURVE)
    page.wait("secondsOfCurve() >= Math.max(10, 8 + performance.now() / 1000)")


REQUESTS_BETWEEN_TWO_READINGS = """
window.rates = [];
const askServer = window.fetch;
let left = 20;
window.fetch = async (path, options) => {
  const response = await askServer(path, options);
  if (String(path).endsWith("edge/v1/activity")) {
    const infer = (body) => askServer("v2/models/scale/infer", { method: "POST", body });
    const inputs = [{ name: "INPUT0", datatype: "FP32", shape: [1, 4], data: [1, 2, 3, 4] }];
    for (; left; left -= 1) await infer(JSON.stringify({ inputs }));
  }
  return response;
};
document.addEventListener("DOMContentLoaded", () => new MutationObserver(() => {
  const value = document.querySelector("[data-chart='requests'] .value")?.textContent;
  if (value && value !== window.rates.at(-1)) window.rates.push(value);
}).observe(document.body, { childList: true, subtree: true, characterData: true }));
"""
"""Sends requests as soon as the page has read the counts once. Collects what the curve of requests shows."""


def test_two_readings_in_quick_succession_make_no_spike_in_the_curve(page: Any, server: Any) -> None:
    page.wait("document.querySelector('li[data-kind=\"server.ready\"]')")
    added = page.command("Page.addScriptToEvaluateOnNewDocument", source=REQUESTS_BETWEEN_TWO_READINGS)
    try:
        page.open(server.url("/"))
        page.wait("window.rates.some((rate) => parseFloat(rate) > 0)")
    finally:
        page.command("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])
    before, *rates = page.run("return window.rates")
    assert before == "–", "the page read the counts once"
    # 20 requests, and events that have the page read again at once: over a second or more they are 20/s at most.
    assert max(float(rate.split("/")[0]) for rate in rates) <= 20


def test_without_a_key_the_page_offers_no_model_control(page: Any) -> None:
    page.wait(f"{row('scale')}?.innerText.includes('READY')")
    page.click('[data-model="scale"] .link')
    page.click('[data-part="model-versions"]')
    page.wait("document.querySelector('#model-versions tbody tr')")
    assert page.run("return document.querySelectorAll('#model-actions button, #model-versions button').length") == 0
    assert page.run("return document.querySelector('#key').hidden")


def test_with_a_token_models_are_unloaded_loaded_and_rolled_back(browser: Any, repository: Any, tmp_path: Path) -> None:
    repository.add("one", identity_config())
    for version in (1, 2):
        repository.add("two", identity_config(), version)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"anna {hashlib.sha256(b'open sesame').hexdigest()} model-repository,view\n")
    flags = ("--model-control-mode=explicit", "--load-model=*", f"--auth-tokens-file={tokens}")
    with serve(repository.path, *flags) as server:
        browser.console()
        browser.open(server.url("/"))
        browser.wait("document.querySelector('#events-note').textContent.includes('need a key')")
        browser.wait(f"{row('one')}?.innerText.includes('READY')")
        browser.click('[data-part="model-versions"]')
        browser.wait("document.querySelector('#model-versions').innerText === 'Versions need a key.'")
        assert browser.run("return document.querySelectorAll('#model-actions button').length") == 0
        # Without the right to the index nobody can say how many there are.
        assert browser.run("return document.querySelector('#models-count').textContent") == "2 ready"
        browser.click("#key")
        browser.run(KEY, "wrong")
        browser.click('#key-dialog button[value="save"]')
        browser.wait("document.querySelector('#key-result').textContent.includes('does not accept')")
        browser.run(KEY, "")
        browser.type("#key-value", "open sesame\ue007")
        browser.wait("document.querySelector('[aria-label=\"Unload one\"]')")
        browser.wait("document.querySelector('#events-note').hidden && document.querySelector('#events-list li')")
        browser.click('[aria-label="Unload one"]')
        browser.wait("document.querySelector('[aria-label=\"Load one\"]')")
        browser.click('[aria-label="Load one"]')
        browser.wait(f"{row('one')}?.innerText.includes('READY')")
        browser.wait("document.querySelector('#model-versions tbody')?.innerText.includes('READY')")
        assert browser.run("return document.querySelectorAll('#model-versions button').length") == 0
        browser.click('[data-model="two"] .link')
        browser.wait("document.querySelector('[aria-label=\"Roll back two to version 1\"]')")
        assert browser.run("return document.querySelectorAll('#model-versions button').length") == 1
        browser.click('[aria-label="Roll back two to version 1"]')
        browser.wait("document.querySelector('#models-rows').innerText.includes('pinned to version 1')")
        browser.wait("document.querySelector('li[data-kind=\"model.pinned\"]')")
        browser.wait("document.querySelector('[aria-label=\"Remove the pin of two\"]')")
        browser.click('[aria-label="Remove the pin of two"]')
        browser.wait("!document.querySelector('#models-rows').innerText.includes('pinned')")
        browser.click('[data-part="model-loads"]')
        browser.wait(
            "/two version 1 is pinned[^]*two version 2 is ready/.test(document.querySelector('#model-loads').innerText)"
        )
        # Repeated events are one entry, each kind can be chosen, and each is a sentence.
        browser.run(CROSSINGS)
        browser.click("#key")
        browser.click('#key-dialog button[value="save"]')
        browser.wait("document.querySelector('li[data-kind=\"line.crossed\"]')?.innerText.includes('12 times')")
        items = "[...document.querySelectorAll('#events-list li:not([hidden])')]"
        shown = f"return {items}.map((one) => one.lastChild.innerText)"
        assert browser.run(shown) == ["door: person 12 crosses gate, in", "one version 1 is ready"]
        browser.run(
            "const kind = document.querySelector('#events-kind'); kind.value = 'model.ready';"
            "kind.dispatchEvent(new Event('change'))"
        )
        assert browser.run(shown) == ["one version 1 is ready"]
        assert browser.console() == []
        browser.run("sessionStorage.clear()")
        browser.open("about:blank")
        assert server.stop() == 0


CROSSINGS = """
const events = [{ kind: "model.ready", name: "one", version: 1 }];
for (let track = 1; track <= 12; track++) {
  events.push({
    kind: "line.crossed", source: "door", line: "gate", label: "person", track_id: track, direction: "in",
  });
}
const lines = events.map((event, number) => `data: ${JSON.stringify({ number, time_s: 0, ...event })}\\n\\n`);
const { fetch } = window;
window.fetch = async (path, options) => {
  if (!path.startsWith("edge/v1/events")) return fetch(path, options);
  const open = new ReadableStream({ start: (stream) => stream.enqueue(new TextEncoder().encode(lines.join(""))) });
  return new Response(open, { headers: { "Edge-Server-Run": "another" } });
};
"""
"""Has the stream of events answer with twelve objects that cross a line."""

HOLD_ACCESS = """
window.verdicts = [];
window.held = [];
const result = document.querySelector("#key-result");
const collect = () => result.textContent && window.verdicts.push(result.textContent);
new MutationObserver(collect).observe(result, { childList: true });
const { fetch } = window;
window.fetch = async (path, options) => {
  const response = await fetch(path, options);
  if (window.isHeld && path.endsWith("edge/v1/page")) await new Promise((release) => window.held.push(release));
  return response;
};
window.hold = (isHeld) => {
  window.isHeld = isHeld;
  window.held.splice(0).forEach((release) => release());
};
"""
"""Collects what the page says about keys. Holds the answers that say what it may do, as a slow network does."""


def test_only_the_answer_to_a_request_with_the_key_judges_it(browser: Any, repository: Any, tmp_path: Path) -> None:
    repository.add("one", identity_config())
    tokens = tmp_path / "tokens"
    words = [hashlib.sha256(word).hexdigest() for word in (b"open sesame", b"only look")]
    tokens.write_text("anna {} model-repository\nben {} view\n".format(*words))
    with serve(repository.path, f"--auth-tokens-file={tokens}") as server:
        browser.console()
        browser.open(server.url("/"))
        browser.wait(f"{row('one')}?.innerText.includes('READY')")
        browser.run(HOLD_ACCESS)
        for key, then in (
            ("wrong", "document.querySelector('#key-dialog').open && window.verdicts.length"),
            ("open sesame", "document.querySelector('#events-note').hidden"),
            ("only look", "!document.querySelector('#events-note').hidden"),
        ):
            browser.run("window.hold(true)")
            browser.wait("window.held.length === 1")
            browser.click("#key")
            browser.run(KEY, key)
            browser.click('#key-dialog button[value="save"]')
            browser.run("window.hold(false)")
            browser.wait(then)
        assert browser.run("return window.verdicts") == ["The server does not accept this key."]
        assert not browser.run("return document.querySelector('#key-dialog').open")
        assert browser.console() == []
        browser.run("sessionStorage.clear()")
        browser.open("about:blank")


def test_untrusted_names_are_shown_as_text(page: Any, server: Any) -> None:
    with camera(server, "<img src=x onerror=alert(1)>"):
        page.wait("document.querySelector('.camera h3')?.textContent === '<img src=x onerror=alert(1)>'")
        page.wait("document.querySelector('.camera img')?.naturalWidth > 0")


# Each width and each colour once in .ci/run.
@pytest.mark.parametrize(
    ("size", "is_dark"),
    [
        pytest.param((1280, 900), True, id="desktop-dark"),
        pytest.param((390, 844), False, id="phone-light"),
        pytest.param((1280, 900), False, marks=pytest.mark.long, id="desktop-light"),
        pytest.param((390, 844), True, marks=pytest.mark.long, id="phone-dark"),
    ],
)
def test_axe_reports_no_serious_violation(page: Any, server: Any, size: tuple[int, int], is_dark: bool) -> None:
    axe = os.environ.get("EDGE_TEST_AXE", "")
    if not axe:
        pytest.skip("no axe-core: tests/e2e/fetch_chromium.sh fetches it from npm's registry")
    page.look(*size, is_dark=is_dark)
    with camera(server):
        page.wait("document.querySelector('.camera img')?.naturalWidth > 0")
        page.wait("document.querySelector('#try-form form, #try-drop')")
        found = []
        for part in page.run("return [...document.querySelectorAll('[data-part]')].map((one) => one.dataset.part)"):
            page.click(f'[data-part="{part}"]')
            page.wait("document.querySelector(`#${arguments[0]} *`)", part)
            found += faults(page, Path(axe))
        page.open(server.url("/docs/api"))
        page.wait("document.querySelectorAll('.operation').length > 40")
        found += faults(page, Path(axe))
        page.open(server.url("/docs#operations.md"))
        page.wait("document.querySelector('.document table')")
        found += faults(page, Path(axe))
    assert found == []


def test_the_documents_can_be_read_and_link_each_other(page: Any) -> None:
    page.wait("!document.querySelector('#documents-link').hidden")
    page.click("#documents-link")
    page.wait("document.querySelector('.document h1')")
    missing = []
    known = [path.name for path in (*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/reference").glob("*.md"))]
    for name in known:
        page.run("location.hash = arguments[0]", name)
        page.wait("document.title.startsWith(document.querySelector('.document h1')?.textContent)")
        links = page.run(
            "return [...document.querySelectorAll('.document a')].map((link) => link.getAttribute('href'))"
        )
        missing += [(name, link) for link in links if link.startswith("#") and link[1:].split("/")[0] not in known]
        assert not page.run("return document.querySelector('.document .error')")
    assert missing == []


def faults(page: Any, axe: Path) -> list[str]:
    page.run(axe.read_text())
    found = page.run_async("axe.run().then((found) => arguments[0](found.violations))")
    return [
        f"{item['impact']} {item['id']}: {item['help']}: {[node['html'][:200] for node in item['nodes'][:3]]}"
        for item in found
        if item["impact"] in ("serious", "critical")
    ]


def test_the_page_fits_a_phone(page: Any, server: Any) -> None:
    page.look(390, 844)
    with camera(server):
        page.wait("document.querySelector('.camera img')?.naturalWidth > 0")
        assert page.run("return document.documentElement.scrollWidth") <= 390
    page.open(server.url("/docs/api"))
    page.wait("document.querySelectorAll('.operation').length > 40")
    assert page.run("return document.documentElement.scrollWidth") <= 390


def write_cameras(path: Path, *names: str) -> None:
    """Write a sources file of cameras that all show the demo picture."""
    table = '[[sources]]\nname = "{}"\nurl = "demo"\nmodel = "face_detection_yunet"\nfps = 10\n'
    path.write_text("".join(table.format(name) for name in names))


WRITES_PICTURES = pytest.mark.skipif(
    "EDGE_TEST_SCREENSHOTS" not in os.environ, reason="EDGE_TEST_SCREENSHOTS names no folder"
)
MAX_LOOP_BYTES = 1_000_000
LOOP_FRAME_MS = 350


@WRITES_PICTURES
def test_pictures_for_the_documentation(browser: Any, board: Any, tmp_path: Path) -> None:
    folder = Path(os.environ["EDGE_TEST_SCREENSHOTS"])
    cameras = tmp_path / "cameras.toml"
    write_cameras(cameras, "front_door", "back_yard", "gate", "hall")
    flags = (
        f"--sysfs-root={board.root}", "--governor-interval-ms=200", f"--sources-file={cameras}",
        "--metrics-config=summary_latencies=true",
    )  # fmt: skip
    with serve(ROOT / "model_repository", *flags) as server:
        browser.look(1280, 900)
        browser.open(server.url("/"))
        browser.wait("document.querySelectorAll('.camera img:not([hidden])').length === 4")
        for step in range(24):
            board.set_temperature("tj-thermal", 55.0 + step)
            path, kind = "/v2/models/efficientnet_lite0/infer", {"Content-Type": "image/jpeg"}
            server.request("POST", path, PICTURE.read_bytes(), kind)
            time.sleep(1)
        browser.run("document.documentElement.style.scrollBehavior = 'auto'")
        drop(browser, PICTURE.read_bytes())
        browser.wait("document.querySelector('.scores')?.innerText.includes('espresso')")
        browser.look(1280, 1850)
        browser.run("window.scrollTo(0, 0)")
        browser.screenshot(folder / "page_light.webp", quality=80)
        browser.click('[data-part="model-curves"]')
        browser.look(1280, 1850, is_dark=True)
        browser.screenshot(folder / "page_dark.webp", quality=80)
        browser.look(390, 1370)
        browser.screenshot(folder / "page_phone.webp", quality=80)
        browser.open("about:blank")
    board.set_temperature("tj-thermal", 45.0)


@WRITES_PICTURES
def test_the_loop_of_a_folder_that_changes_while_frames_flow(browser: Any, repository: Any, tmp_path: Path) -> None:
    from PIL import Image, ImageDraw, ImageFont

    models = ROOT / "model_repository"
    shutil.copytree(models / "face_detection_yunet", repository.path / "face_detection_yunet")
    cameras = tmp_path / "cameras.toml"
    write_cameras(cameras, "front_door", "back_yard", "gate", "hall")
    shots: list[Any] = []

    def show(command: str, count: int, until: str = "true") -> None:
        """Add frames with a command below them: `count`, and more until an expression is true."""
        end = time.monotonic() + 60
        while count > 0 or not browser.run(f"return {until}"):
            assert time.monotonic() < end, until
            browser.screenshot(tmp_path / "shot.png")
            page = Image.open(tmp_path / "shot.png").convert("RGB")
            shot = Image.new("RGB", (page.width, page.height + 34), "#0e1318")
            shot.paste(page)
            pen = ImageDraw.Draw(shot)
            pen.text((16, page.height + 6), f"$ {command}", "#e5eaf0", ImageFont.load_default(18))
            shots.append(shot)
            count -= 1

    with serve(repository.path, f"--sources-file={cameras}") as server:
        browser.look(1024, 700)
        browser.open(server.url("/"))
        browser.wait("document.querySelectorAll('.camera img:not([hidden])').length === 4")
        show("edge-server serve --model-repository=models --sources-file=cameras.toml", 6)
        shutil.copytree(models / "efficientnet_lite0", repository.path / "efficientnet_lite0")
        ready = f"{row('efficientnet_lite0')}?.innerText.includes('READY')"
        show("cp -r efficientnet_lite0 models/", 8, ready)
        show("cp -r efficientnet_lite0 models/", 6)
        shutil.rmtree(repository.path / "efficientnet_lite0")
        show("rm -r models/efficientnet_lite0", 6, f"!({ready})")
        show("rm -r models/efficientnet_lite0", 4)
        browser.console()
        browser.open("about:blank")
    path = Path(os.environ["EDGE_TEST_SCREENSHOTS"]) / "page_loop.webp"
    shots[0].save(path, save_all=True, append_images=shots[1:], duration=LOOP_FRAME_MS, loop=0, quality=60, method=4)
    assert path.stat().st_size < MAX_LOOP_BYTES
