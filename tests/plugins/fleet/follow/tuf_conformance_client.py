"""Client of the box as a program that TUF's conformance suite drives.

Source of its arguments: CLIENT-CLI.md of https://github.com/theupdateframework/tuf-conformance.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from edge_server.errors import EdgeServerError
from edge_server.plugins.fleet.follow.signed_repository import SignedRepository
from edge_server.plugins.fleet.follow.site_files import SiteFiles

INSTALLED_ROOT = "installed_root"
"""The root that came with the installation; the suite reads each `*.json` beside it as trusted metadata."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--metadata-dir", type=Path, required=True)
    parser.add_argument("--metadata-url", default="")
    parser.add_argument("--target-name", action="append", default=[])
    parser.add_argument("--target-base-url")
    parser.add_argument("--target-dir", type=Path)
    parser.add_argument("command", choices=("init", "refresh", "download"))
    parser.add_argument("trusted_root", type=Path, nargs="?")
    options = parser.parse_args()
    if options.command == "init":
        for name in (INSTALLED_ROOT, "root.json"):
            shutil.copy(options.trusted_root, options.metadata_dir / name)
        return 0
    site = SiteFiles(options.metadata_url.removesuffix("metadata/"), 0, 10)
    repository = SignedRepository(site, options.metadata_dir, (options.metadata_dir / INSTALLED_ROOT).read_bytes())
    try:
        # Not `refresh`, which also reads the lists of all other publishers: the suite counts requests.
        repository.update()
        for name in options.target_name:
            target = repository.find_target(name)
            # The follower keeps downloads by their SHA-256.
            parts = options.metadata_dir.with_name("parts")
            parts.mkdir(exist_ok=True)
            shutil.copy2(repository.download(target, parts), options.target_dir / name.replace("/", "_"))
    except (EdgeServerError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
