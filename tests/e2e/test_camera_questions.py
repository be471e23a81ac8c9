"""Questions about a camera's pictures in the installed server: the file of docs/camera-results.md, from the demo's face
to sinks, events, metrics and HTTP; and what `edge-server check` says about a model that takes no pictures."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.eventually import eventually
from tests.kit.server import COMMAND, serve
from tests.kit.site import Handler, Site

ROOT = Path(__file__).parents[2]

VLM = """
backend: "python"
input { name: "text_input" data_type: TYPE_STRING dims: [1] }
input { name: "image" data_type: TYPE_STRING dims: [-1] }
output { name: "text_output" data_type: TYPE_STRING dims: [-1] }
"""
VLM_CODE = """
import cv2
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
        image = pb_utils.get_input_tensor_by_name(request, "image").as_numpy()
        height, width = cv2.imdecode(np.frombuffer(image.item(), np.uint8), cv2.IMREAD_COLOR).shape[:2]
        text = f"{width}x{height}: {prompt.item().decode()}".encode()
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([text], object))])
"""


def sources_of_the_page() -> str:
    """Return the file of docs/camera-results.md, with the demo's face in place of a camera and its person."""
    page = (ROOT / "docs/camera-results.md").read_text()
    (text,) = re.findall(r"^<!-- file questions.toml -->\n```toml\n(.*?)```$", page, re.MULTILINE | re.DOTALL)
    for own, demo in (
        ("rtsp://user:password@192.168.1.20/stream1", "demo"), ('"yolo11n"', '"face_detection_yunet"'),
        ('"person"', '"face"'), ("mqtt://user:password@192.168.1.30", "mqtt://127.0.0.1:1"),
    ):  # fmt: skip
        assert own in text
        text = text.replace(own, demo)
    return text


@pytest.fixture
def hook() -> Iterator[Any]:
    class Hook(Handler):
        def do_POST(self) -> None:
            site.got.append(json.loads(self.body()))
            self.answer(status=204)

    site: Any
    with Site(Hook) as site:
        site.got = []
        yield site


@pytest.mark.full
def test_the_file_of_the_page_sends_the_answer_about_a_face_to_the_webhook_events_and_http(
    repository: Any, tmp_path: Path, hook: Any
) -> None:
    shutil.copytree(ROOT / "model_repository/face_detection_yunet", repository.path / "face_detection_yunet")
    (repository.add("my_vlm", VLM) / "1/model.py").write_text(VLM_CODE)
    file = tmp_path / "questions.toml"
    text = sources_of_the_page()
    file.write_text(text.replace("http://192.168.1.30:8123/", f"http://127.0.0.1:{hook.server_port}/"))
    with serve(repository.path, f"--sources-file={file}") as server:

        def answers() -> list[dict[str, Any]]:
            return [one for one in hook.got if one["kind"] == "question.answered"]

        assert eventually(lambda: bool(answers()))
        (answer,) = answers()
        expected = "384x288: Describe the face at the door in one sentence: clothes, what they carry, what they do."
        assert (answer["text"], answer["zone"], answer["label"], answer["track_id"]) == (expected, "porch", "face", 1)
        status, found = server.ask("/edge/v1/cameras/door/answers")
        assert status == 200
        assert [one["text"] for one in found["answers"]] == [expected]
        assert server.ask("/edge/v1/cameras/gate/answers")[0] == 404
        (question,) = server.ask("/edge/v1/cameras")[1]["questions"]
        assert (question["name"], question["asked"], question["answered"], question["reason"]) == ("visitor", 1, 1, "")
        assert "text" not in question
        _, events = server.ask("/edge/v1/events?follow=false")
        assert [one["text"] for one in events if one["kind"] == "question.answered"] == [expected]
        labels = 'source="door",question="visitor",model="my_vlm"'
        assert f'edge_questions_total{{{labels},result="answered"}} 1' in server.read_metrics()
        done = subprocess.run(
            [str(COMMAND), "status", f"--url=http://{server.http}"], capture_output=True, text=True, timeout=60
        )
        assert re.search(r"door/visitor +my_vlm +1 +1 ", done.stdout)

        # Without its model the camera goes on, and the reason is in the report.
        file.write_text(file.read_text().replace('"my_vlm"', '"absent"'))
        assert eventually(lambda: server.ask("/edge/v1/cameras")[1]["questions"][0]["failed"] == 1)
        (question,) = server.ask("/edge/v1/cameras")[1]["questions"]
        assert question["reason"].startswith("Request for unknown model: 'absent' is not found")
        (source,) = server.ask("/edge/v1/cameras")[1]["sources"]
        assert (source["state"], source["reason"], source["failures"]) == ("RUNNING", "", 0)
        assert server.stop() == 0


@pytest.mark.full
def test_check_names_a_question_whose_model_takes_no_pictures(
    repository: Any, tmp_path: Path, run_command: Any
) -> None:
    (repository.add("my_vlm", VLM.replace('"image"', '"picture"')) / "1/model.py").write_text(VLM_CODE)
    file = tmp_path / "questions.toml"
    file.write_text(sources_of_the_page())
    done = run_command("check", str(repository.path), f"--sources-file={file}")
    said = " ".join(done.stderr.split())
    assert (
        "question 'visitor' of source 'door' cannot be asked: model 'my_vlm' has no input 'image' of texts or bytes; "
        "it takes no pictures; its inputs are 'text_input', 'picture'" in said
    )
