"""Check that the OpenVINO devices that a model names (`TARGET_DEVICE`) exist on this machine, and the list of these
devices.

`TARGET_DEVICE` is one device (`CPU`, `GPU`, `GPU.1`, `NPU`), or a choice or combination of devices: `AUTO`,
`AUTO:GPU,CPU`, `AUTO:-CPU`, `MULTI:GPU,CPU`, `HETERO:GPU,CPU`, `BATCH:GPU(8)`. Each named device must be in OpenVINO's
`Core.available_devices`. OpenVINO's own errors about other devices are pages long.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from edge_server.backends.openvino.lean_import import import_openvino
from edge_server.errors import LoadError

COMBINING = ("AUTO", "MULTI", "HETERO", "BATCH")
"""Names that combine the devices after a colon."""

_NEEDS_OTHERS = ("MULTI", "BATCH")
_ITEM = re.compile(r"(-?)([A-Z]+(?:\.[0-9A-Z]+)*)(?:\([0-9]{1,4}\))?")


def checked_device(model: str, text: str, available: Sequence[str]) -> str:
    """Return the device in OpenVINO's notation. Raises LoadError if a named device is not on this machine."""
    wanted = "".join(text.split()).upper()
    head, colon, rest = wanted.partition(":")
    if head not in COMBINING:
        _check_one(model, wanted, wanted, available)
        return wanted
    names = rest.split(",") if colon else []
    if not names and (colon or head in _NEEDS_OTHERS):
        raise LoadError(
            f"model '{model}': TARGET_DEVICE '{wanted}' names no device; write {head}:<device>,<device>; "
            f"openvino finds: {', '.join(available)}"
        )
    for name in names:
        _check_one(model, wanted, name, available)
    return wanted


def reported() -> dict[str, tuple[str, ...]]:
    """Return OpenVINO's devices with their precisions (FP32, FP16, INT8 ...; () if a device does not report them).

    This loads all plugins and their drivers. Raises BackendMissing if OpenVINO is not installed.
    """
    core = import_openvino().Core()
    found: dict[str, tuple[str, ...]] = {}
    for device in core.available_devices:
        try:
            found[device] = tuple(map(str, core.get_property(device, "OPTIMIZATION_CAPABILITIES")))
        except RuntimeError:  # opening a model there gives a better error
            found[device] = ()
    return found


def involves_accelerator(device: str) -> bool:
    """Return whether another device than the CPU may run the model. Compiling for it is slow, so it is cached."""
    return device != "CPU"


def queryable_device(device: str) -> str:
    """Return the part of a device that OpenVINO has properties for: AUTO of AUTO:GPU,CPU."""
    return device.partition(":")[0]


def _check_one(model: str, whole: str, item: str, available: Sequence[str]) -> None:
    found = _ITEM.fullmatch(item)
    if found is None:
        raise LoadError(f"model '{model}': TARGET_DEVICE '{whole[:80]}' is not a list of devices: '{item[:80]}'")
    is_excluded, name = bool(found[1]), found[2]
    if is_excluded or name in available or any(one.startswith(f"{name}.") for one in available):
        return
    if name.endswith(".0") and name[:-2] in available:
        return
    raise LoadError(
        f"model '{model}': openvino finds no device '{name}' here; it finds: {', '.join(available) or 'none'}"
    )
