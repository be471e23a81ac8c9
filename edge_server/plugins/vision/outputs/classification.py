"""Decoder of classification outputs: finds the k best classes from the class scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.core.model_spec import ModelSpec
from edge_server.plugins.vision.outputs.output_parameters import Activation, ClassDeclaration
from edge_server.plugins.vision.outputs.output_tensors import (
    FloatArray,
    OutputTensor,
    activate,
    choose_output,
    select_top_k,
)
from edge_server.protocol.frame_messages import ClassScore
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt


@record(frozen=True, slots=True)
class ClassDecoder:
    """Decodes one output to the top-k classes."""

    tensor: OutputTensor
    activation: Activation
    labels: tuple[str, ...]
    scale: float = 1.0

    def decode(
        self, outputs: Mapping[str, npt.NDArray[Any]], item: int | None, top_k: int, *, model: str
    ) -> tuple[ClassScore, ...]:
        """Return the `top_k` best classes, best first, of equals the lower index first. Scores that are not finite are
        omitted."""
        scores = self.scores(outputs, item, model=model)
        indices = select_top_k(scores, -np.inf, top_k)
        return tuple(
            ClassScore(index, score, self.labels[index] if index < len(self.labels) else "")
            for index, score in zip(indices.tolist(), scores[indices].tolist(), strict=True)
        )

    def scores(self, outputs: Mapping[str, npt.NDArray[Any]], item: int | None, *, model: str) -> FloatArray:
        """Return the score of each class."""
        values = self.tensor.select_floats(outputs, item, model=model).ravel()
        if self.scale != 1.0:
            values = values * self.scale
        return activate(values, self.activation, axis=0) if values.size else values


def make_class_decoder(spec: ModelSpec, declaration: ClassDeclaration) -> ClassDecoder | None:
    """Return the decoder, or None if only image_top_k is declared and it is unclear which output has the classes.

    Raises BadModelConfig if the declared output does not exist, is ambiguous, or has no numbers.
    """
    labelled = [output for output in spec.outputs if output.labels]
    if not declaration.is_certain and len(labelled) != 1 and len(spec.outputs) != 1:
        return None
    output = choose_output(spec, "class_output", declaration.output)
    tensor = OutputTensor(output.name, output.dtype, 1)
    return ClassDecoder(tensor, declaration.activation, spec.labels_of(output), declaration.scale)


def make_implied_class_decoder(spec: ModelSpec) -> ClassDecoder | None:
    """Return the decoder of a model that only declares labels, on one output with one dimension; else None."""
    labelled = [output for output in spec.outputs if output.labels]
    if len(labelled) != 1:
        return None
    output = labelled[0]
    is_vector = sum(dim != 1 for dim in output.dims) == 1 and output.dtype.numpy.kind in "fiu"
    if not is_vector:
        return None
    return ClassDecoder(OutputTensor(output.name, output.dtype, 1), Activation.NONE, output.labels)
