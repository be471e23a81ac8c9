"""Shape tensors of a model that batches: what a configuration says of them, beside what the model file has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.backends.base import ModelSignature
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BadModelConfig
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.model_config.auto_complete import check_against_file, complete
from edge_server.repository.model_config.pbtxt import parse_text
from edge_server.repository.resolve_version import ResolveOptions, resolve

X, Y = InputSpec("X", DType.FP32, (-1, -1, 4)), OutputSpec("Y", DType.FP32, (-1, -1, 4))


def engine(values: tuple[int, ...] = (3,), dtype: DType = DType.INT64, *, is_told: bool = True) -> ModelSignature:
    """What a file says: of an engine, which of its tensors are shape tensors; an ONNX file does not tell."""
    return ModelSignature(
        (X, InputSpec("S", dtype, values, is_shape_tensor=is_told)),
        (Y, OutputSpec("N", DType.INT64, (4,), is_shape_tensor=is_told)),
        is_told,
        8,
    )


def config(rows: int, values: str = "", more: str = "is_shape_tensor: true") -> str:
    stated = f'input {{ name: "X" data_type: TYPE_FP32 dims: [ -1, 4 ] }} input {{ name: "S" {values} {more} }}'
    return f'max_batch_size: {rows} {stated} output {{ name: "Y" }} output {{ name: "N" {more} }}'


@pytest.fixture
def resolved(root: Path, add_model: Any, described: Any) -> Callable[..., Any]:
    def call(text: str, seen: ModelSignature, **options: Any) -> Any:
        described("tensorrt", "model.plan", seen)
        name = f"m{len(list(root.iterdir()))}"
        add_model(name, f'backend: "tensorrt" {text}', {"1/model.plan": b"x"})
        model = Scanner([root]).find(name)
        assert model is not None
        return resolve(model, 1, ResolveOptions(**options)).spec

    return call


def dims_of(spec: Any) -> dict[str, tuple[tuple[int, ...], bool]]:
    return {item.name: (item.dims, item.is_shape_tensor) for item in (*spec.inputs, *spec.outputs)}


def test_an_engine_without_configuration_is_completed_with_the_values_beside_the_batch_size(
    resolved: Callable[..., Any],
) -> None:
    spec = resolved("", engine())
    assert spec.max_batch_size == 8
    assert dims_of(spec) == {
        "X": ((-1, 4), False), "S": ((2,), True), "Y": ((-1, 4), False), "N": ((3,), True),
    }  # fmt: skip


def test_without_batching_all_values_are_the_clients(resolved: Callable[..., Any]) -> None:
    text = 'input { name: "X" data_type: TYPE_FP32 dims: [ -1, -1, 4 ] }'
    assert dims_of(resolved(text, engine())) == {
        "X": ((-1, -1, 4), False), "S": ((3,), True), "Y": ((-1, -1, 4), False), "N": ((4,), True),
    }  # fmt: skip


def test_stated_dims_are_those_that_clients_send_of_an_engine_and_of_an_onnx_file(resolved: Callable[..., Any]) -> None:
    for is_told in (True, False):
        spec = resolved(config(4, "data_type: TYPE_INT64 dims: [ 2 ]"), engine(is_told=is_told))
        assert dims_of(spec)["S"] == ((2,), True)
        assert dims_of(spec)["N"] == ((3,), True)


def test_an_onnx_file_that_leaves_the_number_of_values_open_takes_the_stated_one(resolved: Callable[..., Any]) -> None:
    text = config(4, "data_type: TYPE_INT64 dims: [ 2 ]").replace('"N"', '"N" data_type: TYPE_INT64 dims: [ 3 ]')
    assert dims_of(resolved(text, engine((-1,), is_told=False)))["S"] == ((2,), True)


@pytest.mark.parametrize(
    ("values", "seen", "words"),
    [
        ("dims: [ 3 ]", engine(), r"input 'S' dims: expected \[2\], as many as .*\[3\] beside .*, given \[3\]"),
        ("dims: [ 1 ]", engine(), r"input 'S' dims: expected \[2\].*given \[1\]"),
        ("dims: [ -1 ]", engine(), r"input 'S' dims: expected \[2\].*given \[-1\]"),
        ("dims: [ 2, 1 ]", engine(), r"input 'S' dims: expected \[2\].*given \[2, 1\]"),
        ("dims: [ -1 ]", engine((-1,), is_told=False), r"expected one dimension of a fixed size.*given \[-1\]"),
        (
            "dims: [ 2 ]",
            engine((1,)),
            r"max_batch_size: expected 0, because the shape tensor 'S' .* TYPE_INT64 .*\[1\]",
        ),
        ("dims: [ 2 ]", engine(()), r"max_batch_size: expected 0, because the shape tensor 'S' .* the shape \[\]"),
        ("dims: [ 2 ]", engine((3, 1)), r"max_batch_size: expected 0, because the shape tensor 'S' .*\[3, 1\]"),
        ("dims: [ 2 ]", engine((3,), DType.FP32), r"shape tensor 'S' .* is TYPE_FP32.*TYPE_INT32 or TYPE_INT64"),
    ],
)
def test_impossible_values_are_refused_with_the_expected_and_the_given(
    values: str, seen: ModelSignature, words: str, resolved: Callable[..., Any]
) -> None:
    with pytest.raises(BadModelConfig, match=words):
        resolved(config(4, values), seen)


def test_a_mark_that_is_missing_is_set_or_refused_where_nothing_is_completed(resolved: Callable[..., Any]) -> None:
    text = config(4, "data_type: TYPE_INT64 dims: [ 2 ]", more="")
    assert dims_of(resolved(text, engine()))["S"] == ((2,), True)
    whole = text.replace('"Y"', '"Y" data_type: TYPE_FP32 dims: [ -1, 4 ]')
    with pytest.raises(BadModelConfig, match=r"'S' is_shape_tensor: expected true, .*given false"):
        resolved(whole.replace('"N"', '"N" data_type: TYPE_INT64 dims: [ 3 ]'), engine(), auto_complete=False)


@given(st.integers(2, 40), st.integers(1, 16))
def test_a_completed_configuration_passes_the_check_against_the_file(count: int, rows: int) -> None:
    seen = engine((count,))
    made = parse_text(f"max_batch_size: {rows}".encode(), "m")
    complete(made, "m", seen, 4)
    check_against_file(made, "m", seen)
    (found,) = [item for item in made.input if item.name == "S"]
    assert (list(found.dims), found.is_shape_tensor) == ([count - 1], True)
