"""Metrics of a server, under runtime-neutral names, in Prometheus's text format.

Counts of the engines are read when they are scraped, so a decode step pays nothing for them.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from nxpipe.pipeline.serving.generation import RequestTimings
    from nxpipe.pipeline.serving.scheduler import Output
    from nxpipe.pipeline.serving.server import Served

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The metrics of one server."""

    content_type: ClassVar[str] = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._responses = Counter(
            "serving_responses", "Responses by endpoint and status.", ["path", "status"], registry=self._registry
        )
        self._first_token = self._histogram("serving_time_to_first_token_seconds", "From arrival to the first token.")
        self._between = self._histogram("serving_time_per_output_token_seconds", "Between two tokens of one answer.")
        self._whole = self._histogram("serving_request_duration_seconds", "From arrival to the last token.")

    def watch(self, served: "Served") -> None:
        """Collect what the engines of a server count."""
        self._registry.register(_Engines(served))
        if served.generation is not None:
            served.generation.observe(self.observe)

    def count(self, path: str, status: int) -> None:
        self._responses.labels(path, str(status)).inc()

    def observe(self, output: "Output", timings: "RequestTimings") -> None:
        if timings.first_token is not None:
            self._first_token.observe(timings.first_token)
        for seconds in timings.between_tokens:
            self._between.observe(seconds)
        self._whole.observe(timings.whole)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def _histogram(self, name: str, help_text: str) -> Histogram:
        return Histogram(name, help_text, buckets=_SECONDS, registry=self._registry)


class _Engines:
    """Counters and gauges of the engines."""

    def __init__(self, served: "Served") -> None:
        self._served = served

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> "Iterator[Metric]":
        ready = 1.0 if self._served.is_ready else 0.0
        yield GaugeMetricFamily("serving_ready", "1 while requests are accepted.", ready)
        if self._served.shadow is not None:
            for name, value in asdict(self._served.shadow.counts).items():
                yield CounterMetricFamily(f"serving_shadow_{name}", f"Shadow requests: {name}.", value)
        if self._served.generation is None:
            return
        engines = self._served.generation.engines
        counts = [engine.scheduler.counts for engine in engines]
        yield GaugeMetricFamily(
            "serving_requests_running", "Requests in a batch.", sum(each.running for each in engines)
        )
        yield GaugeMetricFamily("serving_requests_waiting", "Requests in the queue.", sum(e.waiting for e in engines))
        usage = sum(each.scheduler.cache_usage for each in engines) / max(len(engines), 1)
        yield GaugeMetricFamily("serving_kv_cache_usage_ratio", "Used part of the KV cache.", usage)
        idle = min((time.monotonic() - each.last_progress for each in engines), default=0.0)
        yield GaugeMetricFamily("serving_seconds_since_progress", "Since the last step of an engine.", idle)
        for name, text, total in (
            ("steps", "Steps of the engines.", sum(each.steps for each in counts)),
            ("prompt_chunks", "Runs of programs that read prompts.", sum(each.chunks for each in counts)),
            ("prompt_tokens", "Tokens of prompts.", sum(each.prompt_tokens for each in counts)),
            ("prefix_reused_tokens", "Tokens of prompts that a row held.", sum(each.reused_tokens for each in counts)),
            ("generation_tokens", "Generated tokens.", sum(each.generated_tokens for each in counts)),
        ):
            yield CounterMetricFamily(f"serving_{name}", text, total)
        finished = CounterMetricFamily("serving_requests_finished", "Requests by their end.", labels=["reason"])
        for reason in counts[0].finished if counts else ():
            finished.add_metric([str(reason)], sum(each.finished[reason] for each in counts))
        yield finished
