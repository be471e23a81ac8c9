"""Conversion of a forest of decision trees to an ONNX file with a tree ensemble.

treelite stores a forest as columns for each tree. onnxruntime reads them from an ONNX file. Its bytes are written here
(protocol buffers of onnx.proto, operators of ai.onnx.ml). The ensemble computes sums over the trees; `finish` names the
function that follows. Needs only numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.floating[Any]]

_LEAF, _NUMERICAL, _CATEGORICAL = 0, 1, 2
"""treelite's node types."""

_MODES = {0: b"LEAF", 1: b"BRANCH_EQ", 2: b"BRANCH_LT", 3: b"BRANCH_LEQ", 4: b"BRANCH_GT", 5: b"BRANCH_GTE"}
"""treelite's number of a comparison -> ONNX's name. A leaf has no comparison."""

_FLOAT, _DOUBLE = 1, 11
"""TensorProto.DataType."""

FINISHES: dict[str, Callable[[_Floats, float, float], _Floats]] = {
    "identity": lambda scores, alpha, ratio: scores,
    "identity_multiclass": lambda scores, alpha, ratio: scores,
    "sigmoid": lambda scores, alpha, ratio: _sigmoid(scores, alpha),
    "multiclass_ova": lambda scores, alpha, ratio: _sigmoid(scores, alpha),
    "exponential": lambda scores, alpha, ratio: np.exp(scores),
    "exponential_standard_ratio": lambda scores, alpha, ratio: np.exp2(-scores / np.float32(ratio)),
    "softmax": lambda scores, alpha, ratio: _softmax(scores),
}
"""treelite's name of a postprocessor -> the function of (scores [rows, classes], sigmoid_alpha, ratio_c)."""


@dataclass(frozen=True, slots=True)
class Forest:
    """All nodes of all trees as columns, and the parameters of the function after the sum.

    `tree`, `node`, `feature`, `low` (child if the comparison is true), `high`, `mode` (treelite's comparison),
    `missing_low` and `threshold` have one element per node; children of leaves are 0. `leaf_tree`, `leaf_node`,
    `leaf_score` and `leaf_value` have one element for each score that a leaf adds to. A row has `targets * classes`
    scores. Each is divided by `counts` (1 unless the forest averages), then `base` is added. `has_sets`: a node tests
    membership in a set, which an ONNX ensemble does not support.
    """

    features: int
    targets: int
    classes: int
    is_classifier: bool
    finish: str
    sigmoid_alpha: float
    ratio_c: float
    counts: _Floats
    base: _Floats
    has_sets: bool
    tree: _Ints
    node: _Ints
    feature: _Ints
    low: _Ints
    high: _Ints
    mode: _Ints
    missing_low: _Ints
    threshold: _Floats
    leaf_tree: _Ints
    leaf_node: _Ints
    leaf_score: _Ints
    leaf_value: _Floats

    @property
    def scores(self) -> int:
        return self.targets * self.classes

    @property
    def is_convertible(self) -> bool:
        """Whether the ensemble of `onnx_bytes` and then `scores_of` compute the same as treelite."""
        has_finish = self.finish in FINISHES and (self.targets == 1 or self.finish == "identity")
        return has_finish and not self.has_sets


def read_forest(model: Any) -> Forest:
    """Return the columns of a treelite model. Check that they are trees, with numbers in range.

    Raises ValueError if they are not: treelite reads invalid memory for the numbers of a damaged checkpoint.
    """
    field = model.get_header_accessor().get_field
    targets, classes = int(field("num_target")[0]), int(np.max(field("num_class")))
    task = int(field("task_type")[0])
    trees = [_TreeColumns(model, number, targets, classes, field) for number in range(int(model.num_tree))]
    if not trees:
        raise ValueError("it has no trees")
    node_columns = {name: np.concatenate([tree.columns[name] for tree in trees]) for name in _NODE_COLUMNS}
    leaf_columns = {name: np.concatenate([tree.leaves[name] for tree in trees]) for name in _LEAF_COLUMNS}
    counts = np.ones(targets * classes)
    if bool(field("average_tree_output")[0]):
        touched = [np.unique(tree.leaves["leaf_score"]) for tree in trees]
        counts = np.maximum(1.0, np.bincount(np.concatenate(touched), minlength=targets * classes))
    return Forest(
        features=int(model.num_feature), targets=targets, classes=classes, is_classifier=task in (0, 2),
        finish=str(field("postprocessor")), sigmoid_alpha=float(field("sigmoid_alpha")[0]),
        ratio_c=float(field("ratio_c")[0]), counts=counts,
        base=np.array(field("base_scores"), dtype=np.float64).reshape(-1),
        has_sets=any(tree.has_sets for tree in trees), **node_columns, **leaf_columns,
    )  # fmt: skip


