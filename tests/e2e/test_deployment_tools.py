"""Models deployed with common tools: with cp, rsync, scp, tar, unzip, git, ln, mv and sed, into a server that runs.

The fallback scan is an hour away, so whatever is served here was heard of.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.kit.eventually import eventually
from tests.kit.models import finish
from tests.kit.server import serve
from tests.kit.together import together

CONFIG = 'backend: "onnxruntime"\n'
DEAF = "--repository-poll-secs=3600"


def marked(mark: int, weights: int = 50_000) -> bytes:
    """Return an ONNX file whose answer to 0 is `mark`; half of it is not a model."""
    ballast = np.random.default_rng(mark).standard_normal(weights).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMax", ["ballast"], ["most"], keepdims=0),
            helper.make_node("Mul", ["most", "nothing"], ["none"]),
            helper.make_node("Add", ["INPUT0", "none"], ["same"]),
            helper.make_node("Add", ["same", "mark"], ["OUTPUT0"]),
        ],
        "marked",
        [helper.make_tensor_value_info("INPUT0", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("OUTPUT0", TensorProto.FLOAT, [1])],
        [
            numpy_helper.from_array(ballast, "ballast"),
            numpy_helper.from_array(np.zeros((), np.float32), "nothing"),
            numpy_helper.from_array(np.array([mark], np.float32), "mark"),
        ],
    )
    return finish(graph).SerializeToString()


def write(folder: Path, mark: int, version: int = 1, config: str = CONFIG) -> Path:
    (folder / str(version)).mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(config)
    (folder / str(version) / "model.onnx").write_bytes(marked(mark))
    return folder


def installed(tools: list[str]) -> list[str]:
    """Return those of the tools that this machine has; skip the test without any."""
    found = [tool for tool in tools if tool in ("mv", "cp -r", "cp -a") or shutil.which(tool.split()[0])]
    return found or pytest.skip(f"not installed: {', '.join(tools)}")


def sh(line: str, *words: object) -> None:
    """Run a shell line; $1, $2 ... are the arguments."""
    done = subprocess.run(
        ["sh", "-euc", line, "sh", *map(str, words)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


class Site:
    """A server, its repository, and what it answers."""

    def __init__(self, server: Any, root: Path) -> None:
        self.server = server
        self.root = root

    def answer(self, name: str) -> tuple[int, str] | None:
        """Return (mark, version) of a model's answer, None when it gives none."""
        body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [0]}]}
        status, reply = self.server.infer(name, body)
        return (round(reply["outputs"][0]["data"][0]), reply["model_version"]) if status == 200 else None

    def serves(self, name: str, mark: int | None, version: int = 1) -> bool:
        wanted = None if mark is None else (mark, str(version))
        return eventually(lambda: self.answer(name) == wanted)

    def deploys_without_a_failure(self, name: str, mark: int, version: int = 1) -> None:
        assert self.serves(name, mark, version), f"{self.answer(name)}\n{self.server.log()}"
        failed = [line for line in self.server.log().splitlines() if f"'{name}'" in line and "not" in line.split()]
        assert not failed, "\n".join(failed)


@pytest.fixture(scope="module")
def shared(module_repository: Any) -> Iterator[Site]:
    with serve(module_repository.path, DEAF) as server:
        yield Site(server, module_repository.path)
        server.stop_cleanly()


COPIES = {
    "cp -r": 'cp -r "$1" "$2"',
    "cp -a": 'cp -a "$1" "$2"',
    "scp": 'scp -q -r "$1" "$2"',
    "rsync -a": 'rsync -a "$1/" "$2/"',
    "rsync -a --inplace": 'rsync -a --inplace "$1/" "$2/"',
    "rsync -a --delay-updates": 'rsync -a --delay-updates "$1/" "$2/"',
    "tar": 'tar -C "$(dirname "$1")" -cf "$1.tar" "$(basename "$1")" && tar -C "$(dirname "$2")" -xf "$1.tar"',
    "unzip": '(cd "$(dirname "$1")" && python3 -m zipfile -c "$1.zip" "$(basename "$1")/") '
    '&& unzip -qo "$1.zip" -d "$(dirname "$2")"',
    "mv": 'mv -T "$1" "$2"',
}


