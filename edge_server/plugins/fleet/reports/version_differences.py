"""Comparison of the versions that servers serve: which differ from most others, and which cannot be compared yet."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

PROGRAM = "edge-server"
"""Name of the server itself among its models."""
_NOT_SERVED = "not served"
_DIGEST = re.compile(r" \([0-9a-f]+\)")


def find_differences(values: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Return for each server the models, or the server itself, whose served versions are not those of most servers, or
    whose files are not those of most servers with these versions. `values`: server -> its `served_versions`.

    Where no version is the most frequent one, the higher counts as that of the others. A server that does not know the
    SHA-256 of its files differs by versions only: see `find_unknown`.
    """
    found: dict[str, list[str]] = {url: [] for url in values}
    for name in sorted({name for served in values.values() for name in served}):
        mine = {url: served.get(name, _NOT_SERVED) for url, served in values.items()}
        versions = {url: _DIGEST.sub("", value) for url, value in mine.items()}
        counts = Counter(versions.values())
        usual_versions = max(counts, key=lambda value: (counts[value], value != _NOT_SERVED, [len(value), value]))
        files = Counter(
            value for url, value in mine.items() if versions[url] == usual_versions and _has_all_digests(value)
        )
        usual = max(files, key=lambda value: (files[value], value), default=usual_versions)
        for url, value in mine.items():
            if versions[url] != usual_versions or (_has_all_digests(value) and value != usual):
                found[url].append(f"{name}: {value}, most others: {usual}")
    return found


def find_unknown(values: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Return for each server the models that another one serves too, and whose files cannot be compared, because the
    server does not know their SHA-256 (yet). `values` as for `find_differences`."""
    counts = Counter(name for served in values.values() for name in served)
    return {
        url: [
            f"{name}: {value}, without the SHA-256 of its files"
            for name, value in sorted(served.items())
            if name != PROGRAM and counts[name] > 1 and not _has_all_digests(value)
        ]
        for url, served in values.items()
    }


def find_other_runtimes(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return for each server the versions that another runtime runs than on most servers, as after a measurement."""
    used = {
        url: {
            f"{model['name']}: version {model['version']}": runtime
            for model in report["models"]
            if model["state"] == "READY" and (runtime := str(model.get("runtime", "")))
        }
        for url, report in reports.items()
    }
    found: dict[str, list[str]] = {url: [] for url in reports}
    for title in sorted({title for runtimes in used.values() for title in runtimes}):
        counts = Counter(runtimes[title] for runtimes in used.values() if title in runtimes)
        usual = max(counts, key=lambda runtime: (counts[runtime], runtime))
        for url, runtimes in used.items():
            if runtimes.get(title, usual) != usual:
                found[url].append(f"{title} by {runtimes[title]}, on most others by {usual}")
    return found


def _has_all_digests(value: str) -> bool:
    """Return whether each version in a value of `served_versions` has a digest."""
    return len(_DIGEST.findall(value)) == value.count(", ") + 1


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
