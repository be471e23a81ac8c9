"""Regular expressions that meet foreign bytes: their processor time grows as the bytes do.

`re` holds the interpreter's lock, so one that does not would stop the whole server. PATTERNS has a line for each
pattern that may meet more than 256 characters of a client, a camera, a model's file, a language model or a registry.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.soak

SMALL = 8192
"""Characters of the shorter input; the longer one has eight times as many."""


class Foreign(NamedTuple):
    """A pattern of the package, how it is used, and `grow(n)`: about n characters for which it works hardest."""

    place: str
    use: str
    why_linear: str
    grow: Callable[[int], Any]


NPY = b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': ("
ONE_RUN = "each run of characters is read once, and nothing else may begin in it"
ANCHORED = "read from one place, and what follows a repeat cannot be part of it"

PATTERNS = (
    # -- clients: HTTP, HTTP/2, JSON
    Foreign("frontends.http.request_head:_REQUEST_LINE", "fullmatch", ANCHORED, lambda n: b"GET " + b"/" * n + b" H"),
    Foreign("frontends.http.request_head:FIELD_LINE", "fullmatch", ANCHORED, lambda n: b"x:" + b" " * n + b"\0"),
    Foreign("frontends.http.body_reader:_SIZE_LINE", "fullmatch", ANCHORED, lambda n: b"1" + b" " * n + b"\0"),
    Foreign("frontends.http.host_check:_HOST", "fullmatch", ANCHORED, lambda n: "a" * n + ":" + "1" * n + "x"),
    Foreign("frontends.http.routes:_INFERENCE_ELSEWHERE", "fullmatch", ANCHORED, lambda n: "/a:infer" * (n // 8)),
    Foreign("frontends.http.cors:_HEADER_NAMES", "fullmatch", ANCHORED, lambda n: "a, " * (n // 3) + "!"),
    Foreign("http2.header_blocks:_IS_NAME", "", ANCHORED, lambda n: b"a" * n + b":"),
    Foreign("http2.header_blocks:_IS_VALUE", "", ANCHORED, lambda n: b"a" + b" " * n),
    Foreign("frontends.grpc.http2_transport:_NOT_PLAIN", "search", "one character", lambda n: b"a" * n),
    Foreign("frontends.v2.infer_json_cache:_WHITESPACE_RUN", "match", ANCHORED, lambda n: b" " * n + b"x"),
    Foreign("frontends.json_text:_ESCAPE", "search", "two characters", lambda n: b"a" * n),
    Foreign("frontends.json_number_arrays:_LARGE", "search", ONE_RUN,
            lambda n: b'"data":[' + b"1," * (64 << 10) + (b'"data":[' + b"1" * 1024) * (n // 1024)),
    Foreign("frontends.json_number_arrays:_EMPTY", "search", ONE_RUN, lambda n: b"[ " * (n // 4) + b"[" + b" " * n),
    Foreign("telemetry.trace_sampling:_PARENT", "fullmatch", ANCHORED,
            lambda n: "00-" + "0" * 32 + "-" + "0" * 16 + "-00-" + "x" * n + "\n"),
    # -- clients: pictures, forms, robots, speech
    Foreign("frontends.http.multipart_form:_BOUNDARY", "search", "a quoted text ends where the next one begins",
            lambda n: ';boundary="\\' * (n // 12)),
    Foreign("plugins.vision.image_header:_JPEG_MARKER", "search", "two bytes", lambda n: b"\xff" * n),
    Foreign("plugins.policies.array_messages:_NPY", "match", "a number ends at a comma or at the end of the shape",
            lambda n: NPY + b"1" * n),
    Foreign("plugins.policies.array_messages:_NPY", "match", "spaces may only come before the end of the line",
            lambda n: NPY + b"11, 11), }" + b" " * n),
    Foreign("plugins.speech.wyoming.text_to_speech:_SENTENCE_END", "match", "from a mark, the closing marks after it",
            lambda n: "." * n),
    Foreign("plugins.speech.wyoming.text_to_speech:_SENTENCE_END", "match", "from a mark, the closing marks after it",
            lambda n: ".)" * (n // 4) + "." + ")" * (n // 2)),
    Foreign("plugins.speech.synthesis.espeak_phonemes:_LAST_CHARACTERS", "match", ANCHORED, lambda n: "!" * n + "a"),
    Foreign("plugins.speech.synthesis.espeak_phonemes:_CLAUSE_END", "search", ONE_RUN, lambda n: "\n" + " " * n),
    # -- the files of a board
    Foreign("plugins.doctor.collect:_IDENTIFIERS", "sub", "a name before @ begins where no character of one is before",
            lambda n: "1" * n),
    Foreign("plugins.doctor.collect:_IDENTIFIERS", "sub", "a group of an address has four digits at most",
            lambda n: "1:" * (n // 2)),
    Foreign("plugins.doctor.collect:_IPV4", "sub", "a group has three digits at most", lambda n: "1." * (n // 2)),
    # -- clients and models: prompts, answers, grammars
    Foreign("plugins.language.grammar.constraint:_GBNF_PART", "sub", ANCHORED, lambda n: "a" + " " * n),
    Foreign("plugins.language.grammar.constraint:_GBNF_ESCAPE", "sub", ANCHORED, lambda n: "\\n" * (n // 2)),
    Foreign("plugins.language.grammar.constraint:_PATTERN_PART", "sub", ANCHORED, lambda n: "[" * n),
    Foreign("plugins.language.grammar.constraint:_STRING_OR_NUMBER", "sub", "400 digits at most", lambda n: "1" * n),
    Foreign("plugins.language.text.answer_parser:_CHANNEL", "search", ONE_RUN, lambda n: "<|channel|>" + " " * n),
    Foreign("plugins.language.text.answer_parser:_FUNCTION", "search", "64 characters at most",
            lambda n: " to=functions.aa" * (n // 16)),
    Foreign("plugins.language.text.call_syntax:_KEYED", "match", "the first end of a key is its only one",
            lambda n: "<arg_key>" + "</arg_key><arg_value>" * (n // 21)),
    Foreign("plugins.language.text.call_syntax:_GEMMA_HEAD", "match", ANCHORED, lambda n: "call:a" + " " * n),
    Foreign("plugins.language.text.call_syntax:_BARE", "match", ANCHORED, lambda n: "a" * n),
    Foreign("plugins.language.text.call_syntax:_BARE_VALUE", "match", ANCHORED, lambda n: "a" * n),
    Foreign("plugins.language.text.call_syntax:_NUMBER", "fullmatch", ANCHORED, lambda n: "1." + "1" * n + "x"),
    Foreign("plugins.language.text.call_syntax:DEEPSEEK_HEAD", "match", "64 characters at most after the space",
            lambda n: " " * n),
    Foreign("plugins.language.text.tool_calls:_NAMED_CALL", "match", ANCHORED, lambda n: "a" + " " * n),
    Foreign("plugins.language.text.tool_calls:_PYTHON_CALLS", "match", ANCHORED, lambda n: "[" + " " * n),
    Foreign("plugins.language.text.tool_calls:_HEAD", "match", ANCHORED, lambda n: '{"name"' + " " * n),
    Foreign("plugins.language.engines.openvino_vision_engine:_TAGS", "sub", ONE_RUN,
            lambda n: "<ov_genai_image_" + "1" * n),
    Foreign("plugins.language.openai.completion_request:_DATA_URL", "match", "504 characters at most",
            lambda n: "data:" + ";a" * (n // 2)),
    # -- load calls: configurations, files of models
    Foreign("repository.disk.load_call_files:_NAMES_A_PATH", "search", "words of a bounded length", lambda n: "_" * n),
    Foreign("repository.disk.load_call_files:_NAMES_A_PATH", "search", "words of a bounded length",
            lambda n: "_pathx" * (n // 6)),
    Foreign("repository.disk.load_call_files:_IS_A_PATH", "match", ANCHORED, lambda n: "/..x" * (n // 4)),
    Foreign("repository.model_config.pbtxt:_LAST_NUMBER", "search", ONE_RUN, lambda n: b"1" * n + b"x"),
    Foreign("repository.model_config.pbtxt:_UNKNOWN_FIELD", "search", ONE_RUN, lambda n: 'Message type "' * (n // 14)),
    Foreign("plugins.language.text.chat_template_reader:_MARKER", "search", "64 characters at most",
            lambda n: "<|" + "a" * n),
    Foreign("plugins.vision.exporters.simple_yaml:_KEY", "match", "what follows a key is no part of it",
            lambda n: "a" + " " * n + "#"),
    Foreign("plugins.vision.exporters.simple_yaml:_KEY", "match", "two quotes are one or the other",
            lambda n: "'" * n + "#"),
    Foreign("plugins.vision.exporters.ultralytics:_NAME", "match", ANCHORED, lambda n: "0 : '" + "\\'" * (n // 2)),
    Foreign("plugins.vision.exporters.ultralytics:_PAIR", "fullmatch", ANCHORED, lambda n: "[1" + " " * n),
    Foreign("plugins.tensorrt.optimization_profiles:_ENTRY", "fullmatch", ANCHORED, lambda n: ":1" * (n // 2) + " "),
    Foreign("plugins.runtimes.pytorch:_BY_INDEX", "fullmatch", ANCHORED, lambda n: "__1a" * (n // 4)),
    # -- cameras, registries, other servers
    Foreign("plugins.cameras.sources.rtsp_redirects:_FIELD", "findall", "a name is read from its beginning only",
            lambda n: "a" * n + '="'),
    Foreign("plugins.remote.pull.oci_registry:_CHALLENGE", "findall", ONE_RUN, lambda n: "a" * n),
    Foreign("plugins.fleet.reports.version_differences:_DIGEST", "sub", ONE_RUN, lambda n: " (" + "a" * n),
)  # fmt: skip


@pytest.mark.parametrize("foreign", PATTERNS, ids=[item.place.rpartition(".")[2] for item in PATTERNS])
def test_eight_times_the_characters_take_eight_times_the_processor_time(foreign: Foreign) -> None:
    module, _, name = foreign.place.partition(":")
    pattern = getattr(pytest.importorskip(f"edge_server.{module}"), name)
    use: Callable[..., Any] = getattr(pattern, foreign.use) if foreign.use else pattern
    arguments = ("",) if foreign.use == "sub" else ()

    def measure(text: Any) -> float:
        times = []
        for _ in range(3):
            began_s = time.process_time()
            use(*arguments, text)
            times.append(time.process_time() - began_s)
        return min(times)

    # A quadratic one takes 64 times as long, and seconds. The constant is for those too fast to be measured.
    assert measure(foreign.grow(8 * SMALL)) < 20 * measure(foreign.grow(SMALL)) + 0.01
