"""Upgrade, and return: today's server starts with what an earlier one left, and writes what the earlier one reads.

`tests/data/earlier_state` was made by the server of the commit 063a6361, see its README. That server is not run here.
That it starts again with a folder of today's is held by the form of the files: their names, keys and types are those
that it reads, and what is new has a name of its own or is one more key.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from edge_server.repository.choice.runtime_times import RuntimeTimes
from tests.kit.eventually import eventually
from tests.kit.server import serve

pytestmark = pytest.mark.full

EARLIER = Path(__file__).parent.parent / "data/earlier_state"
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
