"""Main program of a candidate's process: `python -m edge_server.tuning.trial.child_main`. A crash or hang loses only
this candidate.

It reads a job, then commands, one line of JSON each, from standard input, and answers each with one line on standard
output: {"done": ...}, or {"failed": reason, "kind": class} and its end. Lines {"progress": text, "percent": p} may come
before. It ends with its input, and with the process that started it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from edge_server.backends import TENSORRT_LIBRARIES, load_backend
from edge_server.backends.base import Array, OpenJob, ServerCalls, Session
from edge_server.backends.tensorrt.optimization_profiles import KEYS, configured_profiles
from edge_server.core.batch import BatchPlan
from edge_server.core.model_spec import InstanceKind, ModelSpec
from edge_server.core.tensor import DType
from edge_server.core.tensorrt_engine import Profile
from edge_server.core.version_lifecycle import Resolved
from edge_server.errors import EdgeServerError, LoadError, Unsupported
from edge_server.repository.resolve import ResolveOptions, resolve
from edge_server.repository.scan import Scanner, with_config
from edge_server.tuning.trial.child_side import begin, leave, say
from edge_server.tuning.trial.engine_builds import BuiltNotRun, CandidateEngines
from edge_server.tuning.trial.sample_inputs import as_request, batch_of, from_file, from_warmup, made_up
from edge_server.tuning.trial.tensor_files import Tensors, load, save


class OpenedModel:
    """One opened model, and what it is given."""

    def __init__(self, job: Mapping[str, Any], out: TextIO) -> None:
        self._out = out
        self._profiles: list[str] = job["profiles"]
        began_s = time.perf_counter()
        self._resolved = _resolve(job)
        self.spec = self._resolved.spec
        _require_rows(self.spec)
        if self.spec.backend != job["runtime"]:  # stood in for by another: that one has a row of its own
            raise LoadError("; ".join(self.spec.notes) or f"backend '{self.spec.backend}' stands in for it")
        self._plan = BatchPlan(self.spec)
        self._desk = CandidateEngines(self.spec, self._resolved.file, job, self.progress)
        self._session = self._open(job)
        self.load_s = time.perf_counter() - began_s
        self._samples: list[Tensors] = []
        self._batches: dict[tuple[int, int], Mapping[str, Array]] = {}

    def progress(self, text: str, percent: float) -> None:
        say(self._out, {"progress": text, "percent": percent})

    def _open(self, job: Mapping[str, Any]) -> Session:
        spec, resolved = self.spec, self._resolved
        group = spec.instance_groups[0]
        device = group.gpus[0] if group.kind is InstanceKind.GPU and group.gpus else None
        name = f"{group.name}_0" if device is None else f"{group.name}_0_{device}"
        settings: Mapping[str, str] = job["settings"].get(spec.backend, {})
        server: ServerCalls | None = None
        if spec.backend in TENSORRT_LIBRARIES and resolved.file.path.suffix.lower() == ".onnx":
            server = self._desk.ready(device, settings)
        try:
            session = load_backend(spec.backend).open(OpenJob(spec, resolved.file, name, device, settings, server))
        finally:
            self._desk.opened()
        if not isinstance(session, Session):
            session.close()
            raise Unsupported(f"model '{spec.name}': backend '{spec.backend}' answers requests, not batches of rows")
        return session

    def facts(self) -> dict[str, object]:
        """Return the facts of the opened model."""
        info = self._session.info
        return {
            "runtime": info.runtime,
            "device": info.device,
            "precision": info.precision,
            "options": dict(info.options),
            "load_ms": self.load_s * 1000,
            "max_batch_size": self.spec.max_batch_size,
            "bf16_outputs": [item.name for item in self.spec.outputs if item.dtype is DType.BF16],
        }

    def make_samples(self, command: Mapping[str, Any]) -> dict[str, object]:
        """Write the samples for all candidates; say what they are."""
        profile = self._profile()
        if command["input"]:
            samples, words = from_file(self.spec, Path(command["input"])), f"of {command['input']}"
        else:
            samples = from_warmup(self.spec, self._resolved.file.model_dir)
            words = "of model_warmup"
            if not samples:
                samples, words = made_up(self.spec, int(command["count"]), profile), "made up"
        save(Path(command["to"]), samples)
        open_dims = [
            item.name for item in self.spec.inputs if -1 in item.dims and (profile is None or item.name not in profile)
        ]
        return {"count": len(samples), "words": words, "open": open_dims if words == "made up" else []}

    def _profile(self) -> Profile | None:
        if not self._profiles:
            return None
        parameters = {**self.spec.parameters, **dict(zip(KEYS, self._profiles, strict=True))}
        stated = {part.rpartition(":")[0].strip() for part in self._profiles[1].split(",")}
        # Inputs that the profiles leave out have, for this purpose, any size; only those named are asked for.
        named = tuple(item for item in self.spec.inputs if item.name in stated)
        return configured_profiles(dataclasses.replace(self.spec, parameters=parameters, inputs=named))[0]

    def load(self, command: Mapping[str, Any]) -> dict[str, object]:
        self._samples = list(load(Path(command["from"])))
        return {"count": len(self._samples)}

    def answer(self, command: Mapping[str, Any]) -> dict[str, object]:
        """Answer every sample, and write the answers."""
        rows = 1 if self.spec.max_batch_size > 0 else 0
        answers: list[Tensors] = []
        for sample in self._samples:
            request = as_request(self.spec, sample)
            outputs = self._session.run(self._plan.gather([request]), self._plan.wanted([request]))
            (tensors,) = self._plan.scatter(outputs, [request], [rows or 1])
            answers.append({tensor.name: tensor.array for tensor in tensors})
        save(Path(command["to"]), answers)
        return {"count": len(answers)}

    def turn(self, command: Mapping[str, Any]) -> dict[str, object]:
        """Run for as many times as asked for, at most as long; the run before them, which finds cold caches, is not
        counted."""
        rows, runs, limit_s = int(command["rows"]), int(command["runs"]), float(command["seconds"])
        times_ms: list[float] = []
        end_s = time.perf_counter() + limit_s
        for number in range(-1, runs):
            inputs, wanted = self._batch(rows, int(command["first"]) + max(number, 0))
            began_s = time.perf_counter()
            self._session.run(inputs, wanted)
            took_s = time.perf_counter() - began_s
            if number >= 0:
                times_ms.append(took_s * 1000)
            if times_ms and time.perf_counter() > end_s:
                break
        return {"times_ms": times_ms}

    def _batch(self, rows: int, first: int) -> tuple[Mapping[str, Array], tuple[str, ...]]:
        first %= len(self._samples)
        sample = self._samples[first] if rows <= 1 else batch_of(self._samples, first, rows)
        request = as_request(self.spec, sample)
        if (rows, first) not in self._batches:
            # Put together before the clock runs: the server's own share is the same for all.
            if rows > 1:
                self._batches = {key: kept for key, kept in self._batches.items() if key[0] == rows}
            self._batches[rows, first] = self._plan.gather([request])
        return self._batches[rows, first], tuple(self._plan.wanted([request]))

    def keep(self, command: Mapping[str, Any]) -> dict[str, object]:
        """Keep the engine that was built, so that the server finds it."""
        return {"kept": self._desk.keep(float(command["difference"]), str(command["reference"]))}

    def close(self) -> None:
        self._session.close()


def _resolve(job: Mapping[str, Any]) -> Resolved:
    scanner = Scanner([Path(job["root"])], allows_external_links=job["allows_external_links"])
    model = scanner.find(job["model"])
    if model is None:
        raise LoadError(f"model '{job['model']}' is not in '{job['root']}' any more")
    config_json = str(job["config_json"])
    options = ResolveOptions(gpu_count=int(job["gpu_count"]))
    return resolve(with_config(model, config_json), int(job["version"]), options, config_json)


def _require_rows(spec: ModelSpec) -> None:
    what = (
        "an ensemble" if spec.ensemble is not None
        else "decoupled" if spec.is_decoupled
        else "a model of sequences" if spec.sequence is not None
        else "a model of ragged batches" if spec.batch_inputs or any(item.allow_ragged_batch for item in spec.inputs)
        else ""
    )  # fmt: skip
    if what:
        raise Unsupported(f"model '{spec.name}' is {what}: only models that answer each request by itself are compared")


def main() -> int:
    out, job = begin()
    try:
        bench = OpenedModel(job, out)
    except BuiltNotRun as error:
        say(out, {"failed": str(error), "kind": "BuiltNotRun"})
        return leave()
    except EdgeServerError as error:
        say(out, {"failed": error.message, "kind": type(error).__name__})
        return leave()
    commands = {
        "samples": bench.make_samples,
        "load": bench.load,
        "answer": bench.answer,
        "turn": bench.turn,
        "keep": bench.keep,
    }
    say(out, {"done": bench.facts()})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            say(out, {"done": commands[command["do"]](command)})
        except EdgeServerError as error:
            say(out, {"failed": error.message, "kind": type(error).__name__})
            break
    bench.close()
    return leave()


if __name__ == "__main__":
    sys.exit(main())
