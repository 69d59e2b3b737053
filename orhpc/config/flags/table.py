"""The flags of slime, miles and OpenReward's ``run.sh``: the settings that they set here.

Flags that change nothing here and flags that are refused are in :mod:`orhpc.config.flags.others`.
"""

from __future__ import annotations

from orhpc.config.flags import conversions as by
from orhpc.config.flags import data
from orhpc.config.flags.flag import Flag, joint, sets, switch
from orhpc.config.flags.others import NO_EFFECT, REFUSED

_DEVICES = tuple(
    f"placement.{name}" for name in ("mode", "nodes", "devices_per_node", "trainer_devices", "engine_devices")
)
_BATCHES = ("train.global_batch_size", "train.steps_per_rollout")
_ADVANTAGE = ("algorithm.advantage", "algorithm.loss", "algorithm.normalise_advantage")
_TIS = (
    *("algorithm.use_tis", "algorithm.tis_clip", "algorithm.correction.mode", "algorithm.correction.level"),
    *("algorithm.correction.low", "algorithm.correction.high"),
)
_RECOMPUTE = ("train.gradient_checkpointing", "megatron.recompute", "megatron.recompute_modules")

_CLUSTER: tuple[Flag, ...] = (
    joint(
        "--colocate", _DEVICES, by.placement, "`placement.mode: colocated`.", arity="none",
        read=lambda c: c.placement.mode == "colocated",
    ),
    joint(
        "--actor-num-nodes", _DEVICES, by.placement, "Nodes of the trainers.",
        read=lambda c: c.placement.nodes,
    ),
    joint("--actor-nodes", _DEVICES, by.placement, "OpenReward's name of `--actor-num-nodes`."),
    joint(
        "--actor-num-gpus-per-node", _DEVICES, by.placement, "GPUs of the trainers on each of their nodes.",
        read=lambda c: c.placement.devices_per_node,
    ),
    joint("--actor-gpus", _DEVICES, by.placement, "OpenReward's name of `--actor-num-gpus-per-node`."),
    joint(
        "--rollout-num-gpus", _DEVICES, by.placement,
        "GPUs of the engines. Without `--colocate` they are added to the trainers': `placement.mode: split`.",
        read=lambda c: c.placement.rollout_devices,
    ),
    joint("--rollout-gpus", _DEVICES, by.placement, "OpenReward's name of `--rollout-num-gpus`."),
    joint("--num-gpus", _DEVICES, by.placement, "OpenReward's total, which trainers and engines share."),
    joint(
        "--num-gpus-per-node", _DEVICES, by.placement, "GPUs of one node, to divide all GPUs into nodes.",
        read=lambda c: c.placement.devices_per_node,
    ),
    sets("--rollout-num-gpus-per-engine", "engine.tp", "integer"),
    sets("--tp", "engine.tp", "integer", "OpenReward's GPUs per engine, not the trainer's parallelism."),
    sets("--train-backend", "train.backend", {"fsdp": "fsdp", "megatron": "megatron"}),
)  # fmt: skip

_MODEL: tuple[Flag, ...] = (
    sets("--hf-checkpoint", "model.path", "text"),
    sets("--model", "model.path", "text", "OpenReward's name of `--hf-checkpoint`."),
    switch("--bf16", {"model.dtype": "bfloat16"}),
    joint(
        "--save", ("run.root",), by.checkpoints,
        "The run directory is made in this folder; a repeated command resumes from it.",
        read=lambda c: c.run.root,
    ),
    joint(
        "--load", ("checkpoint.load",), by.checkpoints,
        "A commit or a run directory of orhpc to start from. The folder of `--save`, or one without "
        "weights, sets nothing: a run resumes from its own commits. Trained Megatron weights are refused.",
        read=lambda c: c.checkpoint.load,
    ),
    joint(
        "--ref-load", (), by.checkpoints,
        "Sets nothing: the KL penalty is against `model.path`. Other or trained weights are refused.",
    ),
    joint(
        "--megatron-ckpt", (), by.checkpoints,
        "Sets nothing: weights are read from the Hugging Face folder. Trained Megatron weights are refused.",
    ),
    sets("--save-interval", "checkpoint.save_interval", "integer"),
)  # fmt: skip

