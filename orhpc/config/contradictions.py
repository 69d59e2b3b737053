"""Settings of different sections that contradict each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orhpc.config.algorithm import COMPARING
from orhpc.config.base import nearest
from orhpc.config.faults import fault_problems
from orhpc.config.megatron import MegatronSettings
from orhpc.config.precision import precision_problems

if TYPE_CHECKING:
    from orhpc.config.schema import Config, TrainSettings


def contradictions(c: Config) -> list[str]:
    """List the contradictions between settings of different sections."""
    problems: list[str] = []
    rollouts = c.rollout.batch_size * c.rollout.n_samples
    trained = c.train.global_batch_size * c.train.steps_per_rollout
    if rollouts != trained:
        problems.append(
            "golden rule: rollout.batch_size x rollout.n_samples = train.global_batch_size x "
            f"train.steps_per_rollout, but {c.rollout.batch_size} x {c.rollout.n_samples} = {rollouts} "
            f"and {c.train.global_batch_size} x {c.train.steps_per_rollout} = {trained}"
        )
    problems += _source_problems(c)
    problems += _group_problems(c)
    problems += _overlong_problems(c)
    if 0 < c.train.steps <= (warmup := c.algorithm.critic.warmup_steps):
        problems.append(f"algorithm.critic.warmup_steps: {warmup} leave no step to train the policy")
    if c.train.routing_replay and not (c.rollout.record_routes or c.train.replay_rollouts):
        problems.append("train.routing_replay: needs rollout.record_routes: true")
    problems += _engine_problems(c)
    if c.checkpoint.spare_host_memory and not c.placement.shared_devices:
        problems.append("checkpoint.spare_host_memory: placement.mode: split offloads no trainer state")
    if any(rank >= c.placement.trainer_ranks for rank in c.train.profile_ranks):
        problems.append(f"train.profile_ranks: ranks are 0 to {c.placement.trainer_ranks - 1}")
    if c.train.compile and c.train.deterministic:
        problems.append("train.compile: chooses kernels by timing them, which train.deterministic excludes")
    if c.train.compile and c.train.backend != "fsdp":
        problems.append("train.compile: true needs train.backend: fsdp")
    if c.train.backend == "megatron":
        problems += c.megatron.problems(c.placement.trainer_ranks)
        problems += c.megatron.moment_problems(c.train.adam_beta2, c.model.dtype)
        problems += c.megatron.gradient_problems(c.model.dtype)
        recomputes = c.train.gradient_checkpointing is not False
        problems += c.megatron.overlap_problems(c.model.dtype, recomputes=recomputes)
        if c.megatron.counts_from_routes and not c.train.routing_replay:
            problems.append("megatron.counts_from_routes: needs train.routing_replay: true")
    elif c.megatron != MegatronSettings():
        problems.append("megatron: has settings, but train.backend is not megatron")
    problems += _fsdp_problems(c.train)
    problems += precision_problems(c)
    problems += fault_problems(c)
    return problems


def _group_problems(c: Config) -> list[str]:
    """List settings with which no prompt group of an environment could train anything."""
    if not c.train.steps or c.train.replay_rollouts is not None:
        return []
    alone = [n for n, e in c.environments.items() if e.trains and e.apply_to(c.rollout).n_samples == 1]
    if not alone:
        return []
    own = c.environments[alone[0]].n_samples is not None
    setting = f"environments.{alone[0]}.n_samples" if own else "rollout.n_samples"
    if c.algorithm.advantage in COMPARING:
        return [
            f"{setting}: 1 leaves a rollout no others of its group, with which algorithm.advantage: "
            f"{c.algorithm.advantage} compares it, so nothing would be trained; batch and ppo need no groups"
        ]
    if c.rollout.filter == "equal_rewards":
        return [f"{setting}: 1 makes all rewards of a group equal, so rollout.filter would drop every group"]
    return []


def _overlong_problems(c: Config) -> list[str]:
    """List limits of tokens that are within the penalty's interval from the first token on."""
    buffer, most = c.algorithm.overlong.buffer_tokens, c.algorithm.overlong.max_tokens
    limits = {"algorithm.overlong.max_tokens": most}
    if most is None:
        limits = {
            f"max_response_tokens of environment {name!r}": e.apply_to(c.rollout).max_response_tokens
            for name, e in c.environments.items()
            if e.trains
        }
    return [
        f"algorithm.overlong.buffer_tokens: {buffer} is above the {limit} of {name}, so that rollouts of any "
        "length would be penalized"
        for name, limit in limits.items()
        if limit is not None and buffer > limit
    ]


def _fsdp_problems(train: TrainSettings) -> list[str]:
    """List what is wrong with the settings of what FSDP recomputes and gathers."""
    if train.backend == "megatron":
        problems = ["train.gather_once: is of fsdp"] if train.gather_once is True else []
        if train.recompute_layers is not None:
            problems.append("train.recompute_layers is of fsdp; use megatron.recompute_layers")
        return problems
    if train.recompute_layers is not None and train.gradient_checkpointing is False:
        return ["train.recompute_layers: recomputes nothing with train.gradient_checkpointing: false"]
    return []


