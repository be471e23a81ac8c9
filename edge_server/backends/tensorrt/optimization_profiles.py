"""Optimization profiles of a configuration: the shapes an engine is built for.

Parameters in config.pbtxt, named as in onnxruntime's TensorRT provider; a name given several times makes several
profiles, the first of each being profile 0:

    trt_profile_min_shapes: "image:1x3x224x224,mask:1x8"
    trt_profile_opt_shapes: "image:4x3x480x640,mask:4x8"
    trt_profile_max_shapes: "image:8x3x1080x1920,mask:8x64"

For an input whose values are shapes the numbers are its values: of a model that batches, those of the engine, the batch
size first ("S:1x1x1" to "S:8x32x32" for dims [ 2 ]). Without them there is one profile, of 1 to
max_batch_size rows, made fastest for the largest preferred batch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from math import prod

from edge_server.core.model_spec import InputSpec, ModelSpec
from edge_server.core.tensorrt_engine import Profile, Range, Shape
from edge_server.errors import BadModelConfig, LoadError

KEYS = ("trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes")

_ENTRY = re.compile(r"\s*(.+):([0-9]{1,18}(?:x[0-9]{1,18})*)\s*")


def profiles_of(spec: ModelSpec) -> tuple[Profile, ...]:
    """Return the profiles that an engine for the model is built with. Raises BadModelConfig, and LoadError for a
    dimension of any size that the configuration does not bound."""
    stated = [_parse(spec, key) for key in KEYS]
    counts = {len(shapes) for item in stated for shapes in item.values()}
    if not counts:
        return ({item.name: _by_default(spec, item) for item in spec.inputs},)
    names = {frozenset(item) for item in stated}
    if len(names) > 1 or len(counts) > 1:
        raise BadModelConfig(
            f"model '{spec.name}': {', '.join(KEYS)}: expected the same inputs, each as often as the others, in all "
            f"three, given {[{name: len(shapes) for name, shapes in item.items()} for item in stated]}"
        )
    unknown = next((name for name in stated[0] if spec.input(name) is None), None)
    if unknown is not None:
        raise BadModelConfig(f"model '{spec.name}': {KEYS[0]}: there is no input '{unknown}'")
    return tuple(_profile(spec, stated, number) for number in range(counts.pop()))


def choose(
    profiles: Sequence[Profile], allowed: Sequence[int], shapes: Mapping[str, Shape], current: int
) -> int | None:
    """Return the profile that takes these shapes: the current one if it does, else the allowed one with the least
    room to spare; None when none does."""
    fitting = [number for number in allowed if _fits(profiles[number], shapes)]
    if current in fitting:
        return current
    return min(fitting, key=lambda number: _size(profiles[number]), default=None)


def misfit(
    profiles: Sequence[Profile],
    allowed: Sequence[int],
    shapes: Mapping[str, Shape],
    of_values: Collection[str] = (),
) -> str:
    """Return why `choose` finds no profile: which inputs, of what shapes or values, and what they take."""
    wants = {
        name: "; or ".join(str(profiles[number][name]) for number in allowed) for name in shapes if name in profiles[0]
    }
    wrong = [
        name for name in wants if not any(profiles[number][name].holds(shapes[name]) for number in allowed)
    ] or sorted(wants)
    return "no profile of the engine takes " + ", ".join(
        f"input '{name}' of {'values' if name in of_values else 'shape'} {list(shapes[name])} (it takes {wants[name]})"
        for name in wrong
    )


def _fits(profile: Profile, shapes: Mapping[str, Shape]) -> bool:
    return all(one.holds(shapes[name]) for name, one in profile.items() if name in shapes)


def _size(profile: Profile) -> int:
    total = 0
    for one in profile.values():
        elements = 1
        for size in one.most:
            elements *= size
        total += elements
    return total


def _parse(spec: ModelSpec, key: str) -> dict[str, list[Shape]]:
    found: dict[str, list[Shape]] = {}
    for part in filter(str.strip, spec.parameters.get(key, "").split(",")):
        match = _ENTRY.fullmatch(part)
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
            profile[item.name] = _by_default(spec, item)
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
    dims = _dims(spec, item)
    if len(dims) != len(most) or any(
        dim != -1 and not dim == low == high for dim, low, high in zip(dims, least, most, strict=True)
    ):
        raise BadModelConfig(
            f"model '{spec.name}': profile of input '{item.name}': expected shapes that fit {list(dims)}, "
            f"given {list(least)} to {list(most)}"
        )


def _check_values(spec: ModelSpec, item: InputSpec, least: Shape, most: Shape) -> None:
    """Check how many values there are, and that the first, of a model that batches, is any batch size."""
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


def _dims(spec: ModelSpec, item: InputSpec) -> Shape:
    """Return the shape that the runtime is handed, -1 for the rows and for what any size goes for."""
    dims = item.dims if item.reshape is None else item.reshape
    return (-1, *dims) if spec.max_batch_size > 0 else dims


def _by_default(spec: ModelSpec, item: InputSpec) -> Range:
    dims = item.dims if item.reshape is None else item.reshape
    if item.is_shape_tensor or any(size < 0 for size in dims):
        what = "values that are shapes" if item.is_shape_tensor else "a dimension of any size"
        raise LoadError(
            f"model '{spec.name}': input '{item.name}' has {what} ({list(dims)}): TensorRT must be told their bounds, "
            f"by the parameters {', '.join(KEYS)}"
        )
    if spec.max_batch_size == 0:
        return Range(dims, dims, dims)
    preferred = spec.dynamic_batching.preferred_batch_sizes if spec.dynamic_batching is not None else ()
    best = min(max(preferred, default=spec.max_batch_size), spec.max_batch_size)
    return Range((1, *dims), (best, *dims), (spec.max_batch_size, *dims))
