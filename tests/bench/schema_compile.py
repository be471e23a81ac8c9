"""Search for JSON schemas that pass the check and are slow to compile:
`python tests/bench/schema_compile.py [MODEL] [SECONDS] [SEED]`.

Schemas are made at random from the parts that were found to be slow (long and ambiguous patterns, bounded strings, many
optional properties, alternatives, literals, depth), those near the limits most of all; the slowest found so far are
changed and tried again. Each is given to the engine in a child process. It prints the worst processor times of the
first step, which compiles, and of any later step, less those of a step without a schema, with the schemas. MODEL is a
GGUF file for OpenVINO GenAI. It should have a real vocabulary (EDGE_TEST_LANGUAGE_MODEL); by default it is the tiny one
of the tests, whose 384 tokens show only what does not depend on the vocabulary. Needs the extra `llm`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from edge_server.errors import BadSchema, InvalidRequest
from edge_server.plugins.language.engines.model_size import read_gguf
from edge_server.plugins.language.engines.openvino_engine import OpenVinoEngine
from edge_server.plugins.language.engines.settings import read_settings
from edge_server.plugins.language.engines.token_engine import Sampling, TokenEngine
from edge_server.plugins.language.text.schema_check import check_schema
from edge_server.plugins.language.text.tool_calls import schema_place

TINY = Path(__file__).parents[1] / "data/tiny_llm/tiny.gguf"
TOKENS = 16
HANG_S = 20.0
"""A schema that takes longer ends the engine's process."""
KEPT = 8
"""Slowest schemas that are changed and tried again."""
_CLASSES = ("a", "[ab]", "[0-9]", "[a-z]", "[a-zA-Z0-9_-]", "[a-zA-Z ]", ".", '[^"]', "\\w", "\\d", "\\s", "\\S")
_FORMATS = ("date", "date-time", "time", "email", "uri", "uuid", "ipv4", "ipv6", "hostname", "duration")


def open_engine(path: Path) -> TokenEngine:
    parameters = {"num_kv_blocks": "64", "enable_prefix_caching": "false"}
    return OpenVinoEngine(path, read_settings("model", parameters, read_gguf(path), 32))


def serve(path: Path) -> None:
    """Main program of the child: answers each schema of the standard input with the processor times of its steps."""
    engine = open_engine(path)
    prompt = list(engine.encode("a"))
    for number, line in enumerate(sys.stdin, 1):
        times, error = [], ""
        begin = time.process_time()
        try:
            engine.add(number, prompt, Sampling(TOKENS, seed=number, json_schema=json.loads(line)))
        except InvalidRequest as refusal:
            times, error = [(time.process_time() - begin) * 1e3], refusal.message
        while not engine.is_idle():
            for event in engine.step():
                error = error or event.error
            times.append((time.process_time() - begin) * 1e3)
            begin = time.process_time()
        print(json.dumps([times, error]), flush=True)


class Engine:
    """The child process, started again after a schema that hangs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: subprocess.Popen[str] | None = None
        self.base_ms = 0.0

    def compile(self, schema: str) -> tuple[float, float, str]:
        """Return the milliseconds of the first step and of the slowest later one, and the engine's error."""
        if self._process is None:
            command = [sys.executable, "-W", "ignore", __file__, "--serve", str(self._path)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, text=True, **pipes)
            self._ask("", 120.0)
            times = [found[0] for _ in range(3) if (found := self._ask("", 60.0))]
            self.base_ms = min(min(steps) for steps in times)
        found = self._ask(schema, HANG_S)
        if found is None:
            self.close()
            return HANG_S * 1e3, HANG_S * 1e3, f"no answer within {HANG_S:g} s"
        steps = [max(0.0, took - self.base_ms) for took in found[0]]
        return steps[0], max(steps[1:], default=0.0), found[1]

    def _ask(self, schema: str, timeout_s: float) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(schema) + "\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], timeout_s)[0]:
            return None
        line = process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


