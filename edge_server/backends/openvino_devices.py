"""OpenVINO device of a model, and the cache folder of compiled models.

`TARGET_DEVICE` is a device (`CPU`, `GPU`, `GPU.1`, `NPU`), or chooses or combines others: `AUTO`, `AUTO:GPU,CPU`,
`AUTO:-CPU`, `MULTI:GPU,CPU`, `HETERO:GPU,CPU`, `BATCH:GPU(8)`. Each one named has to be there: OpenVINO lists what
works here (`Core.available_devices`), and its own errors about others are pages long.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from edge_server.backends.openvino_import import import_openvino
from edge_server.errors import LoadError

COMBINING = ("AUTO", "MULTI", "HETERO", "BATCH")
"""Devices that stand for others, which follow after a colon."""

_NEEDS_OTHERS = ("MULTI", "BATCH")
_ITEM = re.compile(r"(-?)([A-Z]+(?:\.[0-9A-Z]+)*)(?:\([0-9]{1,4}\))?")


def checked_device(model: str, text: str, available: Sequence[str]) -> str:
    """Return the device as OpenVINO wants it written. Raises LoadError when one of those named is not here."""
    wanted = "".join(text.split()).upper()
    head, colon, rest = wanted.partition(":")
    if head not in COMBINING:
        _check(model, wanted, wanted, available)
        return wanted
    names = rest.split(",") if colon else []
    if not names and (colon or head in _NEEDS_OTHERS):
        raise LoadError(
            f"model '{model}': TARGET_DEVICE '{wanted}' names no device; write {head}:<device>,<device>; "
            f"openvino finds: {', '.join(available)}"
        )
    for name in names:
        _check(model, wanted, name, available)
    return wanted


def reported() -> dict[str, tuple[str, ...]]:
    """Return every device that OpenVINO lists, with what it computes in (FP32, FP16, INT8 ...; () where it does not
    tell). Loads every plugin, and the drivers behind. Raises LoadError when OpenVINO is not there."""
    core = import_openvino().Core()
    found: dict[str, tuple[str, ...]] = {}
    for device in core.available_devices:
        try:
            found[device] = tuple(map(str, core.get_property(device, "OPTIMIZATION_CAPABILITIES")))
        except RuntimeError:  # what opening a model there says is worth more
            found[device] = ()
    return found


def involves_accelerator(device: str) -> bool:
    """Return whether anything but the CPU may run the model: compiling for it takes long, and is worth keeping."""
    return device != "CPU"


def head_of(device: str) -> str:
    """Return the device name for OpenVINO's queries: AUTO of AUTO:GPU,CPU."""
    return device.partition(":")[0]


def _check(model: str, whole: str, item: str, available: Sequence[str]) -> None:
    found = _ITEM.fullmatch(item)
    if found is None:
        raise LoadError(f"model '{model}': TARGET_DEVICE '{whole[:80]}' is not a list of devices: '{item[:80]}'")
    is_left_out, name = bool(found[1]), found[2]
    if is_left_out or name in available or any(one.startswith(f"{name}.") for one in available):
        return
    if name.endswith(".0") and name[:-2] in available:
        return
    raise LoadError(
        f"model '{model}': openvino finds no device '{name}' here; it finds: {', '.join(available) or 'none'}"
    )
