"""Trial model in an embedded server, for what one session cannot run: ensembles, Python models that call others,
several instances."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import edge_server
from edge_server.backends.isolation.npz_tensor_files import Tensors, save_tensors
from edge_server.core.status_reports import find_failed
from edge_server.errors import LoadError, ServingFault
from edge_server.plugins.trials.sample_inputs import read_arrays
from edge_server.plugins.trials.trial_commands import TrialModel


class ServedModel(TrialModel):
    """One model in an embedded server. It may be what no single session runs: an ensemble, a Python model that calls
    others, a model with several instances. `OpenedModel` runs one session alone, so that runtimes can be compared."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        """Load the model. Raises LoadError, and ServingFault if the reason lies in this machine."""
        super().__init__()
        self._model: str = job["model"]
        self._server = edge_server.Server(
            job["root"],
            model_control_mode="explicit",
            load_model=[self._model],
            # The repository of a trial may consist of links to models that are elsewhere.
            allow_external_links=True,
            governor=False,
            exit_on_error=False,
        ).start()
        entries = [entry for entry in self._server.models() if entry.name == self._model]
        for entry in find_failed(entries):
            kind = ServingFault if entry.is_machines_fault else LoadError
            raise kind(f"it cannot be loaded: {entry.reason}")
        if not any(entry.state == "READY" for entry in entries):
            raise LoadError("it cannot be loaded: no version of it is ready")

    def facts(self) -> dict[str, object]:
        return {}

    def make_samples(self, command: Mapping[str, Any]) -> dict[str, object]:
        """Write the request of an .npz file to one file, and the arrays whose names begin with `prefix` to another."""
        arrays, prefix = read_arrays(Path(command["input"])), command["prefix"]
        inputs = {name: array for name, array in arrays.items() if not name.startswith(prefix)}
        expected = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        save_tensors(Path(command["to"]), [inputs])
        save_tensors(Path(command["expected"]), [expected])
        return {"has_expected": bool(expected)}

    def run(self, sample: Tensors) -> Tensors:
        return self._server.infer(self._model, sample).outputs

    def prepare(self, rows: int, first: int) -> Callable[[], object]:
        return partial(self._server.infer, self._model, self._samples[first % len(self._samples)])

    def close(self) -> None:
        self._server.stop()
