"""Loader of the backend `python`: opens a `model.py` with a class TritonPythonModel, in the server's process or in a
child process.

Parameters of the model configuration, beside those that the model reads itself:

- `isolation`: "process" runs each instance in a child process. Use it for models that must not share the GIL, that may
  crash, or that call os._exit. The default "none" runs them in the server's process.
- `execution_thread`: "own", "caller" or "auto" (default); see `execution_thread_choice`.
- `initialize_timeout_s`: most seconds that `initialize` in a child process may go on without reading a file or taking
  more memory, 300 by default. After them the process is killed and the load fails.
- `read_only_inputs`: true passes inputs as read-only views of the received request; false (default) passes copies that
  the model may write to.
- `EXECUTION_ENV_PATH`: logged and otherwise ignored. Models run on the server's Python and packages.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping

from edge_server.backends.base import Backend, ModelFile, ModelSignature, OpenJob, RequestSession
from edge_server.backends.isolation.isolated_session import IsolatedSession
from edge_server.backends.option_parsers import is_isolated
from edge_server.backends.runtime_errors import existing_file
from edge_server.errors import BadModelConfig
from edge_server.plugins.python_models import triton_python_backend_utils
from edge_server.plugins.python_models.auto_complete_config import auto_complete, auto_complete_in_process
from edge_server.plugins.python_models.execution_thread_choice import PARAMETER, ExecutionThread, execution_thread
from edge_server.plugins.python_models.session import PythonSession

log = logging.getLogger(__name__)

_MODULE_NAMES = ("triton_python_backend_utils", "c_python_backend_utils")
"""Names under which models import pb_utils. The second is the C++ part of Triton's module; some models import it."""


def make(name: str) -> Backend:
    return PythonBackend(name)


class PythonBackend(Backend):
    """Opens Python models in this process or in child processes. Needs no other packages."""

    default_filename = "model.py"
    names_parameters = True
    runs_programs = True
    isolates_itself = True

    def __init__(self, name: str) -> None:
        self.name = name
        for name in _MODULE_NAMES:
            sys.modules[name] = triton_python_backend_utils

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature | None:
        existing_file(file, self.default_filename)
        return None

    def auto_complete(self, file: ModelFile, config_json: str) -> str | None:
        parameters = json.loads(config_json).get("parameters", {})
        texts = {name: value.get("string_value", "") for name, value in parameters.items()}
        if is_isolated(file.model_dir.name, texts):
            return auto_complete_in_process(file, config_json, complete_alone)
        return auto_complete(file, config_json)

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
            return IsolatedSession(job, open_alone)
        return PythonSession(job)


def open_alone(job: OpenJob) -> RequestSession:
    """Open a model in this process, which is its own. For the child process."""
    make("python")  # names the module that models import
    return PythonSession(job, wait_graph=None)


def complete_alone(file: ModelFile, config_json: str) -> str | None:
    """Run the model's `auto_complete_config` in this process, which is its own. For the child process."""
    make("python")
    return auto_complete(file, config_json, is_alone=True)
