"""Main program of the child process of `first_opening`: opens a model's version as a server does, says so, and
exits."""

from __future__ import annotations

import sys
from pathlib import Path

from edge_server.backends import load_backend
from edge_server.backends.base import OpenJob
from edge_server.backends.isolation.json_child_side import exit_at_once, start_child, write_message
from edge_server.config.server_config import settings_of_backend
from edge_server.errors import EdgeServerError
from edge_server.repository.disk.scan import Scanner, with_config
from edge_server.repository.resolve_version import ResolveOptions, resolve


def main() -> int:
    out, job = start_child()
    try:
        model = Scanner([Path(job["root"])], allows_external_links=True).find(job["model"])
        if model is not None:
            config_json = str(job["config_json"])
            options = ResolveOptions(backend_settings=job["settings"])
            resolved = resolve(with_config(model, config_json), int(job["version"]), options, config_json)
            spec = resolved.spec
            settings = settings_of_backend(job["settings"], spec.backend)
            name = f"{spec.instance_groups[0].name}_0"
            load_backend(spec.backend).open(OpenJob(spec, resolved.file, name, settings=settings))
    except EdgeServerError as error:
        write_message(out, {"refused": error.message})
        return exit_at_once()
    write_message(out, {"opened": True})
    return exit_at_once()


if __name__ == "__main__":
    sys.exit(main())
