"""Models deployed with common tools: with cp, rsync, scp, tar, unzip, git, ln, mv and sed, into a server that runs.

The fallback scan is an hour away, so whatever is served here was heard of.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
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

    def __init__(self, server: Any, root: Path, eventually: Callable[[Callable[[], bool]], bool]) -> None:
        self.server = server
        self.root = root
        self._eventually = eventually

    def answer(self, name: str) -> tuple[int, str] | None:
        """Return (mark, version) of a model's answer, None when it gives none."""
        body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [0]}]}
        status, reply = self.server.infer(name, body)
        return (round(reply["outputs"][0]["data"][0]), reply["model_version"]) if status == 200 else None

    def serves(self, name: str, mark: int | None, version: int = 1) -> bool:
        wanted = None if mark is None else (mark, str(version))
        return self._eventually(lambda: self.answer(name) == wanted)

    def deploys_without_a_failure(self, name: str, mark: int, version: int = 1) -> None:
        assert self.serves(name, mark, version), f"{self.answer(name)}\n{self.server.log()}"
        failed = [line for line in self.server.log().splitlines() if f"'{name}'" in line and "not" in line.split()]
        assert not failed, "\n".join(failed)

    def reasons(self, name: str) -> str:
        status, entries = self.server.ask("/v2/repository/index", {})
        assert status == 200
        return " ".join(entry.get("reason", "") for entry in entries if entry["name"] == name)


@pytest.fixture(scope="module")
def shared(module_repository: Any) -> Iterator[Site]:
    with serve(module_repository.path, DEAF) as server:
        yield Site(server, module_repository.path, eventually)
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


def copies(*without: str) -> Any:
    """Return a mark: the test gets as `tools` those of `COPIES` that are on every machine, and rsync's as `full`."""
    tools = [name for name in COPIES if name not in without]
    rsync = [name for name in tools if name.startswith("rsync")]
    common = [name for name in tools if name not in rsync]
    return pytest.mark.parametrize("tools", [common, pytest.param(rsync, marks=pytest.mark.full)], ids=["", "rsync"])


def named(prefix: str, tool: str) -> str:
    return prefix + "".join(filter(str.isalnum, tool))


@copies()
def test_a_new_model_is_served_once_it_is_copied(shared: Site, tmp_path: Path, tools: list[str]) -> None:
    def check(tool: str) -> None:
        name = named("new_", tool)
        sh(COPIES[tool], write(tmp_path / name, 7), shared.root / name)
        shared.deploys_without_a_failure(name, 7)
        sh('rm -r "$1"', shared.root / name)
        assert shared.serves(name, None)

    together(check, installed(tools))


@copies()
def test_a_new_version_takes_over_once_it_is_copied(shared: Site, tmp_path: Path, tools: list[str]) -> None:
    def check(tool: str) -> None:
        name = named("more_", tool)
        write(shared.root / name, 1)
        assert shared.serves(name, 1)
        sh(COPIES[tool], write(tmp_path / name, 2, version=2) / "2", shared.root / name / "2")
        shared.deploys_without_a_failure(name, 2, version=2)
        sh('rm -r "$1"', shared.root / name / "2")
        assert shared.serves(name, 1)

    together(check, installed(tools))


@copies("mv", "cp -r", "cp -a", "scp")
def test_a_file_copied_over_the_old_one_is_a_new_generation(shared: Site, tmp_path: Path, tools: list[str]) -> None:
    def check(tool: str) -> None:
        name = named("again_", tool)
        write(shared.root / name, 1)
        assert shared.serves(name, 1)
        source = write(tmp_path / name, 2)
        # Files of the same size and second are the same to rsync.
        os.utime(source / "1" / "model.onnx", (1_700_000_000, 1_700_000_000))
        sh(COPIES[tool], source, shared.root / name)
        shared.deploys_without_a_failure(name, 2)

    together(check, installed(tools))


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


def test_an_upload_that_stalls_is_not_loaded_before_its_last_byte(shared: Site, tmp_path: Path) -> None:
    write(shared.root / "stalls", 1)
    assert shared.serves("stalls", 1)
    source = write(tmp_path / "stalls", 2) / "1" / "model.onnx"
    sh(
        'mkdir "$2" && { head -c 60000 "$1"; sleep 1.5; tail -c +60001 "$1" | head -c 60000; sleep 1.5; '
        'tail -c +120001 "$1"; } > "$2/model.onnx"',
        source,
        shared.root / "stalls" / "2",
    )
    shared.deploys_without_a_failure("stalls", 2, version=2)


