"""The port of the Wyoming protocol over stub models: what is announced, recordings, texts, hostile clients, limits."""

from __future__ import annotations

import io
import json
import socket
import threading
import wave
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_server
from edge_server.config import ConfigError
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.status_reports import IndexEntry
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest, ServingFault
from edge_server.plugins.speech.wyoming import port as wyoming_port
from edge_server.plugins.speech.wyoming import speech_to_text, text_to_speech

INPUTS = (
    InputSpec("audio", DType.BYTES, (1,)),
    *(InputSpec(name, DType.BYTES, (1,), is_optional=True) for name in ("language", "task")),
    InputSpec("stream", DType.BOOL, (1,), is_optional=True),
)
EAR = ModelSpec("ear", "stub", "", inputs=INPUTS, outputs=(OutputSpec("text_output", DType.BYTES, (1,)),),
                instance_groups=(), max_batch_size=0, is_decoupled=True, parameters={"languages": "en"})  # fmt: skip
MOUTH = ModelSpec(
    "mouth",
    "stub",
    "",
    inputs=tuple(InputSpec(name, DType.BYTES, (1,)) for name in ("text", "voice")),
    outputs=(OutputSpec("audio", DType.FP32, (-1,)), OutputSpec("sample_rate", DType.INT32, (1,))),
    instance_groups=(),
    max_batch_size=0,
    is_decoupled=True,
)
FORM = {"rate": 16_000, "width": 2, "channels": 1}
SECOND = b"\1\2" * 16_000


def compute(request: Request) -> list[Response]:
    """Answer with the model's name and language, and the length of the audio."""
    with wave.open(io.BytesIO(request.inputs["audio"].array[0])) as file:
        frames = file.getnframes()
    texts = [f" {request.model} {request.inputs['language'].array[0].decode()}", f" {frames}"]
    arrays = [Tensor("text_output", DType.BYTES, np.array([text.encode()], object)) for text in texts]
    end = (Tensor("language", DType.BYTES, np.array([b"de"], object)),)
    parts = [Response(request.model, 1, request.id, outputs=(array,), is_final=False) for array in arrays]
    return [*parts, Response(request.model, 1, request.id, outputs=end)]


def speak(request: Request) -> list[Response]:
    """Answer with the model, the voice and the text, each byte of them as a sample, and an empty end."""
    voice, text = (request.inputs[name].array[0] for name in ("voice", "text"))
    samples = np.frombuffer(b"/".join((request.model.encode(), voice, text)), np.uint8) / np.float32(32767)
    rate = Tensor("sample_rate", DType.INT32, np.array([8_000], np.int32))
    spoken = (Tensor("audio", DType.FP32, samples.astype(np.float32)), rate)
    return [
        Response(request.model, 1, request.id, outputs=spoken, is_final=False),
        Response(request.model, 1, request.id, outputs=()),
    ]


