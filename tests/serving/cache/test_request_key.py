"""Keys: equal for equal requests only, whatever differs; content digests: the same on another box."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import InputSpec, ModelFile, ModelSpec, OutputSpec
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import StorageFault
from edge_server.serving.cache.request_key import RequestKeys, content_digest, identity
from tests.kit.model_folder import model_folder

SPEC = ModelSpec(
    "m", "stub", "", 8,
    (InputSpec("A", DType.FP32, (-1,)), InputSpec("B", DType.BYTES, (-1,), is_optional=True)),
    (OutputSpec("X", DType.FP32, (-1,)), OutputSpec("Y", DType.FP32, (-1,))),
    (),
)  # fmt: skip


def request(a: Any = (1.0, 2.0), b: Any = None, **more: Any) -> Request:
    inputs = {"A": Tensor("A", DType.FP32, np.array([a], np.float32))}
    if b is not None:
        inputs["B"] = Tensor("B", DType.BYTES, np.array([b], object))
    return Request("m", inputs, **more)


def key(asked: Request, who: object = "m", *, sees_parameters: bool = True) -> bytes:
    return RequestKeys(identity(who), SPEC, sees_parameters=sees_parameters).key(asked)


DIFFERENT = [
    request(),
    request((2.0, 1.0)),
    request((1.0,)),
    request((1.0, 2.0, 0.0)),
    request((1.0, -2.0)),
    request((0.0, 0.0)),
    request((-0.0, 0.0)),
    request(b=[]),
    request(b=[b"ab", b"c"]),
    request(b=[b"a", b"bc"]),
    request(b=[b"abc"]),
    request(b=[b"abc", b""]),
    request(outputs=("X",)),
    request(outputs=("Y",)),
    request(parameters={"p": 1}),
    request(parameters={"p": "1"}),
    request(parameters={"p": True}),
    request(parameters={"p": 1.0}),
    Request("m", {"A": Tensor("A", DType.FP32, np.array([[1.0], [2.0]], np.float32))}),
    Request("m", {"A": Tensor("A", DType.INT32, np.array([[1.0, 2.0]], np.float32).view(np.int32))}),
]


def test_requests_that_differ_in_anything_that_may_decide_the_answer_have_different_keys() -> None:
    found = {key(item) for item in DIFFERENT}
    found |= {key(request(), who) for who in (("m", 1), ("m", 2), ("m", 11), ("m1", 1))}
    assert len(found) == len(DIFFERENT) + 4


UNALIGNED = np.frombuffer(b"-" + np.array([1, 2], "<f4").tobytes(), "<f4", 2, 1)[None]


@pytest.mark.parametrize(
    "same",
    [
        request(id="x"),
        request(priority=3, timeout_us=5, deadline_ns=7),
        request(outputs=("Y", "X")),
        Request("m", {"A": Tensor("A", DType.FP32, np.array([[1.0, 9.0], [2.0, 9.0]], np.float32).T[:1])}),
        Request("m", {"A": Tensor("A", DType.FP32, np.array([[1.0, 9.0, 2.0, 9.0]], np.float32)[:, ::2])}),
        Request("m", {"A": Tensor("A", DType.FP32, UNALIGNED)}),
    ],
    ids=["id", "schedule", "all outputs named", "transposed", "strided", "unaligned"],
)  # fmt: skip
def test_what_decides_nothing_has_no_part_in_the_key(same: Request) -> None:
    assert key(same) == key(request())


def test_parameters_count_only_for_models_that_see_them() -> None:
    with_parameters = request(parameters={"traceparent": "1"})
    assert key(with_parameters, sees_parameters=False) == key(request(), sees_parameters=False)
    assert key(with_parameters) != key(request())


def test_a_name_that_is_no_unicode_has_a_key_too() -> None:
    assert len(key(request(parameters={"p": "\udc80"}))) == 32


@pytest.fixture
def model(tmp_path: Path) -> ModelFile:
    folder = tmp_path / "one" / "m"
    (folder / "1").mkdir(parents=True)
    model_folder(folder, files={"1/model.onnx": b"weights", "2/model.onnx": b"others", "labels.txt": "cat"}, version=2)
    return ModelFile(folder / "1" / "model.onnx", folder, 1)


def test_the_digest_of_a_model_is_that_of_its_copy_on_another_machine(model: ModelFile, tmp_path: Path) -> None:
    copy = tmp_path / "two" / "m"
    shutil.copytree(model.model_dir, copy)
    (copy / "2" / "model.onnx").write_bytes(b"another version is no part of it")
    there = ModelFile(copy / "1" / "model.onnx", copy, 1)
    assert content_digest(there, SPEC, {}) == content_digest(model, SPEC, {})


@pytest.mark.parametrize(
    ("path", "content"),
    [("1/model.onnx", b"weightS"), ("labels.txt", b"dog"), ("1/model.bin", b""), ("1/lib/code.py", b"x = 1")],
)
def test_the_digest_changes_with_any_file_of_the_model(model: ModelFile, path: str, content: bytes) -> None:
    before = content_digest(model, SPEC, {})
    (model.model_dir / path).parent.mkdir(exist_ok=True)
    (model.model_dir / path).write_bytes(content)
    assert content_digest(model, SPEC, {}) != before


def test_the_digest_changes_with_the_backends_settings(model: ModelFile) -> None:
    assert content_digest(model, SPEC, {"precision": "bf16"}) != content_digest(model, SPEC, {})


def test_a_file_that_cannot_be_read_fails_the_load_with_the_models_name(model: ModelFile) -> None:
    (model.model_dir / "1" / "gone").symlink_to("/nowhere/at/all")
    with pytest.raises(StorageFault, match=r"model 'm'.*gone"):
        content_digest(model, SPEC, {})
