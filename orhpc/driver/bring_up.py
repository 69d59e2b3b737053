"""Start trainers, engines and workers under Ray, all concurrently."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Sequence
from functools import partial
from pathlib import Path

import ray

from orhpc.config import Config, RolloutSettings
from orhpc.data.prepared_tasks import listed_tasks
from orhpc.driver.concurrently import gather_two, timed
from orhpc.driver.estimator import Estimator
from orhpc.driver.fleet import Engines, Trainers, WorkerHandle, Workers, WorkerSetup, node_ids, wait_for_nodes
from orhpc.driver.fleet.gpus import Gpus
from orhpc.driver.metrics import Phases
from orhpc.driver.resume import Start, restore
from orhpc.driver.run import Run
from orhpc.driver.runtime import Runtime
from orhpc.errors import ModelError, RayLost
from orhpc.launch.checks.fit import device_memory
from orhpc.launch.model import model_folder
from orhpc.launch.node.ray_start import use_loopback
from orhpc.models import read_shape
from orhpc.plan.memory import GIB, recompute_mode, trainer_demand
from orhpc.plan.placement import Placement
from orhpc.plan.recompute import automatic, gathers_automatically, settled
from orhpc.process.user_code import USER_ERRORS, UserErrorLog
from orhpc.rollout.buffer import finished_group, summarize_group
from orhpc.rollout.group_filter import GroupFilter, load_filter
from orhpc.rollout.producer import Position, Producer, is_stale
from orhpc.rollout.recorded import ReplayProducer
from orhpc.rollout.tasks import TaskSequence, streams
from orhpc.rollout.worker import RolloutWorker
from orhpc.rundir import RunDir
from orhpc.train.checkpoint.copy_files import CopyId
from orhpc.types import PromptGroup

log = logging.getLogger(__name__)
_RETRY_S = 2.0
"""Seconds between two attempts to join Ray."""
_REJOIN_S = 60.0
"""Seconds that a node whose raylet has ended may take to join again."""
_JOIN_S = 180.0
"""Seconds that the raylets of all nodes may take to join."""


async def bring_up(
    run: Run, choosing: Awaitable[Start], copied: asyncio.Future[set[CopyId]], phases: Phases
) -> Runtime:
    """Start trainers, engines and workers; the trainers hold the chosen state afterwards.

    ``choosing`` concurrently finds the state to start from, for which ``copied`` receives the copies that the
    trainers can restore from memory; ``phases`` receives the seconds of each part.

    Raises:
        InfraError: a part did not start.
        ConfigError: the model or an environment is not what the config says.
        OrhpcError: what ``choosing`` and :func:`orhpc.driver.resume.restore` raise.
    """
    config, placement, rundir = run.config, run.placement, run.rundir
    # First, so that a mistake in the user's functions ends the attempt before anything starts.
    estimator = Estimator(config)
    group_filter = load_filter(config.rollout.filter)
    # A raylet that ended is started again; its node is back before a restart of all parts would be.
    await asyncio.to_thread(wait_for_nodes, placement.nodes, _REJOIN_S)
    ids = node_ids(placement.nodes)
    model_dir = str(model_folder(config, rundir))
    key = (run.folder / "engine.key").read_text().strip()

    chosen = asyncio.ensure_future(timed(phases, "verify", choosing))
    starting_trainers = _start_trainers(run, ids, model_dir, chosen, copied, phases)
    gpus = Gpus.start(config, placement, ids, run.folder / "gpus.jsonl")
    if not placement.engines:
        start, trainers = await gather_two(chosen, starting_trainers)
        return _replaying(run, trainers, gpus, estimator, start)
    starting_workers = Workers.start(_worker_setup(run, model_dir), ids)
    start, ((trainers, engines), workers) = await gather_two(
        chosen,
        gather_two(
            _with_engines(run, ids, model_dir, key, starting_trainers, phases),
            timed(phases, "workers", starting_workers),
        ),
    )
    await workers.connect(engines.urls, key, engines.router_url)
    producer = await _producer(run, start, workers, group_filter)
    return Runtime(
        config,
        rundir,
        trainers,
        engines,
        workers,
        producer,
        run.notice,
        gpus,
        estimator,
        start,
        run.events.write,
        unchecked=config.model.check,
    )


def _worker_setup(run: Run, model_dir: str) -> WorkerSetup:
    """Return what the rollout workers of the attempt are started with."""
    key = (run.folder / "environment.key").read_text().strip()
    return WorkerSetup(
        run.config, run.placement, model_dir, run.rundir, run.attempt, key, run.events.write, run.notice
    )


async def _start_trainers(
    run: Run,
    ids: Sequence[str],
    model_dir: str,
    chosen: Awaitable[Start],
    copied: asyncio.Future[set[CopyId]],
    phases: Phases,
) -> Trainers:
    """Start the trainers and restore the state that is chosen."""
    config, placement = trainer_config(run.config, model_dir), run.placement
    trainers = await timed(phases, "trainers", Trainers.start(config, placement, ids, model_dir, run.notice))
    copied.set_result(await trainers.copies() if run.copies.any() else set())
    try:
        await timed(phases, "model", trainers.build())
        start = await chosen
        await timed(phases, "restore", restore(run, trainers, start))
    except BaseException:
        await trainers.close()  # their memory must be free for the next attempt
        raise
    return trainers


async def _with_engines(
    run: Run,
    ids: Sequence[str],
    model_dir: str,
    key: str,
    starting_trainers: Awaitable[Trainers],
    phases: Phases,
) -> tuple[Trainers, Engines]:
    """Start the engines while the trainers start.

    Importing libraries takes longer than loading models, so all processes start at once.  On shared devices
    both models do not fit together: the engines load theirs when the trainers sleep.  Afterwards the trainers
    are awake, and these engines have released their memory.
    """
    shared = bool(run.config.placement.shared_devices)
    trainers_sleep = asyncio.Event() if shared else None

    async def trainers_then_sleep() -> Trainers:
        trainers = await starting_trainers
        if trainers_sleep is not None:
            await trainers.sleep(all_moves=True)
            trainers_sleep.set()
        return trainers

    engines = Engines.start(run.config, run.placement, ids, model_dir, run.folder, key, trainers_sleep)
    found = await gather_two(trainers_then_sleep(), timed(phases, "engines", engines))
    if shared:
        with phases.timed("sync"):  # which follows
            await found[1].release()
            await found[0].wake()
    return found


def trainer_config(config: Config, model_dir: str) -> Config:
    """Replace what is recomputed and gathered automatically by what the memory of this node's devices allows.

    All is recomputed, and gathered every time, in models without a memory plan, which FSDP may still train.
    """
    if not (automatic(config) or gathers_automatically(config)):
        return config
    memory = device_memory(config)
    device_bytes = int(memory.gib * GIB) if config.placement.device == "cuda" else None
    try:
        shape = read_shape(model_dir)
    except ModelError as error:
        if config.train.backend == "megatron":
            raise
        known = "recomputation: full" if automatic(config) else "weights are gathered for every micro-batch"
        log.info("%s, because the memory cannot be planned: %s", known, error)
        return config
    chosen = settled(config, shape, device_bytes)
    demand = trainer_demand(chosen)
    some = "" if demand.layers is None else f", the first {demand.layers} layers"
    known = f"{memory.gib:.0f} GiB a device, {memory.source}" if device_bytes else "devices are processes"
    log.info("recomputation: %s%s (%s)", recompute_mode(chosen), some, known)
    if chosen.train.backend == "fsdp":
        often = "once an update" if demand.gathers_once else "for every micro-batch"
        log.info("weights are gathered %s", often)
    return chosen


def _replaying(run: Run, trainers: Trainers, gpus: Gpus, estimator: Estimator, start: Start) -> Runtime:
    """The parts of a run without engines, which trains on recorded rollouts."""
    producer = ReplayProducer(str(run.config.train.replay_rollouts))
    producer.position = start.state.position
    return Runtime(
        run.config,
        run.rundir,
        trainers,
        None,
        Workers([]),
        producer,
        run.notice,
        gpus,
        estimator,
        start,
        run.events.write,
    )


async def _producer(run: Run, start: Start, workers: Workers, group_filter: GroupFilter | None) -> Producer:
    """Make the producer, at the position in the data from which the attempt continues."""
    config, position = run.config, start.state.position
    finished = await asyncio.to_thread(
        finished_groups, run.rundir, position, start.state.step, config.rollout
    )
    return Producer(
        config.rollout,
        await task_sequence(config, workers.any(), run.rundir.task_file),
        workers,
        seed=config.run.seed,
        per_environment={name: e.apply_to(config.rollout) for name, e in config.environments.items()},
        position=position,
        finished=finished,
        keep=group_filter,
        report_user_error=UserErrorLog(run.folder / USER_ERRORS).add,
        buffered=partial(finished_group, run.rundir),
    )


async def task_sequence(config: Config, worker: WorkerHandle, task_file: Path) -> TaskSequence:
    """Lay out the run's sequence of the tasks of every training split, or of those of its task file."""
    counts: dict[tuple[str, str], int] = {}
    training = {name: settings for name, settings in config.environments.items() if settings.trains}
    weights = {name: s.weight for name, s in training.items()}
    easy_first = [name for name, s in training.items() if s.order == "easy_first"]
    if config.rollout.task_file is not None:
        listed: dict[tuple[str, str], list[int]] = {}
        for (name, split), hashes in listed_tasks(config, task_file).items():
            listed[name, split] = await worker.call(RolloutWorker.find_tasks, name, split, hashes)
        counts = {key: len(indices) for key, indices in listed.items()}
        return TaskSequence(streams(counts, weights, easy_first, listed), config.run.seed)
    for name, settings in training.items():
        for split in settings.splits:
            counts[name, split] = await worker.call(RolloutWorker.num_tasks, name, split)
    return TaskSequence(streams(counts, weights, easy_first), config.run.seed)


