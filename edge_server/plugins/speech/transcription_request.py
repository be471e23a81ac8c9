"""Parser of the multipart forms of OpenAI's API for transcription and translation: checks the fields, and makes the
inference request.

The format is https://platform.openai.com/docs/api-reference/audio. A field that is not supported and might change the
answer is an error that names it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest
from edge_server.frontends.http.body_reader import Body
from edge_server.frontends.http.multipart_form import FORM_TYPE, form_parts
from edge_server.plugins.language.openai.completion_request import BadMember, read_model

Task = Literal["transcribe", "translate"]
ResponseFormat = Literal["json", "text", "srt", "vtt", "verbose_json"]

Granularity = Literal["segment", "word"]

_GRANULARITIES = "timestamp_granularities[]"
_FIELDS = ("file", "model", "prompt", "response_format", "temperature")
_OF_TRANSCRIPTIONS = ("language", _GRANULARITIES, "stream")
_NO_EFFECT = ("chunking_strategy", "user")
"""Fields that are ignored: the model splits long audio itself."""
_MAX_FIELD_BYTES = 8192


@dataclass(frozen=True, slots=True)
class TranscriptionRequest:
    """One call. `audio` is the file. Texts that the client does not state are ""."""

    model: str
    task: Task
    audio: bytes
    language: str = ""
    prompt: str = ""
    response_format: ResponseFormat = "json"
    granularities: frozenset[Granularity] = frozenset()
    """What has times in the answer."""
    temperature: float = 0.0
    is_stream: bool = False

    def inference_request(self, spec: ModelSpec) -> Request:
        """Return the request to the model. Raises BadMember if the model cannot take it."""
        if not takes_speech(spec):
            raise BadMember(
                "model",
                f"model '{spec.name}' takes no speech: it needs the inputs 'audio' and 'task', and an output "
                "'text_output'",
            )
        inputs = {item.name for item in spec.inputs}
        values: dict[str, tuple[DType, Any]] = {
            "audio": (DType.BYTES, np.array([self.audio], object)),
            "task": (DType.BYTES, np.array([self.task.encode()], object)),
            "language": (DType.BYTES, np.array([self.language.encode()], object)),
            "prompt": (DType.BYTES, np.array([self.prompt.encode()], object)),
            "temperature": (DType.FP32, np.array([self.temperature], np.float32)),
            "timestamps": (DType.BOOL, np.array(["segment" in self.granularities])),
            "word_timestamps": (DType.BOOL, np.array(["word" in self.granularities])),
            "stream": (DType.BOOL, np.array([self.is_stream])),
        }
        if "word" in self.granularities and "word_timestamps" not in inputs:
            raise BadMember("timestamp_granularities", f"model '{spec.name}' gives words no times")
        tensors = {name: Tensor(name, kind, array) for name, (kind, array) in values.items() if name in inputs}
        return Request(model=spec.name, id=f"audio-{uuid.uuid4().hex}", inputs=tensors)


def takes_speech(spec: ModelSpec) -> bool:
    """Return whether a model turns speech into text."""
    return {"audio", "task"} <= {item.name for item in spec.inputs} and spec.output("text_output") is not None


def read_form_model(body: Body, content_type: str) -> str:
    """Return the name of the model in a form that may be wrong in other fields. Raises InvalidRequest."""
    names = [_text(name, content) for name, content in form_parts(body, content_type) if name == "model"]
    return read_model({"model": names[0] if names else None})


def read_transcription_request(body: Body, content_type: str, task: Task) -> TranscriptionRequest:
    """Return the call of a form. Raises InvalidRequest."""
    if not content_type.lower().startswith(FORM_TYPE):
        raise InvalidRequest(f"Content-Type: expected {FORM_TYPE} with a file and a model, got '{content_type[:80]}'")
    known = (*_FIELDS, *(_OF_TRANSCRIPTIONS if task == "transcribe" else ()))
    fields: dict[str, memoryview] = {}
    granularities: list[str] = []
    for name, content in form_parts(body, content_type):
        if name in (_GRANULARITIES, "timestamp_granularities") and task == "transcribe":
            granularities.append(_text(name, content))
        elif name in known:
            if name in fields:
                raise BadMember(name, f"'{name}': expected once, got twice")
            fields[name] = content
        elif name not in _NO_EFFECT:
            raise BadMember(name[:80], f"'{name[:80]}' is not supported; supported are {', '.join(known)}")
    texts = {name: _text(name, content) for name, content in fields.items() if name != "file"}
    if not fields.get("file"):
        raise BadMember(
            "file", "'file': expected an audio file, got " + ("an empty one" if "file" in fields else "none")
        )
    if not texts.get("model"):
        raise BadMember("model", "'model': expected the name of a model, got none")
    try:
        temperature = float(texts.get("temperature") or 0)
    except ValueError:
        temperature = -1.0
    if not 0 <= temperature <= 1:
        raise BadMember(
            "temperature", f"'temperature': expected a number from 0 to 1, got '{texts['temperature'][:40]}'"
        )
    response_format = _choice(texts, "response_format", get_args(ResponseFormat), "json")
    is_stream = _choice(texts, "stream", ("true", "false"), "false") == "true"
    if is_stream and response_format not in ("json", "text"):
        raise BadMember("stream", f"'stream': expected response_format json or text, got {response_format}")
    _check_granularities(granularities, response_format)
    if not granularities and response_format in ("srt", "vtt", "verbose_json"):
        granularities = ["segment"]
    return TranscriptionRequest(
        model=texts["model"],
        task=task,
        audio=bytes(fields["file"]),
        language=texts.get("language", ""),
        prompt=texts.get("prompt", ""),
        response_format=cast("ResponseFormat", response_format),
        granularities=cast("frozenset[Granularity]", frozenset(granularities)),
        temperature=temperature,
        is_stream=is_stream,
    )


def _check_granularities(granularities: Sequence[str], response_format: str) -> None:
    for granularity in granularities:
        if granularity not in get_args(Granularity):
            raise BadMember(
                "timestamp_granularities",
                f"'timestamp_granularities': expected segment, word, got '{granularity[:40]}'",
            )
    if granularities and response_format != "verbose_json":
        raise BadMember(
            "timestamp_granularities",
            f"'timestamp_granularities': expected response_format verbose_json, got {response_format}",
        )


def _text(name: str, content: memoryview) -> str:
    if len(content) > _MAX_FIELD_BYTES:
        raise BadMember(name, f"'{name}': expected at most {_MAX_FIELD_BYTES} bytes, got {len(content)}")
    try:
        return str(content, "utf-8").strip()
    except UnicodeDecodeError:
        raise BadMember(name, f"'{name}': expected UTF-8") from None


def _choice(texts: Mapping[str, str], name: str, choices: Sequence[str], default: str) -> str:
    value = texts.get(name, "").lower() or default
    if value not in choices:
        raise BadMember(name, f"'{name}': expected {', '.join(choices)}, got '{value[:40]}'")
    return value
