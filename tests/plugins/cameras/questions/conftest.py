"""A serving core with Python models that a test controls, which answer questions about pictures."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from edge_server.config.merge_settings import parse_serve
from edge_server.plugin import Plugin, RunningPlugin
from edge_server.plugins.cameras.questions.question import QuestionAnswer, QuestionEntry
from edge_server.plugins.cameras.questions.question_set import QuestionSet
from edge_server.plugins.cameras.source_and_sink_settings import SourceEntry
from edge_server.plugins.governor.governor_admission import GovernorAdmission
from edge_server.process.composition_root import build
from edge_server.protocol.frame_messages import Detection, FrameHeader, FrameResult
from edge_server.telemetry.log import LogSettings

PATIENCE_S = 60.0

CODE = """
import json, sys
import cv2
import numpy as np
import triton_python_backend_utils as pb_utils

control = sys.modules["question_control"]


class TritonPythonModel:
    def initialize(self, args):
        assert args["model_name"] != "late" or control.goes_on.wait(20)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        pixels = cv2.imdecode(np.frombuffer(given["image"].item(), np.uint8), cv2.IMREAD_COLOR)
        control.asked.append((given, pixels))
        control.is_asked.set()
        assert control.goes_on.wait(20)
        if control.error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(control.error))
        height, width = pixels.shape[:2]
        text = control.text or f"{width}x{height}: {given['text_input'].item().decode()}"
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([text.encode()], object))])
"""
CONFIG = """
backend: "python"
input { name: "text_input" data_type: TYPE_STRING dims: [1] }
input { name: "image" data_type: TYPE_STRING dims: [-1] }
input { name: "sampling_parameters" data_type: TYPE_STRING dims: [1] optional: true }
input { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [1] optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: [-1] }
"""
TEXT_ONLY = """
backend: "python"
input { name: "text_input" data_type: TYPE_STRING dims: [1] }
output { name: "text_output" data_type: TYPE_STRING dims: [-1] }
"""


class Control(ModuleType):
    """What the models do, and the inputs and pixels that they got."""

    def __init__(self) -> None:
        super().__init__("question_control")
        self.goes_on = threading.Event()
        self.is_asked = threading.Event()
        self.reset()

    def reset(self) -> None:
        self.asked: list[tuple[dict[str, Any], Any]] = []
        self.error = self.text = ""
        self.goes_on.set()
        self.is_asked.clear()


class GovernedCore:
    """A core with the models `vlm` and `other`, which take pictures, and `chat`, which takes none. `late` is not loaded
    yet; its load ends once the control lets it go on."""

    def __init__(self, path: Path) -> None:
        admission = self.admission = GovernorAdmission()

        class Governor(Plugin):
            name = "governor"

            def prepare(self, config: object) -> RunningPlugin:
                running = RunningPlugin()
                running.admission = admission
                return running

        for name, config in {"vlm": CONFIG, "other": CONFIG, "late": CONFIG, "chat": TEXT_ONLY}.items():
            (path / name / "1").mkdir(parents=True)
            (path / name / "1/model.py").write_text(CODE)
            (path / name / "config.pbtxt").write_text(config)
        config = parse_serve([f"--model-repository={path}", "--model-control-mode=explicit"], {}).config
        self.parts = build(config, LogSettings(config.log), (Governor(),))
        self.service = self.parts.service
        self.service.started()
        for name in ("vlm", "other", "chat"):
            self.service.load_model(name)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GovernedCore]:
    control = Control()
    sys.modules["question_control"] = control
    made = GovernedCore(tmp_path_factory.mktemp("models"))
    yield made
    made.parts.close(PATIENCE_S)
    del sys.modules["question_control"]


@pytest.fixture
def control(core: GovernedCore) -> Iterator[Control]:
    made: Any = sys.modules["question_control"]
    made.reset()
    yield made
    made.goes_on.set()


class Door:
    """A camera whose objects a test names, and the answers to its questions."""

    def __init__(self, core: GovernedCore, *questions: QuestionEntry) -> None:
        self.answers: list[QuestionAnswer] = []
        self.questions = QuestionSet(core.service, self.answers.append)
        self.entry = SourceEntry("door", "demo", "faces", questions=questions)
        self.questions.apply({"door": self.entry})
        self._seq = 0

    def see(self, label: str, track: int, box: tuple[float, float, float, float] = (10, 20, 30, 60)) -> None:
        """See a frame of 100x80 with one object. Its gray value is the object's number."""
        self._seq += 1
        pixels = np.full((80, 100, 3), track, np.uint8)
        result = FrameResult(
            FrameHeader(5, 6, "door", self._seq), detections=(Detection(*box, 0.9, 0, label, track_id=track),)
        )
        self.questions.on_result(self.entry, result, "camera", lambda: pixels, is_tracked=True)

    @property
    def report(self):
        (found,) = self.questions.reports()
        assert found.asked == sum(
            (found.answered, found.replaced, found.expired, found.shed, found.failed, found.waiting)
        )
        return found


@pytest.fixture
def open_door(core: GovernedCore, control: Control) -> Iterator[Callable[..., Door]]:
    made: list[Door] = []

    def make(*questions: QuestionEntry, **keys: Any) -> Door:
        one = QuestionEntry("who", "vlm", "Who is the {label} at {camera}?", **{"interval_s": 0.0, **keys})
        made.append(Door(core, *(questions or (one,))))
        return made[-1]

    yield make
    control.goes_on.set()
    for door in made:
        door.questions.close(PATIENCE_S)
    assert [thread.name for thread in threading.enumerate() if thread.name == "camera-questions"] == []
