"""Networks as Ultralytics exports them, which answer with known boxes whatever the picture is.

Each answers in the layout that Ultralytics' code computes, and has the metadata that its exporter writes. The reference
for the letterbox is Ultralytics', too.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.kit.models import finish

SIDE = 320
CELLS = sum((SIDE // stride) ** 2 for stride in (8, 16, 32))
NAMES = ("person", "cup", "it's \u00e9")
FOUND = [((40.0, 30.0, 200.0, 300.0), 0, 0.9), ((320.5, 10.25, 630.0, 420.0), 2, 0.75)]
"""Corners in the picture of 640 x 480 pixels, class and score."""
POINTS = [(100.0, 50.0, 0.9), (150.5, 250.25, 0.4)]
"""Keypoints of the first one."""


def letterbox(width: int, height: int) -> tuple[float, float, float]:
    """Return scale, left and top of a picture, as Ultralytics' LetterBox computes them."""
    ratio = min(SIDE / width, SIDE / height)
    left, top = (SIDE - round(width * ratio)) / 2, (SIDE - round(height * ratio)) / 2
    return ratio, round(left - 0.1), round(top - 0.1)


RATIO, LEFT, TOP = letterbox(640, 480)


def corners() -> np.ndarray:
    """Corners of FOUND in the input."""
    return np.array([box for box, _, _ in FOUND]) * RATIO + (LEFT, TOP, LEFT, TOP)


def centred() -> np.ndarray:
    low, high = np.split(corners(), 2, axis=1)
    return np.concatenate(((low + high) / 2, high - low), axis=1)


def scores() -> np.ndarray:
    return np.array([[score if index == label else 0.01 for index in range(len(NAMES))] for _, label, score in FOUND])


def spread(found: np.ndarray, count: int, width: int) -> np.ndarray:
    """Return `count` rows with those of `found` among them."""
    rows = np.zeros((count, width), np.float32)
    rows[7 : 7 + len(found)] = found
    return rows


def detect() -> np.ndarray:
    return spread(np.concatenate((centred(), scores()), axis=1), CELLS, 4 + len(NAMES)).T


def pose(values: int = 3) -> np.ndarray:
    """Return keypoints of x, y and score, or of x and y."""
    points = np.array([(x * RATIO + LEFT, y * RATIO + TOP, score) for x, y, score in POINTS])[:, :values]
    found = np.concatenate((centred(), [[score] for _, _, score in FOUND], [points.ravel()] * 2), axis=1)
    return spread(found, CELLS, 4 + 1 + 2 * values).T


def final_rows() -> np.ndarray:
    last = np.array([(score, label) for _, label, score in FOUND])
    return spread(np.concatenate((corners(), last), axis=1), 300, 6)


def final_pose_rows() -> np.ndarray:
    last = np.array([(score, 0) for _, _, score in FOUND])
    points = np.array([(x * RATIO + LEFT, y * RATIO + TOP, score) for x, y, score in POINTS])
    return spread(np.concatenate((corners(), last, [points.ravel()] * 2), axis=1), 300, 6 + 6)


ROTATED = [((120.0, 165.0, 160.0, 40.0, 0.5), 0, 0.9), ((475.0, 215.0, 60.0, 180.0, 1.25), 2, 0.75)]
"""Centre, size and angle of oriented boxes in the picture, class and score."""


def rotated() -> np.ndarray:
    """Centre and size of ROTATED in the input, and the angle."""
    return np.array([(x * RATIO + LEFT, y * RATIO + TOP, w * RATIO, h * RATIO, r) for (x, y, w, h, r), _, _ in ROTATED])


def obb() -> np.ndarray:
    found = np.concatenate((rotated()[:, :4], scores(), rotated()[:, 4:]), axis=1)
    return spread(found, CELLS, 4 + len(NAMES) + 1).T


def final_obb_rows() -> np.ndarray:
    last = np.array([(score, label, box[4]) for box, label, score in ROTATED])
    return spread(np.concatenate((rotated()[:, :4], last), axis=1), 300, 7)


def depth() -> np.ndarray:
    """Metres: 1 at the left edge of the picture, 9 at the right one."""
    columns = 1 + 8 * (np.arange(SIDE) + 0.5) / SIDE
    return np.tile(columns, (1, SIDE, 1))


