"""Upgrade, and return: today's server starts with what an earlier one left, and writes what the earlier one reads.

`tests/data/earlier_state` was made by the server of the commit 063a6361, see its README. Where the history of this
repository has that commit, the server itself is run too. Elsewhere, that it starts again with a folder of today's is
held by the form of the files: their names, keys and types are those that it reads, and what is new has a name of its
own or is one more key.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from edge_server.repository.choice.runtime_times import RuntimeTimes
from tests.kit.eventually import eventually
from tests.kit.server import clean_environment, serve

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
EARLIER = ROOT / "tests/data/earlier_state"
COMMIT = "063a6361"
MODEL = "scaled"
DIGESTS = {
    1: "sha256:a53f2c824a94ce57c8229422534d0cbfea4f9aad8fe5028c2066461d1fba58e9",
    2: "sha256:729fbc4ad6db1df3ad4251185f0f47e1ca406ccf3635832ac8de2b8b84902e7f",
}
"""As the earlier server stated them."""
CAMERA = "--source=name=door,url=demo,model=none"
GONE = ("[frigate]\n", "zmq_address = ", "lerobot = ")
"""Settings that went, see CHANGELOG: an operator deletes them."""
NEW_FILES = {"openings.json"}


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """The folder of a machine on which the earlier server ran, without the settings that went."""
    folder = tmp_path / "box"
    shutil.copytree(EARLIER, folder)
    settings = (folder / "edge_server.toml").read_text()
    kept = [line for line in settings.splitlines(keepends=True) if not line.startswith(GONE)]
    assert len(kept) == settings.count("\n") - len(GONE)
    (folder / "edge_server.toml").write_text("".join(kept))
    return folder


def flags(box: Path) -> tuple[str, ...]:
    return f"--config={box / 'edge_server.toml'}", f"--state-dir={box / 'state'}", CAMERA


def digest_of(server: Any) -> str:
    return server.ask("/v2/repository/index", {})[1][0].get("digest", "")


def read(box: Path, name: str) -> Any:
    return json.loads((box / "state" / name).read_text())


def misses(written: Any, earlier: Any, where: str) -> list[str]:
    """Return what the earlier server would miss in a file of today's: keys, and values of a type."""
    if isinstance(earlier, dict) and isinstance(written, dict):
        found = [f"{where}: {key}" for key in earlier if key not in written]
        return found + [item for key in earlier if key in written
                        for item in misses(written[key], earlier[key], f"{where}.{key}")]  # fmt: skip
    if isinstance(earlier, list) and isinstance(written, list) and len(earlier) == len(written):
        return [item for ours, theirs in zip(written, earlier, strict=True) for item in misses(ours, theirs, where)]
    return [] if type(written) is type(earlier) else [f"{where}: {written!r} in place of {earlier!r}"]


def test_a_server_starts_with_the_state_of_an_earlier_one(box: Path) -> None:
    with serve(box / "repository", *flags(box)) as server:
        assert eventually(lambda: server.get(f"/v2/models/{MODEL}/ready")[0] == 200)
        assert [item["version"] for item in server.ask("/edge/v1/models")[1]["models"]] == ["1"]  # it was pinned
        inputs = [{"name": "x", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}]
        assert server.infer(MODEL, {"inputs": inputs})[1]["outputs"][0]["data"] == [1, 2, 3, 4]
        assert eventually(lambda: digest_of(server) == DIGESTS[1])
        zones = server.ask("/edge/v1/cameras/door/zones")[1]
        assert (zones["stored_in"], [zone["name"] for zone in zones["zones"]]) == ("state_folder", ["porch"])
        log = server.log()
    # Its measurements do not say whether the runtimes answered alike, so they are made again.
    assert re.findall(r"'[^']*/(\w+\.\w+)' is not used: ([^;]*);", log) == [
        ("runtime_times.json", "it has no 'disagreement'")
    ]
    assert "cannot be read" not in log


