"""Versions that servers serve, and in which of them a server differs from most others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

PROGRAM = "edge-server"
"""Name of the server itself among its models."""
_NOT_SERVED = "not served"


def find_differences(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return for each server the models, or the server itself, whose served versions are not those of most servers.

    Where no version is the most frequent one, the higher counts as that of the others.
    """
    return find_served_differences({url: served_versions(report) for url, report in reports.items()})


def find_served_differences(values: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Return what `find_differences` does, given the result of `served_versions` for each server."""
    found: dict[str, list[str]] = {url: [] for url in values}
    for name in sorted({name for served in values.values() for name in served}):
        mine = {url: served.get(name, _NOT_SERVED) for url, served in values.items()}
        if any(value != _NOT_SERVED and "(" not in value for value in mine.values()):
            # One does not know the digest of its files yet, or is too old to tell.
            mine = {url: re.sub(r" \([0-9a-f]+\)", "", value) for url, value in mine.items()}
        counts = Counter(mine.values())
        usual = max(counts, key=lambda value: (counts[value], value != _NOT_SERVED, [len(value), value]))
        for url, value in mine.items():
            if value != usual:
                found[url].append(f"{name}: {value}, most others: {usual}")
    return found


def served_versions(report: Mapping[str, Any]) -> dict[str, str]:
    """Return model -> its served versions and their files, and the server's own version as "edge-server"."""
    served: dict[str, list[str]] = {}
    for model in report["models"]:
        if model["state"] == "READY":
            # Eight digits: enough to tell files apart, short enough to read. Older servers send none.
            digest = str(model.get("digest", "")).removeprefix("sha256:")[:8]
            served.setdefault(model["name"], []).append(f"version {model['version']}" + (digest and f" ({digest})"))
    versions = {name: ", ".join(sorted(texts)) for name, texts in served.items()}
    return {PROGRAM: f"version {report['version']}", **versions}
