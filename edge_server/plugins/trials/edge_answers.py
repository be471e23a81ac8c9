"""Answers of a runtime to the samples that runtimes are known to compute differently, and the check whether another
runtime answers alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from edge_server.backends.isolation.npz_tensor_files import Tensors
from edge_server.core.output_difference import describe_difference

TOLERANCE = 1e-3
"""Of floats: the largest difference relative to the largest value of the output. Rounding in another order stays below
1e-4 in the networks of the tests. Of integers and booleans: the fraction that differs."""

TOLERATED = 1e-6
"""Absolute difference of floats that always counts as equal. Sigmoids of the runtimes differ by 1e-7, also where all
values of an output are as small as that, such as the scores of a picture without an object."""


class EdgeAnswers(NamedTuple):
    """Outputs and errors by the number of the sample. `end`: why its process ended before the last one, or ""."""

    outputs: Mapping[int, Tensors]
    errors: Mapping[int, str]
    end: str = ""

    def difference_to(self, reference: EdgeAnswers) -> str:
        """Return how these answers differ from those of the reference, "" if they do not. Samples that the reference
        refuses are left out."""
        if self.end:
            return f"with unusual values {self.end}"
        if not reference.outputs:
            return "no answers could be compared"
        for number, expected in reference.outputs.items():
            if number not in self.outputs:
                return f"it fails with values that the other runtime takes: {self.errors[number]}"
            found = self.outputs[number]
            if reason := describe_difference(expected, found, TOLERANCE, "those of the other runtime", TOLERATED):
                return reason
        return ""