_NODE_COLUMNS = ("tree", "node", "feature", "low", "high", "mode", "missing_low", "threshold")
_LEAF_COLUMNS = ("leaf_tree", "leaf_node", "leaf_score", "leaf_value")


class _TreeColumns:
    """The columns of one tree."""

    def __init__(self, model: Any, number: int, targets: int, classes: int, header: Callable[[str], Any]) -> None:
        field = model.get_tree_accessor(number).get_field
        kind = np.array(field("node_type"), dtype=np.int64)
        size = len(kind)
        inner = kind != _LEAF
        self.has_sets = bool((kind == _CATEGORICAL).any())
        self.columns: dict[str, Any] = {
            "tree": np.full(size, number),
            "node": np.arange(size),
            "feature": _inner(field("split_index"), inner),
            "low": _inner(field("cleft"), inner),
            "high": _inner(field("cright"), inner),
            "mode": _inner(field("cmp"), inner),
            "missing_low": _inner(field("default_left"), inner),
            "threshold": np.where(inner, np.array(field("threshold")), 0),
        }
        self._check(number, kind, int(model.num_feature))
        scores = self._scores(number, targets, classes, header)
        nodes = np.flatnonzero(~inner)
        self.leaves: dict[str, Any] = {
            "leaf_tree": np.full(len(nodes) * len(scores), number),
            "leaf_node": np.repeat(nodes, len(scores)),
            "leaf_score": np.tile(scores, len(nodes)),
            "leaf_value": self._values(number, field, nodes, len(scores)),
        }

    def _check(self, number: int, kind: _Ints, features: int) -> None:
        size, inner = len(kind), kind != _LEAF
        # Each node has one parent, and the root none. So no path from the root contains a cycle.
        children = np.concatenate([self.columns["low"][inner], self.columns["high"][inner]])
        split = self.columns["feature"][inner]
        problem = ""
        if size == 0:
            problem = "has no nodes"
        elif not np.isin(kind, (_LEAF, _NUMERICAL, _CATEGORICAL)).all():
            problem = "has a node of an unknown kind"
        elif (children <= 0).any() or (children >= size).any() or len(np.unique(children)) != len(children):
            problem = f"of {size} nodes has a child that is none of them, or of two parents"
        elif (split < 0).any() or (split >= features).any():
            problem = f"splits on a feature that is none of the {features}"
        elif not np.isin(self.columns["mode"][kind == _NUMERICAL], (1, 2, 3, 4, 5)).all():
            problem = "has a comparison of an unknown kind"
        if problem:
            raise ValueError(f"tree {number} {problem}")

    def _scores(self, number: int, targets: int, classes: int, header: Callable[[str], Any]) -> _Ints:
        """Return the positions of the scores that each leaf adds to. -1 in the header stands for all."""
        target, category = int(header("target_id")[number]), int(header("class_id")[number])
        if not (-1 <= target < targets and -1 <= category < classes):
            raise ValueError(f"tree {number} adds to target {target}, class {category} of {targets}, {classes}")
        all_targets = np.arange(targets) if target < 0 else np.array([target])
        all_classes = np.arange(classes) if category < 0 else np.array([category])
        return np.asarray((all_targets[:, None] * classes + all_classes[None, :]).reshape(-1), dtype=np.int64)

    def _values(self, number: int, field: Callable[[str], Any], nodes: _Ints, width: int) -> _Floats:
        begin, end = (np.array(field(name), dtype=np.int64) for name in ("leaf_vector_begin", "leaf_vector_end"))
        vectors = np.array(field("leaf_vector"))
        if len(vectors) == 0 and width == 1:
            values: _Floats = np.array(field("leaf_value"))[nodes]
            return values
        if (end[nodes] - begin[nodes] != width).any() or (begin[nodes] < 0).any() or (end[nodes] > len(vectors)).any():
            raise ValueError(f"tree {number} has a leaf without its {width} values")
        chosen: _Floats = vectors[(begin[nodes][:, None] + np.arange(width)[None, :]).reshape(-1)]
        return chosen


def _inner(values: Any, inner: npt.NDArray[np.bool_]) -> _Ints:
    return np.where(inner, np.array(values, dtype=np.int64), 0)


def scores_of(forest: Forest, sums: _Floats) -> _Floats:
    """Return the model's scores, [rows, targets * classes], from the sums over its trees."""
    averaged = sums / forest.counts.astype(sums.dtype) + forest.base.astype(sums.dtype)
    return FINISHES[forest.finish](averaged, forest.sigmoid_alpha, forest.ratio_c)


