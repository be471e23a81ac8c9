"""Lighter variants of models: checks that the inputs and outputs of both fit, and returns the one that answers now,
while the machine is hot or short of power.

A model names its variant in config.pbtxt: `parameters { key: "variant" value { string_value: "light_model" } }`. The
governor decides when variants are used (`VariantChoice`). This module decides whether a variant may be used: it must
serve, and have the same inputs and outputs as the heavier model. Clients see it only in the response parameter
`edge_variant`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.request_response import Response, ResponseSink
from edge_server.serving.lifecycle.model_table import ModelTable
from edge_server.telemetry.event_bus import MODEL_READY, Event

_log = logging.getLogger(__name__)

VARIANT_KEY = "variant"
"""Key of config.pbtxt's parameters: the lighter model's name."""

VARIANT_PARAMETER = "edge_variant"
"""Response parameter with the name of the lighter model that computed the response."""

_IMAGE_KEYS = ("image_", "network_image_")
"""Parameters of picture preparation. If they differ, the same tensor has another meaning for the lighter model."""


class VariantChoice(Protocol):
    """Thread-safe; returns at once."""

    def variant_for(self, name: str) -> str | None:
        """Return the model that should answer for `name` now; None: itself."""


class Variants:
    """Thread-safe. No variant answers for another model until there is a `choice`."""

    def __init__(self, table: ModelTable) -> None:
        self.choice: VariantChoice | None = None
        self._table = table
        self._differences: dict[str, tuple[ModelSpec, ModelSpec, str]] = {}
        self._named: set[str] = set()
        """Models that were loaded and named a variant; some may not be loaded any more."""

    def choose(self, choice: VariantChoice | None) -> None:
        """Use `choice` from now on. None: no variant answers for another model."""
        self.choice = choice

    def find_pairs(self) -> Mapping[str, str]:
        """Return the variant of each serving model that names one, if the variant serves and fits: for requests, or at
        least for frames, which are prepared for the model that gets them."""
        found = {}
        for name in sorted(self._table.routes):
            heavy = self._spec(name)
            lighter = None if heavy is None else variant_of(heavy)
            light = None if lighter is None or lighter == name else self._spec(lighter)
            if heavy is None or light is None:
                continue
            if not self._difference(heavy, light) or (_takes_images(heavy) and _takes_images(light)):
                found[name] = light.name
        return found

    def variant_for(self, name: str) -> ModelSpec | None:
        """Return the specification of the lighter model that answers for `name` now; None if `name` answers itself.

        Inputs and outputs are not compared: a frame is prepared for the model that gets it.
        """
        choice = self.choice
        lighter = None if choice is None else choice.variant_for(name)
        return None if lighter is None or lighter == name else self._spec(lighter)

    def tensor_variant_for(self, name: str) -> str | None:
        """Return the lighter model for a request to `name`, if its inputs and outputs are the same."""
        light = self.variant_for(name)
        heavy = None if light is None else self._spec(name)
        if light is None or heavy is None or self._difference(heavy, light):
            return None
        return light.name

    def note(self, name: str) -> str:
        """Return why the variant of a model cannot answer for it; "" if it can, or if there is no variant."""
        heavy = self._spec(name)
        lighter = None if heavy is None else variant_of(heavy)
        if heavy is None or lighter is None:
            return ""
        light = self._spec(lighter)
        message = f"model '{lighter}' does not serve" if light is None else self._difference(heavy, light)
        return f"its variant does not stand in for it: {message}" if message else ""

    def receive(self, event: Event) -> None:
        """Log why a variant cannot be used, after a load of one of the two models."""
        if event.kind != MODEL_READY:
            return
        name = str(event.fields["model"])
        loaded = self._spec(name)
        if loaded is not None and variant_of(loaded) is not None:
            self._named.add(name)
        for heavy in sorted(self._named):
            spec = self._spec(heavy)
            lighter = None if spec is None else variant_of(spec)
            if lighter is None or name not in (heavy, lighter) or self._spec(lighter) is None:
                continue
            if note := self.note(heavy):
                _log.warning("model '%s': %s", heavy, note)

    def _spec(self, name: str) -> ModelSpec | None:
        routes = self._table.routes.get(name)
        return None if routes is None else routes.first.spec

    def _difference(self, heavy: ModelSpec, light: ModelSpec) -> str:
        known = self._differences.get(heavy.name)
        if known is None or known[0] is not heavy or known[1] is not light:
            known = self._differences[heavy.name] = (heavy, light, variant_difference(heavy, light))
        return known[2]


def variant_of(spec: ModelSpec) -> str | None:
    """Return the name of the lighter model in a model's parameters, None if there is none."""
    return spec.parameters.get(VARIANT_KEY, "").strip() or None


