"""Forms of OpenAI's API for audio, the requests that they become, and the WAV files in them."""

from __future__ import annotations

from collections.abc import Iterable

from input_reader import InputReader
from stubs import result_of

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.plugins.speech.audio_file import MIN_SECONDS, SAMPLE_RATE, decode_audio
from edge_server.plugins.speech.transcription_request import read_transcription_request

_MODEL = ModelSpec(
    "m",
    "whisper",
    "",
    0,
    tuple(
        InputSpec(name, kind, (1,))
        for name, kind in (
            ("audio", DType.BYTES),
            ("task", DType.BYTES),
            ("language", DType.BYTES),
            ("prompt", DType.BYTES),
            ("temperature", DType.FP32),
            ("timestamps", DType.BOOL),
            ("word_timestamps", DType.BOOL),
            ("stream", DType.BOOL),
        )
    ),
    (OutputSpec("text_output", DType.BYTES, (-1,)),),
    (),
)
_FIELDS = (
    b"file", b"model", b"language", b"prompt", b"response_format", b"temperature", b"stream",
    b"timestamp_granularities[]", b"chunking_strategy", b"other",
)  # fmt: skip
_VALUES = (
    b"m",
    b"json",
    b"text",
    b"srt",
    b"vtt",
    b"verbose_json",
    b"segment",
    b"word",
    b"true",
    b"false",
    b"0.5",
    b"en",
)
_MAX_S = 10.0


def seeds() -> Iterable[bytes]:
    wav = _wav(bytes(3200), rate=16_000)
    kind = b"multipart/form-data; boundary=abc"
    form = _form((b"file", wav[:80]), (b"model", b"m"), (b"response_format", b"srt"))
    yield b"\0" + bytes((len(kind),)) + kind + form
    fields = ((0, b"sound"), (1, 0), (4, 5), (7, 6), (5, 10))
    yield b"\1\0" + b"".join(
        bytes((name,)) + (bytes((value,)) if isinstance(value, int) else bytes((200 + len(value),)) + value)
        for name, value in fields
    )
    yield b"\2" + wav[:600]
    yield b"\2" + _wav(bytes(300), rate=8000, channels=3, width=3)
    yield b"\2" + _wav(bytes(900), rate=1000, width=1)
    yield b"\2" + _wav(bytes(400), rate=384_000, width=4)


def _form(*parts: tuple[bytes, bytes]) -> bytes:
    lines = b"".join(
        b'--abc\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name, content) for name, content in parts
    )
    return lines + b"--abc--\r\n"


def _wav(samples: bytes, *, rate: int, channels: int = 1, width: int = 2) -> bytes:
    numbers = ((1, 2), (channels, 2), (rate, 4), (rate * channels * width, 4), (channels * width, 2), (8 * width, 2))
    head = b"".join(number.to_bytes(size, "little") for number, size in numbers)
    chunks = b"".join(
        name + len(content).to_bytes(4, "little") + content for name, content in ((b"fmt ", head), (b"data", samples))
    )
    return b"RIFF" + (4 + len(chunks)).to_bytes(4, "little") + b"WAVE" + chunks


def check(data: bytes) -> None:
    """The first byte is the kind of input: 0 a content type and a form, 1 the fields of a form, 2 an audio file."""
    take = InputReader(data)
    kind = take.byte() % 3
    if kind == 2:
        samples = result_of(lambda: decode_audio(take.rest(), _MAX_S))
        if samples is not None:
            assert MIN_SECONDS * SAMPLE_RATE <= samples.size <= _MAX_S * SAMPLE_RATE
            assert -1 <= samples.min() <= samples.max() <= 1
    elif kind == 0:
        content_type = take.take(take.byte()).decode("utf-8", "surrogateescape")
        _check_form(take.rest(), content_type, is_translation=False)
    else:
        is_translation = bool(take.byte() & 1)
        parts = []
        while take.left and len(parts) < 12:
            name, value = take.choice(_FIELDS), take.byte()
            parts.append((name, _VALUES[value % len(_VALUES)] if value < 200 else take.take(value - 200)))
        _check_form(_form(*parts), "multipart/form-data; boundary=abc", is_translation=is_translation)


def _check_form(body: bytes, content_type: str, *, is_translation: bool) -> None:
    task = "translate" if is_translation else "transcribe"
    call = result_of(lambda: read_transcription_request(body, content_type, task))
    if call is None:
        return
    assert call.audio
    assert call.model
    assert 0 <= call.temperature <= 1
    assert not (call.is_stream and call.granularities)
    request = call.inference_request(_MODEL)
    assert request.inputs["audio"].array[0] == call.audio
    assert request.inputs["task"].array[0] == task.encode()
