"""Command `edge-server publish FOLDER REPOSITORY`: signs the models of a folder as releases, which the boxes of a fleet
install from the repository."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from edge_server.cli.options import CommandParser
from edge_server.config.setting import nearest
from edge_server.core.exit_code import ExitCode
from edge_server.errors import InvalidRequest
from edge_server.repository.disk.scan import Scanner

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROLLOUT_NAME = "rollout.toml"


def run(arguments: Sequence[str]) -> int:
    """Publish. Return 0. Raises EdgeServerError; then the repository is as before."""
    options = _parser().parse_args(arguments)
    from edge_server.plugins.fleet.publish.repository_metadata import locked

    if not options.folder.is_dir():
        raise InvalidRequest(f"'{options.folder}' is not a folder with models")
    found = Scanner([options.folder]).scan().models
    rollout = read_rollout(options.folder / ROLLOUT_NAME, found)
    broken = [f"model '{name}': {model.problem}" for name, model in found.items() if model.problem]
    if broken:
        raise InvalidRequest("; ".join(broken))
    with locked(options.repository):
        _publish(options, {name: model.path for name, model in found.items()}, rollout)
    return ExitCode.OK


def _publish(
    options: argparse.Namespace, folders: Mapping[str, Path], rollout: Mapping[str, Mapping[str, object]]
) -> None:
    from edge_server.plugins.fleet.publish.publisher import Publisher
    from edge_server.plugins.fleet.publish.signing_keys import SigningKeys

    publisher = Publisher(options.repository, SigningKeys(options.keys), options.publisher)
    metadata = publisher.metadata
    if metadata.is_new:
        print(f"{options.keys} has the private keys; keep copies of them where no box is")
        print(f"{metadata.root_file} goes to each box: --follow-root=FILE")
    before = publisher.releases()
    for path in options.withdraw:
        publisher.withdraw(f"{path}.json")
        print(f"{path}: withdrawn")
    now = datetime.now(timezone.utc)
    for name, folder in sorted(folders.items()):
        release = publisher.add(name, folder, rollout.get(name, {}), now.timestamp())
        if release is None:
            print(f"{name}: these files were withdrawn; other files become its next release")
            continue
        what = "new" if release.path not in before else "as before" if before[release.path] == release else "for others"
        print(f"{release.name}: {what}")
    publisher.commit(now)
    if metadata.root_problem:
        print(
            f"the next root waits for signatures: {metadata.root_problem}. The present one is valid until "
            f"{metadata.root.expires:%Y-%m-%d}"
        )
    if metadata.online_problem:
        print(
            f"signed; boxes get it when somebody with the key 'online' runs `edge-server publish` for this repository "
            f"({metadata.online_problem})"
        )
    for name in sorted({release.model for release in publisher.releases().values()} - set(folders)):
        print(f"{name}: not in {options.folder}; its releases stay until --withdraw={name}/NUMBER")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="edge-server publish",
        description="Sign the models of FOLDER as releases in REPOSITORY, a folder of static files for any web server "
        "or a USB stick, which boxes follow. A model with other files than its newest release gets a new release; one "
        f"without gets what FOLDER/{ROLLOUT_NAME} says now. Each run extends the validity of the signatures.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a model repository")
    parser.add_argument("repository", type=Path, metavar="REPOSITORY", help="made if it does not exist")
    parser.add_argument("--keys", type=Path, required=True, metavar="DIR", help="folder of the private keys")
    parser.add_argument("--publisher", default="", metavar="NAME", help="publish as NAME of `edge-server fleet keys`")
    parser.add_argument(
        "--withdraw", action="append", default=[], metavar="MODEL/NUMBER", help="take a release back; may be repeated"
    )
    return parser


def read_rollout(path: Path, models: Collection[str]) -> dict[str, dict[str, object]]:
    """Return for each model its selection: the keys of the file, and over them those of its table.

    Raises InvalidRequest; the keys themselves are checked as those of a release.
    """
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"'{path}' cannot be read: {error}") from None
    tables = document.pop("models", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise InvalidRequest(f"'{path}': expected tables [models.NAME]")
    for name in tables:
        if name not in models:
            raise InvalidRequest(f"'{path}': there is no model '{name}' beside it{nearest(name, models)}")
    return {
        name: {
            # A time becomes seconds since the epoch, in local time if it names no zone.
            key: value.timestamp() if isinstance(value, datetime) else value
            for key, value in {**document, **tables.get(name, {})}.items()
        }
        for name in models
    }
