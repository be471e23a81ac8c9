"""Object detector for Frigate that asks a KServe v2 server over HTTP (edge-server, Triton and others).

Mount this file into Frigate's container as /opt/frigate/frigate/detectors/plugins/kserve.py, and configure:

    detectors:
      remote:
        type: kserve
        address: 192.168.1.20:8000
        model_name: yolo
    model:
      width: 320
      height: 320

`model.input_tensor`, `input_dtype` and `input_pixel_format` of Frigate must fit the input of the served model. The
outputs of the served model must be one of:

- one output [N, 6] of x_min, y_min, x_max, y_max in pixels of the input, score, class: YOLO exported with NMS inside;
- four outputs: boxes [N, 4] of y_min, x_min, y_max, x_max from 0 to 1, classes [N], scores [N] and their count, in this
  order: SSD as TensorFlow exports it.

Each may have a leading 1. If the server does not answer in time, the frame has no detections, and the log says why.
"""

import http.client
import json
import logging
from typing import Literal

import numpy as np
from frigate.detectors.detection_api import DetectionApi
from frigate.detectors.detector_config import BaseDetectorConfig
from pydantic import Field

logger = logging.getLogger(__name__)

DETECTOR_KEY = "kserve"

ROWS = 20
"""Frigate takes this many detections of a frame."""

DATATYPES = {"uint8": "UINT8", "int8": "INT8", "float16": "FP16", "float32": "FP32"}
NUMBERS = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "INT32": "<i4", "INT64": "<i8"}


class KServeDetectorConfig(BaseDetectorConfig):
    type: Literal[DETECTOR_KEY]
    address: str = Field(default="127.0.0.1:8000", title="Host and HTTP port of the server")
    model_name: str = Field(title="Name of the served model")
    timeout: float = Field(default=0.2, title="Longest wait for the server, in seconds")


class KServeDetector(DetectionApi):
    type_key = DETECTOR_KEY

    def __init__(self, detector_config):
        self.size = detector_config.model.width, detector_config.model.height
        self.path = f"/v2/models/{detector_config.model_name}"
        self.connection = http.client.HTTPConnection(detector_config.address, timeout=detector_config.timeout)
        self.input_name = None
        self.failure = ""

    def detect_raw(self, tensor_input):
        """Return 20 rows of class, score, y_min, x_min, y_max, x_max, the best first; positions are 0 to 1."""
        try:
            rows = self.rows_of(self.infer(tensor_input))
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            self.connection.close()  # it opens again for the next frame
            if str(error) != self.failure:  # not the same line for each frame
                logger.warning("KServe server: %s: %s", type(error).__name__, error)
            self.failure = str(error)
            return np.zeros((ROWS, 6), np.float32)
        self.failure = ""
        detections = np.zeros((ROWS, 6), np.float32)
        best = rows[np.argsort(-rows[:, 1], kind="stable")][:ROWS]
        detections[: len(best)] = best
        return detections

    def infer(self, tensor):
        """Return the outputs of the model for a tensor, as arrays."""
        if self.input_name is None:
            self.input_name = json.loads(self.ask("GET", self.path)[1])["inputs"][0]["name"]
        raw = np.ascontiguousarray(tensor).tobytes()
        described = {
            "name": self.input_name,
            "datatype": DATATYPES[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "parameters": {"binary_data_size": len(raw)},
        }
        head = json.dumps({"inputs": [described], "parameters": {"binary_data_output": True}}).encode()
        headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
        head_size, body = self.ask("POST", f"{self.path}/infer", head + raw, headers)
        arrays, start = [], head_size
        for output in json.loads(body[:head_size])["outputs"]:
            end = start + output["parameters"]["binary_data_size"]
            arrays.append(np.frombuffer(body[start:end], NUMBERS[output["datatype"]]).reshape(output["shape"]))
            start = end
        return arrays

    def ask(self, method, path, body=None, headers=None):
        """Return the size of the JSON part of the response, and the response."""
        try:
            self.connection.request(method, path, body, headers or {})
            response = self.connection.getresponse()
        except ConnectionError:  # the server has closed an idle connection, or was restarted
            self.connection.close()
            self.connection.request(method, path, body, headers or {})
            response = self.connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise ValueError(f"{response.status} {data[:300].decode(errors='replace')}")
        return int(response.headers.get("Inference-Header-Content-Length", len(data))), data

    def rows_of(self, outputs):
        """Return all detections as rows for Frigate."""
        if len(outputs) == 1 and outputs[0].shape[-1] == 6:
            x_min, y_min, x_max, y_max, score, kind = outputs[0].reshape(-1, 6).T
            width, height = self.size
            return np.stack((kind, score, y_min / height, x_min / width, y_max / height, x_max / width), axis=1)
        if len(outputs) == 4 and outputs[0].shape[-1] == 4:
            boxes, kinds, scores = outputs[0].reshape(-1, 4), outputs[1].ravel(), outputs[2].ravel()
            rows = np.concatenate((kinds[:, None], scores[:, None], boxes), axis=1)
            return rows[: int(outputs[3].ravel()[0])]
        raise ValueError(f"expected one output [N, 6] or four of SSD, given {[output.shape for output in outputs]}")
