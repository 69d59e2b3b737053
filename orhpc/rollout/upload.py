"""Uploads rollouts to OpenReward in the background; bounded, and unable to stop or slow down training.

The SDK's ``rollout.create`` blocks without a timeout, so each upload runs in a daemon thread that is
abandoned after a timeout.  After :data:`FAILURES` consecutive failures, uploads pause for :data:`PAUSE_S`;
during a pause, and whenever the queue is full, rollouts are dropped and counted.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

from orhpc.config import Config
from orhpc.errors import PreflightError
from orhpc.process.secrets import redact, remember_secrets
from orhpc.rollout.environment.notices import Notices
from orhpc.types import Rollout

log = logging.getLogger(__name__)

API_KEY = "OPENREWARD_API_KEY"
QUEUE_ROLLOUTS = 1024
UPLOAD_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 30.0
FAILURES = 3
PAUSE_S = 60.0
_EXIT_S = 2.0
"""Maximum time (seconds) for which an unclosed SDK may delay the end of the process."""


@dataclass(slots=True)
class UploadCounts:
    """Number of rollouts by upload result."""

    uploaded: int = 0
    """Passed to the SDK, which sends their messages in batches."""
    failed: int = 0
    dropped: int = 0
    """Not attempted: the queue was full, uploads were paused, or the uploader was closed first."""


class Uploader:
    """Accepts rollouts without ever waiting; uploads them in its own thread.

    With ``api_key`` None it does nothing.
    """

    def __init__(
        self,
        api_key: str | None,
        run_name: str,
        *,
        model_name: str = "",
        queue_rollouts: int = QUEUE_ROLLOUTS,
        upload_timeout_s: float = UPLOAD_TIMEOUT_S,
    ) -> None:
        self.counts = UploadCounts()
        self.notices = Notices()
        """Failed uploads; reported at the 1st, 10th, 100th ... failure."""
        self._key, self._run_name, self._model_name = api_key, run_name, model_name
        self._timeout_s = upload_timeout_s
        self._queue: queue.Queue[Rollout | None] = queue.Queue(queue_rollouts)
        self._give_up_at = float("inf")
        self._client: Any = None
        self._opening = threading.Lock()
        self._thread: threading.Thread | None = None
        if api_key is not None:
            self._thread = threading.Thread(target=self._work, name="orhpc-upload", daemon=True)
            self._thread.start()

    @classmethod
    def from_config(cls, config: Config) -> Uploader:
        """Create the uploader described by a config; raises PreflightError when the key is missing."""
        if not config.rollout.openreward_upload:
            return cls(None, "")
        key = os.environ.get(API_KEY)
        if not key:
            raise PreflightError(f"rollout.openreward_upload: {API_KEY} is not set")
        remember_secrets([key])
        name = config.rollout.openreward_run_name or config.run.name or "orhpc"
        return cls(key, name, model_name=config.model.path)

    def put(self, rollout: Rollout) -> None:
        """Queue a rollout, or count it as dropped; returns immediately."""
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(rollout)
        except queue.Full:
            self.counts.dropped += 1
            self._lost("the queue is full")

    def _lost(self, reason: str) -> None:
        lost = self.counts.failed + self.counts.dropped
        text = f"{lost} rollouts were not uploaded to OpenReward; {reason}" if lost > 1 else reason
        self.notices.report_once(len(str(lost)), redact(f"upload to OpenReward: {text}; training continues"))

    def close(self, timeout_s: float = DRAIN_TIMEOUT_S) -> UploadCounts:
        """Upload the queued rollouts for at most ``timeout_s``; returns the counts.  Never raises."""
        thread, self._thread = self._thread, None
        if thread is None:
            return self.counts
        self._give_up_at = time.monotonic() + timeout_s
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            log.warning("the upload queue did not empty within %g s", timeout_s)
        thread.join(max(0.0, self._give_up_at - time.monotonic()))
        while not self._queue.empty():
            self.counts.dropped += self._queue.get_nowait() is not None
        if self.counts.failed or self.counts.dropped:
            log.warning(
                "upload to OpenReward: %d rollouts uploaded, %d failed, %d dropped",
                self.counts.uploaded,
                self.counts.failed,
                self.counts.dropped,
            )
        return self.counts

    def _work(self) -> None:
        failures, paused_until = 0, 0.0
        while (rollout := self._queue.get()) is not None:
            if time.monotonic() < paused_until or time.monotonic() > self._give_up_at:
                self.counts.dropped += 1
                continue
            if self._within_deadline(rollout):
                failures = 0
                continue
            failures += 1
            if failures >= FAILURES:
                failures, paused_until = 0, time.monotonic() + PAUSE_S
                log.warning("uploads to OpenReward pause for %g s after %d failures", PAUSE_S, FAILURES)
        if self._client is not None:
            self._flush()

    def _within_deadline(self, rollout: Rollout) -> bool:
        """Upload one rollout in a thread that is abandoned when it exceeds the timeout."""
        outcome: queue.SimpleQueue[str] = queue.SimpleQueue()

        def upload() -> None:
            try:
                outcome.put("" if self._upload(rollout) else "the service refused it")
            except Exception as error:  # noqa: BLE001  # no error may stop training
                outcome.put(redact(f"{type(error).__name__}: {error}"))

        threading.Thread(target=upload, name="orhpc-upload-one", daemon=True).start()
        left = min(self._timeout_s, max(0.0, self._give_up_at - time.monotonic()))
        try:
            problem = outcome.get(timeout=left)
        except queue.Empty:
            problem = f"it took longer than {left:g} s"
        self.counts.uploaded += not problem
        self.counts.failed += bool(problem)
        if problem:
            log.warning("rollout %s was not uploaded: %s", rollout.id, problem)
            self._lost(f"rollout {rollout.id}: {problem}")
        return not problem

    def _open(self) -> Any:
        with self._opening:
            if self._client is None:
                import orhpc.process.lean_openreward  # noqa: F401 - before openreward

                # isort: split
                from openreward import OpenReward
                from openreward.models import RunInfo

                client = OpenReward(api_key=self._key, run_info=RunInfo(self._model_name, framework="orhpc"))
                # The timeout and the pause above are the retry policy; the SDK's would delay each rollout.
                client.config.send_loop_config.max_retries = 1
                client.config.shutdown_timeout = _EXIT_S
                self._client = client
            return self._client

    def _upload(self, rollout: Rollout) -> bool:
        api = self._open().rollout
        upload = api.create(
            run_name=self._run_name,
            rollout_name=rollout.id,
            environment=rollout.task.environment,
            split=rollout.task.split,
            metadata={"end": str(rollout.end), "reward": rollout.reward, "group": rollout.group_id},
        )
        if upload._rollouts_disabled:  # set by the SDK when the service refused the upload
            return False
        events = list(_events(rollout))
        for number, (event, reward) in enumerate(events, 1):
            upload.log(event, reward=reward, is_finished=number == len(events))
        return True

    def _flush(self) -> None:
        """Let the SDK send what it has queued; if it gives up, it prints a message instead of raising."""
        api = self._client.rollout
        api.shutdown_timeout = max(0.0, min(self._timeout_s, self._give_up_at - time.monotonic()))
        api.close()


def _events(rollout: Rollout) -> list[tuple[Any, float | None]]:
    """Convert the transcript to the SDK's messages, each with its step reward."""
    from openreward.api.rollouts.serializers import base

    events: list[tuple[Any, float | None]] = []
    pending: list[str] = []
    for message in rollout.messages:
        role, content = message["role"], message["content"]
        if role == "system":
            events.append((base.SystemMessage(content), None))
        elif role == "user":
            events.append((base.UserMessage(content), None))
        elif role == "tool":
            call = pending.pop(0) if pending else "answer"
            events.append((base.ToolResult(content, call), message.get("reward")))
        else:
            pending.clear()
            if message.get("reasoning"):
                events.append((base.ReasoningItem(content=message["reasoning"]), None))
            if content:
                events.append((base.AssistantMessage(content), None))
            for call in message.get("tool_calls", ()):
                pending.append(f"call_{len(events)}")
                arguments = json.dumps(call.get("arguments", {"error": call.get("error")}))
                events.append((base.ToolCall(call.get("name", "malformed"), arguments, pending[-1]), None))
    return events
