"""Token engine on llama.cpp's server, of the package xllamacpp: adds and removes sequences, and reads their tokens.

The server runs in threads of this process and computes without waiting for anybody: a step reads what it has written.
It is asked over HTTP (https://github.com/ggml-org/llama.cpp, tools/server/README.md), through a Unix socket in a folder
that only this user may open. Checked against xllamacpp 2026.10.11549.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import re
import selectors
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from edge_server.backends.runtime_errors import import_runtime, message_line
from edge_server.cgroup_limits import limited_cores
from edge_server.errors import InvalidRequest
from edge_server.plugins.language.engines.generation_config import read_generation_config
from edge_server.plugins.language.engines.locked_folder import locked_folder
from edge_server.plugins.language.engines.lora_adapters import find_adapters
from edge_server.plugins.language.engines.model_size import read_gguf_metadata
from edge_server.plugins.language.engines.settings import LlmSettings
from edge_server.plugins.language.engines.token_engine import (
    NO_VARIABLES,
    ChatMessage,
    EngineStats,
    FinishReason,
    Sampling,
    TokenEvent,
    TopLogprobs,
)
from edge_server.plugins.language.grammar.constraint import llama_cpp_grammar

_WAIT_S = 0.05
"""Time after which a step that has read nothing returns, so that the session notices clients that have left."""
_MARGIN_TOKENS = 32
"""Room in the KV cache for the tokens of a sequence that are computed before a step has read them."""
_LOOKED_UP_TOKENS = 3
"""Last tokens of a text that are looked for in it."""
_CACHE_FULL = "Context size has been exceeded."
"""Error of all running sequences, if the margin was too small."""
_CALL_TIMEOUT_S = 60.0
_LOG_TIMEOUT_S = 5.0
_ERRORS_ONLY = 1
"""Verbosity of the server's log."""
_UNTOLD = -1
"""Stands for a token that llama.cpp does not tell."""
_CONTROL = 3
"""GGUF's type number of a special token."""
_CONTROL_TEXT = re.compile(r"<[|｜].+[|｜]>")
"""Tokens that are special whatever the file says: llama.cpp corrects the type of many."""
_LOG_PREFIX = re.compile(r"^[\d.]+ [A-Z] ")
_FINAL_FIELDS = ["stop_type", "timings/cache_n"]
"""Members of the last event, which would repeat the prompt too."""


