"""Detection of files open for writing from inotify's events, as copying programs cause them."""

from __future__ import annotations

import pytest

from edge_server.repository.open_files import PATIENCE_S, OpenWriters


@pytest.fixture(params=[True, False], ids=["attributes told apart", "attributes look like changes"])
def writers(request: pytest.FixtureRequest) -> OpenWriters:
    return OpenWriters(reports_attributes=request.param)


def test_a_copy_is_being_written_from_its_making_until_it_is_closed(writers: OpenWriters) -> None:
    writers.made("/m/1/a", 0)
    assert writers.writing(0) == set()
    writers.opened("/m/1/a", 0)
    assert writers.writing(0) == {"/m/1/a"}
    writers.changed("/m/1/a", 1)
    assert writers.writing(50) == {"/m/1/a"}
    writers.closed("/m/1/a")
    assert writers.writing(50) == set()


def test_reading_is_not_writing(writers: OpenWriters) -> None:
    writers.opened("/m/1/a", 0)
    assert writers.writing(0) == set()
    writers.closed_by_reader("/m/1/a")
    assert writers.writing(0) == set()


def test_a_reader_that_comes_and_goes_does_not_hide_a_writer(writers: OpenWriters) -> None:
    for path in ("/m/1/a",):
        writers.made(path, 0)
        writers.opened(path, 0)
        writers.changed(path, 0)
        writers.opened(path, 1)
        writers.closed_by_reader(path)
    assert writers.writing(1) == {"/m/1/a"}


def test_a_hard_link_that_is_read_is_not_being_written(writers: OpenWriters) -> None:
    writers.made("/m/1/a", 0)
    writers.opened("/m/1/a", 0)
    writers.closed_by_reader("/m/1/a")
    assert writers.writing(0) == set()


def test_a_change_without_an_opening_is_a_writer_that_was_there_before_the_watch(writers: OpenWriters) -> None:
    writers.changed("/m/1/a", 0)
    assert writers.writing(0) == {"/m/1/a"}
    writers.closed("/m/1/a")
    assert writers.writing(0) == set()


def test_setting_the_times_of_a_closed_file_holds_nothing_back_for_long() -> None:
    writers = OpenWriters(reports_attributes=False)
    writers.changed("/m/1/a", 0)
    assert writers.writing(4) == set()


def test_a_writer_of_whom_nothing_is_heard_is_forgotten(writers: OpenWriters) -> None:
    writers.opened("/m/1/a", 0)
    writers.changed("/m/1/a", 0)
    assert writers.writing(PATIENCE_S - 1) == {"/m/1/a"}
    assert writers.writing(PATIENCE_S) == set()


def test_files_keep_their_writers_when_they_are_moved_and_lose_them_when_they_go(writers: OpenWriters) -> None:
    for name in ("a", "b"):
        writers.opened(f"/m/1/{name}", 0)
        writers.changed(f"/m/1/{name}", 0)
    writers.moved("/m/1", "/m/2")
    assert writers.writing(0) == {"/m/2/a", "/m/2/b"}
    writers.moved("/m/2/a", "/m/2/b")
    assert writers.writing(0) == {"/m/2/b"}
    writers.removed("/m/2")
    assert writers.writing(0) == set()


def test_a_file_that_was_only_made_is_unsure_until_more_is_heard_of_it_or_a_while_has_passed(
    writers: OpenWriters,
) -> None:
    for path in ("/m/1/a", "/m/1/opened", "/m/1/changed", "/m/1/closed"):
        writers.made(path, 0)
    writers.opened("/m/1/opened", 0)
    writers.changed("/m/1/changed", 0)
    writers.closed("/m/1/closed")
    assert writers.unsure(0) == {"/m/1/a"}
    assert writers.unsure(2.9) == {"/m/1/a"}
    assert writers.unsure(3) == set()
