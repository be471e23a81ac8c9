"""Log formats and log settings."""

import json
import logging
import os
import re
import sys
import threading

import pytest

from edge_server.config import ConfigError, LogConfig
from edge_server.errors import ErrorCode, InvalidRequest, Refusal, Unsupported
from edge_server.telemetry.log import LogSettings, setup_logging


@pytest.fixture(autouse=True)
def _root_logger_restored():
    names = (None, "edge_server")
    levels = [logging.getLogger(name).level for name in names]
    yield
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if handler.get_name() == "edge_server"]:
        root.removeHandler(handler)
        handler.close()
    for name, level in zip(names, levels, strict=True):
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def stderr(capsys):
    """What was written to standard error since it was asked last."""
    return lambda: capsys.readouterr().err


log = logging.getLogger("edge_server.plugins.cameras.sources.rtsp")
library = logging.getLogger("some_library")

LINES = {
    "default": r'W\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ cameras sources\] "a \\"b\\""',
    "ISO8601": r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ W \d+ cameras sources\] "a \\"b\\""',
    "text": r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING edge_server\.plugins\.cameras\.sources\.rtsp: a "b"',
}


@pytest.mark.parametrize("form", LINES)
def test_a_record_is_one_line_in_its_format(stderr, form):
    setup_logging(LogConfig(format=form))
    log.warning('a "%s"', "b")
    assert re.fullmatch(LINES[form] + r"\n", stderr())


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("edge_server.service", "service"),
        ("edge_server.plugins.python_models.backend", "python models"),
        ("edge_server", "edge_server"),
        ("some_library", "some_library"),
    ],
)
def test_a_line_names_the_part_of_the_server_in_words(stderr, name, part):
    setup_logging(LogConfig(format="default"))
    logging.getLogger(name).warning("a")
    assert f' {part}] "a"' in stderr()


def test_json_lines_are_objects_with_the_traceback_inside(stderr):
    setup_logging(LogConfig(format="json"))
    try:
        raise ValueError("why\nnot")
    except ValueError:
        log.exception("failed")
    (line,) = stderr().splitlines()
    fields = json.loads(line)
    assert (fields["level"], fields["logger"], fields["message"]) == ("ERROR", log.name, "failed")
    assert "ValueError: why\nnot" in fields["exception"]


@pytest.mark.parametrize("form", LINES)
def test_a_traceback_follows_its_record_line_by_line(stderr, form):
    setup_logging(LogConfig(format=form))
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    first, *traceback = stderr().splitlines()
    assert "failed" in first
    assert traceback[0] == "  | Traceback (most recent call last):"
    assert traceback[-1] == "  | ValueError: why"


def test_a_traceback_has_a_limited_number_of_lines(stderr):
    setup_logging(LogConfig())
    try:
        raise ValueError("x\n" * 10_000)
    except ValueError:
        log.exception("failed")
    lines = stderr().splitlines()
    assert len(lines) == 401
    assert lines[-1].startswith("  | x\\nx\\n")


@pytest.mark.parametrize("form", ["default", "ISO8601", "text", "json"])
def test_no_message_can_break_its_line_or_steer_a_terminal(stderr, form):
    setup_logging(LogConfig(format=form))
    hostile = "x\r\nI0101 forged\x1b[31m\x00\x7f\x85\x9b\u2028\u202e\t"
    log.info("%s", hostile)
    try:
        raise RuntimeError(hostile)
    except RuntimeError:
        log.info("and", exc_info=True)
    text = stderr()
    lines = text.splitlines()
    assert text.count("\n") == len(lines)
    records = [line for line in lines if not line.startswith("  | ")]
    assert len(records) == 2
    # Each line of the hostile text is a marked line of the traceback, which "json" has inside the record.
    assert [line for line in lines if "I0101 forged" in line and line not in records] == (
        [] if form == "json" else ["  | I0101 forged\\x1b[31m\\x00\\x7f\\x85\\x9b\\u2028\\u202e\\t"]
    )
    assert not set(text) & set("\r\x1b\x00\x7f\x85\x9b\u2028\u202e\t")


def test_messages_that_are_no_unicode_are_written_to_a_file(tmp_path, monkeypatch):
    path = tmp_path / "log"
    root = logging.getLogger()
    setup_logging(LogConfig(file=str(path), format="text"))
    # pytest's own capture could not hand this text from a worker to the main process.
    (ours,) = [handler for handler in root.handlers if handler.get_name() == "edge_server"]
    with monkeypatch.context() as only_ours:
        only_ours.setattr(root, "handlers", [ours])
        log.info("model \udcff and ü")
    assert "model \\udcff and ü" in path.read_text("utf-8")


def test_the_file_is_opened_anew_after_a_rotation(tmp_path):
    path = tmp_path / "log"
    setup_logging(LogConfig(file=str(path), format="text"))
    log.info("first")
    path.rename(tmp_path / "log.1")
    log.info("second")
    assert "second" in path.read_text()
    assert "second" not in (tmp_path / "log.1").read_text()


def test_a_full_disk_costs_records_and_one_line_and_is_a_problem_until_there_is_room(tmp_path, capfd):
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    settings = setup_logging(LogConfig(file=str(path), format="text"))
    for number in range(100):
        log.info("record %d", number)
    text = capfd.readouterr().err
    assert text == (f"edge-server: records are lost until --log-file={path} can be written: No space left on device\n")
    assert settings.problem() == f"'{path}' cannot be written: No space left on device; up to 100 record(s) were lost"
    # As after a rotation whose folder is gone: opening fails then.
    path.unlink()
    path.symlink_to(tmp_path / "no" / "folder")
    log.info("nobody fails who logs")
    log.info("nor does it later")
    assert settings.problem() == (
        f"'{path}' cannot be written: No such file or directory; up to 102 record(s) were lost"
    )
    path.unlink()
    log.info("there is room")
    lines = path.read_text().splitlines()
    assert [line.partition(": ")[2] for line in lines] == [
        "there is room", f"up to 102 record(s) were lost while '{path}' could not be written",
    ]  # fmt: skip
    assert settings.problem() == capfd.readouterr().err == ""


