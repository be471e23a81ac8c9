"""The rule that says what counts after each state, against an oracle that remembers every look there was."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.model_spec import VersionPolicy
from edge_server.repository.disk.file_fingerprint import FolderScan
from edge_server.repository.disk.incomplete_copy_detection import (
    NOTHING,
    UPLOAD_PATIENCE_S,
    FolderState,
    RepositoryRoot,
    UploadState,
    changes,
    update_uploads,
)
from edge_server.repository.disk.scan import ModelDirectory, VersionOnDisk, with_versions

ROOT = Path("/models")
SETTLE_S = 0.5
WALL_NS = 1_800_000_000_000_000_000
ALL = VersionPolicy(latest=None)


def model(name: str, config: str, versions: dict[int, str], **trace: Any) -> ModelDirectory:
    """A model whose parts are given as words, which are also the versions' fingerprints."""
    found = ModelDirectory(name, ROOT / name, fingerprint=config, policy=ALL, files=FolderScan(config, config, **trace))
    return with_versions(found, [version(number, word) for number, word in versions.items()])


def version(number: int, word: str, **trace: Any) -> VersionOnDisk:
    return VersionOnDisk(number, word, FolderScan(word, word, **trace))


PLAIN = RepositoryRoot(SETTLE_S, has_local_times=False)


def look(at_s: float, *models: ModelDirectory, root: RepositoryRoot = PLAIN, **more: Any) -> FolderState:
    wall_ns = WALL_NS + round(at_s * 1e9)
    return FolderState(at_s, wall_ns, {found.name: found for found in models}, {ROOT: root}, **more)


def looks(*several: FolderState) -> UploadState:
    settled = NOTHING
    for one in several:
        settled = update_uploads(settled.known, one)
    return settled


def contents(settled: UploadState) -> dict[str, tuple[str, dict[int, str]]]:
    return {
        name: (found.fingerprint, {item.number: item.fingerprint for item in found.versions})
        for name, found in settled.models().items()
    }


# -- the oracle -----------------------------------------------------------------------------------------------------

CONFIG = 0
"""The oracle's key of the files outside the versions."""


@dataclass
class World:
    """One model: parts by key, which of them are being written, and what every look so far saw."""

    parts: dict[int, str] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    seen: list[tuple[float, dict[int, str]]] = field(default_factory=list)
    counts: dict[int, str] | None = None

    def on_disk(self) -> dict[int, str]:
        """Versions are below the model's directory: without it there are none."""
        return dict(self.parts) if CONFIG in self.parts else {}

    def look(self, at_s: float) -> FolderState:
        now = self.on_disk()
        self.seen.append((at_s, now))
        self.counts = self._counted_model(at_s, now)
        written = {f"{ROOT}/m/{key}/weights" if key else f"{ROOT}/m/config.pbtxt" for key in self.written & now.keys()}
        if CONFIG not in now:
            return look(at_s, written=written)
        found = model("m", now[CONFIG], {key: word for key, word in now.items() if key != CONFIG})
        return look(at_s, found, written=written)

    def _has_settled(self, key: int, at_s: float, now: dict[int, str]) -> bool:
        if key in self.written and key in now:
            return False
        since_s = at_s
        for time_s, parts in reversed(self.seen):
            if parts.get(key) != now.get(key):
                break
            since_s = time_s
        return at_s - since_s >= SETTLE_S

    def _counted_model(self, at_s: float, now: dict[int, str]) -> dict[int, str] | None:
        ever = {key for _, parts in self.seen for key in parts}
        restless = {key for key in ever if not self._has_settled(key, at_s, now)}
        if not restless:
            return now or None
        if not now or CONFIG in restless:
            return self.counts
        calm = {key: word for key, word in now.items() if key not in restless}
        if self.counts is None:
            return calm if len(calm) > 1 else None
        if self.counts[CONFIG] != now[CONFIG]:
            return self.counts
        return calm | {key: word for key, word in self.counts.items() if key in restless}


WORDS = st.sampled_from(["a", "b", "c"])
KEYS = st.sampled_from([CONFIG, 1, 2, 3])
OPERATIONS = st.one_of(
    st.tuples(st.just("write"), KEYS, WORDS),
    st.tuples(st.just("remove"), KEYS, st.just("")),
    st.tuples(st.just("open"), KEYS, st.just("")),
    st.tuples(st.just("close"), KEYS, st.just("")),
    st.tuples(st.just("remove all"), st.just(CONFIG), st.just("")),
)
STEPS = st.lists(st.tuples(st.lists(OPERATIONS, max_size=3), st.sampled_from([0.1, 0.25, 0.5, 3.0])), max_size=25)


