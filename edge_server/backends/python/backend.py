"""Backend `python`: a version is a model.py with a class TritonPythonModel.

Parameters of a model's configuration, beside those that it reads itself:

- `isolation`: "process" gives each instance a process of its own: for models that must not share the GIL, that may
  crash, or that call os._exit. "none", the default, runs them in the server's process.
- `execution_thread`: "own", "caller" or "auto", the default: see `threads`.
- `initialize_timeout_s`: whole seconds that `initialize` may take in a process of its own, 300 by default; the process
  is killed then, and the load fails.
- `read_only_inputs`: true hands inputs over as read-only views of the received request instead of copies that the
  model may write to.
- `EXECUTION_ENV_PATH`: named in the log and otherwise ignored; models run on the server's own Python and packages.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping

from edge_server.backends.base import Backend, ModelFile, ModelSignature, OpenJob, RequestSession
from edge_server.backends.python import triton_python_backend_utils
from edge_server.backends.python.auto_complete import completed
from edge_server.backends.python.isolated_auto_complete import completed_in_process
from edge_server.backends.python.isolated_session import IsolatedSession
from edge_server.backends.python.session import PythonSession
from edge_server.backends.python.thread_safety import PARAMETER, ExecutionThread, execution_thread
from edge_server.backends.runtime_library import existing_file
from edge_server.errors import BadModelConfig

log = logging.getLogger(__name__)

_MODULE_NAMES = ("triton_python_backend_utils", "c_python_backend_utils")
"""What models import. The second is the part of the first that is written in C++ in Triton; some name it themselves."""

_ISOLATION = "isolation"


def make(name: str) -> Backend:
    return PythonBackend(name)


class PythonBackend(Backend):
    """Needs nothing but Python."""

    default_filename = "model.py"

    def __init__(self, name: str) -> None:
        self.name = name
        for name in _MODULE_NAMES:
            sys.modules[name] = triton_python_backend_utils

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature | None:
        existing_file(file, self.default_filename)
        return None

    def auto_complete(self, file: ModelFile, config_json: str) -> str | None:
        parameters = json.loads(config_json).get("parameters", {})
        words = {name: value.get("string_value", "") for name, value in parameters.items()}
        if is_isolated(file.model_dir.name, words):
            return completed_in_process(file, config_json)
        return completed(file, config_json)

    def open(self, job: OpenJob) -> RequestSession:
        existing_file(job.file, self.default_filename)
        if "EXECUTION_ENV_PATH" in job.spec.parameters:
            log.warning("model '%s': EXECUTION_ENV_PATH is not used; it runs on %s", job.spec.name, sys.executable)
        thread = execution_thread(job.spec.name, job.spec.parameters)
        if is_isolated(job.spec.name, job.spec.parameters):
            if thread is ExecutionThread.CALLER:
                raise BadModelConfig(
                    f"model '{job.spec.name}': parameter {PARAMETER} is caller, but with isolation: process it "
                    "executes on a thread of its process"
                )
            return IsolatedSession(job)
        return PythonSession(job)


def is_isolated(model: str, parameters: Mapping[str, str]) -> bool:
    """Return whether the model wants processes of its own. Raises BadModelConfig for an unknown word."""
    word = parameters.get(_ISOLATION, "none").strip().lower()
    if word not in ("none", "process"):
        raise BadModelConfig(f"model '{model}': parameter {_ISOLATION} must be none or process, got '{word[:80]}'")
    return word == "process"
