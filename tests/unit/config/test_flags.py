"""Flags of slime, miles and OpenReward: each sets settings that exist, or says in one line what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orhpc.config import Config
from orhpc.config.files import default_setting, load_config
from orhpc.config.flags import FLAGS, Flag, Kind
from orhpc.config.flags.conversions import CRITIC
from orhpc.errors import ConfigError
from orhpc.launch.command_line import split_command_line, without_flags

TINY = "configs/tiny.yaml"
WORDS = {
    "--train-backend": "megatron", "--lr-decay-style": "cosine", "--kl-loss-type": "low_var_kl",
    "--advantage-estimator": "gspo", "--recompute-granularity": "selective", "--sglang-dtype": "float32",
    "--wandb-mode": "disabled", "--exp-avg-dtype": "bf16", "--exp-avg-sq-dtype": "bf16",
    "--update-weight-mode": "delta",
    "--custom-generate-function-path": "my.module.generate", "--custom-rm-path": "my.module.rm",
    "--dynamic-sampling-filter-path":
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
}  # fmt: skip
COMPANIONS = {
    "--tis-clip": ["--use-tis"], "--tis-clip-low": ["--use-tis"],
    "--optimizer-offload-fraction": ["--optimizer-cpu-offload"],
    "--group-rm": ["--custom-rm-path", "my.rm"], "--normalize-advantages":
        ["--advantage-estimator", "reinforce_plus_plus"],
    "--rollout-num-gpus": ["--colocate"], "--rollout-gpus": ["--colocate"],
    "--over-sampling-batch-size": ["--rollout-batch-size", "2"],
    **{name: ["--advantage-estimator", "ppo"] for name in CRITIC},
}  # fmt: skip


def words_of(flag: Flag) -> list[str]:
    """A command line that uses the flag as it is meant."""
    if flag.settings[:1] == ("environments",):
        more = {"--prompt-data": "p.jsonl", "--label-key": "answer", "--rm-type": "math"}
        own = ["test", "t.jsonl"] if flag.arity == "many" else [more.pop(flag.name, "column")]
        return [flag.name, *own, *(word for pair in more.items() for word in pair)]
    if flag.arity == "none":
        return [flag.name, *COMPANIONS.get(flag.name, [])]
    return [flag.name, WORDS.get(flag.name, "2"), *COMPANIONS.get(flag.name, [])]


def overrides_of(*words: str, config: str = TINY) -> dict[str, str]:
    files = [] if "--prompt-data" in words or "--label-key" in words else [config]
    return dict(word.split("=", 1) for word in split_command_line([*files, *words])[1])


@pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS)
def test_every_flag_sets_settings_that_exist_or_gives_its_reason_in_one_line(flag: Flag) -> None:
    for setting in flag.settings:
        default_setting(setting)
    assert "\n" not in flag.note
    if flag.kind is Kind.REFUSED:
        with pytest.raises(ConfigError, match=flag.name) as caught:
            overrides_of(*words_of(flag))
        assert flag.note in str(caught.value) and "\n" not in str(caught.value)
    elif flag.kind is Kind.NO_EFFECT:
        assert flag.note
        if flag.convert is None:
            assert overrides_of(*words_of(flag)) == {}
    else:
        found = overrides_of(*words_of(flag))
        own = set(flag.settings)
        assert own & found.keys() or not own or flag.name == "--load"
        for setting in found:
            default_setting(setting)


def test_a_flag_as_slimes_documentation_shows_it_has_the_same_meaning(tmp_path: Path) -> None:
    path, words = split_command_line(
        [
            *("--hf-checkpoint", "bundled:tiny-moe", "--actor-num-nodes=2", "--actor-num-gpus-per-node", "8"),
            *("--rollout-num-gpus", "16", "--rollout-num-gpus-per-engine", "2", "--num-rollout", "7"),
            *("--rollout-batch-size", "64", "--n-samples-per-prompt", "8", "--global-batch-size", "256"),
            *("--advantage-estimator", "gspo", "--eps-clip-high", "0.28", "--use-kl-loss"),
            *("--kl-loss-coef", "0.01", "--kl-loss-type", "low_var_kl", "--lr", "1e-6", "--min-lr", "1e-7"),
            *(
                "--tensor-model-parallel-size",
                "2",
                "--expert-model-parallel-size",
                "8",
                "--optimizer",
                "adam",
            ),
            *("--recompute-granularity", "selective", "--recompute-modules", "core_attn", "moe_act"),
            *("--update-weight-buffer-size", str(3 << 29), "--over-sampling-batch-size", "96"),
            *("--use-tis", "--tis-clip", "3", "--sglang-attention-backend", "fa3", "--bf16"),
            *("--sglang-mem-fraction-static", "0.6", "--attention-dropout", "0.0", "--swiglu"),
            *("--dynamic-sampling-filter-path", WORDS["--dynamic-sampling-filter-path"]),
        ]
    )
    config = load_config(path, words)
    placement = config.placement
    assert (placement.mode, placement.nodes, placement.devices_per_node) == ("split", 4, 8)
    assert (placement.trainer_ranks, placement.rollout_devices, config.engine.tp) == (16, 16, 2)
    assert (config.train.steps, config.train.steps_per_rollout, config.rollout.oversample) == (7, 2, 1.5)
    algorithm = config.algorithm
    assert (algorithm.loss, algorithm.advantage, algorithm.kl_type) == ("gspo", "group", "k3_clamped")
    assert (algorithm.use_kl_loss, algorithm.kl_coef, algorithm.eps_clip_high) == (True, 0.01, 0.28)
    assert (algorithm.use_tis, algorithm.tis_clip) == (True, 3.0)
    assert (config.train.lr, config.train.lr_min, config.train.backend) == (1e-6, 1e-7, "megatron")
    assert (config.megatron.tp, config.megatron.ep) == (2, 8)
    assert config.megatron.recompute_modules == ["core_attn", "moe_act"]
    assert (config.engine.sync_bucket_mb, config.engine.memory_fraction) == (1536, 0.6)
    assert config.engine.extra == {"attention_backend": "fa3"}
    assert config.rollout.filter == "equal_rewards"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--rollout-batch-size", "8"), {"train.global_batch_size": "32"}),  # the other from the file
        (("--n-samples", "6", "--num-steps-per-rollout", "3"), {"train.global_batch_size": "8"}),
        (("--num-gpus", "4"), {"placement.mode": "colocated", "placement.devices_per_node": "4"}),
        (("--actor-gpus", "4", "--rollout-gpus", "4"), {"placement.nodes": "1", "placement.mode": "split"}),
        (("--use-tis", "--tis-clip-low", "0.5"), {"algorithm.correction.mode": "clip"}),
        (("--custom-rm-path", "a.b.c", "--group-rm"), {"rollout.custom_reward": "slime-group:a.b:c"}),
        (("--partial-rollout",), {"rollout.partial": "true", "rollout.stale_tokens": "train"}),
        (("--partial-rollout", "--mask-offpolicy-in-partial-rollout"), {"rollout.stale_tokens": "mask"}),
        (("--micro-batch-size", "2"), {"train.dynamic_batch": "false"}),
        (("--use-wandb=false", "--lr", "1", "--lr", "2"), {"train.lr": "2.0", "wandb.enabled": "false"}),
        (("--hf-checkpoint", "12"), {"model.path": '"12"'}),
        (("--lr", "1e-5", "train.lr=1e-5"), {"train.lr": "1e-05"}),
        (
            ("--advantage-estimator", "ppo", "--lambd", "0.95", "--num-critic-only-steps", "3"),
            {"algorithm.critic.gae_lambda": "0.95", "algorithm.critic.warmup_steps": "3"},
        ),
        (("algorithm.advantage=ppo", "--critic-lr", "2e-6"), {"algorithm.critic.lr": "2e-06"}),
    ],
)
def test_flags_are_converted_together(words: tuple[str, ...], wanted: dict[str, str]) -> None:
    found = overrides_of(*words)
    assert wanted.items() <= found.items()


def test_without_ppo_the_critic_s_flags_change_nothing() -> None:
    assert overrides_of("--value-clip", "0.2", "--gamma", "1.0", "--critic-lr", "1e-6") == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rolout-batch-size", "8"), r"unknown flag; did you mean --rollout-batch-size"),
        (("--lr",), r"--lr: a value is missing"),
        (("--lr", "--bf16"), r"--lr: a value is missing"),
        (("--lr", "fast"), r"--lr: 'fast' is not a number"),
        (("--colocate=perhaps",), r"--colocate=perhaps: it takes no value"),
        (("--kl-loss-type", "k9"), r"--kl-loss-type: 'k9' is not one of k1, k2, k3, low_var_kl"),
        (("--model", "a", "--hf-checkpoint", "b"), r"--model and --hf-checkpoint contradict each other"),
        (("--n-samples", "2", "--n-samples-per-prompt", "4"), r"contradict each other"),
        (("--lr", "1e-5", "train.lr=1e-6"), r"--lr and train\.lr=1e-6 contradict each other"),
        (
            ("--seed", "1", "--rollout-seed", "2"),
            r"--seed and --rollout-seed contradict each other: run.seed",
        ),
        (("--advantage-estimator", "vpo"), r"'vpo' is not one of grpo, .*ppo"),
        (("--gamma", "0.9"), r"--gamma 0.9: rewards are only discounted with --advantage-estimator ppo"),
        (("--num-critic-only-steps", "x", "--advantage-estimator", "ppo"), r"'x' is not an integer"),
        (("--critic-num-nodes", "1"), r"the critic is on the trainers' GPUs"),
        (("--optimizer", "sgd"), r"--optimizer sgd: there is no other optimizer"),
        (("--kl-coef", "0.1"), r"write algorithm.use_kl_reward=true"),
        (("--colocate", "--actor-num-gpus-per-node", "8", "--rollout-num-gpus", "4"), r"mixed"),
        (("--context-parallel-size", "2", "--train-backend", "fsdp"), r"needs --train-backend megatron"),
        (("--global-batch-size", "7"), r"golden rule: --global-batch-size 7 does not divide the 16"),
        (("--tis-clip", "2"), r"--tis-clip needs --use-tis"),
        (("--recompute-num-layers", "2"), r"or with train\.backend: fsdp train\.recompute_layers$"),
        (("--wandb-key", "x"), r"--wandb-key is not there: export WANDB_API_KEY"),
        (("--custom-rm-path", "no/path.py"), r"is not package\.module\.function"),
    ],
)
def test_what_cannot_be_meant_is_one_line(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        overrides_of(*words)
    assert "\n" not in str(caught.value)


def test_files_of_prompts_become_environments() -> None:
    words = ["--prompt-data", "d.jsonl", "--input-key", "question", "--label-key", "answer"]
    evaluated = ["--eval-prompt-data", "aime", "aime.jsonl", "--eval-input-key", "problem"]
    config = load_config(*split_command_line([*words, "--rm-type", "deepscaler", *evaluated]))
    assert list(config.environments) == ["prompts", "aime"]
    data, test = config.environments["prompts"].data, config.environments["aime"].data
    assert data is not None and test is not None
    assert (data.path, data.prompt, data.label, data.verifier) == ("d.jsonl", "question", "answer", "math")
    assert (test.path, test.prompt, test.label) == ("aime.jsonl", "problem", "answer")
    assert config.evaluation.splits == {"aime": ["train"]} and not config.environments["aime"].trains
    for more, message in (
        ([], "needs --rm-type math or --custom-rm-path"),
        (["--rm-type", "gpqa"], "'gpqa' is not one of math"),
        (["--rm-type", "math", TINY], "the config file has environments"),
        (["--rm-type", "math", "--eval-prompt-data", "a", "b.jsonl", "a", "c.jsonl"], "a is named twice"),
        (["--rm-type", "math", "--eval-prompt-data", "prompts", "b.jsonl"], "name of the training data"),
        (["--rm-type", "math", "--eval-prompt-data", "b.jsonl"], "give pairs, NAME PATH"),
    ):
        with pytest.raises(ConfigError, match=message):
            split_command_line([*words, *more])


@pytest.mark.parametrize(
    ("override", "flags"),
    [
        ("rollout.batch_size=abc", ("--n-samples", "4")),
        ("rollout.batch_size=0", ("--over-sampling-batch-size", "4")),
        ("rollout.n_samples=true", ("--rollout-batch-size", "4")),
        ("train.steps_per_rollout=[1]", ("--n-samples", "4")),
        ("placement.devices_per_node=.inf", ("--colocate",)),
    ],
)
def test_a_flag_on_top_of_a_wrong_setting_names_the_setting(override: str, flags: tuple[str, ...]) -> None:
    setting = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{setting}: .* is not a positive integer"):
        without_flags([TINY, override, *flags])


def test_a_switch_that_is_off_sets_nothing(tmp_path: Path) -> None:
    for name in ("--partial-rollout", "--mask-offpolicy-in-partial-rollout"):
        assert overrides_of(f"{name}=false") == {}
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="the KL penalty is against model"):
        without_flags([TINY, "model.path=5", "--ref-load", str(tmp_path)])


def test_a_short_option_keeps_its_value() -> None:
    own = {"-o": True, "-f": False}
    assert without_flags(["-o", "x.yaml", "-f", "tiny.yaml", "--lr", "0.5"], own) == [
        "-ox.yaml", "-f", "tiny.yaml", "train.lr=0.5",
    ]  # fmt: skip


def test_a_commands_own_options_stay_and_may_not_contradict_flags() -> None:
    own = {"--nodes": True, "--local": False}
    rest = without_flags(["--nodes", "2", TINY, "--local", "--lr=1"], own)
    assert rest == ["--nodes=2", TINY, "--local", "train.lr=1.0"]
    with pytest.raises(ConfigError, match=r"--actor-num-nodes and placement\.nodes=2 contradict"):
        without_flags([TINY, "--nodes", "2", "--actor-num-nodes", "3"], own)


def test_trained_megatron_weights_are_refused_and_converted_ones_need_not_be_named(tmp_path: Path) -> None:
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("release\n")
    for name in ("--load", "--ref-load", "--megatron-ckpt"):
        assert overrides_of(name, str(tmp_path)) == {}
    tracker.write_text("120\n")
    for name in ("--load", "--ref-load", "--megatron-ckpt"):
        with pytest.raises(ConfigError, match="Megatron weights of iteration 120"):
            overrides_of(name, str(tmp_path))
    run = tmp_path / "run"
    (run / "attempts").mkdir(parents=True)
    assert overrides_of("--load", str(run)) == {"checkpoint.load": str(run)}
    assert overrides_of("--load", "checkpoints/", "--save", "checkpoints") == {"run.root": "checkpoints"}


def test_a_folder_to_load_that_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in slime the run begins with the model's weights, but a misspelt path should be seen."""
    missing = str(tmp_path / "iter_10")
    assert overrides_of("--load", missing) == {}
    assert f"--load {missing}: no such folder" in "".join(capsys.readouterr())
    assert overrides_of("--load", missing, "--save", missing) == {"run.root": missing}  # a first start
    assert overrides_of("--load", str(tmp_path)) == {}
    assert "no such folder" not in "".join(capsys.readouterr())


