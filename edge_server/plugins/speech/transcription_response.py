"""Encoder of the answers of OpenAI's API for audio: JSON, text, subtitles (SubRip, WebVTT) and events of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from edge_server.core.request_response import Response
from edge_server.frontends.http.response import JSON_TYPE, HttpResponse
from edge_server.frontends.json_text import to_json
from edge_server.plugins.language.openai.completion_response import event
from edge_server.plugins.speech.transcription_request import TranscriptionRequest

_TEXT_TYPE = "text/plain; charset=utf-8"


class TimedText(NamedTuple):
    """What was said from `start` to `end`, in seconds: a segment or a word."""

    start: float
    end: float
    text: str


@dataclass(slots=True)
class Transcript:
    """What was heard, as the responses arrive. `delta` is the text of the last response, `duration` in seconds."""

    text: str = ""
    delta: str = ""
    language: str = ""
    duration: float = 0.0
    segments: list[TimedText] = field(default_factory=list)
    words: list[TimedText] = field(default_factory=list)

    def add(self, response: Response) -> None:
        """Take a response without an error."""
        outputs: dict[str, Any] = {tensor.name: tensor.array for tensor in response.outputs}
        self.delta = "".join(item.decode("utf-8", "replace") for item in outputs.get("text_output", ()))
        if not self.text:
            self.delta = self.delta.lstrip()
        self.text += self.delta
        for item in outputs.get("language", ()):
            self.language = item.decode("utf-8", "replace")
        for seconds in outputs.get("duration", ()):
            self.duration = round(float(seconds), 3)
        self.segments += _timed_texts(outputs, "segment")
        self.words += _timed_texts(outputs, "word")


def encode_transcript(call: TranscriptionRequest, heard: Transcript) -> HttpResponse:
    """Return the answer in the format that the call states."""
    if call.response_format == "text":
        return _text_response(heard.text + "\n")
    if call.response_format == "srt":
        blocks = [
            f"{number}\n{_clock(one.start, ',')} --> {_clock(one.end, ',')}\n{_line(one.text)}\n\n"
            for number, one in enumerate(heard.segments, 1)
        ]
        return _text_response("".join(blocks))
    if call.response_format == "vtt":
        blocks = [
            f"{_clock(one.start, '.')} --> {_clock(one.end, '.')}\n{_line(one.text)}\n\n" for one in heard.segments
        ]
        return _text_response("WEBVTT\n\n" + "".join(blocks))
    answer: dict[str, object] = {"text": heard.text, "usage": {"type": "duration", "seconds": heard.duration}}
    if call.response_format == "verbose_json":
        answer.update(task=call.task, language=heard.language, duration=heard.duration)
        if "segment" in call.granularities:
            answer["segments"] = [{"id": index, **one._asdict()} for index, one in enumerate(heard.segments)]
        if "word" in call.granularities:
            answer["words"] = [{"word": one.text, "start": one.start, "end": one.end} for one in heard.words]
    return HttpResponse(to_json(answer), headers={"Content-Type": JSON_TYPE})


def delta_event(heard: Transcript) -> bytes:
    """Return the event for the last response, b"" if it has no text."""
    return event({"type": "transcript.text.delta", "delta": heard.delta}) if heard.delta else b""


def done_event(heard: Transcript) -> bytes:
    """Return the last event of a stream. Its `usage` is in tokens in OpenAI's API, which are not counted here."""
    return event({"type": "transcript.text.done", "text": heard.text.strip()})


def _timed_texts(outputs: Mapping[str, Any], kind: str) -> list[TimedText]:
    """Return the texts of the output `KIND_texts` with their times of `KIND_times`; none without these outputs."""
    if not {f"{kind}_texts", f"{kind}_times"} <= outputs.keys():
        return []
    times = outputs[f"{kind}_times"].reshape(-1, 2).tolist()
    texts = [item.decode("utf-8", "replace") for item in outputs[f"{kind}_texts"].ravel()]
    return [TimedText(round(start, 3), round(end, 3), text) for (start, end), text in zip(times, texts, strict=False)]


def _text_response(text: str) -> HttpResponse:
    return HttpResponse(text.encode(), headers={"Content-Type": _TEXT_TYPE})


def _line(text: str) -> str:
    """Return a text that cannot be taken for the end of a subtitle or for a time."""
    return " ".join(text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    """Return hours, minutes, seconds and milliseconds, as 00:01:02,345."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{point}{thousandths:03}"
