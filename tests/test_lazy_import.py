"""Deferred imports: a library's code runs once, at the first use of one of its names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = {
    "__init__.py": """__version__ = "1.2"
import threading
RUNS = globals().get("RUNS", 0) + 1
from .part import VALUE
import time
time.sleep(0.05)  # so that threads meet while this runs
def double(x): return 2 * x
""",
    "part.py": "from . import __version__\nVALUE = __version__ + '!'\n",
    "other.py": "from . import part\nNAME = 'other'\n",
    "late_part.py": "from . import double\nFOUR = double(2)\n",
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "lib_under_test"
    folder.mkdir()
    for name, text in LIBRARY.items():
        (folder / name).write_text(text)
    return tmp_path


def run_and_read(code: str, folder: Path) -> str:
    """Return the output of a new Python process that runs the code."""
    names = "from edge_server.lazy_import import defer_import, run_deferred_import"
    whole = f"import sys; sys.path.insert(0, {str(folder)!r})\n{names}\n{code}"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize(
    "first_use",
    ["lib.double(1)", "run_deferred_import('lib_under_test')", "import lib_under_test.part", "lib.__path__"],
)
def test_its_code_runs_once_with_the_first_use_and_not_before(library: Path, first_use: str) -> None:
    code = f"""
print(defer_import("lib_under_test"))
import lib_under_test as lib
print("RUNS" in vars(lib), "lib_under_test.part" in sys.modules)
{first_use}
print(lib.RUNS, lib.double(2), lib.VALUE, lib.__version__, type(lib).__name__, lib is sys.modules["lib_under_test"])
run_deferred_import("lib_under_test")
print(lib.RUNS)
"""
    assert run_and_read(code, library).split("\n") == ["True", "False False", "1 4 1.2! 1.2 module True", "1"]


def test_of_a_library_that_gathers_names_parts_come_alone_and_the_rest_on_demand(library: Path) -> None:
    code = """
defer_import("lib_under_test", has_free_parts=True)
from lib_under_test import other
import lib_under_test as lib
print(other.NAME, lib.part.VALUE, "RUNS" in vars(lib))
from lib_under_test import double
print(double(4), lib.RUNS, type(lib).__name__)
"""
    assert run_and_read(code, library).split("\n") == ["other 1.2! False", "8 1 module"]


def test_a_part_that_needs_the_whole_gets_it(library: Path) -> None:
    code = 'defer_import("lib_under_test", has_free_parts=True)\nimport lib_under_test.late_part as p\nprint(p.FOUR)'
    assert run_and_read(code, library) == "4"


def test_threads_that_come_at_once_wait_for_the_one_that_runs_it(library: Path) -> None:
    code = """
defer_import("lib_under_test")
import lib_under_test as lib
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    print(set(pool.map(lambda n: lib.double(3), range(64))), lib.RUNS)
"""
    assert run_and_read(code, library) == "{6} 1"


def test_a_name_it_has_not_is_missing_as_ever(library: Path) -> None:
    code = """
defer_import("lib_under_test")
import lib_under_test as lib
for _ in range(2):
    try: lib.absent
    except AttributeError as error: print(error)
"""
    assert run_and_read(code, library).split("\n") == ["module 'lib_under_test' has no attribute 'absent'"] * 2


def test_a_library_that_fails_says_so_each_time(library: Path) -> None:
    (library / "lib_under_test/__init__.py").write_text("raise ImportError('no such driver')")
    code = """
defer_import("lib_under_test")
import lib_under_test as lib
for _ in range(2):
    try: run_deferred_import("lib_under_test")
    except ImportError as error: print(error)
"""
    assert run_and_read(code, library).split("\n") == ["no such driver"] * 2


def test_a_module_that_is_imported_already_or_absent_is_left_alone(library: Path) -> None:
    code = """
import json
print(defer_import("json"), defer_import("no_such_library"))
run_deferred_import("json"); run_deferred_import("no_such_library")
"""
    assert run_and_read(code, library) == "False False"


def test_numpy_and_the_client_of_aiohttp_work_after_they_were_put_off() -> None:
    code = """
defer_import("numpy"); defer_import("aiohttp", has_free_parts=True)
import numpy as np
from aiohttp import web
from edge_server.core.tensor import DType
import edge_server.process.server, edge_server.process.http_routes, edge_server.frontends.grpc.server
print("numpy._core" in sys.modules, "aiohttp.client" in sys.modules)
print(DType.FP32.numpy, DType.from_numpy("i8").value, np.arange(3).sum())
import aiohttp
print(aiohttp.ClientSession.__name__, aiohttp.web is web, isinstance(aiohttp.__version__, str))
"""
    assert run_and_read(code, Path()).split("\n") == ["False False", "float32 INT64 3", "ClientSession True True"]