class Client:
    """Sends and reads events on one connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.file = self.socket.makefile("rb")

    def send(self, kind: str, data: dict[str, Any] | None = None, payload: bytes = b"") -> None:
        text = json.dumps(data).encode() if data else b""
        head = {"type": kind, "data_length": len(text), "payload_length": len(payload)}
        self.socket.sendall(json.dumps(head).encode() + b"\n" + text + payload)

    def record(self, *chunks: bytes, **wanted: str) -> None:
        self.send("transcribe", wanted)
        self.send("audio-start", FORM)
        for chunk in chunks:
            self.send("audio-chunk", FORM, chunk)
        self.send("audio-stop")

    def read(self) -> tuple[str, Any]:
        """Return type and data of the next event, ("", None) at the end of the connection."""
        try:
            line = self.file.readline()
        except ConnectionResetError:  # the server did not read all that was sent
            line = b""
        if not line:
            return "", None
        head = json.loads(line)
        data = json.loads(self.file.read(head["data_length"]))
        self.payload = self.file.read(head["payload_length"])
        return head["type"], data

    def read_transcript(self) -> dict[str, Any]:
        while True:
            kind, data = self.read()
            assert kind != "error", data
            if kind == "transcript":
                return data

    def read_spoken(self) -> list[str]:
        """Return what `speak` was asked for, until the end of the audio."""
        assert self.read()[0] == "audio-start"
        found = []
        while self.read()[0] == "audio-chunk":
            found.append(bytes(np.frombuffer(self.payload, "<i2").astype(np.uint8)).decode())
        return found

    def close(self) -> None:
        self.file.close()
        self.socket.close()


class Port:
    def __init__(self, site: Any) -> None:
        self.site = site
        self.needs_key = False

        async def start() -> None:
            self.service = speech_to_text.SpeechToText(site.service)
            mouth = text_to_speech.TextToSpeech(site.service)
            services = [self.service, mouth]
            self.port = wyoming_port.WyomingPort("127.0.0.1:0", services, lambda: self.needs_key)
            await self.port.start()

        site.run(start())
        self.number = int(self.port.address.rpartition(":")[2])
        self.clients: list[Client] = []

    def add(self, name: str, work: Any = compute, spec: ModelSpec = EAR, **parameters: str) -> None:
        models = self.site.service.models
        models[name] = (replace(spec, name=name, parameters={"languages": "en", **parameters}), work)
        index = [IndexEntry(one, "1", "READY") for one in models]
        self.site.service.repository_index = lambda only_ready: index

    def connect(self) -> Client:
        self.clients.append(Client(self.number))
        return self.clients[-1]


@pytest.fixture
def port(site: Any) -> Iterator[Port]:
    opened = Port(site)
    yield opened
    for client in opened.clients:
        client.close()
    site.run(opened.port.stop())
    assert opened.service.held_bytes == 0


def test_info_lists_the_models_that_take_speech_with_their_languages(port: Port) -> None:
    client = port.connect()
    client.send("describe")
    kind, data = client.read()
    assert (kind, data["asr"], data["tts"]) == ("info", [], [])
    port.add("west", languages="en")
    port.add("east", languages="ja, ko")
    client.send("describe")
    (program,) = client.read()[1]["asr"]
    assert program["installed"]
    assert program["attribution"].keys() == {"name", "url"}
    assert [(one["name"], one["languages"]) for one in program["models"]] == [("east", ["ja", "ko"]), ("west", ["en"])]


def test_a_recording_becomes_text_in_parts_and_whole(port: Port) -> None:
    port.add("ear")
    client = port.connect()
    client.record(SECOND, SECOND[:1000])
    assert [client.read() for _ in range(5)] == [
        ("transcript-start", {"language": None}),
        ("transcript-chunk", {"text": "ear "}),
        ("transcript-chunk", {"text": " 16500"}),
        ("transcript", {"text": "ear  16500", "language": "de"}),
        ("transcript-stop", {}),
    ]
    client.record(SECOND)
    assert client.read_transcript()["text"] == "ear  16000"


def test_the_language_chooses_the_model(port: Port) -> None:
    port.add("a")
    port.add("b", languages="en,de")
    for wanted, text in (
        ({"language": "de-CH"}, "b de"),
        ({"language": "EN"}, "a en"),
        ({"name": "b"}, "b "),
        ({"name": "b", "language": "en"}, "b en"),
    ):
        client = port.connect()
        client.record(SECOND, **wanted)
        assert client.read_transcript()["text"] == f"{text} 16000"
    for wanted, message in (
        ({"language": "tlh"}, "language: expected de, en, got 'tlh'"),
        ({"name": "add"}, "expected one of the ready models for speech, which are 'a', 'b', got 'add'"),
    ):
        client = port.connect()
        client.record(SECOND, **wanted)
        assert message in client.read()[1]["text"]
        assert client.read() == ("", None)


def test_a_recording_without_sound_has_no_text(port: Port) -> None:
    port.add("ear")
    client = port.connect()
    for chunks in ((), (SECOND[:1000],)):
        client.record(*chunks, language="en")
        assert client.read_transcript() == {"text": "", "language": "en"}


def test_a_new_start_drops_what_was_recorded_before_it(port: Port) -> None:
    port.add("ear")
    client = port.connect()
    client.send("audio-chunk", FORM, SECOND)
    client.record(SECOND)
    assert client.read_transcript()["text"] == "ear  16000"


def test_info_lists_the_voices_with_their_languages(port: Port) -> None:
    port.add("many", speak, MOUTH, voices="ann, bob", languages="en-US, de-DE")
    port.add("joe", speak, MOUTH, voices="joe", languages="en-GB")
    port.add("own", speak, MOUTH, languages="")
    client = port.connect()
    client.send("describe")
    data = client.read()[1]
    assert data["asr"] == []
    (program,) = data["tts"]
    assert program["supports_synthesize_streaming"]
    assert [(one["name"], one["languages"]) for one in program["voices"]] == [
        ("joe", ["en-GB"]), ("many:ann", ["en-US"]), ("many:bob", ["de-DE"]), ("own", []),
    ]  # fmt: skip


def test_a_name_or_a_language_chooses_the_voice(port: Port) -> None:
    port.add("many", speak, MOUTH, voices="ann, bob", languages="en-US, de-DE")
    port.add("joe", speak, MOUTH, voices="joe", languages="en-GB")
    client = port.connect()
    for voice, spoken in (
        (None, "joe/joe/hi"),
        ({"name": "many:bob"}, "many/bob/hi"),
        ({"name": "many", "speaker": "bob"}, "many/bob/hi"),
        ({"language": "en_US"}, "many/ann/hi"),
        ({"language": "en"}, "joe/joe/hi"),
        ({"language": "de-CH"}, "many/bob/hi"),
    ):
        client.send("synthesize", {"text": "hi", "voice": voice})
        assert client.read_spoken() == [spoken]
    for voice, message in (
        ({"name": "carl"}, "voice: expected joe, many:ann, many:bob, got 'carl'"),
        ({"language": "fr"}, "language: expected de-DE, en-GB, en-US, got 'fr'"),
        ({"name": 3}, "name: expected a text, got 3"),
        ({"language": "\ud800"}, "language: expected a text, got '\\ud800'"),
    ):
        client = port.connect()
        client.send("synthesize", {"text": "hi", "voice": voice})
        assert message in client.read()[1]["text"]
        assert client.read() == ("", None)


def test_a_text_that_is_being_written_is_spoken_by_sentences(port: Port) -> None:
    port.add("joe", speak, MOUTH, voices="joe")
    client = port.connect()
    client.send("synthesize-start", {"voice": {"name": "joe"}})
    for text in ("On", "e. Tw", "o! (Three.) Fo", "ur 4.5"):
        client.send("synthesize-chunk", {"text": text})
    # The whole text again, for servers that know no other.
    client.send("synthesize", {"text": "One. Two! (Three.) Four 4.5", "voice": {"name": "joe"}})
    client.send("synthesize-stop")
    assert client.read_spoken() == ["joe/joe/One. ", "joe/joe/Two! (Three.) ", "joe/joe/Four 4.5"]
    assert client.read() == ("synthesize-stopped", {})
    client.send("synthesize-start")
    client.send("synthesize-chunk", {"text": "a" * 1001})
    client.send("synthesize-stop")
    assert client.read_spoken() == ["joe/joe/" + "a" * 1001]
    assert client.read() == ("synthesize-stopped", {})


def test_a_text_without_words_has_audio_without_sound(port: Port) -> None:
    port.add("joe", speak, MOUTH, voices="joe")
    client = port.connect()
    client.send("synthesize", {"text": " "})
    assert client.read_spoken() == []


def test_what_no_voice_can_speak_is_told(port: Port) -> None:
    client = port.connect()
    client.send("synthesize", {"text": "hi"})
    assert client.read()[1]["text"] == "no model for text to speech is ready"
    port.add("joe", lambda request: [Response(request.model, 1, request.id, error=InvalidRequest("hoarse"))], MOUTH)
    for data, message in (
        ({"text": "hi"}, "hoarse"),
        ({"text": "<speak>hi</speak>", "text_format": "ssml"}, "text_format: expected text, got 'ssml'"),
    ):
        client = port.connect()
        client.send("synthesize", data)
        assert client.read()[1]["text"] == message


def test_a_client_that_leaves_ends_the_speech(port: Port) -> None:
    port.add("joe", lambda request: [], MOUTH, voices="joe")
    client = port.connect()
    client.send("synthesize", {"text": "hi"})
    assert port.site.service.submitted.wait(30)
    client.close()
    (ticket,) = port.site.service.tickets
    assert ticket.was_cancelled.wait(30)


def test_pings_are_answered_and_unknown_events_ignored(port: Port) -> None:
    client = port.connect()
    client.send("detect", {"names": ["hey"]})
    for text, answer in (("a", "a"), ("\ud800", "?")):
        client.send("ping", {"text": text})
        assert client.read() == ("pong", {"text": answer})


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"GET / HTTP/1.1\r\n", "expected a JSON object as the line, got b'GET /"),
        (b"[1]\n", "expected a JSON object as the line"),
        (b"[" * 60_000 + b"\n", "expected a JSON object as the line"),
        (b"{" * 200_000, "expected a line of at most 65536 bytes"),
        (b"{}\n", "expected an event with a text as 'type'"),
        (b'{"type": "describe", "data": 3}\n', "an object as 'data'"),
        (b'{"type": "describe", "data_length": -1}\n', "data_length: expected 0 to 65536, got -1"),
        (b'{"type": "describe", "data_length": true}\n', "data_length: expected 0 to 65536, got True"),
        (b'{"type": "describe", "payload_length": 2000000}\n', "payload_length: expected 0 to 1048576, got 2000000"),
        (b'{"type": "describe", "data_length": 4}\nnull', "expected a JSON object as the data of 'describe'"),
        (b'{"type": "transcribe", "data": {"language": 3}}\n', "transcribe: expected a text as 'language', got 3"),
        (b'{"type": "audio-chunk"}\n', "audio-chunk: expected a rate of 1000 to 384000, a width of 2 to 4"),
        (
            b'{"type": "audio-chunk", "data": {"rate": 16000, "width": 1, "channels": 1}}\n',
            "got 16000, 1 and 1",
        ),
        (
            b'{"type": "audio-chunk", "data": {"rate": 16000, "width": [], "channels": 1e9}}\n',
            "got 16000, [] and 1000000000.0",
        ),
        (
            b'{"type": "audio-chunk", "data": {"rate": 16000, "width": 2, "channels": 1}}\n'
            b'{"type": "audio-chunk", "data": {"rate": 8000, "width": 2, "channels": 1}}\n',
            "audio-chunk: expected the format of the chunks before",
        ),
    ],
)
def test_what_is_no_event_gets_an_error_and_the_end(port: Port, sent: bytes, message: str) -> None:
    client = port.connect()
    client.socket.sendall(sent)
    kind, data = client.read()
    assert (kind, data["code"]) == ("error", "INVALID_ARG")
    assert message in data["text"]
    assert client.read() == ("", None)


def test_an_error_of_the_model_is_told(port: Port) -> None:
    fails = InvalidRequest("too quiet")
    port.add("ear", lambda request: [Response(request.model, 1, request.id, error=fails)])
    client = port.connect()
    client.record(SECOND)
    assert client.read()[0] == "transcript-start"
    assert client.read() == ("error", {"text": "too quiet", "code": "INVALID_ARG"})
    assert client.read() == ("", None)


def test_a_client_that_leaves_ends_the_work(port: Port) -> None:
    port.add("ear", lambda request: [])
    client = port.connect()
    client.record(SECOND)
    assert port.site.service.submitted.wait(30)
    client.close()
    (ticket,) = port.site.service.tickets
    assert ticket.was_cancelled.wait(30)


def test_recordings_are_bounded(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech_to_text, "MAX_AUDIO_BYTES", 40_000)
    monkeypatch.setattr(speech_to_text, "MAX_HELD_BYTES", 60_000)
    first, second = port.connect(), port.connect()
    first.send("audio-chunk", FORM, SECOND)
    first.send("ping", {"text": "a"})
    assert first.read()[0] == "pong"
    second.send("audio-chunk", FORM, SECOND)
    kind, data = second.read()
    assert (kind, data["code"]) == ("error", "UNAVAILABLE")
    assert "recordings of 60000 bytes are held, which is the maximum" in data["text"]
    first.send("audio-chunk", FORM, SECOND)
    assert "expected a recording of at most 40000 bytes" in first.read()[1]["text"]


def test_a_new_client_takes_the_place_of_the_one_that_is_silent_for_longest(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wyoming_port, "MAX_CONNECTIONS", 2)
    port.add("ear", lambda request: [])
    busy = port.connect()
    busy.record(SECOND)
    assert busy.read()[0] == "transcript-start"
    silent, new = port.connect(), port.connect()
    assert silent.read() == ("", None)
    new.record(SECOND)
    assert new.read()[0] == "transcript-start"
    kind, data = port.connect().read()
    assert kind == "error"
    assert data["text"] == "2 Wyoming connections are open, which is the maximum"


def test_a_port_that_cannot_be_had_ends_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = edge_server.Server(tmp_path, wyoming=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ServingFault, match=r"--wyoming=127.0.0.1:\d+: cannot listen: .*in use"):
            server.start()


def test_a_server_that_asks_for_keys_does_not_open_a_port_without_one(tmp_path: Path) -> None:
    server = edge_server.Server(tmp_path, wyoming="127.0.0.1:0", http_restricted_api="inference:key=value")
    with pytest.raises(InvalidRequest, match="inference needs a key here, and clients of Wyoming send none"):
        server.start()


def test_a_server_that_cannot_start_ends_its_threads(tmp_path: Path) -> None:
    server = edge_server.Server(tmp_path, wyoming="127.0.0.1:0", http_restricted_api="inference:key=value")
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(InvalidRequest, match="inference needs a key here"):
        server.start()
    assert {thread.name for thread in threading.enumerate() if thread.name.startswith("edge-")} <= before


def test_a_server_that_asks_for_certificates_does_not_open_a_port_to_other_machines(tmp_path: Path) -> None:
    files = {"http_port": 0, "http_tls_cert": "/c", "http_tls_key": "/k", "https_client_ca": "/ca"}
    server = edge_server.Server(tmp_path, wyoming="0.0.0.0:0", **files)
    with pytest.raises(InvalidRequest, match="--https-client-ca asks for a proof that clients of Wyoming cannot give"):
        server.start()


def test_clients_are_refused_once_a_reload_asks_for_a_token(port: Port) -> None:
    client = port.connect()
    client.send("ping", {"text": "a"})
    assert client.read()[0] == "pong"
    port.needs_key = True
    for again in (client, port.connect()):
        again.send("ping", {"text": "b"})
        kind, data = again.read()
        assert kind == "error"
        assert data["text"] == "inference needs a key here, and clients of Wyoming send none"


@pytest.mark.parametrize("address", ["10300", "tcp://0.0.0.0:10300", "localhost:", "::1:10300", "localhost:65536"])
def test_the_address_has_a_host_and_a_port(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        edge_server.Server(tmp_path, wyoming=address)
