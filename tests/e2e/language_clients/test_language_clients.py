"""Clients of others against language models of this server, each in an environment of its own, and their table in
docs/text-apis.md.

The models are tests/data/tiny_llm with OpenVINO GenAI, its embeddings, and scripted ones.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server import serve

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
DATA = ROOT / "tests/data"
CLIENTS = os.environ.get("EDGE_TEST_LANGUAGE_CLIENTS", "")
HOME_ASSISTANT = os.environ.get("EDGE_TEST_HOME_ASSISTANT_ASSIST", "")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("openvino_genai") is None, reason="needs openvino-genai, of the extra test-all"
    ),
]

TOKYO = "The capital of Japan is Tokyo."
COUNT = (
    "three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty"
)
CALL = {"city": "Bern", "days": [1, 2]}
TURN_ON = '{"name": "HassTurnOn", "arguments": {"name": "lamp"}}'
TURNED_ON = (
    '{"speech": {}, "response_type": "action_done", "data": {"targets": [], "success": [{"name": "lamp", '
    '"type": "entity", "id": "input_boolean.lamp"}], "failed": []}}'
)
"""What Home Assistant tells a model about the call TURN_ON."""
SCRIPTS: dict[str, dict[str, Any]] = {
    "talker": {
        "answers": {
            "hello": "Hello! How can I help you?",
            "weather": f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {json.dumps(CALL)}}}\n</tool_call>',
            "4": "Cold.",
            "thing": '{"size": 3}',
        },
        "chat_template": "<tool_call>",
    },
    "helper": {
        "answers": {
            "turn on the lamp": f"<tool_call>\n{TURN_ON}\n</tool_call>",
            TURNED_ON: "The lamp is on.",
        },
        "chat_template": "<tool_call>",
    },
    "coder": {
        "answers": {
            "hello": "Hello! How can I help you?",
            "read the note": '<tool_call>\n{"name": "Read", "arguments": {"filepath": "note.txt"}}\n</tool_call>',
            "the lamp is in the hall": "It is in the hall.",
        },
        "chat_template": "<tool_call>",
    },
    "slow": {"answers": {"hello": "Hello! " * 300}, "step_s": 0.1},
}

NAMES = {
    "openai": "openai for JavaScript",
    "openai_agents": "OpenAI Agents",
    "litellm": "litellm",
    "langchain": "LangChain",
    "instructor": "instructor",
    "pydantic_ai": "Pydantic AI",
    "llm": "llm",
    "cohere": "Cohere",
    "continue": "Continue",
    "home_assistant": "Home Assistant",
}
"""Client -> its name in docs/text-apis.md."""
ERRORS: dict[str, dict[str, tuple[str, ...]]] = {
    "openai": {
        "whole": ("NotFoundError", "BadRequestError"),
        "streamed": ("NotFoundError", "BadRequestError"),
    },
    "litellm": dict.fromkeys(("openai", "hosted_vllm", "anthropic"), ("NotFoundError", "ContextWindowExceededError"))
    | {"ollama_chat": ("NotFoundError", "BadRequestError")},
    "langchain": {
        "openai": ("OpenAIModelNotFoundError", "OpenAIContextOverflowError"),
        "responses": ("OpenAIModelNotFoundError", "OpenAIContextOverflowError"),
        "ollama": ("ResponseError", "ResponseError"),
        "anthropic": ("AnthropicModelNotFoundError", "AnthropicContextOverflowError"),
    },
    "instructor": dict.fromkeys(("tool_call", "tools_strict", "json_schema_mode"), ("InstructorRetryException",) * 2),
    "openai_agents": dict.fromkeys(("responses", "chats"), ("NotFoundError", "BadRequestError")),
    "pydantic_ai": dict.fromkeys(
        ("openai", "responses", "ollama", "anthropic"), ("ModelNotFoundError", "ModelContextWindowExceededError")
    ),
    "llm": {"package": ("NotFoundError", "BadRequestError")},
    "cohere": {"v1": ("NotFoundError", "BadRequestError"), "v2": ("NotFoundError", "BadRequestError")},
    "home_assistant": {"agent": ("ResponseError",)},
}
"""Client -> way to ask -> types of its errors for a model that is not there, and for a prompt that is too long."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("models")
    for name in ("tiny", "wide", "embedder", *SCRIPTS):
        (models / name / "1").mkdir(parents=True)
    model = (DATA / "tiny_llm/tiny.gguf").read_bytes()
    (models / "tiny/1/model.gguf").write_bytes(model)
    # With a longer context, for descriptions of tools: far from what it learned, the model follows the grammar alone.
    key = b"llama.context_length" + bytes([4, 0, 0, 0])
    assert model.count(key) == 1
    (models / "wide/1/model.gguf").write_bytes(
        model.replace(key + (512).to_bytes(4, "little"), key + (4096).to_bytes(4, "little"))
    )
    for name in ("tiny", "wide"):
        (models / name / "config.pbtxt").write_text('backend: "openvino_genai"')
    shutil.copytree(DATA / "tiny_embeddings", models / "embedder/1", dirs_exist_ok=True)
    (models / "embedder/config.pbtxt").write_text('backend: "openvino_embeddings"')
    for name, script in SCRIPTS.items():
        (models / name / "config.pbtxt").write_text(
            'backend: "scripted_llm" parameters { key: "max_context" value { string_value: "200000" } } '
            'parameters { key: "num_kv_blocks" value { string_value: "8192" } }'
        )
        (models / name / "1/script.json").write_text(json.dumps(script))
    with serve(models) as running:
        yield running


