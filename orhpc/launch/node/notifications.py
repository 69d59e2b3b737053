"""Messages about a run to the webhook of ``notify``.

One thread of the first node's launcher follows ``events.jsonl``, so that messages also tell of a driver that
hangs or was killed, and sends them.  It touches nothing else: a webhook that is slow or away delays messages,
never the run.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import math
import os
import socket
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from orhpc.config import Config
from orhpc.config.notify import Occasion
from orhpc.errors import PreflightError
from orhpc.process.secrets import redact, resolve_secrets
from orhpc.process.terminal import safe
from orhpc.rundir import RunDir
from orhpc.rundir.event_lines import start_of
from orhpc.rundir.events import EventLog, Tail, failure_line

_LOOK_S = 2.0
_TIMEOUT_S = 10.0
_TRIES = 4
"""Deliveries of one message that are tried, 2, 8 and 32 seconds after the one before."""
_MOST_WAITING = 100
"""Messages that wait for a webhook that is away; older ones are dropped."""
_MOST_CHARACTERS = 1000
_CLOSE_S = 15.0
_CLOSE_AFTER_STOP_S = 4.0
_RECENT = 20
_FEWEST = 3
"""Intervals between steps that are needed to know what is usual."""


@dataclass(slots=True)
class Message:
    """One message and its fate."""

    body: dict[str, Any]
    tries: int = 0
    due: float = field(default_factory=time.monotonic)


class GapWatch:
    """Knows how long a step usually takes, and reports each unusually long wait once."""

    def __init__(self, factor: float, at_least_s: float) -> None:
        self._factor, self._at_least_s = factor, at_least_s
        self._intervals: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._last: float | None = None
        self._reported = False

    def step(self, now: float) -> None:
        """A step was done; ``now`` is a monotonic time."""
        if self._last is not None and not self._reported:
            self._intervals.append(now - self._last)
        self._last, self._reported = now, False

    def stop(self) -> None:
        """No step is expected for now: everything starts again, or has ended."""
        self._last = None

    def gap_s(self, now: float) -> tuple[float, float] | None:
        """Seconds since the last step, and how many are usual, if that is to be reported now."""
        if self._last is None or self._reported or len(self._intervals) < _FEWEST:
            return None
        usual, waited = statistics.median(self._intervals), now - self._last
        if waited < max(self._factor * usual, self._at_least_s):
            return None
        self._reported = True
        return waited, usual


class Notifier:
    """Follows one attempt and sends its messages; use it as a context around the attempt."""

    def __init__(
        self,
        config: Config,
        rundir: RunDir,
        attempt: int,
        stopping: Callable[[], bool],
        report: Callable[[str], object],
    ) -> None:
        """Args:
        stopping: whether the run was asked to stop: the end must then be quick.
        report: gets one line when messages cannot be delivered.
        """
        self._stopping = stopping
        self._settings, self._rundir, self._attempt, self._report = config.notify, rundir, attempt, report
        self._name = config.run.name or rundir.path.name
        self._url = ""
        self._tail = Tail(rundir.events, attempt)
        self._gaps = GapWatch(config.notify.gap_factor, config.notify.gap_at_least_s)
        self._waiting: collections.deque[Message] = collections.deque(maxlen=_MOST_WAITING)
        self._origin, self._step, self._end_reported, self._complained = "", 0, False, False
        self._why = "its driver was killed"
        self._done = threading.Event()
        self._deadline = math.inf
        self._alarms: dict[str, int] = {}
        """Newest step with an alarm, by metric."""
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._settings.active:
            try:
                sources = {"notify.webhook": self._settings.webhook}
                self._url = resolve_secrets(sources, {})["notify.webhook"]
            except PreflightError as error:
                self._complain(str(error))
                return self
            self._thread = threading.Thread(target=self._work, name="notify", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until the thread has sent all waiting messages, within a deadline."""
        if self._thread is None:
            return
        if error is not None:
            self.ended(error)
        seconds = _CLOSE_AFTER_STOP_S if self._stopping() else _CLOSE_S
        self._deadline = time.monotonic() + seconds
        self._done.set()
        # Only the thread sends: a server may take longer than the deadline for one message, or for ever.
        self._thread.join(seconds)
        if self._waiting:
            self._complain(f"{len(self._waiting)} messages were not delivered")

    def ended(self, error: BaseException) -> None:
        """Note why the attempt ended, for one that writes no event about it."""
        self._why = f"{type(error).__name__}: {error}"

    def _work(self) -> None:
        while True:
            over = self._done.wait(_LOOK_S)
            with contextlib.suppress(OSError):  # a filesystem that is away is reported by others
                for event in self._tail.new():
                    self._handle(event)
            if (gap := self._gaps.gap_s(time.monotonic())) is not None:
                waited, usual = gap
                text = f"no step for {waited / 60:.0f} min after step {self._step}; usual are {usual:.0f} s"
                self._tell("gap", "gap", text, seconds=round(waited), usual_seconds=round(usual, 1))
            if over:
                break
            self._deliver()
        self._finish()

    def _finish(self) -> None:
        """Send all waiting messages, until the deadline."""
        if not self._end_reported:
            self._tell("end", "failed", f"failed: {self._why}", outcome="failed")
        while self._waiting and time.monotonic() < self._deadline:
            self._deliver()
            time.sleep(0.1)

    def _handle(self, event: dict[str, Any]) -> None:
        """Turn an event into a message, if it is one of those that are wanted."""
        kind = event["event"]
        self._step = event.get("step", self._step) if kind in ("step", "ready", "finished") else self._step
        if kind == "step":
            self._gaps.step(time.monotonic())
        elif kind == "bring_up":
            self._origin = start_of(event)
            self._gaps.stop()
        elif kind == "ready":
            step = f"step {event.get('step', 0)} of {event.get('steps', '?')}"
            self._tell("start", "started", f"started (attempt {self._attempt}, {step}, from {self._origin})")
        elif kind == "alarm" and self._is_new(event):
            self._tell("alarm", "alarm", f"alarm: {event['reason']}", metric=event.get("metric"))
        elif kind in ("finished", "stopped", "failed"):
            self._end_reported = True
            self._gaps.stop()
            detail = f": {failure_line(event)}" if kind == "failed" else ""
            reason = f" ({event['reason']})" if event.get("reason") else ""
            self._tell("end", kind, f"{kind} after step {self._step}{reason}{detail}", outcome=kind)
        elif kind in ("restart", "node_replaced"):
            self._end_reported = False
            self._gaps.stop()

    def _is_new(self, alarm: dict[str, Any]) -> bool:
        """Whether the metric was within its threshold a step earlier.

        One that stays beyond it has an event in every step, and would be a message in each for days.
        """
        metric, step = str(alarm.get("metric")), alarm.get("step", self._step)
        before = self._alarms.get(metric)
        self._alarms[metric] = step
        return before is None or step > before + 1

    def _tell(self, occasion: Occasion, event: str, text: str, **more: Any) -> None:
        if occasion not in self._settings.events:
            return
        line = safe(redact(f"{self._name}: {text}"))[:_MOST_CHARACTERS]
        body = {
            "text": line,
            "event": event,
            "run": self._name,
            "directory": str(self._rundir.path),
            "attempt": self._attempt,
            "step": self._step,
            "host": socket.gethostname(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "time": round(time.time(), 3),
            **more,
        }
        self._waiting.append(Message(body))

    def _deliver(self) -> None:
        """Send the oldest message, if it is due."""
        if not self._waiting or self._waiting[0].due > time.monotonic():
            return
        message = self._waiting[0]
        problem = post(self._url, message.body)
        if problem is None:
            self._waiting.popleft()
            return
        message.tries += 1
        message.due = time.monotonic() + 2.0 * 4 ** (message.tries - 1)
        self._complain(problem)
        if message.tries >= _TRIES:
            self._waiting.popleft()

    def _complain(self, problem: str) -> None:
        """Report once per attempt that messages do not arrive; the line never has the URL."""
        if self._complained:
            return
        self._complained = True
        line = f"notify.webhook: {problem}; the run goes on without messages that cannot be delivered"
        self._report(line)
        with contextlib.suppress(OSError):
            events = EventLog(self._rundir.events, self._attempt)
            events.write("notice", reason=line)
            events.close()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The URL is a secret: it and the message go nowhere else."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None


def post(url: str, body: dict[str, Any]) -> str | None:
    """Send one JSON object; return why it was not accepted, without the URL, or None."""
    try:
        if not url.startswith(("http://", "https://")):
            return "the URL does not begin with https:// or http://"
        data = json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")  # noqa: S310
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=_TIMEOUT_S):
            return None
    except urllib.error.HTTPError as error:
        return f"the server answered {error.code}"
    except http.client.InvalidURL:  # its text has a part of the URL
        return "it is not a valid URL"
    except http.client.HTTPException as error:
        return f"the server's answer is not HTTP ({type(error).__name__})"
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return redact(f"the server cannot be reached ({' '.join(str(reason).split())[:200]})")
