"""Decisions of `edge-server optimize`: candidates, differences, the choice, inputs, the file and the bar."""

from __future__ import annotations

import os
import pty
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends.isolation.npz_tensor_files import load_tensors, save_tensors
from edge_server.cli.console import Progress, format_remaining
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.output_difference import OutputDifference
from edge_server.core.tensor import DType
from edge_server.errors import AlreadyExists, BadModelConfig, InvalidRequest, ServingFault
from edge_server.plugins.trials.accelerator_candidates import openvino_candidates
from edge_server.plugins.trials.best_candidate import Objective, SelectionRule, choose, percentile, rejection
from edge_server.plugins.trials.candidate import RuntimeCandidate, config_of
from edge_server.plugins.trials.candidate_list import candidates_for
from edge_server.plugins.trials.candidate_process import CandidateFailed
from edge_server.plugins.trials.comparison import CandidateTrial, ComparisonResult
from edge_server.plugins.trials.sample_inputs import batch_of, from_file, random_samples, usual_sizes
from edge_server.plugins.tuning import optimize_report as report
from edge_server.plugins.tuning import result_files
from edge_server.repository.model_config.pbtxt import parse_text, read_file

NO_GPU = "there is no GPU"
OF_INTEL = {"CPU": ("FP32", "BF16", "INT8"), "GPU": ("FP32", "BIN", "FP16", "INT8"), "NPU": ("FP16", "INT8")}


def device_lister(**reported: Any) -> Any:
    """Return a stub of the runtimes' device lists: by default each lists only the CPU."""
    return lambda name: reported.get(name, {"CPU": ("FP32",)} if name == "openvino" else {})


def trial(
    name: str, ms: float, memory: int, apart: float = 0.0, top1: float | None = None, rows: int = 1
) -> CandidateTrial:
    times = {1: [ms] * 10, **({rows: [ms * 2] * 10} if rows > 1 else {})}
    return CandidateTrial(
        RuntimeCandidate(name, "f32"),
        {},
        {"precision": "f32", "load_ms": 1.0},
        OutputDifference(apart, apart, top1),
        times,
        memory,
    )


def outcome(*trials: CandidateTrial, batch: int = 1) -> ComparisonResult:
    return ComparisonResult(trials, trials[0], {"count": 1, "source": "generated", "open": []}, batch)


@pytest.mark.parametrize(
    ("objective", "best"), [(Objective.LATENCY, "quick"), (Objective.THROUGHPUT, "wide"), (Objective.MEMORY, "small")]
)
def test_the_objective_decides_among_those_within_tolerance(objective: Objective, best: str) -> None:
    all_of_them = outcome(
        trial("plain", 10, 300), trial("quick", 4, 400), trial("small", 12, 100), trial("wide", 5, 500, rows=8),
        trial("far", 1, 1, apart=0.5), batch=8,
    )  # fmt: skip
    chosen = choose(all_of_them, SelectionRule(objective, 0.01))
    assert chosen is not None
    assert chosen.candidate.runtime == best


def test_of_candidates_equal_within_noise_the_first_is_chosen() -> None:
    chosen = choose(outcome(trial("first", 10.2, 1), trial("second", 10.0, 1)), SelectionRule(Objective.LATENCY, 0.01))
    assert chosen is not None
    assert chosen.candidate.runtime == "first"
    chosen = choose(outcome(trial("first", 10.5, 1), trial("second", 10.0, 1)), SelectionRule(Objective.LATENCY, 0.01))
    assert chosen is not None
    assert chosen.candidate.runtime == "second"


def test_disagreeing_classes_and_non_finite_outputs_are_rejected() -> None:
    terms = SelectionRule(Objective.LATENCY, 0.1, 0.9)
    assert rejection(trial("a", 1, 1, 0.05, 0.85), terms) == "too few best classes agree"
    assert rejection(trial("a", 1, 1, 0.05, 0.9), terms) == ""
    assert rejection(trial("a", 1, 1, float("inf"), 1.0), terms) == "beyond tolerance"
    assert rejection(trial("a", 1, 1, float("nan"), 1.0), terms) == "beyond tolerance"
    assert choose(outcome(trial("a", 1, 1, 0.5)), terms) is None


