"""Rules without TensorRT: profiles, graph sizes, build progress, engine orders, and comparison of outputs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.backends.base import ModelFile
from edge_server.config import ServerConfig
from edge_server.core.model_spec import DynamicBatching, InputSpec, InstanceGroup, InstanceKind, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BadModelConfig, LoadError
from edge_server.plugins.tensorrt.builds.onnx_to_engine import BuildProgress, lacks_memory
from edge_server.plugins.tensorrt.cuda_graphs import padded_size
from edge_server.plugins.tensorrt.engine_options import engine_order, order_from_json, order_to_json
from edge_server.plugins.tensorrt.engine_order import Range
from edge_server.plugins.tensorrt.optimization_profiles import choose_profile, configured_profiles
from edge_server.plugins.tensorrt.plugin import PLUGIN

SPEC = ModelSpec(
    name="seen",
    backend="",
    platform="",
    max_batch_size=8,
    inputs=(InputSpec("image", DType.FP32, (3, -1, -1)),),
    outputs=(OutputSpec("scores", DType.FP32, (10,)),),
    instance_groups=(InstanceGroup("seen", InstanceKind.GPU, 1, (0,)),),
)
FIXED = replace(SPEC, inputs=(InputSpec("image", DType.FP32, (3, 8, 8)),))


def stated(least: str, best: str, most: str) -> ModelSpec:
    keys = ("trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes")
    return replace(SPEC, parameters=dict(zip(keys, (least, best, most), strict=True)))


def test_the_default_profile_covers_batch_sizes_1_to_max_with_the_preferred_as_optimum() -> None:
    spec = replace(FIXED, dynamic_batching=DynamicBatching((2, 4)))
    assert configured_profiles(spec) == ({"image": Range((1, 3, 8, 8), (4, 3, 8, 8), (8, 3, 8, 8))},)
    assert configured_profiles(replace(FIXED, max_batch_size=0)) == ({"image": Range((3, 8, 8), (3, 8, 8), (3, 8, 8))},)


def test_a_dynamic_dimension_needs_bounds() -> None:
    with pytest.raises(LoadError, match=r"input 'image' has a dimension of any size .* trt_profile_min_shapes"):
        configured_profiles(SPEC)


def test_a_repeated_name_makes_two_profiles() -> None:
    spec = stated("image:1x3x8x8,image:1x3x64x64", "image:2x3x16x16,image:2x3x64x64", "image:8x3x32x32,image:4x3x64x64")
    first, second = configured_profiles(spec)
    assert first["image"] == Range((1, 3, 8, 8), (2, 3, 16, 16), (8, 3, 32, 32))
    assert second["image"] == Range((1, 3, 64, 64), (2, 3, 64, 64), (4, 3, 64, 64))


def test_the_inputs_of_a_trial_have_the_shape_for_which_the_engine_is_the_fastest(tmp_path: Path) -> None:
    # The other input has no bounds, which only a build needs.
    spec = replace(SPEC, inputs=(*SPEC.inputs, InputSpec("mask", DType.FP32, (-1,))))
    settings = PLUGIN.trial_engines(ServerConfig())
    engines = settings.make(spec, ModelFile(tmp_path, tmp_path, 1), tmp_path, lambda phase, percent: None)
    shapes = ("image:1x3x8x8", "image:2x3x16x16", "image:8x3x32x32")
    assert settings.shape_parameters[1] == "trt_profile_opt_shapes"
    assert engines.best_shapes(shapes) == {"image": (2, 3, 16, 16)}


@pytest.mark.parametrize(
    ("least", "best", "most", "message"),
    [
        ("image:1x3x9x8", "image:1x3x8x8", "image:1x3x8x8", "min <= opt <= max"),
        ("image:1x4x8x8", "image:1x4x8x8", "image:1x4x8x8", r"shapes that fit \[-1, 3, -1, -1\]"),
        ("image:1x3x8", "image:1x3x8", "image:1x3x8", "shapes that fit"),
        ("mask:1x8", "mask:1x8", "mask:1x8", "there is no input 'mask'"),
        ("image:1x3x8x8", "image:1x3x8x8", "", "the same inputs"),
        ("image=1x3", "image:1x3x8x8", "image:1x3x8x8", "expected name:1x3x224x224"),
        ("image:" + "9" * 5000, "image:1x3x8x8", "image:1x3x8x8", "expected name:1x3x224x224"),
    ],
)
def test_invalid_profiles_are_reported(least: str, best: str, most: str, message: str) -> None:
    with pytest.raises(BadModelConfig, match=message):
        configured_profiles(stated(least, best, most))


def test_the_current_profile_is_kept_if_it_fits_else_the_smallest_is_chosen() -> None:
    small, wide, all_of_it = (
        {"X": Range((1, 1), (1, 1), most)} for most in ((2, 8), (2, 100), (8, 100))
    )  # fmt: skip
    profiles = (small, wide, all_of_it)
    assert choose_profile(profiles, (0, 1, 2), {"X": (2, 8)}, 2) == 2
    assert choose_profile(profiles, (0, 1, 2), {"X": (2, 8)}, -1) == 0
    assert choose_profile(profiles, (0, 1, 2), {"X": (2, 9)}, 0) == 1
    assert choose_profile(profiles, (2,), {"X": (1, 1)}, 0) == 2
    assert choose_profile(profiles, (0, 1), {"X": (3, 1)}, 0) is None


@given(st.sets(st.integers(1, 64), min_size=1), st.integers(1, 80))
def test_a_batch_is_padded_to_the_smallest_fitting_graph_size(sizes: set[int], rows: int) -> None:
    found = padded_size(sorted(sizes), rows)
    larger = [size for size in sizes if size >= rows]
    assert found == (min(larger) if larger else None)


def test_progress_includes_the_current_step() -> None:
    progress = BuildProgress()
    progress.start_phase("all", None, 4)
    progress.complete_step("all", 0)
    assert progress.percent == 25.0
    progress.start_phase("inner", "all", 2)
    progress.complete_step("inner", 0)
    assert (progress.percent, progress.phase) == (37.5, "inner")
    progress.finish_phase("inner")
    assert (progress.percent, progress.phase) == (37.5, "all")
    progress.complete_step("all", 3)
    progress.finish_phase("all")
    assert progress.percent == 100.0


Step = tuple[str, str, int]


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "step", "finish"]), st.sampled_from("abc"), st.integers(-1, 9)), max_size=60
    )
)
def test_progress_never_falls_and_stays_between_0_and_100(steps: list[Step]) -> None:
    progress, last = BuildProgress(), 0.0
    for number, (kind, name, value) in enumerate(steps):
        if kind == "begin":
            progress.start_phase(name, "abc"[number % 3] if number % 2 else None, value)
        elif kind == "step":
            progress.complete_step(name, value)
        else:
            progress.finish_phase(name)
        assert last <= progress.percent <= 100.0
        last = progress.percent


def test_engine_options_are_equal_in_the_building_process(tmp_path: Path) -> None:
    file = ModelFile(tmp_path / "1" / "model.onnx", tmp_path, 1)
    spec = replace(FIXED, parameters={"precision": "f16", "trt_max_workspace_size": "1000000"})
    order = engine_order(spec, file, 0, "tensorrt", "10.3.0", {"trt_builder_optimization_level": "4"})
    assert (order.precision, order.tolerance) == ("fp16", 2e-2)
    assert order.options == {"trt_max_workspace_size": "1000000", "trt_builder_optimization_level": "4"}
    assert order_from_json(json.loads(json.dumps(order_to_json(order)))) == order


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"precision": "int4"}, "has no precision 'int4'; it has fp32, fp16, int8, best"),
        ({"engine_tolerance": "2"}, "engine_tolerance must be a number of 0 to 1"),
        ({"trt_extra_plugin_lib_paths": "../../evil.so"}, "expected a file in the model's folder"),
        ({"trt_builder_optimization_level": "high"}, "must be a whole number"),
        ({"trt_dla_enable": "1"}, "a DLA computes in fp16 and int8 only, but the precision is fp32"),
        ({"trt_dla_core": "0"}, "a DLA computes in fp16 and int8 only, but the precision is fp32"),
    ],
)
def test_impossible_engine_options_are_reported(parameters: dict[str, str], message: str, tmp_path: Path) -> None:
    file = ModelFile(tmp_path / "1" / "model.onnx", tmp_path, 1)
    with pytest.raises(LoadError, match=message):
        engine_order(replace(FIXED, parameters=parameters), file, 0, "tensorrt", "10", {})


@pytest.mark.parametrize(
    ("parameters", "devices", "core"),
    [
        ({}, [], None),
        ({"trt_dla_enable": "1"}, [], "0"),
        ({"trt_dla_core": "1"}, [], "1"),
        ({"trt_dla_core": "1", "trt_dla_enable": "0"}, [], None),
        ({}, [{"kind": "KIND_NVDLA", "device_id": "1"}], "1"),
    ],
)
def test_an_engine_is_built_for_the_dla_core_that_a_parameter_or_an_instance_group_names(
    parameters: dict[str, str], devices: list[dict[str, str]], core: str | None, tmp_path: Path
) -> None:
    config = json.dumps({"instance_group": [{"name": "seen", "secondary_devices": devices}]})
    spec = replace(FIXED, parameters={"precision": "fp16", **parameters}, config_json=config)
    options = engine_order(spec, ModelFile(tmp_path / "model.onnx", tmp_path, 1), 0, "tensorrt", "10", {}).options
    assert options == ({} if core is None else {"trt_dla_enable": "1", "trt_dla_core": core})


@pytest.mark.parametrize(
    ("logged", "is_short"),
    [
        ("Error Code 1: Cuda Runtime (out of memory); Requested amount of GPU memory (15485030400 bytes)", True),
        ("[virtualMemoryBuffer.cpp::resizePhysical::144] Error Code 2: OutOfMemory (no further information)", True),
        ("autotuning: User allocator error allocating 15485030400-byte buffer; Error Code 10: Internal Error", True),
        ("Error Code 10: Internal Error (Could not find any implementation for node /1/Slice_4.)", False),
    ],
)
def test_a_build_that_lacked_memory_is_tried_again(logged: str, is_short: bool) -> None:
    """Lines of TensorRT from public reports of boards."""
    assert lacks_memory(logged) is is_short
