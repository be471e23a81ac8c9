"""Declarations of the settings of a follower inside a server."""

from __future__ import annotations

from dataclasses import dataclass

from edge_server.config.setting import (
    OPTIONAL_PATH,
    OPTIONAL_TEXT,
    ConfigError,
    Kind,
    integer,
    number,
    setting,
    shown_url,
)


def _parse_broker(text: str) -> str:
    if not text:
        return text
    from edge_server.plugins.cameras.sinks.mqtt_connection import parse_broker_url

    return parse_broker_url(text)


def _parse_topic(text: str) -> str:
    from edge_server.plugins.cameras.sinks.mqtt_connection import parse_topic

    return parse_topic(text)


DEFAULT_TOPIC = "edge_server/fleet"

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
    mqtt: str = setting(
        "",
        "--follow-mqtt",
        Kind("url", _parse_broker, is_secret=True, show=shown_url),
        "MQTT broker (mqtt://[USER:PASSWORD@]HOST[:PORT] or mqtts://) to which this box reports its releases, for "
        "`edge-server fleet`.",
    )
    mqtt_topic: str = setting(
        DEFAULT_TOPIC, "--follow-mqtt-topic", Kind("topic", _parse_topic), "What the topics of the reports begin with."
    )
    mqtt_ca: str = setting(
        "", "--follow-mqtt-ca", OPTIONAL_PATH, "mqtts://: certificates to trust (PEM). Empty: those of the system."
    )
    mqtt_cert: str = setting("", "--follow-mqtt-cert", OPTIONAL_PATH, "mqtts://: certificate of this box (PEM).")
    mqtt_key: str = setting("", "--follow-mqtt-key", OPTIONAL_PATH, "mqtts://: its private key (PEM).")


def check_broker(config: FollowConfig, flag: str = "--follow-mqtt") -> None:
    """Raise ConfigError if the files of TLS do not go with the broker's URL. `flag`: how the flags begin."""
    files = {"ca": config.mqtt_ca, "cert": config.mqtt_cert, "key": config.mqtt_key}
    for name, path in files.items():
        if path and not config.mqtt.startswith("mqtts://"):
            raise ConfigError(f"{flag}-{name} needs a broker of mqtts://")
    if config.mqtt_key and not config.mqtt_cert:
        raise ConfigError(f"{flag}-key is given without {flag}-cert, the certificate of the key")
