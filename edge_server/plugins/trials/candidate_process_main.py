"""Main program of a child process that runs a model in one way (runtime, device, precision): runs samples and measures,
as its parent commands.

A crash or hang of the process affects only one candidate. The process reads a job and then commands from
standard input, one JSON object per line. For each it writes one line to standard output: {"done": ...}, or
{"failed": reason, "kind": class}, after which it exits. Lines {"progress": text, "percent": p} may precede this line.
The process also exits at the end of its input and when its parent exits.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from edge_server.backends import engine_backends, load_backend
from edge_server.backends.base import Array, OpenJob, ServerCalls, Session, SessionInfo
from edge_server.backends.isolation.isolated_session import IsolatedSession
from edge_server.backends.isolation.json_child_side import exit_at_once, start_child, write_message
from edge_server.backends.isolation.npz_tensor_files import Tensors, load_tensors, save_tensors
from edge_server.backends.trial_engines import BuiltNotRun, TrialEngineSettings
from edge_server.config.server_config import settings_of_backend
from edge_server.core.batch import BatchPlan
from edge_server.core.model_spec import InstanceKind, ModelSpec
from edge_server.core.tensor import DType
from edge_server.core.version_lifecycle import Resolved
from edge_server.errors import EdgeServerError, InvalidRequest, LoadError, OutOfMemory, Unsupported
from edge_server.memory.available_memory import MemoryFloor
from edge_server.plugin import own_recognisers
from edge_server.plugins.trials.embedded_server_model import ServedModel
from edge_server.plugins.trials.language_model_trial import generate_texts, peak_bytes
from edge_server.plugins.trials.picture_agreement import BOXES, SCORES, THRESHOLD
from edge_server.plugins.trials.sample_inputs import (
    as_request,
    batch_of,
    edge_samples,
    from_file,
    from_warmup,
    random_samples,
    usual_sizes,
)
from edge_server.plugins.trials.trial_commands import TrialModel, execute_commands
from edge_server.plugins.vision.image_plan import required_image_plan
from edge_server.plugins.vision.perception_decoder import make_perception_decoder
from edge_server.repository.disk.scan import Scanner, with_config
from edge_server.repository.resolve_version import ResolveOptions, resolve


class OpenedModel(TrialModel):
    """One session of a runtime, without a server's queue around it."""

    def __init__(self, job: Mapping[str, Any], out: TextIO) -> None:
        super().__init__()
        self._out = out
        self._closing = contextlib.ExitStack()
        self._open_model(job)

    def _open_model(self, job: Mapping[str, Any]) -> None:
        self._profiles: list[str] = job["profiles"]
        began_s = time.perf_counter()
        self._resolved = _resolve(job)
        self.spec = self._resolved.spec
        _require_stateless(self.spec)
        if self.spec.backend != job["runtime"]:  # the substituted backend is a candidate of its own
            raise LoadError("; ".join(self.spec.notes) or f"backend '{self.spec.backend}' replaces it")
        self._plan = BatchPlan(self.spec)
        engines = None if job["engines"] is None else TrialEngineSettings(*job["engines"])
        scratch, file = Path(job["scratch"]), self._resolved.file
        self._engines = None if engines is None else engines.make(self.spec, file, scratch, self.progress)
        self._session = self._open_session(job)
        self._closing.callback(self._session.close)
        self.load_s = time.perf_counter() - began_s
        self._batches: dict[tuple[int, int], Mapping[str, Array]] = {}

    def progress(self, text: str, percent: float) -> None:
        write_message(self._out, {"progress": text, "percent": percent})

    def _open_session(self, job: Mapping[str, Any]) -> Session:
        spec, resolved = self.spec, self._resolved
        group = spec.instance_groups[0]
        device = group.gpus[0] if group.kind is InstanceKind.GPU and group.gpus else None
        name = f"{group.name}_0" if device is None else f"{group.name}_0_{device}"
        settings = settings_of_backend(job["settings"], spec.backend)
        server: ServerCalls | None = None
        engines = self._engines if resolved.file.path.suffix.lower() == ".onnx" else None
        if engines is not None and spec.backend in engine_backends():
            server = engines.server(device, settings)
        try:
            session = load_backend(spec.backend).open(OpenJob(spec, resolved.file, name, device, settings, server))
        finally:
            if engines is not None:
                engines.release_build_lock()
        if not isinstance(session, Session):
            session.close()
            raise Unsupported(f"model '{spec.name}': backend '{spec.backend}' answers requests, not batches of rows")
        return session

    def reopen(self, command: Mapping[str, Any]) -> dict[str, object]:
        """Close the model, and open the one of another job, so that its runtime is not imported again. Return its
        `facts`, or how it `failed` and of which `kind`: this process can open others then."""
        self.close()
        self._samples = []
        try:
            self._open_model(command["job"])
        except EdgeServerError as error:
            return {"failed": error.message, "kind": type(error).__name__}
        return {"facts": self.facts()}

    def facts(self) -> dict[str, object]:
        """Return the runtime, device, precision and other properties of the opened model."""
        return {
            **_describe(self._session.info, self.load_s),
            "max_batch_size": self.spec.max_batch_size,
            "bf16_outputs": [item.name for item in self.spec.outputs if item.dtype is DType.BF16],
        }

    def make_samples(self, command: Mapping[str, Any]) -> dict[str, object]:
        """Write the samples for all candidates to a file, and return their number and source."""
        sizes = self._sizes()
        if command["input"]:
            samples, source = from_file(self.spec, Path(command["input"])), f"of {command['input']}"
        else:
            samples = from_warmup(self.spec, self._resolved.file.model_dir)
            source = "of model_warmup"
            if not samples:
                samples, source = random_samples(self.spec, int(command["count"]), sizes), "generated"
        save_tensors(Path(command["to"]), samples)
        unknown = [item.name for item in self.spec.inputs if -1 in item.dims and item.name not in sizes]
        return {"count": len(samples), "source": source, "open": unknown if source == "generated" else []}

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        shapes = self._engines.best_shapes(self._profiles) if self._engines is not None and self._profiles else {}
        return usual_sizes(self.spec, shapes)

    def run_edge_samples(self, command: Mapping[str, Any]) -> dict[str, object]:
        """Run the model on the samples of a file, which holds those of `edge_samples` if it has to be made, and write
        the outputs to another one.

        Return the numbers of the samples that it answered, and the errors of the others by number.
        """
        path = Path(command["samples"])
        if not path.exists():
            save_tensors(path, edge_samples(self.spec, self._sizes()))
        answered: dict[int, Tensors] = {}
        errors: dict[int, str] = {}
        for number, sample in enumerate(load_tensors(path)):
            try:
                answered[number] = self.run(sample)
            except EdgeServerError as error:
                errors[number] = error.message
        save_tensors(Path(command["to"]), list(answered.values()))
        return {"answered": list(answered), "errors": errors}

    def answer_pictures(self, command: Mapping[str, Any]) -> dict[str, object]:
        """Run the model on each picture, and write what it makes of them to a file, see `picture_agreement`."""
        images = required_image_plan(self.spec, "pictures")
        decoder = make_perception_decoder(self.spec)
        item = 0 if self.spec.max_batch_size > 0 else None
        answers: list[Tensors] = []
        for path in command["pictures"]:
            try:
                tensor, fit = images.fit_file(Path(path).read_bytes(), model=self.spec.name)
            except (InvalidRequest, OSError) as error:
                raise InvalidRequest(f"picture '{path}': {error}") from error
            outputs = self.run({name: one.array for name, one in images.inputs(tensor).items()})
            if decoder is not None and decoder.detections is not None:
                found = decoder.detections.decode(outputs, item, fit, model=self.spec.name)
                boxes = [(one.x_min, one.y_min, one.x_max, one.y_max, one.score, one.class_index) for one in found]
                threshold = np.array([decoder.detections.declaration.score_threshold], np.float32)
                answers.append({BOXES: np.array(boxes, np.float32).reshape(-1, 6), THRESHOLD: threshold})
            elif decoder is not None and decoder.classes is not None:
                answers.append({SCORES: decoder.classes.scores(outputs, item, model=self.spec.name)})
            else:
                answers.append(outputs)
        save_tensors(Path(command["to"]), answers)
        return {"count": len(answers)}

    def run(self, sample: Tensors) -> Tensors:
        request = as_request(self.spec, sample)
        rows = len(next(iter(sample.values()))) if self.spec.max_batch_size > 0 else 1
        outputs = self._session.run(self._plan.gather([request]), self._plan.output_names([request]))
        (tensors,) = self._plan.scatter(outputs, [request], [rows])
        return {tensor.name: tensor.array for tensor in tensors}

    def prepare(self, rows: int, first: int) -> Callable[[], object]:
        return partial(self._session.run, *self._batch(rows, first))

    def _batch(self, rows: int, first: int) -> tuple[Mapping[str, Array], tuple[str, ...]]:
        first %= len(self._samples)
        sample = self._samples[first] if rows <= 1 else batch_of(self._samples, first, rows)
        request = as_request(self.spec, sample)
        if (rows, first) not in self._batches:
            # Gather outside the measured time, because gathering is the same for all candidates.
            if rows > 1:
                self._batches = {key: kept for key, kept in self._batches.items() if key[0] == rows}
            self._batches[rows, first] = self._plan.gather([request])
        return self._batches[rows, first], tuple(self._plan.output_names([request]))

    def keep_engine(self, command: Mapping[str, Any]) -> dict[str, object]:
        """Put the built engine into the server's cache."""
        difference, reference = float(command["difference"]), str(command["reference"])
        return {"kept": self._engines is not None and self._engines.keep_engine(difference, reference)}

    def close(self) -> None:
        self._closing.close()