def test_the_rows_of_a_table_have_as_many_cells_as_its_header_also_for_failures() -> None:
    out = CandidateTrial(RuntimeCandidate("gone", "f32"), {}, reason="its process was ended by SIGSEGV")
    whole = outcome(trial("plain", 10, 300, rows=8), out, batch=8)
    for each in whole.trials:
        row = report.row(whole, each, None, SelectionRule(Objective.LATENCY, 0.01))
        assert len(row) == len(report.column_titles(whole))
    found = report.as_json(whole, None, SelectionRule(Objective.LATENCY, 0.01))
    assert found["chosen"] is None


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert percentile([7.0], 0.99) == 7.0


def test_tensors_are_passed_to_another_process_unchanged(tmp_path: Path) -> None:
    texts = np.array([[b"", b"a\x00"], ["né".encode(), b"\x00\x00"]], dtype=object)
    sets = [{"x/y": np.arange(6, dtype=np.float16).reshape(2, 3), "text": texts}, {"b": np.array([True])}]
    save_tensors(tmp_path / "sets.npz", sets)
    found = load_tensors(tmp_path / "sets.npz")
    assert [set(one) for one in found] == [set(one) for one in sets]
    for mine, theirs in zip(sets, found, strict=True):
        for name, array in mine.items():
            np.testing.assert_array_equal(theirs[name], array)


def spec(*inputs: InputSpec, batch: int = 0) -> ModelSpec:
    return ModelSpec("m", "b", "", batch, inputs, (OutputSpec("y", DType.FP32, (1,)),), ())


def test_random_samples_have_declared_shapes_and_types_and_are_reproducible() -> None:
    model = spec(
        InputSpec("image", DType.FP32, (3, -1)), InputSpec("ids", DType.INT64, (4,)), InputSpec("t", DType.BYTES, (1,)),
        InputSpec("h", DType.BF16, (2,)), InputSpec("extra", DType.FP32, (1,), is_optional=True), batch=8,
    )  # fmt: skip
    best_shapes = {"image": (4, 3, 5)}
    samples = random_samples(model, 2, usual_sizes(model, best_shapes))
    assert {name: (array.shape, array.dtype) for name, array in samples[0].items()} == {
        "image": ((1, 3, 5), np.float32), "ids": ((1, 4), np.int64), "t": ((1, 1), object), "h": ((1, 2), np.uint16),
    }  # fmt: skip
    assert random_samples(model, 2, {})[0]["image"].shape == (1, 3, 1)
    assert set(samples[0]["ids"].flat) <= {0, 1}
    np.testing.assert_array_equal(
        samples[1]["image"], random_samples(model, 2, usual_sizes(model, best_shapes))[1]["image"]
    )
    assert not np.array_equal(samples[0]["image"], samples[1]["image"])


def test_a_model_without_batching_takes_one_sample_or_a_stack(tmp_path: Path) -> None:
    model = spec(InputSpec("x", DType.FP32, (2, -1)), InputSpec("t", DType.BYTES, (1,)))
    np.savez(tmp_path / "one.npz", x=np.ones((2, 3), "f4"), t=np.array([b"word"]))
    (sample,) = from_file(model, tmp_path / "one.npz")
    assert sample["x"].shape == (2, 3)
    assert sample["t"].tolist() == [b"word"]
    np.savez(tmp_path / "three.npz", x=np.ones((3, 2, 5), "f4"), t=np.array([["é"], ["b"], [""]]))
    samples = from_file(model, tmp_path / "three.npz")
    assert [one["t"].tolist() for one in samples] == [["é".encode()], [b"b"], [b""]]
    np.savez(tmp_path / "odd.npz", x=np.ones((3, 2, 5), "f4"), t=np.array([["a"], ["b"]]))
    with pytest.raises(InvalidRequest, match=r"as many samples for every input, given \{'x': 3, 't': 2\}"):
        from_file(model, tmp_path / "odd.npz")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "there is no array for input 'x' of model 'm'"),
        ({"x": np.zeros((1, 64))}, "input 'x' of model 'm': expected elements of FP32 (float32), given float64"),
        ({"x": np.zeros((1, 63), np.float32)}, "expected the shape [samples, 64], given [1, 63]"),
        ({"x": np.zeros((64,), np.float32)}, "expected the shape [samples, 64], given [64]"),
        ({"x": np.zeros((0, 64), np.float32)}, "it holds no sample"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "in.npz", **arrays)
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        from_file(spec(InputSpec("x", DType.FP32, (64,)), batch=4), tmp_path / "in.npz")


