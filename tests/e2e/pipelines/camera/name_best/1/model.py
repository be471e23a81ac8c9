"""Name the best classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

BEST = 5


class TritonPythonModel:
    def initialize(self, args):
        names = (Path(args["model_repository"]) / "labels.txt").read_text(encoding="utf-8").splitlines()
        self.names = np.array([name.encode() for name in names], dtype=np.object_)

    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "PROBABILITIES").as_numpy()
            best = np.argsort(-given, axis=1, kind="stable")[:, :BEST]
            scores = np.take_along_axis(given, best, axis=1)
            responses.append(
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor("NAME", self.names[best]), pb_utils.Tensor("SCORE", scores)]
                )
            )
        return responses
