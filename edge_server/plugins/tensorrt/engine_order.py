"""Data classes for a wanted TensorRT engine (model, GPU, build options, ranges of shapes) and for the file of a
finished one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from edge_server.core.model_spec import ModelSpec

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """Range of shapes of one input, with the batch dimension. The engine is fastest at the shape `best`."""

    least: Shape
    best: Shape
    most: Shape

    def holds(self, shape: Sequence[int]) -> bool:
        """Return whether the shape is within the range."""
        return len(shape) == len(self.most) and all(
            low <= size <= high for low, size, high in zip(self.least, shape, self.most, strict=True)
        )

    def __str__(self) -> str:
        return f"{list(self.least)} to {list(self.most)}"


Profile: TypeAlias = Mapping[str, Range]
"""Input name -> its shapes. Inputs with a fixed shape may be omitted."""


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """Order for an engine of one model version on one GPU. `library` is "tensorrt" or "tensorrt_rtx".

    `path` is the ONNX file. `options` are the `trt_...` parameters that change the engine, as text. `tolerance` and
    `spec` (the model's specification) do not change the engine; `spec` does not leave the process.
    """

    model: str
    version: int
    path: Path
    library: str
    library_version: str
    device_id: int
    precision: str
    profiles: tuple[Profile, ...]
    options: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 1e-3
    spec: ModelSpec | None = field(default=None, compare=False, repr=False)

    def recipe(self) -> dict[str, object]:
        """Return the fields of the order that determine the engine, as JSON."""
        return {
            "library": self.library,
            "library_version": self.library_version,
            "precision": self.precision,
            "profiles": [
                {name: [list(one.least), list(one.best), list(one.most)] for name, one in sorted(profile.items())}
                for profile in self.profiles
            ],
            "options": dict(sorted(self.options.items())),
        }


@dataclass(frozen=True, slots=True)
class EngineFile:
    """A verified engine that was built for an order. `digest` identifies it.

    If it does not work, call `reject` with the reason: the engine is deleted and built again.
    """

    path: Path
    digest: str
    reject: Callable[[str], None]