def test_inputs_with_pickles_are_refused_and_not_executed(tmp_path: Path) -> None:
    np.savez(tmp_path / "evil.npz", x=np.array([print], dtype=object))
    with pytest.raises(InvalidRequest, match=r"expected an \.npz file of plain arrays"):
        from_file(spec(InputSpec("x", DType.FP32, (1,))), tmp_path / "evil.npz")
    np.save(tmp_path / "one.npy", np.ones(1))
    with pytest.raises(InvalidRequest, match="given one array"):
        from_file(spec(InputSpec("x", DType.FP32, (1,))), tmp_path / "one.npy")


def test_batches_contain_all_samples_or_copies_of_one_if_shapes_differ() -> None:
    same = [{"x": np.full((1, 2), number)} for number in range(3)]
    assert batch_of(same, 2, 4)["x"][:, 0].tolist() == [2, 0, 1, 2]
    mixed = [{"x": np.zeros((1, 2))}, {"x": np.ones((1, 3))}]
    assert batch_of(mixed, 1, 2)["x"].shape == (2, 3)


@pytest.fixture
def version_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "net" / "1"
    folder.mkdir(parents=True)
    return folder


def test_the_configured_runtime_comes_first_and_is_the_reference(version_dir: Path) -> None:
    (version_dir / "model.onnx").write_bytes(b"")
    base = parse_text(b'backend: "onnxruntime"', "net")
    field = candidates_for(base, "net", version_dir, no_gpu=NO_GPU, list_devices=device_lister())
    assert [one.title for one in field.candidates[:2]] == ["onnxruntime f32", "openvino f32"]
    assert "openvino bf16" in [one.title for one in field.candidates]
    assert not any("int8" in one.precision for one in field.candidates)
    assert f"onnxruntime on GPU: {NO_GPU}" in field.left_out
    assert "openvino on GPU, NPU: it finds only CPU" in field.left_out


def onnx_in(version_dir: Path, monkeypatch: pytest.MonkeyPatch, arithmetic: str) -> None:
    (version_dir / "model.onnx").write_bytes(b"")
    monkeypatch.setattr("edge_server.backends.onnx_file_info.arithmetic", lambda path: arithmetic)


@pytest.mark.parametrize(
    ("arithmetic", "expected"),
    [
        ("f32", ["openvino f32 on GPU", "openvino f16 on GPU", "openvino f16 on NPU"]),
        ("f16", ["openvino f32 on GPU", "openvino f16 on GPU", "openvino f16 on NPU"]),
        ("int8", ["openvino int8 on GPU", "openvino auto on NPU"]),
    ],
)
def test_each_device_of_openvino_is_tried_in_its_precisions(
    version_dir: Path, monkeypatch: pytest.MonkeyPatch, arithmetic: str, expected: list[str]
) -> None:
    onnx_in(version_dir, monkeypatch, arithmetic)
    there = device_lister(openvino=OF_INTEL)
    field = candidates_for(parse_text(b"", "net"), "net", version_dir, no_gpu=NO_GPU, list_devices=there)
    assert [one.title for one in field.candidates if one.runtime == "openvino" and one.device != "CPU"] == expected
    assert field.candidates[0].device == "CPU", "what others are compared with is the CPU's"
    assert not any(line.startswith("openvino") for line in field.left_out)


