"""Random changes of a model repository ("storm") under a load of clients, and a record of both to check afterwards."""

from __future__ import annotations

import bisect
import itertools
import random
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import onnx
import pytest
import tritonclient.grpc
import tritonclient.http
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from tests.kit.infer_input import infer_input
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
        self.staging = staging
        self.contents: dict[str, dict[int, int]] = {}
        """Model -> version -> generation, as the disk is now."""
        self.others: set[str] = set()
        """Models in the repository that are none of the storm's."""
        self.bad_configs: set[str] = set()
        self.withdrawals: list[Withdrawal] = []
        self.written: dict[tuple[str, int, int], float] = {}
        """(model, version, generation) -> when its first byte was written."""
        self._numbers = itertools.count(1)  # a slow upload draws from it beside the storm
        self._folders = 0

    def file(self, model: str, version: int) -> Path:
        return self.path / model / str(version) / "model.onnx"

    def next_content(self, model: str, version: int) -> tuple[int, bytes]:
        number = next(self._numbers)
        self.written[model, version, number] = time.monotonic()
        return number, counting_model(version, number)

    def write(self, model: str, version: int, how: Callable[[Path, bytes], None]) -> None:
        """Write new, good content of a version in one of the ways that people copy files."""
        generation, content = self.next_content(model, version)
        path = self.file(model, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        how(path, content)
        self.contents.setdefault(model, {})[version] = generation

    def damage(self, model: str, version: int, content: bytes) -> None:
        path = self.file(model, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.contents.setdefault(model, {})[version] = UNUSABLE
        path.write_bytes(content)

    def move_in(self, model: str, version: int) -> None:
        """Move a whole version folder in; one that is there already is moved out first."""
        generation, content = self.next_content(model, version)
        ready = self.new_folder()
        (ready / "model.onnx").write_bytes(content)
        target = self.path / model / str(version)
        if target.is_symlink():
            target.unlink()
        elif target.exists():
            target.rename(self.staging / f"old-{self._folders}")
        ready.rename(target)
        self.contents.setdefault(model, {})[version] = generation

    def swap_link(self, model: str, version: int) -> None:
        """Let a link `<version> -> release` lead to another release, in one step once it is a link."""
        generation, content = self.next_content(model, version)
        (self.path / model).mkdir(exist_ok=True)
        release = self.path / model / f".release-{generation}"
        release.mkdir()
        (release / "model.onnx").write_bytes(content)
        target = self.path / model / str(version)
        if target.exists() and not target.is_symlink():
            target.rename(self.staging / f"old-link-{generation}")
        link = self.path / model / f".link-{generation}"
        link.symlink_to(release.name)
        link.rename(target)
        self.contents.setdefault(model, {})[version] = generation

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
        folder = self.new_folder()
        (folder / "config.pbtxt").write_text(config)
        contents = {}
        for version in versions:
            contents[version], content = self.next_content(model, version)
            (folder / str(version)).mkdir()
            (folder / str(version) / "model.onnx").write_bytes(content)
        folder.rename(self.path / model)
        self.contents[model] = contents

    def remove_model(self, model: str, *, at_once: bool) -> None:
        self.withdrawals.append(Withdrawal(time.monotonic(), model, None))
        del self.contents[model]
        self.bad_configs.discard(model)
        if at_once:
            (self.path / model).rename(self.new_folder() / model)
        else:
            shutil.rmtree(self.path / model)

    def configure(self, model: str, text: str, *, is_good: bool) -> None:
        if not is_good:
            self.bad_configs.add(model)
        (self.path / model / "config.pbtxt").write_text(text)
        if is_good:
            self.bad_configs.discard(model)

    def new_folder(self) -> Path:
        self._folders += 1
        folder = self.staging / f"folder-{self._folders}"
        folder.mkdir()
        return folder


def overwrite(path: Path, content: bytes) -> None:
    """As cp does: the file is cut to nothing and filled again."""
    path.write_bytes(content)


def replace(path: Path, content: bytes) -> None:
    """As rsync does: a hidden neighbour is filled and takes the name."""
    hidden = path.with_name(f".{path.name}.Xy12")
    hidden.write_bytes(content)
    hidden.rename(path)


def trickle(path: Path, content: bytes) -> None:
    """As scp does over a poor radio link: piece by piece, under the final name."""
    step = len(content) // 5 + 1
    with open(path, "wb") as file:
        for start in range(0, len(content), step):
            file.write(content[start : start + step])
            file.flush()
            time.sleep(0.15)


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
        self.seed = seed
        self.chance = random.Random(seed)
        self.done: list[str] = []
        self._side = ThreadPoolExecutor(1)
        self._slow: Future[None] | None = None
        self._slow_model = ""
        self._steps: dict[Callable[[], None], int] = {
            self.reload_in_place: 5,
            self.reload_by_rename: 5,
            self.reload_by_folder: 3,
            self.reload_by_link: 3,
            self.touch: 1,
            self.add_version: 5,
            self.remove_version: 4,
            self.upload_damaged: 5,
            self.upload_slowly: 3,
            self.edit_config: 3,
            self.break_config: 3,
            self.write_unrelated_files: 1,
            self.add_or_remove_model: 5,
        }

    def prepare(self) -> None:
        for model, backend in self.steady.items():
            self.writer.add_model(model, good_config(backend, self.chance), (1, 2))

    def step(self) -> None:
        """Do one thing."""
        what = self.chance.choices(list(self._steps), list(self._steps.values()))[0]
        self.done.append(what.__name__)
        what()

    def rest(self) -> None:
        """Wait for running uploads."""
        if self._slow is not None:
            self._slow.result()
        self._slow_model = ""

    def settle_configurations(self) -> None:
        """Pause, and restore invalid configurations."""
        self.rest()
        for model in sorted(self.writer.bad_configs):
            self.writer.configure(model, good_config(self.steady[model], self.chance), is_good=True)

    def close(self) -> None:
        self._side.shutdown()

    def _model(self) -> str:
        if self._slow is not None and self._slow.done():
            self.rest()
        return self.chance.choice([model for model in self.steady if model != self._slow_model])

    def _version(self, model: str) -> int:
        return self.chance.choice(sorted(self.writer.contents[model]))

    def reload_in_place(self) -> None:
        model = self._model()
        self.writer.write(model, self._version(model), overwrite)

    def reload_by_rename(self) -> None:
        model = self._model()
        self.writer.write(model, self._version(model), replace)

    def reload_by_folder(self) -> None:
        model = self._model()
        self.writer.move_in(model, self._version(model))

    def reload_by_link(self) -> None:
        model = self._model()
        self.writer.swap_link(model, self._version(model))

    def touch(self) -> None:
        model = self._model()
        self.writer.file(model, self._version(model)).touch()

    def add_version(self) -> None:
        model = self._model()
        absent = sorted(set(range(2, 8)) - set(self.writer.contents[model]))
        if not absent:
            return self.remove_version()
        version = self.chance.choice(absent)
        way = self.chance.choice((overwrite, replace, None))
        return self.writer.move_in(model, version) if way is None else self.writer.write(model, version, way)

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

    def upload_slowly(self) -> None:
        if self._slow is not None and not self._slow.done():
            return self.reload_by_rename()
        model = self._model()
        version = self.chance.choice((self._version(model), self.chance.randint(2, 7)))
        self._slow_model = model
        self._slow = self._side.submit(self.writer.write, model, version, trickle)
        return None

    def edit_config(self) -> None:
        model = self._model()
        self.writer.configure(model, good_config(self.steady[model], self.chance), is_good=True)

    def break_config(self) -> None:
        model = self._model()
        self.writer.configure(model, self.chance.choice(BAD_CONFIGS), is_good=False)

    def write_unrelated_files(self) -> None:
        model = self._model()
        (self.writer.path / model / ".DS_Store").write_bytes(b"x")
        (self.writer.path / model / "README.txt").write_text(str(self.chance.random()))
        (self.writer.path / f".{model}.part").write_bytes(b"x")

    def add_or_remove_model(self) -> None:
        model = self.chance.choice(self.guests)
        if model in self.writer.contents:
            self.writer.remove_model(model, at_once=self.chance.random() < 0.5)
        else:
            self.writer.add_model(model, good_config("onnxruntime", self.chance), (1,))


class Client:
    """One client of either front end, for one thread."""

    def __init__(self, server: Any, kind: str) -> None:
        self._module = tritonclient.http if kind == "http" else tritonclient.grpc
        self._is_http = kind == "http"
        if self._is_http:
            self._client = tritonclient.http.InferenceServerClient(
                server.http, connection_timeout=PATIENCE_S, network_timeout=PATIENCE_S
            )
        else:
            self._client = tritonclient.grpc.InferenceServerClient(server.grpc)

    def ask(self, model: str, version: int | None, value: int) -> tuple[int, int]:
        """Return which version and generation answered, by the output; both front ends name the version too."""
        tensor = infer_input(self._module, "INPUT0", np.full((1, 4), value, np.float32))
        result = self._client.infer(model, [tensor], model_version="" if version is None else str(version))
        response = result.get_response()
        named = int(response["model_version"] if self._is_http else response.model_version)
        output = result.as_numpy("OUTPUT0")
        computed = divmod(int(output[0, 0]) - value, GENERATIONS)
        assert output.shape == (1, 4), output
        assert (output == output[0, 0]).all(), output
        assert computed[0] == named, f"{model}: version {computed[0]} computed what version {named} is said to have"
        assert version in (None, named), f"{model}: asked for version {version}, answered by {named}"
        return named, computed[1]

    def close(self) -> None:
        self._client.close()


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
        client = Client(self._server, kind)
        try:
            while not self._stop.is_set():
                steady = chance.choice(list(Storm.steady))
                asked: int | None = chance.choice((None, None, 1, 1, chance.randint(2, 7)))
                model, asked = (chance.choice(Storm.guests), None) if chance.random() < 0.15 else (steady, asked)
                self._ask(client, model, asked, chance.randint(0, 9))
        except BaseException as error:  # noqa: BLE001 - the test's own thread raises it
            self.errors.append(error)
        finally:
            client.close()

    def _ask(self, client: Client, model: str, asked: int | None, value: int) -> None:
        began = time.monotonic()
        try:
            version, generation = client.ask(model, asked, value)
        except InferenceServerException as error:
            ended = time.monotonic()
            self.failures.append(Failure(model, asked, began, ended, str(error.status()), str(error)))
        else:
            self.answers.append(Answer(model, asked, began, time.monotonic(), version, generation))


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
        f"{name} is served though nothing asks for it: {row}"
        for (name, _), row in rows.items()
        if row["state"] == "READY" and name not in writer.contents and name not in writer.others
    ]
    for model, versions in writer.contents.items():
        found += _differences_of(server, model, versions, rows, answers)
    return found


def _differences_of(server: Any, model: str, versions: dict[int, int], rows: Any, answers: Any) -> list[str]:
    found = []
    good = {version for version, generation in versions.items() if generation != UNUSABLE}
    for version, generation in versions.items():
        if generation == UNUSABLE:
            row = rows.get((model, version), {})
            if not row.get("reason"):
                found.append(f"{model} version {version} cannot load and the index does not say why: {row}")
            continue
        answer = _infer_once(server, model, version)
        if answer is None or answer.generation != generation:
            found.append(f"{model} version {version} answers {answer}, its file is generation {generation}")
        elif answers is not None:
            answers.append(answer)
    for (name, version), row in rows.items():
        if name == model and version not in versions and good and row["state"] == "READY":
            found.append(f"{model} version {version} is served though its folder is gone")
    return found


def _infer_once(server: Any, model: str, version: int) -> Answer | None:
    began = time.monotonic()
    body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [0, 0, 0, 0]}]}
    status, answer = server.ask(f"/v2/models/{model}/versions/{version}/infer", body)
    if status != 200:
        return None
    computed = divmod(int(answer["outputs"][0]["data"][0]), GENERATIONS)
    return Answer(model, version, began, time.monotonic(), *computed)