_ROLLOUT: tuple[Flag, ...] = (
    sets("--num-rollout", "train.steps", "integer"),
    sets("--task-data", "rollout.task_file", "text", "Such a file is written by `orhpc prepare-tasks` too."),
    joint(
        "--rollout-batch-size", ("rollout.batch_size", *_BATCHES), by.batches,
        "Prompts per step. `train.global_batch_size` follows unless it is given.",
        read=lambda c: c.rollout.batch_size,
    ),
    joint(
        "--n-samples-per-prompt", ("rollout.n_samples", *_BATCHES), by.batches,
        "Rollouts per prompt. `train.global_batch_size` follows unless it is given.",
        read=lambda c: c.rollout.n_samples,
    ),
    joint(
        "--n-samples", ("rollout.n_samples", *_BATCHES), by.batches,
        "OpenReward's name of `--n-samples-per-prompt`.",
    ),
    joint(
        "--global-batch-size", _BATCHES, by.batches,
        "Samples per optimizer step. `train.steps_per_rollout` follows unless it is given.",
        read=lambda c: c.train.global_batch_size,
    ),
    joint(
        "--num-steps-per-rollout", _BATCHES, by.batches, "Optimizer steps per training step.",
        read=lambda c: c.train.steps_per_rollout,
    ),
    joint(
        "--over-sampling-batch-size", ("rollout.oversample",), by.batches,
        "Prompts started per step, divided by those of a step. What is not used is generated again in the "
        "next step, or goes on then with `--partial-rollout`.",
        read=lambda c: round(c.rollout.oversample * c.rollout.batch_size),
    ),
    joint(
        "--partial-rollout", ("rollout.partial", "rollout.stale_tokens"), by.partial_rollouts,
        "Also `rollout.stale_tokens: train`, unless old tokens are masked.", arity="none",
    ),
    joint(
        "--mask-offpolicy-in-partial-rollout", ("rollout.stale_tokens",), by.partial_rollouts,
        "`mask`. Tokens of the policy before the newest are trained on here.", arity="none",
    ),
    sets("--rollout-max-response-len", "rollout.max_response_tokens", "integer", "Per generation call."),
    sets(
        "--max-response-len", "rollout.max_response_tokens", "integer",
        "OpenReward's name of `--rollout-max-response-len`.",
    ),
    sets(
        "--rollout-max-context-len", "rollout.max_total_tokens", "integer",
        "Prompt, answers and tool results together.",
    ),
    sets(
        "--max-total-len", "rollout.max_total_tokens", "integer",
        "OpenReward's name of `--rollout-max-context-len`.",
    ),
    sets("--rollout-temperature", "rollout.temperature", "number"),
    sets("--temperature", "rollout.temperature", "number", "OpenReward's name of `--rollout-temperature`."),
    sets("--rollout-top-p", "rollout.top_p", "number", "Only 1: the schema says why."),
    sets("--rollout-top-k", "rollout.top_k", "integer", "Only -1: the schema says why."),
    joint(
        "--dynamic-sampling-filter-path", ("rollout.filter",), by.group_filter,
        "`check_reward_nonzero_std` is `equal_rewards`; other functions are refused: theirs have another "
        "signature.",
    ),
    joint(
        "--custom-generate-function-path", ("rollout.custom_agent",), by.own_functions,
        "`module.function` is `slime:module:function`, which is called through an adapter.",
        read=lambda c: c.rollout.custom_agent,
    ),
    joint(
        "--custom-rm-path", ("rollout.custom_reward",), by.own_functions,
        "`module.function` is `slime:module:function`, which is called through an adapter.",
        read=lambda c: c.rollout.custom_reward,
    ),
    joint(
        "--group-rm", ("rollout.custom_reward",), by.own_functions,
        "`slime-group:module:function`: the function of `--custom-rm-path` gets a whole group.", arity="none",
        read=lambda c: str(c.rollout.custom_reward).startswith("slime-group:"),
    ),
    switch(
        "--use-rollout-routing-replay", {"train.routing_replay": True, "rollout.record_routes": True}
    ),
    sets("--seed", "run.seed", "integer", "There is one seed."),
    sets("--rollout-seed", "run.seed", "integer", "There is one seed."),
)  # fmt: skip