def environment(client: str) -> Path:
    folder = Path(CLIENTS, client)
    if not CLIENTS or not (folder / "complete").exists():
        pytest.skip(f"needs {client}: tests/e2e/language_clients/fetch_language_clients.sh")
    return folder


def run(*command: str | Path, **more: Any) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=110, env=kept, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def report_of(client: str, server: Any, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Return what a client's program prints: feature -> way to ask -> result."""
    addresses = server.url(""), f"http://{server.metrics}/metrics"
    if client == "openai":
        # Node.js looks for packages beside the program.
        (tmp_path / "node_modules").symlink_to(environment(client) / "node_modules")
        printed = run("node", shutil.copy(HERE / "openai_calls.mjs", tmp_path), *addresses)
    else:
        python = HOME_ASSISTANT if client == "home_assistant" else environment(client) / "bin/python"
        printed = run(python, HERE / f"{client}_calls.py", *addresses, cwd=tmp_path)
    report: dict[str, dict[str, Any]] = json.loads(printed.splitlines()[-1])
    return report


def documented_features(client: str) -> set[str]:
    """Return the features that the table of docs/text-apis.md has for a client."""
    text = (ROOT / "docs/text-apis.md").read_text()
    ((features,),) = [re.findall(rf"^\| {NAMES[client]} \|.*\| (.*) \|$", text, re.MULTILINE)]
    return set(features.split(", "))


@pytest.mark.parametrize("client", sorted(NAMES.keys() - {"home_assistant", "continue"}))
def test_a_client_gets_what_it_asks_for(client: str, server: Any, tmp_path: Path) -> None:
    report = report_of(client, server, tmp_path)
    assert set(report) == documented_features(client)
    assert all(report.values())
    for way, result in report.get("chat", {}).items():
        assert result == TOKYO, way
    for way, result in report.get("stream", {}).items():
        assert (len(result) > 5, "".join(result)) == (True, COUNT), way
    for way, result in report.get("tools", {}).items():
        assert result == [CALL, "Cold."], way
    for way, result in report.get("schema", {}).items():
        assert (list(result), type(result["size"])) == (["size"], int), way
    if "embeddings" in report:
        _, answer = server.ask("/v1/embeddings", {"model": "embedder", "input": "hello"})
        for way, result in report["embeddings"].items():
            assert result == pytest.approx(answer["data"][0]["embedding"]), way
    if "rerank" in report:
        call = {"model": "embedder", "query": "hello", "documents": ["a b c", "hello", "d e f"], "top_n": 2}
        _, answer = server.ask("/v1/rerank", call)
        best = [[item["index"], item["relevance_score"]] for item in answer["results"]]
        for way, result in report["rerank"].items():
            assert result == [[index, pytest.approx(score)] for index, score in best], way
    check_errors(client, report["errors"])
    for way, (error, is_idle) in report.get("timeout", {}).items():
        # The text is no longer generated.
        assert ("time" in error.lower(), is_idle) == (True, True), (way, error)
    for way, result in report.get("cancel", {}).items():
        assert result == [True, True], way


def check_errors(client: str, errors: dict[str, list[str]]) -> None:
    assert {way: tuple(error.split(":")[0] for error in found) for way, found in errors.items()} == ERRORS[client]
    for way, found in errors.items():
        assert "too long" in found[-1] or "at most 64 tokens" in found[-1], way
        assert len(found) == 1 or "'nosuch' is not found" in found[0], way


@pytest.mark.parametrize("provider", ["openai", "ollama", "anthropic"])
def test_continue_talks_and_reads_a_file(provider: str, server: Any, tmp_path: Path) -> None:
    assert documented_features("continue") == {"chat", "tools", "errors"}
    program = environment("continue") / "node_modules/@continuedev/cli/dist/cn.js"
    (tmp_path / "note.txt").write_text("the lamp is in the hall")

    def ask(model: str, question: str) -> str:
        config = {
            "name": "local", "version": "1.0.0", "schema": "v1",
            "models": [
                {
                    "name": model, "provider": provider, "model": model, "apiKey": "none", "roles": ["chat"],
                    "apiBase": server.url("" if provider == "ollama" else "/v1"), "capabilities": ["tool_use"],
                }
            ],
        }  # fmt: skip
        # JSON is YAML.
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        home = {**os.environ, "HOME": str(tmp_path), "CONTINUE_GLOBAL_DIR": str(tmp_path / "continue")}
        kept = {name: value for name, value in home.items() if not name.lower().endswith("_proxy")}
        command = ["node", str(program), "--config", "config.yaml", "-p", question]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=tmp_path, env=kept)
        return (done.stdout + done.stderr).strip()

    assert ask("coder", "hello") == "Hello! How can I help you?"
    # The model asks for the file, and answers what the program reads there.
    assert ask("coder", "read the note") == "It is in the hall."
    assert "'nosuch' is not found" in ask("nosuch", "hello")