def test_after_an_aborted_upload_the_old_version_serves_until_a_complete_one(shared: Site, tmp_path: Path) -> None:
    path = write(shared.root / "broken", 1) / "1" / "model.onnx"
    assert shared.serves("broken", 1)
    source = write(tmp_path / "broken", 2) / "1" / "model.onnx"
    sh('head -c 60000 "$1" > "$2"', source, path)
    assert eventually(lambda: bool(shared.reasons("broken")))
    assert shared.answer("broken") == (1, "1")
    sh('cp "$1" "$2"', source, path)
    assert shared.serves("broken", 2)
    assert shared.reasons("broken") == ""


EDITS = {
    "sed": 'sed -i "s/3/5/" "$1"',
    "in place": 'printf "metric_tags { key: \\"n\\" value: \\"5\\" } backend: \\"onnxruntime\\"" > "$1"',
    "with a backup beside it": 'cp "$1" "$1~" && sed "s/3/5/" "$1~" > "$1"',
    "by rename": 'sed "s/3/5/" "$1" > "$1.tmp" && mv "$1.tmp" "$1"',
}


def test_an_edit_of_the_configuration_takes_effect(shared: Site) -> None:
    def check(way: str) -> None:
        name = named("edit_", way)
        write(shared.root / name, 1, config=CONFIG + 'metric_tags { key: "n" value: "3" }\n')
        assert shared.serves(name, 1)

        def tag() -> str:
            status, found = shared.server.ask(f"/v2/models/{name}/config")
            return str(found["metric_tags"]["n"]) if status == 200 else ""

        assert tag() == "3"
        sh(EDITS[way], shared.root / name / "config.pbtxt")
        assert eventually(lambda: tag() == "5")
        assert shared.answer(name) == (1, "1")

    together(check, EDITS)


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


def test_a_repository_that_is_a_symlink_can_be_switched(tmp_path: Path) -> None:
    """Each way of swapping has a repository of its own, all served by one server."""
    links = {}
    for swap in SWAPS:
        tool = swap[:2]
        for mark in (41, 42):
            write(tmp_path / tool / f"release-{mark}" / f"{tool}_stays", mark)
            write(tmp_path / tool / f"release-{mark}" / f"{tool}_only_{mark}", mark)
        links[swap] = tmp_path / tool / "current"
        links[swap].symlink_to("release-41")
    first, *others = links.values()
    with serve(first, *(f"--model-repository={other}" for other in others), DEAF) as server:

        def check(swap: str) -> None:
            tool, current = swap[:2], links[swap]
            site = Site(server, current, eventually)
            assert (site.answer(f"{tool}_stays"), site.answer(f"{tool}_only_41")) == ((41, "1"), (41, "1"))
            sh(SWAPS[swap], "release-42", current)
            site.deploys_without_a_failure(f"{tool}_stays", 42)
            assert site.serves(f"{tool}_only_42", 42)
            assert site.serves(f"{tool}_only_41", None)
            write(tmp_path / tool / "release-42" / f"{tool}_later", 7)
            assert site.serves(f"{tool}_later", 7)

        together(check, SWAPS)


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
            site = Site(server, roots[name], eventually)
            assert (site.answer(f"{name}_both"), site.answer(f"{name}_first")) == ((1, "1"), (1, "1"))
            for branch, mark, here, gone in (("two", 2, "second", "first"), ("one", 1, "first", "second")):
                sh(git + f"checkout -q {branch}", tmp_path / name)
                site.deploys_without_a_failure(f"{name}_both", mark)
                assert site.serves(f"{name}_{here}", mark)
                assert site.serves(f"{name}_{gone}", None)

        together(check, roots)


def test_a_symlink_out_of_the_repository_is_refused_unless_allowed(repository: Any, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", 1)
    (repository.path / "linked").symlink_to(tmp_path / "elsewhere")
    with serve(repository.path, DEAF) as server:
        site = Site(server, repository.path, eventually)
        assert site.answer("linked") is None
        assert "leads out of the repository" in site.reasons("linked")
    with serve(repository.path, DEAF, "--allow-external-links") as server:
        site = Site(server, repository.path, eventually)
        assert site.answer("linked") == (1, "1")
        write(tmp_path / "elsewhere", 2, version=2)
        assert site.serves("linked", 2, version=2)


def test_models_of_a_removed_repository_serve_and_are_followed_once_it_is_back(repository: Any, tmp_path: Path) -> None:
    write(repository.path / "m", 1)
    with serve(repository.path, "--repository-poll-secs=0.2") as server:
        site = Site(server, repository.path, eventually)
        assert "by inotify" in server.log() or "by polling every" in server.log()
        sh('mv -T "$1" "$2"', repository.path, tmp_path / "away")
        assert eventually(lambda: "its loaded models continue to serve" in server.log())
        assert site.answer("m") == (1, "1")
        assert site.reasons("m") == ""
        write(tmp_path / "away" / "m", 2, version=2)
        sh('mv -T "$1" "$2"', tmp_path / "away", repository.path)
        assert site.serves("m", 2, version=2)
        assert server.log().count("its loaded models continue to serve") == 1
