"""What the emulation changes in the kernel's list of program formats."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak


@pytest.fixture
def formats(root: Path, tmp_path: Path) -> Iterator[Path]:
    """The list, as a folder."""
    folder = tmp_path / "formats"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", folder], check=False).returncode != 0:
        pytest.skip("binfmt_misc cannot be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_registered_names_stay_and_added_names_are_removed(
    formats: Path, root: Path, emulation: Callable[[Path, Path], AbstractContextManager[None]], tmp_path: Path
) -> None:
    def entries() -> set[str]:
        """Return all but what the tests of another pytest process have added meanwhile."""
        pid = str(os.getpid())
        return {name for name in os.listdir(formats) if not name.startswith("edge-server-test-") or pid in name}

    name = f"edge-server-test-{os.getpid()}-before"
    (formats / "register").write_text(f":{name}:E::edge-server-test::/bin/true:")
    try:
        before = entries()
        assert name in before
        (tmp_path / "used").mkdir()
        with emulation(root, tmp_path / "used"):
            subprocess.run(["chroot", root, "/bin/true"], check=True)
            assert before <= entries()
        assert entries() == before
        assert not os.path.ismount(tmp_path / "used")
    finally:
        (formats / name).write_text("-1")
