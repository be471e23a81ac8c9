"""Random changes of a model repository ("storm") under a load of clients, and a record of both to check afterwards."""

from __future__ import annotations

import bisect
import itertools
import random
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import onnx
import tritonclient.grpc
import tritonclient.http
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from tests.kit.infer_input import infer_input
from tests.kit.model_folder import model_folder
from tests.kit.models import finish

GENERATIONS = 100_000
"""A model adds version * GENERATIONS + generation to its input, which FP32 holds exactly below 2**24."""

UNUSABLE = 0
"""The generation of files that no runtime can open."""

BAD_CONFIGS = (
    'backend: "onnxruntime',
    "no_such_field: 1",
    'backend: "no_such_runtime"',
    "max_batch_size: -1",
    'max_batch_size: 8 version_policy { all {} } input { name: "INPUT0" data_type: TYPE_FP32 dims: [7] }',
)
PATIENCE_S = 60.0


class Answer(NamedTuple):
    model: str
    asked: int | None
    began: float
    ended: float
    version: int
    generation: int


class Failure(NamedTuple):
    model: str
    asked: int | None
    began: float
    ended: float
    status: str
    reason: str


class Withdrawal(NamedTuple):
    """From this moment on the model, or one version of it, may be refused."""

    when: float
    model: str
    version: int | None


def counting_model(version: int, generation: int) -> bytes:
    """Return an ONNX file, always of the same size: OUTPUT0 = INPUT0 + which version and generation it is."""
    constant = np.array([version * GENERATIONS + generation], np.float32)
    graph = helper.make_graph(
        [helper.make_node("Add", ["INPUT0", "constant"], ["OUTPUT0"])],
        "counting",
        [helper.make_tensor_value_info("INPUT0", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("OUTPUT0", TensorProto.FLOAT, ["batch", 4])],
        [onnx.numpy_helper.from_array(constant, "constant")],
    )
    return finish(graph).SerializeToString()


class ModelWriter:
    """Writes models whose outputs identify the file that computed them, and records written and deleted files."""

    def __init__(self, path: Path, staging: Path) -> None:
        self.path = path
        self.contents: dict[str, dict[int, int]] = {}
        """Model -> version -> generation, as the disk is now."""
        self.others: set[str] = set()
        """Models in the repository that are none of the storm's."""
        self.bad_configs: set[str] = set()
        self.withdrawals: list[Withdrawal] = []
        self.written: dict[tuple[str, int, int], float] = {}
        """(model, version, generation) -> when its first byte was written."""
        self._numbers = itertools.count(1)
        self._staging = staging
        self._folders = itertools.count(1)

    def next_content(self, model: str, version: int) -> tuple[int, bytes]:
        number = next(self._numbers)
        self.written[model, version, number] = time.monotonic()
        return number, counting_model(version, number)

    def write(self, model: str, version: int, how: Callable[[Path, bytes], None]) -> None:
        """Write new, good content of a version in one of the ways that people copy files."""
        generation, content = self.next_content(model, version)
        how(self.path / model / str(version), content)
        self.contents.setdefault(model, {})[version] = generation

    def damage(self, model: str, version: int, content: bytes) -> None:
        self.contents.setdefault(model, {})[version] = UNUSABLE
        overwrite(self.path / model / str(version), content)

    def move_in(self, folder: Path, content: bytes) -> None:
        """Move a whole version folder in; one that is there already is moved out first."""
        ready = self._new_folder()
        (ready / "model.onnx").write_bytes(content)
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            folder.rename(self._new_folder() / "old")
        ready.rename(folder)

    def swap_link(self, folder: Path, content: bytes) -> None:
        """Let a link `<version> -> release` lead to another release, in one step once it is a link."""
        number = next(self._folders)
        release = folder.parent / f".release-{number}"
        release.mkdir(parents=True)
        (release / "model.onnx").write_bytes(content)
        if folder.exists() and not folder.is_symlink():
            folder.rename(self._new_folder() / "old")
        link = folder.parent / f".link-{number}"
        link.symlink_to(release.name)
        link.rename(folder)

    def remove_version(self, model: str, version: int) -> None:
        self.withdrawals.append(Withdrawal(time.monotonic(), model, version))
        del self.contents[model][version]
        path = self.path / model / str(version)
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)

    def add_model(self, model: str, config: str, versions: tuple[int, ...]) -> None:
        """Prepare a model beside the repository and move it in."""
        made = {version: self.next_content(model, version) for version in versions}
        files = {f"{version}/model.onnx": content for version, (_, content) in made.items()}
        model_folder(self._new_folder() / model, config, files).rename(self.path / model)
        self.contents[model] = {version: generation for version, (generation, _) in made.items()}

    def remove_model(self, model: str, *, at_once: bool) -> None:
        self.withdrawals.append(Withdrawal(time.monotonic(), model, None))
        del self.contents[model]
        if at_once:
            (self.path / model).rename(self._new_folder() / model)
        else:
            shutil.rmtree(self.path / model)

    def configure(self, model: str, text: str, *, is_good: bool) -> None:
        if not is_good:
            self.bad_configs.add(model)
        (self.path / model / "config.pbtxt").write_text(text)
        if is_good:
            self.bad_configs.discard(model)

    def _new_folder(self) -> Path:
        folder = self._staging / str(next(self._folders))
        folder.mkdir()
        return folder


