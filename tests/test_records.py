"""`records.dataclass` makes what `dataclasses.dataclass` makes; only later."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, field, replace
from typing import Any

import pytest

from edge_server import records


@records.dataclass(frozen=True, slots=True)
class Point:
    """Two numbers."""

    x: int
    y: int = 2
    tags: list[str] = field(default_factory=list, compare=False)


@records.dataclass(slots=True)
class Counter:
    start: int
    total: int = field(init=False, default=0)
    seen: list[int] = field(init=False, default_factory=list)
    step: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        self.total += self.start


def kinds(make: Callable[..., Any]) -> list[tuple[type, list[object]]]:
    """Return the same classes made by `make`, each with instances of it."""

    @make(frozen=True, slots=True)
    class Frozen:
        a: int
        b: str = "b"
        c: list[int] = field(default_factory=list, hash=False, repr=False)

    @make(slots=True)
    class Slots:
        a: int = 1
        b: int = field(default=2, compare=False)

    @make
    class Plain:
        a: int

    @make(slots=True)
    class Heir(Slots):
        z: int = 9

    @make(eq=False)
    class Known:
        a: int

    @make(frozen=True)
    class OwnMethods:
        a: int

        def __eq__(self, other: object) -> bool:
            return isinstance(other, OwnMethods)

        def __hash__(self) -> int:
            return 7

        def __repr__(self) -> str:
            return "own"

    calls: list[tuple[Any, list[tuple[Any, ...]]]] = [
        (Frozen, [(1,), (1, "b", [3]), (2, "c")]),
        (Slots, [(), (1, 3), (1, 2)]),
        (Plain, [(1,), (1,), (2,)]),
        (Heir, [(), (1, 2, 3), (1, 2, 9)]),
        (Known, [(1,), (1,)]),
        (OwnMethods, [(1,), (2,)]),
    ]
    return [(cls, [cls(*arguments) for arguments in each]) for cls, each in calls]


def facts(cls: type, instances: list[object]) -> dict[str, object]:
    """Return what can be told of a class and its instances from outside."""
    found: dict[str, object] = {
        "repr": [repr(item).split(" at 0x")[0] for item in instances],
        "equal": [[one == other for other in instances] for one in instances],
        "fields": [(item.name, item.type, item.init, item.compare) for item in dataclasses.fields(cls)],
        "match": getattr(cls, "__match_args__", None),
        "slots": getattr(cls, "__slots__", None),
        "signature": str(inspect.signature(cls)),
        "is hashable": cls.__hash__ is not None,
    }
    if found["is hashable"] and vars(cls).get("__hash__") is not None:
        found["hash"] = [hash(item) for item in instances]
    return found


def test_classes_and_instances_are_those_of_the_standard_library() -> None:
    pairs = zip(kinds(records.dataclass), kinds(dataclasses.dataclass), strict=True)
    for (ours, our_items), (theirs, their_items) in pairs:
        assert facts(ours, our_items) == facts(theirs, their_items), ours.__name__


@pytest.mark.parametrize("arguments", [(), (1, 2, [], 4), ("a", "b", "c", "d")])
def test_wrong_arguments_are_refused_by_name(arguments: tuple[object, ...]) -> None:
    for _ in range(2):
        with pytest.raises(TypeError, match=r"Point\.__init__\(\)|__init__\(\)"):
            Point(*arguments)  # type: ignore[arg-type]


def test_a_frozen_one_refuses_every_change() -> None:
    point = Point(1)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
        point.x = 5  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'y'"):
        del point.y
    assert point == Point(1)


def test_every_instance_has_default_objects_of_its_own() -> None:
    one, other = Point(1), Point(1)
    one.tags.append("a")
    assert other.tags == []
    assert one == other


def test_fields_of_all_sorts_are_set_and_what_follows_is_called() -> None:
    counter = Counter(4, step=3)
    assert (counter.start, counter.total, counter.seen, counter.step) == (4, 4, [], 3)
    with pytest.raises(TypeError):
        Counter(4, 3)  # type: ignore[call-arg]


def test_copies_pickles_and_replacements_are_equal() -> None:
    point = Point(3, tags=["a"])
    for other in (copy.copy(point), copy.deepcopy(point), pickle.loads(pickle.dumps(point))):
        assert other == point
        assert other.tags == ["a"]
    assert replace(point, x=4) == Point(4)
    assert dataclasses.asdict(point) == {"x": 3, "y": 2, "tags": ["a"]}


def test_methods_are_compiled_by_the_first_call_and_stay() -> None:
    @records.dataclass(slots=True)
    class Fresh:
        a: int

    before = Fresh.__init__
    Fresh(1)
    compiled = Fresh.__init__
    assert compiled is not before
    Fresh(2)
    assert Fresh.__init__ is compiled


def test_initializers_of_a_package_are_compiled_on_demand() -> None:
    @records.dataclass(frozen=True)
    class Early:
        a: int = 5

    before = Early.__init__
    records.compile_initializers("no.such.package")
    assert Early.__init__ is before
    records.compile_initializers(__name__)
    assert Early.__init__ is not before
    assert Early().a == 5


def test_many_threads_may_make_the_first_instances() -> None:
    @records.dataclass(frozen=True, slots=True)
    class Shared:
        a: int

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(Shared, range(200)))
    assert [item.a for item in made] == list(range(200))
    assert len({hash(item) for item in made}) == 200
