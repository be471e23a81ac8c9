"""Metrics of a language model, under the names of vLLM, which routers and dashboards read."""

from __future__ import annotations

from edge_server.backends.custom_metrics import REGISTRY, MetricSeries
from edge_server.plugins.language.engines.token_engine import EngineStats

_TOKEN_EDGES_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_REQUEST_EDGES_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class LlmMetrics:
    """The series of one model. They disappear with this object."""

    def __init__(self, labels: dict[str, str]) -> None:
        def counter(name: str, text: str, **more: str) -> MetricSeries:
            return REGISTRY.family(name, text, "counter").series(tuple(sorted({**labels, **more}.items())))

        def gauge(name: str, text: str) -> MetricSeries:
            return REGISTRY.family(name, text, "gauge").series(tuple(sorted(labels.items())))

        def histogram(name: str, text: str, edges: tuple[float, ...]) -> MetricSeries:
            return REGISTRY.family(name, text, "histogram").series(tuple(sorted(labels.items())), edges)

        self._prompt_tokens = counter("vllm:prompt_tokens_total", "Tokens of prompts.")
        self._output_tokens = counter("vllm:generation_tokens_total", "Tokens generated.")
        self._step_s = {
            phase: counter(
                "vllm:step_seconds_total",
                "Time of engine steps: prefill are those in which some prompt was read.",
                phase=phase,
            )
            for phase in ("prefill", "decode")
        }
        self._ended = {
            reason: counter("vllm:request_success_total", "Requests that ended.", finished_reason=reason)
            for reason in ("stop", "length")
        }
        self._constraint_failures = counter(
            "edge_llm_constraint_failures_total",
            "Answers that did not obey what constrained them.",
        )
        self._running = gauge("vllm:num_requests_running", "Requests in the running batch.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests that wait for room in the KV cache.")
        self._cache_use = gauge("vllm:kv_cache_usage_perc", "Used part of the KV cache, 0 to 1.")
        self._queue_s = histogram("vllm:request_queue_time_seconds", "Time before the first step.", _REQUEST_EDGES_S)
        self._first_s = histogram("vllm:time_to_first_token_seconds", "Time to the first token.", _REQUEST_EDGES_S)
        self._each_s = histogram("vllm:time_per_output_token_seconds", "Time between two tokens.", _TOKEN_EDGES_S)
        self._whole_s = histogram("vllm:e2e_request_latency_seconds", "Time to the last token.", _REQUEST_EDGES_S)

    def begin(self, waited_s: float) -> None:
        self._queue_s.observe(waited_s)

    def count_prompt(self, tokens: int) -> None:
        self._prompt_tokens.add(tokens)

    def count_step(self, took_s: float, *, reads_prompt: bool) -> None:
        self._step_s["prefill" if reads_prompt else "decode"].add(took_s)

    def first_token(self, after_s: float) -> None:
        self._first_s.observe(after_s)

    def count_tokens(self, count: int) -> None:
        self._output_tokens.add(count)

    def end(self, arrived_s: float, first_token_s: float, now_s: float, tokens: int, reason: str) -> None:
        self._ended[reason].add(1)
        self._whole_s.observe(now_s - arrived_s)
        if tokens > 1:
            self._each_s.observe((now_s - first_token_s) / (tokens - 1))

    def count_constraint_failure(self) -> None:
        self._constraint_failures.add(1)

    def set_load(self, running: int, waiting: int, stats: EngineStats) -> None:
        self._running.set(running)
        self._waiting.set(waiting)
        self._cache_use.set(stats.used_blocks / max(stats.total_blocks, 1))

    def close(self) -> None:
        self.set_load(0, 0, EngineStats(0, 1, 0))
