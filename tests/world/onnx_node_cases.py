"""Serves cases of the package `onnx` and prints for each what came of it, as a line of JSON.

Arguments: a folder for the models, and N: of the node cases sorted by name, each N-th one is asked, and of the other
kinds all. A line is {"name": ..., "outcome": "right", "wrong", "refused" or "left out", "detail": ...}. A case is left
out where the bare ONNX Runtime does not give the expected values either, and where requests cannot carry its tensors,
such as sequences.
Before each case comes a line {"begins": ...}.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx.backend.test.loader import load_model_tests

import edge_server
from edge_server.errors import EdgeServerError

Arrays = Mapping[str, np.ndarray]


def is_equal(found: np.ndarray, expected: np.ndarray, case: Any) -> bool:
    """Compare as the runner of the package does."""
    if found.dtype != expected.dtype:
        return False
    # Triton has no tensor without dimensions: such an input or output has one of length 1.
    found = found.reshape(()) if expected.shape == () and found.shape == (1,) else found
    if found.shape != expected.shape:
        return False
    if expected.dtype.kind in "OSU":
        return [as_text(item) for item in found.flat] == [as_text(item) for item in expected.flat]
    if expected.dtype.kind in "fc":
        return np.allclose(found, expected, rtol=case.rtol, atol=case.atol, equal_nan=True)
    return np.array_equal(found, expected)


def as_array(item: Any) -> np.ndarray | None:
    """Return a tensor of the package; None for what is none, or has elements of which numpy has no type."""
    if isinstance(item, onnx.TensorProto):
        item = onnx.numpy_helper.to_array(item)
    return np.asarray(item) if isinstance(item, (np.ndarray, np.generic)) and item.dtype.kind != "V" else None


def as_text(item: Any) -> str:
    return item.decode() if isinstance(item, bytes) else str(item)


def bare_problem(model: bytes, inputs: Arrays, expected: Arrays, case: Any) -> str:
    """Return why ONNX Runtime alone does not give the expected values, "" if it does."""
    try:
        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        found = session.run(list(expected), dict(inputs))
    except Exception as error:  # noqa: BLE001 - the library has no base class of its errors
        return f"onnxruntime refuses it: {str(error)[:80]}"
    is_right = all(is_equal(np.asarray(one), two, case) for one, two in zip(found, expected.values(), strict=True))
    return "" if is_right else "onnxruntime gives other values"


def input_names(model: onnx.ModelProto) -> list[str]:
    weights = {weight.name for weight in model.graph.initializer}
    return [item.name for item in model.graph.input if item.name not in weights]


def contents(case: Any) -> tuple[onnx.ModelProto, list[Any], list[Any]]:
    """Return a case's model, inputs and expected outputs. Node cases have them, the other kinds are files."""
    if case.data_sets:
        return (case.model, *case.data_sets[0])
    folder = Path(case.model_dir)
    model = onnx.load(folder / "model.onnx")
    types = {item.name: item.type for item in (*model.graph.input, *model.graph.output)}

    def read(kind: str, names: list[str]) -> list[Any]:
        files = [folder / f"test_data_set_0/{kind}_{index}.pb" for index in range(len(names))]
        return [
            onnx.TensorProto.FromString(file.read_bytes()) if types[name].HasField("tensor_type") else None
            for file, name in zip(files, names, strict=True)
            if file.exists()
        ]

    return model, read("input", input_names(model)), read("output", [item.name for item in model.graph.output])


def outcome(server: edge_server.Server, root: Path, case: Any) -> tuple[str, str]:
    """Return what comes of one case."""
    model, given, wanted = contents(case)
    given, wanted = ([as_array(item) for item in items] for items in (given, wanted))
    if any(array is None for array in (*given, *wanted)):
        return "left out", "a sequence, an optional, or a type that numpy has not"
    inputs = dict(zip(input_names(model), given, strict=False))
    expected = dict(zip((item.name for item in model.graph.output), wanted, strict=False))
    data = model.SerializeToString()
    if problem := bare_problem(data, inputs, expected, case):
        return "left out", problem
    folder = root / case.name / "1"
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(data)
    try:
        server.load(case.name)
        asked = {name: array.reshape(1) if array.shape == () else array for name, array in inputs.items()}
        answered = server.infer(case.name, asked).outputs
    except EdgeServerError as error:
        return "refused", error.message
    finally:
        server.unload(case.name)
    for name, array in expected.items():
        found = np.asarray(answered[name])
        if not is_equal(found, array, case):
            return "wrong", f"{name}: {found.dtype}{list(found.shape)} in place of {array.dtype}{list(array.shape)}"
    return "right", ""


def main(root: Path, step: int) -> None:
    logging.disable(logging.CRITICAL)
    onnxruntime.set_default_logger_severity(4)
    cases = sorted(load_model_tests(kind="node"), key=lambda case: case.name)[::step]
    for kind in ("simple", "pytorch-converted", "pytorch-operator"):
        cases += load_model_tests(kind=kind)
    with edge_server.Server(model_repository=str(root), model_control_mode="explicit") as server:
        for case in cases:
            print(json.dumps({"begins": case.name}), flush=True)
            found, detail = outcome(server, root, case)
            print(json.dumps({"name": case.name, "outcome": found, "detail": detail}), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), int(sys.argv[2]))
