"""The first opening of a file by OpenVINO in a child process."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_server.errors import LoadError
from edge_server.repository.choice import first_opening
from edge_server.repository.choice.first_opening import FirstOpenings
from edge_server.repository.choice.runtime_times import RuntimeTimes
from edge_server.repository.model_config.pbtxt import parse_text

onnx = pytest.importorskip("onnx")
BUNDLED = Path(__file__).parents[3] / "model_repository"


@pytest.fixture
def file(root: Path) -> Path:
    path = root / "m/1/model.onnx"
    path.parent.mkdir(parents=True)
    shutil.copy(BUNDLED / "face_detection_yunet/1/model.onnx", path)
    return path


@pytest.fixture
def open_first(tmp_path: Path, file: Path) -> Callable[[], None]:
    def run() -> None:
        openings = FirstOpenings(RuntimeTimes(tmp_path / "cache"), {})
        openings.check(parse_text(b"", "m"), file.parents[1], 1, file, "openvino")

    return run


def test_a_file_is_opened_in_a_process_once_and_again_when_its_content_changes(
    file: Path, open_first: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_first()
    with monkeypatch.context() as patched:
        patched.setattr(first_opening, "_open_in_child", lambda job: pytest.fail("a process was started"))
        open_first()
        # A copy with another time, as of a release that is unpacked again.
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(content)
        open_first()
    started: list[str] = []
    monkeypatch.setattr(first_opening, "_open_in_child", lambda job: started.append(job["model"]) or "")
    file.write_bytes(content[:-1] + b"\0")
    open_first()
    assert started == ["m"]


def test_a_file_that_ends_the_process_is_refused_each_time(
    open_first: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_opening, "MODULE", "tests_no_such_module")
    for _ in range(2):
        with pytest.raises(
            LoadError, match=r"model 'm' version 1, file 'model.onnx': openvino ends the process that opens it"
        ):
            open_first()


def test_a_process_that_hangs_does_not_hold_up_the_load(
    open_first: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(first_opening, "MODULE", "code")  # an interpreter that waits for more input
    monkeypatch.setattr(first_opening, "TIMEOUT_S", 0.5)
    open_first()
    assert "model 'm' is opened here: a process of its own needs over" in caplog.text


def test_a_file_that_ends_openvino_is_refused_with_the_signal(file: Path, open_first: Callable[[], None]) -> None:
    # Pad needs a second input.
    tensors = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 2]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Pad", ["x"], ["y"])], "g", tensors[:1], tensors[1:])
    file.write_bytes(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)]).SerializeToString()
    )
    with contextlib.ExitStack() as raised:
        caught = raised.enter_context(pytest.raises(LoadError))
        open_first()
        raised.pop_all()
        pytest.skip("this OpenVINO refuses the file in words; 2026.4 ends the process")
    assert "a child process was ended by SIG" in caught.value.message


def test_an_error_in_words_is_left_to_the_opening_that_follows(file: Path, open_first: Callable[[], None]) -> None:
    file.write_bytes(b"\x08 no model")
    open_first()


def test_the_weights_beside_an_ir_are_part_of_it(tmp_path: Path) -> None:
    times, model = RuntimeTimes(tmp_path), tmp_path / "model.xml"
    model.write_text("<net/>")
    (tmp_path / "model.bin").write_bytes(b"weights")
    assert not times.has_opened(model, "openvino")
    times.put_opened(model, "openvino")
    assert RuntimeTimes(tmp_path).has_opened(model, "openvino")
    assert not times.has_opened(model, "onnxruntime")
    (tmp_path / "model.bin").write_bytes(b"WEIGHTS")
    assert not times.has_opened(model, "openvino")
