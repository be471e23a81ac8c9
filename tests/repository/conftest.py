"""A repository on disk, and runtimes that tests describe, in place of the real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import edge_server.backends as backends
from edge_server.backends.base import Backend, ModelFile, ModelSignature, OpenJob, RequestSession, Session
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import LoadError
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.resolve_version import ResolveOptions, resolve

if TYPE_CHECKING:
    AddModel = Callable[..., Path]


class DescribedBackend(Backend):
    """Reports a given signature; refuses files whose content is the byte 8 and "corrupt"."""

    def __init__(self, name: str, default_filename: str, signature: ModelSignature | None) -> None:
        self.name = name
        self.default_filename = default_filename
        self.signature = signature
        self.inspected: list[tuple[ModelFile, Mapping[str, str]]] = []

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature | None:
        self.inspected.append((file, dict(parameters)))
        if file.path.is_file() and file.path.read_bytes() == b"\x08corrupt":
            raise LoadError(f"{self.name} cannot parse '{file.path.name}'")
        return self.signature

    def open(self, job: OpenJob) -> Session | RequestSession:
        raise AssertionError("the repository opens no sessions")


def _signature(
    inputs: Mapping[str, tuple[DType, tuple[int, ...]]],
    outputs: Mapping[str, tuple[DType, tuple[int, ...]]],
    *,
    is_batchable: bool = True,
) -> ModelSignature:
    return ModelSignature(
        tuple(InputSpec(name, dtype, dims) for name, (dtype, dims) in inputs.items()),
        tuple(OutputSpec(name, dtype, dims) for name, (dtype, dims) in outputs.items()),
        is_batchable,
    )


@pytest.fixture
def signature() -> Callable[..., ModelSignature]:
    """Make a signature of {name: (dtype, dims)} for inputs and outputs."""
    return _signature


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Callable[..., DescribedBackend]:
    """Put a described backend in the place of the one of that name."""

    def install(name: str, default_filename: str, signature: ModelSignature | None = None) -> DescribedBackend:
        backend = DescribedBackend(name, default_filename, signature)
        monkeypatch.setitem(backends._MODULES, name, "edge_server.backends.builtin_models")
        monkeypatch.setitem(backends._made, name, backend)
        return backend

    return install


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    return path


@pytest.fixture
def add_model(root: Path) -> AddModel:
    """Write a model: files by relative path, config.pbtxt as text, empty version folders by number."""

    def add(
        name: str,
        config: str | None = None,
        files: Mapping[str, bytes] | None = None,
        versions: tuple[int, ...] = (1,),
        at: Path | None = None,
    ) -> Path:
        path = (at or root) / name
        for version in versions:
            (path / str(version)).mkdir(parents=True)
        for relative, content in (files or {}).items():
            (path / relative).parent.mkdir(parents=True, exist_ok=True)
            (path / relative).write_bytes(content)
        if config is not None:
            (path / "config.pbtxt").write_text(config)
        return path

    return add


@pytest.fixture
def counted() -> type[str]:
    """A class of texts; its `compared` counts how often any of them was compared."""

    class Counted(str):
        __slots__ = ()
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    return Counted


@pytest.fixture
def resolved(root: Path, add_model: Callable[..., Path]) -> Callable[[str], ModelSpec]:
    """Takes the configuration of a model and returns what is promised by it."""

    def call(config: str) -> ModelSpec:
        add_model("m", config)
        model = Scanner([root]).find("m")
        assert model is not None
        return resolve(model, 1, ResolveOptions()).spec

    return call
