"""The ``engine`` section: inference engines, their weights, and how evaluation samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from orhpc.config.base import Fraction, Positive, Seconds, Section

SYNC_BUCKETS = 2
"""Buckets of weights that a trainer rank holds during a sync: engines take one while it gathers the next."""
OWN_OPTIONS: dict[str, str] = {
    "model": "model.path",
    "quantization": "precision",
    "model_path": "model.path",
    "host": "the node's address",
    "port": "a free port",
    "api_key": "the run's key",
    "admin_api_key": "the run's key",
    "config": "engine.extra",
    "tp": "engine.tp",
    "tp_size": "engine.tp",
    "tensor_parallel_size": "engine.tp",
    "dp": "engine.dp",
    "dp_size": "engine.dp",
    "data_parallel_size": "engine.dp",
    "ep": "engine.ep",
    "ep_size": "engine.ep",
    "expert_parallel_size": "engine.ep",
    "nnodes": "engine.tp and placement",
    "node_rank": "engine.tp and placement",
    "dist_init_addr": "engine.tp and placement",
    "nccl_init_addr": "engine.tp and placement",
    "base_gpu_id": "placement",
    "pp": "engine.tp",
    "pp_size": "engine.tp",
    "pipeline_parallel_size": "engine.tp",
}
"""Options of SGLang that ``engine.extra`` may not set, and what decides them."""
DRAFT_MODEL = ("speculative_draft_model_path", "speculative_draft_model")
"""SGLang's names of the option that :attr:`SpeculativeSettings.draft_model` sets; the second is an alias."""
ALGORITHM = "speculative_algorithm"
WITHOUT_WEIGHTS = ("NGRAM",)
"""Algorithms that draft without a model."""


class SpeculativeSettings(Section):
    """Speculative decoding, by SGLang's names (``--speculative-...``)."""

    algorithm: str
    """``EAGLE``, ``EAGLE3``, ``NEXTN`` (the model's own MTP layers), ``NGRAM`` or ``STANDALONE``."""
    draft_model: str | None = None
    """Folder or hub name of the draft model; null where the model drafts by itself."""
    num_steps: Positive = 3
    """Tokens drafted one after another."""
    eagle_topk: Positive = 1
    """Branches a step."""
    num_draft_tokens: Positive = 4
    """Tokens verified together."""


class EngineSettings(Section):
    """The inference engines."""

    backend: Literal["sglang", "cpu"] = "sglang"
    """``cpu``: the transformers engine that speaks SGLang's protocol."""
    tp: Positive = 1
    """Tensor-parallel size: GPUs per engine."""
    dp: Positive = 1
    """Groups that attention is divided into within an engine (SGLang's DP attention); divides ``tp``.
    More than one needs ``trusted_network``."""
    trusted_network: bool = False
    """No other user and no other machine can connect to the nodes of the job.
    With ``dp`` > 1, SGLang's processes exchange pickled objects over TCP ports that ask for no key, so
    anyone who can connect to them can run code as you."""
    ep: Positive = 1
    """Devices that a layer's experts are divided over; divides ``tp``."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """Share of device memory for weights and KV cache (SGLang's mem-fraction-static)."""
    max_running: Positive = 256
    """Requests decoded together by one engine."""
    context_length: Positive | None = None
    """Longest context; null: ``rollout.max_total_tokens``."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Null: the model's."""
    power_of_two_scales: bool = False
    """With FP8 (``precision``): round block scales up to powers of two, as DeepGEMM's UE8M0 kernels
    want them."""
    deterministic: bool = False
    """Batch-invariant kernels: a generation is then a function of prompt, weights and seed; slower."""
    speculative: SpeculativeSettings | None = None
    """Speculative decoding; null: off."""
    threads: Positive | None = None
    """CPU threads of one engine; null shares out the machine's."""
    start_timeout_s: Seconds = 1800.0
    request_timeout_s: Seconds = 1800.0
    """A generation that takes longer is aborted and sent to another engine."""
    router: bool | None = None
    """Requests of all workers through sglang-router, which spreads them by the engines' load; null: where
    it is installed, SGLang engines are several and no expert routes are recorded (it drops those)."""
    sync: Literal["auto", "ipc", "broadcast", "disk"] = "auto"
    """How engines get the trainer's weights: ``ipc`` through memory that both map (same device),
    ``broadcast`` through a process group, ``disk`` through the run directory; ``auto`` is the first
    two, by where an engine lies (on CPUs ``broadcast`` where ``/dev/shm`` is small, as in containers)."""
    sync_bucket_mb: Positive = 512
    """MiB of weights that travel together; the trainer holds two such buckets during a sync."""
    sync_timeout_s: Seconds = 600.0
    """Deadline of every transfer of a sync."""
    check_weights: bool = False
    """After every sync, compare the engines' weights bit for bit with an export of the trainer's."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further options by the engine's own names: ``mem_fraction_static`` or ``mem-fraction-static``."""

    def option(self, *names: str) -> Any:
        """The value that :attr:`extra` gives the first of these options that it names; None: none of them."""
        given = {name.replace("-", "_"): value for name, value in self.extra.items()}
        return next((given[name] for name in names if given.get(name) is not None), None)

    @property
    def draft_model(self) -> str | None:
        """Folder or hub name of a separate draft model, wherever it is set."""
        own = self.speculative.draft_model if self.speculative is not None else None
        return self.option(*DRAFT_MODEL) or own

    @property
    def separate_drafter(self) -> bool:
        """Whether tokens are drafted by a separate model, which no weight sync may change."""
        return self.draft_model is not None

    @property
    def drafts_with_weights(self) -> bool:
        """Whether tokens are drafted by a model that the trainer has no weights for."""
        own = self.speculative.algorithm if self.speculative is not None else None
        algorithm = self.option(ALGORITHM) or own
        return self.separate_drafter or (
            algorithm is not None and str(algorithm).upper() not in WITHOUT_WEIGHTS
        )

    @model_validator(mode="after")
    def _one_drafter(self) -> Self:
        if self.speculative is not None:
            for name in (*DRAFT_MODEL, ALGORITHM):
                if self.option(name) is not None:
                    raise ValueError(f"extra.{name} and speculative: set one of the two")
        if self.separate_drafter and (self.sync == "disk" or self.check_weights):
            name = "sync: disk" if self.sync == "disk" else "check_weights"
            raise ValueError(f"{name} would load the policy into the draft model {self.draft_model} too")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in ("dp", "ep"):
            if self.tp % getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)} does not divide tp={self.tp}")
        if self.dp > 1 and not self.trusted_network:
            raise ValueError(
                f"dp={self.dp}: SGLang then listens on TCP ports where anyone who can connect can run code "
                "as you; set trusted_network: true where no other user can connect to the job's nodes"
            )
        for name in self.extra:
            if (said := OWN_OPTIONS.get(name.replace("-", "_"))) is not None:
                raise ValueError(f"extra.{name} is decided by {said}")
        if self.backend == "cpu":
            for name in ("power_of_two_scales", "deterministic", "speculative"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}: the cpu engine has no such thing")
        return self


class SamplingSettings(Section):
    """How evaluation samples."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1
    min_p: Fraction = 0.0
    max_response_tokens: Positive | None = None
    """Tokens a generation; null: as in training."""
