"""Random things done to real folders, and the real path from them to what serves, against a model of what must serve.

The runtime is the one stub: its model file says "good <number>", or something that it cannot open.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge_server import backends
from edge_server.backends.base import Array, Backend, ModelFile, OpenJob, Session, SessionInfo
from edge_server.config import LogConfig
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import LoadError
from edge_server.memory.shared_memory import SharedMemoryRegistry
from edge_server.repository.desired_state import RepositorySource
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.resolve_version import ResolveOptions
from edge_server.service import InferenceService
from edge_server.serving.lifecycle.lifecycle_parts import make_lifecycle
from edge_server.serving.timer import Timer
from edge_server.telemetry.log import LogSettings

TIMEOUT_S = 60.0
MODELS = ("apple", "pear")
VERSIONS = (1, 2, 3, 10)
TENSORS = """
max_batch_size: 0
input { name: "IN" data_type: TYPE_FP32 dims: [1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [1] }
"""
POLICIES = {
    "": lambda there: there[-1:],
    "version_policy { latest { num_versions: 2 } }": lambda there: there[-2:],
    "version_policy { all {} }": lambda there: there,
    "version_policy { specific { versions: [1, 3] } }": lambda there: [item for item in there if item in (1, 3)],
}
"""Text of a policy -> which of the versions that are there it asks for."""

BAD_CONFIGS = ('backend: "filed', "no_such_field: 1", "max_batch_size: true")
"""Nothing can be read from these, not even a policy: what serves stays."""

REFUSED_CONFIGS = (
    'backend: "no_such_runtime"' + TENSORS,
    'backend: "filed"' + TENSORS + "instance_group { kind: KIND_GPU gpus: [0] }",
    'backend: "filed" max_batch_size: 0',
)
"""The policy of these can be read (it is that of ""), and every load fails."""


class FiledBackend(Backend):
    """Opens files that say "good <number>"; the session answers with the number."""

    name = "filed"
    default_filename = "model.txt"

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> None:
        return None

    def open(self, job: OpenJob) -> Session:
        message = job.file.path.read_text().split() if job.file.path.is_file() else []
        if len(message) != 2 or message[0] != "good":
            raise LoadError(f"model '{job.spec.name}': '{job.file.path}' holds no model")
        return FiledSession(int(message[1]))


class FiledSession(Session):
    info = SessionInfo("filed", "CPU", "f32")

    def __init__(self, number: int) -> None:
        self._number = number

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        return {"OUT": np.full((1,), self._number, np.float32)}

    def close(self) -> None:
        self._number = -1


@dataclass
class Folder:
    """One model folder, as it was written. `versions` are numbers -> what the file says; None: no usable model."""

    versions: dict[int, int | None] = field(default_factory=dict)
    policy: str = ""
    config: str = "good"


@dataclass
class Expected:
    """What must serve of one model, by version, and which versions must be named as failed."""

    serving: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    is_refused: bool = False


class RepositoryMachine(RuleBasedStateMachine):
    """Two repositories, two model names. After each look at them, what serves is compared with `expected`."""

    def __init__(self) -> None:
        super().__init__()
        backends._made["filed"] = FiledBackend()
        self.top = Path(tempfile.mkdtemp())
        self.roots = (self.top / "one", self.top / "two")
        for root in self.roots:
            root.mkdir()
        self.timer = Timer()
        self.source = RepositorySource(Scanner(self.roots), ResolveOptions())
        self.service = InferenceService(
            make_lifecycle(self.timer, {}), self.source, SharedMemoryRegistry(True), LogSettings(LogConfig()),
            server_id="edge-server", server_version="1", is_explicit=False,
        )  # fmt: skip
        self.folders: dict[tuple[int, str], Folder] = {}
        self.expected: dict[str, Expected] = {}
        self.count = 0

    def teardown(self) -> None:
        assert self.service.close(TIMEOUT_S)
        self.timer.close()
        self.source.close()
        shutil.rmtree(self.top)
        del backends._made["filed"]

    # -- what people do ---------------------------------------------------------------------------------------------

    @rule(root=st.sampled_from((0, 0, 0, 1)), model=st.sampled_from(MODELS), version=st.sampled_from(VERSIONS))
    def write_version(self, root: int, model: str, version: int) -> None:
        number = self.next_number()
        self.put(root, model, version, f"good {number}")
        self.folder(root, model).versions[version] = number

    @rule(
        root=st.sampled_from((0, 0, 0, 1)),
        model=st.sampled_from(MODELS),
        version=st.sampled_from(VERSIONS),
        text=st.sampled_from(("", "good", "damaged 7 7")),
    )
    def write_damaged_version(self, root: int, model: str, version: int, text: str) -> None:
        self.put(root, model, version, text)
        self.folder(root, model).versions[version] = None

    @rule(root=st.sampled_from((0, 0, 0, 1)), model=st.sampled_from(MODELS), version=st.sampled_from(VERSIONS))
    def move_version_in(self, root: int, model: str, version: int) -> None:
        number = self.next_number()
        ready = self.top / f"ready-{number}"
        ready.mkdir()
        (ready / "model.txt").write_text(f"good {number}")
        os.utime(ready / "model.txt", (number, number))
        self.folder(root, model).versions[version] = number
        target = self.roots[root] / model / str(version)
        if target.exists():
            target.rename(self.top / f"gone-{number}")
        ready.rename(target)

    @precondition(lambda self: any(folder.versions for folder in self.folders.values()))
    @rule(data=st.data())
    def remove_version(self, data: st.DataObject) -> None:
        choices = [(key, version) for key, folder in self.folders.items() for version in folder.versions]
        key, version = data.draw(st.sampled_from(choices))
        shutil.rmtree(self.path(key) / str(version))
        del self.folders[key].versions[version]

    @precondition(lambda self: self.folders)
    @rule(data=st.data(), policy=st.sampled_from(list(POLICIES)))
    def write_config(self, data: st.DataObject, policy: str) -> None:
        key = data.draw(st.sampled_from(list(self.folders)))
        self.configure(key, policy)

    @precondition(lambda self: self.folders)
    @rule(data=st.data(), text=st.sampled_from(BAD_CONFIGS))
    def write_unreadable_config(self, data: st.DataObject, text: str) -> None:
        key = data.draw(st.sampled_from(list(self.folders)))
        self.replace(self.path(key) / "config.pbtxt", text)
        self.folders[key].config = "unreadable"

    @precondition(lambda self: self.folders)
    @rule(data=st.data(), text=st.sampled_from(REFUSED_CONFIGS))
    def write_refused_config(self, data: st.DataObject, text: str) -> None:
        key = data.draw(st.sampled_from(list(self.folders)))
        self.replace(self.path(key) / "config.pbtxt", text)
        self.folders[key].config = "refused"
        self.folders[key].policy = ""

    @precondition(lambda self: self.folders)
    @rule(data=st.data())
    def remove_model(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.folders)))
        shutil.rmtree(self.path(key))
        del self.folders[key]

    @precondition(lambda self: self.folders)
    @rule(data=st.data())
    def drop_litter(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.folders)))
        for name in (".DS_Store", ".model.txt.swp"):
            (self.path(key) / name).write_bytes(b"x")
        (self.roots[key[0]] / "README.md").write_text("not a model")

    # -- what the server does -----------------------------------------------------------------------------------------

    @rule()
    def look(self) -> None:
        """Set the desired state, wait until it is reached, and return the versions that must serve now."""
        desired, _ = self.source.desired_models()
        self.service.table.set_desired_state(desired.values())
        assert self.service.table.wait_settled(timeout_s=TIMEOUT_S)
        # The new state is reached before the old generations are closed. Until then a version that failed is UNLOADING.
        limit_s = time.monotonic() + TIMEOUT_S
        while any(entry.state == "UNLOADING" for entry in self.service.router.index()):
            assert time.monotonic() < limit_s
            time.sleep(0.001)
        for model in MODELS:
            before = self.expected.get(model, Expected())
            self.expected[model] = self.what_must_serve(model, before)

    @invariant()
    def what_must_serve_serves(self) -> None:
        for model, expected in self.expected.items():
            found = {
                version.version: self.ask(model, version.version)
                for version in self.service.router.ready_versions(model)
            }
            assert found == expected.serving, f"{model} in {self.folders}"
            if expected.serving:
                assert self.service.router.route(model, None).version == max(expected.serving)

    @invariant()
    def what_does_not_serve_says_why(self) -> None:
        rows = [entry for entry in self.service.router.index() if entry.state not in ("UNLOADING",)]
        for model, expected in self.expected.items():
            of_model = {entry.version: entry for entry in rows if entry.name == model}
            assert bool(of_model.get("")) == expected.is_refused, of_model
            assert {int(key) for key, entry in of_model.items() if entry.state == "READY"} == set(expected.serving)
            for version in expected.failed:
                assert of_model[str(version)].reason, of_model
        is_any_refused = any(item.failed - set(item.serving) or item.is_refused for item in self.expected.values())
        assert not is_any_refused or self.service.router.has_failures()

    # -- the model of it ----------------------------------------------------------------------------------------------

    def what_must_serve(self, model: str, before: Expected) -> Expected:
        """Return what the files, as they are now, ask for, given what served before."""
        folders = [folder for (_, name), folder in self.folders.items() if name == model]
        if not folders:
            return Expected()
        folder = folders[0]
        there = sorted(folder.versions)
        wished = POLICIES[folder.policy](there)
        if len(folders) > 1 or folder.config == "unreadable" or not wished:
            return Expected(before.serving, is_refused=True)
        good = {version: number for version, number in folder.versions.items() if version in wished and number}
        if folder.config == "refused":
            good = {}
        failed = set(wished) - set(good)
        # An older file of a version that fails serves on; so does what nobody wishes for, while nothing succeeds it.
        kept = {version: number for version, number in before.serving.items() if version in failed or not good}
        return Expected({**kept, **good}, failed)

    def ask(self, model: str, version: int) -> int:
        answers: list[Response] = []
        request = Request(model, {"IN": Tensor("IN", DType.FP32, np.zeros((1,), np.float32))})
        self.service.router.route(model, version).submit(request, answers.append, hold_us=math.inf)
        assert answers[0].error is None, answers
        assert answers[0].version == version
        return int(np.asarray(answers[0].outputs[0].array)[0])

    # -- how it is written --------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        self.count += 1
        return self.count

    def path(self, key: tuple[int, str]) -> Path:
        return self.roots[key[0]] / key[1]

    def folder(self, root: int, model: str) -> Folder:
        """Return the record of a folder; one that is new gets a configuration."""
        if (root, model) not in self.folders:
            (self.roots[root] / model).mkdir()
            self.folders[root, model] = Folder()
            self.configure((root, model), "")
        return self.folders[root, model]

    def configure(self, key: tuple[int, str], policy: str) -> None:
        self.replace(self.path(key) / "config.pbtxt", f'backend: "filed"{TENSORS}{policy}')
        self.folders[key].policy = policy
        self.folders[key].config = "good"

    def put(self, root: int, model: str, version: int, text: str) -> None:
        self.folder(root, model)
        path = self.roots[root] / model / str(version) / "model.txt"
        path.parent.mkdir(exist_ok=True)
        self.replace(path, text)

    def replace(self, path: Path, text: str) -> None:
        """Put a new file under the name, with a time of its own: these are written faster than file times tick."""
        number = self.next_number()
        ready = self.top / f"file-{number}"
        ready.write_text(text)
        os.utime(ready, (number, number))
        ready.rename(path)


TestWhatServesIsWhatTheFilesAskFor = RepositoryMachine.TestCase