def _engine_problems(c: Config) -> list[str]:
    """List the problems of the engines' settings with those of placement, trainer and evaluation."""
    problems: list[str] = []
    if c.engine.backend == "cpu" and c.engine.tp != 1:
        problems.append(f"engine.tp: the cpu engine is one process, so 1, not {c.engine.tp}")
    if c.engine.router and c.rollout.record_routes:
        problems.append("engine.router: sglang-router drops the expert routes of rollout.record_routes")
    if c.rollout.record_routes and (setting := c.engine.misplaces_routes) is not None:
        problems.append(f"rollout.record_routes: with {setting} SGLang returns routes of other tokens")
    if c.engine.backend == "cpu" and c.placement.device == "cuda":
        problems.append("engine.backend: cpu needs placement.device: cpu")
    if c.placement.rollout_devices % c.engine.tp:
        problems.append(
            f"engine.tp: {c.placement.rollout_devices} devices cannot be divided into engines "
            f"of {c.engine.tp}, but of {nearest(c.engine.tp, c.placement.engine_sizes)}"
        )
    if c.placement.shared_devices % c.engine.tp:
        problems.append(
            f"engine.tp: an engine of {c.engine.tp} would be only partly on the {c.placement.shared_devices} "
            f"devices that are shared with trainers; one of {nearest(c.engine.tp, c.placement.engine_sizes)} "
            "would not"
        )
    if c.engine.sync == "ipc" and c.placement.shared_devices < c.placement.rollout_devices:
        problems.append("engine.sync: ipc needs every engine on the trainers' devices; use auto")
    shares_all = c.placement.shared_devices >= c.placement.rollout_devices
    if c.engine.delta_sync and shares_all and c.engine.sync != "broadcast":
        problems.append("engine.delta_sync: needs engines with dedicated devices, which receive broadcasts")
    if c.engine.delta_sync and (c.model.dtype, c.engine.dtype) == ("float32", "bfloat16"):
        problems.append(
            "engine.delta_sync: engine.dtype: bfloat16 rounds the weights of model.dtype: float32"
        )
    if c.engine.sync_own_experts:
        if c.placement.shared_devices < c.placement.rollout_devices:
            problems.append("engine.sync_own_experts: needs every engine on the trainers' devices")
        if c.train.backend != "megatron":
            problems.append("engine.sync_own_experts: needs train.backend: megatron")
    if c.engine.sync == "broadcast" and c.placement.shared_devices and c.placement.device == "cuda":
        problems.append("engine.sync: broadcast cannot reach engines on the trainers' devices; use auto")
    if c.engine.deterministic and c.evaluation.sampling.min_p:
        problems.append("evaluation.sampling.min_p: SGLang does not support it with engine.deterministic")
    return problems


def _source_problems(c: Config) -> list[str]:
    """List the problems of the settings that say where tasks come from."""
    problems: list[str] = []
    replays = c.train.replay_rollouts is not None
    if not c.environments and not replays:
        problems.append("environments: at least one is needed")
    for name, splits in c.evaluation.splits.items():
        if name not in c.environments:
            problems.append(f"evaluation.splits: {name!r} is not one of the environments")
        if not splits:
            problems.append(f"evaluation.splits.{name}: name at least one split")
    if c.evaluation.interval and not c.evaluation.splits:
        problems.append("evaluation.interval: evaluation needs evaluation.splits")
    if c.train.steps == 0 and (replays or not c.evaluation.splits):
        problems.append("train.steps: 0 evaluates and trains nothing; it needs evaluation.splits")
    folders: dict[str, str] = {}
    for name, settings in c.environments.items():
        own = settings.apply_to(c.rollout)
        # Both would read the tasks of the one that is written last: RunDir.data_of.
        if settings.data is not None and (other := folders.setdefault(name.replace("/", "_"), name)) != name:
            problems.append(
                f"environments.{name}: the tasks of {other} have the same folder; rename one of them"
            )
        if own.max_total_tokens > c.rollout.max_total_tokens:
            problems.append(f"environments.{name}.max_total_tokens: is above rollout.max_total_tokens")
        if own.max_response_tokens >= own.max_total_tokens:
            problems.append(f"environments.{name}: max_response_tokens must be below max_total_tokens")
        if settings.replicas is not None and not settings.is_served:
            problems.append(f"environments.{name}.replicas: the job does not serve it (serve, data)")
        elif c.rollout.workers_per_node and (settings.replicas or 0) > c.rollout.workers_per_node:
            problems.append(
                f"environments.{name}.replicas: {settings.replicas} are more than the "
                f"{c.rollout.workers_per_node} rollout.workers_per_node, each of which uses one server"
            )
        if not settings.trains and name not in c.evaluation.splits:
            unused = "trains nothing (splits, weight), and evaluation.splits does not name it"
            problems.append(f"environments.{name}: {unused}")
    if c.train.steps and not replays and not any(e.trains for e in c.environments.values()):
        problems.append("environments: all are for evaluation only; train.steps: 0 evaluates")
    return problems
