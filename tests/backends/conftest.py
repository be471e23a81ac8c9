"""ONNX files made to order, and jobs to open them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from edge_server.backends.base import ModelFile, OpenJob
from edge_server.core.model import InputSpec, InstanceGroup, InstanceKind, ModelSpec, OutputSpec

onnx = pytest.importorskip("onnx")
helper = onnx.helper


@pytest.fixture
def write_onnx(tmp_path: Path) -> Callable[..., ModelFile]:
    """Return a function that writes one graph as version 1 of a model; tensors are (name, element type, shape)."""

    def write(
        nodes: Sequence[Any],
        inputs: Sequence[tuple[str, int, list[Any] | None]],
        outputs: Sequence[tuple[str, int, list[Any] | None]],
        weights: Sequence[Any] = (),
        *,
        model: str = "made",
        name: str = "model.onnx",
        **save_options: Any,
    ) -> ModelFile:
        graph = helper.make_graph(
            list(nodes),
            "graph",
            [helper.make_tensor_value_info(*one) for one in inputs],
            [helper.make_tensor_value_info(*one) for one in outputs],
            list(weights),
        )
        # Old enough for every runtime that the project supports.
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        path = tmp_path / model / "1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(proto, path, **save_options)
        return ModelFile(path, tmp_path / model, 1)

    return write


@pytest.fixture
def job() -> Callable[..., OpenJob]:
    """Return a function that makes the job of opening one instance of a file."""

    def make(
        file: ModelFile,
        *,
        inputs: Sequence[InputSpec] = (),
        outputs: Sequence[OutputSpec] = (),
        backend: str = "",
        max_batch_size: int = 0,
        instances: int = 1,
        number: int = 0,
        settings: Mapping[str, str] | None = None,
        parameters: Mapping[str, str] | None = None,
        device_id: int | None = None,
        **spec: Any,
    ) -> OpenJob:
        name = file.model_dir.name
        model = ModelSpec(
            name=name,
            backend=backend,
            platform="",
            max_batch_size=max_batch_size,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            instance_groups=(InstanceGroup(name, InstanceKind.CPU, instances),),
            parameters=dict(parameters or {}),
            **spec,
        )
        return OpenJob(model, file, f"{name}_{number}", device_id, dict(settings or {}))

    return make
