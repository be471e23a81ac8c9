"""Commands that a child process of a trial executes on the model that it has opened, and the loop that reads them."""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from edge_server.backends.isolation.json_child_side import write_message
from edge_server.backends.isolation.npz_tensor_files import Tensors, load_tensors, save_tensors
from edge_server.errors import EdgeServerError


class TrialModel(ABC):
    """A model in a child process and its samples. A subclass has a method for each further command."""

    def __init__(self) -> None:
        self._samples: list[Tensors] = []

    @abstractmethod
    def facts(self) -> dict[str, object]:
        """Return what to report to the parent about the opened model."""

    @abstractmethod
    def run(self, sample: Tensors) -> Tensors:
        """Return the outputs for one sample. Raises EdgeServerError."""

    @abstractmethod
    def prepare(self, rows: int, first: int) -> Callable[[], object]:
        """Return the function to measure: it runs `rows` samples, from the sample `first` on."""

    @abstractmethod
    def close(self) -> None: ...

    def load_samples(self, command: Mapping[str, Any]) -> dict[str, object]:
        """Read the samples from a file."""
        self._samples = list(load_tensors(Path(command["from"])))
        return {"count": len(self._samples)}

    def run_samples(self, command: Mapping[str, Any]) -> dict[str, object]:
        """Run the model on every sample and write the outputs to a file."""
        results = [self.run(sample) for sample in self._samples]
        save_tensors(Path(command["to"]), results)
        return {"count": len(results)}

    def measure(self, command: Mapping[str, Any]) -> dict[str, object]:
        """Run the model `runs` times, or until `seconds` have passed, and return the times.

        One run before these is not counted, because it finds cold caches.
        """
        rows, runs, limit_s = int(command["rows"]), int(command["runs"]), float(command["seconds"])
        times_ms: list[float] = []
        end_s = time.perf_counter() + limit_s
        for number in range(-1, runs):
            run = self.prepare(rows, int(command["first"]) + max(number, 0))
            began_s = time.perf_counter()
            run()
            took_s = time.perf_counter() - began_s
            if number >= 0:
                times_ms.append(took_s * 1000)
            if times_ms and time.perf_counter() > end_s:
                break
        return {"times_ms": times_ms}


def execute_commands(model: TrialModel, out: TextIO) -> None:
    """Report the model as opened, execute the commands of standard input until its end or an error, and close the
    model."""
    write_message(out, {"done": model.facts()})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            write_message(out, {"done": getattr(model, command["command"])(command)})
        except EdgeServerError as error:
            write_message(out, {"failed": error.message, "kind": type(error).__name__})
            break
    model.close()
