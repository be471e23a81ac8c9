"""Interface of the engines for a trial: a model is opened outside of a server by a backend that first builds an engine.

The plugin of such a backend declares them by `Plugin.trial_engines`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

from edge_server.backends.base import ServerCalls
from edge_server.core.model_spec import ModelFile, ModelSpec


class BuiltNotRun(Exception):
    """The engine was built but cannot run on this machine. The message is the reason."""


class TrialEngines(abc.ABC):
    """Provides the engine of one version to its backend. Used by one thread."""

    @abc.abstractmethod
    def best_shapes(self, shapes: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
        """Return the shape for which an engine is the fastest, by input. `shapes` are the values of the parameters that
        TrialEngineSettings names. Raises BadModelConfig."""

    @abc.abstractmethod
    def server(self, device_id: int | None, settings: Mapping[str, str]) -> ServerCalls:
        """Find or build the engine, and return the server that gives it to `Backend.open`; all other calls of it fail.

        Raises LoadError, and BuiltNotRun if there is no GPU to run it.
        """

    @abc.abstractmethod
    def release_build_lock(self) -> None:
        """Let other processes build the engine. Called after the backend has read it, or failed to."""

    @abc.abstractmethod
    def keep_engine(self, difference: float, reference: str) -> bool:
        """Keep the engine for the next server. Return False if it is kept already or was not built here.

        `difference` is that of its answers from those of `reference`. Raises LoadError.
        """


class TrialEngineSettings(NamedTuple):
    """How a plugin builds engines for trials. A value of JSON as a list."""

    maker: str
    """"module:function" that returns TrialEngines; see `make`."""
    shape_parameters: Sequence[str]
    """Names of the parameters with the least, the best and the greatest shapes of an engine's inputs."""
    cache_dir: str
    build_timeout_s: float

    def make(
        self, spec: ModelSpec, file: ModelFile, scratch: Path, progress: Callable[[str, float], None]
    ) -> TrialEngines:
        """`progress` gets the step of a build and its percent. `scratch` is a folder for temporary files."""
        made: TrialEngines = resolve_name(self.maker)(spec, file, self, scratch, progress)
        return made
