"""Read the text in a picture by two networks that the server runs as models of their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import onnxruntime
import text_reading
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.detector, self.recogniser = (
            config["parameters"][key]["string_value"] for key in ("detector", "recogniser")
        )
        self.at_once = int(config["parameters"]["lines_at_once"]["string_value"])
        weights = Path(args["model_repository"]).parent / self.recogniser / "1" / "model.onnx"
        session = onnxruntime.InferenceSession(str(weights), providers=["CPUExecutionProvider"])
        self.alphabet = text_reading.read_alphabet(session.get_modelmeta().custom_metadata_map["character"])

    async def execute(self, requests):
        return await asyncio.gather(*(self.answer(request) for request in requests))

    async def answer(self, request):
        try:
            encoded = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()[0]
            picture = text_reading.decode(encoded)
        except ValueError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
        lines, texts = await self.read(picture)
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("TEXT", np.array([text.encode() for text in texts], dtype=np.object_)),
                pb_utils.Tensor("CORNERS", np.array([line.corners for line in lines], np.float32).reshape(-1, 4, 2)),
                pb_utils.Tensor("SCORE", np.array([line.score for line in lines], np.float32)),
            ]
        )

    async def read(self, picture):
        given, scale = text_reading.to_detector(picture)
        ink = await self.run(self.detector, given)
        lines = text_reading.find_lines(ink[0, 0], scale)
        groups = text_reading.to_recogniser(picture, lines, self.at_once)
        # All groups are asked for before the first is waited for: the recogniser may put those of one width together.
        answers = await asyncio.gather(*(self.run(self.recogniser, group.rows) for group in groups))
        texts = [""] * len(lines)
        for group, scores in zip(groups, answers, strict=True):
            for member, text in zip(group.members, text_reading.spell(scores, self.alphabet), strict=True):
                texts[member] = text
        return lines, texts

    async def run(self, model, array):
        request = pb_utils.InferenceRequest(
            model_name=model, requested_output_names=["fetch_name_0"], inputs=[pb_utils.Tensor("x", array)]
        )
        response = await request.async_exec()
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        return pb_utils.get_output_tensor_by_name(response, "fetch_name_0").as_numpy()
