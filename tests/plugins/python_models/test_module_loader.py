"""Loading and unloading of the modules of several Python models."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edge_server.plugins.python_models.module_loader import ModelModules

ISOLATED = """
input { name: "IN" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
parameters { key: "isolation" value { string_value: "process" } }
"""


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_model_is_unloaded_while_other_threads_import(tmp_path: Path, quick_switches: None) -> None:
    (tmp_path / "1").mkdir()
    path = tmp_path / "1" / "model.py"
    path.write_text("import json\nTritonPythonModel = object\n")
    is_over = threading.Event()

    def import_and_forget(number: int) -> None:
        while not is_over.is_set():
            for name in [f"_edge_test_{number}_{index}" for index in range(50)]:
                sys.modules[name] = ModuleType(name)
            for name in [f"_edge_test_{number}_{index}" for index in range(50)]:
                del sys.modules[name]

    others = [threading.Thread(target=import_and_forget, args=(number,)) for number in range(2)]
    for thread in others:
        thread.start()
    try:
        for _ in range(200):
            source = ModelModules(path, tmp_path)
            source.load()
            source.unload()
            assert source.package not in sys.modules
    finally:
        is_over.set()
        for thread in others:
            thread.join()


def test_modules_of_an_isolated_model_have_plain_names(python_core: Any) -> None:
    folder = python_core.write(
        "m",
        """
        import importlib, pickle
        import plugins.double
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                importlib.import_module("audit_helper")
                return config
            def execute(self, requests):
                helper = importlib.import_module("audit_helper")
                import audit_helper
                assert helper is audit_helper and sys.modules["audit_helper"] is helper
                assert importlib.import_module("plugins.double") is plugins.double
                assert helper.__spec__.name == helper.__name__
                pickled = b"\\x80\\x04caudit_helper\\nThing\\n."
                assert pickle.loads(pickled) is audit_helper.Thing
                assert pickle._loads(pickled) is audit_helper.Thing
                import c_python_backend_utils
                assert c_python_backend_utils.Tensor is pb_utils.Tensor
                try:
                    importlib.import_module("audit_nobodys")
                except ModuleNotFoundError:
                    return [answer([audit_helper.LOADED])]
        """,
        ISOLATED,
    )
    version = folder.parent / "1"
    (version / "audit_helper.py").write_text("LOADED = globals().get('LOADED', 0) + 1\nclass Thing: pass\n")
    (version / "plugins").mkdir()
    (version / "plugins" / "__init__.py").touch()
    (version / "plugins" / "double.py").touch()
    python_core.service.load_model("m")
    assert python_core.value("m") == [1.0]
    assert "audit_helper" not in sys.modules


def test_plain_module_names_are_removed_with_the_model(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "audit_helper.py").touch()
    path = tmp_path / "1" / "model.py"
    path.write_text("import importlib\nhelper = importlib.import_module('audit_helper')\n")
    first = ModelModules(path, tmp_path, is_alone=True)
    first.load()
    first.unload()
    # What finds the packages of all models stays from the first of them on.
    before = list(sys.meta_path)
    source = ModelModules(path, tmp_path, is_alone=True)
    assert source.load().helper is sys.modules["audit_helper"]
    source.unload()
    assert "audit_helper" not in sys.modules
    shared = ModelModules(path, tmp_path)
    assert shared.load().helper.__name__ == f"{shared.package}.audit_helper"
    with pytest.raises(ModuleNotFoundError, match="audit_helper"):
        importlib.import_module("audit_helper")
    shared.unload()
    assert "audit_helper" not in sys.modules
    assert sys.meta_path == before


BY_NAME = """
import importlib
import importlib.util as util
import importlib.metadata
from importlib import import_module, machinery
import plugins.double

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        assert importlib.import_module("audit_helper").WORD == WORD
        return config
    def execute(self, requests):
        import audit_helper
        for find in (importlib.import_module, import_module):
            assert find("audit_helper") is audit_helper
            assert find("plugins.double") is plugins.double
            assert find(".audit_helper", __package__) is audit_helper
            assert find(".double", plugins.__name__) is plugins.double
            assert find("json") is json and find("numpy") is np and find("os.path") is os.path
            for name in ("audit_nobodys", "audit_helper.part", "plugins.nobodys"):
                try:
                    find(name)
                    raise AssertionError(name)
                except ModuleNotFoundError as error:
                    assert name in str(error)
            try:
                find("")
                raise AssertionError("an empty name")
            except ValueError:
                pass
        assert audit_helper.WORD == WORD and audit_helper.by_name() is plugins.double
        assert importlib.reload(audit_helper) is audit_helper
        assert audit_helper.LOADED == 2 + audit_helper.LOADED_BEFORE
        assert util.module_from_spec and machinery.ModuleSpec and importlib.metadata.version("numpy")
        assert importlib.__spec__.name == "importlib" and "invalidate_caches" in dir(importlib)
        return [answer([len(WORD)]) for _ in requests]
"""
HELPER = """
import importlib
LOADED_BEFORE = globals().get("LOADED", 1) - 1
LOADED = globals().get("LOADED", 0) + 1
def by_name():
    return importlib.import_module("plugins.double")
"""


def test_models_in_one_process_import_their_own_modules_by_name(python_core: Any) -> None:
    words = {"first": "own", "second": "another"}
    for name, word in words.items():
        version = python_core.write(name, f"WORD = {word!r}\n{BY_NAME}")
        (version / "audit_helper.py").write_text(f"WORD = {word!r}\n{HELPER}")
        (version / "plugins").mkdir()
        (version / "plugins" / "__init__.py").touch()
        (version / "plugins" / "double.py").touch()
    for name in words:
        python_core.service.load_model(name)
    for name, word in words.items():
        assert python_core.value(name) == [len(word)]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("audit_helper")
    python_core.service.unload_model("first")
    assert python_core.value("second") == [len("another")]
    assert "audit_helper" not in sys.modules


def test_models_import_by_name_concurrently(tmp_path: Path, quick_switches: None) -> None:
    sources = []
    for number in range(4):
        folder = tmp_path / str(number) / "1"
        folder.mkdir(parents=True)
        (folder / "audit_helper.py").write_text(f"NUMBER = {number}\n")
        (folder / "model.py").write_text(
            "import importlib\ndef find():\n    return importlib.import_module('audit_helper').NUMBER\n"
        )
        sources.append(ModelModules(folder / "model.py", folder.parent))
    models = [source.load() for source in sources]
    found: dict[int, int] = {}
    threads = [
        threading.Thread(target=lambda number=number: found.update({number: models[number % 4].find()}))
        for number in range(32)
    ]
    try:
        for thread in threads:
            thread.start()
    finally:
        for thread in threads:
            thread.join()
        for source in sources:
            source.unload()
    assert found == {number: number % 4 for number in range(32)}


class Unloading(MetaPathFinder):
    """Unloads a model during an import, just before the files are looked up."""

    def __init__(self, source: ModelModules) -> None:
        self._source = source
        self.asked: list[str] = []

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        self.asked.append(fullname)
        self._source.unload()


def test_an_import_succeeds_while_the_last_model_is_unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "1").mkdir()
    path = tmp_path / "1" / "model.py"
    path.write_text("TritonPythonModel = object\n")
    (tmp_path / "_edge_test_bystander.py").write_text("WORD = 'found'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    source = ModelModules(path, tmp_path)
    source.load()
    finder = Unloading(source)
    sys.meta_path.insert(sys.meta_path.index(PathFinder), finder)
    try:
        assert importlib.import_module("_edge_test_bystander").WORD == "found"
    finally:
        sys.meta_path.remove(finder)
        sys.modules.pop("_edge_test_bystander", None)
    assert "_edge_test_bystander" in finder.asked
    assert source.package not in sys.modules
