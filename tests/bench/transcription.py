"""Transcription of spoken sentences with pauses, with and without detection of speech: wrong words, and time.

    python tests/bench/transcription.py FOLDER_OF_A_WHISPER_MODEL [--rounds 3]

`espeak-ng` speaks twelve sentences. The server runs with the model twice, once with the parameter `vad`; each round
asks both in turn. Processor time is that of the server with its child processes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np
import openai

from edge_server.plugins.speech.audio_file import decode_audio

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.e2e.conftest import running

SENTENCES = (
    "Please turn on the light in the kitchen.", "The garage door is still open.", "Set a timer for twenty minutes.",
    "What is the weather going to be tomorrow?", "Somebody is standing at the front door.",
    "Close all the windows before it rains.", "The washing machine has finished.", "Play some music in the bedroom.",
    "How warm is it in the living room?", "Add milk and bread to the shopping list.",
    "The delivery arrived this morning.", "Wake me up at seven o'clock.",
)  # fmt: skip
PAUSES_S = (0.5, 5.0, 20.0)
NUMBERS = {"20": "twenty", "7": "seven"}
TICKS = 100
"""Of /proc/PID/stat, a second."""


def spoken(text: str) -> Any:
    command = ["espeak-ng", "-v", "en", "-s", "140", "--stdout", text]
    return decode_audio(subprocess.run(command, check=True, capture_output=True).stdout, 60)


def wav_file(samples: Any) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16_000, 0, "NONE", ""))
        writer.writeframes(np.round(samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def words(text: str) -> list[str]:
    return [NUMBERS.get(word, word) for word in re.findall(r"[a-z0-9']+", text.lower())]


def count_errors(expected: list[str], given: list[str]) -> int:
    """Return how many words have to be changed, added or removed."""
    row = list(range(len(given) + 1))
    for index, word in enumerate(expected, 1):
        before, row[0] = row[0], index
        for place, other in enumerate(given, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (word != other))
    return row[-1]


def cpu_s(process: int) -> float:
    """Return the processor time of a process and its children."""
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if process in (int(folder.name), int(fields[1])):
                found += int(fields[11]) + int(fields[12])
    return found / TICKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    voices = [spoken(text) for text in SENTENCES]
    expected = words(" ".join(SENTENCES))
    with tempfile.TemporaryDirectory() as folder:
        for name in ("true", "false"):
            shutil.copytree(arguments.model, Path(folder) / name / "1")
            config = f'parameters {{ key: "vad" value {{ string_value: "{name}" }} }}'
            (Path(folder) / name / "config.pbtxt").write_text(config)
        with running(Path(folder)) as server:
            client = openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0)

            def ask(samples: Any, name: str) -> tuple[str, float, float]:
                before, began = cpu_s(server.process.pid), time.perf_counter()
                answer = client.audio.transcriptions.create(file=("a.wav", wav_file(samples)), model=name)
                return answer.text, time.perf_counter() - began, cpu_s(server.process.pid) - before

            audio = {}
            for pause in PAUSES_S:
                parts = [part for voice in voices for part in (voice, np.zeros(int(pause * 16_000), "f"))]
                samples = np.concatenate(parts)
                audio[f"pauses of {pause:g} s: {samples.size / 16_000:.0f} s"] = samples
            cases = set(audio)
            for name in ("true", "false"):
                ask(voices[0], name)
            print(f"{len(SENTENCES)} sentences, {len(expected)} words")
            print("| Audio | `vad` | Wrong words | Time | Processor |")
            print("|---|---|---|---|---|")
            noise = np.random.default_rng(0).normal(0, 0.02, 160_000)
            audio |= {"10 s of silence": np.zeros(160_000, "f"), "10 s of noise": noise}
            for case, samples in audio.items():
                times: dict[str, list[tuple[float, float]]] = {"true": [], "false": []}
                texts = {}
                for _ in range(arguments.rounds):
                    for name, found in times.items():
                        texts[name], wall, cpu = ask(samples, name)
                        found.append((wall, cpu))
                for name, found in times.items():
                    wall, cpu = (statistics.median(column) for column in zip(*found, strict=True))
                    errors = count_errors(expected if case in cases else [], words(texts[name]))
                    print(f"| {case} | {name} | {errors} | {wall:.2f} s | {cpu:.2f} s |")
                    print(f"    {texts[name]}", file=sys.stderr)


if __name__ == "__main__":
    main()