class Generator:
    """Makes schemas. Numbers are often as large as the check admits, since larger ones are refused."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._names = 0

    def make(self) -> dict[str, Any]:
        pick = self._chance.choice
        return pick(
            [self._string, self._string, partial(self._any, 3), partial(self._any, 3), self._wide, self._deep]
        )()

    def change(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema like this one, with one part more."""
        name = self._name()
        return {"type": "object", "properties": {name: schema, self._name(): self._any(1)}, "required": [name]}

    def _name(self) -> str:
        self._names += 1
        return f"{self._chance.choice('abcdefgh')}{self._names}"

    def _size(self, *sizes: int) -> int:
        size = self._chance.choice(sizes)
        return max(0, size + self._chance.randint(-size // 3, size // 3))

    def _pattern(self, depth: int) -> str:
        chance = self._chance
        kind = chance.random()
        if depth <= 0 or kind < 0.35:
            text = chance.choice(_CLASSES)
        elif kind < 0.4:
            text = "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=self._size(2, 9, 60, 300)))
        elif kind < 0.6:
            text = f"({self._pattern(depth - 1)}|{self._pattern(depth - 1)})"
        else:
            text = f"({self._pattern(depth - 1)})"
        end = self._size(2, 4, 8, 16, 60)
        least = chance.choice([0, 1, end])
        text += chance.choice(["", "", "?", "*", "+", f"{{{least},{end}}}", f"{{{end}}}", f"{{{least},}}"])
        return text if chance.random() < 0.6 else text + self._pattern(depth - 1)

    def _string(self) -> dict[str, Any]:
        chance = self._chance
        schema: dict[str, Any] = {"type": "string"}
        kind = chance.random()
        if kind < 0.6:
            schema["pattern"] = f"^{self._pattern(3)}$"
        elif kind < 0.75:
            schema["maxLength"] = self._size(3, 6, 9, 12, 100)
            schema["minLength"] = chance.choice([0, 1, schema["maxLength"] // 2])
        elif kind < 0.85:
            schema["format"] = chance.choice(_FORMATS)
        else:
            schema["enum"] = ["x" * chance.randint(0, 20) + self._name() for _ in range(self._size(10, 100, 400, 900))]
        return schema

    def _any(self, depth: int) -> dict[str, Any]:
        chance = self._chance
        kind = chance.random()
        if depth <= 0 or kind < 0.35:
            return chance.choice(
                [
                    self._string,
                    lambda: {
                        "type": "integer",
                        "minimum": self._size(0, 9, 10**6),
                        "maximum": self._size(10**7, 10**12),
                    },
                    lambda: {"type": "number", "minimum": chance.random(), "maximum": 1 + 1e6 * chance.random()},
                    dict,
                ]
            )()
        if kind < 0.55:
            items = {"minItems": self._size(0, 5, 100), "maxItems": self._size(200, 1000)}
            return {"type": "array", "items": self._any(depth - 1), **items}
        if kind < 0.7:
            return {chance.choice(["anyOf", "oneOf"]): [self._any(depth - 1) for _ in range(self._size(2, 4, 12))]}
        names = [self._name() for _ in range(self._size(2, 5, 12))]
        required = chance.sample(names, chance.randint(0, len(names)))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self._any(depth - 1) for name in names}}
        return {**schema, "required": required, "additionalProperties": chance.choice([False, True])}

    def _wide(self) -> dict[str, Any]:
        """One object with many properties, or one list of many alternatives."""
        chance = self._chance
        leaf = chance.choice([{"type": "integer"}, {"type": "string"}, {"type": "object", "properties": {}}])
        if chance.random() < 0.5:
            return {"anyOf": [{**leaf, "minimum": index} for index in range(self._size(50, 200, 350))]}
        names = [self._name() for _ in range(self._size(30, 60, 90, 300))]
        needed = names[: chance.choice([0, len(names) // 2, len(names)])]
        schema = {"type": "object", "properties": dict.fromkeys(names, leaf), "required": needed}
        if chance.random() < 0.3:
            schema["minProperties"] = len(names) // 2
        return {**schema, "additionalProperties": chance.choice([False, True, leaf])}

    def _deep(self) -> dict[str, Any]:
        """Subschemas inside each other, or alternatives that double by references."""
        schema, kind = self._string(), self._chance.randrange(4)
        depth = self._size(8, 20, 28)
        if kind == 0:
            steps = {f"d{step}": {"anyOf": [{"$ref": f"#/$defs/d{step + 1}"}] * 2} for step in range(depth)}
            return {"$ref": "#/$defs/d0", "$defs": {**steps, f"d{depth}": schema}}
        if kind == 1:
            schema = {"type": "string"}
            for _ in range(min(depth, 9)):
                schema = {"anyOf": [schema, json.loads(json.dumps(schema))]}
            return schema
        for _ in range(depth):
            name = self._name()
            as_items = {"type": "array", "items": schema}
            schema = as_items if kind == 2 else {"type": "object", "properties": {name: schema}, "required": [name]}
        return schema


def search(path: Path, seconds: float, seed: int) -> list[tuple[float, float, str]]:
    """Return the slowest: milliseconds of the first step, of the slowest later one, and the schema."""
    chance = random.Random(seed)
    generator, engine = Generator(chance), Engine(path)
    vocabulary = 384 if path == TINY else 49_152
    found: list[tuple[float, float, str]] = []
    made = refused = failed = 0
    end_s = time.monotonic() + seconds
    with contextlib.closing(engine):
        while time.monotonic() < end_s:
            is_change = bool(found) and chance.random() < 0.3
            schema = generator.change(json.loads(chance.choice(found)[2])) if is_change else generator.make()
            made += 1
            try:
                text, _ = check_schema(json.dumps(schema), vocabulary, partial(schema_place, "schema"))
            except BadSchema:
                refused += 1
                continue
            first_ms, later_ms, error = engine.compile(text)
            if error and first_ms < HANG_S * 1e3:
                failed += 1
            found.append((first_ms, later_ms, text))
            found = sorted(found, key=lambda item: -max(item[:2]))[:KEPT]
    print(f"{made} schemas made, {refused} refused by the check, {failed} by the engine")
    return found


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]))
        return
    path = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("EDGE_TEST_LANGUAGE_MODEL", TINY))
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
    for first_ms, later_ms, schema in search(path, seconds, int(sys.argv[3]) if len(sys.argv) > 3 else 1):
        print(f"first step {first_ms:6.0f} ms, slowest later step {later_ms:6.0f} ms: {schema[:400]}")


if __name__ == "__main__":
    main()
