"""GPU identity: the properties of a machine that an engine depends on (Jetson release, active GPU partitions)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_RELEASE = re.compile(r"#\s*R(\d+)\s*\(release\),\s*REVISION:\s*([\d.]+)")
_MODE = re.compile(r"pmode:\s*0*(\d+)")
_MODEL = re.compile(r"<\s*POWER_MODEL\b[^>]*\bID=(\d+)")
_MASK = re.compile(r"^\s*TPC_POWER_GATING\s+TPC_PG_MASK\s+(\S+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """`l4t`: "36.4.3", "" where it is no Jetson. `tpc_mask`: which of the GPU's processors the power mode has gated, as
    nvpmodel's configuration writes it, "" where it gates none or does not say."""

    l4t: str = ""
    tpc_mask: str = ""


def read_box(root: Path = Path("/")) -> GpuIdentity:
    """Read the files of NVIDIA's system below `root`. What cannot be read counts as absent."""
    release = _RELEASE.search(_text(root / "etc/nv_tegra_release"))
    if release is None:
        return GpuIdentity()
    mode = _MODE.search(_text(root / "var/lib/nvpmodel/status"))
    return GpuIdentity(
        f"{release[1]}.{release[2]}", _mask_of(_text(root / "etc/nvpmodel.conf"), mode[1] if mode else "")
    )


def _mask_of(configuration: str, mode: str) -> str:
    """Return the mask in the section of a power mode."""
    current = ""
    for line in configuration.splitlines():
        model = _MODEL.search(line)
        if model is not None:
            current = model[1]
        mask = _MASK.match(line)
        if mask is not None and mode and current == mode:
            return mask[1]
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