_FILES = ("environments", "evaluation.splits")
_DATA: tuple[Flag, ...] = (
    joint(
        "--prompt-data", _FILES, data.prompts,
        "A file of prompts (`.jsonl`, `.parquet`) or a dataset: `environments.prompts.data.path`. The config "
        "file may not have environments of its own. Needs `--label-key`.",
    ),
    joint("--input-key", _FILES, data.prompts, "`data.prompt`; without it `input`, as in slime."),
    joint("--label-key", _FILES, data.prompts, "`data.label`."),
    joint(
        "--rm-type", _FILES, data.prompts,
        "`math`, `deepscaler` and `dapo` are `data.verifier: math`; others are refused.",
    ),
    joint(
        "--eval-prompt-data", _FILES, data.prompts,
        "Pairs of name and path: environments for evaluation only, and `evaluation.splits`.", arity="many",
    ),
    joint("--eval-input-key", _FILES, data.prompts, "Without it, `--input-key`."),
    joint("--eval-label-key", _FILES, data.prompts, "Without it, `--label-key`."),
)  # fmt: skip

_ALGORITHM: tuple[Flag, ...] = (
    joint(
        "--advantage-estimator", _ADVANTAGE, by.advantages,
        "`grpo`, `gspo` and `cispo` set `algorithm.loss`; `reinforce_plus_plus` is `algorithm.advantage: "
        "batch`, with `_baseline` it is `group_then_batch`; `ppo` is `algorithm.advantage: ppo`.",
        read=lambda c: c.algorithm.loss if c.algorithm.advantage == "group" else c.algorithm.advantage,
    ),
    joint(
        "--normalize-advantages", _ADVANTAGE, by.advantages,
        "What `ppo` and `reinforce_plus_plus` do anyway; with other estimators it is refused.", arity="none",
        read=lambda c: c.algorithm.advantage in ("batch", "group_then_batch", "ppo"),
    ),
    joint(
        "--disable-grpo-std-normalization", _ADVANTAGE, by.advantages,
        "`algorithm.normalise_advantage: false`.", arity="none",
        read=lambda c: not c.algorithm.normalise_advantage,
    ),
    *(
        joint(
            name, (f"algorithm.critic.{setting}",), by.critic,
            f"`algorithm.critic.{setting}` with `--advantage-estimator ppo`; without it "
            + ("only 1 is accepted." if name in ("--gamma", "--lambd") else "it changes nothing."),
            read=lambda c, setting=setting: getattr(c.algorithm.critic, setting),
        )
        for name, setting in by.CRITIC.items()
    ),
    switch("--calculate-per-token-loss", {"algorithm.normalise_loss": "token"}),
    sets("--eps-clip", "algorithm.eps_clip", "number"),
    sets("--eps-clip-high", "algorithm.eps_clip_high", "number"),
    sets("--eps-clip-c", "algorithm.dual_clip", "number"),
    switch(
        "--use-kl-loss", {"algorithm.use_kl_loss": True},
        "Without `--kl-loss-coef` and `--kl-loss-type` the defaults here apply, 0.001 and `k3`; those of "
        "slime are 0 and `k1`.",
    ),
    sets("--kl-loss-coef", "algorithm.kl_coef", "number"),
    sets(
        "--kl-loss-type", "algorithm.kl_type",
        {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3_clamped"},
        "`low_var_kl` is `k3_clamped`.",
    ),
    sets("--entropy-coef", "algorithm.entropy_coef", "number"),
    joint(
        "--use-tis", _TIS, by.importance_weights,
        "With `--tis-clip-low` above 0 it is `algorithm.correction` with `mode: clip`.", arity="none",
        read=lambda c: c.algorithm.mismatch_correction.mode in ("truncate", "clip"),
    ),
    joint("--tis-clip", _TIS, by.importance_weights, "Needs `--use-tis`."),
    joint("--tis-clip-low", _TIS, by.importance_weights, "Needs `--use-tis`."),
)  # fmt: skip

_TRAINER: tuple[Flag, ...] = (
    sets("--lr", "train.lr", "number"),
    sets("--min-lr", "train.lr_min", "number"),
    sets(
        "--lr-decay-style", "train.lr_schedule",
        {"constant": "constant", "linear": "linear", "cosine": "cosine"},
    ),
    sets("--lr-warmup-iters", "train.lr_warmup_steps", "integer", "Optimizer steps."),
    sets("--weight-decay", "train.weight_decay", "number"),
    sets("--adam-beta1", "train.adam_beta1", "number"),
    sets("--adam-beta2", "train.adam_beta2", "number"),
    sets("--adam-eps", "train.adam_eps", "number"),
    sets("--clip-grad", "train.max_grad_norm", "number"),
    joint(
        "--use-dynamic-batch-size", ("train.dynamic_batch",), by.micro_batches, "The default here.",
        arity="none", read=lambda c: c.train.dynamic_batch,
    ),
    joint(
        "--micro-batch-size", ("train.micro_batch_size", "train.dynamic_batch"), by.micro_batches,
        "Also `train.dynamic_batch: false`, unless `--use-dynamic-batch-size` or `--max-tokens-per-gpu` is "
        "given.",
        read=lambda c: c.train.micro_batch_size,
    ),
    sets("--max-tokens-per-gpu", "train.max_tokens_per_gpu", "integer"),
    joint(
        "--log-probs-chunk-size", ("train.logprob_chunk_tokens",), by.logit_chunks,
        "-1 keeps the default here.", read=lambda c: c.train.logprob_chunk_tokens,
    ),
    joint(
        "--gradient-checkpointing", _RECOMPUTE, by.recompute, "The default here.", arity="none",
        read=lambda c: c.train.gradient_checkpointing,
    ),
    joint(
        "--recompute-granularity", _RECOMPUTE, by.recompute,
        "`full`: whole layers. `selective`: `megatron.recompute: selective`.",
        read=lambda c: c.megatron.recompute if c.train.gradient_checkpointing else None,
    ),
    joint(
        "--recompute-modules", _RECOMPUTE, by.recompute, "By megatron-core's names.", arity="many",
        read=lambda c: c.megatron.recompute_modules,
    ),
    joint(
        "--overlap-moe-expert-parallel-comm", ("megatron.overlap_moe_expert_parallel_comm",),
        by.overlapped_exchange, "Needs `megatron.ep` > 1.", arity="none",
        read=lambda c: c.megatron.overlap_moe_expert_parallel_comm,
    ),
    sets("--tensor-model-parallel-size", "megatron.tp", "integer", "More than 1 sets `train.backend`."),
    sets("--pipeline-model-parallel-size", "megatron.pp", "integer", "More than 1 sets `train.backend`."),
    sets("--context-parallel-size", "megatron.cp", "integer", "More than 1 sets `train.backend`."),
    sets("--expert-model-parallel-size", "megatron.ep", "integer", "More than 1 sets `train.backend`."),
    sets("--expert-tensor-parallel-size", "megatron.etp", "integer", "More than 1 sets `train.backend`."),
    sets("--num-virtual-stages-per-pipeline-rank", "megatron.vpp", "integer"),
    joint(
        "--optimizer-cpu-offload", ("megatron.offload_optimizer",), by.offloaded_optimizer,
        "The whole state, or the part of `--optimizer-offload-fraction`.", arity="none",
        read=lambda c: c.megatron.offload_optimizer > 0,
    ),
    joint(
        "--optimizer-offload-fraction", ("megatron.offload_optimizer",), by.offloaded_optimizer,
        "Needs `--optimizer-cpu-offload`.", read=lambda c: c.megatron.offload_optimizer,
    ),
    joint("--exp-avg-dtype", ("megatron.moments_dtype",), by.moment_type, "`fp32` or `bf16`, for both."),
    joint(
        "--exp-avg-sq-dtype", ("megatron.moments_dtype",), by.moment_type, "`fp32` or `bf16`, for both."
    ),
)  # fmt: skip

_ENGINE: tuple[Flag, ...] = (
    sets("--sglang-mem-fraction-static", "engine.memory_fraction", "number"),
    sets("--sglang-max-running-requests", "engine.max_running", "integer"),
    sets("--sglang-context-length", "engine.context_length", "integer"),
    sets("--sglang-dtype", "engine.dtype", {"bfloat16": "bfloat16", "float32": "float32"}),
    sets("--sglang-dp-size", "engine.dp", "integer", "More than 1 needs `engine.trusted_network`."),
    sets("--sglang-ep-size", "engine.ep", "integer"),
    sets("--sglang-expert-parallel-size", "engine.ep", "integer"),
    switch("--sglang-enable-deterministic-inference", {"engine.deterministic": True}),
    joint(
        "--update-weight-buffer-size", ("engine.sync_bucket_mb",), by.transfer_size, "Bytes to MiB.",
        read=lambda c: c.engine.sync_bucket_mb * 2**20,
    ),
    sets("--update-weight-mode", "engine.delta_sync", {"full": False, "delta": True}),
    switch("--check-weight-update-equal", {"engine.check_weights": True}),
    switch("--check-weights", {"engine.check_weights": True}, "orhpc's own flag."),
)  # fmt: skip

_RECORDS: tuple[Flag, ...] = (
    joint(
        "--eval-interval", ("evaluation.interval",), by.evaluation,
        "What is evaluated is `evaluation.splits`.", read=lambda c: c.evaluation.interval,
    ),
    joint(
        "--skip-eval-before-train", ("evaluation.at_start",), by.evaluation, "`evaluation.at_start: false`.",
        arity="none", read=lambda c: not c.evaluation.at_start,
    ),
    sets("--n-samples-per-eval-prompt", "evaluation.n_samples", "integer"),
    sets("--eval-temperature", "evaluation.sampling.temperature", "number"),
    sets("--eval-top-p", "evaluation.sampling.top_p", "number"),
    sets("--eval-top-k", "evaluation.sampling.top_k", "integer"),
    sets("--eval-max-response-len", "evaluation.sampling.max_response_tokens", "integer"),
    joint(
        "--use-wandb", ("wandb.enabled",), by.wandb_mode, "The default here.", arity="none",
        read=lambda c: c.wandb.enabled,
    ),
    joint(
        "--wandb-mode", ("wandb.enabled",), by.wandb_mode,
        "`disabled` is `wandb.enabled: false`. Without WANDB_API_KEY the run logs offline.",
    ),
    sets("--wandb-project", "wandb.project", "text"),
    sets("--wandb-team", "wandb.entity", "text"),
    sets("--wandb-group", "wandb.group", "text"),
    sets("--wandb-run-name", "run.name", "text", "A run has one name, here and in W&B."),
    sets("--wandb-run", "run.name", "text", "OpenReward's name of `--wandb-run-name`."),
)  # fmt: skip

SECTIONS: dict[str, tuple[Flag, ...]] = {
    "Machines": _CLUSTER,
    "Model and checkpoints": _MODEL,
    "Prompts": _DATA,
    "Rollouts": _ROLLOUT,
    "Algorithm": _ALGORITHM,
    "Trainer": _TRAINER,
    "Engines": _ENGINE,
    "Evaluation and W&B": _RECORDS,
    "Without effect": NO_EFFECT,
    "Refused": REFUSED,
}
"""All flags by the titles of the reference."""
FLAGS: dict[str, Flag] = {flag.name: flag for flags in SECTIONS.values() for flag in flags}
"""All flags by name."""