def _sigmoid(scores: _Floats, alpha: float) -> _Floats:
    # If exp overflows, the result is 0, which is correct.
    with np.errstate(over="ignore"):
        result: _Floats = 1 / (1 + np.exp(-np.asarray(alpha, scores.dtype) * scores))
    return result


def _softmax(scores: _Floats) -> _Floats:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    result: _Floats = powers / powers.sum(axis=1, keepdims=True)
    return result


def onnx_bytes(forest: Forest) -> bytes:
    """Return an ONNX model: `X` FP32 [rows, features] -> `Y` FP32 [rows, targets * classes], sums over the trees.

    Thresholds and values of type double stay double: rows are converted to double before the comparison.
    """
    is_double = forest.threshold.dtype == np.float64 or forest.leaf_value.dtype == np.float64
    cast = _chunk(1, b"X") + _chunk(2, b"wide") + _chunk(4, b"Cast") + _chunk(5, _int("to", _DOUBLE))
    nodes = [cast] if is_double else []
    nodes.append(_ensemble_node(forest, "wide" if is_double else "X", is_double))
    graph = b"".join(
        (
            *(_chunk(1, node) for node in nodes),
            _chunk(2, b"forest"),
            _chunk(11, _tensor_info("X", forest.features)),
            _chunk(12, _tensor_info("Y", forest.scores)),
        )
    )
    operators = _chunk(8, _number(2, 17)) + _chunk(8, _chunk(1, b"ai.onnx.ml") + _number(2, 3))
    return _number(1, 8) + operators + _chunk(7, graph)


def _ensemble_node(forest: Forest, source: str, is_double: bool) -> bytes:
    attributes = [
        _ints("nodes_treeids", forest.tree),
        _ints("nodes_nodeids", forest.node),
        _ints("nodes_featureids", forest.feature),
        _ints("nodes_truenodeids", forest.low),
        _ints("nodes_falsenodeids", forest.high),
        _ints("nodes_missing_value_tracks_true", forest.missing_low),
        _strings("nodes_modes", (_MODES[mode] for mode in forest.mode.tolist())),
        _values("nodes_values", forest.threshold, is_double),
        _ints("target_treeids", forest.leaf_tree),
        _ints("target_nodeids", forest.leaf_node),
        _ints("target_ids", forest.leaf_score),
        _values("target_weights", forest.leaf_value, is_double),
        _int("n_targets", forest.scores),
    ]
    named = _chunk(1, source.encode()) + _chunk(2, b"Y") + _chunk(4, b"TreeEnsembleRegressor")
    return named + _chunk(7, b"ai.onnx.ml") + b"".join(_chunk(5, attribute) for attribute in attributes)


def _tensor_info(name: str, columns: int) -> bytes:
    shape = _chunk(1, _chunk(2, b"rows")) + _chunk(1, _number(1, columns))
    return _chunk(1, name.encode()) + _chunk(2, _chunk(1, _number(1, _FLOAT) + _chunk(2, shape)))


def _int(name: str, value: int) -> bytes:
    return _chunk(1, name.encode()) + _number(3, value) + _number(20, 2)


def _ints(name: str, values: _Ints) -> bytes:
    return _chunk(1, name.encode()) + _chunk(8, _varints(values)) + _number(20, 7)


def _strings(name: str, values: Iterable[bytes]) -> bytes:
    known = {mode: _chunk(9, mode) for mode in _MODES.values()}
    return _chunk(1, name.encode()) + b"".join(known[value] for value in values) + _number(20, 8)


def _values(name: str, values: _Floats, is_double: bool) -> bytes:
    if not is_double:
        return _chunk(1, name.encode()) + _chunk(7, values.astype("<f4").tobytes()) + _number(20, 6)
    tensor = _number(1, len(values)) + _number(2, _DOUBLE) + _chunk(9, values.astype("<f8").tobytes())
    return _chunk(1, f"{name}_as_tensor".encode()) + _chunk(5, tensor) + _number(20, 4)


def _varints(values: _Ints) -> bytes:
    """Return non-negative integers as consecutive varints."""
    rest = values.astype(np.uint64)
    groups = (rest[:, None] >> np.arange(0, 63, 7, dtype=np.uint64)[None, :]) & np.uint64(0x7F)
    place = np.arange(9)[None, :]
    lengths = ((groups != 0) * (place + 1)).max(axis=1, initial=1)
    encoded = groups.astype(np.uint8) | np.where(place < lengths[:, None] - 1, 0x80, 0).astype(np.uint8)
    return bytes(encoded[place < lengths[:, None]])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _chunk(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
