"""TensorRT's optimisation profiles (ranges of input shapes): reads them from a model's configuration, and chooses one
for each run.

Parameters in config.pbtxt, named as in onnxruntime's TensorRT provider. A name that is given several times makes
several profiles; the first of each makes profile 0:

    trt_profile_min_shapes: "image:1x3x224x224,mask:1x8"
    trt_profile_opt_shapes: "image:4x3x480x640,mask:4x8"
    trt_profile_max_shapes: "image:8x3x1080x1920,mask:8x64"

For a shape tensor the numbers are its values. If the model batches, the first value is the batch size ("S:1x1x1" to
"S:8x32x32" for dims [ 2 ]). Without these parameters there is one profile for 1 to max_batch_size rows, which is
fastest for the largest preferred batch size.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

from edge_server.backends.base import Array
from edge_server.core.device_tensor import DeviceArray, to_host_array
from edge_server.core.model_spec import InputSpec, ModelSpec
from edge_server.errors import BadModelConfig, LoadError
from edge_server.plugins.tensorrt.engine_order import Profile, Range, Shape
from edge_server.plugins.tensorrt.library_adapter import EngineFault, ShapeFault, TensorInfo, TensorRTLibrary
from edge_server.plugins.tensorrt.settings import SHAPE_PARAMETERS

_ENTRY = re.compile(r"(.+):([0-9]{1,18}(?:x[0-9]{1,18})*)")


class EngineProfiles:
    """The profiles of an open engine, by number, and the ones that an instance may use (`allowed`, () for all)."""

    def __init__(
        self, library: TensorRTLibrary, engine: Any, inputs: tuple[TensorInfo, ...], allowed: tuple[int, ...]
    ) -> None:
        self._shapes: tuple[Profile, ...] = library.profiles(engine, inputs)
        self._shape_tensors = tuple(item.name for item in inputs if item.is_on_host)
        self._shapes_and_values = self._shapes
        if self._shape_tensors:
            values = library.value_profiles(engine, inputs)
            self._shapes_and_values = tuple({**one, **other} for one, other in zip(self._shapes, values, strict=True))
        self.allowed = allowed or tuple(range(len(self._shapes)))

    @property
    def first(self) -> int:
        """The profile that an instance starts with."""
        return self.allowed[0]

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, number: int) -> Profile:
        return self._shapes[number]

    def check_allowed(self) -> None:
        """Raise EngineFault if an allowed profile does not exist."""
        missing = [number for number in self.allowed if not 0 <= number < len(self._shapes)]
        if missing:
            raise EngineFault(f"it has {len(self._shapes)} profile(s), the instance group asks for number {missing[0]}")

    def are_fixed(self, skip: int) -> bool:
        """Return whether all dimensions after the first `skip` are fixed in all allowed profiles."""
        return all(
            one.least[skip:] == one.most[skip:] for number in self.allowed for one in self._shapes[number].values()
        )

    def for_shapes(self, shapes: Mapping[str, Shape]) -> int | None:
        """Return the profile for these shapes, None if there is none. The first profile is preferred."""
        return choose_profile(self._shapes, self.allowed, shapes, self.first)

    def for_inputs(
        self, inputs: Mapping[str, Array | DeviceArray], shapes: Mapping[str, Shape], current: int, *, has_rows: bool
    ) -> int:
        """Return the profile for these inputs; `current` is preferred.

        Raises ServingFault, ShapeFault for sizes that the client chose, and EngineFault for the rows of a batch.
        """
        given: Mapping[str, Shape] = shapes
        if self._shape_tensors:
            values = {
                name: tuple(int(value) for value in to_host_array(inputs[name]).reshape(-1).tolist())
                for name in self._shape_tensors
            }
            given = {**shapes, **values}
        number = choose_profile(self._shapes_and_values, self.allowed, given, current)
        if number is None:
            said = misfit_text(self._shapes_and_values, self.allowed, given, self._shape_tensors)
            raise EngineFault(said) if has_rows and self._takes_without_rows(given) else ShapeFault(said)
        return number

    def _takes_without_rows(self, shapes: Mapping[str, Shape]) -> bool:
        """Return whether a profile takes these shapes with another first size. A batch has rows of several clients."""
        profiles = [self._shapes_and_values[number] for number in self.allowed]
        return any(
            all(one.holds((*one.least[:1], *shapes[name][1:])) for name, one in profile.items() if name in shapes)
            for profile in profiles
        )


def configured_profiles(spec: ModelSpec) -> tuple[Profile, ...]:
    """Return the profiles that an engine for the model is built with. Raises BadModelConfig, and LoadError for a
    dimension of any size that the configuration does not bound."""
    stated = [_parse(spec, key) for key in SHAPE_PARAMETERS]
    counts = {len(shapes) for item in stated for shapes in item.values()}
    if not counts:
        return ({item.name: _default_range(spec, item) for item in spec.inputs},)
    names = {frozenset(item) for item in stated}
    if len(names) > 1 or len(counts) > 1:
        raise BadModelConfig(
            f"model '{spec.name}': {', '.join(SHAPE_PARAMETERS)}: expected the same inputs, each as often as the "
            f"others, in all three, given {[{name: len(shapes) for name, shapes in item.items()} for item in stated]}"
        )
    unknown = next((name for name in stated[0] if spec.input(name) is None), None)
    if unknown is not None:
        raise BadModelConfig(f"model '{spec.name}': {SHAPE_PARAMETERS[0]}: there is no input '{unknown}'")
    return tuple(_profile(spec, stated, number) for number in range(counts.pop()))


def choose_profile(
    profiles: Sequence[Profile], allowed: Sequence[int], shapes: Mapping[str, Shape], current: int
) -> int | None:
    """Return the profile that takes these shapes: the current one, else the smallest allowed one, else None."""
    fitting = [
        number
        for number in allowed
        if all(one.holds(shapes[name]) for name, one in profiles[number].items() if name in shapes)
    ]
    if current in fitting:
        return current
    return min(fitting, key=lambda number: sum(prod(one.most) for one in profiles[number].values()), default=None)


def misfit_text(
    profiles: Sequence[Profile],
    allowed: Sequence[int],
    shapes: Mapping[str, Shape],
    shape_tensors: Collection[str] = (),
) -> str:
    """Return why no profile takes these shapes: the inputs, their shapes or values, and the allowed ones."""
    wants = {
        name: "; or ".join(str(profiles[number][name]) for number in allowed) for name in shapes if name in profiles[0]
    }
    wrong = [
        name for name in wants if not any(profiles[number][name].holds(shapes[name]) for number in allowed)
    ] or sorted(wants)
    return "no profile of the engine takes " + ", ".join(
        f"input '{name}' of {'values' if name in shape_tensors else 'shape'} {list(shapes[name])} "
        f"(it takes {wants[name]})"
        for name in wrong
    )


def _parse(spec: ModelSpec, key: str) -> dict[str, list[Shape]]:
    found: dict[str, list[Shape]] = {}
    for part in filter(str.strip, spec.parameters.get(key, "").split(",")):
        match = _ENTRY.fullmatch(part.strip())
        if match is None:
            raise BadModelConfig(
                f"model '{spec.name}': parameter {key}: expected name:1x3x224x224, more of them after commas, "
                f"given '{part[:80]}'"
            )
        found.setdefault(match[1], []).append(tuple(int(size) for size in match[2].split("x")))
    return found


def _profile(spec: ModelSpec, stated: Sequence[Mapping[str, list[Shape]]], number: int) -> Profile:
    profile: dict[str, Range] = {}
    for item in spec.inputs:
        if item.name not in stated[0]:
            profile[item.name] = _default_range(spec, item)
            continue
        least, best, most = (one[item.name][number] for one in stated)
        _check_shapes(spec, item, (least, best, most))
        profile[item.name] = Range(least, best, most)
    return profile


def _check_shapes(spec: ModelSpec, item: InputSpec, shapes: tuple[Shape, Shape, Shape]) -> None:
    least, best, most = shapes
    is_in_order = len({len(shape) for shape in shapes}) == 1 and all(
        low <= mid <= high for low, mid, high in zip(least, best, most, strict=True)
    )
    if not is_in_order:
        raise BadModelConfig(
            f"model '{spec.name}': profile of input '{item.name}': expected min <= opt <= max in every dimension, "
            f"given {list(least)}, {list(best)}, {list(most)}"
        )
    if item.is_shape_tensor:
        _check_values(spec, item, least, most)
        return
    # The shape that the runtime receives, with -1 for the rows and other variable dimensions.
    dims = item.dims if item.reshape is None else item.reshape
    if spec.max_batch_size > 0:
        dims = (-1, *dims)
    if len(dims) != len(most) or any(
        dim != -1 and not dim == low == high for dim, low, high in zip(dims, least, most, strict=True)
    ):
        raise BadModelConfig(
            f"model '{spec.name}': profile of input '{item.name}': expected shapes that fit {list(dims)}, "
            f"given {list(least)} to {list(most)}"
        )


def _check_values(spec: ModelSpec, item: InputSpec, least: Shape, most: Shape) -> None:
    """Check the number of values, and for a model that batches that the first allows every batch size."""
    limit = spec.max_batch_size
    count = prod(item.dims if item.reshape is None else item.reshape)
    if count > 0 and len(most) != count + (limit > 0):
        raise BadModelConfig(
            f"model '{spec.name}': profile of input '{item.name}': expected {count} value(s)"
            f"{' after the batch size' if limit else ''}, given {list(least)} to {list(most)}"
        )
    if limit and not least[0] <= 1 <= limit <= most[0]:
        raise BadModelConfig(
            f"model '{spec.name}': profile of input '{item.name}': expected a first value, the batch size, of 1 to "
            f"{limit}, given {least[0]} to {most[0]}"
        )


def _default_range(spec: ModelSpec, item: InputSpec) -> Range:
    dims = item.dims if item.reshape is None else item.reshape
    if item.is_shape_tensor or any(size < 0 for size in dims):
        what = "values that are shapes" if item.is_shape_tensor else "a dimension of any size"
        raise LoadError(
            f"model '{spec.name}': input '{item.name}' has {what} ({list(dims)}): TensorRT must be told their bounds, "
            f"by the parameters {', '.join(SHAPE_PARAMETERS)}"
        )
    if spec.max_batch_size == 0:
        return Range(dims, dims, dims)
    preferred = spec.dynamic_batching.preferred_batch_sizes if spec.dynamic_batching is not None else ()
    best = min(max(preferred, default=spec.max_batch_size), spec.max_batch_size)
    return Range((1, *dims), (best, *dims), (spec.max_batch_size, *dims))
