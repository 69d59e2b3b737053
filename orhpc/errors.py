"""The failures of a run, one class each, and a table of what the supervisor does about each.

Some failures are handled where they occur, and reach the supervisor only if that fails:

* a :class:`DataError` ends one rollout, which is counted and never trained on as a zero
  (:mod:`orhpc.rollout.worker`); a :class:`MalformedToolCall` is shown to the model as a turn
  (:mod:`orhpc.rollout.agent`);
* a lost engine is restarted (:mod:`orhpc.driver.fleet.engines`), a failed weight sync is
  repeated once (:mod:`orhpc.driver.runtime`);
* a rollout worker that dies is restarted alone (:mod:`orhpc.driver.fleet.workers`), and its groups go to
  others (:mod:`orhpc.rollout.dispatch`);
* a write that raises :class:`StorageRefused` is retried (:mod:`orhpc.rundir.storage`);
* trainers of which one is :class:`OutOfMemory` within a step recover in their processes; if one dies all are
  restarted; the step is repeated (:mod:`orhpc.driver.trainer_recovery`);
* a first :class:`NonFinite` ends the step on all ranks (:mod:`orhpc.driver.loop`);
* a :class:`CheckpointError` costs one commit, not the run (:mod:`orhpc.driver.saver`).

A driver that a signal ended cannot act on its own end: the launcher does, as the row of :class:`DriverKilled`
says.  Once its budget is used up, and after a kill for memory, the attempt ends with the reason that
:mod:`orhpc.launch.slurm.verdict` finds.

All others, and these if they persist, go to :func:`policy_of`: the driver's supervisor
(:mod:`orhpc.driver.__main__`), the launcher (:mod:`orhpc.launch.node`) and every command use nothing
else.  An infrastructure failure never becomes a reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Action(Enum):
    """What the supervisor of an attempt does about a failure that reaches it."""

    END = "end the process with the exit code, once what the trainers hold is committed if it can be"
    RESTART = "start everything again in place from the newest commit, `budget` times at most, then END"
    RESTART_SMALLER = "RESTART with half the token budget of a micro-batch"


EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_PREFLIGHT = 3
EXIT_CRASH_LOOP = 4
EXIT_BUSY = 5
EXIT_REQUEUE = 75
"""EX_TEMPFAIL of sysexits.h: the batch script requeues the job, as it does after an unexpected failure
(:data:`EXIT_FAILED`); on every other code the job ends."""


class OrhpcError(Exception):
    """Base of all failures defined by this project.

    The message is one line that a user can act on: what is wrong, where, and what to do.
    """

    transcript: list[dict[str, Any]] | None = None
    """Messages of the rollout that it ended, for the record."""


# --- the user has to change something -------------------------------------------------------------


class ConfigError(OrhpcError):
    """A setting, file name or command-line argument is wrong."""


class ModelError(ConfigError):
    """The model folder is missing, unreadable or of a family that cannot be trained."""


class RecordError(ConfigError):
    """A rollout record is missing, incomplete or of another format."""


class UserCodeError(OrhpcError):
    """The user's own environment, reward or agent function always raises."""

    def __init__(self, message: str, *, trace: str = "") -> None:
        """``trace``: the traceback in the user's code, as text of several lines."""
        super().__init__(message)
        self.trace = trace


class PreflightError(OrhpcError):
    """Something that the run needs is missing on this machine: a key, a package, disk space."""


class HubUnreachable(PreflightError):
    """This machine cannot reach the model hub; another machine or a later try may succeed."""


class CrashLoop(OrhpcError):
    """Attempts repeatedly end without completing a step."""


class RunDirBusy(OrhpcError):
    """Another job or process uses the run directory."""


# --- the job has to be requeued -------------------------------------------------------------------


class StopRequested(OrhpcError):
    """A stop was requested by the stop file or a signal; the loop ends with a commit."""


class NodeLost(OrhpcError):
    """A node of the job stopped answering."""


class SlowNode(NodeLost):
    """A trainer rank computes much slower than its peers; the run continues without its node."""


class EndedFromOutside(OrhpcError):
    """The run's attempts are repeatedly ended from outside; it is requeued after a delay."""

    def __init__(self, message: str, wait_s: int = 0) -> None:
        """``wait_s``: the delay, in seconds."""
        super().__init__(message)
        self.wait_s = wait_s


# --- infrastructure -------------------------------------------------------------------------------


class InfraError(OrhpcError):
    """A component failed; its work can be repeated."""


class PortTaken(InfraError):
    """Another process has the port of one of the run's servers; a restart chooses other ports."""


class RayLost(InfraError):
    """Ray's head, a raylet or an actor died."""


