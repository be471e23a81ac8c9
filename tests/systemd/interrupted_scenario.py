"""Scenario in a chroot: kills dpkg at each line that it says of its state, and records which version starts then."""

import json
import os
import signal
import subprocess
import traceback
from pathlib import Path

VERSIONS = ("2.0", "2.1")
CURRENT = Path("/opt/edge_server/current")
found: dict = {"steps": []}


def current() -> str:
    """Return the version that starts, "" if it does not."""
    done = subprocess.run(
        [str(CURRENT / "bin/edge-server"), "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    return os.readlink(CURRENT).rpartition("/")[2] if done.returncode == 0 else ""


def install(version: str, kill_at: int) -> bool:
    """Return whether dpkg came to its end before that line."""
    process = subprocess.Popen(
        ["dpkg", "--status-fd", "1", "--install", f"/new/edge-server_{version}.deb"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    lines = 0
    assert process.stdout is not None
    for line in process.stdout:
        lines += line.startswith(("status:", "processing:"))
        if lines == kill_at:
            os.killpg(process.pid, signal.SIGKILL)
            break
    process.stdout.close()
    return process.wait(60) == 0


def main() -> None:
    # The index of man pages takes seconds at each call.
    Path("/var/lib/man-db/auto-update").unlink(missing_ok=True)
    before = current()
    for kill_at in range(1, 40):
        version = VERSIONS[kill_at % 2]
        is_whole = install(version, kill_at)
        starts = current()
        # Also where dpkg was killed while it unpacked and asks for just this.
        again = ["dpkg", "--install", f"/new/edge-server_{version}.deb"]
        subprocess.run(again, capture_output=True, timeout=60, check=True)
        if is_whole:
            return
        found["steps"].append({"starts": starts, "possible": [before, version], "in_the_end": current()})
        before = version


try:
    main()
except Exception:  # noqa: BLE001 - every error is reported to the test outside
    found["error"] = traceback.format_exc()
finally:
    Path("/results/results.json").write_text(json.dumps(found))