class LlamaCppEngine:
    """A model with its tokenizer. See TokenEngine.

    If the KV cache holds the longest sequence `max_num_seqs` times, each sequence has a part of its own. Otherwise the
    sequences share it. A sequence then starts when the cache has room for its prompt and a few tokens. If the
    cache is nearly full, the newest one is stopped, and computed again when there is room: after the prompt and the
    tokens that it has. A sequence with a grammar would lose its place in the grammar. So it starts when there is
    room for all its tokens, and is never stopped.

    The constructor raises RuntimeError for a file that the library cannot load, BadModelFile, and BackendMissing.
    """

    has_logit_bias = True
    max_top_logprobs = 20
    write_grammar = staticmethod(llama_cpp_grammar)

    def __init__(
        self, path: Path, settings: LlmSettings, block_tokens: int, bytes_per_token: int, device_id: int | None = None
    ) -> None:
        """`device_id`: CUDA's number of the GPU that `settings.gpu_layers` are for. None: the CPU."""
        library = import_runtime("xllamacpp", "Server", "llm-gguf")
        self.name = f"llama.cpp {library.__version__}"
        generation = read_generation_config(path)
        self.default_sampling = generation.sampling
        self._end_tokens = generation.end_tokens
        metadata = read_gguf_metadata(path, arrays=("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"))
        texts, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
        texts = texts if isinstance(texts, list) else []
        types = types if isinstance(types, list) and len(types) == len(texts) else [0] * len(texts)
        special = {
            token: text
            for token, (text, kind) in enumerate(zip(texts, types, strict=True))
            if kind == _CONTROL or _CONTROL_TEXT.fullmatch(text)
        }
        self.vocabulary_size = len(texts)
        self.special_texts: Sequence[str] = list(special.values())
        self._special_tokens = special
        self._shown_texts: Sequence[str] = ()
        self.block_tokens = block_tokens
        self.total_blocks = settings.num_kv_blocks
        self.max_context = settings.max_context
        self._bytes_per_token = bytes_per_token
        self._device_id = device_id
        self._max_running = settings.max_num_seqs
        # llama.cpp compares each token with all of a shared cache, also with the other sequences' part.
        self._shares_cache = self.total_blocks * block_tokens < settings.max_num_seqs * settings.max_context
        self._caches_prompts = settings.enable_prefix_caching
        adapters = find_adapters(path)
        self.adapters: Sequence[str] = list(adapters)
        self._waiting: deque[PendingSequence] = deque()
        self._running: dict[int, PendingSequence] = {}
        """By sequence id, in the order of their start."""
        self._selector = selectors.DefaultSelector()
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._woken, selectors.EVENT_READ)
        with contextlib.ExitStack() as resources:
            resources.callback(os.close, self._woken)
            folder = resources.enter_context(locked_folder("socket"))
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            resources.callback(os.close, descriptor)
            # The path of a Unix socket has at most 107 bytes. The ending tells llama.cpp that this is one.
            self._address = f"/proc/self/fd/{descriptor}/llama.sock"
            self._server = _start_server(library, self._parameters(library, path, settings, adapters.values()))
            self._resources = resources.pop_all()
        properties = self._call("GET", "/props")
        self.chat_template = str(properties.get("chat_template") or "")
        begin = self._call("POST", "/tokenize", {"content": "", "add_special": True})["tokens"]
        self.begin_tokens: Sequence[int] = begin
        self._begin_text = "".join(texts[token] for token in begin)

    def encode(self, text: str) -> Sequence[int]:
        tokens: list[int] = self._call("POST", "/tokenize", {"content": text, "add_special": False})["tokens"]
        return tokens

    def show_special_texts(self, texts: Sequence[str]) -> None:
        self._shown_texts = texts
        self._special_tokens = {token: text for token, text in self._special_tokens.items() if text not in texts}

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        texts = []
        for sequence in sequences:
            tokens = [token for token in sequence if token not in self._special_tokens]
            texts.append(str(self._call("POST", "/detokenize", {"tokens": tokens})["content"]) if tokens else "")
        return texts

    def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        chat: dict[str, Any] = {"messages": [dict(message) for message in messages]}
        if tools:
            chat["tools"] = [dict(tool) for tool in tools]
        if variables:
            chat["add_generation_prompt"] = variables.get("add_generation_prompt", True)
            chat["chat_template_kwargs"] = dict(variables)
        try:
            prompt = str(self._call("POST", "/apply-template", chat)["prompt"])
        except RuntimeError as error:
            said = message_line(error)
        else:
            # The library leaves the first token out, because its own tokenizer adds it.
            return prompt if prompt.startswith(self._begin_text) else self._begin_text + prompt
        raise InvalidRequest(f"the model's chat template cannot write these messages: {said}")

    def add(self, sequence_id: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self._waiting.append(PendingSequence(sequence_id, list(prompt), sampling, self._options(sampling)))

    def cancel(self, sequence_id: int) -> None:
        running = self._running.pop(sequence_id, None)
        if running is not None:
            self._stop(running)
        self._waiting = deque(item for item in self._waiting if item.sequence_id != sequence_id)

    def step(self) -> list[TokenEvent] | None:
        self._start_waiting()
        ready = [key.data for key, _ in self._selector.select(_WAIT_S)]
        if None in ready:
            os.eventfd_read(self._woken)
            ready.remove(None)
        if not ready:
            return None
        events = [event for sequence in ready if (event := self._read(sequence)) is not None]
        self._make_room()
        return events

    def wake(self) -> None:
        os.eventfd_write(self._woken, 1)

    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    def stats(self) -> EngineStats:
        used = sum(-(-item.total_tokens // self.block_tokens) for item in self._running.values())
        return EngineStats(used, self.total_blocks, self.total_blocks * self.block_tokens * self._bytes_per_token)

    def close(self) -> None:
        for sequence in self._running.values():
            self._stop(sequence)
        self._running.clear()
        self._waiting.clear()
        self._selector.close()
        del self._server  # its end stops its threads
        self._resources.close()

    def _parameters(self, library: Any, path: Path, settings: LlmSettings, adapters: Iterable[Path]) -> Any:
        parameters = library.CommonParams()
        parameters.model.path = str(path)
        parameters.hostnames = [self._address]
        parameters.ui = False
        parameters.verbosity = _ERRORS_ONLY
        parameters.warmup = False
        # Otherwise it continues an assistant's message at the end, where other engines begin a new one.
        parameters.prefill_assistant = False
        parameters.n_parallel = settings.max_num_seqs
        # A call of any other thread takes one too.
        parameters.n_threads_http = settings.max_num_seqs + 4
        parameters.n_ctx = settings.num_kv_blocks * self.block_tokens
        parameters.kv_unified = self._shares_cache
        parameters.cache_ram_mib = 0
        parameters.n_batch = parameters.n_ubatch = settings.max_num_batched_tokens
        guesses = parameters.speculative
        parameters.n_gpu_layers = guesses.draft.n_gpu_layers = settings.gpu_layers
        if self._device_id is not None:
            parameters.split_mode = library.llama_split_mode.LLAMA_SPLIT_MODE_NONE
            parameters.main_gpu = self._device_id
            # Otherwise the library takes fewer layers if the GPU is too small, and is slow without a word.
            parameters.fit_params = False
        if settings.prompt_lookup:
            guesses.types = [library.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
            guesses.ngram_simple.size_n = _LOOKED_UP_TOKENS
            guesses.ngram_simple.size_m = settings.num_speculative_tokens
        elif settings.draft_model:
            guesses.types = [library.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            guesses.draft.mparams.path = str(path.with_name(settings.draft_model))
            guesses.draft.n_max = settings.num_speculative_tokens
            if settings.threads:
                guesses.draft.cpuparams.n_threads = guesses.draft.cpuparams_batch.n_threads = settings.threads
        # Each request says which one it wants.
        parameters.lora_adapters = [library.CommonAdapterLoraInfo(str(file), 0.0) for file in adapters]
        if threads := settings.threads or limited_cores():
            parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
        return parameters

    def _options(self, sampling: Sampling) -> dict[str, Any]:
        """Return the sampling parameters under llama.cpp's names. Raises InvalidRequest."""
        if sampling.min_tokens and not sampling.ignore_eos:
            raise InvalidRequest("sampling parameter min_tokens: the backend llama_cpp has none; use ignore_eos")
        options: dict[str, Any] = {
            "stream": True,
            "return_progress": True,
            "response_fields": _FINAL_FIELDS,
            "cache_prompt": self._caches_prompts,
            "ignore_eos": sampling.ignore_eos,
            "preserved_tokens": self._shown_texts,
            "n_probs": max(int(sampling.has_logprobs), sampling.top_logprobs),
            "temperature": sampling.temperature,
            "repeat_last_n": self.total_blocks * self.block_tokens,
            "repeat_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            # vLLM's order; top_k first, because the others then sort less, and the result is the same.
            "samplers": ["penalties", "top_k", "temperature", "min_p", "top_p"],
            "top_k": sampling.top_k if sampling.temperature > 0 else 1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
        }
        if self.adapters:
            options["lora"] = [
                {"id": place, "scale": float(name == sampling.adapter)} for place, name in enumerate(self.adapters)
            ]
        if sampling.logit_bias:
            options["logit_bias"] = [(token, bias if bias > -100 else False) for token, bias in sampling.logit_bias]
        if sampling.seed is not None:
            options["seed"] = sampling.seed % 0xFFFFFFFF  # this number asks for a random one
        if sampling.constraint:
            options["grammar"] = sampling.engine_grammar
        return options

    def _start_waiting(self) -> None:
        """Start waiting sequences, in order, while the KV cache has room."""
        while self._waiting and len(self._running) < self._max_running:
            if self._running and self._waiting[0].needed_tokens > self._shared_room():
                return
            sequence = self._waiting.popleft()
            sequence.stream = _EventStream(
                self._address,
                {
                    **sequence.options,
                    "prompt": sequence.request_prompt,
                    "n_predict": sequence.sampling.max_tokens - sequence.answer_tokens,
                },
            )
            sequence.streamed_tokens = 0
            sequence.textless.clear()
            self._running[sequence.sequence_id] = sequence
            self._selector.register(sequence.stream.socket, selectors.EVENT_READ, sequence)

    def _make_room(self) -> None:
        """Stop the newest sequences until a shared KV cache has room for the others."""
        while self._shared_room() < 0:
            stoppable = [item for item in list(self._running.values())[1:] if item.is_stoppable]
            if not stoppable:
                return
            self._pause(stoppable[-1])

    def _shared_room(self) -> float:
        """Return the tokens for which a shared KV cache has room beside what the running sequences need."""
        if not self._shares_cache:
            return math.inf
        return self.total_blocks * self.block_tokens - sum(item.needed_tokens for item in self._running.values())

    def _pause(self, sequence: PendingSequence) -> None:
        """Stop a sequence, to be started again before those that came later."""
        self._stop(self._running.pop(sequence.sequence_id))
        self._waiting = deque(sorted((sequence, *self._waiting), key=lambda item: item.sequence_id))

    def _stop(self, sequence: PendingSequence) -> None:
        """Close the connection of a sequence. The server notices it with the next token or part of the prompt."""
        assert sequence.stream is not None
        self._selector.unregister(sequence.stream.socket)
        sequence.stream.socket.close()
        sequence.stream = None

    def _read(self, sequence: PendingSequence) -> TokenEvent | None:
        """Return the new tokens and text of a sequence as one event, or None if there is no new text."""
        assert sequence.stream is not None
        tokens: list[_Token] = []
        text = ""
        finish: FinishReason | None = None
        cached_tokens = None
        for message in sequence.stream.read():
            if (error := message.get("error")) is not None:
                if error["message"] == _CACHE_FULL and len(self._running) > 1 and sequence.is_stoppable:
                    self._pause(sequence)
                    return None
                self.cancel(sequence.sequence_id)
                return TokenEvent(sequence.sequence_id, error=message_line(RuntimeError(error["message"])))
            if "prompt_progress" in message:
                continue
            if "stop_type" not in message:
                sequence.take(message)
                if message["tokens"][-1] in self._end_tokens:
                    finish = "stop"
            elif finish is None:
                finish = "stop" if message["stop_type"] == "eos" else "length"
                cached_tokens = int(message["timings/cache_n"])
            if finish == "stop":
                del sequence.textless[-1:]
            if finish is not None or message["content"]:
                tokens += sequence.textless
                sequence.textless.clear()
                text += message.get("content", "")
            if finish is not None:
                self.cancel(sequence.sequence_id)
                break
        if not tokens and finish is None:
            return None
        known = [item.token for item in tokens]
        sequence.answer_tokens += len(known)
        sequence.answer += known if _UNTOLD not in known else [text]
        return TokenEvent(
            sequence.sequence_id,
            tuple(known),
            tuple(item.logprob for item in tokens) if sequence.sampling.has_logprobs else (),
            finish,
            cached_tokens=cached_tokens,
            text=text,
            top_logprobs=tuple(item.top for item in tokens) if sequence.sampling.top_logprobs else (),
            token_texts=tuple(item.text for item in tokens) if sequence.sampling.has_logprobs else (),
        )

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the server's answer. Raises RuntimeError with its message."""
        connection = _UnixConnection(self._address)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            answer = json.loads(response.read())
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(answer["error"]["message"])
        return dict(answer)


class _Token(NamedTuple):
    """A token of an answer, the logarithm of its probability, and the most likely ones at its place.

    `text` is that of the whole character, if the token is the last one of several."""

    token: int
    text: str = ""
    logprob: float = 0.0
    top: TopLogprobs = ()


class PendingSequence:
    """A sequence that has not ended. `stream` is None while it waits."""

    def __init__(self, sequence_id: int, prompt: list[int], sampling: Sampling, options: dict[str, Any]) -> None:
        self.sequence_id = sequence_id
        self.prompt = prompt
        self.sampling = sampling
        self.options = options
        """Members of its request."""
        self.stream: _EventStream | None = None
        self.streamed_tokens = 0
        """Tokens since the stream began."""
        self.textless: list[_Token] = []
        """The last tokens, while they have no text. The last one may be that which ends the text."""
        self.answer: list[int | str] = []
        """Tokens so far, and texts of tokens that llama.cpp does not tell. It takes both in a prompt."""
        self.answer_tokens = 0
        """Tokens given to the caller."""

    @property
    def request_prompt(self) -> list[int | str] | dict[str, Any]:
        return [*self.prompt, *self.answer]

    @property
    def is_stoppable(self) -> bool:
        """Whether it can be stopped and go on later."""
        return not self.sampling.constraint

    @property
    def total_tokens(self) -> int:
        return len(self.prompt) + self.answer_tokens

    @property
    def needed_tokens(self) -> int:
        """Room that it needs in the KV cache."""
        if self.sampling.constraint:
            return len(self.prompt) + self.sampling.max_tokens
        return self.total_tokens + _MARGIN_TOKENS

    def take(self, message: Mapping[str, Any]) -> None:
        """Add the tokens of a message to `textless`. Of several, those of one character, only the last is told."""
        count = message["tokens_predicted"] - self.streamed_tokens
        self.streamed_tokens += count
        probabilities = message.get("completion_probabilities")
        self.textless += [_Token(_UNTOLD)] * (count - 1)
        token = _Token(message["tokens"][-1])
        if probabilities:
            told = probabilities[-1]
            top = tuple((item["token"], item["logprob"]) for item in told["top_logprobs"][: self.sampling.top_logprobs])
            token = _Token(token.token, told["token"], told["logprob"], top)
        self.textless.append(token)


class _EventStream:
    """Answer to a request: server-sent events in a chunked body (RFC 9112, section 7.1), or an error."""

    def __init__(self, address: str, body: Mapping[str, Any]) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(address)
        content = json.dumps(body).encode()
        head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(content)}"
        self.socket.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + content)
        self._data = b""
        """Received and not decoded yet."""
        self._text = b""
        """The end of the decoded body, less than an event."""
        self._status = b""

    def read(self) -> list[dict[str, Any]]:
        """Return the complete events that have come. Call it when the socket is readable."""
        data = self.socket.recv(1 << 18)
        self._data += data
        if not self._status:
            head, end, rest = self._data.partition(b"\r\n\r\n")
            if end:
                self._status, self._data = head.split()[1], rest
        if self._status == b"200":
            self._decode_chunks()
        elif self._status and not data:
            return [json.loads(self._data)]
        *events, self._text = self._text.split(b"\n\n")
        messages = [json.loads(event[6:]) for event in events if event.startswith(b"data: ")]
        if not data and not messages:
            messages.append({"error": {"message": "llama.cpp closed the connection"}})
        return messages

    def _decode_chunks(self) -> None:
        while True:
            size, end, rest = self._data.partition(b"\r\n")
            length = int(size, 16) if end else 0
            if not length or len(rest) < length + 2:
                return
            self._text += rest[:length]
            self._data = rest[length + 2 :]


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, address: str) -> None:
        super().__init__("localhost")
        self._address = address

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_CALL_TIMEOUT_S)
        self.sock.connect(self._address)


def _first_line(log: BinaryIO) -> str:
    """Return the first line of llama.cpp's log, which a thread of its own writes; "" if there is none in time."""
    end_s = time.monotonic() + _LOG_TIMEOUT_S
    while True:
        log.seek(0)
        first, end, _ = log.read().lstrip().partition(b"\n")
        if end or time.monotonic() > end_s:
            return _LOG_PREFIX.sub("", first.decode("utf-8", "replace")).strip()
        time.sleep(0.01)


def _start_server(library: Any, parameters: Any) -> Any:
    """Load the model. Raises RuntimeError with what the library writes to the standard error."""
    with tempfile.TemporaryFile() as log:
        standard_error = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            return library.Server(parameters)
        except RuntimeError:
            said = _first_line(log) or "no reason given"
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)
            if threading.current_thread() is threading.main_thread():
                # The library has set handlers of its own.
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.getsignal(number))
    raise RuntimeError(said)
