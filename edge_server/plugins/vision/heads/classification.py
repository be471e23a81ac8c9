"""Classification head: class scores to the best few classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.core.model_spec import ModelSpec
from edge_server.plugins.vision.heads.activation import activate
from edge_server.plugins.vision.heads.output_parameters import Activation, ClassDeclaration
from edge_server.plugins.vision.heads.output_tensors import HeadOutput, named_output
from edge_server.plugins.vision.heads.top_k import best
from edge_server.protocol.frame_messages import ClassScore

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ClassPlan:
    """Conversion of one output to the best classes."""

    slot: HeadOutput
    activation: Activation
    labels: tuple[str, ...]

    def read(
        self, outputs: Mapping[str, npt.NDArray[Any]], row: int | None, top_k: int, *, model: str
    ) -> tuple[ClassScore, ...]:
        """Return the `top_k` best classes, best first, of equals the lower index first. Scores that are not finite are
        omitted."""
        values = self.slot.values(outputs, row, model=model).ravel()
        scores = activate(values, self.activation, axis=0) if values.size else values
        chosen = best(scores, -np.inf, top_k)
        return tuple(
            ClassScore(index, score, self.labels[index] if index < len(self.labels) else "")
            for index, score in zip(chosen.tolist(), scores[chosen].tolist(), strict=True)
        )


def class_plan(spec: ModelSpec, declaration: ClassDeclaration) -> ClassPlan | None:
    """Return the class plan, or None if only image_top_k is declared and it is unclear which output has the classes.

    Raises BadModelConfig if the declared output does not exist, is ambiguous, or has no numbers.
    """
    labelled = [output for output in spec.outputs if output.labels]
    if not declaration.is_certain and len(labelled) != 1 and len(spec.outputs) != 1:
        return None
    output = named_output(spec, "class_output", declaration.output)
    return ClassPlan(HeadOutput(output.name, output.dtype, 1), declaration.activation, output.labels)


def implied_class_plan(spec: ModelSpec) -> ClassPlan | None:
    """Return the plan of a model that only declares labels, on one output with one dimension; else None."""
    labelled = [output for output in spec.outputs if output.labels]
    if len(labelled) != 1:
        return None
    output = labelled[0]
    is_vector = sum(dim != 1 for dim in output.dims) == 1 and output.dtype.numpy.kind in "fiu"
    return ClassPlan(HeadOutput(output.name, output.dtype, 1), Activation.NONE, output.labels) if is_vector else None
