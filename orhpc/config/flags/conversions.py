"""Conversions of flags that depend on each other: devices, batches, the loss, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orhpc.config.flags.flag import Given, Settings
from orhpc.errors import ConfigError

ACTOR_NODES = ("--actor-num-nodes", "--actor-nodes")
ACTOR_GPUS = ("--actor-num-gpus-per-node", "--actor-gpus")
ROLLOUT_GPUS = ("--rollout-num-gpus", "--rollout-gpus")
N_SAMPLES = ("--n-samples-per-prompt", "--n-samples")
MODEL = ("--hf-checkpoint", "--model")
TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file in a checkpoint folder: the iteration, or ``release`` after a conversion of a model."""


def placement(given: Given) -> Settings:
    """Nodes and devices.

    Theirs are counted for each role, ours for each node.  With ``--colocate`` or OpenReward's ``--num-gpus``
    both roles share all GPUs.  Else the GPUs of both roles are added up and divided into nodes of
    ``--num-gpus-per-node`` (default: those of ``--actor-num-gpus-per-node`` if trainers have several nodes,
    else 8, as in slime).
    """
    total = given.integer("--num-gpus")
    nodes = given.integer(*ACTOR_NODES) or 1
    per_node = given.integer(*ACTOR_GPUS)
    engines = given.integer(*ROLLOUT_GPUS)
    if total is not None:
        if per_node is not None or engines is not None:
            other = given.name_of(*(ACTOR_GPUS if per_node is not None else ROLLOUT_GPUS))
            raise ConfigError(f"--num-gpus shares all GPUs, and {other} divides them: give one of the two")
        per_node = _divided(total, nodes, "--num-gpus")
    if per_node is None:
        per_node = given.integer("--num-gpus-per-node") or given.count("placement.devices_per_node")
    shared = given.on("--colocate") or total is not None
    if not shared and engines is None:
        if given.current("placement.mode") != "colocated":
            raise ConfigError(f"{given.name_of(*ROLLOUT_GPUS)}: say how many GPUs generate, or --colocate")
        shared = True
    trainers = nodes * per_node
    if shared:
        if engines not in (None, trainers):
            raise ConfigError(
                f"--colocate with {given.name_of(*ROLLOUT_GPUS)} {engines}: engines share the trainers' "
                f"{trainers} GPUs; for a part of them write placement.mode=mixed, placement.trainer_devices "
                "and placement.engine_devices"
            )
        return {
            "placement.mode": "colocated", "placement.nodes": nodes, "placement.devices_per_node": per_node,
        }  # fmt: skip
    return _split(given, trainers, engines or 0, per_node if nodes > 1 else 8)


