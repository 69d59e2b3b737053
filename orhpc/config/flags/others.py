"""Flags that set nothing: those without effect, and those that are refused with what to write instead."""

from __future__ import annotations

from orhpc.config.flags.flag import Flag, no_effect, only, refused

_SHAPE = "The model's `config.json` determines it."
_SHAPE_VALUES = (
    *(
        "num-layers",
        "hidden-size",
        "ffn-hidden-size",
        "num-attention-heads",
        "num-query-groups",
        "kv-channels",
    ),
    *("normalization", "norm-epsilon", "rotary-base", "rotary-percent", "rotary-scaling-factor", "rope-type"),
    *("position-embedding-type", "max-position-embeddings", "vocab-size", "padded-vocab-size", "num-experts"),
    *("make-vocab-size-divisible-by", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size"),
    *("moe-router-topk", "moe-router-score-function", "moe-layer-freq", "moe-router-num-groups"),
    *(
        "moe-router-group-topk",
        "moe-router-topk-scaling-factor",
        "q-lora-rank",
        "kv-lora-rank",
        "qk-head-dim",
    ),
    *("qk-pos-emb-head-dim", "v-head-dim", "mscale", "mscale-all-dim", "model-name", "seq-length"),
)
_SHAPE_SWITCHES = (
    *("swiglu", "group-query-attention", "use-rotary-position-embeddings", "disable-bias-linear"),
    *("add-qkv-bias", "qk-layernorm", "untie-embeddings-and-output-weights", "multi-latent-attention"),
    *("moe-router-pre-softmax", "moe-router-enable-expert-bias", "moe-shared-expert-gate"),
    *("apply-layernorm-1p", "attention-output-gate", "post-self-attn-layernorm", "post-mlp-layernorm"),
)

_SOME_LAYERS = "write megatron.recompute_layers, or with train.backend: fsdp train.recompute_layers"


def _named(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"--{name}" for name in names)


NO_EFFECT: tuple[Flag, ...] = (
    *no_effect("--model-args", why="The model's `config.json` has its shape."),
    *no_effect("--slime-path", "--megatron-path", why="Neither package is used from a folder."),
    *no_effect("--rollout-shuffle", why="Tasks are always shuffled, by `run.seed`.", arity="none"),
    *no_effect("--balance-data", why="Samples are always balanced over ranks.", arity="none"),
    *no_effect("--apply-chat-template", why="The chat format is always applied.", arity="none"),
    *no_effect("--get-mismatch-metrics", why="They are always measured.", arity="none"),
    *no_effect("--use-fault-tolerance", why="Engines are always watched and restarted.", arity="none"),
    *no_effect("--log-multi-turn", "--log-passrate", why="Both are in the report.", arity="none"),
    *no_effect(
        "--sequence-parallel", why="Always used with `megatron.tp` above 1, as in Megatron.", arity="none"
    ),
    *no_effect("--attention-softmax-in-fp32", why="Always so.", arity="none"),
    *no_effect(
        "--accumulate-allreduce-grads-in-fp32",
        why="The default, see `megatron.gradients_dtype`.",
        arity="none",
    ),
    *no_effect("--use-distributed-optimizer", why="The optimizer is always sharded.", arity="none"),
    *no_effect(
        *("--overlap-cpu-optimizer-d2h-h2d", "--use-precision-aware-optimizer", "--moe-grouped-gemm"),
        why="The trainer chooses it.",
        arity="none",
    ),
    *no_effect("--data-pad-size-multiplier", why="Sequences are packed without padding of this kind."),
    *no_effect("--disable-wandb-random-suffix", why="A run's name never has one.", arity="none"),
    only("--optimizer", ("adam",), "the optimizer is AdamW", "there is no other optimizer; leave it out"),
    only("--loss-type", ("policy_loss",), "it is the loss here", "orhpc trains with policy losses only"),
    only("--attention-dropout", ("0",), "there is no dropout", "orhpc trains without dropout; leave it out"),
    only("--hidden-dropout", ("0",), "there is no dropout", "orhpc trains without dropout; leave it out"),
    only(
        "--attention-backend", ("flash", "auto"), "the trainer chooses", "the trainer chooses; leave it out"
    ),
    only("--recompute-method", ("uniform",), "each layer is recomputed", _SOME_LAYERS),
    only("--recompute-num-layers", ("1",), "each layer is recomputed", _SOME_LAYERS),
    only("--moe-router-load-balancing-type", ("none",), "there is no auxiliary loss", "write none"),
    only("--moe-aux-loss-coeff", ("0",), "there is no auxiliary loss", "orhpc trains without one; write 0"),
    only("--moe-router-bias-update-rate", ("0",), "biases are constant", "expert biases stay; write 0"),
    only(
        "--kl-coef",
        ("0",),
        "rewards have no KL term",
        "write algorithm.use_kl_reward=true algorithm.kl_coef=VALUE",
    ),
    *no_effect(*_named(_SHAPE_VALUES), why=_SHAPE),
    *no_effect(*_named(_SHAPE_SWITCHES), why=_SHAPE, arity="none"),
)

_DATA = "use environments.NAME.data, or an environment of your own (docs, 'Your own reward, agent and data')"
_LOSS = "the losses are those of algorithm.loss, algorithm.normalise_loss and algorithm.correction"
_HOOK = "there is no such hook; use rollout.custom_agent, rollout.custom_reward or rollout.filter"

REFUSED: tuple[Flag, ...] = (
    *refused("--metadata-key", "--tool-key", "--eval-tool-key", instead=_DATA),
    *refused("--data-source-path", "--multimodal-keys", "--apply-chat-template-kwargs", instead=_DATA),
    *refused(
        *("--eval-config", "--eval-function-path"),
        instead="write evaluation.splits={NAME: [test]}, splits of an environment",
    ),
    *refused("--rm-url", instead="write a function that asks the server, and --custom-rm-path"),
    *refused("--reward-key", "--eval-reward-key", instead="return one number from the reward function"),
    *refused("--num-epoch", instead="write --num-rollout, the number of steps"),
    *refused("--rollout-function-path", instead="use --custom-generate-function-path, for one rollout"),
    *refused(
        *("--rollout-stop", "--rollout-stop-token-ids"),
        instead="the chat format's end-of-turn tokens stop a turn; a custom agent may add stop_token_ids",
        arity="many",
    ),
    *refused("--rollout-skip-special-tokens", instead="answers are kept as sampled", arity="none"),
    *refused("--rollout-max-prompt-len", "--eval-max-prompt-len", instead="write rollout.max_total_tokens"),
    *refused("--eval-max-context-len", instead="write rollout.max_total_tokens"),
    *refused("--eval-min-new-tokens", instead="leave it out"),
    *refused(
        *("--buffer-filter-path", "--rollout-sample-filter-path", "--rollout-all-samples-process-path"),
        *("--rollout-data-postprocess-path", "--custom-reward-post-process-path"),
        "--rollout-sample-hook-path",
        *("--custom-convert-samples-to-train-data-path", "--custom-rollout-log-function-path"),
        *("--custom-eval-rollout-log-function-path", "--custom-model-provider-path"),
        *_named(tuple(f"custom-megatron-{n}-path" for n in ("init", "before-log-prob-hook"))),
        "--custom-megatron-before-train-step-hook-path",
        instead=_HOOK,
    ),
    *refused("--custom-config-path", instead="read the file in your function"),
    *refused("--rollout-external-engine-addrs", instead="orhpc starts its own engines", arity="many"),
    *refused("--sglang-router-ip", "--sglang-router-port", instead="orhpc starts its own engines and router"),
    *refused(
        "--sglang-server-concurrency",
        instead="write engine.max_running, or rollout.max_concurrent of each rollout worker",
    ),
    *refused(
        "--custom-loss-function-path", "--custom-tis-function-path", "--custom-pg-loss-reducer-function-path",
        instead=_LOSS,
    ),
    *refused("--use-opsm", "--use-score-centering", "--use-unbiased-kl", instead=_LOSS, arity="none"),
    *refused("--opsm-delta", "--score-centering-top-k", "--pg-loss-type", instead=_LOSS),
    *refused("--custom-advantage-function-path", instead="write algorithm.advantage=package.module:function"),
    *refused(
        "--disable-rewards-normalization", "--disable-compute-advantages-and-returns",
        instead="write algorithm.advantage=package.module:function",
        arity="none",
    ),
    *refused(
        "--use-rollout-logprobs",
        instead="ratios are against the trainer's log-probabilities; write algorithm.use_tis=true",
        arity="none",
    ),
    *refused("--use-routing-replay", instead="write --use-rollout-routing-replay", arity="none"),
    *refused("--use-rollout-entropy", instead="entropy is a metric of each step; leave it out", arity="none"),
    *refused("--ref-update-interval", "--ref-ckpt-step", instead="the KL penalty is against model.path"),
    *refused("--use-opd", instead="orhpc has no distillation", arity="none"),
    *refused(
        *_named(("opd-type", "opd-kl-coef", "opd-teacher-load", "opd-teacher-ckpt-step")),
        instead="orhpc has no distillation",
    ),
    *refused("--mtp-num-layers", "--mtp-loss-scaling-factor", instead="orhpc does not train MTP layers"),
    *refused("--enable-mtp-training", instead="orhpc does not train MTP layers", arity="none"),
    *refused(
        "--critic-num-nodes", "--critic-num-gpus-per-node",
        instead="the critic is on the trainers' GPUs; leave it out",
    ),
    *refused(
        "--critic-load", "--critic-save",
        instead="the critic is a part of every commit; leave it out",
    ),
    *refused("--lr-decay-iters", instead="the rate decays until the last step, train.steps"),
    *refused("--lr-warmup-fraction", instead="write train.lr_warmup_steps, in optimizer steps"),
    *refused("--reset-optimizer-states", "--use-stateless-adam", instead="leave it out", arity="none"),
    *refused("--fp16", instead="write model.dtype=bfloat16 or float32", arity="none"),
    *refused("--num-layers-per-virtual-pipeline-stage", instead="write megatron.vpp"),
    *refused(
        "--decoder-last-pipeline-num-layers", "--decoder-first-pipeline-num-layers",
        instead="stages are divided evenly; choose megatron.pp and megatron.vpp",
    ),
    *refused("--moe-token-dispatcher-type", instead="write megatron.extra.moe_token_dispatcher_type"),
    *refused("--log-probs-max-tokens-per-gpu", instead="write train.max_tokens_per_gpu, the budget of both"),
    *refused("--balance-by-flops", "--allgather-cp", instead="leave it out: it is not there", arity="none"),
    *refused(
        "--freeze-params-name-list", "--only-train-params-name-list",
        instead="all parameters are trained", arity="many",
    ),
    *refused("--save-hf", instead="run orhpc export RUN"),
    *refused("--async-save", instead="see checkpoint.spare_host_memory; leave it out", arity="none"),
    *refused(
        "--no-save-optim", "--no-load-optim", "--no-load-rng", "--finetune",
        instead="a commit has weights and optimizer state; to start from weights alone, run orhpc export and "
        "give the folder as --hf-checkpoint",
        arity="none",
    ),
    *refused("--ckpt-step", "--start-rollout-id", instead="name the commit's folder in checkpoint.load"),
    *refused(
        "--offload", "--offload-rollout",
        instead="write --colocate: engines release their memory; for trainers see placement.offload",
        arity="none",
    ),
    *refused("--offload-train", instead="write --colocate placement.offload=always", arity="none"),
    *refused(
        "--no-offload-train", "--no-offload-rollout",
        instead="write placement.mode=split, with which nothing is offloaded; with --colocate trainers keep "
        "their state on the GPU if it fits (placement.offload)",
        arity="none",
    ),
    *refused("--update-weight-transport", instead="write engine.sync"),
    *refused("--update-weight-encoding", instead="leave it out: the smallest encoding is used"),
    *refused("--update-weight-disk-dir", instead="write engine.sync=disk, which uses the run directory"),
    *refused("--distributed-timeout-minutes", instead="write engine.sync_timeout_s"),
    *refused(
        *_named(tuple(f"rollout-health-check-{n}" for n in ("interval", "timeout", "first-wait"))),
        instead="write engine.request_timeout_s and engine.start_timeout_s",
    ),
    *refused("--train-env-vars", instead="export the variables where you type the command"),
    *refused("--wandb-key", instead="export WANDB_API_KEY: others can read a command line"),
    *refused("--wandb-host", "--wandb-dir", instead="export WANDB_BASE_URL or WANDB_DIR"),
    *refused("--wandb-run-id", instead="a run keeps its own; leave it out"),
    *refused("--use-tensorboard", instead="orhpc report RUN draws the metrics", arity="none"),
    *refused("--tb-project-name", "--tb-experiment-name", instead="orhpc report RUN draws the metrics"),
    *refused("--save-debug-rollout-data", instead="rollouts are always recorded; orhpc view RUN shows them"),
    *refused("--load-debug-rollout-data", instead="write train.replay_rollouts=RUN/rollouts"),
    *refused("--debug-rollout-only", instead="write train.steps=0, which evaluates once", arity="none"),
    *refused("--debug-train-only", instead="write train.replay_rollouts=RUN/rollouts", arity="none"),
    *refused("--dump-details", instead="rollouts and metrics are always recorded"),
)  # fmt: skip