@pytest.mark.parametrize("is_rsync", [False, pytest.param(True, marks=pytest.mark.full)], ids=["", "rsync"])
def test_what_a_tool_copies_is_served_once_it_is_complete(shared: Site, tmp_path: Path, is_rsync: bool) -> None:
    """A new model, a new version beside it, and files over the old ones."""

    def check(tool: str) -> None:
        name, copy = "".join(filter(str.isalnum, tool)), COPIES[tool]
        target = shared.root / name
        sh(copy, write(tmp_path / name, 1), target)
        shared.deploys_without_a_failure(name, 1)
        sh(copy, write(tmp_path / name, 2, version=2) / "2", target / "2")
        shared.deploys_without_a_failure(name, 2, version=2)
        if tool not in ("mv", "cp -r", "cp -a", "scp"):  # These copy beside or into what is there.
            source = write(tmp_path / name, 3, version=2)
            # Files of the same size and second are the same to rsync.
            os.utime(source / "2" / "model.onnx", (1_700_000_000, 1_700_000_000))
            sh(copy, source, target)
            shared.deploys_without_a_failure(name, 3, version=2)
        sh('rm -r "$1"', target / "2")
        assert shared.serves(name, 1)
        sh('rm -r "$1"', target)
        assert shared.serves(name, None)

    together(check, installed([tool for tool in COPIES if tool.startswith("rsync") == is_rsync]))


@pytest.mark.full
def test_a_slow_rsync_is_not_loaded_before_its_last_byte(shared: Site, tmp_path: Path) -> None:
    installed(["rsync"])
    write(shared.root / "slow_rsync", 1)
    assert shared.serves("slow_rsync", 1)
    for flags in ("", "--inplace"):
        source = write(tmp_path / "slow_rsync", 2 + bool(flags))
        os.utime(source / "1" / "model.onnx", (1_700_000_000 + bool(flags),) * 2)
        sh(f'rsync -a {flags} --bwlimit=100 "$1/" "$2/"', source, shared.root / "slow_rsync")
        shared.deploys_without_a_failure("slow_rsync", 2 + bool(flags))


SWAPS = {
    "ln -sfn": 'ln -sfn "$1" "$2"',
    "mv -T": 'ln -s "$1" "$(dirname "$2")/.next" && mv -T "$(dirname "$2")/.next" "$2"',
}


def test_switching_a_symlink_deploys_the_other_release(shared: Site) -> None:
    def check(case: tuple[str, str]) -> None:
        what, swap = case
        name = f"{what}_{swap[:2]}"
        releases = shared.root / ".releases" / name
        for mark in (41, 42, 43):
            write(releases / f"release-{mark}", mark)
        link = shared.root / name
        tail = ""
        if what == "version":
            link.mkdir()
            link, tail = link / "1", "/1"
        prefix = "../" * (1 if what == "version" else 0) + f".releases/{name}/release-"
        link.symlink_to(f"{prefix}41{tail}")
        assert shared.serves(name, 41)
        for mark in (42, 43):
            sh(SWAPS[swap], f"{prefix}{mark}{tail}", link)
            shared.deploys_without_a_failure(name, mark)

    together(check, list(itertools.product(("model", "version"), SWAPS)))


def test_checking_out_another_branch_deploys_it(tmp_path: Path) -> None:
    """The repository of models is a work tree of git, or a folder in one; one server serves both."""
    installed(["git"])
    git = 'git -C "$1" -c user.name=n -c user.email=e@x '
    roots = {"top": tmp_path / "top", "below": tmp_path / "below" / "models"}
    for name, root in roots.items():
        work = tmp_path / name
        sh('git init -q -b one "$1"', work)
        write(root / f"{name}_both", 1)
        write(root / f"{name}_first", 1)
        sh(git + 'add . && git -C "$1" -c user.name=n -c user.email=e@x commit -q -m one', work)
        sh(git + "checkout -q -b two", work)
        write(root / f"{name}_both", 2)
        shutil.rmtree(root / f"{name}_first")
        write(root / f"{name}_second", 2)
        sh(git + 'add -A . && git -C "$1" -c user.name=n -c user.email=e@x commit -q -m two', work)
        sh(git + "checkout -q one", work)
    with serve(roots["top"], f"--model-repository={roots['below']}", DEAF) as server:

        def check(name: str) -> None:
            site = Site(server, roots[name])
            assert (site.answer(f"{name}_both"), site.answer(f"{name}_first")) == ((1, "1"), (1, "1"))
            for branch, mark, here, gone in (("two", 2, "second", "first"), ("one", 1, "first", "second")):
                sh(git + f"checkout -q {branch}", tmp_path / name)
                site.deploys_without_a_failure(f"{name}_both", mark)
                assert site.serves(f"{name}_{here}", mark)
                assert site.serves(f"{name}_{gone}", None)

        together(check, roots)