def open_once(job: Mapping[str, Any]) -> dict[str, object]:
    """Open a model that need not answer requests of rows, such as a language model, and close it. Return runtime,
    device, precision and the time of the load; with `texts_at_once` also the times of texts and the most memory."""
    began_s = time.perf_counter()
    resolved = _resolve(job)
    spec, file = resolved.spec, resolved.file
    if refusal := MemoryFloor(0, 0.0).refusal(file, 1):
        raise OutOfMemory(refusal)
    name, settings = f"{spec.instance_groups[0].name}_0", settings_of_backend(job["settings"], spec.backend)
    session = load_backend(spec.backend).open(OpenJob(spec, file, name, settings=settings))
    facts = _describe(session.info, time.perf_counter() - began_s)
    try:
        if not job["texts_at_once"]:
            return facts
        if not isinstance(session, IsolatedSession):
            raise Unsupported(f"model '{spec.name}': backend '{spec.backend}' is no engine of language models")
        times_ms = generate_texts(session, spec, job["texts_at_once"])
        return {**facts, "times_ms": times_ms, "memory_bytes": peak_bytes(session)}
    finally:
        session.close()


def _describe(info: SessionInfo, load_s: float) -> dict[str, object]:
    return {
        "runtime": info.runtime,
        "device": info.device,
        "precision": info.precision,
        "options": dict(info.options),
        "load_ms": load_s * 1000,
    }


