"""Detection of files open for writing from inotify's events, as copying programs cause them."""

from __future__ import annotations

import pytest

from edge_server.repository.disk.files_being_written import EVENT_TIMEOUT_S, OpenWriters


@pytest.fixture(params=[True, False], ids=["attributes told apart", "attributes look like changes"])
def writers(request: pytest.FixtureRequest) -> OpenWriters:
    return OpenWriters(reports_attributes=request.param)


def test_a_copy_is_being_written_from_its_making_until_it_is_closed(writers: OpenWriters) -> None:
    writers.on_created("/m/1/a", 0)
    assert writers.written_files(0) == set()
    writers.on_opened("/m/1/a", 0)
    assert writers.written_files(0) == {"/m/1/a"}
    writers.on_modified("/m/1/a", 1)
    assert writers.written_files(50) == {"/m/1/a"}
    writers.on_closed("/m/1/a")
    assert writers.written_files(50) == set()


def test_reading_is_not_writing(writers: OpenWriters) -> None:
    writers.on_opened("/m/1/a", 0)
    assert writers.written_files(0) == set()
    writers.on_closed_by_reader("/m/1/a")
    assert writers.written_files(0) == set()


def test_a_reader_that_comes_and_goes_does_not_hide_a_writer(writers: OpenWriters) -> None:
    for path in ("/m/1/a",):
        writers.on_created(path, 0)
        writers.on_opened(path, 0)
        writers.on_modified(path, 0)
        writers.on_opened(path, 1)
        writers.on_closed_by_reader(path)
    assert writers.written_files(1) == {"/m/1/a"}


def test_a_hard_link_that_is_read_is_not_being_written(writers: OpenWriters) -> None:
    writers.on_created("/m/1/a", 0)
    writers.on_opened("/m/1/a", 0)
    writers.on_closed_by_reader("/m/1/a")
    assert writers.written_files(0) == set()


def test_a_change_without_an_opening_is_a_writer_that_was_there_before_the_watch(writers: OpenWriters) -> None:
    writers.on_modified("/m/1/a", 0)
    assert writers.written_files(0) == {"/m/1/a"}
    writers.on_closed("/m/1/a")
    assert writers.written_files(0) == set()


def test_setting_the_times_of_a_closed_file_holds_nothing_back_for_long() -> None:
    writers = OpenWriters(reports_attributes=False)
    writers.on_modified("/m/1/a", 0)
    assert writers.written_files(4) == set()


def test_a_writer_of_whom_nothing_is_heard_is_forgotten(writers: OpenWriters) -> None:
    writers.on_opened("/m/1/a", 0)
    writers.on_modified("/m/1/a", 0)
    assert writers.written_files(EVENT_TIMEOUT_S - 1) == {"/m/1/a"}
    assert writers.written_files(EVENT_TIMEOUT_S) == set()


def test_files_keep_their_writers_when_they_are_moved_and_lose_them_when_they_go(writers: OpenWriters) -> None:
    for name in ("a", "b"):
        writers.on_opened(f"/m/1/{name}", 0)
        writers.on_modified(f"/m/1/{name}", 0)
    writers.on_moved("/m/1", "/m/2")
    assert writers.written_files(0) == {"/m/2/a", "/m/2/b"}
    writers.on_moved("/m/2/a", "/m/2/b")
    assert writers.written_files(0) == {"/m/2/b"}
    writers.on_removed("/m/2")
    assert writers.written_files(0) == set()


def test_a_file_that_was_only_made_is_unsure_until_more_is_heard_of_it_or_a_while_has_passed(
    writers: OpenWriters,
) -> None:
    for path in ("/m/1/a", "/m/1/opened", "/m/1/changed", "/m/1/closed"):
        writers.on_created(path, 0)
    writers.on_opened("/m/1/opened", 0)
    writers.on_modified("/m/1/changed", 0)
    writers.on_closed("/m/1/closed")
    assert writers.uncertain_files(0) == {"/m/1/a"}
    assert writers.uncertain_files(2.9) == {"/m/1/a"}
    assert writers.uncertain_files(3) == set()
