"""The ``engine`` section: inference engines, their weights, and how evaluation samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from orhpc.config.base import Fraction, Positive, Seconds, Section

SYNC_BUCKETS = 2
"""Weight buckets that a trainer rank holds during a sync: engines load one while it gathers the next."""
OWN_OPTIONS: dict[str, str] = {
    "model": "model.path",
    "quantization": "precision",
    "model_path": "model.path",
    "host": "the node's address",
    "port": "a free port",
    "api_key": "the run's key",
    "admin_api_key": "the run's key",
    "config": "engine.extra",
    "custom_weight_loader": "engine.direct_loading",
    "max_running_requests": "engine.max_running",
    "pp_max_micro_batch_size": "engine.max_running",
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
"""Options of SGLang that ``engine.extra`` may not set, and the setting that determines each."""
PLACES_OF_EXPERTS: dict[str, tuple[Any, ...]] = {
    "enable_eplb": (False,),
    "ep_num_redundant_experts": (0,),
    "init_expert_location": ("trivial",),
    "moe_dp_size": (1,),
    "moe_data_parallel_size": (1,),
    "dwdp_size": (1,),
    "attn_cp_size": (1,),
    "attention_context_parallel_size": (1,),
}
"""SGLang's options that decide which experts a rank holds, in any release, and values that change nothing."""
RETURNS_ROUTES: dict[str, tuple[Any, ...]] = {
    "enable_hierarchical_cache": (False,),  # entries come back to other places, without their routes
    "enable_two_batch_overlap": (False,),  # the second half of a batch overwrites the routes of the first
    "attn_cp_size": (1,),  # a rank records its part of a prompt only
    "attention_context_parallel_size": (1,),
    "moe_a2a_backend": ("none", "deepep", "deepep_v2"),  # others do not gather the ranks' routes
}
"""SGLang's options (0.5.16, 0.5.23) with which it returns other routes, and values with which it does not.

Read in ``srt/state_capturer``, whose cache has a place for each entry of the KV cache.
"""
FORGETS_ENTRIES: dict[str, tuple[Any, ...]] = {
    "hicache_storage_backend": ("none",),
    "enable_lmcache": (False,),
    "enable_flexkv": (False,),
    "radix_cache_backend": ("none",),
}
"""SGLang's options of KV caches that ``/flush_cache`` does not empty, and values that turn them off."""
KEEPS_PLACES: dict[str, tuple[Any, ...]] = {"enable_eplb": (False,), "elastic_ep_backend": ("none",)}
"""SGLang's options that move experts to other places while it serves, and values that turn them off."""
DRAFT_MODEL = ("speculative_draft_model_path", "speculative_draft_model")
"""SGLang's names of the option behind :attr:`SpeculativeSettings.draft_model`; the second is an alias."""
ALGORITHM = "speculative_algorithm"
WITHOUT_WEIGHTS = ("NGRAM",)
"""Speculative algorithms that draft without a model."""
WITH_ROUTES = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
"""Speculative algorithms with which SGLang (0.5.16, 0.5.23) records the routes of accepted tokens."""


class SpeculativeSettings(Section):
    """Speculative decoding, with the names of SGLang's options (``--speculative-...``)."""

    algorithm: str
    """``EAGLE``, ``EAGLE3``, ``NEXTN`` (the model's own MTP layers), ``NGRAM`` (no draft model) or
    ``STANDALONE``."""
    draft_model: str | None = None
    """Folder or hub name of the draft model. Null: the algorithm needs none."""
    num_steps: Positive = 3
    """Sequential draft steps per verification."""
    eagle_topk: Positive = 1
    """Candidate tokens kept per draft step."""
    num_draft_tokens: Positive = 4
    """Draft tokens verified in one forward pass."""