def test_the_earlier_server_reads_what_today_s_writes(box: Path) -> None:
    shutil.rmtree(box / "state")
    with serve(box / "repository", *flags(box)) as server:
        assert eventually(lambda: digest_of(server) == DIGESTS[2])
        assert server.ask(f"/edge/v1/models/{MODEL}/rollback", {"version": 1})[0] == 200
        assert eventually(lambda: digest_of(server) == DIGESTS[1])
        zones = [{"name": "porch", "points": [[0, 0], [1, 0], [1, 1]]}]
        path = "/edge/v1/cameras/door/zones"
        assert server.ask(path, {"zones": zones, "lines": []}, method="PUT")[0] == 200
    times = RuntimeTimes(box / "state")
    assert times.put(box / f"repository/{MODEL}/2/model.onnx", {"openvino": 0.02, "onnxruntime": 0.01})
    earlier = {path.name for path in (EARLIER / "state").iterdir()}
    assert {path.name for path in (box / "state").iterdir()} - NEW_FILES == earlier
    for name in sorted(earlier - {"digests.json"}):
        assert misses(read(box, name), json.loads((EARLIER / "state" / name).read_text()), name) == []
    # Its keys are device, inode, size and times of files, which no two machines share.
    stamps = read(box, "digests.json")["files"]
    assert len(stamps) == 2
    assert all(re.fullmatch(r"(\d+\.){4}\d+ [0-9a-f]{64}", f"{stamp} {digest}") for stamp, digest in stamps.items())


@pytest.fixture
def earlier_program(tmp_path: Path) -> Path:
    """The folder with the earlier server's package."""
    archive, folder = tmp_path / "earlier.tar", tmp_path / "earlier"
    command = ["git", "-C", str(ROOT), "archive", f"--output={archive}", COMMIT, "edge_server"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the history has no commit {COMMIT}: {done.stderr.strip()}")
    with tarfile.open(archive) as opened:
        opened.extractall(folder)
    found = subprocess.run(
        [sys.executable, "-c", "import edge_server; print(edge_server.__file__)"], cwd="/",
        env=clean_environment({"PYTHONPATH": str(folder)}), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.strip() == str(folder / "edge_server/__init__.py")
    return folder


def test_the_earlier_server_s_folders_are_served_by_today_s_and_then_by_the_earlier_again(
    box: Path, earlier_program: Path
) -> None:
    shutil.rmtree(box / "state")
    earlier = {"PYTHONPATH": str(earlier_program)}
    zones_path = "/edge/v1/cameras/door/zones"
    zones = {"zones": [{"name": "porch", "points": [[0, 0], [1, 0], [1, 1]]}], "lines": []}
    inputs = [{"name": "x", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}]
    answers = []
    for program in (earlier, {}, earlier):
        with serve(box / "repository", *flags(box), environment=program) as server:
            if program is not earlier or not answers:
                # Each writes what the next one reads: the first anew, today's in place of the earlier one's.
                assert eventually(lambda: digest_of(server) == DIGESTS[1 if answers else 2])
                assert server.ask(f"/edge/v1/models/{MODEL}/rollback", {"version": 1})[0] == 200
                kept = server.ask(zones_path)[1]
                assert [zone["name"] for zone in kept["zones"]] == ["porch"] * len(answers)
                assert server.ask(zones_path, zones, method="PUT")[0] == 200
            assert eventually(lambda: digest_of(server) == DIGESTS[1])
            kept = server.ask(zones_path)[1]
            answers.append((server.infer(MODEL, {"inputs": inputs}), kept["stored_in"], kept["zones"]))
            server.stop_cleanly()
            # The camera has no model, and today's measures the times of the earlier one's again.
            complaints = re.findall(r"(?m)^[EWF]\d{4} .*", server.log())
            assert [line for line in complaints if "source 'door'" not in line and "runtime_times" not in line] == []
    (status, answer), _, kept_zones = answers[0]
    assert (status, answer["model_version"], answer["outputs"][0]["data"]) == (200, "1", [1, 2, 3, 4])
    assert len(kept_zones) == 1
    assert answers == [answers[0]] * 3
