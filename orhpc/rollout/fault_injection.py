"""A worker and an engine that fail on request, to rehearse the recovery of a run.

Used in place of their base classes only if ``faults.inject`` names a fault.
"""

from __future__ import annotations

import contextlib
import signal

import psutil

from orhpc.rollout.engines.process import EngineProcess
from orhpc.rollout.worker import RolloutWorker
from orhpc.rundir.storage import rehearse_full_disk


class FaultyRolloutWorker(RolloutWorker):
    """A worker that can be made to find no space on the run's filesystem."""

    async def rehearse_full_disk(self, seconds: float) -> None:
        """See :func:`orhpc.rundir.storage.rehearse_full_disk`."""
        rehearse_full_disk(seconds)


class FaultyEngineProcess(EngineProcess):
    """An engine whose processes can be signaled, or end as if a GPU's memory were used up."""

    def end_out_of_memory(self) -> None:
        """Log what torch logs, and kill the server and its descendants."""
        with self._log_path.open("a") as log:
            log.write("torch.OutOfMemoryError: CUDA out of memory. (injected)\n")
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal to the server and its descendants; to none if it is not running."""
        if self.pid is None or not self.alive():
            return
        server = psutil.Process(self.pid)
        for process in (server, *server.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.Signals(number))
