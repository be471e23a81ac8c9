"""Greedy answers of a real model to thirty chats, beside those of the engine's library without this server."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.server import serve

_TOKENS = 16
_THREADS = "1"
_COUNTRIES = ("France", "Italy", "Japan", "Norway", "Egypt", "Peru", "India", "Kenya", "Chile", "Greece")
_ANIMALS = ("whales", "owls", "bees", "foxes", "ants", "bears", "crows", "frogs", "goats", "eels")
_THINGS = ("bread", "paper", "glass", "steel", "ink", "soap", "salt", "silk", "rope", "ice")
_CHATS = [
    *(f"What is the capital of {name}?" for name in _COUNTRIES),
    *(f"Write a sentence about {name}." for name in _ANIMALS),
    *(f"Explain how {name} is made, in three steps." for name in _THINGS),
]
_LLAMA_CPP = """
import json, sys, urllib.request, xllamacpp
parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.n_parallel, parameters.n_ctx = 1, 512
parameters.cache_ram_mib, parameters.verbosity, parameters.ui = 0, 0, False
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = int(sys.argv[2])
server = xllamacpp.Server(parameters)
for text in json.load(sys.stdin):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": int(sys.argv[3]), "temperature": 0}
    request = urllib.request.Request(server.listening_address + "/v1/chat/completions", json.dumps(body).encode())
    answer = json.load(urllib.request.urlopen(request))
    print(json.dumps(answer["choices"][0]["message"]["content"]), flush=True)
"""
_OPENVINO = """
import json, sys, openvino_genai
scheduler = openvino_genai.SchedulerConfig()
scheduler.num_kv_blocks, scheduler.max_num_batched_tokens = 64, 256
tokenizer = openvino_genai.Tokenizer(sys.argv[1])
pipeline = openvino_genai.ContinuousBatchingPipeline(
    sys.argv[1], tokenizer, scheduler, "CPU", INFERENCE_NUM_THREADS=int(sys.argv[2])
)
config = openvino_genai.GenerationConfig()
config.max_new_tokens = int(sys.argv[3])
config.set_eos_token_id(tokenizer.get_eos_token_id())
for text in json.load(sys.stdin):
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}], True)
    ids = tokenizer.encode(prompt, add_special_tokens=False).input_ids
    (answer,) = pipeline.generate([ids], [config])
    print(json.dumps(tokenizer.decode(answer.m_generation_ids[0])), flush=True)
"""
"""Each prints the texts of the chats from its standard input."""


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif("EDGE_TEST_LANGUAGE_MODEL" not in os.environ, reason="see tests/e2e/fetch_pipeline_models.sh")
@pytest.mark.parametrize(
    ("backend", "library", "program"),
    [("llama_cpp", "xllamacpp", _LLAMA_CPP), ("openvino_genai", "openvino_genai", _OPENVINO)],
)
def test_greedy_answers_are_those_of_the_engine_alone(tmp_path: Path, backend: str, library: str, program: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}, of the extra test-all")
    model = os.environ["EDGE_TEST_LANGUAGE_MODEL"]
    command = [sys.executable, "-c", program, model, _THREADS, str(_TOKENS)]
    alone = subprocess.run(command, input=json.dumps(_CHATS), capture_output=True, text=True, timeout=1500, check=False)
    assert not alone.returncode, alone.stderr[-2000:]
    expected = [json.loads(line) for line in alone.stdout.splitlines() if line.startswith('"')]
    (tmp_path / "real/1").mkdir(parents=True)
    (tmp_path / "real/1/model.gguf").symlink_to(model)
    (tmp_path / "real/config.pbtxt").write_text(
        f'backend: "{backend}" parameters {{ key: "threads" value {{ string_value: "{_THREADS}" }} }}'
    )
    answers = []
    with serve(tmp_path, "--allow-external-links") as server:
        for text in _CHATS:
            body = {"model": "real", "messages": [{"role": "user", "content": text}], "max_tokens": _TOKENS}
            status, answer = server.ask("/v1/chat/completions", {**body, "temperature": 0})
            assert status == 200, answer
            answers.append(answer["choices"][0]["message"]["content"])
    assert answers == expected
