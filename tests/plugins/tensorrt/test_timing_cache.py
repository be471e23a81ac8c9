"""The timing cache over builds that succeed, fail, are cancelled, or find a damaged cache or one of another GPU.

TensorRT for RTX times nothing. Its real builder builds here; the methods by which TensorRT takes and gives a timing
cache are a double, kept to NVIDIA's documents: a malformed cache makes `create_timing_cache` answer None, one of
another version or GPU is refused by `set_timing_cache`, and `get_timing_cache` answers what the build has added to.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_server.backends.base import ModelFile
from edge_server.plugins.tensorrt.builds.onnx_to_engine import (
    BuildCancelled,
    BuildEnvironment,
    BuildFault,
    build_engine,
)
from edge_server.plugins.tensorrt.engine_order import EngineOrder
from edge_server.plugins.tensorrt.library_adapter import TensorRTLibrary, load_library

pytestmark = pytest.mark.full

onnx = pytest.importorskip("onnx")
pytest.importorskip("tensorrt_rtx")

HEAD = b"timings of this GPU:"


class Cache:
    def __init__(self, known: bytes) -> None:
        self.known = known

    def serialize(self) -> bytes:
        return self.known


class Config:
    """A builder's configuration that takes a timing cache; the rest is the real one's."""

    def __init__(self, real: Any, given: list[bytes]) -> None:
        self.__dict__.update(real=real, given=given, cache=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self.real, name, value)

    def create_timing_cache(self, blob: bytes) -> Cache | None:
        self.given.append(blob)
        return None if b"garbage" in blob else Cache(blob)

    def set_timing_cache(self, cache: Cache, ignore_mismatch: bool) -> bool:
        if cache.known and not cache.known.startswith(HEAD) and not ignore_mismatch:
            return False
        self.cache = cache
        return True

    def get_timing_cache(self) -> Cache:
        assert self.cache is not None
        return self.cache


class Builder:
    """The real builder, whose every build adds a timing, also one that is broken off."""

    def __init__(self, real: Any, given: list[bytes], *, builds: bool) -> None:
        self.real, self.given, self.builds = real, given, builds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def create_builder_config(self) -> Config:
        return Config(self.real.create_builder_config(), self.given)

    def build_serialized_network(self, network: Any, config: Config) -> Any:
        config.cache = Cache((config.get_timing_cache().known or HEAD) + b"+1")
        return self.real.build_serialized_network(network, config.real) if self.builds else None


class Timed:
    """The library that keeps timings. `given`: what each build was given of earlier ones."""

    def __init__(self) -> None:
        self.given: list[bytes] = []
        self.builds = True
        self.real: TensorRTLibrary = load_library("tensorrt_rtx")
        self.trt = self

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__["real"]
        return getattr(own if hasattr(own, name) else own.trt, name)

    def has_timing_cache(self) -> bool:
        return True

    def create(self, factory: str) -> Builder:
        return Builder(self.real.create(factory), self.given, builds=self.builds)


@pytest.fixture
def timed() -> Timed:
    return Timed()


@pytest.fixture
def order(write_onnx: Callable[..., ModelFile]) -> EngineOrder:
    node = onnx.helper.make_node("Relu", ["X"], ["Y"])
    ends = [("X", onnx.TensorProto.FLOAT, [4])], [("Y", onnx.TensorProto.FLOAT, [4])]
    return EngineOrder("made", 1, write_onnx([node], *ends).path, "tensorrt_rtx", "", 0, "fp32", ())


def run(timed: Timed, order: EngineOrder, folder: Path, *, is_cancelled: bool = False) -> None:
    site = BuildEnvironment(folder, (8, 6), folder / "timing.cache")
    build_engine(order, site, timed, lambda phase, percent: None, lambda: is_cancelled)  # type: ignore[arg-type]


def test_a_build_reuses_the_timings_of_the_one_before(timed: Timed, order: EngineOrder, tmp_path: Path) -> None:
    run(timed, order, tmp_path)
    assert (tmp_path / "timing.cache").read_bytes() == HEAD + b"+1"
    run(timed, order, tmp_path)
    assert timed.given == [b"", HEAD + b"+1"]
    assert (tmp_path / "timing.cache").read_bytes() == HEAD + b"+1+1"


def test_a_cancelled_build_leaves_its_timings_to_the_next(timed: Timed, order: EngineOrder, tmp_path: Path) -> None:
    timed.builds = False
    with pytest.raises(BuildCancelled):
        run(timed, order, tmp_path, is_cancelled=True)
    assert (tmp_path / "timing.cache").read_bytes() == HEAD + b"+1"
    with pytest.raises(BuildFault, match="builds no engine"):
        run(timed, order, tmp_path)
    timed.builds = True
    run(timed, order, tmp_path)
    assert timed.given[-1] == HEAD + b"+1+1"
    assert (tmp_path / "engine.plan").stat().st_size > 0


@pytest.mark.parametrize("found", [b"garbage", b"timings of another GPU:+1"], ids=["damaged", "of another GPU"])
def test_incompatible_timings_are_measured_again(
    timed: Timed, order: EngineOrder, tmp_path: Path, found: bytes
) -> None:
    (tmp_path / "timing.cache").write_bytes(found)
    run(timed, order, tmp_path)
    assert timed.given == [found, b""]
    assert (tmp_path / "timing.cache").read_bytes() == HEAD + b"+1"


def test_an_engine_is_kept_even_if_its_timings_cannot_be_saved(
    timed: Timed, order: EngineOrder, tmp_path: Path
) -> None:
    (tmp_path / "timing.cache" / "no file").mkdir(parents=True)
    run(timed, order, tmp_path)
    assert (tmp_path / "engine.plan").stat().st_size > 0
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("capability", [(8, 7), (9, 0), (11, 0)])
def test_an_unknown_compute_capability_is_refused_before_the_build(
    order: EngineOrder, tmp_path: Path, capability: tuple[int, int]
) -> None:
    """TensorRT for RTX would build for another GPU, and the engine would not load."""
    site, library = BuildEnvironment(tmp_path, capability, tmp_path / "timing.cache"), load_library("tensorrt_rtx")
    given = f"{capability[0]}.{capability[1]} of this GPU, only for SM120, .*: use the library tensorrt"
    with pytest.raises(BuildFault, match=given) as failed:
        build_engine(order, site, library, lambda phase, percent: None, lambda: False)
    assert failed.value.is_final
