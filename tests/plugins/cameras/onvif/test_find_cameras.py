"""`edge-server cameras find`: the probe, what answers, and what is printed."""

from __future__ import annotations

import importlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from edge_server.plugins.cameras.commands import find_onvif_cameras as command
from edge_server.plugins.cameras.onvif import discovery
from edge_server.plugins.cameras.onvif.discovery import FoundCamera, find_cameras, read_answer
from edge_server.plugins.cameras.source_and_sink_settings import read_entries

toml_of = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads
SCOPES = "onvif://www.onvif.org/name/Front%20door onvif://www.onvif.org/hardware/X1 http://other/x"


def test_a_camera_that_answers_the_probe_is_found(responder, match):
    responder.answer = lambda message_id: [
        b"garbage",
        match("urn:uuid:of-another-probe", "http://192.0.2.7/", ""),
        match(message_id, "http://192.0.2.20/onvif/device_service http://cam.local/", SCOPES),
        match(message_id, "http://192.0.2.99/", ""),
    ]
    (camera,) = find_cameras(0.3)
    assert camera.addresses == ("http://192.0.2.20/onvif/device_service", "http://cam.local/")
    assert camera.scopes == ("name/Front door", "hardware/X1")
    assert (camera.scope("name"), camera.scope("location")) == ("Front door", "")
    kinds = {re.search("<d:Types>(.*)</d:Types>", probe)[1] for probe in responder.probes}
    assert kinds == {"dn:NetworkVideoTransmitter", "tds:Device"}


def test_without_an_answer_none_is_found_and_the_probe_is_sent_twice(responder, monkeypatch, capsys):
    monkeypatch.setattr(discovery, "_REPEAT_S", 0.05)
    assert command.run(["find", "--seconds=0.2"]) == 1
    assert "no camera answered within 0.2 s" in capsys.readouterr().err
    assert len(responder.probes) >= 4


@pytest.mark.parametrize("data", [b"", b"\xff", b"<a/>", b"<!DOCTYPE a><a/>", b"<" * 60_000])
def test_a_datagram_that_is_no_answer_is_ignored(data):
    assert read_answer(data, "192.0.2.1", {"id"}) is None


def test_names_from_the_network_are_cut_and_have_no_control_characters(match):
    scopes = "\n onvif://www.onvif.org/name/%1b[2J%0aurl=x\n" + "onvif://www.onvif.org/x/" + "y" * 50_000
    camera = read_answer(match("id", "", scopes), "192.0.2.1", {"id"})
    assert camera.scopes[0] == "name/[2Jurl=x"
    assert sum(map(len, camera.scopes)) < 8192


def found(monkeypatch, *cameras: FoundCamera) -> None:
    monkeypatch.setattr(command, "find_cameras", lambda seconds: list(cameras))


def test_the_output_is_a_sources_file(make_camera, monkeypatch, capsys, tmp_path):
    camera = make_camera("me", "ge/he im")
    monkeypatch.setenv("EDGE_CAMERA_USER", "me")
    monkeypatch.setenv("EDGE_CAMERA_PASSWORD", "ge/he im")
    scopes = ("name/Front door", "hardware/X1")
    found(monkeypatch, *[FoundCamera("127.0.0.1", (camera.address,), scopes)] * 2)
    assert command.run(["find", "--model=yolo", "--write-password"]) == 0
    (tmp_path / "cameras.toml").write_text(text := capsys.readouterr().out)
    sources, _ = read_entries(str(tmp_path / "cameras.toml"))
    assert [(one.name, one.url, one.model) for one in sources.values()] == [
        (name, "rtsp://me:ge%2Fhe%20im@127.0.0.1:554/main?x=1&y=2", "yolo") for name in ("Front-door", "Front-door-2")
    ]
    assert "# Front door X1 at 127.0.0.1\n" in text
    assert '# url = "rtsp://me:ge%2Fhe%20im@127.0.0.1:554/sub?x=1&y=2"  # Sub, H264 640x360\n' in text


def test_the_password_is_asked_for_and_printed_only_if_that_is_wanted(make_camera, monkeypatch, capsys):
    camera = make_camera("me", "geheim")
    monkeypatch.delenv("EDGE_CAMERA_PASSWORD", raising=False)
    monkeypatch.setattr(command.getpass, "getpass", lambda prompt: "geheim" if prompt == "password of me: " else "")
    assert command.run(["find", "--user=me", f"--address={camera.address}"]) == 0
    output = capsys.readouterr()
    assert toml_of(output.out)["sources"][0]["url"] == "rtsp://me:PASSWORD@127.0.0.1:554/main?x=1&y=2"
    assert "geheim" not in output.out + output.err


def test_a_camera_that_wants_a_login_or_names_another_host_is_a_comment(make_camera, monkeypatch, capsys):
    camera = make_camera("me", "geheim")
    monkeypatch.delenv("EDGE_CAMERA_USER", raising=False)
    found(
        monkeypatch,
        FoundCamera("127.0.0.1", (camera.address,), ()),
        FoundCamera("192.0.2.7", (camera.address, "http://[/"), ("name/x",)),
    )
    assert command.run(["find"]) == 0
    text = capsys.readouterr().out
    assert toml_of(text) == {}
    assert "#   GetCapabilities: not authorized: give a user of the camera with --user\n" in text
    assert "#   no address is of the host that answered: ask it with --address\n" in text
    assert all(b"192.0.2.7" not in request for request in camera.requests)


@pytest.mark.parametrize("address", ["http://[/", "http://me:geheim@127.0.0.1/", "rtsp://127.0.0.1/", "x"])
def test_a_wrong_address_is_refused(address, capsys):
    with pytest.raises(SystemExit):
        command.run(["find", f"--address={address}"])
    assert "expected an address of http://, https://" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "61", "nan"])
def test_a_wrong_time_is_refused(seconds, capsys):
    with pytest.raises(SystemExit):
        command.run(["find", f"--seconds={seconds}"])
    assert "expected a number above 0, at most 60" in capsys.readouterr().err


@pytest.mark.full
def test_ipycam_is_found_and_gives_its_streams(monkeypatch, capsys, free_ports):
    folder = os.environ.get("EDGE_TEST_ONVIF_CAMERA", "")
    if not folder:
        pytest.skip("needs ipycam: tests/plugins/cameras/onvif/fetch_onvif_camera.sh")
    (port,) = free_ports(1)
    monkeypatch.setattr(discovery, "PORT", port)
    # The address that other machines see, as a camera names it.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((discovery.GROUP, port))
        host = probe.getsockname()[0]
    program = str(Path(__file__).with_name("ipycam_camera.py"))
    monkeypatch.setenv("EDGE_CAMERA_PASSWORD", "geheim")
    with subprocess.Popen(
        [sys.executable, program, folder, host, str(port)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "listening\n"
            assert command.run(["find", "--user=me", "--seconds=1"]) == 0
        finally:
            process.kill()
    (source,) = toml_of(capsys.readouterr().out)["sources"]
    assert source == {"name": "Front", "url": f"rtsp://me:PASSWORD@{host}:8554/video_main", "model": "MODEL"}
