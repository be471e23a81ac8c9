"""A model, the archives that bring it, and the command that pulls it."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Callable, Mapping

Edge = Callable[..., subprocess.CompletedProcess[str]]
CONFIG = b"""
backend: "identity"
input { name: "I" data_type: TYPE_FP32 dims: [1] }
output { name: "O" data_type: TYPE_FP32 dims: [1] }
"""
MODEL = {"config.pbtxt": CONFIG, "1/weights": b"w" * 5000}


def tar(files: Mapping[str, bytes | None], mode: str = "w", links: Mapping[str, str] | None = None) -> bytes:
    """Return a tar file; None makes a folder."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            info.size = len(content or b"")
            archive.addfile(info, io.BytesIO(content or b""))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return made.getvalue()
