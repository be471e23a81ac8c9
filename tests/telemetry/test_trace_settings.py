"""Trace settings, and the choice of the requests to trace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edge_server.config import ConfigError, TraceConfig, parse_serve
from edge_server.core.trace_settings import ServerTraceSettings, TraceChange, TraceSettings, parse_trace_change
from edge_server.errors import InvalidRequest, Unsupported
from edge_server.telemetry.trace_sampling import TraceSampler, remote_parent
from edge_server.telemetry.tracing import Traces, start_settings

START = TraceSettings(("TIMESTAMPS",), rate=6, file="t.json")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def changed(book: ServerTraceSettings, model: str = "", **raw: object) -> ServerTraceSettings:
    return book.with_change(model, parse_trace_change(raw))


def test_a_model_follows_the_settings_of_all_but_for_its_own() -> None:
    book = changed(ServerTraceSettings(START), "m", log_frequency="2")
    book = changed(book, trace_rate="9", trace_level=["TENSORS", "TIMESTAMPS"])
    assert book.of("m") == TraceSettings(("TIMESTAMPS", "TENSORS"), 9, -1, 2, "t.json")
    assert book.of("other") == TraceSettings(("TIMESTAMPS", "TENSORS"), 9, -1, 0, "t.json")


def test_null_lets_a_model_follow_all_again_and_all_follow_the_start() -> None:
    book = changed(changed(ServerTraceSettings(START), trace_rate="9"), "m", trace_rate="3", trace_count="5")
    book = changed(book, "m", trace_rate=None, trace_count=[])
    assert book.of("m").rate == 9
    assert book.models == {}
    assert changed(book, trace_rate=None).whole == START


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"trace_level": ["OFF", "TENSORS"]}, "Expect only one trace level 'OFF' is specified"),
        ({"trace_level": "TENSORS"}, "Unable to parse 'trace_level': expected an array of strings"),
        ({"trace_level": [1]}, "Unable to parse 'trace_level': expected an array of strings"),
        ({"trace_level": ["TENSOR"]}, "unknown trace level 'TENSOR'"),
        ({"trace_rate": "often"}, "Unable to parse 'trace_rate', got: often"),
        ({"trace_rate": "-1"}, r"Unable to parse 'trace_rate', value is out of range \[ 0, 4294967295 \], got: -1"),
        ({"trace_rate": 5}, "Unable to parse 'trace_rate': expected a string"),
        ({"trace_rate": ["1", "2"]}, "expect only 1 value for 'trace_rate'"),
        ({"trace_rate": "0"}, "Attempting to set invalid trace setting :sample rate must be non-zero"),
        ({"trace_count": "-2"}, "Unable to parse 'trace_count'. Expecting value >= -1, got: -2"),
        ({"trace_count": "2147483648"}, r"value is out of range \[ -1, 2147483647 \]"),
        ({"log_frequency": "9" * 400}, "Unable to parse 'log_frequency', got: 9{80}$"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_in_tritons_words(raw: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        changed(ServerTraceSettings(START), **raw)


def test_the_file_is_the_operators_choice() -> None:
    with pytest.raises(Unsupported, match="trace file location can not be updated through network protocol"):
        parse_trace_change({"trace_file": "/etc/passwd"})


def test_without_a_file_tracing_cannot_be_turned_on_but_settings_can_be_made() -> None:
    book = changed(ServerTraceSettings(TraceSettings()), trace_rate="5")
    with pytest.raises(InvalidRequest, match="trace file name is not given"):
        changed(book, "m", trace_level=["TIMESTAMPS"])
    assert changed(book, trace_level=["OFF"]).whole.rate == 5


def test_a_change_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    traces = Traces(TraceConfig((f"triton,file={tmp_path}/t",)))
    with pytest.raises(InvalidRequest):
        traces.update("", TraceChange({"level": ("TIMESTAMPS",), "rate": 0}))
    assert traces.get()["trace_level"] == ["OFF"]
    assert not traces.is_on


@pytest.mark.parametrize(("rate", "expected"), [(1, [0, 1, 2, 3, 4]), (2, [1, 3]), (3, [2]), (9, [])])
def test_every_rateth_request_is_traced(rate: int, expected: list[int]) -> None:
    sampler = TraceSampler(TraceSettings(("TIMESTAMPS",), rate=rate, file="t"))
    assert [index for index in range(5) if sampler.sample()] == expected


def test_the_count_is_reported_as_the_rest_and_starts_anew_when_it_is_set(tmp_path: Path) -> None:
    traces = Traces(TraceConfig(("level=TIMESTAMPS", "rate=1", "count=2", f"triton,file={tmp_path}/t")))
    kept = [traces.sample("m", ()) for _ in range(3)]
    assert [trace is not None for trace in kept] == [True, True, False]
    assert traces.get()["trace_count"] == "0"
    assert traces.update("", parse_trace_change({"trace_count": "1"}))["trace_count"] == "1"
    assert traces.sample("m", ()) is not None
    traces.close(10)


def test_a_change_of_one_model_does_not_disturb_the_count_of_others(tmp_path: Path) -> None:
    traces = Traces(TraceConfig(("level=TIMESTAMPS", "rate=2", f"triton,file={tmp_path}/t")))
    assert traces.sample("a", ()) is None
    traces.update("b", parse_trace_change({"trace_rate": "1"}))
    assert traces.sample("b", ()) is not None
    assert traces.sample("a", ()) is not None
    traces.close(10)
    assert traces.sample("b", ()) is None


def test_a_change_that_meets_the_end_of_the_server_is_made(tmp_path: Path) -> None:
    class Ending(Traces):
        """Closes itself at the first read of the collector outside the lock."""

        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if name == "_collector" and self.is_ending and not self._lock.locked():
                self.is_ending = False
                self.close(30)
            return found

        is_ending = False

    traces = Ending(TraceConfig(("level=TIMESTAMPS", f"triton,file={tmp_path / 't.json'}")))
    traces.is_ending = True
    assert traces.update("", parse_trace_change({"trace_rate": "5"}))["trace_rate"] == "5"
    traces.is_ending = False
    traces.close(30)


def test_nothing_that_records_traces_is_imported_before_tracing_is_on() -> None:
    code = (
        "import sys; from edge_server.telemetry.tracing import Traces; Traces();"
        "import edge_server.process.server;"
        "late = ('trace_record', 'trace_collector', 'opentelemetry_export');"
        "print([name for name in sys.modules if name.endswith(late)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "text",
    [
        "", "00", PARENT.upper(), PARENT + "-x", "ff" + PARENT[2:], PARENT[:3] + "0" * 32 + PARENT[35:],
        PARENT[:36] + "0" * 16 + PARENT[52:], PARENT[:-1], "x" * 10_000, PARENT.replace("-", "_"),
    ],
)  # fmt: skip
def test_a_traceparent_that_is_not_one_counts_as_none(text: str) -> None:
    assert remote_parent([("traceparent", text)]) is None


def test_a_traceparent_is_read_with_its_state_from_whichever_header_case() -> None:
    found = remote_parent([("TraceParent", PARENT), ("Tracestate", "a=1"), ("tracestate", "b=2")])
    assert found is not None
    assert (found.trace_id, found.span_id) == (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    assert (found.flags, found.state) == (1, "a=1,b=2")
    assert remote_parent([("traceparent", PARENT), ("traceparent", PARENT)]) is None
    later = remote_parent([("traceparent", "cc" + PARENT[2:] + "-more"), ("tracestate", "x" * 600)])
    assert later is not None
    assert later.state == ""


def settings_of(*argv: str, environ: dict[str, str] | None = None) -> Any:
    return parse_serve(["--model-repository=/m", *argv], environ or {})


def test_trace_config_is_read_in_tritons_syntax() -> None:
    given = settings_of(
        "--trace-config", "triton,file=/tmp/t.json", "--trace-config", "triton,log-frequency=50",
        "--trace-config=rate=100", "--trace-config", "level=timestamps", "--trace-config=level=TENSORS",
        "--trace-config", "count=100", "--trace-config=opentelemetry,resource=service.name=box",
        "--trace-config=opentelemetry,resource=a=b=c", "--trace-config=opentelemetry,url=collector:4318/v1/traces",
    ).config.trace  # fmt: skip
    assert start_settings(given) == TraceSettings(("TIMESTAMPS", "TENSORS"), 100, 100, 50, "/tmp/t.json")
    assert given.resource == (("service.name", "box"), ("a", "b=c"))
    assert given.url == "http://collector:4318/v1/traces"


def test_trace_settings_come_from_the_environment_and_the_file_too(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[trace]\nconfig = ["level=TENSORS", "triton,file=a b"]\n')
    assert start_settings(settings_of(f"--config={file}").config.trace).file == "a b"
    variables = {"EDGE_SERVER_TRACE_CONFIG": "level=TIMESTAMPS triton,file=t rate=7"}
    assert start_settings(settings_of(environ=variables).config.trace).rate == 7


def test_tritons_old_flags_still_act_and_say_what_to_use() -> None:
    given = settings_of("--trace-file=t", "--trace-level", "TIMESTAMPS", "--trace-rate=3", "--trace-count", "-1",
                        "--trace-log-frequency=4")  # fmt: skip
    assert start_settings(given.config.trace) == TraceSettings(("TIMESTAMPS",), 3, -1, 4, "t")
    assert "--trace-rate is deprecated, use --trace-config rate=..." in given.warnings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rat=1", "did you mean 'rate=...'"), ("level=LOUD", "expected OFF, TIMESTAMPS or TENSORS"),
        ("rate=-1", "expected an integer of 0"), ("count=-2", "expected an integer of -1"), ("rate", "expected"),
        ("triton,rate=1", "expected"), ("opentelemetry,url=ftp://x", "expected http"),
        ("mode=jaeger", "expected triton"),
        ("opentelemetry,resource=novalue", "expected resource=<key>=<value>"),
    ],
)  # fmt: skip
def test_a_trace_config_that_is_not_known_is_refused_with_the_place(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"flag --trace-config: .*{words}"):
        settings_of(f"--trace-config={text}")


def test_a_level_without_a_file_is_doubted_aloud() -> None:
    assert any("triton,file is not" in words for words in settings_of("--trace-config=level=TIMESTAMPS").warnings)
