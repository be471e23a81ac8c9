"""Base of the backends and the sessions of speech models, and readers of what both kinds have: texts and JSON files."""

from __future__ import annotations

import importlib.util
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_server.backends.base import Array, Backend, Execution, ModelFile, OpenJob, RequestSession
from edge_server.backends.option_parsers import set_niceness
from edge_server.backends.runtime_errors import message_line
from edge_server.errors import BackendMissing, EdgeServerError, InvalidRequest, LoadError, install_hint

_NICENESS = 5
"""Of a child process by default."""
_MAX_JSON_BYTES = 1 << 20


class SpeechBackend(Backend):
    """Opens models in child processes. A request has the first input; the others are optional."""

    no_gpu_reason = "computes on the CPU"
    isolates_itself = True
    inputs: Sequence[tuple[str, str]]
    """Names and types."""
    outputs: Sequence[tuple[str, str, Sequence[int]]]
    """Names, types and shapes."""

    def __init__(self, name: str, library: str, extra: str) -> None:
        """`extra` installs the library. Raises BackendMissing."""
        self.name = name
        if importlib.util.find_spec(library) is None:
            raise BackendMissing(f"runtime {library} is not installed; {install_hint(extra)}")

    def auto_complete(self, file: ModelFile, config_json: str) -> str | None:
        config = json.loads(config_json)
        self.complete_parameters(file, config.setdefault("parameters", {}))
        config["max_batch_size"] = 0
        config.setdefault("model_transaction_policy", {})["decoupled"] = True
        config["input"] = [
            {"name": name, "data_type": f"TYPE_{kind}", "dims": [1], "optional": name != self.inputs[0][0]}
            for name, kind in self.inputs
        ]
        config["output"] = [
            {"name": name, "data_type": f"TYPE_{kind}", "dims": list(dims)} for name, kind, dims in self.outputs
        ]
        return json.dumps(config)

    @abstractmethod
    def complete_parameters(self, file: ModelFile, parameters: dict[str, Any]) -> None:
        """Add to the parameters of a configuration what the model's files say. Raises LoadError."""


class SpeechSession(RequestSession):
    """One model, which answers one request at a time."""

    def execute(self, executions: Sequence[Execution]) -> None:
        for execution in executions:
            try:
                inputs = {name: tensor.array.ravel() for name, tensor in execution.request.inputs.items()}
                self.answer(execution, inputs)
            except EdgeServerError as error:
                execution.fail(error.detached())

    @abstractmethod
    def answer(self, execution: Execution, inputs: Mapping[str, Array]) -> None:
        """Send the responses to a request. Raises InvalidRequest and BackendError."""


def lower_priority(job: OpenJob) -> None:
    """Lower the priority of this process, which computes on all cores. Raises LoadError."""
    set_niceness(job.spec.name, job.spec.parameters, _NICENESS)


def read_text(inputs: Mapping[str, Array], name: str) -> str:
    """Return a text, "" if it is not given. Raises InvalidRequest."""
    if name not in inputs:
        return ""
    try:
        return str(bytes(inputs[name][0]), "utf-8").strip()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{name}: expected UTF-8") from None


def read_flag(inputs: Mapping[str, Array], name: str) -> bool:
    """Return a BOOL, false if it is not given."""
    return bool(inputs[name][0]) if name in inputs else False


def read_json(title: str, path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of at most 1 MiB. Raises LoadError."""
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(_MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{title} cannot be read as JSON: {message_line(error)}") from None
    if not isinstance(value, dict):
        raise LoadError(f"{title}: expected a JSON object")
    return value
