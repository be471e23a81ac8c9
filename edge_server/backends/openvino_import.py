"""Import of the OpenVINO library without its model converters.

`import openvino` brings `openvino.tools.ovc` along where it can: some 15 MB that a server of finished models does not
use, and a module that reports its import over the network unless told not to. The package does without it, so its
import is refused once, on the thread that imports the package here; `openvino.convert_model` imports it when called.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from edge_server.backends.runtime_library import import_runtime

_CONVERTERS = "openvino.tools.ovc"


def import_openvino() -> ModuleType:
    """Import OpenVINO. Raises BackendMissing as `import_runtime` does."""
    if "openvino" in sys.modules:
        return import_runtime("openvino", "Core")
    with _lock:
        _refusal.thread = threading.get_ident()
        try:
            return import_runtime("openvino", "Core")
        finally:
            _refusal.thread = 0


def _convert_model(*positional: Any, **named: Any) -> Any:
    """As the function of this name in the converters."""
    return importlib.import_module(_CONVERTERS).convert_model(*positional, **named)


class _Refusal(MetaPathFinder):
    """Stays in `sys.meta_path`: taking an entry out makes a thread that looks through just then miss the next one."""

    def __init__(self) -> None:
        self.thread = 0

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == _CONVERTERS and threading.get_ident() == self.thread:
            # While the package is imported, so that nobody sees it without.
            sys.modules["openvino"].convert_model = _convert_model  # type: ignore[attr-defined]
            raise ImportError(f"{name} is imported when it is used")
        return None


_lock = threading.Lock()
_refusal = _Refusal()
sys.meta_path.insert(0, _refusal)
