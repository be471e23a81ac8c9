"""OpenAI's API for audio over a stub model: forms, formats of answers, streams and errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.status_reports import IndexEntry
from edge_server.core.tensor import DType, Tensor
from edge_server.plugins.language.openai.completion_request import BadMember
from edge_server.plugins.speech.transcription_request import read_transcription_request

INPUTS = (
    InputSpec("audio", DType.BYTES, (1,)),
    *(InputSpec(name, DType.BYTES, (1,), is_optional=True) for name in ("language", "task", "prompt")),
    InputSpec("temperature", DType.FP32, (1,), is_optional=True),
    *(InputSpec(name, DType.BOOL, (1,), is_optional=True) for name in ("timestamps", "word_timestamps", "stream")),
)
OUTPUTS = (OutputSpec("text_output", DType.BYTES, (1,)),)
SPEC = ModelSpec("ear", "stub", "", inputs=INPUTS, outputs=OUTPUTS, instance_groups=(), max_batch_size=0,
                 is_decoupled=True)  # fmt: skip
BOUNDARY = "b0undary"
HEADERS = {"Host": "localhost", "Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


def form(*fields: tuple[str, str], file: bytes | None = b"sound") -> bytes:
    parts = [("file", file)] if file is not None else []
    parts += [(name, value.encode()) for name, value in fields]
    return (
        b"".join(
            f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + value + b"\r\n"
            for name, value in parts
        )
        + f"--{BOUNDARY}--\r\n".encode()
    )


def outputs(texts: list[str], **more: Any) -> tuple[Tensor, ...]:
    found = [Tensor("text_output", DType.BYTES, np.array([text.encode() for text in texts], object))]
    kinds = {"language": DType.BYTES, "duration": DType.FP32, "segment_texts": DType.BYTES, "segment_times": DType.FP32,
             "word_texts": DType.BYTES, "word_times": DType.FP32}  # fmt: skip
    found += [Tensor(name, kinds[name], np.array(value, object if kinds[name] is DType.BYTES else np.float32))
              for name, value in more.items()]  # fmt: skip
    return tuple(found)


def compute(request: Request) -> list[Response]:
    given = {name: tensor.array[0] for name, tensor in request.inputs.items()}
    end: dict[str, Any] = {"language": [b"en"], "duration": [3723.5]}
    if given["timestamps"]:
        end.update(segment_texts=[b"Hello --> you,", b"there."], segment_times=[[0, 1.25], [3722.0625, 3723.5]])
    if given["word_timestamps"]:
        end.update(word_texts=[b"Hello", b"there."], word_times=[[0, 0.5], [3722.0625, 3723.5]])
    if not given["stream"]:
        text = " ".join(str(given[name], "utf-8") for name in ("task", "language", "prompt", "audio"))
        return [Response(request.model, 1, request.id, outputs=outputs([f"{text} {given['temperature']:g}"], **end))]
    parts = [Response(request.model, 1, request.id, outputs=outputs([text]), is_final=False) for text in (" Hel", "lo")]
    return [*parts, Response(request.model, 1, request.id, outputs=outputs([""], **end))]


@pytest.fixture
def ear(site: Any) -> Any:
    site.service.models["ear"] = (SPEC, compute)
    return site


def ask(site: Any, *fields: tuple[str, str], path: str = "/v1/audio/transcriptions", model: str = "ear") -> Any:
    return site.post(path, form(("model", model), *fields), HEADERS)


def test_json_has_the_text_and_the_seconds_of_sound(ear: Any) -> None:
    for path in ("/v1/audio/transcriptions", "/v3/audio/transcriptions"):
        reply = ask(ear, ("language", "de"), ("prompt", "names"), ("temperature", "0.5"), path=path)
        assert reply.headers["Content-Type"] == "application/json"
        assert reply.json == {
            "text": "transcribe de names sound 0.5",
            "usage": {"type": "duration", "seconds": 3723.5},
        }


def test_a_translation_asks_the_model_for_it(ear: Any) -> None:
    assert ask(ear, path="/v1/audio/translations").json["text"].startswith("translate ")


def test_text_is_plain(ear: Any) -> None:
    reply = ask(ear, ("response_format", "text"))
    assert reply.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert reply.body == b"transcribe   sound 0\n"


def test_subtitles_have_times_and_no_text_that_looks_like_one(ear: Any) -> None:
    assert ask(ear, ("response_format", "srt")).body.decode() == (
        "1\n00:00:00,000 --> 00:00:01,250\nHello -> you,\n\n2\n01:02:02,062 --> 01:02:03,500\nthere.\n\n"
    )
    assert ask(ear, ("response_format", "vtt")).body.decode() == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.250\nHello -> you,\n\n01:02:02.062 --> 01:02:03.500\nthere.\n\n"
    )


def test_verbose_json_has_segments(ear: Any) -> None:
    reply = ask(ear, ("response_format", "verbose_json"), ("timestamp_granularities[]", "segment")).json
    assert {name: reply[name] for name in ("task", "language", "duration")} == {
        "task": "transcribe", "language": "en", "duration": 3723.5,
    }  # fmt: skip
    assert reply["segments"][0] == {"id": 0, "start": 0.0, "end": 1.25, "text": "Hello --> you,"}


def test_words_have_times_where_they_are_asked_for(ear: Any) -> None:
    words = [{"word": "Hello", "start": 0.0, "end": 0.5}, {"word": "there.", "start": 3722.062, "end": 3723.5}]
    wanted = ("response_format", "verbose_json"), ("timestamp_granularities[]", "word")
    reply = ask(ear, *wanted).json
    assert reply["words"] == words
    assert "segments" not in reply
    reply = ask(ear, *wanted, ("timestamp_granularities[]", "segment")).json
    assert reply["words"] == words
    assert len(reply["segments"]) == 2


def test_a_model_without_times_of_words_is_named(ear: Any) -> None:
    inputs = tuple(item for item in INPUTS if item.name != "word_timestamps")
    ear.service.models["ear"] = (dataclasses.replace(SPEC, inputs=inputs), compute)
    reply = ask(ear, ("response_format", "verbose_json"), ("timestamp_granularities[]", "word"))
    assert (reply.status, reply.json["error"]["message"]) == (400, "model 'ear' gives words no times")


def test_a_stream_has_the_text_in_pieces_and_then_whole(ear: Any) -> None:
    reply = ask(ear, ("stream", "true"))
    assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert reply.body.decode().split("\n\n") == [
        'data: {"type":"transcript.text.delta","delta":"Hel"}',
        'data: {"type":"transcript.text.delta","delta":"lo"}',
        'data: {"type":"transcript.text.done","text":"Hello"}',
        "",
    ]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ([("response_format", "xml")], "response_format", "expected json, text, srt, vtt, verbose_json, got 'xml'"),
        ([("temperature", "2")], "temperature", "expected a number from 0 to 1, got '2'"),
        ([("temperature", "nan")], "temperature", "expected a number from 0 to 1, got 'nan'"),
        ([("stream", "true"), ("response_format", "srt")], "stream", "expected response_format json or text, got srt"),
        ([("stream", "maybe")], "stream", "expected true, false, got 'maybe'"),
        ([("include[]", "logprobs")], "include[]", "'include[]' is not supported; supported are file, model,"),
        ([("prompt", "a"), ("prompt", "b")], "prompt", "expected once, got twice"),
        ([("prompt", "a" * 8193)], "prompt", "expected at most 8192 bytes, got 8193"),
        (
            [("timestamp_granularities[]", "segment")],
            "timestamp_granularities",
            "response_format verbose_json, got json",
        ),
        (
            [("timestamp_granularities[]", "letter"), ("response_format", "verbose_json")],
            "timestamp_granularities",
            "expected segment, word, got 'letter'",
        ),
    ],
)
def test_a_wrong_field_is_named(ear: Any, fields: list[tuple[str, str]], param: str, message: str) -> None:
    reply = ask(ear, *fields)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert message in reply.json["error"]["message"]


def test_fields_of_transcriptions_are_none_of_translations(ear: Any) -> None:
    reply = ask(ear, ("language", "de"), path="/v1/audio/translations")
    assert reply.status == 400
    assert reply.json["error"]["message"].startswith("'language' is not supported")


def test_a_form_needs_a_file_and_a_model_and_a_body_needs_to_be_a_form(ear: Any) -> None:
    path = "/v1/audio/transcriptions"
    for body, message in (
        (form(("model", "ear"), file=None), "'file': expected an audio file, got none"),
        (form(("model", "ear"), file=b""), "'file': expected an audio file, got an empty one"),
        (form(), "'model': expected the name of a model, got none"),
    ):
        reply = ear.post(path, body, HEADERS)
        assert (reply.status, reply.json["error"]["message"]) == (400, message)
    reply = ear.post(path, {"model": "ear"}, {"Host": "localhost", "Content-Type": "application/json"})
    assert reply.status == 400
    assert "expected multipart/form-data with a file and a model, got 'application/json'" in reply.body.decode()


def test_an_unknown_model_is_named_before_wrong_fields_with_the_models_that_serve(ear: Any) -> None:
    ear.service.repository_index = lambda: [IndexEntry("ear", "1", "READY")]
    path = "/v1/audio/transcriptions"
    wrong = (("temperature", "2"), ("response_format", "xml"), ("include[]", "logprobs"))
    bodies = [form(("model", "nobody"), *fields) for fields in ((), *((field,) for field in wrong), wrong)]
    for body in (*bodies, form(("model", "nobody"), file=None)):
        reply = ear.post(path, body, HEADERS)
        assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")
        assert reply.json["error"]["message"].endswith("; models that serve here: ear")


def test_another_model_and_an_unknown_one_are_refused(ear: Any) -> None:
    assert ask(ear, model="nobody").status == 404
    reply = ask(ear, model="add")
    assert reply.status == 400
    assert "model 'add' takes no speech: it needs the inputs 'audio' and 'task'" in reply.json["error"]["message"]


def test_a_field_that_is_no_text_is_refused() -> None:
    body = form(("model", "ear")).replace(b"ear", b"\xff\xfe")
    with pytest.raises(BadMember, match="'model': expected UTF-8"):
        read_transcription_request(body, HEADERS["Content-Type"], "transcribe")