def test_a_device_without_listed_precisions_uses_its_default(version_dir: Path) -> None:
    (version_dir / "model.onnx").write_bytes(b"")
    there = device_lister(openvino={"CPU": ("FP32",), "GPU.0": ("FP32",), "GPU.1": ()})
    field = candidates_for(parse_text(b"", "net"), "net", version_dir, no_gpu=NO_GPU, list_devices=there)
    titles = [one.title for one in field.candidates]
    assert {"openvino f32 on GPU.0", "openvino auto on GPU.1"} < set(titles)
    assert "openvino auto on GPU.0" not in titles


def test_a_configured_device_combination_is_tried_unchanged(version_dir: Path) -> None:
    (version_dir / "model.onnx").write_bytes(b"")
    base = parse_text(b'parameters { key: "TARGET_DEVICE" value { string_value: "auto:GPU,CPU" } }', "net")
    field = candidates_for(base, "net", version_dir, no_gpu=NO_GPU, list_devices=device_lister(openvino=OF_INTEL))
    by_title = {one.title: config_of(base, one, "model.onnx") for one in field.candidates}
    told = {title: config.parameters["TARGET_DEVICE"].string_value for title, config in by_title.items()}
    assert told["openvino on AUTO:GPU,CPU"] == "AUTO:GPU,CPU"
    assert (told["openvino f32"], told["openvino f16 on GPU"]) == ("CPU", "GPU")


@pytest.mark.parametrize(
    ("arithmetic", "by_tensorrt"), [("f32", ["f32", "f16"]), ("f16", ["f16"]), ("int8", ["int8"]), ("bf16", [])]
)
def test_each_accelerator_that_onnxruntime_was_built_with_is_tried(
    version_dir: Path, monkeypatch: pytest.MonkeyPatch, arithmetic: str, by_tensorrt: list[str]
) -> None:
    onnx_in(version_dir, monkeypatch, arithmetic)
    built_with = device_lister(onnxruntime={"cuda": (), "dnnl": (), "tensorrt": ()})
    field = candidates_for(parse_text(b"", "net"), "net", version_dir, no_gpu="", list_devices=built_with)
    titles = [one.title for one in field.candidates if one.runtime == "onnxruntime" and one.accelerator]
    expected = [
        f"{arithmetic} by dnnl",
        f"{arithmetic} on GPU",
        *(f"{word} on GPU by tensorrt" for word in by_tensorrt),
    ]
    assert titles == [f"onnxruntime {words}" for words in expected]


def test_impossible_candidates_are_omitted_with_the_reason(version_dir: Path) -> None:
    (version_dir / "model.onnx").write_bytes(b"")
    base = parse_text(b"", "net")
    without = candidates_for(base, "net", version_dir, no_gpu="", list_devices=device_lister())
    assert "onnxruntime on GPU: this build has no CUDA support; onnxruntime-gpu has it" in without.left_out
    no_driver = candidates_for(
        base, "net", version_dir, no_gpu=NO_GPU, list_devices=device_lister(onnxruntime={"cuda": (), "tensorrt": ()})
    )
    assert f"onnxruntime on GPU: {NO_GPU}" in no_driver.left_out

    def crashes(name: str) -> Any:
        raise CandidateFailed("its process was ended by SIGSEGV")

    crashed = candidates_for(base, "net", version_dir, no_gpu="", list_devices=crashes)
    assert [one.title for one in crashed.candidates[:2]] == ["onnxruntime f32", "openvino f32"]
    lost = "on anything but the CPU: its devices cannot be listed: its process was ended by SIGSEGV"
    assert {f"openvino {lost}", f"onnxruntime {lost}"} <= set(crashed.left_out)


