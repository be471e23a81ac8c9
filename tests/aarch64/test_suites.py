"""The fast tests of what depends on the processor, run on an emulated aarch64 machine."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]

LIMIT_S = 7000.0

LEFT_OUT = "tests/memory/test_malloc_settings.py"
"""Counts resident memory to the MiB. The emulator's own memory is in it, and differs by one now and then."""


@pytest.mark.parametrize("folder", ["core", "repository", "frontends/http2", "protocol", "memory", "plugins/vision"])
def test_the_fast_tests_pass(installed: Any, folder: str) -> None:
    printed = installed.run(
        ".venv/bin/python", "-m", "pytest", f"tests/{folder}", f"--ignore={LEFT_OUT}", "-n", "2", "-o", "timeout=1200",
        "-p", "no:cacheprovider", "-rfEs", "--basetemp=/tmp/pytest", timeout_s=LIMIT_S,
    )  # fmt: skip
    print("\n" + printed[-3000:])
    assert re.search(r"\d+ passed", printed)
