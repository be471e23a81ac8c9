"""Addresses of remote repositories, and the files of a listing that are copied."""

from __future__ import annotations

from typing import Any

import pytest

from edge_server.config import parse_serve
from edge_server.errors import InvalidRequest, ServingFault
from edge_server.plugins.remote.address import SCHEMES, is_remote, parse_address
from edge_server.plugins.remote.grouped_listing import UnitKey, plan
from edge_server.plugins.remote.object_store import ObjectListing, ObjectStore, RemoteFile
from edge_server.plugins.remote.plugin import PLUGIN


@pytest.mark.parametrize(
    ("url", "protocol", "path", "options"),
    [
        ("s3://bucket/a/b/", "s3", "bucket/a/b", {}),
        ("s3://bucket", "s3", "bucket", {}),
        ("s3://host:9000/bucket/a", "s3", "bucket/a", {"endpoint_url": "http://host:9000"}),
        ("s3://https://host:9000/bucket", "s3", "bucket", {"endpoint_url": "https://host:9000"}),
        ("gs://bucket/a", "gs", "bucket/a", {}),
        ("as://account/container/a", "abfs", "container/a", {"account_name": "account"}),
        ("file:///models", "file", "/models", {}),
    ],
)
def test_addresses_are_parsed_as_by_triton(url: str, protocol: str, path: str, options: Any) -> None:
    found = parse_address(url)
    assert (found.protocol, found.path, found.options) == (protocol, path, options)
    assert is_remote(url)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "url",
    ["http://host/models", "s3://", "s3://host:9000/", "s3://host:9000", "s3://key:secret@host/b", "as://account",
     "as://account/", "file://models", "gs://", "S3://bucket", "s3://ftp://host:1/b"],
)  # fmt: skip
def test_other_addresses_are_refused_without_showing_secrets(url: str) -> None:
    with pytest.raises(InvalidRequest, match="model repository") as caught:
        parse_address(url)
    assert "secret" not in caught.value.message


def test_the_schemes_are_declared() -> None:
    assert PLUGIN.address_schemes == SCHEMES


def test_paths_are_no_addresses() -> None:
    assert not any(map(is_remote, ["/models", "models", "a:b", "./s3:/x"]))


def test_every_address_has_its_own_copy() -> None:
    urls = ["s3://a/b", "s3://a-b", "s3://a/b/c", "gs://a/b"]
    assert len({parse_address(url).folder_name for url in urls}) == len(urls)


def test_a_store_without_its_library_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ServingFault, match="pip install gcsfs"):
        ObjectStore(parse_address("gs://bucket/a"))
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ServingFault, match=r"pip install '\.\[remote\]'"):
        ObjectStore(parse_address("s3://bucket/a"))


def test_the_repository_variable_may_contain_addresses() -> None:
    table = [
        ("/a:/b", ("/a", "/b")),
        ("s3://bucket/a:/b", ("s3://bucket/a", "/b")),
        ("/a:s3://host:9000/bucket:gs://b", ("/a", "s3://host:9000/bucket", "gs://b")),
        ("s3://https://host:9000/bucket:file:///m", ("s3://https://host:9000/bucket", "file:///m")),
        ("s3://bucket:/b", ("s3://bucket", "/b")),
        ("/a:oci://host:5000/team/m:v1:/b", ("/a", "oci://host:5000/team/m:v1", "/b")),
        ("oci://host/m:/b", ("oci://host/m", "/b")),
        ("oci://http://host:1/m:v1@sha256:12:file:///m", ("oci://http://host:1/m:v1@sha256:12", "file:///m")),
        ("oci://host/m:s3://bucket/a", ("oci://host/m", "s3://bucket/a")),
    ]
    assert [
        (text, parse_serve([], {"EDGE_SERVER_MODEL_REPOSITORY": text}).config.repository.paths) for text, _ in table
    ] == table


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"CACHE_DIRECTORY": "/var/cache/unit:/other"}, "/var/cache/unit"),
        ({"EDGE_SERVER_REPOSITORY_CACHE_DIR": "/given", "CACHE_DIRECTORY": "/unit"}, "/given"),
    ],
)
def test_copies_are_stored_where_the_operator_or_systemd_configures(environ: dict[str, str], expected: str) -> None:
    assert parse_serve(["--model-repository=s3://b/a"], environ).config.repository.cache_dir == expected


def test_without_a_remote_repository_there_is_no_cache() -> None:
    assert parse_serve(["--model-repository=/m"], {"CACHE_DIRECTORY": "/c"}).config.repository.cache_dir == ""


def test_a_listing_is_sorted_into_versions_and_models_own_files() -> None:
    names = [
        "m/1/a",
        "m/1/sub/b",
        "m/config.pbtxt",
        "m/configs/x.pbtxt",
        "m/01/odd",
        "README",
        ".git/1/x",
        "n/2/y.part",
    ]
    found = plan(
        ObjectListing(tuple(RemoteFile(name, 1, "s") for name in names), frozenset({"e/1", "e", "e/x", "z/1/deep"}))
    )
    assert {key: sorted(files) for key, files in found.units.items()} == {
        UnitKey("m", 1): ["a", "sub/b"],
        UnitKey("m", None): ["01/odd", "config.pbtxt", "configs/x.pbtxt"],
        UnitKey("e", 1): [],
    }
    assert found.warnings == ()


def test_a_file_that_is_also_a_folder_is_skipped() -> None:
    found = plan(ObjectListing((RemoteFile("m/1/a", 1, ""), RemoteFile("m/1/a/b", 1, ""))))
    assert list(found.units[UnitKey("m", 1)]) == ["a/b"]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "name",
    ["../escaped", "m/../../escaped", "m/1/../../../escaped", "/etc/passwd", "m//x", "m/./x", "m/1/a\\b", "m/1/a\nb",
     "m/1/\x00", "m/3", "m /1/x", "m/1/" + "x" * 300, "m/1/" + "d/" * 600 + "x"],
)  # fmt: skip
def test_a_name_outside_the_copy_is_skipped_with_a_warning(name: str) -> None:
    found = plan(ObjectListing((RemoteFile(name, 1, ""), RemoteFile("m/1/good", 1, ""))))
    assert found.units == {UnitKey("m", 1): {"good": RemoteFile("m/1/good", 1, "")}}
    assert len(found.warnings) == 1
