"""The choice of the runtime for an ONNX file by times that were measured."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_server.core.model_spec import ModelFile
from edge_server.errors import BadModelConfig
from edge_server.repository.choice import runtime_times
from edge_server.repository.choice.runtime_times import FILE_NAME, RuntimeTimes
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.resolve_version import ResolveOptions, resolve

BUNDLED = Path(__file__).parents[3] / "model_repository"
ORDER = ("onnxruntime", "openvino")


@pytest.fixture
def file(tmp_path: Path) -> ModelFile:
    path = tmp_path / "models" / "m" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes((BUNDLED / "face_detection_yunet/1/model.onnx").read_bytes())
    return ModelFile(path, path.parents[1], 1)


@pytest.fixture
def times(tmp_path: Path) -> RuntimeTimes:
    return RuntimeTimes(tmp_path)


def test_a_runtime_that_is_much_faster_goes_first_and_the_note_says_why(times: RuntimeTimes, file: ModelFile) -> None:
    assert times.put(file.path, {"onnxruntime": 19.6, "openvino": 4.9})
    model = Scanner([file.model_dir.parent]).find("m")
    assert model is not None
    spec = resolve(model, 1, ResolveOptions(runtime_times=times)).spec
    assert spec.backend == "openvino"
    assert spec.notes[0].startswith("openvino: 4.0 times as fast as onnxruntime, measured 20")
    # Another server, which has read nothing yet, and one without a state folder.
    chosen = RuntimeTimes(file.path.parents[3]).choose(file, ORDER)
    assert chosen is not None
    assert chosen.order == ("openvino", "onnxruntime")
    spec = resolve(model, 1, ResolveOptions()).spec
    assert not spec.notes, "; ".join(spec.notes)
    assert (spec.backend, spec.unlogged_notes) == ("onnxruntime", ("onnxruntime: fixed order",))


@pytest.mark.parametrize("stated", ['backend: "openvino"', 'platform: "onnxruntime_onnx"'])
def test_a_stated_runtime_wins_over_a_measurement(times: RuntimeTimes, file: ModelFile, stated: str) -> None:
    times.put(file.path, {"onnxruntime": 19.6 if "onnxruntime" in stated else 4.9, "openvino": 10.0})
    (file.model_dir / "config.pbtxt").write_text(stated)
    model = Scanner([file.model_dir.parent]).find("m")
    assert model is not None
    spec = resolve(model, 1, ResolveOptions(runtime_times=times)).spec
    assert spec.backend in stated
    assert not any("order" in note or "fast" in note for note in (*spec.notes, *spec.unlogged_notes))
    assert not times.has_unmeasured


def test_a_gpu_that_the_configuration_asks_for_wins_over_a_measurement_on_the_cpu(
    times: RuntimeTimes, file: ModelFile
) -> None:
    times.put(file.path, {"onnxruntime": 19.6, "openvino": 4.9})
    config = file.model_dir / "config.pbtxt"
    asks_gpu = "instance_group { kind: KIND_GPU }"
    config.write_text(asks_gpu)
    model = Scanner([file.model_dir.parent]).find("m")
    assert model is not None
    spec = resolve(model, 1, ResolveOptions(runtime_times=times, gpu_count=1)).spec
    assert (spec.backend, spec.instance_groups[0].kind.name) == ("onnxruntime", "GPU")
    assert any("backend 'openvino' was skipped for 'onnxruntime'" in note for note in spec.notes)
    for device in ("", 'parameters { key: "TARGET_DEVICE" value { string_value: "CPU" } }'):
        config.write_text(f'backend: "openvino" {asks_gpu} {device}')
        model = Scanner([file.model_dir.parent]).find("m")
        assert model is not None
        with pytest.raises(
            BadModelConfig, match="given KIND_GPU: backend openvino computes on the device that its para"
        ):
            resolve(model, 1, ResolveOptions(gpu_count=1))


@pytest.mark.parametrize(
    ("measured", "first"),
    [
        ((11.9, 10.0), "onnxruntime"),
        ((12.0, 10.0), "openvino"),
        ((5.0, 10.0), "onnxruntime"),
        ((None, 10.0), "onnxruntime"),
        ((10.0, None), "onnxruntime"),
        ((None, None), "onnxruntime"),
    ],
)
def test_the_fixed_order_stays_below_20_percent_and_without_two_times(
    times: RuntimeTimes, file: ModelFile, measured: tuple[float | None, float | None], first: str
) -> None:
    times.put(file.path, dict(zip(ORDER, measured, strict=True)))
    chosen = times.choose(file, ORDER)
    assert chosen is not None
    assert chosen.order[0] == first
    assert not times.has_unmeasured


def test_a_faster_runtime_that_answers_otherwise_does_not_go_first_and_the_note_says_why(
    times: RuntimeTimes, file: ModelFile
) -> None:
    assert times.put(file.path, dict(zip(ORDER, (20.0, 10.0), strict=True)), disagreement="output 'y' differs by 0.3")
    # Also after it was read from the file.
    for known in (times, RuntimeTimes(file.path.parents[3])):
        chosen = known.choose(file, ORDER)
        assert chosen is not None
        assert chosen.order == ORDER
        assert chosen.reason == "fixed order, though openvino is 2.0 times as fast: output 'y' differs by 0.3"


def change_file(file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(file.path.read_bytes())
    content[-1] ^= 1
    file.path.write_bytes(content)


def change_processor(file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_times, "processor", lambda: "another x2")


def change_version(file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_times, "runtime_version", lambda name: "1.0" if name == "onnxruntime" else "2")


@pytest.mark.parametrize("change", [change_file, change_processor, change_version])
def test_a_change_of_file_processor_or_version_asks_for_a_new_measurement(
    times: RuntimeTimes,
    file: ModelFile,
    change: Callable[[ModelFile, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times.put(file.path, {"openvino": 19.6, "onnxruntime": 4.9})
    assert times.choose(file, ORDER)
    change(file, monkeypatch)
    assert times.choose(file, ORDER) is None
    assert times.take_unmeasured() == [file]
    assert times.take_unmeasured() == []


def test_a_moved_copy_is_recognised_by_its_content_and_other_files_are_not_read(
    times: RuntimeTimes, file: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times.put(file.path, {"openvino": 19.6, "onnxruntime": 4.9})
    copy = tmp_path / "copy.onnx"
    copy.write_bytes(file.path.read_bytes())
    assert times.choose(ModelFile(copy, tmp_path, 1), ORDER)
    monkeypatch.setattr(runtime_times, "_digest", lambda path: pytest.fail(f"{path} was read"))
    assert times.choose(file, ORDER), "the same file is recognised by its stamp"
    copy.write_bytes(b"of another size")
    assert times.choose(ModelFile(copy, tmp_path, 1), ORDER) is None


def test_the_times_of_a_language_model_count_for_as_many_texts_at_once(times: RuntimeTimes, file: ModelFile) -> None:
    engines = "openvino_genai", "llama_cpp"
    times.put(file.path, {"openvino_genai": 400.0, "llama_cpp": 800.0}, 8)
    times.put(file.path, {"openvino_genai": 90.0, "llama_cpp": 45.0}, 1)
    found = {count: RuntimeTimes(times._path.parent).choose(file, engines[::-1], count) for count in (1, 8, 4)}
    assert found[4] is None
    assert [choice and choice.order[0] for choice in found.values()] == ["llama_cpp", "openvino_genai", None]
    assert found[8] is not None
    assert found[8].reason.startswith("2.0 times as fast as llama_cpp, measured 20")
    times.choose(file, engines, 2)
    assert times.take_unmeasured() == [], "a server does not measure language models by itself"


GOOD: dict[str, Any] = {
    "sha256": "0" * 64, "size": 1, "stamp": "", "processor": "", "day": "2026-11-25", "times": {},
    "disagreement": "",
}  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", '{"measurements": 3}', "[" * 100_000,
        *(
            json.dumps({"measurements": [{**GOOD, **bad}]})
            for bad in (
                {"sha256": "x"}, {"day": "tomorrow\n"}, {"size": "x"}, {"at_once": "x"}, {"times": []},
                {"times": {"openvino": 3}}, {"times": {"openvino": ["1", -1]}}, {"times": {"openvino": ["1", "NaN"]}},
            )
        ),
    ],
)  # fmt: skip
def test_a_damaged_file_counts_as_empty_with_a_warning(
    times: RuntimeTimes, file: ModelFile, tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    with caplog.at_level(logging.WARNING):
        assert times.choose(file, ORDER) is None
    assert "runtimes are chosen in the fixed order" in caplog.text
    assert times.put(file.path, {"openvino": 19.6, "onnxruntime": 4.9})
    assert times.choose(file, ORDER)


def test_a_folder_that_is_not_there_is_made(file: ModelFile, tmp_path: Path) -> None:
    assert RuntimeTimes(tmp_path / "absent/too").put(file.path, {"openvino": 4.9, "onnxruntime": 19.6})
    assert RuntimeTimes(tmp_path / "absent/too").choose(file, ORDER)


def test_a_folder_that_cannot_be_written_is_reported_once_and_entries_are_kept_in_memory(
    file: ModelFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    times = RuntimeTimes(tmp_path / "file/below")
    for _ in range(2):
        assert not times.put(file.path, {"openvino": 4.9, "onnxruntime": 19.6})
    assert caplog.text.count("times of runtimes are kept in memory") == 1
    chosen = times.choose(file, ORDER)
    assert chosen is not None
    assert chosen.order[0] == "openvino"


def test_how_a_model_does_in_other_precisions_is_a_note_of_its_status(times: RuntimeTimes, file: ModelFile) -> None:
    note = "precision: openvino bf16 is 1.8 times as fast as f32, measured 2026-11-30"
    assert times.put_precisions(file.path, "another trial before")
    assert times.put_precisions(file.path, note)
    times.put(file.path, {"onnxruntime": 5.0, "openvino": 5.0})
    model = Scanner([file.model_dir.parent]).find("m")
    assert model is not None
    # A server that reads the file of the command's.
    spec = resolve(model, 1, ResolveOptions(runtime_times=RuntimeTimes(file.path.parents[3]))).spec
    assert spec.unlogged_notes[-1] == note
    assert note in spec.routine_notes
    assert spec.backend == "onnxruntime"
    assert not spec.parameters, "nothing but the user changes a precision"
    file.path.write_bytes(file.path.read_bytes() + b" ")
    assert RuntimeTimes(file.path.parents[3]).precision_note(file.path) == ""