@pytest.fixture(scope="session")
def storm_model() -> Callable[[int, int], bytes]:
    """`storm_model(version, generation)`: an ONNX file whose outputs identify both."""
    return counting_model


@pytest.fixture
def writer(tmp_path: Path) -> ModelWriter:
    folders = tmp_path / "models", tmp_path / "staging"
    for folder in folders:
        folder.mkdir()
    return ModelWriter(*folders)


@pytest.fixture
def new_storm(writer: ModelWriter) -> Iterator[Callable[[int], Storm]]:
    made: list[Storm] = []

    def make(seed: int) -> Storm:
        made.append(Storm(writer, seed))
        made[-1].prepare()
        return made[-1]

    yield make
    for storm in made:
        storm.close()


@pytest.fixture(scope="session")
def new_load() -> Callable[[Any, int], Load]:
    return Load


@pytest.fixture(scope="session")
def check_load() -> Callable[[Load, ModelWriter], None]:
    """Assert that no desired model was refused, and no response came from the wrong file."""

    def check(load: Load, writer: ModelWriter) -> None:
        assert load.errors == []
        assert refused_while_desired(load, writer) == []
        assert answered_by_the_wrong_file(load.answers, writer) == []

    return check


@pytest.fixture(scope="session")
def agree() -> Callable[..., None]:
    """Wait until the served models match the files."""

    def wait(server: Any, writer: ModelWriter, answers: list[Answer] | None = None) -> None:
        end = time.monotonic() + PATIENCE_S
        while found := differences(server, writer, answers):
            assert server.process.poll() is None, f"the server ended:\n{server.log()}"
            assert time.monotonic() < end, "\n".join([*found, server.log()[-6000:]])
            time.sleep(0.1)

    return wait
