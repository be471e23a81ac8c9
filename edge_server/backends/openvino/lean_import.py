"""Import of the OpenVINO library without its model converters, which saves 15 MB of memory.

`import openvino` also imports `openvino.tools.ovc`, if it is installed: some 15 MB that a server does not use, and a
module that by default reports its import over the network. openvino works without it. So this module makes that import
fail while openvino is imported here. `openvino.convert_model` imports it when it is called.
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

from edge_server.backends.runtime_errors import import_runtime

_CONVERTERS = "openvino.tools.ovc"


def import_openvino() -> ModuleType:
    """Import OpenVINO. Raises BackendMissing as `import_runtime` does."""
    if "openvino" in sys.modules:
        return import_runtime("openvino", "Core")
    with _lock:
        _blocker.thread = threading.get_ident()
        try:
            return import_runtime("openvino", "Core")
        finally:
            _blocker.thread = 0


class _ConverterBlocker(MetaPathFinder):
    """Makes the import of the converters fail on one thread.

    It stays in `sys.meta_path`. If it were removed, a thread that iterates over that list could skip the next entry.
    """

    def __init__(self) -> None:
        self.thread = 0

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == _CONVERTERS and threading.get_ident() == self.thread:

            def convert_model(*positional: Any, **named: Any) -> Any:
                return importlib.import_module(_CONVERTERS).convert_model(*positional, **named)

            # Set while the package is imported, so that the package never lacks it.
            sys.modules["openvino"].convert_model = convert_model  # type: ignore[attr-defined]
            raise ImportError(f"{name} is imported when it is used")
        return None


_lock = threading.Lock()
_blocker = _ConverterBlocker()
sys.meta_path.insert(0, _blocker)
