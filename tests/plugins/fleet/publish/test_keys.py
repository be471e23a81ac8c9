"""Exchange of keys and further publishers: what a box follows, and what a thief can still do. With real TUF."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from edge_server.errors import InvalidRequest
from edge_server.plugins.fleet.command import run as run_fleet
from edge_server.plugins.fleet.follow.trial import Trial
from edge_server.plugins.fleet.release import PUBLISHED_KEY

pytest.importorskip("tuf")
pytestmark = pytest.mark.full

AddModel = Callable[..., None]
Keys = Callable[..., None]


@pytest.fixture(autouse=True)
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "run", lambda *arguments, is_return: "")


@pytest.fixture
def keys(publication: Any) -> Keys:
    """Return `edge-server fleet keys` for the publication, by the main publisher unless `folder` is another one's."""

    def run(*arguments: str, folder: Path | None = None) -> None:
        assert run_fleet(["keys", str(publication.site), f"--keys={folder or publication.keys}", *arguments]) == 0

    return run


def make_key(path: Path, public: Path | None = None) -> None:
    """Make a private key as the documentation says, and write its public key."""
    path.parent.mkdir(exist_ok=True)
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", path], check=True)
    if public is not None:
        subprocess.run(["openssl", "pkey", "-in", path, "-pubout", "-out", public], check=True)


@contextlib.contextmanager
def signed_again(path: Path, key: Path, to: Path | None = None) -> Iterator[Any]:
    """Give the content of a file of metadata for changes, and sign it as another program does."""
    from securesystemslib.signer import CryptoSigner
    from tuf.api.metadata import Metadata

    from edge_server.plugins.fleet.publish.signing_keys import load_pem_private_key

    metadata = Metadata.from_file(str(path))
    yield metadata.signed
    metadata.sign(CryptoSigner(load_pem_private_key(key.read_bytes(), None)))
    metadata.to_file(str(to or path))


class Team:
    """Another publisher, with models and a key of its own, and without the key `online`."""

    def __init__(self, publication: Any, name: str = "vision") -> None:
        self.publication = publication
        self.name = name
        self.models = publication.models.with_name(f"{name}_models")
        self.keys = publication.keys.with_name(f"{name}_keys")
        self.models.mkdir()
        make_key(self.keys / f"{name}.pem", publication.keys / f"{name}.pub")

    def publish(self, *arguments: str) -> None:
        from edge_server.plugins.fleet.publish import command as publish_command

        site = str(self.publication.site)
        publish_command.run([str(self.models), site, f"--keys={self.keys}", f"--publisher={self.name}", *arguments])

    def sign(self, change: Callable[[Any], None]) -> None:
        """Sign a next list that `change` has changed, as a team does that uses another program."""
        folder = self.publication.site / "metadata"
        newest = max(int(path.name.split(".")[0]) for path in folder.glob(f"*.{self.name}.json"))
        to = folder / f"{newest + 1}.{self.name}.json"
        with signed_again(folder / f"{newest}.{self.name}.json", self.keys / f"{self.name}.pem", to) as targets:
            targets.version += 1
            change(targets)


@pytest.fixture
def team(publication: Any, box: Any, add_model: AddModel, keys: Keys) -> Team:
    """A team that may sign `detectors_*`, beside the main publisher's model m; the box has a release of both."""
    publication.release(0.5)
    team = Team(publication)
    keys("--add-publisher=vision", "--models=detectors_*")
    add_model(team.models / "detectors_a", 0.25)
    team.publish()
    publication.publish()
    box.follow()
    assert (box.factor("m"), box.factor("detectors_a")) == (0.5, 0.25)
    return team


# -- keys that are exchanged