@pytest.mark.skipif(not HOME_ASSISTANT, reason="needs Home Assistant: tests/e2e/fetch_home_assistant_assist.sh")
def test_home_assistant_talks_and_uses_a_lamp(server: Any, tmp_path: Path) -> None:
    report = report_of("home_assistant", server, tmp_path)
    assert set(report) == documented_features("home_assistant")
    assert report["chat"] == {"agent": "Hello! How can I help you?"}
    assert report["tools"] == {"assist": ["off", "on", "The lamp is on."]}
    check_errors("home_assistant", report["errors"])


def test_aiperf_measures_all_requests(server: Any, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for file in (DATA / "tiny_llm/tokenizer").glob("*token*"):
        shutil.copy(file, tokenizer)
    run(
        environment("aiperf") / "bin/aiperf", "profile", "--model", "tiny", "--url", server.url(""),
        "--endpoint-type", "chat", "--streaming", "--tokenizer", tokenizer, "--use-server-token-count",
        "--request-count", "12", "--concurrency", "2", "--synthetic-input-tokens-mean", "20",
        "--output-tokens-mean", "6", "--extra-inputs", "ignore_eos:true", "--ui", "none",
        "--output-artifact-dir", "out", cwd=tmp_path,
    )  # fmt: skip
    found = json.loads((tmp_path / "out/profile_export_aiperf.json").read_text())
    lengths = [found["output_sequence_length"][name] for name in ("min", "max")]
    assert (found["request_count"]["avg"], lengths) == (12, [6, 6])
    assert found["time_to_first_token"]["min"] > 0
    assert "error_request_count" not in found
