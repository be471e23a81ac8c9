"""Engines: a model compiled for one GPU by TensorRT. What is asked of one, and where one lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from edge_server.core.model_spec import ModelSpec

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """The shapes of one input: complete ones, the batch dimension included."""

    least: Shape
    best: Shape
    most: Shape

    def holds(self, shape: Sequence[int]) -> bool:
        return len(shape) == len(self.most) and all(
            low <= size <= high for low, size, high in zip(self.least, shape, self.most, strict=True)
        )

    def __str__(self) -> str:
        return f"{list(self.least)} to {list(self.most)}"


Profile: TypeAlias = Mapping[str, Range]
"""Input's name -> its shapes. Inputs whose shape is fixed may be left out."""


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """An engine for one version of a model on one GPU. `library` is "tensorrt" or "tensorrt_rtx".

    `path` is the ONNX file; `options` those of the `trt_...` parameters that change what is built, as text.
    `tolerance` and `spec`, the specification it was made from, are not part of what is built; `spec` stays in the
    process.
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
        """Return what of the order decides the engine, as JSON."""
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
    """An engine that was built for an order, and answered as the serving runtime does. `digest` names it.

    `reject` is told why it does not work after all: it is thrown away then and built anew.
    """

    path: Path
    digest: str
    reject: Callable[[str], None]
