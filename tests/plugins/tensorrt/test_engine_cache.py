"""Engine key and engine cache: hit, every type of miss, damage, atomic writes, eviction."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edge_server.backends.cuda.cuda_driver import CudaDevice
from edge_server.plugins.tensorrt.builds.engine_cache import EngineCache, EngineCacheFault
from edge_server.plugins.tensorrt.builds.engine_key import EngineKey, FileHashes, GpuIdentity, key_of, read_gpu_identity
from edge_server.plugins.tensorrt.engine_order import EngineOrder, Range

DEVICE = CudaDevice("Orin (nvgpu)", (8, 7), 8 << 30, True)
BOX = GpuIdentity("36.4.3", "248")


@pytest.fixture
def order(tmp_path: Path) -> EngineOrder:
    path = tmp_path / "seen" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"a model, with weights in weights.bin")
    profile = {"X": Range((1, 4), (4, 4), (8, 4))}
    return EngineOrder("seen", 1, path, "tensorrt", "10.3.0", 0, "fp16", (profile,), {"trt_dla_core": "0"})


def key(order: EngineOrder, device: CudaDevice = DEVICE, machine: GpuIdentity = BOX) -> EngineKey:
    return key_of(order, device, machine, FileHashes())


@pytest.fixture
def cache(tmp_path: Path) -> EngineCache:
    made = EngineCache(tmp_path / "cache")
    made.open()
    return made


def put(cache: EngineCache, key: EngineKey, plan: bytes = b"plan" * 100, model: str = "seen") -> None:
    import hashlib

    folder = cache.work_folder(key)
    (folder / "engine.plan").write_bytes(plan)
    facts = {"model": model, "version": 1, "plan_sha256": hashlib.sha256(plan).hexdigest()}
    cache.note_built(key, facts)
    assert cache.built(key) is not None
    cache.commit(key, {**facts, "difference": 0.0})


def test_the_same_options_on_the_same_machine_are_a_hit(order: EngineOrder, cache: EngineCache) -> None:
    assert cache.find(key(order)) is None
    put(cache, key(order))
    found = cache.find(key(replace(order, tolerance=0.5)))
    assert found is not None
    assert found.plan.read_bytes() == b"plan" * 100
    assert cache.size() == (1, 400)


OTHERS: dict[str, tuple[str, Callable[[EngineOrder], EngineKey]]] = {
    "library": ("another library", lambda o: key(replace(o, library="tensorrt_rtx"))),
    "version": ("TensorRT's version changed", lambda o: key(replace(o, library_version="10.3.1"))),
    "device": ("another GPU", lambda o: key(o, device=replace(DEVICE, name="Thor"))),
    "capability": ("another compute capability", lambda o: key(o, device=replace(DEVICE, capability=(11, 0)))),
    "l4t": ("the Jetson's system release changed", lambda o: key(o, machine=replace(BOX, l4t="36.5"))),
    "tpc": ("the power mode", lambda o: key(o, machine=replace(BOX, tpc_mask="240"))),
    "precision": ("another precision", lambda o: key(replace(o, precision="fp32"))),
    "profiles": ("other profiles", lambda o: key(replace(o, profiles=({"X": Range((1, 4), (4, 4), (9, 4))},)))),
    "options": ("other options", lambda o: key(replace(o, options={}))),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_change_of_any_dependency_is_a_miss_that_names_it(kind: str, order: EngineOrder, cache: EngineCache) -> None:
    said, other = OTHERS[kind]
    put(cache, key(order))
    assert cache.find(other(order)) is None
    assert said in cache.why_missing(other(order), "seen", 1)
    assert cache.why_missing(other(order), "another", 1) == ""


@pytest.mark.parametrize("name", ["model.onnx", "weights.bin"])
def test_a_changed_file_is_a_miss(name: str, order: EngineOrder, cache: EngineCache) -> None:
    (order.path.parent / "weights.bin").write_bytes(b"1")
    put(cache, key(order))
    (order.path.parent / name).write_bytes(b"2 weights.bin")
    assert cache.find(key(order)) is None
    assert cache.why_missing(key(order), "seen", 1) == "the model's file changed"


def test_a_file_that_the_model_does_not_name_does_not_matter(order: EngineOrder) -> None:
    before = key(order).digest
    (order.path.parent / "notes.txt").write_text("nothing")
    assert key(order).digest == before


def test_a_tensorrt_plugin_is_part_of_the_key(order: EngineOrder, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.so"
    plugin.write_bytes(b"1")
    order = replace(order, options={"trt_extra_plugin_lib_paths": str(plugin)})
    before = key(order).digest
    plugin.write_bytes(b"22")
    assert key(order).digest != before


def test_an_unchanged_file_is_hashed_once(order: EngineOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = FileHashes()
    first = hashes.of_model(order.path)
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", None)
        assert hashes.of_file(order.path) == first
    order.path.write_bytes(b"other")
    assert hashes.of_file(order.path) != first


def test_a_damaged_plan_is_deleted_and_never_opened(order: EngineOrder, cache: EngineCache) -> None:
    put(cache, key(order))
    found = cache.find(key(order))
    assert found is not None
    content = bytearray(found.plan.read_bytes())
    content[7] ^= 1
    before = found.plan.stat()
    found.plan.write_bytes(content)
    # Its time is no proof that it is the plan that was verified.
    os.utime(found.plan, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cache.find(key(order)) is None
    assert not found.plan.exists()


def test_an_unverified_engine_is_no_hit(order: EngineOrder, cache: EngineCache) -> None:
    folder = cache.work_folder(key(order))
    (folder / "engine.plan").write_bytes(b"whole")
    cache.note_built(key(order), {"plan_sha256": "of something else"})
    assert cache.built(key(order)) is None
    assert cache.find(key(order)) is None


def test_least_recently_used_engines_are_evicted(order: EngineOrder, tmp_path: Path) -> None:
    cache = EngineCache(tmp_path / "small", limit_bytes=1000)
    cache.open()
    keys = [key(replace(order, library_version=str(number))) for number in range(3)]
    put(cache, keys[0])
    put(cache, keys[1])
    for age, item in ((100, keys[1]), (50, keys[0])):
        os.utime(tmp_path / "small" / "engines" / item.digest, (age, age))
    os.utime(tmp_path / "small" / "engines" / keys[0].digest, (200, 200))
    put(cache, keys[2])
    assert [cache.find(item) is not None for item in keys] == [True, False, True]


def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EngineCacheFault, match="engines cannot be kept in"):
        EngineCache(tmp_path / "file" / "cache").open()


def test_only_this_user_can_access_the_cache(cache: EngineCache, tmp_path: Path) -> None:
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


NVPMODEL = """
< POWER_MODEL ID=0 NAME=15W >
TPC_POWER_GATING TPC_PG_MASK 252
GPU MAX_FREQ 624750000
< POWER_MODEL ID=2 NAME=MAXN_SUPER >
TPC_POWER_GATING TPC_PG_MASK 248
"""


def test_the_key_of_a_jetson_contains_release_and_power_mode(tmp_path: Path) -> None:
    assert read_gpu_identity(tmp_path) == GpuIdentity()
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text("# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic\n")
    assert read_gpu_identity(tmp_path) == GpuIdentity("36.4.3", "")
    (tmp_path / "etc/nvpmodel.conf").write_text(NVPMODEL)
    (tmp_path / "var/lib/nvpmodel").mkdir(parents=True)
    (tmp_path / "var/lib/nvpmodel/status").write_text("pmode:0002 fmode:quiet\n")
    assert read_gpu_identity(tmp_path) == GpuIdentity("36.4.3", "248")


def test_a_temporarily_unreadable_engine_is_a_miss_and_is_kept(
    order: EngineOrder, cache: EngineCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = key(order)
    put(cache, wanted)
    plan = tmp_path / "cache" / "engines" / wanted.digest / "engine.plan"

    def stutter(path: Path, *_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patched:
        patched.setattr("edge_server.plugins.tensorrt.builds.engine_cache.open", stutter, raising=False)
        assert cache.find(wanted) is None
    assert plan.exists()
    assert cache.find(wanted) is not None


def test_an_engine_that_vanishes_during_the_lookup_is_a_miss(
    order: EngineOrder, cache: EngineCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, key(order))
    plain = Path.is_file

    def then_gone(path: Path) -> bool:
        found = plain(path)
        if path.name == "engine.plan":
            EngineCache(cache._folder).drop(key(order))
        return found

    monkeypatch.setattr(Path, "is_file", then_gone)
    assert cache.find(key(order)) is None


def test_a_deleted_cache_folder_is_empty_and_filled_again(
    order: EngineOrder, cache: EngineCache, tmp_path: Path
) -> None:
    wanted = key(order)
    put(cache, wanted)
    shutil.rmtree(tmp_path / "cache")
    assert cache.size() == (0, 0)
    assert cache.find(wanted) is None
    claim = cache.claim(wanted)
    assert claim is not None
    with claim:
        put(cache, wanted)
    assert cache.find(wanted) is not None
