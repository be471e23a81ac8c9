"""Records: they behave as the dataclasses that they are, and only `__init__` is compiled."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import pickle
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from edge_server.record import record


@record(frozen=True, slots=True)
class Frozen:
    name: str
    secret: str = field(default="s", repr=False)
    note: str = field(default="", compare=False)
    values: list[int] = field(default_factory=list, compare=False)


@record(slots=True)
class Mutable:
    count: int = 0
    parts: dict[str, object] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{self.count} parts"


@record(slots=True, eq=False)
class Identity:
    count: int = 0


@dataclass(frozen=True, slots=True)
class Twin:
    name: str
    secret: str = field(default="s", repr=False)
    note: str = field(default="", compare=False)
    values: list[int] = field(default_factory=list, compare=False)


def test_equality_hash_and_text_take_the_fields_that_a_dataclass_takes() -> None:
    one, other = Frozen("a", note="x"), Frozen("a", note="y", values=[1])
    assert (one, hash(one)) == (other, hash(other))
    assert one != Frozen("b")
    assert one != Frozen("a", secret="t")
    assert repr(one) == repr(Twin("a", note="x")).replace("Twin", "Frozen")
    assert one.__eq__(Twin("a")) is NotImplemented


def test_records_of_one_field_and_of_none_equal_those_with_the_same_values() -> None:
    @record(frozen=True, slots=True)
    class One:
        value: object

    @record(frozen=True, slots=True)
    class Nothing:
        """Has no field."""

    nan = float("nan")
    assert (One(nan), One(1)) == (One(nan), One(1))
    assert (Nothing(), hash(Nothing()), repr(Nothing()).rpartition(".")[2]) == (Nothing(), hash(()), "Nothing()")
    assert One(1) != Nothing()


def test_an_own_method_stays() -> None:
    assert repr(Mutable(2)) == "2 parts"


def test_only_frozen_records_have_a_hash_and_those_without_equality_are_themselves() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(Mutable())
    assert Mutable(1) == Mutable(1)
    assert Identity(1) != Identity(1)
    assert len({Identity(1), Identity(1)}) == 2


def test_a_record_that_holds_itself_has_a_text() -> None:
    held = Frozen("a", values=[])
    held.values.append(held)  # type: ignore[arg-type]
    assert repr(held) == "Frozen(name='a', note='', values=[...])"


@pytest.mark.parametrize("item", [Frozen("a", values=[1]), Mutable(3, {"a": 1}), Identity(4)])
def test_records_are_dataclasses_that_can_be_copied_and_pickled(item: Any) -> None:
    names = [one.name for one in dataclasses.fields(item)]
    assert not hasattr(item, "__dict__")
    for twin in (copy.deepcopy(item), replace(item), pickle.loads(pickle.dumps(item))):
        assert type(twin) is type(item)
        assert [getattr(twin, name) for name in names] == [getattr(item, name) for name in names]


def test_a_record_compiles_nothing_but_the_way_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    run = builtins.exec

    def note(source: Any, *scopes: Any) -> None:
        made.append(str(source))
        run(source, *scopes)

    monkeypatch.setattr(dataclasses, "exec", note, raising=False)

    @record(frozen=True, slots=True)
    class Small:
        x: int

    assert Small(1) == Small(1)
    assert len(made) == 1
    assert "__init__" in made[0]
