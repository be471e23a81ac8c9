"""Parser of the request `classify` of vLLM's API, and the encoder of its response.

The format is that of vLLM's `vllm/entrypoints/pooling/classify/protocol.py`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from edge_server.core.model_spec import ModelSpec, OutputSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import ServingFault
from edge_server.frontends.v2.json_parser import json_type, parse_object
from edge_server.plugins.language.openai.completion_request import BadMember, check_names, read_keep_alive, read_model
from edge_server.protocol.raw_tensors import Buffer

_SUPPORTED = {"model", "input", "keep_alive"}
_MAX_TEXTS = 2048
_PROBABILITIES, _LABELS, _TOKEN_COUNT = "probs", "labels", "num_input_tokens"


class Classes(NamedTuple):
    """Probabilities of the classes of each text, and their labels. `tokens` of all texts, 0 if the model does not tell
    them."""

    rows: Sequence[Sequence[float]]
    labels: Sequence[str]
    tokens: int


@dataclass(frozen=True, slots=True)
class ClassificationRequest:
    """One call. `keep_alive_s` as in CompletionRequest."""

    model: str
    texts: tuple[str, ...]
    keep_alive_s: float | None
    warnings: tuple[str, ...] = ()
    id: str = field(default_factory=lambda: f"classify-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def inference_requests(self, spec: ModelSpec) -> list[Request]:
        """Return requests with all texts in order: as many in each as the model's batch has rows, or one.

        Raises BadMember if the model does not classify texts.
        """
        name, _ = _tensors(spec)
        rows = max(spec.max_batch_size, 1)
        more = (name for name in (_LABELS, _TOKEN_COUNT) if spec.output(name) is not None)
        outputs = (_PROBABILITIES, *more)
        requests = []
        for first in range(0, len(self.texts), rows):
            texts = [text.encode("utf-8", "replace") for text in self.texts[first : first + rows]]
            values = np.array(texts, object)
            tensor = Tensor(name, DType.BYTES, values.reshape(-1, 1) if spec.max_batch_size else values)
            requests.append(Request(model=spec.name, id=self.id, inputs={name: tensor}, outputs=outputs))
        return requests

    def classes(self, spec: ModelSpec, requests: Sequence[Request], responses: Sequence[Response]) -> Classes:
        """Return the classes. `responses` belong to `requests`, and have no error. Raises ServingFault for none."""
        found: list[list[float]] = []
        tokens = 0
        labels: Sequence[str] = _tensors(spec)[1].labels
        for request, response in zip(requests, responses, strict=True):
            outputs = {tensor.name: tensor.array for tensor in response.outputs}
            count = next(iter(request.inputs.values())).array.size
            values = outputs.get(_PROBABILITIES)
            if values is None or not values.size or values.size % count or not np.isfinite(values).all():
                raise ServingFault(f"model '{self.model}' gave no numbers for each text in output '{_PROBABILITIES}'")
            found += values.reshape(count, -1).tolist()
            tokens += int(outputs[_TOKEN_COUNT].sum()) if _TOKEN_COUNT in outputs else 0
            if _LABELS in outputs:
                # Each text has the same.
                row = outputs[_LABELS].reshape(count, -1)[0].tolist()
                labels = [item.decode("utf-8", "replace") for item in row if isinstance(item, bytes)]
        return Classes(found, labels, tokens)


def _tensors(spec: ModelSpec) -> tuple[str, OutputSpec]:
    """Return the name of the input for a text, and the output. Raises BadMember."""
    inputs = [item for item in spec.inputs if not item.is_optional]
    output = spec.output(_PROBABILITIES)
    if (
        not spec.is_decoupled
        and len(inputs) == 1
        and inputs[0].dtype is DType.BYTES
        and tuple(inputs[0].dims) in ((1,), (-1,))
        and output is not None
        and output.dtype is DType.FP32
        and len(output.dims) == 1
    ):
        return inputs[0].name, output
    raise BadMember(
        "model",
        f"model '{spec.name}' does not classify texts: it needs one input that is not optional, a STRING [1], and the "
        f"output '{_PROBABILITIES}' FP32 [n]",
    )


def read_classification_request(body: Buffer) -> ClassificationRequest:
    """Return the call of a body. Raises InvalidRequest."""
    members = parse_object(body)
    model = read_model(members)
    check_names(members, _SUPPORTED)
    given = members.get("input")
    texts: list[object] = given if isinstance(given, list) else [given]
    if not 1 <= len(texts) <= _MAX_TEXTS:
        raise BadMember("input", f"'input': expected a text or a list of 1 to {_MAX_TEXTS} texts, got {len(texts)}")
    for text in texts:
        if not isinstance(text, str):
            raise BadMember("input", f"'input': expected a text or a list of texts, got {json_type(text)}")
    return ClassificationRequest(model=model, texts=tuple(map(str, texts)), keep_alive_s=read_keep_alive(members))


def classification_response(call: ClassificationRequest, classes: Classes) -> dict[str, object]:
    """Return the answer: the class with the highest probability of each text, and all probabilities."""
    data = []
    for index, row in enumerate(classes.rows):
        best = max(range(len(row)), key=row.__getitem__)
        label = classes.labels[best] if best < len(classes.labels) else f"LABEL_{best}"
        data.append({"index": index, "label": label, "probs": row, "num_classes": len(row)})
    usage = {"prompt_tokens": classes.tokens, "total_tokens": classes.tokens, "completion_tokens": 0}
    answer = {"id": call.id, "object": "list", "created": call.created, "model": call.model, "data": data}
    return {**answer, "usage": usage, **({"warnings": call.warnings} if call.warnings else {})}
