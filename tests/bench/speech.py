"""Speech of a voice of Piper, beside other programs: `python tests/bench/speech.py VOICE.onnx [ROUNDS]`.

Spoken are one sentence, and three: by the server over HTTP (WAV, streamed), by the bare ONNX Runtime with the same
phonemes, by Piper's own package if it is installed (`piper-tts`, GPL), and by the program espeak-ng. It prints medians
of the time to the first audio and to the last, of the time / the length of the audio, and of the processor time / that.
Needs the extra `onnxruntime` and the library of espeak-ng.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from edge_server.backends.base import ModelFile
from edge_server.plugins.speech.synthesis.espeak_phonemes import Phonemizer
from edge_server.plugins.speech.synthesis.piper import PiperModel
from tests.bench.harness import server

SENTENCE = "Please turn on the light in the kitchen."
TEXTS = {
    "1 sentence": SENTENCE,
    "3 sentences": f"{SENTENCE} Then open the door, and let the dog out. And now close all of the windows, because it "
    "is cold outside, and the wind is rising again.",
}
WAV_HEADER = 44


class Spoken(NamedTuple):
    first_s: float
    all_s: float
    cpu_s: float
    audio_s: float


Speaker = Callable[[str], Iterator[int]]
"""Yields the number of samples of each part of the audio."""


def measure(speak: Speaker, text: str, rate: int, processor_s: Callable[[], float]) -> Spoken:
    begin, before = time.perf_counter(), processor_s()
    first_s, samples = 0.0, 0
    for count in speak(text):
        samples += count
        first_s = first_s or time.perf_counter() - begin
    return Spoken(first_s, time.perf_counter() - begin, processor_s() - before, samples / rate)


def over_http(address: str) -> Speaker:
    def speak(text: str) -> Iterator[int]:
        connection = http.client.HTTPConnection(address)
        connection.request("POST", "/v1/audio/speech", json.dumps(
            {"model": "voice", "input": text, "response_format": "wav"}
        ))  # fmt: skip
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        assert len(answer.read(WAV_HEADER)) == WAV_HEADER
        while part := answer.read1(1 << 20):
            yield len(part) // 2
        connection.close()

    return speak


def bare_runtime(voice: Path) -> Speaker:
    import onnxruntime

    file = ModelFile(voice.with_name(f"{voice.name}.json"), voice.parent, 1)
    model = PiperModel(file, {})
    phonemizer = Phonemizer()
    phonemizer.set_language(model.espeak_language("voice"))
    session = onnxruntime.InferenceSession(str(voice), providers=["CPUExecutionProvider"])

    class Session:
        def run(self, inputs: Any, outputs: Any) -> Any:
            return dict(zip(outputs, session.run(outputs, inputs), strict=True))

    def speak(text: str) -> Iterator[int]:
        for sentence in phonemizer.sentences(text, model.max_phonemes):
            yield model.speak(Session(), sentence, next(iter(model.languages)), 1.0).size  # type: ignore[arg-type]

    return speak


def package(voice: Path) -> Speaker:
    from piper import PiperVoice

    loaded = PiperVoice.load(voice)

    def speak(text: str) -> Iterator[int]:
        for chunk in loaded.synthesize(text):
            yield len(chunk.audio_int16_array)

    return speak


def espeak_program(text: str) -> Iterator[int]:
    audio = subprocess.run(["espeak-ng", "--stdout", text], capture_output=True, check=True).stdout
    yield (len(audio) - WAV_HEADER) // 2


def children_and_own_s() -> float:
    return sum(os.times()[:4])


def main(voice: Path, rounds: int) -> None:
    rate = json.loads(voice.with_name(f"{voice.name}.json").read_text())["audio"]["sample_rate"]
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / "models/voice/1"
        version.mkdir(parents=True)
        for file in (voice, voice.with_name(f"{voice.name}.json")):
            shutil.copyfile(file, version / file.name)
        with server(version.parents[1]) as running:
            speakers: dict[str, tuple[Speaker, int, Callable[[], float]]] = {
                "server": (over_http(running.http), rate, running.cpu_s),
                "bare runtime": (bare_runtime(voice), rate, children_and_own_s),
            }
            if importlib.util.find_spec("piper") is not None:
                speakers["piper-tts"] = (package(voice), rate, children_and_own_s)
            if shutil.which("espeak-ng") is not None:
                speakers["espeak-ng"] = (espeak_program, 22_050, children_and_own_s)
            found: dict[tuple[str, str], list[Spoken]] = {}
            for number in range(rounds + 1):
                for title, text in TEXTS.items():
                    for name, (speak, own_rate, processor_s) in speakers.items():
                        spoken = measure(speak, text, own_rate, processor_s)
                        if number:  # the first round warms up
                            found.setdefault((title, name), []).append(spoken)
    print(f"{'':12} {'':13} {'first ms':>9} {'all ms':>8} {'audio s':>8} {'time/audio':>11} {'CPU/audio':>10}")
    for (title, name), values in found.items():
        first_s, all_s, used_s, audio_s = (statistics.median(column) for column in zip(*values, strict=True))
        print(
            f"{title:12} {name:13} {first_s * 1e3:9.0f} {all_s * 1e3:8.0f} {audio_s:8.2f} {all_s / audio_s:11.3f} "
            f"{used_s / audio_s:10.3f}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 9)
