"""The schema of all settings of a run.

    config = load_config("configs/local.yaml", ["train.lr=1e-6"])

Values that depend on the machines (ranks, addresses, ports) are computed for each attempt by
:mod:`orhpc.plan.placement` and are not part of the config.  Every error in a config is a
:class:`~orhpc.errors.ConfigError` of one line that names the field.  This module imports neither torch
nor ray, because login nodes load it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from orhpc.config.alarms import AlarmSettings
from orhpc.config.algorithm import AlgorithmSettings
from orhpc.config.base import Name, NonNegative, Positive, Seconds, Section
from orhpc.config.contradictions import contradictions
from orhpc.config.engine import EngineSettings, SamplingSettings
from orhpc.config.environment import EnvironmentSettings, check_secret_sources
from orhpc.config.faults import FaultSettings
from orhpc.config.megatron import MegatronSettings
from orhpc.config.notify import NotifySettings
from orhpc.config.placement import PlacementSettings
from orhpc.config.precision import Precision
from orhpc.config.rollout import RolloutSettings
from orhpc.config.slurm import SlurmSettings
from orhpc.config.tracking import MlflowSettings, TensorboardSettings, TrackingSettings, WandbSettings
from orhpc.config.tuning import TuningSettings
from orhpc.process.access import Access


class RunSettings(Section):
    """Name, location and seed of the run."""

    name: Name | None = None
    """Name of the run and of its folder under ``root``. Null: the config's file name without ``.yaml``, so
    the same command resumes the same run."""
    root: str = "runs"
    """Folder that contains the run directories. It must be on a filesystem that all nodes share."""
    seed: NonNegative = 0
    """Random seed of the task order, of sampling, and of the initial weights of random models."""
    storage_wait_s: Seconds = 900.0
    """Seconds that a run waits when its filesystem is full or unavailable, before it ends to be requeued."""
    access: Access = "private"
    """Who may read the run directory. ``private``: only you. ``group``: also the group of ``root``, or your
    primary group if ``root`` has no setgid bit; keys stay private, and only you can write."""

    @field_validator("root")
    @classmethod
    def _not_expanded(cls, value: str) -> str:
        """Without this, a run would be written to a folder whose name is ``~`` or ``$SCRATCH``."""
        if re.search(r"^~|(^|/)\$[A-Za-z_{]", value):
            raise ValueError(f"{value!r}: ~ and variables are not expanded here: write the whole path")
        return value


class ModelSettings(Section):
    """The policy model."""

    path: str = "Qwen/Qwen3-4B"
    """A local Hugging Face folder, a hub name (``Organization/Name``), or ``bundled:NAME`` (``tiny``,
    ``tiny-moe``, ``smollm2-135m-instruct``). Hub models are downloaded once into ``HF_HOME``, which all nodes
    must share; gated models need ``HF_TOKEN``."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; null: ``main``. A run keeps using the commit
    that it started with."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of weights and activations in the forward pass. Master weights are always float32."""
    chat_format: Literal["auto", "chatml", "llama3", "llama-4", "harmony", "deepseek", "glm", "template"] = (
        "auto"
    )
    """How messages are converted to tokens, and tool calls are read. ``auto``: chosen from the control tokens
    of the vocabulary (``harmony`` is gpt-oss), otherwise ``template``, which is derived from the tokenizer's
    chat template (Gemma, Mistral, MiniMax-M2 and others)."""
    trust_remote_code: bool = False
    """Run Python code from the model folder. Set it only for models that you trust."""
    check: bool = True
    """At every start, compare log-probabilities on a few samples: those of the trainer and of CPU engines
    with the forward pass of transformers (models of up to 10 billion parameters), and those of every engine
    with the trainer's. The run does not start if they disagree. The log and the event ``ready`` list what was
    compared."""


