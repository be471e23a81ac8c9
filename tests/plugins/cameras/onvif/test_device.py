"""Requests to an ONVIF camera: its streams, the login by a digest, and cameras that answer what they should not."""

from __future__ import annotations

from datetime import timedelta

import pytest

from edge_server.plugins.cameras.onvif import device
from edge_server.plugins.cameras.onvif.device import CameraError, CameraProfile, NotAuthorized, OnvifCamera
from edge_server.plugins.cameras.onvif.soap import HostileXml, Login, parse_xml

STREAMS = [
    CameraProfile("Main", "rtsp://127.0.0.1:554/main?x=1&y=2", "H264", 1920, 1080),
    CameraProfile("Sub", "rtsp://127.0.0.1:554/sub?x=1&y=2", "H264", 640, 360),
]


@pytest.mark.parametrize("ahead_h", [0, 5, -30])
def test_the_login_is_a_digest_with_the_time_of_the_cameras_clock(make_camera, ahead_h):
    camera = make_camera("me", "gehe<im&ß", timedelta(hours=ahead_h))
    assert OnvifCamera(camera.address, Login("me", "gehe<im&ß")).streams() == STREAMS
    assert b"gehe" not in b"".join(camera.requests)
    for login in (None, Login("me", "falsch"), Login("you", "gehe<im&ß")):
        with pytest.raises(NotAuthorized, match="GetCapabilities: not authorized"):
            OnvifCamera(camera.address, login).streams()


def test_an_open_camera_needs_no_login(make_camera):
    assert OnvifCamera(make_camera().address, None).streams() == STREAMS


def test_the_scheme_of_a_stream_is_in_small_letters_as_sources_have_it(make_camera, envelope):
    camera = make_camera()
    camera.answers["GetStreamUri"] = (200, envelope("<tt:Uri>RTSP://127.0.0.1/Main</tt:Uri>"))
    assert [stream.url for stream in OnvifCamera(camera.address, None).streams()] == ["rtsp://127.0.0.1/Main"] * 2


def test_a_camera_without_a_clock_is_asked_with_the_time_of_this_machine(make_camera, envelope):
    camera = make_camera("me", "geheim")
    for answer in (
        (400, envelope("<s:Fault><s:Code><s:Value>ter:NotAuthorized</s:Value></s:Code></s:Fault>")),
        (200, envelope("")),
        (200, envelope("<tt:UTCDateTime><tt:Date><tt:Year>99</tt:Year></tt:Date></tt:UTCDateTime>")),
    ):
        camera.answers["GetSystemDateAndTime"] = answer
        assert OnvifCamera(camera.address, Login("me", "geheim")).streams() == STREAMS


def test_streams_and_services_on_other_hosts_are_not_used(make_camera, envelope):
    camera = make_camera()
    for url in (
        "rtsp://192.0.2.7/x", "rtsp://me:x@127.0.0.1/x", "http://127.0.0.1/", "rtsp://127.0.0.1:0/", "rtsp://[/",
        "rtsp://127.0.0.1/\"", "rtsp://127.0.0.1/a b", "",
    ):  # fmt: skip
        camera.answers["GetStreamUri"] = (200, envelope(f"<tt:Uri>{url}</tt:Uri>"))
        assert OnvifCamera(camera.address, None).streams() == []
    camera.answers["GetCapabilities"] = (200, envelope(camera.GetCapabilities("", "http://192.0.2.7/media")))
    with pytest.raises(CameraError, match=r"gives an address of another host: 'http://192\.0\.2\.7/media'"):
        OnvifCamera(camera.address, None).streams()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"", "GetProfiles: the XML is malformed"),
        (200, b"<a/>", "GetProfiles: expected a SOAP envelope"),
        (200, b"\xff\xfe<\x00", "GetProfiles: expected XML in UTF-8"),
        (200, b"<!DOCTYPE x [<!ENTITY a 'aaaa'>]><x>&a;</x>", "document type is not read"),
        (200, b"x" * (device.MAX_RESPONSE_BYTES + 1), "expected at most 1048576 bytes, given more"),
        (500, b"oops", "the camera answers with the status 500"),
        (302, b"", "the camera answers with the status 302"),
        (401, b"", "GetProfiles: not authorized"),
    ],
)
def test_an_answer_that_is_none_is_reported(make_camera, status, body, message):
    camera = make_camera()
    camera.answers["GetProfiles"] = (status, body)
    with pytest.raises(CameraError, match=message):
        OnvifCamera(camera.address, None).streams()


def test_the_reason_of_a_fault_is_shown_without_control_characters_and_cut(make_camera, envelope):
    camera = make_camera()
    text = "no\x85\u202e" + "x" * 2000
    camera.answers["GetProfiles"] = (500, envelope(f"<s:Fault><s:Reason><s:Text>{text}</s:Text></s:Reason></s:Fault>"))
    with pytest.raises(CameraError) as caught:
        OnvifCamera(camera.address, None).streams()
    assert str(caught.value) == "GetProfiles: no " + "x" * 508


def test_of_many_profiles_a_bounded_number_is_asked(make_camera, envelope):
    camera = make_camera()
    profiles = '<trt:Profiles token="sub"/>' * 5000
    camera.answers["GetProfiles"] = (200, envelope(profiles))
    assert len(OnvifCamera(camera.address, None).streams()) == device.MAX_PROFILES


def test_a_camera_that_sends_its_answer_drop_by_drop_is_given_up(make_camera, monkeypatch):
    monkeypatch.setattr(device, "TIMEOUT_S", 0.1)
    camera = make_camera()
    camera.pause_s = 0.05
    with pytest.raises(CameraError, match=r"GetSystemDateAndTime: no answer within 0\.1 s"):
        OnvifCamera(camera.address, None).streams()


def test_deep_xml_is_read_or_refused(envelope):
    assert parse_xml(b"<a>" * 100_000 + b"</a>" * 100_000) is not None
    with pytest.raises(HostileXml):
        parse_xml('<?xml version="1.0" encoding="utf-16"?><!DOCTYPE x>'.encode("utf-16"))
    with pytest.raises(HostileXml, match="document type"):
        parse_xml(b'<?xml version="1.0" encoding="utf-7"?>\n<!DOCTYPE x SYSTEM "file:///etc/passwd"><x/>')


def test_a_wrong_address_and_nobody_there_are_reported():
    with pytest.raises(CameraError, match="expected an address of http://, https://, given 'ftp://h'"):
        OnvifCamera("ftp://h", None)
    with pytest.raises(CameraError, match="GetSystemDateAndTime: Connection refused"):
        OnvifCamera("http://127.0.0.1:1/", None).streams()