def test_accelerators_are_configured_as_in_triton_and_keep_their_parameters() -> None:
    base = parse_text(
        b"""optimization { execution_accelerators {
            gpu_execution_accelerator { name: "tensorrt" parameters { key: "max_workspace_size_bytes" value: "9" } }
            gpu_execution_accelerator { name: "cuda" }
            cpu_execution_accelerator { name: "dnnl" } } graph { level: 1 } }""",
        "net",
    )
    mode = (("precision_mode", "FP16"),)
    config = config_of(
        base, RuntimeCandidate("onnxruntime", "f16", "GPU", accelerator="tensorrt", options=mode), "m.onnx"
    )
    (one,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert (one.name, dict(one.parameters)) == (
        "tensorrt",
        {"max_workspace_size_bytes": "9", "precision_mode": "FP16"},
    )
    assert (config.parameters["precision"].string_value, config.optimization.graph.level) == ("auto", 1)
    assert "KIND_GPU" in str(config)
    (one,) = config_of(
        base, RuntimeCandidate("onnxruntime", "f32", "GPU", accelerator="cuda"), "m.onnx"
    ).optimization.execution_accelerators.gpu_execution_accelerator
    assert (one.name, dict(one.parameters)) == ("cuda", {})
    plain = config_of(base, RuntimeCandidate("onnxruntime", "f32"), "m.onnx")
    assert not plain.optimization.execution_accelerators.cpu_execution_accelerator
    assert "optimization" not in str(
        config_of(parse_text(b"", "net"), RuntimeCandidate("onnxruntime", "f32"), "m.onnx")
    )


def test_openvinos_gpu_is_set_by_its_parameter_and_is_no_cuda_gpu() -> None:
    base = parse_text(b"max_batch_size: 4 instance_group { count: 2 kind: KIND_GPU gpus: 0 }", "net")
    by_title = {one.title: one for one in openvino_candidates(OF_INTEL, base, "f32")}
    on_gpu = config_of(base, by_title["openvino f16 on GPU"], "model.onnx")
    assert on_gpu.parameters["TARGET_DEVICE"].string_value == "GPU"
    assert "KIND_CPU" in str(on_gpu)
    assert "KIND_GPU" not in str(on_gpu)
    on_npu = config_of(base, by_title["openvino f16 on NPU"], "model.onnx").parameters
    assert {key: on_npu[key].string_value for key in on_npu} == {
        "TARGET_DEVICE": "NPU", "precision": "f16", "SKIP_OV_DYNAMIC_BATCHSIZE": "YES", "ENABLE_BATCH_PADDING": "YES",
    }  # fmt: skip


def test_beside_a_gpu_a_candidate_for_the_processor_states_it() -> None:
    base = parse_text(b"max_batch_size: 4", "net")
    on_cpu = config_of(base, RuntimeCandidate("onnxruntime", "f32"), "m.onnx", has_gpu=True)
    assert [group.kind for group in on_cpu.instance_group] == [on_cpu.instance_group[0].KIND_CPU]
    automatic = parse_text(b"instance_group { count: 3 }", "net")
    moved = config_of(automatic, RuntimeCandidate("onnxruntime", "f32"), "m.onnx", has_gpu=True)
    assert [(group.kind, group.count) for group in moved.instance_group] == [(moved.instance_group[0].KIND_CPU, 3)]
    on_gpu = config_of(base, RuntimeCandidate("onnxruntime", "f32", "GPU", accelerator="cuda"), "m.onnx", has_gpu=True)
    assert "KIND_GPU" in str(on_gpu)
    assert not config_of(base, RuntimeCandidate("onnxruntime", "f32"), "m.onnx").instance_group


def test_models_with_one_runtime_have_one_candidate_or_a_reason(version_dir: Path) -> None:
    field = candidates_for(
        parse_text(b'backend: "stub"', "net"), "net", version_dir, no_gpu=NO_GPU, list_devices=device_lister()
    )
    (stub,) = field.candidates
    assert (stub.runtime, stub.precision) == ("stub", "")
    (version_dir / "model.py").write_text("")
    with pytest.raises(InvalidRequest, match="backend 'python' chooses its runtime by itself"):
        candidates_for(parse_text(b"", "net"), "net", version_dir, no_gpu=NO_GPU, list_devices=device_lister())
    (version_dir / "model.py").unlink()
    with pytest.raises(BadModelConfig, match="no backend"):
        candidates_for(parse_text(b"", "net"), "net", version_dir, no_gpu=NO_GPU, list_devices=device_lister())


def test_moving_a_configuration_between_cpu_and_gpu_keeps_other_settings() -> None:
    base = parse_text(
        b'platform: "onnxruntime_onnx" max_batch_size: 4 instance_group { count: 2 kind: KIND_GPU gpus: 0 }', "net"
    )
    on_cpu = config_of(base, RuntimeCandidate("openvino", "bf16"), "model.onnx")
    assert (on_cpu.backend, on_cpu.platform, on_cpu.max_batch_size) == ("openvino", "", 4)
    assert on_cpu.parameters["precision"].string_value == "bf16"
    assert (on_cpu.instance_group[0].count, list(on_cpu.instance_group[0].gpus)) == (2, [])
    assert "KIND_CPU" in str(on_cpu)
    shapes = {"least": "x:1x3", "best": "x:2x3", "most": "x:4x3"}
    engine = config_of(parse_text(b"", "net"), RuntimeCandidate("tensorrt", "fp16", "GPU"), "model.onnx", shapes)
    assert {key: item.string_value for key, item in engine.parameters.items()} == {"precision": "fp16", **shapes}
    assert len(config_of(base, RuntimeCandidate("openvino", "f32"), "model.onnx", shapes).parameters) == 1
    on_gpu = config_of(parse_text(b"", "net"), RuntimeCandidate("onnxruntime", "f32", "GPU"), "model.onnx")
    assert "KIND_GPU" in str(on_gpu)


def test_a_variant_is_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_text('backend: "openvino" parameters { key: "a" value { string_value: "é\\n#" } }'.encode(), "net")
    path = result_files.variant_path(tmp_path, "fast", may_overwrite=False)
    result_files.write_variant(path, config, "net", ["one\nbackend: 'x'", "two"])
    assert read_file(path, "net") == config
    with pytest.raises(AlreadyExists, match="--overwrite"):
        result_files.variant_path(tmp_path, "fast", may_overwrite=False)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        result_files.write_variant(
            result_files.variant_path(tmp_path, "fast", may_overwrite=True), parse_text(b"", "net"), "net", []
        )
    assert [one.name for one in path.parent.iterdir()] == ["fast.pbtxt"]
    assert read_file(path, "net") == config


def test_a_full_disk_is_reported_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "configs").write_text("no folder")
    with pytest.raises(ServingFault, match=r"fast\.pbtxt' cannot be written: "):
        result_files.write_variant(tmp_path / "configs" / "fast.pbtxt", parse_text(b"", "net"), "net", [])


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "a b", "x" * 129, "a\n"])
def test_invalid_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="--write: expected letters"):
        result_files.variant_path(tmp_path, name, may_overwrite=True)


def test_the_remaining_time_is_shown_once_it_is_reliable() -> None:
    assert format_remaining(0.25, 60.0) == ", 3:00 left"
    assert format_remaining(0.01, 60.0) == format_remaining(0.5, 0.5) == ""
    assert format_remaining(0.02, 3600) == ", 49:00:00 left"


def test_on_a_terminal_the_progress_bar_is_erased(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    reader, writer = pty.openpty()
    text = ""
    with os.fdopen(writer, "w") as terminal:
        progress = Progress(terminal)
        progress.show(0.5, "openvino f32: opening \x1b[31m" + "long " * 100)
        progress.close()
        # A terminal hands on what was written piece by piece.
        while "\x1b[?25h" not in text or not text.endswith("\x1b[2K"):
            text += os.read(reader, 4096).decode()
    os.close(reader)
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).split("\r")
    shown = next(line for line in drawn if "50%" in line)
    assert shown.rstrip().startswith("━" * 12)
    assert " 50% openvino f32: opening  [31mlong" in shown
    assert shown.rstrip().endswith("…")
