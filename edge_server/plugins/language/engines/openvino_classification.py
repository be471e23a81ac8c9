"""Backend `openvino_classification`: gives texts the probabilities of classes with models for sequence classification
in OpenVINO's format, on the CPU.

It serves the same files as `openvino_embeddings`. The probabilities are the softmax of the logits; with one logit, or
where config.json says `multi_label_classification`, the sigmoid of each. The labels are `id2label` of config.json.

A text of more tokens than the model's context is refused. Checked against openvino-genai 2026.4.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_server.backends.base import Backend, Execution, ModelSignature, OpenJob, RequestSession, SessionInfo
from edge_server.backends.isolation.isolated_session import IsolatedSession
from edge_server.backends.openvino.lean_import import import_openvino
from edge_server.backends.runtime_errors import file_title, import_runtime, message_line, open_with_library
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, ContextTooLong, EdgeServerError, LoadError
from edge_server.plugins.language.engines.model_size import read_export
from edge_server.plugins.language.engines.openvino_embeddings import (
    OpenVinoEmbeddingsBackend,
    decode_texts,
    export_folder,
)

_INPUTS = frozenset(("input_ids", "attention_mask", "token_type_ids"))
_MAX_LABELS = 10_000


def make(name: str) -> Backend:
    return OpenVinoClassificationBackend(name)


class OpenVinoClassificationBackend(OpenVinoEmbeddingsBackend):
    """Opens models in child processes."""

    signature = ModelSignature(
        inputs=(InputSpec("text_input", DType.BYTES, (-1, 1)),),
        outputs=(
            OutputSpec("probs", DType.FP32, (-1, -1)),
            OutputSpec("labels", DType.BYTES, (-1, -1)),
            OutputSpec("num_input_tokens", DType.UINT32, (-1, 1)),
        ),
        is_batchable=True,
    )

    def open(self, job: OpenJob) -> RequestSession:
        return IsolatedSession(job, open_classifier)


def open_classifier(job: OpenJob) -> RequestSession:
    """Open a model in this process. Raises LoadError. For the child process."""
    return open_with_library(job.file, job.spec.backend, lambda: ClassificationSession(job))


class ClassificationSession(RequestSession):
    """One compiled model with its tokenizer. It computes the texts of a batch together."""

    def __init__(self, job: OpenJob) -> None:
        """Raises LoadError, BackendMissing, and whatever the library raises for a file that it cannot load."""
        self._model = job.spec.name
        folder = export_folder(job.file)
        self._most_tokens = read_export(folder).context
        openvino = import_openvino()
        library = import_runtime("openvino_genai", "Tokenizer", "llm")
        self._tokenizer: Any = library.Tokenizer(str(folder))
        self._compiled: Any = openvino.Core().compile_model(str(folder / "openvino_model.xml"), "CPU")
        self._inputs = {item.get_any_name() for item in self._compiled.inputs}
        shape = self._compiled.outputs[0].get_partial_shape()
        classes = shape[1] if shape.rank.is_static and len(shape) == 2 else None
        if len(self._compiled.outputs) != 1 or classes is None or not classes.is_static or not self._inputs <= _INPUTS:
            raise LoadError(
                f"{file_title(job.file)}: expected a model for sequence classification, with one output of logits of "
                f"shape (texts, classes); it has {shape} and the inputs {', '.join(sorted(self._inputs))}"
            )
        self._labels, self._is_multiple = _read_labels(folder, classes.get_length())
        version = library.get_version().split("-")[0]
        self.info = SessionInfo(f"openvino_genai {version}", "CPU", "as the model says", {}, is_bound=False)

    def execute(self, executions: Sequence[Execution]) -> None:
        accepted: list[tuple[Execution, int]] = []
        texts: list[str] = []
        for execution in executions:
            try:
                own = decode_texts(execution, self._model, "text_input")
                self._encode(own)
            except EdgeServerError as error:
                execution.fail(error.detached())
                continue
            accepted.append((execution, len(own)))
            texts += own
        if not accepted:
            return
        inputs = self._encode(texts)
        counts = inputs["attention_mask"].sum(axis=1).astype(np.uint32).reshape(-1, 1)
        probabilities = self._compute(inputs)
        labels = np.array([self._labels] * len(texts), object)
        first = 0
        for execution, count in accepted:
            rows = slice(first, first + count)
            first += count
            outputs = {"probs": probabilities[rows], "labels": labels[rows], "num_input_tokens": counts[rows]}
            execution.send(outputs, is_final=True)

    def close(self) -> None:
        self._compiled = self._tokenizer = None

    def _encode(self, texts: list[str]) -> dict[str, Any]:
        """Return the tokens of texts, filled up to the longest. Raises ContextTooLong."""
        try:
            found = self._tokenizer.encode(texts)
            tokens, mask = (np.array(item.data, np.int64) for item in (found.input_ids, found.attention_mask))
        except (RuntimeError, TypeError, ValueError) as error:
            said = message_line(error)
        else:
            most = int(mask.sum(axis=1).max())
            if self._most_tokens and most > self._most_tokens:
                raise ContextTooLong(
                    f"inference request to model '{self._model}': expected a text of at most {self._most_tokens} "
                    f"tokens, got {most}"
                )
            return {"input_ids": tokens, "attention_mask": mask, "token_type_ids": np.zeros_like(tokens)}
        raise BackendError(f"model '{self._model}': OpenVINO GenAI cannot split the text into tokens: {said}")

    def _compute(self, inputs: dict[str, Any]) -> Any:
        """Return the probabilities, of shape (texts, classes), in FP32. Raises BackendError."""
        try:
            found = self._compiled({name: inputs[name] for name in self._inputs})[0]
        except (RuntimeError, TypeError, ValueError) as error:
            said = message_line(error)
        else:
            logits = np.array(found, np.float64)
            if self._is_multiple:
                return (1 / (1 + np.exp(-logits))).astype(np.float32)
            powers = np.exp(logits - logits.max(axis=1, keepdims=True))
            return (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
        raise BackendError(f"model '{self._model}': OpenVINO cannot classify the texts: {said}")


def _read_labels(folder: Path, count: int) -> tuple[list[bytes], bool]:
    """Return a label for each class, and whether the classes do not exclude each other."""
    if not 1 <= count <= _MAX_LABELS:
        raise LoadError(f"{folder.name}: expected 1 to {_MAX_LABELS:,} classes, got {count:,}")
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        config = {}
    config = config if isinstance(config, dict) else {}
    stated = config.get("id2label")
    names = stated if isinstance(stated, dict) else {}
    labels = [str(names.get(str(index), f"LABEL_{index}")).encode("utf-8", "replace") for index in range(count)]
    return labels, count == 1 or config.get("problem_type") == "multi_label_classification"