def variant_difference(heavy: ModelSpec, light: ModelSpec) -> str:
    """Return why requests to one model cannot be answered by another; "" if they can."""
    if heavy.name == light.name:
        return f"model '{heavy.name}' names itself"
    differences = (
        _tensors_difference("input", heavy.inputs, light.inputs),
        _tensors_difference("output", heavy.outputs, light.outputs),
        _batch_difference(heavy, light),
        _image_difference(heavy, light),
    )
    return next(filter(None, differences), "")


def with_variant_name(sink: ResponseSink, lighter: str) -> ResponseSink:
    """Return a sink that adds the name of the computing model to each response."""

    def take(response: Response) -> None:
        response.parameters = {**response.parameters, VARIANT_PARAMETER: lighter}
        sink(response)

    return take


def _tensors_difference(
    kind: str, heavy: Sequence[InputSpec] | Sequence[OutputSpec], light: Sequence[InputSpec] | Sequence[OutputSpec]
) -> str:
    expected, given = {item.name: item for item in heavy}, {item.name: item for item in light}
    if expected.keys() != given.keys():
        return f"expected the {kind}s {sorted(expected)}, it has {sorted(given)}"
    for name, item in expected.items():
        other = given[name]
        if item.dtype is not other.dtype or not _covers(item, other):
            return f"expected {kind} {_describe(item)}, it has {_describe(other)}"
        if isinstance(item, InputSpec) and isinstance(other, InputSpec) and item.is_optional and not other.is_optional:
            return f"expected input '{name}' to be optional, it is not"
    return ""


def _covers(heavy: InputSpec | OutputSpec, light: InputSpec | OutputSpec) -> bool:
    """Return whether the lighter model's shapes are within those of the heavier one."""
    if len(heavy.dims) != len(light.dims):
        return False
    wide, narrow = (light.dims, heavy.dims) if isinstance(heavy, InputSpec) else (heavy.dims, light.dims)
    return all(outer in (-1, inner) for outer, inner in zip(wide, narrow, strict=True))


def _batch_difference(heavy: ModelSpec, light: ModelSpec) -> str:
    if (heavy.max_batch_size > 0) != (light.max_batch_size > 0) or light.max_batch_size < heavy.max_batch_size:
        return f"expected a max_batch_size of {heavy.max_batch_size} or more, it has {light.max_batch_size}"
    if heavy.is_decoupled != light.is_decoupled:
        return "its transaction policy is another"
    return ""


def _image_difference(heavy: ModelSpec, light: ModelSpec) -> str:
    keys = [key for key in {**heavy.parameters, **light.parameters} if key.startswith(_IMAGE_KEYS)]
    for key in sorted(keys):
        expected, given = heavy.parameters.get(key), light.parameters.get(key)
        if expected != given:
            return f"expected parameter '{key}' to be {expected!r}, it is {given!r} (frames are fitted anew for it)"
    return ""


def _takes_images(spec: ModelSpec) -> bool:
    return any(key.startswith(_IMAGE_KEYS) for key in spec.all_parameters)


def _describe(item: InputSpec | OutputSpec) -> str:
    return f"'{item.name}' {item.dtype.value}{list(item.dims)}"