class DriverKilled(InfraError):
    """The driver was ended by a signal: SIGKILL, a segmentation fault; its launcher starts it again."""

    def __init__(self, message: str, status: int = 0) -> None:
        """``status``: the driver's exit status, the negative number of the signal."""
        super().__init__(message)
        self.status = status


class WorkerDied(RayLost):
    """A rollout worker died; it is restarted, and its unfinished groups go to another worker."""


class WorkerFails(InfraError):
    """A rollout worker died too often within a time, or cannot be restarted alone."""


class TrainerHangs(InfraError):
    """An update of the trainers takes much longer than it should; ``stacks``: what every rank does."""

    def __init__(self, message: str, *, stacks: str = "") -> None:
        super().__init__(message)
        self.stacks = stacks


class EngineUnavailable(InfraError):
    """An inference engine does not answer, or answers with a server error."""


class EnvironmentUnavailable(InfraError):
    """An environment server does not answer in time, or its session died."""


class ToolTimeout(EnvironmentUnavailable):
    """A tool call exceeded its timeout; a retry would probably exceed it again."""


class WeightSyncFailed(InfraError):
    """Some engines did not receive all new weights."""


class GroupDamaged(InfraError):
    """The file of a group that waited for its step has changed since it was written."""


class StorageRefused(InfraError):
    """The run directory's filesystem refuses an operation: it is full, over quota, or its server is gone."""


class RoutesMissing(InfraError):
    """An engine answered without expert routes, or with impossible ones."""


# --- data -----------------------------------------------------------------------------------------


class DataError(OrhpcError):
    """One rollout's data cannot be used."""


class PromptTooLong(DataError):
    """A prompt leaves no room for one sampled token under the length cap."""


class MalformedToolCall(DataError):
    """The model's tool call does not parse; ``str(error)`` is shown to the model."""


class BadTask(DataError):
    """The environment refused this task, or answered with something that cannot be trained on."""


class BadAnswer(BadTask):
    """An environment server's answer violates the protocol."""


class ReplayDiffers(DataError):
    """A new session gave other answers than the recorded ones of an interrupted rollout."""


class EnvironmentRaised(BadTask):
    """The environment's code raised an exception; the rollout can be retried in a new session."""

    detail: str = ""
    """The exception, as the server names it."""
    trace: str = ""
    """The server's traceback, where it sends one."""


# --- the training step ----------------------------------------------------------------------------


class OutOfMemory(OrhpcError):
    """Device or host memory was exhausted."""

    alone: int | None = None
    """Tokens of the sample that was alone in the micro-batch for which the memory did not suffice."""


class NonFinite(OrhpcError):
    """The loss or a gradient is NaN or infinite on some rank."""

    made: int = 0
    """Optimizer steps of the policy that the training step had made before, with earlier mini-batches."""


class CheckpointError(OrhpcError):
    """A checkpoint is incomplete, corrupt or could not be written."""


@dataclass(frozen=True, slots=True)
class Policy:
    """One row of the policy table."""

    action: Action
    """What is done."""

    exit_code: int
    """The exit code once the action ends the process, or has used up its budget."""

    budget: int = 0
    """How often the action may be taken without a new step in between."""


POLICY: dict[type[OrhpcError], Policy] = {
    ConfigError: Policy(Action.END, EXIT_CONFIG),
    UserCodeError: Policy(Action.END, EXIT_CONFIG),
    PreflightError: Policy(Action.END, EXIT_PREFLIGHT),
    CrashLoop: Policy(Action.END, EXIT_CRASH_LOOP),
    RunDirBusy: Policy(Action.END, EXIT_BUSY),
    StopRequested: Policy(Action.END, EXIT_REQUEUE),
    NodeLost: Policy(Action.END, EXIT_REQUEUE),
    EndedFromOutside: Policy(Action.END, EXIT_REQUEUE),
    StorageRefused: Policy(Action.END, EXIT_REQUEUE),
    InfraError: Policy(Action.RESTART, EXIT_REQUEUE, budget=3),
    DriverKilled: Policy(Action.RESTART, EXIT_REQUEUE, budget=2),
    TrainerHangs: Policy(Action.RESTART, EXIT_REQUEUE, budget=2),
    OutOfMemory: Policy(Action.RESTART_SMALLER, EXIT_REQUEUE, budget=3),
    NonFinite: Policy(Action.RESTART, EXIT_REQUEUE, budget=1),
    OrhpcError: Policy(Action.END, EXIT_FAILED),
}
"""What is done about each class; a class without a row uses that of its nearest base."""


def policy_of(error: BaseException | type[BaseException]) -> Policy:
    """Return the row of the policy table for an exception or its class.

    Exceptions of other classes are bugs: they end the attempt with :data:`EXIT_FAILED`.
    """
    kind = error if isinstance(error, type) else type(error)
    for base in kind.__mro__:
        if base in POLICY:
            return POLICY[base]
    return POLICY[OrhpcError]
