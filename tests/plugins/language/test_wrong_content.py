"""Files of an export whose content does not match their names, found when a runtime opens them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edge_server.config.merge_settings import parse_serve
from edge_server.errors import EdgeServerError
from edge_server.process.composition_root import build
from edge_server.telemetry.log import LogSettings

DATA = Path(__file__).parents[2] / "data"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
NAMED = "is a Git LFS pointer to the file of 12345 bytes, not the file itself: run 'git lfs pull' where it was cloned"


@pytest.mark.full
@pytest.mark.parametrize(
    ("runtime", "source", "file", "backend"),
    [
        ("openvino_genai", "tiny_embeddings", "openvino_model.bin", "openvino_embeddings"),
    ],
)
def test_a_git_lfs_pointer_in_an_export_is_reported(
    tmp_path: Path, runtime: str, source: str, file: str, backend: str
) -> None:
    pytest.importorskip(runtime)
    folder = tmp_path / "m"
    shutil.copytree(DATA / source, folder / "1", ignore=shutil.ignore_patterns("make.py"))
    (folder / "config.pbtxt").write_text(f'backend: "{backend}"')
    (folder / "1" / file).write_bytes(POINTER)
    config = parse_serve([f"--model-repository={tmp_path}", "--model-control-mode=explicit"], {}).config
    core = build(config, LogSettings(config.log))
    core.service.started()
    try:
        with pytest.raises(EdgeServerError) as caught:
            core.service.load_model("m")
    finally:
        core.close(5.0)
    assert f": model 'm' version 1, file '{file}' {NAMED};" in caught.value.message