def rtdetr() -> np.ndarray:
    """As RT-DETR was exported until 8.3."""
    return spread(np.concatenate((stretched(), scores()), axis=1), 300, 4 + len(NAMES))


def stretched() -> np.ndarray:
    """Centre and size as fractions of the picture."""
    low, high = np.split(np.array([box for box, _, _ in FOUND]) / (640, 480, 640, 480), 2, axis=1)
    return np.concatenate(((low + high) / 2, high - low), axis=1)


def rtdetr_rows() -> np.ndarray:
    last = np.array([(score, label) for _, label, score in FOUND])
    return spread(np.concatenate((stretched(), last), axis=1), 300, 6)


def with_objectness() -> np.ndarray:
    found = np.concatenate((centred(), [[0.95]] * 2, scores() / 0.95), axis=1)
    return spread(found, 3 * CELLS, 5 + len(NAMES))


COEFFICIENTS = [(1, 0, 25), (0, -1, -5)]
"""Of the masks of FOUND: what is to the right of column 120 of the picture, and what is above row 200."""
POLYGONS = [[(120, 30), (120, 300), (200, 300), (200, 30)], [(321, 11), (321, 200), (630, 200), (630, 11)]]
"""Outlines of these masks within their boxes."""


def prototypes() -> np.ndarray:
    """Column and row from the centre of the input, and 1; 29 more are 0."""
    side = SIDE // 4
    planes = np.zeros((32, side, side))
    planes[1], planes[0] = np.mgrid[:side, :side] - (side - 1) / 2
    planes[2] = 1
    return planes


def with_masks(answer: np.ndarray) -> np.ndarray:
    """Return rows of boxes with the coefficients of their masks behind."""
    coefficients = np.zeros((len(answer), 32))
    coefficients[7 : 7 + len(FOUND), :3] = COEFFICIENTS
    return np.concatenate((answer, coefficients), axis=1)


def names(labels: tuple[str, ...] = NAMES) -> str:
    return str(dict(enumerate(labels)))


ULTRALYTICS = {
    "description": "Ultralytics YOLO11n model", "author": "Ultralytics", "version": "8.3.0", "stride": "32",
    "task": "detect", "batch": "1", "imgsz": f"[{SIDE}, {SIDE}]", "names": names(),
    "args": "{'batch': 1, 'half': False, 'dynamic': False, 'nms': False}", "end2end": "False",
}  # fmt: skip
YOLOV5 = {"stride": "32", "names": names()}


def export(
    answer: np.ndarray,
    metadata: dict[str, str],
    *,
    is_dynamic: bool = False,
    planes: np.ndarray | None = None,
) -> onnx.ModelProto:
    """Return a network that gives `answer` for each picture of a batch, and `planes` as second output."""
    batch, side = ("batch", "side") if is_dynamic else (1, SIDE)
    # Zeros, one for each picture of the batch.
    nodes = [
        helper.make_node("ReduceMean", ["images"], ["mean"], axes=[1, 2, 3], keepdims=0),
        helper.make_node("Mul", ["mean", "zero"], ["zeros"]),
    ]
    outputs, constants = [], [numpy_helper.from_array(np.float32(0), "zero")]
    for index, given in enumerate((answer,) if planes is None else (answer, planes)):
        dims = [dim if not is_dynamic or dim < 100 else "boxes" for dim in given.shape]
        nodes += [
            helper.make_node("Reshape", ["zeros", f"shape{index}"], [f"added{index}"]),
            helper.make_node("Add", [f"answer{index}", f"added{index}"], [f"output{index}"]),
        ]
        outputs.append(helper.make_tensor_value_info(f"output{index}", TensorProto.FLOAT, [batch, *dims]))
        constants += [
            numpy_helper.from_array(np.array([-1] + [1] * given.ndim, np.int64), f"shape{index}"),
            numpy_helper.from_array(np.ascontiguousarray(given, np.float32), f"answer{index}"),
        ]
    pictures = helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, 3, side, side])
    graph = helper.make_graph(nodes, "yolo", [pictures], outputs, constants)
    model = finish(graph)
    helper.set_model_props(model, metadata)
    return model
