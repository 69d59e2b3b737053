"""The one schema of a run's settings: YAML, ``extends:`` and dotted overrides, resolved once.

    config = load_config("configs/local.yaml", ["train.lr=1e-6"])

A config file holds intent.  What follows from the machines at hand (ranks, addresses, ports) is
worked out for each attempt by :mod:`orhpc.plan.placement` and never written back here.
Everything wrong with a config is a :class:`~orhpc.errors.ConfigError` of one line that names the
field.  This module imports neither torch nor ray: login nodes load it.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from orhpc.config.alarms import AlarmSettings
from orhpc.config.algorithm import AlgorithmSettings
from orhpc.config.base import Machines, Name, NonNegative, Positive, Seconds, Section
from orhpc.config.engine import EngineSettings, SamplingSettings
from orhpc.config.environment import EnvironmentSettings, check_secret_sources
from orhpc.config.megatron import MegatronSettings
from orhpc.config.placement import PlacementSettings
from orhpc.config.precision import Precision, precision_problems
from orhpc.config.slurm import SlurmSettings


class RunSettings(Section):
    """Which run this is."""

    name: Name | None = None
    """Folder under ``root``; the config file's stem when not given, so that the same command
    always finds the same run."""
    root: str = "runs"
    """Folder that holds run directories; on a filesystem that every node sees."""
    seed: NonNegative = 0
    """Fixes task order, sampling seeds and initial weights of random models."""
    storage_wait_s: Seconds = 900.0
    """How long a run whose filesystem is full, or away, waits for it before it leaves to be requeued."""


class ModelSettings(Section):
    """The policy model."""

    path: str = "Qwen/Qwen3-4B"
    """A local Hugging Face folder, a hub name (``Organisation/Name``), or ``bundled:NAME`` (``tiny``,
    ``tiny-moe``, ``smollm2-135m-instruct``). Hub models are fetched once into ``HF_HOME``, which all nodes
    must see; gated ones need ``HF_TOKEN``."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; null: ``main``. A run keeps the commit that it began with."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights and activations in the forward pass; master weights are always float32."""
    chat_format: Literal["auto", "chatml", "llama3", "deepseek", "glm"] = "auto"
    """How messages become tokens; ``auto`` goes by the model's type and vocabulary."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""
    check: bool = True
    """At every start, compare log-probabilities of the trainer and of CPU engines with transformers' own
    forward pass on a few samples (up to 10 billion parameters), and those of every engine with the
    trainer's; refuse a model that one of them computes wrongly.  The log and the event ``ready`` say what
    was compared."""