def overwrite(folder: Path, content: bytes) -> None:
    """As cp does: the file is cut to nothing and filled again."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(content)


def replace(folder: Path, content: bytes) -> None:
    """As rsync does: a hidden neighbour is filled and takes the name."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden = folder / ".model.onnx.Xy12"
    hidden.write_bytes(content)
    hidden.rename(folder / "model.onnx")


def good_config(backend: str, chance: random.Random) -> str:
    lines = [f'backend: "{backend}"', f"max_batch_size: {chance.choice((4, 8, 16))}", "version_policy { all {} }"]
    if chance.random() < 0.5:
        lines.append("dynamic_batching { }")
    if chance.random() < 0.3:
        lines.append("instance_group { count: 2 kind: KIND_CPU }")
    return "\n".join(lines)


class Storm:
    """Makes `count` random changes to a repository. Version 1 of each steady model is never deleted."""

    steady: ClassVar[dict[str, str]] = {"storm_ort": "onnxruntime", "storm_ov": "openvino"}
    guests = ("guest_a", "guest_b")

    def __init__(self, writer: ModelWriter, seed: int) -> None:
        self.writer = writer
        self.chance = random.Random(seed)
        self._steps: dict[Callable[[], None], int] = {
            self.reload: 16, self.add_version: 5, self.remove_version: 4, self.upload_damaged: 5, self.edit_config: 3,
            self.break_config: 3, self.add_or_remove_model: 5,
        }  # fmt: skip
        self._ways = (overwrite, replace, writer.move_in, writer.swap_link)
        for model, backend in self.steady.items():
            writer.add_model(model, good_config(backend, self.chance), (1, 2))

    def step(self) -> None:
        """Do one thing."""
        self.chance.choices(list(self._steps), list(self._steps.values()))[0]()

    def settle_configurations(self) -> None:
        """Restore invalid configurations."""
        for model in sorted(self.writer.bad_configs):
            self.writer.configure(model, good_config(self.steady[model], self.chance), is_good=True)

    def _model(self) -> str:
        return self.chance.choice(list(self.steady))

    def _version(self, model: str) -> int:
        return self.chance.choice(sorted(self.writer.contents[model]))

    def reload(self) -> None:
        model = self._model()
        self.writer.write(model, self._version(model), self.chance.choice(self._ways))

    def add_version(self) -> None:
        model = self._model()
        absent = sorted(set(range(2, 8)) - set(self.writer.contents[model]))
        if absent:
            self.writer.write(model, self.chance.choice(absent), self.chance.choice(self._ways[:3]))

    def remove_version(self) -> None:
        model = self._model()
        others = sorted(set(self.writer.contents[model]) - {1})
        if others:
            self.writer.remove_version(model, self.chance.choice(others))

    def upload_damaged(self) -> None:
        model = self._model()
        whole = counting_model(1, 1)
        content = self.chance.choice((b"", whole[: len(whole) // 2], self.chance.randbytes(300), b"<html>404</html>"))
        version = self.chance.choice((self._version(model), self.chance.randint(2, 7)))
        self.writer.damage(model, version, content)

    def edit_config(self) -> None:
        model = self._model()
        self.writer.configure(model, good_config(self.steady[model], self.chance), is_good=True)

    def break_config(self) -> None:
        model = self._model()
        self.writer.configure(model, self.chance.choice(BAD_CONFIGS), is_good=False)

    def add_or_remove_model(self) -> None:
        model = self.chance.choice(self.guests)
        if model in self.writer.contents:
            self.writer.remove_model(model, at_once=self.chance.random() < 0.5)
        else:
            self.writer.add_model(model, good_config("onnxruntime", self.chance), (1,))


def ask(client: Any, module: Any, model: str, version: int | None, value: int) -> tuple[int, int]:
    """Return which version and generation answered, by the output; both front ends name the version too."""
    tensor = infer_input(module, "INPUT0", np.full((1, 4), value, np.float32))
    result = client.infer(model, [tensor], model_version="" if version is None else str(version))
    response, output = result.get_response(), result.as_numpy("OUTPUT0")
    named = int(response["model_version"] if isinstance(response, dict) else response.model_version)
    computed = divmod(int(output[0, 0]) - value, GENERATIONS)
    assert output.tolist() == [[output[0, 0]] * 4]
    assert computed[0] == named, f"{model}: version {computed[0]} computed what version {named} is said to have"
    assert version in (None, named), f"{model}: asked for version {version}, answered by {named}"
    return named, computed[1]


class Load:
    """Eight clients that send requests without a pause, and all their responses."""

    def __init__(self, server: Any, seed: int) -> None:
        self.answers: list[Answer] = []
        self.failures: list[Failure] = []
        self.errors: list[BaseException] = []
        self._server = server
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(kind, random.Random(seed * 100 + number)))
            for number, kind in enumerate(["http", "grpc"] * 4)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, kind: str, chance: random.Random) -> None:
        if kind == "http":
            module, options = tritonclient.http, {"connection_timeout": PATIENCE_S, "network_timeout": PATIENCE_S}
        else:
            module, options = tritonclient.grpc, {}
        try:
            with module.InferenceServerClient(getattr(self._server, kind), **options) as client:
                while not self._stop.is_set():
                    steady = chance.choice(list(Storm.steady))
                    asked: int | None = chance.choice((None, None, 1, 1, chance.randint(2, 7)))
                    model, asked = (chance.choice(Storm.guests), None) if chance.random() < 0.15 else (steady, asked)
                    began = time.monotonic()
                    try:
                        version, generation = ask(client, module, model, asked, chance.randint(0, 9))
                    except InferenceServerException as error:
                        times = began, time.monotonic()
                        self.failures.append(Failure(model, asked, *times, str(error.status()), str(error)))
                    else:
                        self.answers.append(Answer(model, asked, began, time.monotonic(), version, generation))
        except BaseException as error:  # noqa: BLE001 - the test's own thread raises it
            self.errors.append(error)


def refused_while_desired(load: Load, writer: ModelWriter) -> list[Failure]:
    """Return the failures that nothing excuses.

    A model that is never deleted must always be answered; another one from the first response of its file until the
    file is deleted. Before and after that it may be refused as absent, and with no other message.
    """
    answered = defaultdict(list)
    for answer in load.answers:
        answered[answer.model, answer.asked].append(answer)
    newest = {key: _newest_by_end(answers) for key, answers in answered.items()}
    found = []
    for failure in load.failures:
        is_steady = failure.model in Storm.steady and failure.asked in (None, 1)
        is_absence = failure.status in ("404", "503", "StatusCode.NOT_FOUND", "StatusCode.UNAVAILABLE")
        ends, answers = newest.get((failure.model, failure.asked), ([], []))
        position = bisect.bisect_left(ends, failure.began)
        is_promised = position > 0 and not _is_withdrawn(answers[position - 1], failure, writer)
        if is_steady or is_promised or not is_absence:
            found.append(failure)
    return found


def _newest_by_end(answers: list[Answer]) -> tuple[list[float], list[Answer]]:
    """Return when answers ended, in order, and of each moment the answer with the newest file so far."""
    in_order = sorted(answers, key=lambda item: item.ended)
    newest = list(itertools.accumulate(in_order, lambda one, two: max(one, two, key=lambda item: item.generation)))
    return [item.ended for item in in_order], newest


def _is_withdrawn(answer: Answer, failure: Failure, writer: ModelWriter) -> bool:
    """Return whether the file of a response was deleted before a request failed."""
    written = writer.written[answer.model, answer.version, answer.generation]
    return any(
        item.model == failure.model and item.version in (None, failure.asked) and written <= item.when <= failure.ended
        for item in writer.withdrawals
    )


def answered_by_the_wrong_file(answers: list[Answer], writer: ModelWriter) -> list[str]:
    """Return the answers computed by a file that was not there yet, or that had been replaced in an earlier answer."""
    found = [
        f"{answer} was computed by a file not written yet"
        for answer in answers
        if writer.written.get((answer.model, answer.version, answer.generation), float("inf")) > answer.ended
    ]
    groups = defaultdict(list)
    for answer in answers:
        groups[answer.model, answer.version].append(answer)
    for group in groups.values():
        by_end = sorted(group, key=lambda item: item.ended)
        seen, position = None, 0
        for answer in sorted(group, key=lambda item: item.began):
            while by_end[position].ended < answer.began:
                if seen is None or by_end[position].generation > seen.generation:
                    seen = by_end[position]
                position += 1
            if seen is not None and answer.generation < seen.generation:
                found.append(f"{answer} came from a file that {seen} had seen replaced")
    return found


def differences(server: Any, writer: ModelWriter, answers: list[Answer] | None = None) -> list[str]:
    """Return the differences between the served models and the files. Needs a repository at rest, configs good."""
    status, index = server.ask("/v2/repository/index", {})
    assert status == 200, index
    rows = {(row["name"], int(row["version"])): row for row in index if row.get("version")}
    found = [
        f"{name} version {version} is served though nothing asks for it: {row}"
        for (name, version), row in rows.items()
        if row["state"] == "READY" and name not in writer.others and _is_gone(writer.contents.get(name, {}), version)
    ]
    for model, versions in writer.contents.items():
        for version, generation in versions.items():
            if generation == UNUSABLE:
                row = rows.get((model, version), {})
                if not row.get("reason"):
                    found.append(f"{model} version {version} cannot load and the index does not say why: {row}")
                continue
            began = time.monotonic()
            computed = generation_of(server, model, version)
            if computed != generation:
                found.append(f"{model} version {version} answers {computed}, its file is generation {generation}")
            elif answers is not None:
                answers.append(Answer(model, version, began, time.monotonic(), version, generation))
    return found


def _is_gone(contents: dict[int, int], version: int) -> bool:
    """Whether a version should not be served: without any good file, an old one may stand in."""
    return version not in contents and (not contents or any(contents.values()))


def generation_of(server: Any, model: str, version: int = 1) -> int | None:
    """Return which generation of a version answers, None for an error."""
    body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [0, 0, 0, 0]}]}
    status, answer = server.ask(f"/v2/models/{model}/versions/{version}/infer", body)
    return int(answer["outputs"][0]["data"][0]) % GENERATIONS if status == 200 else None


def agree(server: Any, writer: ModelWriter, answers: list[Answer] | None = None) -> None:
    """Wait until the served models match the files."""
    end = time.monotonic() + PATIENCE_S
    while found := differences(server, writer, answers):
        assert server.process.poll() is None, f"the server ended:\n{server.log()}"
        assert time.monotonic() < end, "\n".join([*found, server.log()[-6000:]])
        time.sleep(0.1)