class EngineSettings(Section):
    """The inference engines."""

    backend: Literal["sglang", "cpu"] = "sglang"
    """``sglang``: SGLang servers. ``cpu``: orhpc's own server on transformers, which implements SGLang's
    protocol; for runs without a GPU."""
    tp: Positive = 1
    """Tensor-parallel size: GPUs per engine."""
    dp: Positive = 1
    """Data-parallel groups of attention within an engine (SGLang's DP attention); must divide ``tp``. More
    than 1 needs ``trusted_network``."""
    trusted_network: bool = False
    """Set it to true only if no other user and no other machine can connect to the job's nodes. With ``dp`` >
    1, SGLang's processes exchange pickled objects over TCP ports without authentication, so anyone who can
    connect to them can run code as you."""
    ep: Positive = 1
    """Expert-parallel size: GPUs over which a layer's experts are divided; must divide ``tp``."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """Fraction of GPU memory for weights and KV cache (SGLang's mem-fraction-static)."""
    max_running: Positive = 256
    """Maximum number of requests that one engine decodes concurrently."""
    context_length: Positive | None = None
    """Maximum context length, in tokens. Null: ``rollout.max_total_tokens``."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Data type of weights and activations. Null: ``model.dtype``."""
    power_of_two_scales: bool = False
    """With FP8 (``precision``): round block scales up to powers of two, as DeepGEMM's UE8M0 kernels
    require."""
    deterministic: bool = False
    """Use batch-invariant kernels, so that a generation depends only on prompt, weights and seed. Slower."""
    speculative: SpeculativeSettings | None = None
    """Speculative decoding: a mapping with ``algorithm`` and, optionally, ``draft_model``, ``num_steps``,
    ``eagle_topk`` and ``num_draft_tokens``. Null: off."""
    threads: Positive | None = None
    """CPU threads per engine, of SGLang per rank. Null: one per rank of SGLang, and an equal share of the
    machine's for an engine on the CPU."""
    start_timeout_s: Seconds = 1800.0
    """Timeout for the start of the engines, in seconds."""
    request_timeout_s: Seconds = 1800.0
    """Timeout of one generation, in seconds. A slower one is aborted and sent to another engine."""
    health_timeout_s: Seconds = 60.0
    """An engine that answers no health check for this long, in seconds, is killed and restarted. Other
    engines repeat its requests."""
    router: bool | None = None
    """Send the requests of all workers through sglang-router, which balances them by engine load. Null: only
    if it is installed, there are several SGLang engines, and ``rollout.record_routes`` is off (the router
    drops expert routes)."""
    sync: Literal["auto", "ipc", "broadcast", "disk"] = "auto"
    """How weights are sent from trainer to engines. ``ipc``: through shared memory, for engines on the
    trainer's devices. ``broadcast``: through a process group. ``disk``: through the run directory.
    ``auto``: ``ipc`` or ``broadcast``, by the devices of each engine (on CPUs ``broadcast`` if ``/dev/shm``
    is small, as in containers)."""
    sync_bucket_mb: Positive = 512
    """MiB of weights per transfer. A trainer rank holds two such buckets during a sync."""
    sync_timeout_s: Seconds = 600.0
    """Timeout of each transfer of a weight sync, in seconds. Trainers that need more than twice this for a
    bucket are restarted."""
    sync_own_experts: bool = False
    """Send each engine rank only the experts that it holds, for engines with ``ep`` > 1 on the trainer's
    devices (``train.backend: megatron``). With ``ep``, ``tp`` and ``megatron.ep`` equal, and no pipeline, no
    expert leaves its GPU. Off by default: on two GPUs it was equal bit for bit, and a sync took 0.72 of the
    time; on four all of Qwen3-30B-A3B is sent in 0.8 s; other layouts have been compared on CPUs only."""
    delta_sync: bool = False
    """Send engines with dedicated devices only the weights that have changed since the last sync. For slow
    networks: at the learning rates of reinforcement learning, few weights change in bf16. Engines hold the
    same bits as after a whole sync, with which ``check_weights`` compares them. The first two syncs after
    engines have joined are whole, and so is every bucket that an engine cannot change or of which most has
    changed. Trainer rank 0 keeps a copy of all weights in host memory."""
    check_weights: bool = False
    """After every weight sync, compare the engines' weights bit for bit with an export of the trainer's.
    Slow; for debugging."""
    direct_loading: bool = False
    """Copy weights straight into SGLang's parameters once two syncs have shown where SGLang puts them.
    Without it, SGLang loads one tensor after the other in every sync. A sync of eight layers of
    Qwen3-30B-A3B on one GPU took 0.43 of the time; the first two, which are recorded, take longer. The
    weights were equal bit for bit on two GPUs, and on one for 14 families of models. Off by default: in FP8
    it has not been run on GPUs.
    ``delta_sync`` turns it on."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further options of the engine, by its own names, with underscores or hyphens: ``attention_backend``."""

    @property
    def recovery_s(self) -> float:
        """How long all engines may take to start again and receive the weights; requests wait for as long."""
        return self.start_timeout_s + self.sync_timeout_s

    @property
    def records_loading(self) -> bool:
        """Whether SGLang's processes record and repeat how it loads weights."""
        return self.direct_loading or self.delta_sync

    def option(self, *names: str) -> Any:
        """Return the value in :attr:`extra` of the first of these options that is set, else None."""
        given = {name.replace("-", "_"): value for name, value in self.extra.items()}
        return next((given[name] for name in names if given.get(name) is not None), None)

    @property
    def draft_model(self) -> str | None:
        """Folder or hub name of a separate draft model, wherever it is set."""
        own = self.speculative.draft_model if self.speculative is not None else None
        return self.option(*DRAFT_MODEL) or own

    @property
    def separate_drafter(self) -> bool:
        """Whether a separate model drafts tokens, which weight syncs must leave unchanged."""
        return self.draft_model is not None

    @property
    def _algorithm(self) -> str | None:
        """The speculative algorithm, wherever it is set."""
        own = self.speculative.algorithm if self.speculative is not None else None
        algorithm = self.option(ALGORITHM) or own
        return None if algorithm is None else str(algorithm).upper()

    @property
    def drafts_with_weights(self) -> bool:
        """Whether tokens are drafted with weights that the trainer does not have."""
        return self.separate_drafter or (
            self._algorithm is not None and self._algorithm not in WITHOUT_WEIGHTS
        )

    @property
    def misplaces_routes(self) -> str | None:
        """The setting with which SGLang returns routes of other tokens, or of none; null: none.

        When it speculates with several candidates a step, it moves the accepted tokens' cache entries, but
        not their routes (``_finalize_accept_tree_path`` in ``srt/speculative/eagle_worker_common.py``).
        Workers of other algorithms drop the routes of a forward pass.
        """
        if (other := self._other_than(RETURNS_ROUTES)) is not None:
            return f"engine.extra.{other}"
        if self._algorithm in (None, "NONE"):
            return None
        if self._algorithm not in WITH_ROUTES:
            return f"speculative decoding by algorithm {self._algorithm}"
        own = self.speculative.eagle_topk if self.speculative is not None else None
        topk = self.option("speculative_eagle_topk") or own  # SGLang chooses by the model what is not set
        return None if topk == 1 else f"speculative decoding, eagle_topk {topk or 'not set'} instead of 1,"

    @model_validator(mode="after")
    def _one_drafter(self) -> Self:
        if self.speculative is not None:
            for name in (*DRAFT_MODEL, ALGORITHM):
                if self.option(name) is not None:
                    raise ValueError(f"extra.{name} and speculative: set one of the two")
        if not isinstance(self.option(*DRAFT_MODEL) or "", str):
            raise ValueError(
                f"extra.{DRAFT_MODEL[0]}: {self.option(*DRAFT_MODEL)!r} is no folder or hub name"
            )
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
            if (setting := OWN_OPTIONS.get(name.replace("-", "_"))) is not None:
                raise ValueError(f"extra.{name} is decided by {setting}")
            if name.replace("-", "_") == "mem_fraction_static" and not _is_fraction(self.extra[name]):
                raise ValueError(f"extra.{name}: {self.extra[name]!r} is not a number between 0 and 1")
        if self.delta_sync and self.sync in ("ipc", "disk"):
            raise ValueError(f"delta_sync: sync: {self.sync} broadcasts nothing; use auto or broadcast")
        if self.sync_own_experts and (problem := self._unknown_experts()) is not None:
            raise ValueError(f"sync_own_experts: {problem}")
        if self.records_loading and (moving := self._other_than(KEEPS_PLACES)):
            name = "delta_sync" if self.delta_sync else "direct_loading"
            raise ValueError(f"{name}: extra.{moving} moves experts from where their weights are copied to")
        if (kept := self._other_than(FORGETS_ENTRIES)) is not None:
            raise ValueError(f"extra.{kept} keeps entries of the KV cache that old weights have computed")
        if self.backend == "cpu":
            for name in ("power_of_two_scales", "deterministic", "speculative"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}: the cpu engine does not support it")
        return self

    def _other_than(self, allowed: Mapping[str, tuple[Any, ...]]) -> str | None:
        """The first of these options with another value than the allowed ones, as ``name=value``."""
        for name, values in allowed.items():
            if (value := self.option(name)) is not None and value not in values:
                return f"{name}={value}"
        return None

    def _unknown_experts(self) -> str | None:
        """Why it is not known which experts an engine rank holds, or why it does not matter."""
        if self.ep == 1:
            return "needs ep > 1: without it every engine rank holds parts of all experts"
        if self.sync in ("broadcast", "disk"):
            return f"sync: {self.sync} sends the same to all engine ranks"
        if (other := self._other_than(PLACES_OF_EXPERTS)) is not None:
            return f"extra.{other} gives engine ranks other experts than orhpc would send"
        backend = self.option("moe_a2a_backend")
        if self.ep != self.tp and (backend not in (None, "none") or self.option("enable_deepep_moe")):
            return (
                f"SGLang sets ep to tp with the all-to-all backend {backend or 'deepep'}: set ep: {self.tp}"
            )
        return None


def _is_fraction(value: object) -> bool:
    try:
        return isinstance(value, (str, int, float)) and 0 < float(value) < 1
    except ValueError:
        return False


class SamplingSettings(Section):
    """Sampling parameters of evaluation."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0: greedy decoding."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most probable tokens that have this probability together. 1: off."""
    top_k: int = -1
    """Sample from this many most probable tokens. -1: off."""
    min_p: Fraction = 0.0
    """Sample from tokens at least this many times as probable as the most probable one. 0: off."""
    max_response_tokens: Positive | None = None
    """Maximum number of tokens per generation call. Null: as in training."""