def _split(given: Given, trainers: int, engines: int, usual: int) -> Settings:
    if engines == 0:
        raise ConfigError(f"{given.name_of(*ROLLOUT_GPUS)} 0: orhpc starts its own engines; give them GPUs")
    devices = trainers + engines
    on_a_node = given.integer("--num-gpus-per-node") or usual
    nodes = -(-devices // on_a_node)
    return {
        "placement.mode": "split",
        "placement.nodes": nodes,
        "placement.devices_per_node": _divided(devices, nodes, "the GPUs of trainers and engines"),
        "placement.trainer_devices": trainers,
        "placement.engine_devices": engines,
    }


def _divided(devices: int, nodes: int, what: str) -> int:
    if devices % nodes:
        raise ConfigError(
            f"{what}: {devices} GPUs cannot be divided evenly among {nodes} nodes; write placement.nodes and "
            "placement.devices_per_node"
        )
    return devices // nodes


def batches(given: Given) -> Settings:
    """Groups per step, rollouts per group, samples per optimizer step and optimizer steps per step.

    What is not given follows from the others by the golden rule, as in slime and in OpenReward's ``run.sh``.
    """
    groups = given.integer("--rollout-batch-size")
    samples = given.integer(*N_SAMPLES)
    steps = given.integer("--num-steps-per-rollout")
    whole = given.integer("--global-batch-size")
    found: dict[str, Any] = {}
    if groups is not None:
        found["rollout.batch_size"] = groups
    if samples is not None:
        found["rollout.n_samples"] = samples
    rollouts = (groups or given.count("rollout.batch_size")) * (samples or given.count("rollout.n_samples"))
    if whole is None and "train.global_batch_size" not in given.overridden:
        steps = steps or given.count("train.steps_per_rollout")
        whole = _mini_batch(rollouts, steps)
    elif steps is None and whole and "train.steps_per_rollout" not in given.overridden:
        steps = _mini_batches(rollouts, whole)
    if whole is not None:
        found["train.global_batch_size"] = whole
    if steps is not None:
        found["train.steps_per_rollout"] = steps
    if (more := given.integer("--over-sampling-batch-size")) is not None:
        prompts = groups or given.count("rollout.batch_size")
        if more < prompts:
            raise ConfigError(f"--over-sampling-batch-size {more} is below the {prompts} of a step")
        found["rollout.oversample"] = more / prompts
    return found


def _mini_batch(rollouts: int, steps: int) -> int:
    if not steps or rollouts % steps:
        raise ConfigError(f"golden rule: {rollouts} rollouts cannot be divided into {steps} mini-batches")
    return rollouts // steps


def _mini_batches(rollouts: int, whole: int) -> int:
    if rollouts % whole:
        raise ConfigError(
            f"golden rule: --global-batch-size {whole} does not divide the {rollouts} rollouts of a step"
        )
    return rollouts // whole


ESTIMATORS: dict[str, Settings] = {
    "grpo": {"algorithm.advantage": "group", "algorithm.loss": "grpo"},
    "gspo": {"algorithm.advantage": "group", "algorithm.loss": "gspo"},
    "cispo": {"algorithm.advantage": "group", "algorithm.loss": "cispo"},
    "ppo": {"algorithm.advantage": "ppo", "algorithm.loss": "grpo"},
    "reinforce_plus_plus": {"algorithm.advantage": "batch", "algorithm.loss": "grpo"},
    "reinforce_plus_plus_baseline": {"algorithm.advantage": "group_then_batch", "algorithm.loss": "grpo"},
}


def advantages(given: Given) -> Settings:
    """The estimator, and how advantages are normalized."""
    name = given.text("--advantage-estimator") or "grpo"
    if name not in ESTIMATORS:
        raise ConfigError(f"--advantage-estimator: {name!r} is not one of {', '.join(ESTIMATORS)}")
    over_step = name == "ppo" or name.startswith("reinforce_plus_plus")
    found = dict(ESTIMATORS[name]) if "--advantage-estimator" in given.values else {}
    if given.on("--normalize-advantages") and not over_step:
        raise ConfigError(
            f"--normalize-advantages with --advantage-estimator {name}: write "
            "algorithm.advantage=group_then_batch, the mean of the group and then the deviation of the step"
        )
    if given.on("--disable-grpo-std-normalization"):
        if over_step:
            raise ConfigError(f"--disable-grpo-std-normalization: {name} has no deviation of a group")
        found["algorithm.normalise_advantage"] = False
    return found


CRITIC: dict[str, str] = {
    "--gamma": "gamma",
    "--lambd": "gae_lambda",
    "--value-clip": "value_clip",
    "--critic-lr": "lr",
    "--critic-lr-warmup-iters": "lr_warmup_steps",
    "--num-critic-only-steps": "warmup_steps",
}
"""Flags of slime's critic, and the settings of ``algorithm.critic``."""


def critic(given: Given) -> Settings:
    """The critic's settings with ``--advantage-estimator ppo``.

    Without it slime reads only the discounts, and rewards are not discounted here.
    """
    name = given.text("--advantage-estimator")
    found: dict[str, Any] = {}
    for flag, setting in CRITIC.items():
        if flag not in given.values:
            continue
        whole = flag in ("--critic-lr-warmup-iters", "--num-critic-only-steps")
        value = given.integer(flag) if whole else given.number(flag)
        if name == "ppo" or (name is None and given.current("algorithm.advantage") == "ppo"):
            found[f"algorithm.critic.{setting}"] = value
        elif flag in ("--gamma", "--lambd") and value != 1:
            raise ConfigError(f"{flag} {value:g}: rewards are only discounted with --advantage-estimator ppo")
    return found


def importance_weights(given: Given) -> Settings:
    """Truncated importance sampling; with a lower bound it is a clipped correction."""
    high, low = given.number("--tis-clip"), given.number("--tis-clip-low")
    if not given.on("--use-tis"):
        if (name := given.name_of("--tis-clip", "--tis-clip-low")) in given.values:
            raise ConfigError(f"{name} needs --use-tis")
        return {}
    if not low:
        return {"algorithm.use_tis": True} | ({} if high is None else {"algorithm.tis_clip": high})
    return {
        "algorithm.correction.mode": "clip",
        "algorithm.correction.level": "token",
        "algorithm.correction.low": low,
        "algorithm.correction.high": 2.0 if high is None else high,
    }


def micro_batches(given: Given) -> Settings:
    """Packed by tokens, or a fixed number of samples."""
    size = given.integer("--micro-batch-size")
    found: dict[str, Any] = {} if size is None else {"train.micro_batch_size": size}
    if given.on("--use-dynamic-batch-size"):
        found["train.dynamic_batch"] = True
    elif size is not None and given.text("--max-tokens-per-gpu") is None:
        found["train.dynamic_batch"] = False
    return found


def recompute(given: Given) -> Settings:
    """Activation recomputation, of whole layers or of modules."""
    granularity = given.text("--recompute-granularity")
    if granularity not in (None, "full", "selective"):
        raise ConfigError(f"--recompute-granularity: {granularity!r} is not one of full, selective")
    modules = given.texts("--recompute-modules")
    found: dict[str, Any] = {}
    if granularity is not None or given.on("--gradient-checkpointing"):
        found["train.gradient_checkpointing"] = True
    if granularity == "selective":
        found["megatron.recompute"] = "selective"
    if modules:
        found["megatron.recompute_modules"] = modules
    return found


def overlapped_exchange(given: Given) -> Settings:
    """Overlap the all-to-alls of experts with the computation of another micro-batch."""
    on = given.on("--overlap-moe-expert-parallel-comm")
    return {"megatron.overlap_moe_expert_parallel_comm": True} if on else {}


def offloaded_optimizer(given: Given) -> Settings:
    """The fraction of the optimizer state in host memory."""
    fraction = given.number("--optimizer-offload-fraction")
    if not given.on("--optimizer-cpu-offload"):
        if fraction is not None:
            raise ConfigError("--optimizer-offload-fraction needs --optimizer-cpu-offload")
        return {}
    return {"megatron.offload_optimizer": 1.0 if fraction is None else fraction}


def checkpoints(given: Given) -> Settings:
    """Where commits are written, and the one to start from.

    A run resumes from its own newest commit, so ``--load`` of the folder of ``--save`` changes nothing.
    A folder of converted weights, or without any, is not read: weights come from the model's folder.  Trained
    weights in Megatron's format cannot be read, so they are refused instead of started without.
    """
    save, load = given.text("--save"), given.text("--load")
    found: dict[str, Any] = {} if save is None else {"run.root": save}
    for name in ("--megatron-ckpt", "--ref-load", "--load"):
        folder = given.text(name)
        if folder is not None and (trained := _trained(Path(folder))):
            raise ConfigError(
                f"{name} {folder}: Megatron weights of iteration {trained}, which orhpc cannot read; convert "
                f"them to a Hugging Face folder and give that as {given.name_of(*MODEL)}"
            )
    reference = given.text("--ref-load")
    if reference is not None and (Path(reference) / "config.json").is_file():
        model = given.text(*MODEL) or str(given.current("model.path"))
        if not _same_folder(reference, model):
            raise ConfigError(
                f"--ref-load {reference}: the KL penalty is against model.path ({model}); leave it out"
            )
    if load is not None and not (save is not None and _same_folder(save, load)):
        folder = Path(load)
        if any((folder / inside).exists() for inside in ("manifest.json", "attempts")):
            found["checkpoint.load"] = load
        elif folder.is_dir() and any(folder.iterdir()) and not (folder / TRACKER).exists():
            raise ConfigError(
                f"--load {load}: neither a checkpoint nor a run directory of orhpc; a Hugging Face folder is "
                f"given as {given.name_of(*MODEL)}"
            )
    return found


def _same_folder(one: str, other: str) -> bool:
    return one == other or Path(one).resolve() == Path(other).resolve()


def _trained(folder: Path) -> str:
    """The iteration of a trained Megatron checkpoint; empty for converted weights, and without any."""
    try:
        text = (folder / TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return text if text.isdigit() and int(text) > 0 else ""


def wandb_mode(given: Given) -> Settings:
    """Whether W&B is used."""
    mode = given.text("--wandb-mode")
    if mode == "disabled" and given.on("--use-wandb"):
        raise ConfigError("--use-wandb and --wandb-mode disabled contradict each other")
    if mode == "offline":
        raise ConfigError(
            "--wandb-mode offline: leave it out and unset WANDB_API_KEY; orhpc then logs offline"
        )
    if mode not in (None, "online", "disabled"):
        raise ConfigError(f"--wandb-mode: {mode!r} is not one of online, offline, disabled")
    return {"wandb.enabled": mode != "disabled" and given.values.get("--use-wandb") is not False}


EQUAL_REWARDS = "rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


def group_filter(given: Given) -> Settings:
    """The filter of slime that drops groups with equal rewards; others have another signature."""
    name = given.text("--dynamic-sampling-filter-path") or ""
    if name.partition(".")[0] in ("slime", "miles") and name.partition(".")[2] == EQUAL_REWARDS:
        return {"rollout.filter": "equal_rewards"}
    raise ConfigError(
        f"--dynamic-sampling-filter-path {name}: write rollout.filter=package.module:function, a function of "
        "one orhpc.types.PromptGroup that returns whether to keep it"
    )


def partial_rollouts(given: Given) -> Settings:
    """Samples that a step has begun and not used go on in the next one; all their tokens are trained on, or
    the old ones are masked."""
    masked = given.on("--mask-offpolicy-in-partial-rollout")
    if not masked and not given.on("--partial-rollout"):
        return {}
    partial = {"rollout.partial": True} if given.on("--partial-rollout") else {}
    return partial | {"rollout.stale_tokens": "mask" if masked else "train"}


def own_functions(given: Given) -> Settings:
    """Functions with slime's signatures, called through an adapter."""
    found: dict[str, Any] = {}
    generate, reward = given.text("--custom-generate-function-path"), given.text("--custom-rm-path")
    if generate is not None:
        found["rollout.custom_agent"] = f"slime:{_reference('--custom-generate-function-path', generate)}"
    if reward is not None:
        prefix = "slime-group" if given.on("--group-rm") else "slime"
        found["rollout.custom_reward"] = f"{prefix}:{_reference('--custom-rm-path', reward)}"
    elif given.on("--group-rm"):
        raise ConfigError("--group-rm needs --custom-rm-path")
    return found


def _reference(name: str, path: str) -> str:
    """``package.module.function`` as ``package.module:function``; a colon in it is kept."""
    module, point, function = path.replace(":", ".").rpartition(".")
    if not (module and point and function) or "/" in path:
        raise ConfigError(f"{name}: {path!r} is not package.module.function")
    return f"{module}:{function}"


def evaluation(given: Given) -> Settings:
    """How often to evaluate; what on is the config's ``evaluation.splits``."""
    interval = given.integer("--eval-interval")
    found: dict[str, Any] = {} if interval is None else {"evaluation.interval": interval}
    if given.on("--skip-eval-before-train"):
        found["evaluation.at_start"] = False
    return found


def logit_chunks(given: Given) -> Settings:
    """Tokens whose logits are in memory at a time; -1, all of a micro-batch, is the default there."""
    size = given.integer("--log-probs-chunk-size")
    return {} if size == -1 else {"train.logprob_chunk_tokens": size}


def moment_type(given: Given) -> Settings:
    """The data type of Adam's moments, which is one for both."""
    words = {"fp32": "float32", "bf16": "bfloat16"}
    names = [n for n in ("--exp-avg-dtype", "--exp-avg-sq-dtype") if n in given.values]
    text = given.text(*names)
    if text not in words:
        raise ConfigError(f"{names[0]}: {text!r} is not one of {', '.join(words)}")
    return {"megatron.moments_dtype": words[text]}


def transfer_size(given: Given) -> Settings:
    """Bytes to MiB; at least one."""
    size = given.integer("--update-weight-buffer-size") or 0
    return {"engine.sync_bucket_mb": max(1, round(size / 2**20))}
