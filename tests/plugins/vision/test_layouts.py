"""Table of layouts: matching of shapes, and the candidates that shapes alone give."""

from __future__ import annotations

import pytest

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.plugins.vision.layouts import LAYOUTS, candidates, match_shapes


def network(*outputs: tuple[int, ...], image: tuple[int, ...] = (3, 640, 640)) -> ModelSpec:
    return ModelSpec(
        name="net", backend="onnxruntime", platform="", max_batch_size=4, instance_groups=(),
        inputs=(InputSpec("images", DType.FP32, image),),
        outputs=tuple(OutputSpec(f"output{i}", DType.FP32, dims) for i, dims in enumerate(outputs)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("patterns", "shapes", "known", "symbols"),
    [
        (["4 + C, A"], [(84, 8400)], {}, {"C": 80, "A": 8400}),
        (["4 + C, A"], [(84, 8400)], {"C": 3}, None),
        (["4 + C, A"], [(84, -1)], {}, {"C": 80}),
        (["4 + C, A"], [(4, 8400)], {}, None),
        (["4 + C + 3 K, A"], [(56, 8400)], {"C": 1}, {"C": 1, "K": 17, "A": 8400}),
        (["4 + C + 3 K, A"], [(57, 8400)], {"C": 1}, None),
        (["A, 4", "A, C"], [(300, 4), (300, 91)], {}, {"A": 300, "C": 91}),
        (["A, 4", "A, C"], [(300, 4), (100, 91)], {}, None),
        (["A, 4"], [(300,)], {}, None),
    ],
)
def test_sizes_of_symbols_come_from_shapes(
    patterns: list[str], shapes: list[tuple[int, ...]], known: dict[str, int], symbols: dict[str, int] | None
) -> None:
    assert match_shapes(patterns, shapes, known) == symbols


def test_names_of_layouts_are_unique() -> None:
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)


def test_shapes_alone_give_candidates_with_their_doubts() -> None:
    found = candidates(network((84, 8400)), {})
    assert [(match.layout, match.is_certain) for match in found] == [("yolov8", False)]
    assert found[0].parameters["detection_head"] == "yolov8"
    assert "A is the number of boxes of an input of 640x640" in found[0].evidence
    assert "the class names are unknown" in found[0].doubts


def test_metadata_that_fit_leave_one_certain_candidate() -> None:
    metadata = {"stride": "32", "task": "detect", "names": "{0: 'a', 1: 'b'}", "imgsz": "[640, 640]"}
    (match,) = candidates(network((6, 8400)), metadata)
    assert (match.layout, match.is_certain, match.labels) == ("yolov8", True, {"output0": ("a", "b")})


def test_an_unknown_model_has_no_candidates() -> None:
    assert candidates(network((5, 7, 9)), {}) == ()
