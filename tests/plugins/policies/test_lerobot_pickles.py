"""Pickles of LeRobot's client: those that it sends are read, and no other one runs anything or takes memory."""

from __future__ import annotations

import contextlib
import pickle
import re
import subprocess
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.errors import InvalidRequest

pytest.importorskip("msgpack", reason="needs msgpack, of the extra policies")
pickles = pytest.importorskip("edge_server.plugins.policies.lerobot_pickles")


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_an_observation_of_the_client_is_read(lerobot: Any, protocol: int) -> None:
    picture = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    raw = {
        "shoulder.pos": 1.5, "elbow.pos": np.float32(2.5), "front": picture, "wrist": np.asfortranarray(picture),
        "wide": np.arange(3, dtype=">i4"),
        "none": np.zeros((0, 3), np.float64), "task": "pick", "flags": [True, None, (1, 2)],
    }  # fmt: skip
    data = pickle.dumps(lerobot.TimedObservation(12.5, 7, raw, True), protocol)
    found = pickles.read_pickle(data)
    assert isinstance(found, pickles.ClientObservation)
    assert (found.timestamp, found.timestep, found.must_go) == (12.5, 7, True)
    values = found.observation
    assert (values["shoulder.pos"], values["elbow.pos"], values["task"]) == (1.5, 2.5, "pick")
    assert values["flags"] == [True, None, [1, 2]]
    for name in ("front", "wrist", "wide", "none"):
        assert values[name].tolist() == raw[name].tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("protocol", [3, 4])
def test_the_policy_that_a_client_wants_is_read(lerobot: Any, protocol: int) -> None:
    features = {"observation.state": {"dtype": "float32", "shape": (2,), "names": ["a.pos", "b.pos"]},
                "other": lerobot.PolicyFeature(lerobot.FeatureType.STATE, (2,))}  # fmt: skip
    found = pickles.read_pickle(
        pickle.dumps(lerobot.RemotePolicyConfig("act", "me/act", features, 50, "cpu"), protocol)
    )
    assert isinstance(found, pickles.ClientPolicy)
    assert (found.pretrained_name_or_path, found.actions_per_chunk) == ("me/act", 50)
    assert found.lerobot_features["observation.state"]["names"] == ["a.pos", "b.pos"]


def test_actions_are_read_by_the_client(lerobot: Any) -> None:
    rows = [pickles.TimedRow(1.5 + at, 3 + at, np.float32([at, -0.1])) for at in range(3)]
    found = pickle.loads(pickles.write_actions(rows))
    assert [type(item) for item in found] == [lerobot.TimedAction] * 3
    assert [(item.timestamp, item.timestep) for item in found] == [(1.5, 3), (2.5, 4), (3.5, 5)]
    assert [item.action.tolist() for item in found] == [row.action.tolist() for row in rows]
    assert pickle.loads(pickles.write_actions([])) == []


class Runs:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return subprocess.call, (["false"],)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps(Runs()), "the pickle names subprocess.call, which is not read here"),
        (b"cos\nsystem\n(S'id'\ntR.", "the pickle has the instruction STRING, which is not read here"),
        (b"cbuiltins\neval\n.", "the pickle names builtins.eval"),
        (b"\x80\x04K\x01K\x02\x93.", "expected a pickle of LeRobot's client"),
        (b"\x80\x04\x8c\x05numpy\x8c\x08fromfile\x93.", "the pickle names numpy.fromfile"),
        (b"\x80\x04\x8c\x0elerobot.common\x8c\x01x\x93.", "the pickle names lerobot.common.x"),
        (b"\x80\x02\x82\x01.", "the instruction EXT1"),
        (b"\x80\x02K\x01Q.", "the instruction BINPERSID"),
        (b"\x80\x02]r\xff\xff\xff\xff.", "the instruction LONG_BINPUT"),
        (b"", "expected a pickle of LeRobot's client"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "expected a pickle of LeRobot's client"),
        (b"\x80\x02" + b"N" * 200_000 + b".", "the instruction NONE"),
        (b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R.", "expected an array of numbers as numpy pickles it"),
        (b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R(K\x01Nttb.", "expected"),
        (b"\x80\x02cnumpy\ndtype\n.", None),
        (b"\x80\x02}(K\x01", "expected a pickle of LeRobot's client"),
    ],
)
def test_any_other_pickle_is_refused(data: bytes, message: str | None) -> None:
    if message is None:
        pickles.read_pickle(data)
        return
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        pickles.read_pickle(data)


@pytest.mark.parametrize(
    "value", [np.array([1 + 2j]), np.array(["text"]), np.array([object()], object), np.zeros(1, [("a", "f4")])]
)
def test_arrays_of_other_types_are_refused(value: Any) -> None:
    with contextlib.suppress(TypeError, pickle.PicklingError), pytest.raises(InvalidRequest):
        pickles.read_pickle(pickle.dumps({"value": value}))


def test_an_array_takes_no_memory_for_a_shape_that_its_bytes_do_not_fill() -> None:
    data = pickle.dumps(np.zeros((1000,), np.float32), 4).replace(b"M\xe8\x03", b"J\xff\xff\xff\x7f")
    with pytest.raises(InvalidRequest, match=r"expected 8589934588 bytes for an array \[2147483647\]"):
        pickles.read_pickle(data)


def test_values_that_are_shared_are_read_once() -> None:
    value: Any = [0]
    for _ in range(60):
        value = [value, value]
    found = pickles.read_pickle(pickle.dumps(value))
    assert found[0] is found[1]


def test_a_value_in_itself_ends() -> None:
    value: list[Any] = []
    value.append(value)
    assert pickles.read_pickle(pickle.dumps(value)) == [None]


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200), at=st.integers(0, 10_000), new=st.integers(0, 255))
def test_any_bytes_are_read_or_refused(data: bytes, at: int, new: int) -> None:
    good = bytearray(pickle.dumps({"a": np.arange(3), "b": ["x", 1.5]}))
    good[at % len(good)] = new
    for tried in (data, b"\x80\x04" + data, bytes(good)):
        with contextlib.suppress(InvalidRequest):
            pickles.read_pickle(tried)