def test_a_box_follows_several_exchanges_of_each_key_and_refuses_the_old_ones(
    publication: Any, box: Any, add_model: AddModel, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publication.release(0.5)
    box.follow()
    shutil.copytree(publication.keys, tmp_path / "stolen")
    for name in ("targets", "online", "root", "root", "targets"):
        keys(f"--replace={name}")
    assert (publication.site / "metadata" / "6.root.json").exists()
    assert capsys.readouterr().out.count("draft") == 0
    publication.release(0.25)
    box.follow()
    assert box.factor() == 0.25

    good, publication.keys = publication.keys, tmp_path / "stolen"
    add_model(publication.models / "m", 0.125)
    with pytest.raises(InvalidRequest, match=r"6\.targets\.json cannot be signed: the key 'targets' \(.*it is not in"):
        publication.publish()
    metadata = publication.site / "metadata"
    with signed_again(metadata / "1.root.json", tmp_path / "stolen" / "root.pem", metadata / "7.root.json") as root:
        root.version = 7  # with it, the old keys of all
    assert "is not trusted" in box.follow().report.problem
    assert box.factor() == 0.25
    publication.keys = good
    with pytest.raises(InvalidRequest, match=r"7\.root\.json' is not signed by the keys of the root before it"):
        publication.publish()
    (publication.site / "metadata" / "7.root.json").unlink()
    publication.publish()
    box.follow()
    assert box.factor() == 0.125


def test_two_persons_sign_root(
    publication: Any, box: Any, add_model: AddModel, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    publication.release(0.5)
    bens = publication.keys.with_name("bens_keys")
    make_key(bens / "ben.pem", publication.keys / "ben.pub")
    keys("--add-root=ben", "--needed=2")
    assert "root version 2 needs signatures: 1 of 'ben' (" in capsys.readouterr().out.replace("\n", " ")
    keys("--sign", folder=bens)
    output = capsys.readouterr().out.replace("\n", " ")
    assert "signs root" in output
    assert "draft: 2 keys must sign root, before 1" in output
    publication.publish()
    assert (publication.site / "metadata" / "2.root.json").exists()

    keys("--replace=targets")  # root.pem alone, as a thief of it would
    assert not (publication.site / "metadata" / "3.root.json").exists()
    add_model(publication.models / "m", 0.25)
    capsys.readouterr()
    publication.publish()
    assert "the next root waits for signatures: 1 of 'ben' (" in capsys.readouterr().out
    box.follow()
    assert box.factor() == 0.25
    keys("--sign", folder=bens)
    publication.publish()
    assert (publication.site / "metadata" / "3.root.json").exists()
    assert not (publication.site / "metadata" / "root.draft.json").exists()
    assert box.follow().report.problem == ""
    keys("--remove=ben", "--needed=1")
    keys("--sign", folder=bens)
    publication.publish()
    assert (publication.site / "metadata" / "4.root.json").exists()
    assert box.follow().report.problem == ""


def test_a_draft_of_root_that_lies_there_is_not_signed_by_publish(publication: Any, keys: Keys, tmp_path: Path) -> None:
    from tuf.api.metadata import Metadata

    publication.release(0.5)
    metadata = publication.site / "metadata"
    draft = Metadata.from_file(str(metadata / "1.root.json"))
    draft.signed.version = 2
    draft.signatures.clear()
    draft.to_file(str(metadata / "root.draft.json"))
    publication.publish()
    with pytest.raises(InvalidRequest, match=r"root\.draft\.json' waits for signatures"):
        keys("--replace=online")
    assert [path.name for path in publication.keys.glob("online*")] == ["online.pem"]
    assert not (metadata / "2.root.json").exists()
    assert json.loads((metadata / "root.draft.json").read_bytes())["signatures"] == []


def test_a_draft_that_puts_another_key_under_the_id_of_a_known_one_shows_it(
    publication: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tuf.api.metadata import Metadata

    from edge_server.plugins.fleet.publish.signing_keys import SigningKeys

    publication.release(0.5)
    make_key(tmp_path / "thief" / "targets.pem")
    metadata = publication.site / "metadata"
    draft = Metadata.from_file(str(metadata / "1.root.json"))
    (key_id,) = draft.signed.roles["targets"].keyids
    draft.signed.keys[key_id].keyval = SigningKeys(tmp_path / "thief").public_key("targets").keyval
    draft.signed.version = 2
    draft.to_file(str(metadata / "root.draft.json"))
    capsys.readouterr()
    assert run_fleet(["keys", str(publication.site)]) == 0
    output = capsys.readouterr().out
    assert output.count("draft: 'targets' (") == 2
    assert "signs targets no more" in output


def test_a_thief_of_the_online_key_cannot_stop_boxes_for_longer_than_the_key_is_valid(
    publication: Any, box: Any, keys: Keys, utc_now: datetime
) -> None:
    publication.release(0.5)
    shutil.copytree(publication.site, publication.site.with_name("good"))
    with signed_again(publication.site / "metadata" / "timestamp.json", publication.keys / "online.pem") as timestamp:
        timestamp.version += 1000
        timestamp.expires = utc_now.replace(microsecond=0) + timedelta(days=9000)
        timestamp.unrecognized_fields[PUBLISHED_KEY] = int(utc_now.timestamp()) + 8000 * 86_400
    assert "the clock is wrong" in box.follow().report.problem
    shutil.rmtree(publication.site)
    publication.site.with_name("good").rename(publication.site)
    keys("--replace=online")
    assert box.follow().report.problem == ""
    assert box.factor() == 0.5


def test_a_list_that_somebody_changed_in_the_repository_is_not_signed_again(publication: Any) -> None:
    publication.release(0.5)
    (path,) = publication.site.glob("metadata/2.targets.json")
    path.write_text(path.read_text().replace("m/1.json", "m/7.json"))
    publication.site.joinpath("metadata", "1.targets.json").unlink()
    with pytest.raises(InvalidRequest, match=r"2\.targets\.json' is not signed by the key of 'targets'"):
        publication.publish()


def test_keys_are_shown(team: Team, keys: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run_fleet(["keys", str(team.publication.site)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines if "--" not in line[0]] == ["KEY", "root", "targets", "online", "vision"]
    assert lines[-1][2:5] == ["releases", "of", "detectors_*"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replace=nobody"], "the repository has no key 'nobody'; it has online, root, targets, vision"),
        (["--replace=vision"], "vision.pub' is still the old key: put the new one there"),
        (["--remove=root"], "the key 'root' is the only one that signs root: replace it"),
        (["--remove=online"], "the only one that signs snapshot, timestamp: replace it"),
        (["--add-root=ben"], "ben.pem' does not exist; expected a private key there, as PEM, or a public one"),
        (["--add-root=targets"], "the repository has a key 'targets' already"),
        (["--add-root=vision", "--needed=3"], "3 keys would have to sign root, which then has 2"),
        (["--add-publisher=vision", "--models=x_*"], "the repository has 'vision' already"),
        (["--add-publisher=x/y", "--models=x_*"], "expected a name of letters, digits, - and _"),
        (["--add-publisher=other", "--models=a/*"], "--models: expected a name with * or ?"),
        (
            ["--add-publisher=other", "--models=detectors_a*"],
            "'detectors_a*' meets 'detectors_*', which 'vision' signs",
        ),
        (["--add-publisher=other", "--models=m*"], "the main publisher has releases of 'm'"),
        (["--add-publisher=other"], "--add-publisher needs --models=PATTERN"),
        (["--sign"], "there is no draft of root"),
    ],
)
def test_what_cannot_be_done_is_named_and_changes_nothing(
    team: Team, keys: Keys, arguments: list[str], message: str
) -> None:
    before = sorted((path, path.read_bytes()) for path in team.publication.site.rglob("*.json"))
    with pytest.raises(InvalidRequest) as error:
        keys(*arguments)
    assert message in error.value.message
    assert sorted((path, path.read_bytes()) for path in team.publication.site.rglob("*.json")) == before


# -- further publishers


def test_a_team_without_the_online_key_publishes_and_withdraws_its_models(
    team: Team, box: Any, add_model: AddModel, capsys: pytest.CaptureFixture[str]
) -> None:
    add_model(team.models / "detectors_a", 0.125)
    capsys.readouterr()
    team.publish()
    assert "boxes get it when somebody with the key 'online'" in capsys.readouterr().out
    box.follow()
    assert box.factor("detectors_a") == 0.25
    team.publication.publish()
    report = box.follow().report
    assert report.models["detectors_a"].installed == "detectors_a/2.json"
    assert box.factor("detectors_a") == 0.125
    team.publish("--withdraw=detectors_a/2")
    team.publication.publish()
    box.follow()
    assert (box.factor("m"), box.factor("detectors_a")) == (0.5, 0.25)


def test_publishers_do_not_publish_models_of_others(team: Team, add_model: AddModel) -> None:
    add_model(team.models / "m", 0.125)
    with pytest.raises(InvalidRequest, match="model 'm' is the main publisher's, by its name"):
        team.publish()
    add_model(team.publication.models / "detectors_b", 0.125)
    with pytest.raises(InvalidRequest, match="model 'detectors_b' is for the publisher 'vision', by its name"):
        team.publication.publish()


def test_a_list_with_models_of_others_brings_only_its_own(team: Team, box: Any) -> None:
    def add_others(targets: Any) -> None:
        for name in ("m/9.json", "other/1.json"):
            content = targets.targets["detectors_a/1.json"].to_dict()
            targets.targets[name] = type(targets.targets["detectors_a/1.json"]).from_dict(content, name)

    team.sign(add_others)
    team.publication.publish()
    report = box.follow().report
    assert (report.problem, sorted(report.models)) == ("", ["detectors_a", "m"])
    assert report.models["m"].wanted == "m/1.json"
    assert sorted(path.name for path in box.folder.iterdir() if path.name[0] != ".") == ["detectors_a", "m"]


def test_a_list_whose_hash_is_a_path_writes_nothing_outside_of_its_folder(team: Team, box: Any) -> None:
    def escape(targets: Any) -> None:
        targets.targets["detectors_a/2.json"] = copy.deepcopy(targets.targets["detectors_a/1.json"])
        targets.targets["detectors_a/2.json"].path = "detectors_a/2.json"
        targets.targets["detectors_a/2.json"].hashes["sha256"] = "../../../escaped"

    (box.folder.parent / "escaped").write_text('{"files": {}}')
    team.sign(escape)
    team.publication.publish()
    report = box.follow().report
    assert "'detectors_a/2.json' is not in the signed list of files, or has no SHA-256 there" in report.problem
    assert (box.factor("m"), box.factor("detectors_a")) == (0.5, 0.25)


@pytest.mark.parametrize("count", [1, 1000])
def test_a_publisher_that_names_further_ones_is_not_followed(
    team: Team, box: Any, add_model: AddModel, count: int
) -> None:
    from tuf.api.metadata import DelegatedRole, Delegations

    def add_roles(targets: Any) -> None:
        names = ["vision"] if count == 1 else [f"helper{number}" for number in range(count)]
        key = targets_key(team)
        roles = {name: DelegatedRole(name, [key.keyid], 1, False, ["detectors_*/*"]) for name in names}
        targets.delegations = Delegations({key.keyid: key}, roles)

    add_model(team.publication.models / "m", 0.0625)
    team.sign(add_roles)
    team.publication.publish()
    report = box.follow().report
    assert "the list of the publisher 'vision' cannot be used" in report.problem
    assert report.models["detectors_a"].state == "waiting"
    assert (box.factor("m"), box.factor("detectors_a")) == (0.0625, 0.25)


def targets_key(team: Team) -> Any:
    from edge_server.plugins.fleet.publish.signing_keys import SigningKeys

    return SigningKeys(team.keys).public_key("vision")


def test_too_many_publishers_are_refused_by_a_box(team: Team, box: Any, add_model: AddModel) -> None:
    from edge_server.plugins.fleet.publish.repository_metadata import RepositoryMetadata
    from edge_server.plugins.fleet.publish.signing_keys import SigningKeys

    publication = team.publication
    metadata = RepositoryMetadata(publication.site / "metadata", SigningKeys(publication.keys))
    roles = metadata.main.delegations.roles  # type: ignore[union-attr]
    assert roles is not None
    for number in range(1000):
        roles[f"p{number}"] = type(roles["vision"])(f"p{number}", roles["vision"].keyids, 1, True, [f"p{number}/*"])
    with pytest.raises(InvalidRequest, match="30 publishers, which are the most"):
        metadata.check_free("another", ["z_*"])
    add_model(publication.models / "m", 0.0625)
    metadata.commit("targets", metadata.main, datetime.now().astimezone())
    assert "has 1001 publishers, more than 30" in box.follow().report.problem
    assert (box.factor("m"), box.factor("detectors_a")) == (0.5, 0.25)


def test_a_stolen_key_of_a_publisher_is_replaced_or_removed(
    team: Team, box: Any, add_model: AddModel, keys: Keys
) -> None:
    stolen = team.keys.with_name("stolen")
    shutil.copytree(team.keys, stolen)
    (team.keys / "vision.pem").unlink()
    make_key(team.keys / "vision.pem", team.publication.keys / "vision.pub")
    keys("--replace=vision")
    report = box.follow().report
    assert "the list of the publisher 'vision' cannot be used" in report.problem
    assert report.models["m"].state == "installed"
    assert box.factor("detectors_a") == 0.25  # what is there stays until the team publishes

    good, team.keys = team.keys, stolen
    add_model(team.models / "detectors_a", 0.125)
    with pytest.raises(InvalidRequest, match=r"vision\.json cannot be signed: the key 'vision'"):
        team.publish()
    team.sign(lambda targets: None)
    team.publication.publish()
    box.follow()
    assert box.factor("detectors_a") == 0.25

    team.keys = good
    team.publish()
    team.publication.publish()
    assert box.follow().report.problem == ""
    assert box.factor("detectors_a") == 0.125
    keys("--remove=vision")
    assert box.follow().report.problem == ""
    assert (box.factor("m"), box.factor("detectors_a")) == (0.5, None)
    with pytest.raises(InvalidRequest, match="the repository has no publisher 'vision'; there is none besides"):
        team.publish()


def test_a_publishers_list_that_has_expired_holds_only_its_models(
    team: Team, box: Any, add_model: AddModel, utc_now: datetime
) -> None:
    def expire(targets: Any) -> None:
        targets.expires = utc_now.replace(microsecond=0) - timedelta(days=1)
        targets.targets.clear()

    team.sign(expire)
    add_model(team.publication.models / "m", 0.125)
    team.publication.publish()
    assert "expired" in box.follow().report.problem
    assert (box.factor("m"), box.factor("detectors_a")) == (0.125, 0.25)


def test_both_may_publish_at_the_same_time(team: Team, box: Any, add_model: AddModel) -> None:
    publication = team.publication
    shutil.copy(publication.keys / "online.pem", team.keys)
    add_model(publication.models / "m", 0.125)
    add_model(team.models / "detectors_a", 0.0625)
    command = [sys.executable, "-m", "edge_server", "publish"]
    started = [
        subprocess.Popen([*command, publication.models, publication.site, f"--keys={publication.keys}"]),
        subprocess.Popen([*command, team.models, publication.site, f"--keys={team.keys}", "--publisher=vision"]),
    ]
    assert [process.wait(60) for process in started] == [0, 0]
    assert box.follow().report.problem == ""
    assert (box.factor("m"), box.factor("detectors_a")) == (0.125, 0.0625)