class TrainSettings(Section):
    """The trainer and the optimizer."""

    backend: Literal["fsdp", "megatron"] = "fsdp"
    """``fsdp``: a transformers model, sharded over all ranks. ``megatron``: megatron-core, with the
    parallelism of the ``megatron`` section."""
    steps: NonNegative = 3000
    """Training steps of the run. 0: evaluate once (``evaluation.splits``) and do not train."""
    global_batch_size: Positive = 512
    """Samples per mini-batch, that is, per optimizer step. ``rollout.batch_size`` x ``rollout.n_samples``
    must equal ``global_batch_size`` x ``steps_per_rollout``."""
    steps_per_rollout: Positive = 1
    """Mini-batches (optimizer steps) per training step."""
    lr: Annotated[float, Field(ge=0)] = 1e-5
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up. ``linear`` and ``cosine`` decay to ``lr_min`` at the last step."""
    lr_warmup_steps: NonNegative = 0
    """Optimizer steps of linear warm-up from 0."""
    lr_min: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the last step, with ``linear`` and ``cosine``."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of AdamW, for matrices; not for biases and norms."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of AdamW's second moment."""
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon, added to the root of the second moment."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradient clipping: gradients are scaled down to at most this global norm."""
    max_tokens_per_gpu: Positive = 8192
    """Maximum number of packed tokens per micro-batch and rank. A longer sample gets its own
    micro-batch. Lower it if the trainer runs out of GPU memory."""
    budget_raise_after_steps: NonNegative = 50
    """When the trainer runs out of memory, the run goes on with half of ``max_tokens_per_gpu``. After this
    many steps without such a failure the double is tried again; if that fails, the number of steps until the
    next try doubles. 0: never."""
    dynamic_batch: bool = True
    """Pack samples into micro-batches of up to ``max_tokens_per_gpu``. False: ``micro_batch_size`` samples
    per micro-batch."""
    micro_batch_size: Positive = 1
    """Samples per micro-batch and rank if ``dynamic_batch`` is false."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass: less memory, more compute. ``auto``: with FSDP, of as few
    layers as the device's memory allows by the plan, with 5 % to spare; of all layers on CPUs, of mixtures of
    experts and of models that see images. With Megatron, ``megatron.recompute`` says what, unless this is
    false."""
    recompute_layers: Positive | None = None
    """How many decoder layers are recomputed with FSDP, the first ones. Null: all with
    ``gradient_checkpointing: true``, and as many as needed with ``auto``."""
    gather_once: bool | Literal["auto"] = "auto"
    """Gather weights once an update with FSDP, and reduce gradients once, instead of for every micro-batch:
    less communication and less work of the host, but each device holds all weights in ``model.dtype`` and all
    gradients in float32 until the update ends. ``auto``: if the device's memory allows it by the plan, with
    5 % to spare, once it is known what is recomputed; not on CPUs, for mixtures of experts and for models
    that see images."""
    compile: bool | None = None
    """Compile the decoder layers with ``torch.compile`` (FSDP only), which fuses norms, rotary positions and
    activation functions. The first start and update take about 25 s longer; later attempts reuse the compiled
    code. Null: on GPUs in half precision, unless ``deterministic``. Mixtures of experts, models that see
    images and models with their own code (``model.trust_remote_code``) are never compiled; the log says
    so."""
    freeze_vision: bool = False
    """Do not train the vision tower of a model that sees images; the decoder is trained in any case."""
    routing_replay: bool = False
    """Route every token to the experts that the engine chose for it (MoE models only). Needs
    ``rollout.record_routes``."""
    logprob_chunk_tokens: Positive = 8192
    """Maximum number of tokens whose logits are in memory at a time. A micro-batch with no more tokens keeps
    its logits for the backward pass; for a longer one they are recomputed chunk by chunk."""
    threads: Positive | None = None
    """CPU threads per trainer rank. Null: an equal share of the machine's."""
    replay_rollouts: str | None = None
    """Folder of recorded rollouts (``RUN/rollouts``) to train on, without engines. Null: generate
    rollouts."""
    deterministic: bool = False
    """Use only deterministic kernels; an operation without one is an error."""
    update_timeout_s: Seconds | None = None
    """Timeout of one update, in seconds. Then every rank's stack is written to ``attempts/NNN/stacks.log``,
    those that hang are named, and the trainers start again and repeat the step. Null: ten times the longest
    update so far, at least 300 s, and an hour for the first one after a start, which compiles kernels."""
    profile_steps: list[Positive] = Field(default_factory=list)
    """Steps whose update is traced by torch's profiler into ``RUN/profiles/step_N``. Tracing slows them
    down."""
    profile_ranks: list[NonNegative] = Field(default_factory=lambda: [0])
    """Trainer ranks that write a trace."""

    @field_validator("gradient_checkpointing", "gather_once", mode="wrap")
    @classmethod
    def _true_false_or_auto(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        """Name all values in one message: pydantic's has one for each type, under another setting's name."""
        try:
            return check(value)
        except ValidationError:
            raise ValueError(f"must be true, false or auto, not {repr(value)[:100]}") from None


class CheckpointSettings(Section):
    """Checkpoints (commits), and the checkpoint that a run starts from."""

    save_interval: Positive | None = 10
    """Steps between commits. Null: no commit is written, not even at the end, so a resume starts from the
    beginning; for benchmarks of models whose commits do not fit on disk."""
    keep: Positive = 2
    """Number of newest commits to keep; older ones are deleted."""
    keep_every: Positive | None = None
    """Commits of steps that are divisible by this number are never deleted. Null: only the newest are
    kept."""
    load: str | None = None
    """Commit folder, or run directory, whose weights and optimizer state a new run starts from; the learning
    rate's schedule begins. Null: the weights of ``model.path``."""
    save_timeout_s: Seconds = 1800.0
    """Seconds after which a commit is abandoned, with an error in the log."""
    spare_host_memory: bool = False
    """Write commits directly from the host memory that holds the offloaded trainer state, without a second
    copy. Saves host memory, but the next weight sync waits until the commit is written. Needs trainers and
    engines that share devices."""
    keep_in_memory: bool = True
    """Copy the trainers' state to shared memory of their nodes after every step, while the next rollouts are
    generated. When trainers, workers, engines or Ray fail and the nodes do not, the run continues in place
    from its last step instead of its last commit. Takes twice the memory of a commit; nodes that do not have
    it make no copies, and the run says so."""
    peer_copies: bool = True
    """Also send each node's copies of ``keep_in_memory`` to the memory of another node, while training
    continues, so that the loss of a node costs no step if the run continues on other nodes. Doubles the
    memory for copies; if a node does not have it, or a copy cannot be sent, the run says so and continues
    without. No effect on one node."""


class EvaluationSettings(Section):
    """Periodic evaluation."""

    interval: NonNegative = 0
    """Steps between evaluations. 0: no evaluation, except the one of a run with ``train.steps: 0``."""
    at_start: bool = True
    """Also evaluate before the first step."""
    splits: dict[str, list[str]] = Field(default_factory=dict)
    """For each environment, by name, the splits to evaluate on. It may be an environment that is not used for
    training."""
    num_samples: Positive | None = None
    """Tasks per split. Null: all."""
    n_samples: Positive = 1
    """Rollouts per task."""
    sampling: SamplingSettings = SamplingSettings()


class Config(Section):
    """A whole run."""

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    precision: Precision = "bf16"
    """``bf16``: no quantization, engines and trainers compute in ``model.dtype``. ``fp8-rollout``: engines
    hold block-wise e4m3 weights (128 x 128), quantized at every weight sync. ``fp8``: the trainer's layers
    also compute in block-wise FP8 (TransformerEngine). Routers, norms, embeddings and the head are never
    quantized."""
    placement: PlacementSettings = PlacementSettings()
    engine: EngineSettings = EngineSettings()
    rollout: RolloutSettings = RolloutSettings()
    environments: Annotated[dict[str, EnvironmentSettings], Field(default_factory=dict)]
    secrets: dict[str, str | None] = Field(default_factory=dict)
    """Secrets that all environments receive, as name and source (see ``environments``). A secret of the same
    name in an environment takes precedence."""
    train: TrainSettings = TrainSettings()
    megatron: MegatronSettings = MegatronSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    alarms: AlarmSettings = AlarmSettings()
    tracking: TrackingSettings = TrackingSettings()
    wandb: WandbSettings = WandbSettings()
    tensorboard: TensorboardSettings = TensorboardSettings()
    mlflow: MlflowSettings = MlflowSettings()
    notify: NotifySettings = NotifySettings()
    slurm: SlurmSettings = SlurmSettings()
    faults: FaultSettings = FaultSettings()
    tuning: TuningSettings = TuningSettings()

    @property
    def data_ranks(self) -> int:
        """Data-parallel size of the trainer: ranks that share micro-batches count once."""
        ranks = self.placement.trainer_ranks
        return self.megatron.data_ranks(ranks) if self.train.backend == "megatron" else ranks

    @property
    def ranks_per_sequence(self) -> int:
        """Trainer ranks that share each sequence, and therefore the token budget of a micro-batch."""
        return self.megatron.cp if self.train.backend == "megatron" else 1

    @property
    def policy_optimizer(self) -> TrainSettings:
        """Settings of the policy's optimizer: its schedule spans the steps after the critic's warm-up."""
        warmup = self.algorithm.critic.warmup_steps
        return self.train.model_copy(update={"steps": max(self.train.steps - warmup, 0)})

    @property
    def critic_optimizer(self) -> TrainSettings:
        """Settings of the critic's optimizer: those of ``train`` with the critic's learning rate."""
        critic = self.algorithm.critic
        schedule = {"lr": critic.lr, "lr_schedule": "constant", "lr_warmup_steps": critic.lr_warmup_steps}
        return self.train.model_copy(update=schedule)

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation follows a step; 0 is before the first."""
        wanted = self.evaluation
        if self.train.steps == 0:
            return step == 0
        if not wanted.interval or not wanted.splits or self.train.replay_rollouts is not None:
            return False
        return wanted.at_start if step == 0 else step % wanted.interval == 0 or step == self.train.steps

    @property
    def routes_wanted(self) -> bool:
        """Whether trainers fetch expert routes, to replay them or to count mismatches."""
        return self.train.routing_replay or (
            self.rollout.record_routes and self.train.replay_rollouts is None
        )

    @property
    def compiles_layers(self) -> bool:
        """Whether FSDP is to compile decoder layers that can be compiled: see ``train.compile``."""
        if self.train.compile is not None:
            return self.train.compile
        half = self.model.dtype != "float32"
        return half and self.placement.device == "cuda" and not self.train.deterministic

    @property
    def secret_sources(self) -> list[dict[str, str | None]]:
        """Sources of all secrets of the run: the shared ones, those of each environment, and its own."""
        return [self.secrets, *(e.secrets for e in self.environments.values()), self.own_secrets]

    @property
    def own_secrets(self) -> dict[str, str | None]:
        """Sources of the secrets that no environment receives, by setting."""
        sources = {"mlflow.token": self.mlflow.token, "notify.webhook": self.notify.webhook}
        return {name: source for name, source in sources.items() if source is not None}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for problem in contradictions(self):
            raise ValueError(problem)
        check_secret_sources(self.secrets)
        return self