def act(world: World, operation: tuple[str, int, str]) -> None:
    match operation:
        case "write", key, word:
            world.parts[key] = word
        case "remove", key, _:
            world.parts.pop(key, None)
            world.written.discard(key)
        case "open", key, _:
            world.written |= {key} & world.parts.keys()
        case "close", key, _:
            world.written.discard(key)
        case "remove all", _, _:
            world.parts.clear()
            world.written.clear()


@given(STEPS)
def test_after_any_file_operations_only_settled_parts_count(
    steps: Iterable[tuple[list[tuple[str, int, str]], float]],
) -> None:
    world, settled, now_s = World(), NOTHING, 100.0
    for operations, pause_s in steps:
        for operation in operations:
            act(world, operation)
        settled = update_uploads(settled.known, world.look(now_s))
        found = contents(settled).get("m")
        assert found == (
            None
            if world.counts is None
            else (world.counts[CONFIG], {key: word for key, word in world.counts.items() if key != CONFIG})
        )
        now_s += pause_s
    world.written.clear()
    for pause_s in (0.0, SETTLE_S):
        now_s += pause_s
        settled = update_uploads(settled.known, world.look(now_s))
    at_rest = world.on_disk()
    assert contents(settled) == ({"m": (at_rest.pop(CONFIG), at_rest)} if at_rest else {})
    assert settled.next_scan_s is None


@given(STEPS)
def test_an_untouched_version_counts_all_the_time(
    steps: Iterable[tuple[list[tuple[str, int, str]], float]],
) -> None:
    world, now_s = World({CONFIG: "a", 7: "kept"}), 100.0
    settled = update_uploads(update_uploads({}, world.look(now_s)).known, world.look(now_s + SETTLE_S))
    for operations, pause_s in steps:
        for operation in operations:
            if operation[0] not in ("remove", "remove all") or operation[1] != CONFIG:
                act(world, operation)
        now_s += pause_s + SETTLE_S
        settled = update_uploads(settled.known, world.look(now_s))
        assert contents(settled)["m"][1][7] == "kept"


# -- the cases by name ----------------------------------------------------------------------------------------------


def test_two_looks_that_find_the_same_settle_a_model_and_the_second_is_asked_for() -> None:
    found = model("m", "c", {1: "a"})
    first = looks(look(10, found))
    assert (contents(first), first.next_scan_s) == ({}, 10 + SETTLE_S)
    assert contents(looks(look(10, found), look(10.4, found))) == {}
    assert contents(looks(look(10, found), look(10.4, found), look(10.5, found))) == {"m": ("c", {1: "a"})}


def _aged(age_s: float) -> ModelDirectory:
    changed_ns = WALL_NS + round((10 - age_s) * 1e9)
    found = model("m", "c", {}, changed_ns=changed_ns)
    return with_versions(found, [version(1, "a", changed_ns=changed_ns)])


def test_files_whose_change_times_are_old_need_no_second_look() -> None:
    local = RepositoryRoot(SETTLE_S, has_local_times=True)
    assert contents(looks(look(10, _aged(0.6), root=local))) == {"m": ("c", {1: "a"})}
    young = looks(look(10, _aged(0.25), root=local))
    assert (contents(young), young.next_scan_s) == ({}, 10.25)


def test_change_times_are_not_believed_after_the_clock_was_set_nor_from_another_machine_nor_from_the_future() -> None:
    local = RepositoryRoot(SETTLE_S, has_local_times=True)
    assert contents(looks(look(10, _aged(1e6), root=local, steady_s=0.1))) == {}
    assert contents(looks(look(10, _aged(1e6)))) == {}
    assert contents(looks(look(10, _aged(-1e6), root=local))) == {}


def test_a_directory_renamed_into_place_counts_at_once_unless_it_is_still_written_to() -> None:
    before, after = model("m", "c", {1: "a"}), model("m", "c", {1: "a", 2: "b"})
    settled = looks(look(10, before), look(11, before))
    moved = look(12, after, renamed_folders={"/models/m/2"})
    assert contents(update_uploads(settled.known, moved)) == {"m": ("c", {1: "a", 2: "b"})}
    busy = replace(moved, written={"/models/m/2/weights"})
    assert contents(update_uploads(settled.known, busy)) == {"m": ("c", {1: "a"})}
    assert contents(looks(look(10, after, renamed_folders={"/models/m"}))) == {"m": ("c", {1: "a", 2: "b"})}


def test_links_are_seen_through_when_files_are_written_to() -> None:
    found = model("m", "c", {1: "a"})
    places = {"/models/m": "/releases/42"}
    several = [look(at, found, written={"/releases/42/1/weights"}, real_paths=places) for at in (10, 11, 12)]
    assert contents(looks(*several)) == {}
    assert contents(looks(*(replace(one, real_paths={}) for one in several))) == {"m": ("c", {1: "a"})}


