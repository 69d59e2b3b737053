"""The metrics of a step and of an evaluation: what each means, its unit, and its name in other systems.

``events.jsonl`` has the plain names; trackers add the section (``reward/reward_mean``).  A metric whose name
ends with ``/NAME`` is that of one environment, and has the meaning of the name before the slash.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    section: str
    """Group of metrics in a tracker."""
    meaning: str
    unit: str = ""
    verl: str = ""
    """Name of the same number in verl; empty: it has none."""
    trl: str = ""
    """Name of the same number in TRL's GRPOTrainer; empty: it has none."""
    slime: str = ""
    """Name of the same number in slime and its fork miles; empty: they have none."""


METRICS: dict[str, Metric] = {
    # --- rewards
    "reward_mean": Metric(
        "reward",
        "mean reward of trained rollouts",
        "",
        "critic/rewards/mean",
        "reward",
        slime="rollout/raw_reward",
    ),
    "reward_std": Metric("reward", "standard deviation of rewards, all groups", "", "", "reward_std"),
    "overlong_penalty_mean": Metric("reward", "mean of what algorithm.overlong subtracts from rewards"),
    "success_rate": Metric("reward", "fraction of rollouts with a reward above 0"),
    "equal_reward_groups": Metric(
        "reward",
        "fraction of prompt groups whose rewards are all equal; where algorithm.advantage compares within "
        "groups, they train nothing",
        "",
        "",
        "frac_reward_zero_std",
    ),
    # --- rollouts
    "response_length_mean": Metric(
        "rollout",
        "mean number of sampled tokens of a rollout",
        "tokens",
        "response_length/mean",
        "completions/mean_length",
        slime="rollout/response_len/mean",
    ),
    "response_length_max": Metric(
        "rollout",
        "largest number of sampled tokens",
        "tokens",
        "response_length/max",
        "completions/max_length",
        slime="rollout/response_len/max",
    ),
    "response_tokens": Metric("rollout", "sampled tokens of the step's trained rollouts", "tokens"),
    "total_tokens": Metric(
        "rollout", "tokens of trained rollouts, prompts included", "tokens", "perf/total_num_tokens"
    ),
    "turns_mean": Metric("rollout", "mean number of assistant turns", "", "num_turns/mean"),
    "tool_calls_mean": Metric("rollout", "mean number of tool calls", "", "", "tools/call_frequency"),
    "malformed_calls": Metric("rollout", "tool calls that could not be parsed", "per step"),
    "tool_errors": Metric("rollout", "tool calls that raised; the model sees an error", "per step"),
    "truncated": Metric(
        "rollout",
        "fraction of rollouts that ended at a token limit",
        "",
        "response_length/clip_ratio",
        "completions/clipped_ratio",
        slime="rollout/truncated_ratio",
    ),
    "terminal": Metric("rollout", "fraction of rollouts that the environment ended"),
    "groups": Metric("rollout", "prompt groups of the step", "per step"),
    "staleness_mean": Metric("rollout", "mean age of the oldest token of a rollout", "policy versions"),
    "stale_tokens": Metric("rollout", "fraction of sampled tokens older than rollout.max_staleness"),
    "carried_tokens": Metric(
        "rollout",
        "sampled tokens of trained rollouts from before the step's policy was published",
        "tokens",
    ),
    "carried_groups": Metric(
        "rollout", "prompt groups that were started and are left to the next steps", "per step"
    ),
    "failed_rollouts": Metric("rollout", "rollouts that failed and have no reward", "per step"),
    "retried_rollouts": Metric("rollout", "rollouts that were repeated in a new session", "per step"),
    "replayed_rollouts": Metric(
        "rollout", "rollouts that went on after a stop, whose tool calls were repeated", "per step"
    ),
    "replay_mismatches": Metric(
        "rollout", "rollouts generated again because repeated tool calls gave other answers", "per step"
    ),
    "failed_groups": Metric("rollout", "prompt groups dropped for failures", "per step"),
    "failed_share": Metric("rollout", "fraction of failed rollouts in the environment where it is highest"),
    "dropped_equal_rewards": Metric(
        "rollout", "prompt groups replaced because all their rewards were equal", "per step"
    ),
    "dropped_filtered": Metric("rollout", "prompt groups that rollout.filter refused", "per step"),
    "dropped_stale": Metric("rollout", "prompt groups replaced because they became too old", "per step"),
    "dropped_prompt_too_long": Metric(
        "rollout", "prompt groups replaced because their prompt is too long", "per step"
    ),
    "dropped_left_out": Metric(
        "rollout", "prompt groups of environments that rollout.failing_environment leaves out", "per step"
    ),
    "dropped_killed_workers": Metric(
        "rollout", "prompt groups left out because two workers died while they ran", "per step"
    ),
    "dropped_failed": Metric("rollout", "prompt groups replaced because of failed rollouts", "per step"),
    "rollout_seconds_mean": Metric("rollout", "mean duration of a rollout", "s"),
    "rollout_seconds_max": Metric("rollout", "duration of the longest rollout", "s"),
    "rollout_opening_seconds_mean": Metric("rollout", "of a rollout: opening its session", "s"),
    "rollout_engine_seconds_mean": Metric("rollout", "of a rollout: waiting for the engine", "s"),
    "rollout_tools_seconds_mean": Metric("rollout", "of a rollout: tool calls and verification", "s"),
    # --- the update
    "loss": Metric("train", "loss, mean over the step's optimizer steps", "", "", "loss", slime="train/loss"),
    "policy_loss": Metric(
        "train", "policy loss per sampled token", "", "actor/pg_loss", slime="train/pg_loss"
    ),
    "kl": Metric(
        "train",
        "KL divergence from the reference model",
        "nats per token",
        "actor/kl_loss",
        "kl",
        slime="train/kl_loss",
    ),
    "entropy": Metric(
        "train",
        "entropy of the policy",
        "nats per token",
        "actor/entropy",
        "entropy",
        slime="train/entropy_loss",
    ),
    "grad_norm": Metric(
        "train",
        "global gradient norm before clipping",
        "",
        "actor/grad_norm",
        "grad_norm",
        slime="train/grad_norm",
    ),
    "lr": Metric("train", "learning rate", "", "actor/lr", "learning_rate", slime="train/lr-pg_0"),
    "clip_fraction": Metric(
        "train",
        "fraction of tokens whose policy ratio was clipped",
        "",
        "actor/pg_clipfrac",
        "clip_ratio/region_mean",
        slime="train/pg_clipfrac",
    ),
    "value_loss": Metric("train", "value loss of the critic per trained token", "", "critic/vf_loss"),
    "explained_variance": Metric(
        "train",
        "fraction of the returns' variance that the critic's values explain, at the start of the step",
        "",
        "critic/vf_explained_var",
    ),
    "value_mean": Metric("train", "mean value at the start of the step", "", "critic/values/mean"),
    "return_mean": Metric("train", "mean return of a trained token", "", "critic/returns/mean"),
    "value_clip_fraction": Metric(
        "train", "fraction of tokens whose value was clipped", "", "critic/vf_clipfrac"
    ),
    "critic_grad_norm": Metric(
        "train", "global norm of the critic's gradient before clipping", "", "critic/grad_norm"
    ),
    "critic_lr": Metric("train", "learning rate of the critic", "", "critic/lr"),
    "ratio_mean": Metric("train", "mean policy ratio"),
    "ratio_max": Metric("train", "largest policy ratio"),
    "tokens": Metric("train", "sampled tokens that the update used", "tokens"),
    "packed_tokens": Metric("train", "tokens of all packed sequences, prompts included", "tokens"),
    "padding": Metric("train", "fraction of the packed slots that hold no token"),
    "optimiser_steps": Metric("train", "optimizer steps of the policy"),
    "skipped": Metric("train", "1 if there was nothing to train on, or the first update was not finite"),
    "non_finite": Metric("train", "1 if a NaN or infinite loss or gradient ended the step"),
    # --- engine against trainer
    "rollout_kl": Metric(
        "mismatch",
        "KL divergence of the engine's from the trainer's policy (k3 estimate)",
        "nats per token",
        "rollout_corr/k3_kl",
    ),
    "rollout_kl_k1": Metric("mismatch", "the same (k1 estimate)", "nats per token", "rollout_corr/kl"),
    "logprob_diff_mean": Metric(
        "mismatch",
        "mean absolute difference of the engine's and the trainer's log-probabilities",
        "nats",
        "",
        "sampling/sampling_logp_difference/mean",
        slime="train/train_rollout_logprob_abs_diff",
    ),
    "logprob_diff_max": Metric(
        "mismatch",
        "largest such difference",
        "nats",
        "",
        "sampling/sampling_logp_difference/max",
    ),
    "extreme_token_fraction": Metric(
        "mismatch", "fraction of tokens whose two probabilities differ by more than a factor of two"
    ),
    "effective_sample_size": Metric(
        "mismatch",
        "effective sample size of the importance weights, as a fraction of the tokens",
        "",
        "rollout_corr/rollout_is_eff_sample_size",
    ),
    "correction_weight_mean": Metric(
        "mismatch", "mean importance weight of algorithm.correction", "", "rollout_corr/rollout_is_mean"
    ),
    "corrected_away_fraction": Metric("mismatch", "fraction of tokens that algorithm.correction masked"),
    "router_mismatch_fraction": Metric("mismatch", "fraction of routing decisions unlike the engine's"),
    "token_mismatch_fraction": Metric("mismatch", "fraction of tokens with at least one such decision"),
    "expert_max_vio": Metric(
        "mismatch", "load of the busiest expert above an even share, mean over layers (arXiv:2408.15664)"
    ),
    "expert_rank_max_vio": Metric("mismatch", "the same for the device with the busiest experts"),
    "engine_check_diff": Metric(
        "mismatch", "mean difference of log-probabilities in the check at the start", "nats"
    ),
    # --- speed
    "seconds": Metric(
        "perf", "duration of the step", "s", "timing_s/step", "step_time", slime="perf/step_time"
    ),
    "tokens_per_s": Metric("perf", "sampled tokens per second of the step", "tokens/s"),
    "train_tokens_per_s": Metric("perf", "trained tokens per second of the update", "tokens/s"),
    "seconds_total": Metric("perf", "the trainers' part of the step", "s"),
    "seconds_fetch": Metric("perf", "of that: waiting for the step's arrays", "s"),
    "seconds_old_logprobs": Metric(
        "perf", "of that: log-probabilities at the start of the step", "s", "timing_s/old_log_prob"
    ),
    "seconds_reference": Metric("perf", "of that: the reference model", "s", "timing_s/ref"),
    "seconds_values": Metric("perf", "of that: the critic's values", "s", "timing_s/values"),
    "seconds_update_critic": Metric(
        "perf", "of that: forward and backward passes of the critic", "s", "timing_s/update_critic"
    ),
    "seconds_update": Metric("perf", "of that: forward and backward passes", "s", "timing_s/update_actor"),
    "seconds_optimiser": Metric("perf", "of that: optimizer steps", "s"),
    "seconds_trainer_copy": Metric(
        "perf", "waiting for the copy of the trainers' state (checkpoint.keep_in_memory)", "s"
    ),
    "seconds_trainer_sleep": Metric("perf", "offloading the trainers' state", "s"),
    "seconds_trainer_wake": Metric("perf", "loading it back", "s"),
    "seconds_engines_release": Metric("perf", "engines releasing their memory", "s"),
    "seconds_engines_resume": Metric("perf", "engines allocating it again", "s"),
    "sync_bytes": Metric("perf", "bytes of one copy of the weights that were sent", "bytes"),
    "sync_seconds_total": Metric("perf", "duration of the weight sync", "s"),
    "sync_seconds_gather": Metric("perf", "of that: gathering parameters", "s"),
    "sync_seconds_copy": Metric(
        "perf", "of gathering: waiting until the device has copied the parameters", "s"
    ),
    "sync_seconds_engines": Metric(
        "perf", "of that: waiting for engines, not counting time of gathering", "s"
    ),
    "sync_seconds_compare": Metric("perf", "of that: finding what has changed (engine.delta_sync)", "s"),
    "sync_seconds_free": Metric("perf", "of that: giving back the memory of buckets", "s"),
    "sync_seconds_join": Metric("perf", "of that: forming the group of trainers and engines", "s"),
    "sync_seconds_shed": Metric("perf", "freeing gradients, while the step is recorded", "s"),
    "slowest_rank": Metric("perf", "the trainer rank that computed a fixed amount of work slowest"),
    "slowest_rank_ratio": Metric("perf", "its time for that work, divided by the median of the other ranks"),
    "peer_copies_skipped": Metric(
        "perf", "copies of the state that were not sent to other nodes, as an older one was still on its way"
    ),
    "gpu_utilization": Metric(
        "perf", "fraction of the step in which a GPU ran a kernel (NVML), mean over all GPUs"
    ),
    "gpu_utilization_lowest": Metric("perf", "the same for the least busy GPU"),
    "gpu_utilization_rollout": Metric("perf", "the same during rollouts, mean over all GPUs"),
    "gpu_utilization_update": Metric("perf", "the same during the update"),
    "gpu_utilization_sync": Metric("perf", "the same during the weight sync"),
    "gpu_power_w": Metric("perf", "mean power of a GPU", "W"),
    # --- memory
    "gpu_memory_used_gb": Metric("memory", "largest memory in use on a GPU, by all processes", "GB"),
    "memory_trainer_peak_gb": Metric(
        "memory", "largest memory that a trainer rank allocated", "GB", "perf/max_memory_allocated_gb"
    ),
    "memory_trainer_freed_gb": Metric("memory", "device memory that offloading freed, all ranks", "GB"),
    "memory_trainer_moved_gb": Metric("memory", "moved to host memory by offloading, all ranks", "GB"),
    "memory_trainer_left_gb": Metric("memory", "device memory that stayed allocated, all ranks", "GB"),
    "memory_engines_left_gb": Metric("memory", "memory of others on these devices while trainers work", "GB"),
}


def metric_of(name: str) -> Metric | None:
    """Return the entry of a metric, of one environment too; None for one that is not in the table."""
    return METRICS.get(name) or METRICS.get(name.partition("/")[0])


def tracker_name(name: str) -> str:
    """Return a metric's name in a tracker: with its section, ``other`` for a metric without an entry."""
    found = metric_of(name)
    return f"{found.section if found is not None else 'other'}/{name}"
