"""Settings of the response cache: Triton's spelling, several in one flag, refused values, and secrets that stay
secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_server.config import ConfigError, LocalCache, RedisCache, choose_cache, describe, parse_serve

REPOSITORY = "--model-repository=/models"
HERE = "--cache-config=redis,host=box,port=6379"


def chosen(*argv: str, **environ: str) -> Any:
    return choose_cache(parse_serve([REPOSITORY, *argv], environ).config.cache)


def test_a_cache_is_chosen_as_triton_spells_it() -> None:
    table = [
        ([], None),
        (["--cache-config=local,size=1048576"], LocalCache(1048576)),
        (["--cache-config", "local,size=1048576"], LocalCache(1048576)),
        (["--cache-config=local,size=0"], None),
        (["--response-cache-byte-size=7"], LocalCache(7)),
        (["--response-cache-byte-size=7", "--cache-config=local,size=8"], LocalCache(8)),
        (["--cache-config=local,size=8", "--cache-config=local,size=9"], LocalCache(9)),
        (["--cache-config=redis,host=box", "--cache-config=redis,port=6379"], RedisCache("box", 6379)),
        ([HERE], RedisCache("box", 6379)),
        (
            [HERE + ",password=a,b=c,,user=me,db=2,ttl=0"],
            RedisCache("box", 6379, user="me", password="a,b=c,", db=2, ttl_s=0),
        ),
        (
            [HERE, "--cache-config=redis,tls_enabled=true,cacert=/ca.pem,socket_timeout=20,pool_size=2"],
            RedisCache("box", 6379, uses_tls=True, cacert="/ca.pem", socket_timeout_ms=20, pool_size=2),
        ),
    ]
    assert [(argv, chosen(*argv)) for argv, _ in table] == table


def test_environment_and_file_give_the_same_settings(tmp_path: Path) -> None:
    assert chosen(EDGE_SERVER_CACHE_CONFIG="redis,host=box redis,port=1") == RedisCache("box", 1)
    path = tmp_path / "edge.toml"
    path.write_text("[cache]\nsettings = ['local,size=5']\n")
    assert chosen(f"--config={path}") == LocalCache(5)


def test_tritons_variables_set_redis_credentials_and_a_flag_overrides_them() -> None:
    environ = {"TRITONCACHE_REDIS_USERNAME": "env", "TRITONCACHE_REDIS_PASSWORD": "secret"}
    assert chosen(HERE, **environ) == RedisCache("box", 6379, user="env", password="secret")
    assert chosen(HERE + ",user=flag", **environ).user == "flag"
    assert chosen("--cache-config=local,size=5", **environ) == LocalCache(5)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("lokal,size=5", "did you mean 'local'"),
        ("local", "local,<setting>=<value>"),
        ("local,size", "local,<setting>=<value>"),
        ("local,sise=5", "did you mean 'size'"),
        ("local,size=-1", "local,size: expected an integer of 0"),
        ("local,size=many", "local,size: expected an integer"),
        ("redis,host=box", "there is no port"),
        ("redis,port=1", "there is no host"),
        ("redis,host=box,port=0", "redis,port: expected an integer of 1"),
        ("redis,host=box,port=1,socket_timeout=0", "redis,socket_timeout: expected an integer of 1"),
        ("redis,host=box,port=1,tls_enabled=maybe", "redis,tls_enabled: expected true"),
    ],
)
def test_invalid_values_are_refused_with_flag_setting_and_expected_value(flag: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        chosen(f"--cache-config={flag}")
    assert "--cache-config" in str(caught.value)


@pytest.mark.parametrize("other", ["--cache-config=local,size=5", "--response-cache-byte-size=5"])
def test_two_caches_at_once_are_refused(other: str) -> None:
    with pytest.raises(ConfigError, match="expected one cache"):
        chosen(HERE, other)


def test_a_password_is_neither_printed_nor_repeated_in_errors() -> None:
    found = parse_serve([REPOSITORY, HERE + ",password=open-sesame"], {})
    text = describe(found)
    assert "redis,host=box,port=6379,password=***" in text
    assert "open-sesame" not in text + repr(found) + repr(choose_cache(found.config.cache))
    with pytest.raises(ConfigError) as caught:
        chosen("--cache-config=redis,password=open-sesame,pasword", "--cache-config=redis,pasword=open-sesame")
    assert "open-sesame" not in str(caught.value)


def test_the_old_flag_is_accepted_with_a_warning() -> None:
    warnings = parse_serve([REPOSITORY, "--response-cache-byte-size=7"], {}).warnings
    assert any("--cache-config=local,size=<bytes>" in item for item in warnings)
