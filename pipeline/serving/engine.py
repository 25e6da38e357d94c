"""The engine: one thread that steps a scheduler, with a bounded queue in front of it.

Requests come from any thread. Outputs are delivered once a step, on the engine's thread; `deliver` passes them on. A
program that fails ends all requests and the engine, which says so from then on: what a device holds afterwards is not
known, so a server must be started again.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nxpipe.pipeline.serving.scheduler import GenerationRequest, Output, Scheduler
from nxpipe.pipeline.util.errors import PipelineError

Deliver = Callable[[Sequence[Output]], None]


class Overloaded(PipelineError):
    """The queue is full. `retry_after` is an estimate in seconds of when it is not."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(f"{waiting:,} requests wait already; retry after {retry_after:.0f} s")
        self.retry_after = retry_after


class NotServing(PipelineError):
    """The engine accepts no requests: it drains, or a program has failed."""


@dataclass(frozen=True)
class Limits:
    """What a server accepts. `tokens` bounds the prompt and the answer of one request; None: the cache's capacity."""

    waiting: int = 256
    tokens: int | None = None
    seconds: float | None = None  # of a request, from its arrival to its last token
    stall: float = 120.0  # seconds that a step may take before the engine counts as hung


class Engine:
    """A scheduler on a thread of its own."""

    def __init__(self, scheduler: Scheduler, deliver: Deliver, limits: Limits | None = None) -> None:
        self.scheduler, self.limits = scheduler, limits or Limits()
        self._deliver = deliver
        self._arrivals: deque[GenerationRequest] = deque()
        self._cancellations: deque[GenerationRequest] = deque()
        self._changed = threading.Condition()
        self._is_accepting, self._is_closed = True, False
        self.fault: BaseException | None = None
        self.last_progress = time.monotonic()
        self._seconds_per_request = 1.0  # a moving average over finished requests, for Retry-After
        self._last_finish = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; InputInvalid for one that never fits, Overloaded or NotServing for one that cannot now."""
        fitted = self.scheduler.require_fits(request)
        with self._changed:
            self._require_accepting()
            waiting = len(self._arrivals) + self.scheduler.waiting
            if waiting >= self.limits.waiting:
                raise Overloaded(waiting, max(1.0, waiting * self._seconds_per_request))
            self._arrivals.append(fitted)
            self._changed.notify()

    def cancel(self, request: GenerationRequest) -> None:
        with self._changed:
            self._cancellations.append(request)
            self._changed.notify()

    @property
    def is_ready(self) -> bool:
        return self._is_accepting and self.fault is None and not self._is_closed

    @property
    def stall(self) -> NotServing | None:
        """The reason why the engine counts as hung: a step that does not end."""
        seconds = time.monotonic() - self.last_progress
        if self.scheduler.is_idle or seconds <= self.limits.stall:
            return None
        return NotServing(f"a step has not ended for {seconds:.0f} s; restart the server")

    @property
    def waiting(self) -> int:
        return len(self._arrivals) + self.scheduler.waiting

    @property
    def running(self) -> int:
        return self.scheduler.running

    def drain(self, seconds: float | None = None) -> bool:
        """Accept no more requests, and wait until all have ended; False if some have not in time."""
        with self._changed:
            self._is_accepting = False
            self._changed.notify()
            return self._changed.wait_for(self._is_over, seconds)

    def close(self) -> None:
        """End the thread after its step; requests that are left get no more outputs."""
        with self._changed:
            self._is_accepting, self._is_closed = False, True
            self._changed.notify()
        self._thread.join()
        self.scheduler.decoder.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_accepting(self) -> None:
        if self.fault is not None:
            raise NotServing(f"a program has failed: {self.fault}; restart the server")
        if not self._is_accepting:
            raise NotServing("the server is shutting down; send the request to another one")

    def _is_over(self) -> bool:
        return self.fault is not None or self._is_closed or (not self._arrivals and self.scheduler.is_idle)

    def _run(self) -> None:
        while self._take():
            try:
                outputs = self.scheduler.step()
            except BaseException as fault:
                with self._changed:
                    self.fault = fault
                outputs = self.scheduler.fail()
            self._note(outputs)
            self._deliver(outputs)

    def _take(self) -> bool:
        """Pass on what has arrived, and wait while there is nothing to do; False at the end."""
        with self._changed:
            if self._is_over():
                self._changed.notify_all()
            self._changed.wait_for(self._has_work)
            if self._is_closed or self.fault is not None:
                self._changed.notify_all()
                return False
            if self.scheduler.is_idle:
                self.last_progress = time.monotonic()
            while self._arrivals:
                self.scheduler.add(self._arrivals.popleft())
            while self._cancellations:
                self.scheduler.cancel(self._cancellations.popleft())
            return True

    def _has_work(self) -> bool:
        return (
            bool(self._is_closed or self.fault is not None or self._arrivals or self._cancellations)
            or not self.scheduler.is_idle
        )

    def _note(self, outputs: Sequence[Output]) -> None:
        now = self.last_progress = time.monotonic()
        if ended := sum(output.finish is not None for output in outputs):
            each = (now - self._last_finish) / ended
            self._seconds_per_request += 0.2 * (min(each, 60.0) - self._seconds_per_request)
            self._last_finish = now
