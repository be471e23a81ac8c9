"""Decorator for the dataclasses of modules that `serve` imports: compiles only their `__init__`.

`dataclasses.dataclass` writes up to six methods of a class as source text and compiles each. For the hundred classes
of a server that was a third of the instructions from its start to its first answer. Here `__eq__`, `__hash__` and
`__repr__` are closures over the names of the fields.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["record"]

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, slots: bool, frozen: bool = False, eq: bool = True) -> Callable[[type[T]], type[T]]:
        """Return a decorator that does what `dataclasses.dataclass` does with these arguments.

        One thing differs. Instances of a frozen class have a hash, and type checkers refuse changes, but nothing
        refuses them at run time: that would also make each instance take three times as long.
        """

        def make(cls: type[T]) -> type[T]:
            made = dataclasses.dataclass(slots=slots, eq=False, repr=False)(cls)
            fields = dataclasses.fields(made)
            _add(made, "__repr__", _repr([field.name for field in fields if field.repr]))
            if eq:
                values = _values([field.name for field in fields if field.compare])
                _add(made, "__eq__", _eq(values))
                _add(made, "__hash__", _hash(values) if frozen else None)
            return made

        return make


def _add(cls: type[Any], name: str, method: Callable[..., Any] | None) -> None:
    if name not in cls.__dict__:
        setattr(cls, name, method)


def _values(names: list[str]) -> Callable[[object], tuple[object, ...]]:
    """Return a function that returns the values of the fields. As a tuple, so that a value equals itself."""
    return attrgetter(*names) if len(names) > 1 else lambda self: tuple(getattr(self, name) for name in names)


def _repr(names: list[str]) -> Callable[[object], str]:
    @reprlib.recursive_repr()
    def __repr__(self: object) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return __repr__


def _eq(values: Callable[[object], tuple[object, ...]]) -> Callable[[object, object], bool]:
    def __eq__(self: object, other: object) -> bool:
        return values(self) == values(other) if type(other) is type(self) else NotImplemented

    return __eq__


def _hash(values: Callable[[object], tuple[object, ...]]) -> Callable[[object], int]:
    def __hash__(self: object) -> int:
        return hash(values(self))

    return __hash__