def _resolve(job: Mapping[str, Any]) -> Resolved:
    scanner = Scanner([Path(job["root"])], allows_external_links=job["allows_external_links"])
    model = scanner.find(job["model"])
    if model is None:
        raise LoadError(f"model '{job['model']}' is not in '{job['root']}' any more")
    config_json = str(job["config_json"])
    options = ResolveOptions(
        gpu_count=int(job["gpu_count"]), backend_settings=job["settings"], recognisers=own_recognisers()
    )  # fmt: skip
    return resolve(with_config(model, config_json), int(job["version"]), options, config_json)


def _require_stateless(spec: ModelSpec) -> None:
    """Raise Unsupported unless the model answers each request independently of others."""
    unsupported_kind = (
        "an ensemble" if spec.ensemble is not None
        else "decoupled" if spec.is_decoupled
        else "a model of sequences" if spec.sequence is not None
        else "a model of ragged batches" if spec.batch_inputs or any(item.allow_ragged_batch for item in spec.inputs)
        else ""
    )  # fmt: skip
    if unsupported_kind:
        raise Unsupported(
            f"model '{spec.name}' is {unsupported_kind}: only models that answer each request by itself are compared"
        )


def main() -> int:
    out, job = start_child()
    try:
        if job.get("is_opened_only"):
            write_message(out, {"done": open_once(job)})
            return exit_at_once()
        model = ServedModel(job) if job.get("is_served") else OpenedModel(job, out)
    except BuiltNotRun as error:
        write_message(out, {"failed": str(error), "kind": "BuiltNotRun"})
        return exit_at_once()
    except EdgeServerError as error:
        write_message(out, {"failed": error.message, "kind": type(error).__name__})
        return exit_at_once()
    execute_commands(model, out)
    return exit_at_once()


if __name__ == "__main__":
    sys.exit(main())
