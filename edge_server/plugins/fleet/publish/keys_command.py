"""`edge-server fleet keys`: show who may sign in a signed repository, replace or remove keys, and admit publishers."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_server.cli.console import render, wrap
from edge_server.cli.options import int_range
from edge_server.core.exit_code import ExitCode
from edge_server.errors import InvalidRequest

if TYPE_CHECKING:
    from edge_server.plugins.fleet.publish.repository_metadata import RepositoryMetadata
    from edge_server.plugins.fleet.publish.signing_keys import SigningKeys

_MAX_ROOT_KEYS = 20


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "keys",
        help="show and exchange the keys of a signed repository",
        description="Show who may sign in a signed repository, or change it. Boxes follow each change.",
        allow_abbrev=False,
    )
    parser.add_argument("repository", type=Path, metavar="REPOSITORY", help="folder of `edge-server publish`")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="folder of the private keys, for a change")
    changes = parser.add_mutually_exclusive_group()
    changes.add_argument("--replace", default="", metavar="NAME", help="give a lost, stolen or old key a new one")
    changes.add_argument("--add-root", default="", metavar="NAME", help="let a further key sign root")
    changes.add_argument(
        "--add-publisher", default="", metavar="NAME",
        help="let a further key sign releases of the models whose names match --models",
    )  # fmt: skip
    changes.add_argument("--remove", default="", metavar="NAME", help="let a key sign nothing any more")
    changes.add_argument("--sign", action="store_true", help="add signatures to a root that somebody else has changed")
    parser.add_argument(
        "--models",
        action="append",
        default=[],
        metavar="PATTERN",
        help="for --add-publisher, as detectors_*; repeatable",
    )
    parser.add_argument(
        "--needed", type=int_range(1, _MAX_ROOT_KEYS), default=0, metavar="N",
        help="for --add-root and --remove: how many keys of root must sign it from now on; default: as before",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Do the action and print the state. Return the exit code. Raises EdgeServerError."""
    from edge_server.plugins.fleet.publish.repository_metadata import MAIN, RepositoryMetadata, locked
    from edge_server.plugins.fleet.publish.signing_keys import SigningKeys

    if not (options.repository / "metadata").is_dir():
        raise InvalidRequest(f"'{options.repository}' is no signed repository")
    is_change = options.replace or options.add_root or options.add_publisher or options.remove
    if (is_change or options.sign) and options.keys is None:
        raise InvalidRequest("a change needs --keys=DIR")
    keys = SigningKeys(options.keys or Path())
    with locked(options.repository):
        metadata = RepositoryMetadata(options.repository / "metadata", keys)
        if options.sign:
            if metadata.draft is None:
                raise InvalidRequest("there is no draft of root that waits for signatures")
            before = len(metadata.draft.signatures)
            reasons = "; ".join(f"{name}: {why}" for name, why in metadata.sign_draft().items())
            if len(metadata.draft.signatures) == before and metadata.missing_signatures():
                raise InvalidRequest(f"nothing was signed: {reasons}")
        elif is_change:
            now = datetime.now(timezone.utc)
            _change(options, metadata, keys, now)
            metadata.commit(MAIN, metadata.main, now)
        print("\n".join(_lines(metadata)))
        if metadata.root_problem:
            print(wrap(f"not in place yet: {metadata.root_problem}", sys.stdout))
    return ExitCode.OK


def _change(options: argparse.Namespace, metadata: RepositoryMetadata, keys: SigningKeys, now: datetime) -> None:
    if options.add_publisher:
        _check_publisher(options, metadata)
        metadata.check_free(options.add_publisher, options.models)
        metadata.add_publisher(options.add_publisher, keys.public_key(options.add_publisher), options.models)
    elif options.add_root:
        if options.add_root in _names(metadata):
            raise InvalidRequest(f"the repository has a key '{options.add_root}' already: choose another name")
        root = metadata.change_root(now)
        root.add_key(keys.public_key(options.add_root), "root")
        _set_needed(root, options.needed)
    elif options.replace in metadata.publishers:
        old = metadata.key_of(options.replace)
        keys.public_key(options.replace)  # it is theirs to make
        new = keys.replace(options.replace, old)
        metadata.main.revoke_key(old.keyid, options.replace)
        metadata.main.add_key(new, options.replace)
    elif options.replace:
        key_id, roles = _find_key(metadata, options.replace)
        root = metadata.change_root(now)
        new = keys.replace(options.replace, metadata.root.keys[key_id])
        for role in roles:
            root.revoke_key(key_id, role)
            root.add_key(new, role)
    elif options.remove in metadata.publishers:
        metadata.remove_publisher(options.remove)
    else:
        key_id, roles = _find_key(metadata, options.remove)
        if roles != ["root"] or len(metadata.root.roles["root"].keyids) == 1:
            raise InvalidRequest(
                f"the key '{options.remove}' is the only one that signs {', '.join(roles)}: replace it"
            )
        root = metadata.change_root(now)
        root.revoke_key(key_id, "root")
        _set_needed(root, options.needed)


