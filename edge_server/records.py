"""`dataclass` as `dataclasses` has it, whose methods are compiled when they are first called.

The standard decorator compiles five or six functions for every class while its module is imported. A server imports
several hundred such classes and, of most, calls at most `__init__`: compiling none of them beforehand took a third off
the time that importing the server's own modules needs, and some megabytes off what it holds. From the first call on a
method is the very function that the standard library makes, at the same price.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, slots=False, eq=True):
        """Make a dataclass of the class: `@dataclass`, or `@dataclass(frozen=True, slots=True)`.

        Differs from `dataclasses.dataclass` only in when methods are compiled: `inspect.signature` knows the parameters
        after the first instance was made, and a field without a default behind one with a default is told of then.
        """
        if cls is None:
            return lambda given: _dataclass(given, frozen, slots, eq)
        return _dataclass(cls, frozen, slots, eq)


_unused: dict[type, bool] = {}
"""Classes whose `__init__` is not compiled yet, and whether they are frozen."""


def compile_initializers(*packages: str) -> None:
    """Compile what makes instances of the classes in these packages, so that no request is the first to need it."""
    for cls, frozen in list(_unused.items()):
        if cls.__module__.startswith(packages):
            cls.__init__ = _initializer(cls, frozen)  # type: ignore[misc]
            _unused.pop(cls, None)


def _dataclass(cls: type, frozen: bool, slots: bool, eq: bool) -> type:
    own = dict(vars(cls))
    if cls.__doc__ is None:
        # Else the standard library would write the signature there, which takes as long as all the rest.
        cls.__doc__ = cls.__name__
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(cls)
    if "__init__" not in own:
        _unused[made] = frozen
    for name in ("__init__", "__repr__", "__eq__") if eq else ("__init__", "__repr__"):
        if name not in own:
            setattr(made, name, _put_off(made, name, frozen))
    # Python itself puts None there for a class that has __eq__ alone.
    has_hash = own.get("__hash__") is not None or ("__hash__" in own and "__eq__" not in own)
    if eq and not has_hash:
        made.__hash__ = _put_off(made, "__hash__", frozen) if frozen else None
    if frozen:
        _freeze(made, own)
    result: type = made
    return result


def _put_off(cls: type, name: str, frozen: bool) -> Callable[..., Any]:
    """Return a method that, when first called, puts the compiled one in its place."""

    def method(self: object, *arguments: Any, **named: Any) -> Any:
        compiled = _compiled(cls, name, frozen)
        setattr(cls, name, compiled)
        if name == "__init__":
            _unused.pop(cls, None)
        return compiled(self, *arguments, **named)

    method.__name__, method.__qualname__, method.__module__ = name, f"{cls.__qualname__}.{name}", cls.__module__
    return method


def _compiled(cls: type, name: str, frozen: bool) -> Callable[..., Any]:
    """Return the method as the standard library would write it."""
    if name == "__init__":
        return _initializer(cls, frozen)
    # It is taken off a class that has the same fields.
    twin = dataclasses.make_dataclass(
        cls.__name__,
        [(field.name, field.type, copy.copy(field)) for field in dataclasses.fields(cls)],
        namespace={"__module__": cls.__module__, "__qualname__": cls.__qualname__},
        init=False,
        repr=name == "__repr__",
        eq=name != "__repr__",
        frozen=frozen,
    )
    method: Callable[..., Any] = vars(twin)[name]
    return method


class _Factory:
    """Stands for an argument not given, of a field that makes its default anew for each instance."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


def _initializer(cls: type, frozen: bool) -> Callable[..., None]:
    """Return `__init__`, written by itself: it is most of what is ever called, much of it while a server starts."""
    names: dict[str, Any] = {"_factory": _FACTORY, "_set": object.__setattr__}
    plain: list[str] = []
    by_name: list[str] = []
    lines = []
    for field in dataclasses.fields(cls):
        default = value = f"_default_{field.name}"
        has_factory = field.default_factory is not dataclasses.MISSING
        names[default] = field.default_factory if has_factory else field.default
        if not field.init and names[default] is dataclasses.MISSING:
            continue
        if field.init:
            parameter = field.name
            if has_factory:
                parameter += "=_factory"
            elif field.default is not dataclasses.MISSING:
                parameter += f"={default}"
            (by_name if field.kw_only else plain).append(parameter)
            value = f"{default}() if {field.name} is _factory else {field.name}" if has_factory else field.name
        elif has_factory:
            value += "()"
        lines.append(f"_set(self, {field.name!r}, {value})" if frozen else f"self.{field.name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    parameters = ", ".join(["self", *plain, *(["*", *by_name] if by_name else [])])
    body = "\n ".join(lines or ["pass"])
    exec(f"def __init__({parameters}):\n {body}", names)
    method: Callable[..., None] = names.pop("__init__")
    method.__qualname__, method.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    method.__annotations__ = {f.name: f.type for f in dataclasses.fields(cls) if f.init} | {"return": None}
    return method


def _freeze(cls: Any, own: dict[str, Any]) -> None:
    names = frozenset(field.name for field in dataclasses.fields(cls))

    def set_attribute(self: object, name: str, value: object) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def delete_attribute(self: object, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    for name, method in (("__setattr__", set_attribute), ("__delattr__", delete_attribute)):
        if name in own:
            raise TypeError(f"cannot overwrite attribute {name} in class {cls.__name__}")
        setattr(cls, name, method)
    if "__slots__" in vars(cls):
        # What copies and pickles a class with slots sets attributes, which this one refuses.
        for name, state in (("__getstate__", _get_state), ("__setstate__", _set_state)):
            if name not in own:
                setattr(cls, name, state)


def _get_state(self: Any) -> list[object]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[object]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