def test_every_flag_that_is_read_back_gives_what_was_set() -> None:
    config = Config.model_validate({"environments": {"a": {"serve": "letters"}}})
    values: dict[str, Any] = {f.name: f.read(config) for f in FLAGS.values() if f.read is not None}
    assert values["--rollout-temperature"] == 1.0
    assert values["--kl-loss-type"] == "k3"
    assert values["--use-tis"] is values["--group-rm"] is False


TRAIN_CONFIG = """\
environments:
  Some/Environment:
    splits: [train, extra]
    num_samples: 50
    nonterminal_reward: 0.0
    reward_reduction: mean
    min_reward: -1.0
    max_reward: 1.0
    max_turns: 7
    secrets:
      search_api_key: null
secrets:
  openai_api_key: null
system_prompt_template: |
  Use the tools.
  {tools}
  {{"name": <name>}}
thinking: true
openreward_run_name: first-run
"""


def test_a_train_config_of_openreward_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "train_config.yaml"
    path.write_text(TRAIN_CONFIG)
    config = load_config(path, [])
    environment = config.environments["Some/Environment"]
    assert (environment.splits, environment.num_samples, environment.max_turns) == (["train", "extra"], 50, 7)
    assert (environment.reward_reduction, environment.nonterminal_reward) == ("mean", 0.0)
    assert (environment.min_reward, environment.max_reward) == (-1.0, 1.0)
    assert environment.secrets == {"search_api_key": None} and config.secrets == {"openai_api_key": None}
    assert config.rollout.system_prompt_template == 'Use the tools.\n{tools}\n{"name": <name>}\n'
    assert (config.rollout.thinking, config.rollout.openreward_upload) == (True, True)
    assert (config.run.name, config.model.path, config.engine.tp) == ("first-run", "Qwen/Qwen3-30B-A3B", 4)
    assert config.rollout.batch_size * config.rollout.n_samples == config.train.global_batch_size == 512
    path.write_text("system_prompt_template: no\nthinking: false\nenvironments: {a: {}}\nlr: 1\n")
    with pytest.raises(ConfigError, match="unknown setting"):
        load_config(path, [])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_turns: 7", "max_turn: 7", r"max_turn: unknown setting; did you mean 'max_turns'"),
        ("openai_api_key: null", "openai_api_key: sk-1", r"never the value itself"),
        ("{tools}", "{{tools}}", r"write \{tools\} where the tools belong"),
        ("first-run", "first run", r"run\.name: 'first run' is not a name"),
    ],
)
def test_a_wrong_train_config_is_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "train_config.yaml"
    path.write_text(TRAIN_CONFIG.replace(old, new))
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path, [])
    assert "\n" not in str(caught.value)
