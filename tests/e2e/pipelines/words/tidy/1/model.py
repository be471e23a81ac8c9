"""Put single spaces between the words of a text, and count them."""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0]
            words = text.split()
            tidy = np.array([b" ".join(words)], dtype=np.object_)
            count = np.array([len(words)], np.int32)
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("TIDY", tidy), pb_utils.Tensor("WORDS", count)])
            )
        return responses
