"""Detect speech, with a state for each microphone, by its id from START to END."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils

RATE = np.array(16_000, np.int64)


class TritonPythonModel:
    def initialize(self, args):
        weights = Path(args["model_repository"]) / args["model_version"] / "network.onnx"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(str(weights), options, providers=["CPUExecutionProvider"])
        self.remembered = {}

    def execute(self, requests):
        ids = [value_of(request, "MICROPHONE") for request in requests]
        for name, request in zip(ids, requests, strict=True):
            if value_of(request, "START"):
                self.remembered[name] = (np.zeros((1, 64), np.float32), np.zeros((2, 1, 128), np.float32))
        audio = np.concatenate([pb_utils.get_input_tensor_by_name(request, "AUDIO").as_numpy() for request in requests])
        context, memory = zip(*(self.remembered[name] for name in ids), strict=True)
        given = {
            "input": np.concatenate([np.concatenate(context), audio], axis=1),
            "state": np.concatenate(memory, axis=1),
            "sr": RATE,
        }
        speech, memories = self.session.run(["output", "stateN"], given)
        for row, (name, request) in enumerate(zip(ids, requests, strict=True)):
            if value_of(request, "END"):
                del self.remembered[name]
            else:
                self.remembered[name] = (audio[row : row + 1, -64:].copy(), memories[:, row : row + 1].copy())
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("SPEECH", speech[row : row + 1])])
            for row in range(len(requests))
        ]


def value_of(request, name):
    """Return the one value of a control."""
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0]
