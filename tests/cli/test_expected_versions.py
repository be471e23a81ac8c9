"""Problems reported by `status` and `fleet status`: failures, and versions other than the expected ones."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from edge_server.cli import expected_versions
from edge_server.cli.expected_versions import Expectation, find_failures, find_unknown, find_unmet, parse_expectation
from edge_server.core.status_reports import CANARY_FELL_BACK, EARLIER_GENERATION


def report(*models: tuple[str, str, str, str], is_ready: bool = True, digest: str = "sha256:" + 64 * "a") -> Any:
    names = ("name", "version", "state", "reason")
    return {
        "ready": is_ready,
        "models": [{**dict(zip(names, model, strict=True)), "digest": digest} for model in models],
    }


@pytest.mark.parametrize(
    ("model", "is_failure"),
    [
        (("m", "1", "READY", ""), False),
        (("m", "1", "READY", "pinned to version 1"), False),
        (("m", "1", "UNAVAILABLE", "unloaded"), False),
        (("m", "1", "UNAVAILABLE", "unloaded: idle; loads again on request"), False),
        (("m", "", "", ""), False),
        (("m", "2", "LOADING", ""), False),
        (("m", "2", "UNAVAILABLE", "no luck"), True),
        (("m", "", "UNAVAILABLE", "what is this?"), True),
        (("m", "1", "READY", f"{EARLIER_GENERATION}: no luck"), True),
        (("m", "2", "READY", f"{CANARY_FELL_BACK}: too slow"), True),
    ],
)
def test_a_version_that_does_not_serve_is_a_failure(model: tuple[str, str, str, str], is_failure: bool) -> None:
    assert bool(find_failures(report(("other", "1", "READY", ""), model))) is is_failure


def test_a_failed_version_superseded_by_a_later_one_is_no_failure() -> None:
    failed = ("m", "2", "UNAVAILABLE", "no luck")
    assert find_failures(report(("m", "3", "READY", ""), failed)) == []
    assert find_failures(report(("m", "1", "READY", ""), ("other", "3", "READY", ""), failed)) != []


def test_a_server_that_is_not_ready_is_a_failure() -> None:
    assert find_failures(report(is_ready=False)) == ["the server is not ready"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("m=3", ""),
        ("m=3@aaaaaaaa", ""),
        (f"m=3@sha256:{64 * 'a'}", ""),
        ("m=4", "m: version 4 is expected, version 3 serves"),
        ("x=1", "x: version 1 is expected, no version serves"),
        ("m=3@bbbbbbbb", "m version 3: files with the SHA-256 bbbbbbbb are expected, " + 64 * "a" + " serves"),
    ],
)
def test_an_expectation_is_met_by_the_version_and_its_files(text: str, problem: str) -> None:
    seen = report(("m", "3", "READY", ""), ("m", "4", "UNAVAILABLE", "no luck"))
    assert find_unmet(seen, [parse_expectation(text)]) == ([problem] if problem else [])


def test_an_unknown_digest_is_neither_met_nor_unmet() -> None:
    seen = report(("m", "3", "READY", ""), digest="")
    wanted = [Expectation("m", "3"), Expectation("m", "3", "aaaaaaaa"), Expectation("m", "4", "aaaaaaaa")]
    assert find_unmet(seen, wanted) == ["m: version 4 is expected, version 3 serves"]
    (text,) = find_unknown(seen, wanted)
    assert text.startswith("m version 3: files with the SHA-256 aaaaaaaa are expected, the server does not know")
    assert find_unknown(report(("m", "3", "READY", "")), wanted) == []


@pytest.mark.parametrize(
    ("is_wrong", "is_unknown", "code"), [(False, False, 0), (False, True, 75), (True, False, 1), (True, True, 1)]
)
def test_the_exit_code_tells_wrong_from_unknown(is_wrong: bool, is_unknown: bool, code: int) -> None:
    assert expected_versions.exit_code(is_wrong=is_wrong, is_unknown=is_unknown) == code


@pytest.mark.parametrize("text", ["m", "m=", "m=01", "m=-1", "m=1@", "m=1@abc", "m=1@ABCDEF01", "=1"])
def test_a_malformed_expectation_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected MODEL=VERSION"):
        parse_expectation(text)


def test_waiting_ends_once_the_expectation_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_versions, "POLL_S", 0.001)
    looks = iter(range(10))
    assert expected_versions.wait_until_well(lambda: next(looks), lambda seen: seen == 3, 60) == 3
    assert expected_versions.wait_until_well(lambda: next(looks), lambda seen: False, 0.0) == 4
