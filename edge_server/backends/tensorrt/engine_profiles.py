"""Optimization profiles of an open engine: which ones an instance may use, and which one fits a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge_server.backends.base import Array
from edge_server.backends.tensorrt.library_adapter import EngineFault, TensorInfo, TensorRTLibrary
from edge_server.backends.tensorrt.optimization_profiles import choose, misfit
from edge_server.backends.tensorrt.shape_tensors import values_of
from edge_server.core.device_tensor import DeviceArray
from edge_server.core.tensorrt_engine import Profile, Shape


class EngineProfiles:
    """By number, each a Profile. `allowed` are numbers of profiles, () for all."""

    def __init__(
        self, library: TensorRTLibrary, engine: Any, inputs: tuple[TensorInfo, ...], allowed: tuple[int, ...]
    ) -> None:
        self._shapes: tuple[Profile, ...] = library.profiles(engine, inputs)
        self._of_values = tuple(item.name for item in inputs if item.is_on_host)
        self._choices = self._shapes
        """As the shapes, with the values of inputs whose values are shapes."""
        if self._of_values:
            values = library.value_profiles(engine, inputs)
            self._choices = tuple({**one, **other} for one, other in zip(self._shapes, values, strict=True))
        self.allowed = allowed or tuple(range(len(self._shapes)))

    @property
    def first(self) -> int:
        """The one that an instance begins with."""
        return self.allowed[0]

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, number: int) -> Profile:
        return self._shapes[number]

    def check_allowed(self) -> None:
        """Raise EngineFault where the engine does not have a profile that is allowed."""
        missing = [number for number in self.allowed if not 0 <= number < len(self._shapes)]
        if missing:
            raise EngineFault(f"it has {len(self._shapes)} profile(s), the instance group asks for number {missing[0]}")

    def are_fixed(self, skip: int) -> bool:
        """Return whether no allowed profile leaves open any dimension behind the first `skip`."""
        return all(
            one.least[skip:] == one.most[skip:] for number in self.allowed for one in self._shapes[number].values()
        )

    def for_shapes(self, shapes: Mapping[str, Shape]) -> int | None:
        """Return the profile that takes these shapes, None when none does; the first one if it does."""
        return choose(self._shapes, self.allowed, shapes, self.first)

    def for_inputs(self, inputs: Mapping[str, Array | DeviceArray], shapes: Mapping[str, Shape], current: int) -> int:
        """Return the profile that takes inputs of these shapes, `current` if it does. Raises EngineFault."""
        asked: Mapping[str, Shape] = shapes
        if self._of_values:
            asked = {**shapes, **{name: values_of(inputs[name]) for name in self._of_values}}
        number = choose(self._choices, self.allowed, asked, current)
        if number is None:
            raise EngineFault(misfit(self._choices, self.allowed, asked, self._of_values))
        return number