def _check_publisher(options: argparse.Namespace, metadata: RepositoryMetadata) -> None:
    from edge_server.plugins.fleet.publish.signing_keys import is_key_name

    if not is_key_name(options.add_publisher):
        raise InvalidRequest(f"expected a name of letters, digits, - and _, given '{options.add_publisher[:80]}'")
    if not options.models:
        raise InvalidRequest("--add-publisher needs --models=PATTERN")
    for pattern in options.models:
        if not pattern or len(pattern) > 100 or any(char in "/[]" or not char.isprintable() for char in pattern):
            raise InvalidRequest(f"--models: expected a name with * or ?, as detectors_*, given '{pattern[:80]}'")


def _set_needed(root: Any, needed: int) -> None:
    role = root.roles["root"]
    role.threshold = needed or role.threshold
    if role.threshold > len(role.keyids):
        raise InvalidRequest(
            f"{role.threshold} keys would have to sign root, which then has {len(role.keyids)}: give --needed=N"
        )


def _names(metadata: RepositoryMetadata) -> dict[str, str]:
    """Return name -> id of the keys that root names."""
    from edge_server.plugins.fleet.publish.signing_keys import NAME_FIELD

    return {str(key.unrecognized_fields.get(NAME_FIELD, "-")): key_id for key_id, key in metadata.root.keys.items()}


def _find_key(metadata: RepositoryMetadata, name: str) -> tuple[str, list[str]]:
    """Return the id of a key that root names, and the roles that it signs."""
    names = _names(metadata)
    if name not in names:
        listed = ", ".join([*sorted(names), *metadata.publishers])
        raise InvalidRequest(f"the repository has no key '{name[:80]}'; it has {listed}")
    return names[name], [role for role, found in metadata.root.roles.items() if names[name] in found.keyids]


def _lines(metadata: RepositoryMetadata) -> list[str]:
    from edge_server.plugins.fleet.publish.repository_metadata import patterns

    rows = []
    for role, signs in (("root", "who may sign"), ("targets", "releases"), ("timestamp", "what is newest")):
        description = metadata.root.roles[role]
        needed = f", {description.threshold} of {len(description.keyids)} keys" if len(description.keyids) > 1 else ""
        expires = {"root": metadata.root, "targets": metadata.main, "timestamp": metadata.timestamp}[role].expires
        for key_id in description.keyids:
            rows.append(_row(metadata.root.keys[key_id], signs + needed, f"{expires:%Y-%m-%d}"))
    for name, delegated in metadata.publishers.items():
        found = metadata.targets_of(name)
        until = f"{found.expires:%Y-%m-%d}" if found else "has signed nothing"
        rows.append(_row(metadata.key_of(name), f"releases of {', '.join(patterns(delegated))}", until))
    lines = [render(("KEY", "FINGERPRINT", "SIGNS", "VALID UNTIL"), rows, sys.stdout)]
    if metadata.draft is not None:
        missing = metadata.missing_signatures()
        state = (
            f"needs signatures: {missing}"
            if missing
            else "is complete: the next `edge-server publish` puts it in place"
        )
        lines += [*_differences(metadata), f"root version {metadata.draft.signed.version} {state}"]
    return [lines[0], *(wrap(line, sys.stdout) for line in lines[1:])]


def _row(key: Any, signs: str, expires: str) -> tuple[str, ...]:
    from edge_server.plugins.fleet.publish.signing_keys import NAME_FIELD, fingerprint

    return str(key.unrecognized_fields.get(NAME_FIELD, "-")), fingerprint(key), signs, expires


def _differences(metadata: RepositoryMetadata) -> list[str]:
    """Return the changes of the draft of root, as text."""
    from edge_server.plugins.fleet.publish.signing_keys import name_of

    assert metadata.draft is not None
    old, new = metadata.root, metadata.draft.signed
    lines = []
    for role in ("root", "targets", "snapshot", "timestamp"):
        before, after = ([name_of(root.keys[key_id]) for key_id in root.roles[role].keyids] for root in (old, new))
        lines += [f"draft: {name} signs {role} no more" for name in before if name not in after]
        lines += [f"draft: {name} signs {role}" for name in after if name not in before]
        if old.roles[role].threshold != new.roles[role].threshold:
            lines.append(
                f"draft: {new.roles[role].threshold} keys must sign {role}, before {old.roles[role].threshold}"
            )
    return [*lines, f"draft: valid until {new.expires:%Y-%m-%d}"]
