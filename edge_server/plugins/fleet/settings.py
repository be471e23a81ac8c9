"""Declarations of the settings of a follower inside a server."""

from __future__ import annotations

from dataclasses import dataclass

from edge_server.config.setting import OPTIONAL_PATH, OPTIONAL_TEXT, integer, number, setting

UPDATE_HOME_VARIABLE = "EDGE_UPDATE_HOME"
"""Variable with the folder of the program's versions, which the Debian package's command sets."""


@dataclass(frozen=True, slots=True)
class FollowConfig:
    """Follower of a signed repository, which keeps the models of this box as the publisher wants them."""

    url: str = setting(
        "",
        "--follow",
        OPTIONAL_TEXT,
        "Address of a signed repository (https://HOST/PATH, http://HOST/PATH or file:///PATH): fetch the models that "
        "are for this box into the first model repository, try them, and serve them.",
    )
    root: str = setting(
        "", "--follow-root", OPTIONAL_PATH, "File with the root metadata of the signed repository: whose keys to trust."
    )
    box: str = setting(
        "", "--box-id", OPTIONAL_TEXT, "Name of this box for releases and reports. Empty: its host name."
    )
    groups: str = setting(
        "", "--box-groups", OPTIONAL_TEXT, "Groups of this box, with commas between them; releases can be for groups."
    )
    interval_s: float = setting(
        300.0,
        "--follow-interval-secs",
        number(1, 86_400),
        "Most seconds between two looks at the signed repository. Each wait is up to a fifth shorter, at random: boxes "
        "that started together do not look together.",
    )
    max_kbytes_per_s: int = setting(
        0, "--follow-max-kbytes-per-sec", integer(0, 10_000_000), "Most kilobytes a second to download. 0: no limit."
    )
    hours: str = setting(
        "",
        "--follow-hours",
        OPTIONAL_TEXT,
        "Local time in which releases are downloaded and installed, as 22:00-05:30. Empty: always. What was withdrawn "
        "goes at any time.",
    )