def test_a_mistake_in_a_record_is_still_shown(tmp_path, capfd, monkeypatch):
    settings = setup_logging(LogConfig(file=str(tmp_path / "log")))
    root = logging.getLogger()
    # pytest's own handlers raise it.
    with monkeypatch.context() as only_ours:
        only_ours.setattr(root, "handlers", [item for item in root.handlers if item.get_name() == "edge_server"])
        log.info("%d", "x")
    assert "TypeError" in capfd.readouterr().err
    assert settings.problem() == ""


def test_a_file_that_cannot_be_written_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="--log-file"):
        setup_logging(LogConfig(file=str(tmp_path / "no" / "log")))


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        (LogConfig(), "IWE"),
        (LogConfig(shows_info=False), "WE"),
        (LogConfig(shows_warning=False), "IE"),
        (LogConfig(shows_error=False), "IW"),
        (LogConfig(verbose_level=1), "DIWE"),
        (LogConfig(verbose_level=1, shows_info=False, shows_warning=False, shows_error=False), "D"),
    ],
)
def test_each_level_has_its_own_switch(stderr, config, shown):
    setup_logging(config)
    log.debug("d")
    log.info("i")
    log.warning("w")
    log.error("e")
    assert "".join(line[0] for line in stderr().splitlines()) == shown


def test_libraries_are_heard_from_warnings_on_and_in_full_at_level_two(stderr):
    settings = setup_logging(LogConfig(format="text"))
    library.info("chatter")
    library.warning("trouble")
    settings.update({"log_verbose_level": 2})
    library.debug("detail")
    text = stderr()
    assert "chatter" not in text
    assert "trouble" in text
    assert "detail" in text


def test_a_second_setup_replaces_the_first(stderr):
    setup_logging(LogConfig())
    setup_logging(LogConfig())
    log.info("once")
    assert stderr().count("once") == 1


def test_get_answers_with_tritons_six_keys():
    assert LogSettings(LogConfig()).get() == {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }


def test_an_update_takes_effect_at_once_and_answers_with_all_settings(stderr):
    settings = setup_logging(LogConfig())
    answer = settings.update({"log_info": False, "log_verbose_level": 1, "log_format": "ISO8601"})
    assert answer == settings.get()
    assert (answer["log_info"], answer["log_verbose_level"], answer["log_format"]) == (False, 1, "ISO8601")
    log.info("hidden")
    log.debug("shown")
    assert re.fullmatch(r"\d{4}-.*Z D .*shown.*\n", stderr())


def test_unknown_keys_and_nulls_are_passed_over():
    settings = LogSettings(LogConfig(file="f"))
    before = settings.get()
    assert settings.update({"log_colour": 1, "log_info": None, "log_file": None}) == before


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "bad",
    [
        {"log_info": 1},
        {"log_warning": "true"},
        {"log_error": []},
        {"log_verbose_level": True},
        {"log_verbose_level": -1},
        {"log_verbose_level": 1.5},
        {"log_verbose_level": 2**40},
        {"log_format": 3},
    ],
)
def test_a_value_of_the_wrong_type_is_the_clients_mistake_and_changes_nothing(bad):
    settings = LogSettings(LogConfig())
    before = settings.get()
    with pytest.raises(InvalidRequest) as caught:
        settings.update({"log_info": False, "log_warning": False, **bad})
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert settings.get() == before


def test_an_unknown_format_is_unavailable_and_changes_nothing():
    settings = LogSettings(LogConfig())
    before = settings.get()
    with pytest.raises(Refusal) as caught:
        settings.update({"log_info": False, "log_format": "xml"})
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert caught.value.retry_after_s is None
    assert settings.get() == before


def test_the_log_file_cannot_be_moved_over_the_network():
    with pytest.raises(Unsupported, match="log file location can not be updated through network protocol"):
        LogSettings(LogConfig()).update({"log_file": ""})


def test_concurrent_updates_are_seen_whole():
    settings = LogSettings(LogConfig())
    stop = threading.Event()

    def flip(value):
        while not stop.is_set():
            settings.update({"log_info": value, "log_warning": value, "log_error": value})

    threads = [threading.Thread(target=flip, args=(value,)) for value in (True, False)]
    for thread in threads:
        thread.start()
    seen = [settings.get() for _ in range(2000)]
    stop.set()
    for thread in threads:
        thread.join()
    assert all(len({now["log_info"], now["log_warning"], now["log_error"]}) == 1 for now in seen)


def test_lines_for_the_journal_start_with_their_priority(tmp_path, monkeypatch):
    with open(tmp_path / "journal", "w+") as stream:
        status = os.fstat(stream.fileno())
        monkeypatch.setattr(sys, "stderr", stream)
        setup_logging(LogConfig(journal_stream=f"{status.st_dev}:{status.st_ino}"))
        log.error("e")
        log.info("i")
        log.error("with a stack", stack_info=True)
        setup_logging(LogConfig(journal_stream="1:1"))
        log.info("elsewhere")
        stream.seek(0)
        *lines, last = stream.readlines()
        assert [line[:4] for line in lines[:3]] == ["<3>E", "<6>I", "<3>E"]
        assert {line[:7] for line in lines[3:]} == {"<3>  | "}
        assert last.startswith("I")