class RolloutSettings(Section):
    """How rollouts are made."""

    batch_size: Positive = 32
    """Prompt groups a step."""
    n_samples: Positive = 16
    """Rollouts a prompt group."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The trainer divides logits by the same temperature."""
    top_p: float = 1.0
    """Only 1: truncated sampling draws from another policy than the one that is trained."""
    top_k: int = -1
    """Only -1, likewise."""
    min_p: float = 0.0
    """Only 0, likewise."""
    max_response_tokens: Positive = 4096
    """Tokens of one generation call."""
    max_total_tokens: Positive = 32768
    """Tokens of one rollout, prompt and environment text included; never exceeded."""
    thinking: bool = False
    """Render the chat format's thinking mode."""
    system_prompt_template: str | None = None
    """System message; ``{tools}`` becomes the tool descriptions, other braces stay as they are.
    Null: the chat format's own text."""
    oversample: Annotated[float, Field(ge=1)] = 1.0
    """Groups started, as a multiple of ``batch_size``; a step takes those that finish first."""
    filter: Literal["none", "equal_rewards"] = "none"
    """``equal_rewards`` drops groups that carry no gradient and draws others."""
    max_refills: NonNegative = 3
    """Times a step may draw a further batch because of filtered or failed groups."""
    max_staleness: NonNegative = 0
    """Policy versions that a rollout's oldest token may lie behind; 0 is synchronous."""
    workers_per_node: Machines = 4
    max_concurrent: Positive = 512
    """Rollouts in flight a worker."""
    retries: NonNegative = 2
    """Fresh starts of one rollout, each in a new session, after its environment or engine failed."""
    max_failing_rollouts: Annotated[float, Field(ge=0)] = 0.5
    """Failed rollouts that a prompt group may have and still be trained, with the rollouts that are left:
    a share of its rollouts if below 1 (rounded down), else a number.  At least two must be left.  A group
    with more failures is dropped and another is drawn (``max_refills``)."""
    failing_environment: Literal["stop", "leave_out"] = "stop"
    """What happens when an environment fails for good: ``stop`` ends the attempt (exit code 75 where its
    server may come back, 2 where nothing but its code fails); ``leave_out`` goes on with the tasks of the
    other environments, and tries it again at the next start."""
    failing_environment_after: Positive = 64
    """Failed rollouts in a row, each tried again as ``retries`` says, after which an environment counts as
    failing for good."""
    tool_timeout_s: Seconds = 600.0
    """Deadline of one tool call, until an environment's own calls have shown how long they take: a call is
    then given up after ten times the longest that was answered, and not before 30 s."""
    session_timeout_s: Seconds = 120.0
    """Deadline of opening an environment session, its prompt included."""
    environment_start_timeout_s: Seconds = 600.0
    """How long a starting environment server is waited for."""
    custom_agent: str | None = None
    """``package.module:function`` in place of the agent loop (its signature: orhpc.rollout.agent)."""
    custom_reward: str | None = None
    """``package.module:function`` from a finished rollout to its reward."""
    record_routes: bool = False
    """Ask engines of MoE models for expert routes and keep them in the record."""
    openreward_upload: bool = False
    """Upload rollouts to OpenReward in the background; needs the key OPENREWARD_API_KEY."""
    openreward_run_name: Name | None = None
    """Name of the upload; null: the run's name."""

    @model_validator(mode="after")
    def _caps(self) -> Self:
        for name, off in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
            if getattr(self, name) != off:
                raise ValueError(
                    f"{name}={getattr(self, name)} is refused for training rollouts: the engine's "
                    f"log-probabilities would be another policy's; leave it at {off} (evaluation may set it)"
                )
        if self.max_response_tokens >= self.max_total_tokens:
            raise ValueError("max_response_tokens must be below max_total_tokens")
        return self


class TrainSettings(Section):
    """The optimisation."""

    backend: Literal["fsdp", "megatron"] = "fsdp"
    """``fsdp``: a transformers model, sharded over all ranks; ``megatron``: megatron-core, laid out as
    the ``megatron`` section says."""
    steps: NonNegative = 3000
    """Rollout and update steps of the run; 0: evaluate once (``evaluation.splits``) and train nothing."""
    global_batch_size: Positive = 512
    """Samples a mini-batch: one optimiser step."""
    steps_per_rollout: Positive = 1
    """Mini-batches a step."""
    lr: Annotated[float, Field(ge=0)] = 1e-5
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape over the whole run after warm-up; linear and cosine end at ``lr_min``."""
    lr_warmup_steps: NonNegative = 0
    """Optimiser steps of linear warm-up from 0."""
    lr_min: Annotated[float, Field(ge=0)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this global norm."""
    max_tokens_per_gpu: Positive = 8192
    """Packed tokens a micro-batch and rank; a longer single rollout gets a micro-batch alone."""
    dynamic_batch: bool = True
    """Pack under ``max_tokens_per_gpu``; false: ``micro_batch_size`` rollouts a micro-batch."""
    micro_batch_size: Positive = 1
    gradient_checkpointing: bool = True
    routing_replay: bool = False
    """Send every token to the experts that the engine chose for it (MoE models); needs
    ``rollout.record_routes``."""
    logprob_chunk_tokens: Positive = 8192
    """Rows of logits that exist at a time.  A micro-batch that needs no more keeps its logits for the
    backward pass; of a longer one they are computed again, chunk by chunk."""
    threads: Positive | None = None
    """CPU threads of one trainer rank; null shares out the machine's."""
    replay_rollouts: str | None = None
    """Folder of a rollout record (``RUN/rollouts``): train from it, without engines."""
    deterministic: bool = False
    """Refuse kernels whose result may differ between two runs."""
    profile_steps: list[Positive] = Field(default_factory=list)
    """Steps whose updates are traced by torch's profiler, into ``RUN/profiles/step_N``; slows them."""
    profile_ranks: list[NonNegative] = Field(default_factory=lambda: [0])
    """Trainer ranks that write a trace."""


