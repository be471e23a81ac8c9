"""OpenAI's API for text to speech over a stub model: bodies, formats of audio, streams and errors."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import wave
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.status_reports import IndexEntry
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BackendError, InvalidRequest
from edge_server.plugins.speech.audio_file import decode_audio
from edge_server.plugins.speech.synthesis.audio_encoder import FORMATS, check_encodable, make_encoder

SPEC = ModelSpec(
    "mouth",
    "stub",
    "",
    inputs=(
        InputSpec("text", DType.BYTES, (1,)),
        InputSpec("voice", DType.BYTES, (1,), is_optional=True),
        InputSpec("speed", DType.FP32, (1,), is_optional=True),
    ),
    outputs=(OutputSpec("audio", DType.FP32, (-1,)), OutputSpec("sample_rate", DType.INT32, (1,))),
    instance_groups=(),
    max_batch_size=0,
    is_decoupled=True,
    parameters={"voices": "ann, echo", "languages": "en-US"},
)
HEADERS = {"Host": "localhost", "Content-Type": "application/json"}
asked: list[dict[str, Any]] = []


def part(value: float, rate: int = 8_000) -> tuple[Tensor, ...]:
    samples = np.full(80, value, np.float32)
    return Tensor("audio", DType.FP32, samples), Tensor("sample_rate", DType.INT32, np.array([rate], np.int32))


def compute(request: Request) -> list[Response]:
    """Return 10 ms of sound for each word of the text; a word `fail` is an error, `mute` nothing."""
    asked.append({name: tensor.array[0] for name, tensor in request.inputs.items()})
    words = asked[-1]["text"].decode().split()
    found = []
    for number, word in enumerate(words, 1):
        is_final = number == len(words)
        if word == "fail":
            found.append(Response(request.model, 1, request.id, error=BackendError("the voice broke")))
            break
        outputs = () if word == "mute" else part(number / 4, 0 if word == "rateless" else 8_000)
        found.append(Response(request.model, 1, request.id, outputs=outputs, is_final=is_final))
    return found


@pytest.fixture
def mouth(site: Any) -> Any:
    site.service.models["mouth"] = (SPEC, compute)
    asked.clear()
    return site


def ask(site: Any, path: str = "/v1/audio/speech", **members: Any) -> Any:
    return site.post(path, {"model": "mouth", "input": "one", "response_format": "wav", **members}, HEADERS)


def read_wav(data: bytes) -> tuple[int, list[float]]:
    with wave.open(io.BytesIO(data)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        return file.getframerate(), (samples[::80] / 32767).round(2).tolist()


def test_a_short_text_is_answered_whole_and_a_long_one_as_a_stream(mouth: Any) -> None:
    for path in ("/v1/audio/speech", "/v3/audio/speech"):
        reply = ask(mouth, path)
        assert (reply.status, reply.headers["Content-Type"]) == (200, "audio/wav")
        assert reply.headers["Content-Length"] == str(44 + 160)
        assert read_wav(reply.body) == (8_000, [0.25])
        reply = ask(mouth, path, input="one two three mute")
        assert "Content-Length" not in reply.headers
        assert read_wav(reply.body) == (8_000, [0.25, 0.5, 0.75])
        # The length is unknown when the header is sent.
        assert reply.body[40:44] == b"\xff\xff\xff\xff"


def test_the_model_gets_the_text_the_voice_and_the_speed(mouth: Any) -> None:
    ask(mouth, voice="ann", speed=1.5)
    ask(mouth, voice={"id": "ann"})
    # A name of OpenAI's is the default voice, but where the model has it.
    ask(mouth, voice="alloy")
    ask(mouth, voice="echo")
    ask(mouth, voice="bob")
    assert [item["voice"] for item in asked] == [b"ann", b"ann", b"", b"echo", b"bob"]
    assert [float(item["speed"]) for item in asked] == [1.5, 1, 1, 1, 1]


def test_pcm_has_24000_samples_a_second_and_loud_samples_are_clipped(mouth: Any) -> None:
    reply = ask(mouth, response_format="pcm", input="a b c d e f")
    assert reply.headers["Content-Type"] == "audio/pcm"
    samples = np.frombuffer(reply.body, "<i2")
    assert samples.size == 6 * 80 * 3
    assert samples.max() == 32767


def test_events_have_the_audio_and_then_the_end(mouth: Any) -> None:
    reply = ask(mouth, stream_format="sse", input="one two")
    assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    events = [json.loads(line[6:]) for line in reply.body.decode().split("\n\n") if line]
    assert [event["type"] for event in events] == ["speech.audio.delta", "speech.audio.delta", "speech.audio.done"]
    assert read_wav(b"".join(base64.b64decode(event["audio"]) for event in events[:2])) == (8_000, [0.25, 0.5])
    events = ask(mouth, stream_format="sse", input="one fail").body.decode().split("\n\n")
    assert json.loads(events[1][6:])["error"]["message"] == "the voice broke"


def test_an_error_before_the_audio_is_an_answer_and_a_later_one_cuts_it(mouth: Any) -> None:
    reply = ask(mouth, input="fail")
    assert (reply.status, reply.json["error"]["message"]) == (500, "the voice broke")
    for text, message in (("mute", "ended without audio"), ("rateless", "expected a sample_rate above 0")):
        assert message in ask(mouth, input=text).json["error"]["message"]
    with pytest.raises(Exception, match=r"(?i)incomplete|closed|reset|connection|end"):
        ask(mouth, input="one fail")


@pytest.mark.parametrize(
    ("members", "param", "message"),
    [
        ({"input": ""}, "input", "'input': expected a text to speak, got none"),
        ({"input": [1]}, "input", "'input': expected a text, got '[1]'"),
        ({"model": None}, "model", "'model': expected the name of a model"),
        ({"model": "add"}, "model", "model 'add' gives no speech: it needs an input 'text'"),
        ({"voice": {"id": 3}}, "voice", "'voice': expected a text, got '3'"),
        ({"speed": "fast"}, "speed", "'speed': expected a number, got 'fast'"),
        ({"response_format": "au"}, "response_format", "expected wav, pcm, mp3, opus, aac, flac, got 'au'"),
        ({"stream_format": "ws"}, "stream_format", "expected audio, sse, got 'ws'"),
        ({"instructions": "whisper"}, "instructions", "'instructions' is not supported; supported are input,"),
    ],
)
def test_a_wrong_member_is_named(mouth: Any, members: dict[str, Any], param: str, message: str) -> None:
    reply = ask(mouth, **members)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert message in reply.json["error"]["message"]


def test_an_unknown_model_is_named_before_wrong_members_with_the_models_that_serve(
    mouth: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    mouth.service.repository_index = lambda: [IndexEntry("mouth", "1", "READY")]
    for members in ({}, {"speed": "fast"}, {"input": ""}, {"response_format": "mp3"}, {"instructions": "whisper"}):
        reply = ask(mouth, model="nobody", **members)
        assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")
        assert reply.json["error"]["message"].endswith("; models that serve here: mouth")


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="needs av, of the extra sources")
def test_each_format_can_be_decoded_and_comes_without_delay() -> None:
    time = np.arange(44_100) / 22_050
    tone = (0.4 * np.sin(2 * np.pi * 440 * time)).astype(np.float32)
    for form in FORMATS:
        if form == "pcm":
            continue
        encoder = make_encoder(form, 22_050)
        parts = [encoder.encode(tone[:22_050], is_last=False), encoder.encode(tone[22_050:], is_last=True)]
        assert 3 * len(parts[0]) > len(parts[1]), form
        heard = decode_audio(b"".join(parts), 10)
        assert heard.size / 16_000 == pytest.approx(2, abs=0.1), form
        assert np.abs(np.fft.rfft(heard[:16_000])).argmax() == 440, form


def test_a_format_of_ffmpeg_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_encodable("wav")
    with pytest.raises(InvalidRequest, match="'response_format': mp3 needs the package av, wav and pcm do not"):
        check_encodable("mp3")
