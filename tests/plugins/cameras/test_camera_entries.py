"""Sources and sinks: their flags, their file, refused settings, and URLs whose passwords are never shown."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from edge_server.config import ConfigError, describe, parse_serve
from edge_server.config.setting import shown_url
from edge_server.plugin import own_plugins
from edge_server.plugins.cameras.settings import SourcesConfig
from edge_server.plugins.cameras.source_and_sink_settings import SinkEntry, SourceEntry, read_entries

DOOR = "name=door,url=rtsp://me:geheim@cam:554/a,b?user=geheim,model=faces"


def parse(*flags, environ=None):
    return parse_serve(["--model-repository=/models", *flags], environ or {}, own_plugins())


def read(tmp_path, text):
    path = tmp_path / "cameras.toml"
    path.write_text(text)
    return read_entries(str(path))


def test_the_documentation_has_each_key_of_a_sink():
    page = (Path(__file__).parents[3] / "docs" / "camera-results.md").read_text()
    _, _, table = page.partition("| Key | Default | Meaning |")
    table, _, _ = table.partition("\n\n")
    for key in fields(SinkEntry):
        assert f"`{key.name}`" in "".join(row.split("|")[1] for row in table.splitlines() if row), key.name


def test_classes_of_a_sink_may_have_spaces(tmp_path):
    _, sinks = read(tmp_path, "[[sinks]]\nname='home'\nurl='mqtt://h'\nclasses=['traffic light', 'person']")
    assert sinks["home"].classes == ("traffic light", "person")
    parsed = parse("--sink=name=home,url=mqtt://h,classes=traffic light+person")
    (sink,) = parsed.config.table(SourcesConfig).sinks
    assert sink == sinks["home"]
    with pytest.raises(ConfigError, match="sink 'home': classes: expected an array of names of classes"):
        read(tmp_path, "[[sinks]]\nname='home'\nurl='mqtt://h'\nclasses=[1]")


def test_flags_define_sources_and_sinks():
    parsed = parse(
        f"--source={DOOR},fps=5,sinks=log+home", "--source=name=x,url=demo,model=m",
        "--sink=name=log,url=/tmp/x.jsonl,interval_s=0.5,on_change=true", "--sink=name=home,url=mqtt://broker",
    )  # fmt: skip
    config = parsed.config.table(SourcesConfig)
    url = "rtsp://me:geheim@cam:554/a,b?user=geheim"
    assert config.sources == (
        SourceEntry("door", url, "faces", fps=5.0, sinks=("log", "home")),
        SourceEntry("x", "demo", "m"),
    )
    assert config.sinks[0] == SinkEntry("log", "/tmp/x.jsonl", interval_s=0.5, on_change=True)


def test_a_file_defines_the_same_entries(tmp_path):
    sources, sinks = read(
        tmp_path,
        """
        [[sources]]
        name = "door"
        url = "rtsp://cam/x"
        model = "faces"
        fps = 5
        version = 2
        weight = 0.5
        decoder = "opencv"
        sinks = ["log"]

        [[sinks]]
        name = "log"
        url = "/tmp/x.jsonl"
        max_mb = 5
        on_change = false
        """,
    )
    assert sources == {
        "door": SourceEntry("door", "rtsp://cam/x", "faces", 2, 5.0, 0, 0.5, "opencv", ("log",)),
    }
    assert sinks == {"log": SinkEntry("log", "/tmp/x.jsonl", max_mb=5, on_change=False)}


def test_an_empty_file_has_no_cameras(tmp_path):
    assert read(tmp_path, "") == ({}, {})


def test_an_invalid_cameras_file_does_not_stop_the_models():
    assert parse("--sources-file=/nowhere.toml").config.table(SourcesConfig).file == "/nowhere.toml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "key=value pairs"),
        ("name=a,url=demo", "needs model"),
        ("url=demo", "needs name and model"),
        ("name=a,url=demo,modle=x", "unknown key modle, did you mean 'model'"),
        ("name=a b,url=demo,model=m", "name: expected 1 to 64 letters"),
        (f"name={'a' * 65},url=demo,model=m", "name: expected 1 to 64 letters"),
        ("name=a,url=ftp://me:geheim@h,model=m", "url: expected a path or rtsp://.*given ftp://"),
        ("name=a,url=geheim@geheim://h,model=m", "url: expected a path or rtsp://.*given another://"),
        ("name=a,url=rtsp:/me:geheim@h,model=m", "given no '://'"),
        ("name=a,url=rtsp://me:geheim/x@h:5/x,model=m", r"expected rtsp://\[user:password@\]host"),
        ("name=a,url=rtsp://h:99999/geheim,model=m", r"expected rtsp://\[user:password@\]host"),
        ("name=a,url=rtsp:///x,model=m", r"expected rtsp://\[user:password@\]host"),
        ("name=a,url=,model=m", "url: expected printable"),
        ("name=a,url=demo,model=m,fps=nan", "fps: expected a number of 0 to 1000"),
        ("name=a,url=demo,model=m,fps=-1", "fps: expected a number of 0 to 1000"),
        ("name=a,url=demo,model=m,priority=10", "priority: expected an integer of 0 to 9"),
        ("name=a,url=demo,model=m,weight=0", "weight: expected a number"),
        ("name=a,url=demo,model=m,decoder=mpv", "decoder: expected auto"),
        ("name=a,url=rtsp://h/?x=geheim,url=geheim,model=m", "url is given twice"),
        ("name=a,url=demo,model=m,sinks=no", "there is no sink 'no'"),
        ("name=a,url=rtsp://h,model=m,transport=sctp", "transport: expected tcp, udp or auto"),
        ("name=a,url=rtsps://h,model=m,transport=udp", "transport: expected udp only with url rtsp://"),
        ("name=a,url=rtsp://h,model=m,ca=x", "ca: expected only with url rtsps:// or https://"),
        ("name=a,url=rtsp://h,model=m,transport=auto,decoder=opencv", "decoder: expected pyav"),
        ("name=a,url=rtsps://h,model=m,decoder=opencv", "decoder: expected pyav"),
        ("name=a,url=rtsps://h,model=m,ca=x,decoder=gstreamer", "ca: expected only with decoder pyav"),
    ],
)
def test_an_invalid_flag_is_refused_with_the_reason_and_without_the_password(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse(f"--source={text}")
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[source]]\nname='a'", "unknown table 'source', expected .*, did you mean 'sources'?"),
        ("[[zones]]\nname='a'", r"unknown table 'zones', .*; zones stand below their source: \[\[sources.zones\]\]"),
        ("sources = 3", r"expected tables \[\[sources\]\]"),
        ("sources = [3]", r"expected tables \[\[sources\]\]"),
        ("[[sources]]\nname = 3", "source 1: name: expected str, got int"),
        ("[[sources]]\nname = 'a'\nurl = 'demo'\nmodel = 'm'\nfps = true", "source 'a': fps: expected int or float"),
        ("[[sources]]\nname = 'a'\nurl = 'demo'\nmodel = 'm'\nsinks = 'b'", "there is no sink 'b'"),
        ("[[sources]]\nname = 'a'\nurl = 'demo'\nmodel = 'm'\nsinks = [1]", "sinks: expected an array of names"),
        ("[[sinks]]\nname = 'a'\nurl = 'x'\non_change = 1", "on_change: expected bool, got int"),
        ("[[sinks]]\nname = 'a'\nurl = 'rtsp://me:geheim@h'", "expected a path or mqtt://.*given rtsp://"),
        ("[[sinks]]\nname = 'a'\nurl = 'mqtt://h'\ntopic = 'a/#'", "topic: expected printable characters without"),
        ("[[sinks]]\nname = 'a'\nurl = 'mqtt://h'\nca = 'x'", "sink 'a': ca: expected only with url mqtts://"),
        ("[[sinks]]\nname = 'a'\nurl = 'x/'\npictures = true", "sink 'a': pictures: expected only with url mqtt://"),
        ("[[sinks]]\nname = 'a'\nurl = 'x'\ncrop = true", "sink 'a': crop: expected only with a folder"),
        ("[[sinks]]\nname = 'a'\nurl = 'mqtts://h'\nkey = 'x'", "sink 'a': key: expected with cert"),
        ("[[sinks]]\nname = 'a'\nurl = 'x'\n[[sinks]]\nname = 'a'\nurl = 'y'", "two sinks have the name 'a'"),
        ("[[sources]]\nurl = 'rtsp://me:geheim@h/", "is not TOML"),
        ("\x00", "is not TOML"),
    ],
)
def test_an_invalid_file_is_refused_with_the_reason_and_without_the_password(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, text)
    assert "geheim" not in str(caught.value)
    assert "cameras.toml" in str(caught.value) or "sink" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("rtsp://cam/stream", "rtsp://cam"),
        ("rtsp://me:geheim@cam:554/geheim?p=geheim", "rtsp://cam:554"),
        ("rtsp://me:gehe/im@geheim@cam/x", "rtsp://cam"),
        ("http://cam?p=geheim@x", "http://x"),
        ("mqtts://u:geheim@[::1]:8883", "mqtts://[::1]:8883"),
        ("/videos/a.mp4", "/videos/a.mp4"),
        ("demo", "demo"),
    ],
)
def test_a_url_is_shown_without_its_password(url, shown):
    assert shown_url(url) == shown


def test_no_text_of_the_configuration_contains_a_password():
    parsed = parse(f"--source={DOOR}", "--sink=name=home,url=mqtt://me:geheim@broker")
    assert "geheim" not in describe(parsed)
    assert "name=door,url=rtsp://cam:554,model=faces" in describe(parsed)
    assert "geheim" not in repr(parsed.config)


def test_the_environment_defines_sources_too():
    environ = {"EDGE_SERVER_SOURCE": "name=a,url=demo,model=m name=b,url=pattern,model=m"}
    assert [entry.name for entry in parse(environ=environ).config.table(SourcesConfig).sources] == ["a", "b"]