class CheckpointSettings(Section):
    """What is kept, and where a run starts."""

    save_interval: Positive | None = 10
    """Steps between commits; null: none is ever made, also not at the end, so a resume starts from nothing.
    For measurements of models whose commits no disk here would hold."""
    keep: Positive = 2
    """Newest commits kept."""
    keep_every: Positive | None = None
    """Commits of steps divisible by it are kept for good."""
    load: str | None = None
    """Commit folder, or run directory, whose weights and optimiser a new run starts from."""
    save_timeout_s: Seconds = 1800.0
    """A save that takes longer is abandoned, loudly."""
    spare_host_memory: bool = False
    """Where trainers sleep: write commits from the memory they sleep in, not from a copy of their own.  The
    next sync waits for the write to end."""


class EvaluationSettings(Section):
    """Evaluation every k steps."""

    interval: NonNegative = 0
    """Steps between evaluations; 0: never, but once in a run of ``train.steps: 0``."""
    at_start: bool = True
    """Also before the first step."""
    splits: dict[str, list[str]] = Field(default_factory=dict)
    """Environment key to the splits to evaluate on; the environment need not train."""
    num_samples: Positive | None = None
    """Tasks a split; null: all."""
    n_samples: Positive = 1
    """Rollouts a task."""
    sampling: SamplingSettings = SamplingSettings()


class WandbSettings(Section):
    """Weights & Biases; offline without a key, and never able to stop a run."""

    enabled: bool = True
    project: Name = "orhpc"
    entity: Name | None = None
    group: Name | None = None
    tags: list[str] = Field(default_factory=list)


class Config(Section):
    """A whole run."""

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    precision: Precision = "bf16"
    """``bf16``: nothing is quantised, engines and trainers compute in ``model.dtype``; ``fp8-rollout``:
    engines hold block-wise e4m3 weights (128 x 128), quantised at every weight sync; ``fp8``: the
    trainer's layers compute with the same blocks too (TransformerEngine).  Routers, norms, embeddings
    and the head stay as they are."""
    placement: PlacementSettings = PlacementSettings()
    engine: EngineSettings = EngineSettings()
    rollout: RolloutSettings = RolloutSettings()
    environments: Annotated[dict[str, EnvironmentSettings], Field(default_factory=dict)]
    secrets: dict[str, str | None] = Field(default_factory=dict)
    """Secrets for all environments; an environment's own come first."""
    train: TrainSettings = TrainSettings()
    megatron: MegatronSettings = MegatronSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    alarms: AlarmSettings = AlarmSettings()
    wandb: WandbSettings = WandbSettings()
    slurm: SlurmSettings = SlurmSettings()

    @property
    def data_ranks(self) -> int:
        """How many ways the trainer divides a batch: ranks that share micro-batches count once."""
        ranks = self.placement.trainer_ranks
        return self.megatron.data_ranks(ranks) if self.train.backend == "megatron" else ranks

    @property
    def ranks_per_sequence(self) -> int:
        """Trainer ranks that share each sequence, and with it the token budget of a micro-batch."""
        return self.megatron.cp if self.train.backend == "megatron" else 1

    @property
    def routes_wanted(self) -> bool:
        """Whether trainers fetch expert routes: to replay them, or to count where they would differ."""
        return self.train.routing_replay or (
            self.rollout.record_routes and self.train.replay_rollouts is None
        )

    @property
    def secret_sources(self) -> list[dict[str, str | None]]:
        """Where all secrets of the run come from: those of all environments, and each one's own."""
        return [self.secrets, *(e.secrets for e in self.environments.values())]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for problem in _contradictions(self):
            raise ValueError(problem)
        check_secret_sources(self.secrets)
        return self


