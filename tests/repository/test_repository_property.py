"""Random changes of real folders: the scanned desired state against a model of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge_server.core.version_lifecycle import DesiredModel
from edge_server.repository.desired_state import RepositorySource
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.resolve_version import ResolveOptions

MODELS = ("apple", "pear", "a.b-c_1")
VERSIONS = (1, 2, 3, 10, 2**63 - 1)
NOT_VERSIONS = ("01", "-1", "x", "1.5", str(2**63), "¹")
POLICIES = {
    "": lambda there: there[-1:],
    "version_policy { latest { num_versions: 2 } }": lambda there: there[-2:],
    "version_policy { latest { num_versions: 100 } }": lambda there: there,
    "version_policy { all {} }": lambda there: there,
    "version_policy { specific { versions: [1, 3] } }": lambda there: [item for item in there if item in (1, 3)],
    "version_policy { specific { versions: [77] } }": lambda there: [],
}
"""Text of a configuration -> which of the versions that are there it asks for."""

UNREADABLE = ("max_batch_size", "no_such_field: 1", 'version_policy { latest { num_versions: "x" } }', "\0")


@dataclass
class Folder:
    """One model folder as it was written. `files` (outside the versions) and `versions` say which write made them."""

    files: dict[str, int] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    policy: str = ""
    is_readable: bool = True


class FolderMachine(RuleBasedStateMachine):
    """Two roots and three names. One source looks again and again; a new one must see the same."""

    def __init__(self) -> None:
        super().__init__()
        self.top = Path(tempfile.mkdtemp())
        self.roots = (self.top / "one", self.top / "two")
        for root in self.roots:
            root.mkdir()
        self.source = self.new_source()
        self.folders: dict[tuple[int, str], Folder] = {}
        self.count = 0
        self.fingerprints: dict[tuple[object, ...], str] = {}

    def teardown(self) -> None:
        self.source.close()
        shutil.rmtree(self.top)

    def new_source(self) -> RepositorySource:
        return RepositorySource(Scanner(self.roots), ResolveOptions(), self.top)

    # -- what people do -----------------------------------------------------------------------------------------------

    @rule(root=st.sampled_from((0, 0, 0, 1)), model=st.sampled_from(MODELS))
    def make_folder(self, root: int, model: str) -> None:
        self.folder(root, model)

    @rule(
        root=st.sampled_from((0, 0, 0, 1)),
        model=st.sampled_from(MODELS),
        version=st.sampled_from(VERSIONS),
        name=st.sampled_from(("model.onnx", "weights/part.bin")),
    )
    def write_file(self, root: int, model: str, version: int, name: str) -> None:
        folder = self.folder(root, model)
        self.write(self.roots[root] / model / str(version) / name)
        folder.versions[version] = self.count

    @rule(root=st.sampled_from((0, 0, 0, 1)), model=st.sampled_from(MODELS), version=st.sampled_from(VERSIONS))
    def swap_link(self, root: int, model: str, version: int) -> None:
        """Let `<version>` be a link to a hidden release beside it, as release scripts do."""
        folder = self.folder(root, model)
        release = self.roots[root] / model / f".release-{self.count + 1}"
        self.write(release / "model.onnx")
        target = self.roots[root] / model / str(version)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        link = self.top / f"link-{self.count}"
        link.symlink_to(release.name)
        link.rename(target)
        folder.versions[version] = self.count

    @precondition(lambda self: any(folder.versions for folder in self.folders.values()))
    @rule(data=st.data())
    def remove_version(self, data: st.DataObject) -> None:
        choices = [(key, version) for key, folder in self.folders.items() for version in folder.versions]
        key, version = data.draw(st.sampled_from(choices))
        path = self.path(key) / str(version)
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
        del self.folders[key].versions[version]

    @precondition(lambda self: self.folders)
    @rule(data=st.data(), policy=st.sampled_from(list(POLICIES)))
    def write_config(self, data: st.DataObject, policy: str) -> None:
        folder = self.write_in_model(data, "config.pbtxt", policy)
        folder.policy, folder.is_readable = policy, True

    @precondition(lambda self: self.folders)
    @rule(data=st.data(), text=st.sampled_from(UNREADABLE))
    def write_unreadable_config(self, data: st.DataObject, text: str) -> None:
        self.write_in_model(data, "config.pbtxt", text).is_readable = False

    @precondition(lambda self: self.folders)
    @rule(data=st.data())
    def remove_config(self, data: st.DataObject) -> None:
        key = self.draw_key(data)
        (self.path(key) / "config.pbtxt").unlink(missing_ok=True)
        self.folders[key].files.pop("config.pbtxt", None)
        self.folders[key].policy, self.folders[key].is_readable = "", True

    @precondition(lambda self: self.folders)
    @rule(data=st.data())
    def write_labels(self, data: st.DataObject) -> None:
        self.write_in_model(data, "labels.txt", "cat")

    @precondition(lambda self: self.folders)
    @rule(data=st.data())
    def remove_model(self, data: st.DataObject) -> None:
        key = self.draw_key(data)
        shutil.rmtree(self.path(key))
        del self.folders[key]

    @precondition(lambda self: self.folders)
    @rule(data=st.data())
    def drop_litter(self, data: st.DataObject) -> None:
        """Write what never counts: hidden files and folders, what Python leaves, files beside the models."""
        path = self.path(self.draw_key(data))
        self.write(path / ".git" / "HEAD")
        self.write(path / "__pycache__" / "x.pyc")
        for version in [entry for entry in path.iterdir() if entry.name.isascii() and entry.name.isdigit()]:
            self.write(version / ".nfs000123")
        self.write(path.parent / "README.md")
        self.write(path.parent / ".hidden" / "1" / "model.onnx")

    @precondition(lambda self: self.folders)
    @rule(data=st.data(), name=st.sampled_from(NOT_VERSIONS))
    def make_a_folder_that_is_no_version(self, data: st.DataObject, name: str) -> None:
        key = self.draw_key(data)
        (self.path(key) / name).mkdir(exist_ok=True)
        # One that reads as a number is passed over; another may hold data for warm-up, so it belongs to the model.
        if not name.isdigit():
            self.folders[key].files[name] = 0

    # -- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def the_wish_is_what_the_folders_ask_for(self) -> None:
        # One look for all comparisons, as looks are most of what this test costs.
        desired, warnings = self.source.desired_models()
        self.check_wish(desired)
        self.check_new_source(desired, warnings)
        for model in MODELS:
            assert self.source.desired_model(model, None, {}) == desired.get(model)

    def check_wish(self, desired: dict[str, DesiredModel]) -> None:
        assert set(desired) == {model for _, model in self.folders}
        for model, desired_model in desired.items():
            found = [folder for (_, name), folder in self.folders.items() if name == model]
            desired_versions = POLICIES[found[0].policy](sorted(found[0].versions))
            if len(found) > 1 or not found[0].is_readable or not desired_versions:
                assert not desired_model.versions, desired_model
                assert model in desired_model.reason, desired_model
            else:
                assert sorted(desired_model.versions) == desired_versions
                assert desired_model.reason == ""
                self.check_fingerprints(found[0], desired_model)

    def check_fingerprints(self, folder: Folder, desired_model: DesiredModel) -> None:
        """Each state of a version's files has one fingerprint, which no other state has."""
        for version, of_version in desired_model.versions.items():
            state = (desired_model.name, frozenset(folder.files.items()), version, folder.versions[version])
            assert self.fingerprints.setdefault(state, of_version.fingerprint) == of_version.fingerprint, state
        ours = [(state[0], state[2], text) for state, text in self.fingerprints.items()]
        assert len(set(ours)) == len(ours), "two states of a version have the same fingerprint"

    def check_new_source(self, desired: dict[str, DesiredModel], warnings: tuple[str, ...]) -> None:
        """A source that never looked before states the same wish."""
        again = self.new_source()
        assert again.desired_models() == (desired, warnings)
        again.close()

    # -- how it is written --------------------------------------------------------------------------------------------

    def path(self, key: tuple[int, str]) -> Path:
        return self.roots[key[0]] / key[1]

    def folder(self, root: int, model: str) -> Folder:
        """Return the record of a folder, which is made when it is new."""
        if (root, model) not in self.folders:
            (self.roots[root] / model).mkdir()
            self.folders[root, model] = Folder()
        return self.folders[root, model]

    def draw_key(self, data: st.DataObject) -> tuple[int, str]:
        return data.draw(st.sampled_from(list(self.folders)))

    def write_in_model(self, data: st.DataObject, name: str, text: str) -> Folder:
        key = self.draw_key(data)
        self.write(self.path(key) / name, text)
        self.folders[key].files[name] = self.count
        return self.folders[key]

    def write(self, path: Path, text: str = "x") -> None:
        """Write in place, with a time of its own: these are written faster than file times tick."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self.count += 1
        os.utime(path, (self.count, self.count))


TestTheWishIsWhatTheFoldersAskFor = FolderMachine.TestCase