def test_an_unfinished_upload_beside_a_version_holds_it_back_until_it_is_given_up() -> None:
    def found(at_s: float) -> FolderState:
        uploaded = version(2, "b", upload=".model.onnx.AbC123", upload_ns=WALL_NS + round(20 * 1e9))
        return look(at_s, with_versions(model("m", "c", {}), [version(1, "a"), uploaded]))

    assert contents(looks(found(20), found(25))) == {"m": ("c", {1: "a"})}
    late = 20 + UPLOAD_PATIENCE_S
    assert contents(looks(found(20), found(25), found(late))) == {"m": ("c", {1: "a", 2: "b"})}


@pytest.mark.parametrize("jump_s", [3600, -3600, 86_400, -86_400])
def test_a_clock_that_is_set_does_not_give_an_unfinished_upload_up(jump_s: int) -> None:
    def found(at_s: float, jumped_at_s: float = math.inf) -> FolderState:
        uploaded = version(2, "b", upload=".model.onnx.AbC123", upload_ns=WALL_NS + round(20 * 1e9))
        has_jumped = at_s >= jumped_at_s
        state = look(at_s, with_versions(model("m", "c", {}), [version(1, "a"), uploaded]))
        steady_s = at_s - jumped_at_s if has_jumped else math.inf
        return replace(state, wall_ns=state.wall_ns + jump_s * 10**9 * has_jumped, steady_s=steady_s)

    assert contents(looks(found(20), found(25, 24))) == {"m": ("c", {1: "a"})}
    assert contents(looks(found(20), found(53, 24))) == {"m": ("c", {1: "a"})}
    assert contents(looks(found(20), found(24 + UPLOAD_PATIENCE_S, 24))) == {"m": ("c", {1: "a", 2: "b"})}


def test_nothing_is_known_of_a_root_that_is_away_and_nothing_is_lost() -> None:
    found = model("m", "c", {1: "a"})
    away = RepositoryRoot(SETTLE_S, is_unreadable=True)
    settled = looks(look(10, found), look(11, found), look(12, root=away), look(100, root=away))
    assert contents(settled) == {"m": ("c", {1: "a"})}
    assert contents(update_uploads(update_uploads(settled.known, look(101)).known, look(102))) == {}


def test_a_root_that_is_held_waits_as_a_whole() -> None:
    before, after = model("m", "c", {1: "a"}), model("m", "c", {1: "b"})
    held = RepositoryRoot(SETTLE_S, has_local_times=False, is_being_written=True)
    settled = looks(
        look(10, before), look(11, before), look(12, after, root=held), look(20, after, root=held), look(21, root=held)
    )
    assert contents(settled) == {"m": ("c", {1: "a"})}
    assert settled.next_scan_s is not None
    assert contents(update_uploads(settled.known, look(22, after))) == {"m": ("c", {1: "a"})}


def test_a_change_of_the_configuration_waits_for_a_version_that_is_on_its_way() -> None:
    old, new = model("m", "old", {1: "a"}), model("m", "new", {1: "a", 2: "half"})
    settled = looks(look(10, old), look(11, old), look(12, new), look(13, new, written={"/models/m/2/weights"}))
    assert contents(settled) == {"m": ("old", {1: "a"})}
    assert contents(update_uploads(settled.known, look(14, new))) == {"m": ("new", {1: "a", 2: "half"})}


def test_a_part_that_was_found_to_be_written_does_not_count_while_the_others_do() -> None:
    first = looks(look(0, model("m", "c", {1: "a"})), look(1, model("m", "c", {1: "a"})))
    both = model("m", "c", {1: "b", 2: "a"})
    seen = update_uploads(first.known, look(2, both))
    settled = update_uploads(seen.known, look(3, both))
    held = update_uploads(seen.known, look(3, both, busy=[("m", 2)]))
    assert [(name, key) for name, key, _ in changes(seen, settled)] == [("m", 1), ("m", 2)]
    assert [(name, key) for name, key, _ in changes(seen, held)] == [("m", 1)]
    assert contents(held) == {"m": ("c", {1: "b"})}
    assert held.next_scan_s == 4
    assert contents(update_uploads(held.known, look(4, both))) == {"m": ("c", {1: "b", 2: "a"})}
    assert list(changes(settled, looks(look(5)))) == []


def test_a_configuration_that_was_found_to_be_written_holds_the_model_back() -> None:
    first = looks(look(0, model("m", "c", {1: "a"})), look(1, model("m", "c", {1: "a"})))
    changed = model("m", "d", {1: "a"})
    seen = update_uploads(first.known, look(2, changed))
    assert [(name, key) for name, key, _ in changes(seen, update_uploads(seen.known, look(3, changed)))] == [
        ("m", None)
    ]
    assert contents(update_uploads(seen.known, look(3, changed, busy=[("m", None)]))) == {"m": ("c", {1: "a"})}