def _contradictions(c: Config) -> list[str]:
    """Everything that no single field can know to be wrong."""
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
    if c.train.routing_replay and not (c.rollout.record_routes or c.train.replay_rollouts):
        problems.append("train.routing_replay: needs rollout.record_routes: true")
    if c.engine.backend == "cpu" and c.engine.tp != 1:
        problems.append(f"engine.tp: the cpu engine is one process, so 1, not {c.engine.tp}")
    if c.engine.router and c.rollout.record_routes:
        problems.append("engine.router: sglang-router drops the expert routes of rollout.record_routes")
    if c.engine.backend == "cpu" and c.placement.device == "cuda":
        problems.append("engine.backend: cpu needs placement.device: cpu")
    if c.placement.rollout_devices % c.engine.tp:
        problems.append(
            f"engine.tp: {c.placement.rollout_devices} devices cannot be shared out to engines "
            f"of {c.engine.tp}"
        )
    if c.placement.shared_devices % c.engine.tp:
        problems.append(
            f"engine.tp: engines of {c.engine.tp} would lie half on the {c.placement.shared_devices} "
            "devices that are shared with trainers"
        )
    if c.engine.sync == "ipc" and c.placement.shared_devices < c.placement.rollout_devices:
        problems.append("engine.sync: ipc needs every engine on the trainers' devices; use auto")
    if c.checkpoint.spare_host_memory and not c.placement.shared_devices:
        problems.append("checkpoint.spare_host_memory: no trainer sleeps with placement.mode: split")
    if c.engine.sync == "broadcast" and c.placement.shared_devices and c.placement.device == "cuda":
        problems.append("engine.sync: broadcast cannot reach engines on the trainers' devices; use auto")
    if any(rank >= c.placement.trainer_ranks for rank in c.train.profile_ranks):
        problems.append(f"train.profile_ranks: ranks are 0 to {c.placement.trainer_ranks - 1}")
    if c.train.backend == "megatron":
        problems += c.megatron.problems(c.placement.trainer_ranks)
        problems += c.megatron.moment_problems(c.train.adam_beta2, c.model.dtype)
    elif c.megatron != MegatronSettings():
        problems.append("megatron: has settings, but train.backend is not megatron")
    problems += precision_problems(c)
    if c.engine.deterministic and c.evaluation.sampling.min_p:
        problems.append("evaluation.sampling.min_p: SGLang samples none with engine.deterministic")
    return problems


def _source_problems(c: Config) -> list[str]:
    """What is wrong with where tasks come from."""
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
    for name, settings in c.environments.items():
        own = settings.over(c.rollout)
        if own.max_total_tokens > c.rollout.max_total_tokens:
            problems.append(f"environments.{name}.max_total_tokens: is above rollout.max_total_tokens")
        if own.max_response_tokens >= own.max_total_tokens:
            problems.append(f"environments.{name}: max_response_tokens must be below max_total_tokens")
        if settings.replicas is not None and settings.serve is None:
            problems.append(f"environments.{name}.replicas: the job does not serve it (serve)")
        elif (settings.replicas or 0) > c.rollout.workers_per_node:
            problems.append(
                f"environments.{name}.replicas: {settings.replicas} are more than the "
                f"{c.rollout.workers_per_node} rollout.workers_per_node, each of which keeps to one server"
            )
        if not settings.trains and name not in c.evaluation.splits:
            unused = "trains nothing (splits, weight), and evaluation.splits does not name it"
            problems.append(f"environments.{name}: {unused}")
    if c.train.steps and not replays and not any(e.trains for e in c.environments.values()):
        problems.append("environments: all are for evaluation only; train.steps: 0 evaluates")
    return problems
