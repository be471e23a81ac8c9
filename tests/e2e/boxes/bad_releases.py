"""Bad releases: what a publisher may sign by mistake, and what a web server may send that was not signed so."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from securesystemslib.signer import CryptoSigner, Signer
from tuf.api.metadata import Metadata, Root, Snapshot, Targets, Timestamp

from tests.e2e.boxes.fleet_of_boxes import Fleet, Publisher, write_model

# Each bad release multiplies by another number: the files of one that was withdrawn do not become a release again.


def publish_slow(fleet: Fleet) -> None:
    write_model(fleet.publisher.model, 601.0, slow=True)
    fleet.publisher.publish()


def publish_wrong(fleet: Fleet) -> None:
    write_model(fleet.publisher.model, 602.0, expected=1.0)
    fleet.publisher.publish()
    shutil.copytree(fleet.publisher.site, fleet.publisher.folder / "replayed")


def publish_broken(fleet: Fleet) -> None:
    write_model(fleet.publisher.model, 603.0)
    (fleet.publisher.model / "1" / "model.onnx").write_bytes(b"no network")
    fleet.publisher.publish()


def publish_damaged(fleet: Fleet) -> None:
    """A bit of each new file is another one on the web server."""

    def damage(new: list[Path]) -> None:
        for path in new:
            if path.suffix != ".json":
                content = path.read_bytes()
                path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    write_model(fleet.publisher.model, 604.0)
    _publish_behind_the_site(fleet, damage)


def publish_larger_than_the_disk(fleet: Fleet) -> None:
    """The signed list says that a file has 2**50 bytes."""

    def enlarge(new: list[Path]) -> None:
        def change(targets: Targets) -> None:
            for path, target in targets.targets.items():
                if not path.endswith(".json"):
                    target.length = 2**50

        _sign_again(fleet.publisher.site, "targets", change, _key(fleet, "targets"))

    write_model(fleet.publisher.model, 605.0)
    _publish_behind_the_site(fleet, enlarge)


def site_that_expired(fleet: Fleet) -> Path:
    site = _copy_with_bad_release(fleet, "expired", 607.0)

    def expire(timestamp: Timestamp) -> None:
        timestamp.expires = datetime.now(timezone.utc).replace(microsecond=0) - timedelta(seconds=1)

    _sign_again(site, "timestamp", expire, _key(fleet, "online"))
    return site


def site_that_is_replayed(fleet: Fleet) -> Path:
    """Return the site as it was while the release of `publish_wrong` was the newest one."""
    return fleet.publisher.folder / "replayed"


def site_of_a_thief(fleet: Fleet) -> Path:
    """Return a site that another key has signed, with a release for all boxes."""
    thief = copy.copy(fleet.publisher)
    thief.site, thief.keys, thief.rollout = thief.folder / "thief", thief.folder / "thief_keys", ""
    write_model(thief.model, 606.0)
    thief.publish()
    return thief.site


def site_of_a_thief_with_the_online_key(fleet: Fleet) -> Path:
    """Return a site with the right signatures of what is newest, and releases that another key has signed."""
    site = _copy_with_bad_release(fleet, "online_thief", 608.0)
    _sign_again(site, "targets", lambda targets: None, CryptoSigner.generate_ed25519())
    return site


def _copy_with_bad_release(fleet: Fleet, name: str, factor: float) -> Path:
    copied = copy.copy(fleet.publisher)
    copied.site, copied.rollout = copied.folder / name, ""
    shutil.copytree(fleet.publisher.site, copied.site)
    write_model(copied.model, factor)
    copied.publish()
    return copied.site


def _publish_behind_the_site(fleet: Fleet, change: Callable[[list[Path]], None]) -> None:
    """Publish and change the new targets while the boxes see the site as it was before."""
    publisher: Publisher = fleet.publisher
    before = publisher.folder / "before"
    shutil.rmtree(before, ignore_errors=True)
    shutil.copytree(publisher.site, before)
    fleet.site.folder = before
    publisher.publish()
    names = [{path.name for path in site.glob("targets/m/*")} for site in (publisher.site, before)]
    change([publisher.site / "targets" / "m" / name for name in names[0] - names[1]])
    fleet.site.folder = publisher.site


def _key(fleet: Fleet, name: str) -> Signer:
    root = Metadata[Root].from_bytes((fleet.publisher.site / "metadata" / "1.root.json").read_bytes()).signed
    (key_id,) = root.roles["timestamp" if name == "online" else name].keyids
    return Signer.from_priv_key_uri(f"file2:{fleet.publisher.keys / name}.pem", root.keys[key_id])


def _sign_again(site: Path, role: str, change: Callable[[Any], None], signer: Signer) -> None:
    """Change the newest metadata of a role, and sign them with this key instead of its own."""
    metadata = site / "metadata"
    path = metadata / "timestamp.json"
    if role == "targets":
        timestamp = Metadata[Timestamp].from_bytes(path.read_bytes()).signed
        snapshot_path = metadata / f"{timestamp.snapshot_meta.version}.snapshot.json"
        snapshot = Metadata[Snapshot].from_bytes(snapshot_path.read_bytes()).signed
        path = metadata / f"{snapshot.meta['targets.json'].version}.targets.json"
    found: Metadata[Any] = Metadata.from_bytes(path.read_bytes())
    change(found.signed)
    found.sign(signer)
    path.write_bytes(found.to_bytes())