def finished_groups(
    rundir: RunDir, position: Position, version: int, settings: RolloutSettings
) -> list[PromptGroup]:
    """Groups that an earlier attempt finished after or before its last commit and never trained.

    Kept are those sampled by weights of this lineage (no newer than the commit) that are still
    fresh enough, and the files of unfinished groups (:mod:`orhpc.rollout.buffer`), from which workers go on;
    the files of all others are removed.
    """
    found: list[PromptGroup] = []
    for path in sorted(rundir.buffer.glob("*_*.h5")):
        finished = path.name.startswith("group_")
        group = summarize_group(path)
        stale = finished and group is not None and is_stale(group, version, settings)
        if group is None or stale or not _is_wanted(group, position, version):
            path.unlink()
        elif finished:
            found.append(group)
    return found


def _is_wanted(group: PromptGroup, position: Position, version: int) -> bool:
    """Whether a group is still to be trained, and sampled by weights up to ``version``.

    The summaries tell the versions: reading the tokens of thousands of rollouts would take a minute.
    """
    newest = max(max((v for v, _ in r.version_tokens), default=r.min_version) for r in group.rollouts)
    return newest <= version and (group.id >= position.next_group or group.id in position.pending)


def ray_connect(placement: Placement, token: Path) -> None:
    """Join the job's Ray cluster as its driver, once every node is in it.

    ``ray.init`` is retried: while this node's raylet is still starting, which takes long on a busy node, it
    raises a generic error.

    Raises:
        RayLost: the driver could not connect, or a node did not join, in time.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    os.environ["RAY_COLOR_PREFIX"] = "0"  # the output of other processes is written to a file
    use_loopback()
    end = time.monotonic() + _JOIN_S
    while True:
        try:
            ray.init(
                address=placement.ray_address,
                log_to_driver=True,
                logging_level=logging.WARNING,
                namespace="orhpc",
            )
            break
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            problem = f"cannot connect to Ray at {placement.ray_address}: {reason}"
            ray.shutdown()
            if time.monotonic() > end:
                raise RayLost(problem) from error
            log.warning("%s; trying again", problem)
            time.sleep(_RETRY_S)
    wait_for_nodes(placement.nodes, _JOIN_S)
