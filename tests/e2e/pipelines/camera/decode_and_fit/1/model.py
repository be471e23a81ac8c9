"""Decode pictures and bring them to the classifier's input: shorter side to 256, the middle 224 x 224, RGB, -1 to 1."""

from __future__ import annotations

import cv2
import numpy as np
import triton_python_backend_utils as pb_utils

SHORTER, SIDE = 256, 224


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        files = pb_utils.get_input_tensor_by_name(request, "FILE").as_numpy().reshape(-1)
        fitted = np.empty((len(files), 3, SIDE, SIDE), np.float32)
        for row, file in enumerate(files):
            data = np.frombuffer(file, np.uint8)
            picture = cv2.imdecode(data, cv2.IMREAD_COLOR) if data.size else None
            if picture is None:
                problem = f"row {row} of FILE, {data.size} bytes, is not a picture"
                return pb_utils.InferenceResponse(error=pb_utils.TritonError(problem, pb_utils.TritonError.INVALID_ARG))
            fitted[row] = fit(picture)
        return pb_utils.InferenceResponse([pb_utils.Tensor("FITTED", fitted)])


def fit(picture: np.ndarray) -> np.ndarray:
    """Return [3, 224, 224] of a picture [height, width, 3], blue first."""
    height, width = picture.shape[:2]
    shorter = min(height, width)
    picture = cv2.resize(picture, (width * SHORTER // shorter, height * SHORTER // shorter))
    top, left = (round((size - SIDE) / 2) for size in picture.shape[:2])
    middle = picture[top : top + SIDE, left : left + SIDE, ::-1]
    return (middle.transpose(2, 0, 1).astype(np.float32) - 127) / 128
