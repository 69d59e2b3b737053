"""Learning curves of GRPO, DAPO, RLOO and PPO, compared with TRL's at equal numbers of sampled tokens.

    python -m venv TRL && TRL/bin/pip install torch trl==1.16.0          # GRPO, DAPO, RLOO
    python -m venv PPO && PPO/bin/pip install torch trl==1.12.0          # the newest TRL that has PPO
    python -m benchmarks.learning_curves --trl TRL/bin/python --trl-ppo PPO/bin/python [--seeds 3]

Both sides train the random model ``bundled:tiny`` on ``letters`` (the task of configs/tiny.yaml): the same
initial weights, prompts, batch, sampling, optimizer and learning rate, no KL penalty, one optimizer step per
step.  Their random numbers differ, so several seeds are compared.  The reward is the mean of each step's
rollouts before its update; of PPO, batches have one rollout for each prompt.  Runs take place one after
another with one thread for each process.  Finished runs are kept in the CSV file and not repeated.

Writes ``benchmarks/learning_curves.csv`` and ``benchmarks/learning_curves.png``, and prints a table.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROMPTS, SAMPLES, TOKENS, LR = 8, 8, 12, 3e-3
SIDES = ("orhpc", "trl")
FIELDS = ["side", "version", "algorithm", "seed", "step", "tokens", "reward"]
UNUSED = "<|endoftext|>"
LAST, WINDOW = 10, 5
"""Steps whose mean is the reward at the end, and steps over which "tokens to reach" averages."""
ALGORITHMS: dict[str, list[str]] = {
    "grpo": [],
    "dapo": [
        "algorithm.eps_clip_high=0.28",
        "algorithm.normalise_loss=token",
        f"algorithm.overlong={{max_tokens: {TOKENS}, buffer_tokens: 4}}",
    ],
    # TRL's loss takes the sum of a completion's log-probabilities, as published: not their mean.
    "rloo": [
        "algorithm.advantage=leave_one_out",
        "algorithm.normalise_advantage=false",
        "algorithm.normalise_loss=constant",
        "algorithm.normalise_length=1",
    ],
    # TRL's PPO does not clip gradients.
    "ppo": [
        "algorithm.advantage=ppo",
        "algorithm.normalise_loss=token",
        f"algorithm.critic={{lr: {LR}, gae_lambda: 0.95, value_clip: 0.2}}",
        "train.max_grad_norm=1e9",
        f"rollout.batch_size={PROMPTS * SAMPLES}",
        "rollout.n_samples=1",
    ],
}
Run = tuple[str, str, int]
"""Side, algorithm and seed."""
Curve = list[tuple[float, float]]
"""Tokens sampled so far and mean reward, by step."""


def model(folder: Path) -> Path:
    """Copy the model ``bundled:tiny``, without the token ``<|endoftext|>``; returns its folder.

    For orhpc this token ends a turn, as it does for models of this format; TRL has one such token only.
    """
    from orhpc.models.bundled import ensure

    made = shutil.copytree(ensure("bundled:tiny"), folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = made / name
        file.write_text(file.read_text(encoding="utf-8").replace(UNUSED, "<|0|>"), encoding="utf-8")
    return made


def ours(algorithm: str, seed: int, steps: int) -> tuple[str, Curve]:
    """Train once; returns the commit, and sampled tokens and mean reward of each step."""
    from orhpc.rundir.events import read_events, steps_of

    with tempfile.TemporaryDirectory() as root:
        overrides = [
            f"model.path={model(Path(root))}",
            f"run.root={root}",
            "run.name=curve",
            f"run.seed={seed}",
            "placement.devices_per_node=1",
            f"rollout.batch_size={PROMPTS}",
            f"rollout.n_samples={SAMPLES}",
            f"rollout.max_response_tokens={TOKENS}",
            f"train.global_batch_size={PROMPTS * SAMPLES}",
            "train.max_tokens_per_gpu=8192",
            f"train.lr={LR}",
            f"train.steps={steps}",
            "checkpoint.save_interval=10000",
            "checkpoint.keep_in_memory=false",
        ]
        command = [sys.executable, "-m", "orhpc.launch", "--local", "configs/tiny.yaml"]
        _run([*command, *overrides, *ALGORITHMS[algorithm]])
        events = steps_of(read_events(Path(root, "curve", "events.jsonl")))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return commit.stdout.strip(), [
        (events[s]["response_tokens"], events[s]["reward_mean"]) for s in sorted(events)
    ]


def theirs(python: str, algorithm: str, seed: int, steps: int) -> tuple[str, Curve]:
    """The same with TRL, in a separate virtual environment; returns its version."""
    job: dict[str, Any] = {
        "algorithm": algorithm,
        "prompts": _prompts(seed, steps * PROMPTS * (SAMPLES if algorithm == "ppo" else 1)),
        "seed": seed,
        "steps": steps,
        "prompts_per_step": PROMPTS,
        "samples": SAMPLES,
        "max_tokens": TOKENS,
        "lr": LR,
        "wanted": _letters().options.wanted,
        "min_length": _letters().options.min_length,
    }
    with tempfile.TemporaryDirectory() as folder:
        job["model"] = str(model(Path(folder)))
        file = Path(folder, "job.json")
        file.write_text(json.dumps(job), encoding="utf-8")
        output = _run([python, str(ROOT / "benchmarks" / "learning_curves_trl.py"), str(file)])
    result = json.loads(output.strip().splitlines()[-1])
    return result["trl"], [tuple(step) for step in result["steps"]]


def _letters() -> Any:
    from orhpc.environments.letters import Letters

    return Letters


def _prompts(seed: int, count: int) -> list[str]:
    """Texts of the run's prompt groups, in its order."""
    from orhpc.rollout.tasks import TaskSequence, TaskStream

    sequence = TaskSequence([TaskStream("orhpc/letters", "train", _letters().options.n_tasks, 1.0)], seed)
    tasks = [sequence.task(group) for group in range(count)]
    environments = [_letters()({"split": task.split, "index": task.index}, {}) for task in tasks]
    return [f"Letters {environment.generator().randrange(100)}" for environment in environments]


def _run(command: Sequence[str]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, env=environment)
    if result.returncode:
        sys.exit(f"{' '.join(command[:3])} ended with {result.returncode}:\n{result.stderr[-3000:]}")
    return result.stdout


def read_curves(file: Path) -> dict[Run, Curve]:
    """Read all runs of the CSV file."""
    curves: dict[Run, Curve] = {}
    if file.exists():
        with file.open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                run = (row["side"], row["algorithm"], int(row["seed"]))
                curves.setdefault(run, []).append((float(row["tokens"]), float(row["reward"])))
    return curves


def append(file: Path, run: Run, version: str, steps: Curve) -> None:
    """Add a run to the CSV file."""
    new = not file.exists()
    with file.open("a", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        if new:
            writer.writerow(FIELDS)
        tokens = 0.0
        for number, (sampled, reward) in enumerate(steps, 1):
            tokens += sampled
            side, algorithm, seed = run
            writer.writerow([side, version, algorithm, seed, number, int(tokens), f"{reward:.4f}"])


def tokens_to(curve: Curve, reward: float) -> float | None:
    """Tokens after which the mean of ``WINDOW`` steps first reaches a reward; None: it never does."""
    for end in range(WINDOW, len(curve) + 1):
        if statistics.mean(r for _, r in curve[end - WINDOW : end]) >= reward:
            return curve[end - 1][0]
    return None


def at_tokens(curve: Curve, tokens: float) -> float:
    """Mean reward of the last ``LAST`` steps that end within so many tokens."""
    return statistics.mean([r for t, r in curve if t <= tokens][-LAST:])


def report(curves: dict[Run, Curve], levels: Sequence[float]) -> None:
    """Print the reward at equal tokens and the tokens to reach each level, by algorithm and side."""
    heads = " ".join(f"{f'tokens to {level:g}':>26}" for level in levels)
    print(f"{'algorithm':9} {'side':6} {'reward at equal tokens (each seed)':42} {heads}")
    for algorithm in ALGORITHMS:
        runs = {run: curve for run, curve in curves.items() if run[1] == algorithm}
        if not runs:
            continue
        equal = min(curve[-1][0] for curve in runs.values())
        for side in SIDES:
            own = [curve for run, curve in sorted(runs.items()) if run[0] == side]
            if not own:
                continue
            ends = [at_tokens(curve, equal) for curve in own]
            shown = f"{statistics.mean(ends):.3f} ({', '.join(f'{e:.3f}' for e in ends)}) at {equal:,.0f}"
            needs = " ".join(f"{_needs(own, level):>26}" for level in levels)
            print(f"{algorithm:9} {side:6} {shown:42} {needs}")


def _needs(curves: Sequence[Curve], level: float) -> str:
    needs = [tokens_to(curve, level) for curve in curves]
    reached = [n for n in needs if n is not None]
    if not reached:
        return "never"
    missing = f", {len(needs) - len(reached)} never" if len(reached) < len(needs) else ""
    return f"{statistics.mean(reached):,.0f} ({min(reached):,.0f}-{max(reached):,.0f}{missing})"


def plot(curves: dict[Run, Curve], file: Path) -> None:
    """Draw one chart per algorithm: the mean over seeds, and every seed thinly."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6.5), sharey=True, layout="constrained")
    for axis, algorithm in zip(axes.flat, ALGORITHMS, strict=True):
        for side, color in zip(SIDES, ("tab:blue", "tab:orange"), strict=True):
            own = [curve for run, curve in sorted(curves.items()) if run[:2] == (side, algorithm)]
            for curve in own:
                axis.plot(*zip(*curve, strict=True), color=color, linewidth=0.6, alpha=0.35)
            if own:
                steps = zip(*own, strict=False)
                middle = [tuple(statistics.mean(v) for v in zip(*step, strict=True)) for step in steps]
                axis.plot(
                    *zip(*middle, strict=True),
                    color=color,
                    label=f"{side} ({len(own)} seed{'s' * (len(own) > 1)})",
                )
        axis.set(title=algorithm.upper(), xlabel="sampled tokens", ylabel="mean reward")
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trl", help="Python of an environment with TRL; without it only orhpc runs")
    parser.add_argument("--trl-ppo", help="Python of an environment with a TRL that has PPO")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--levels", type=float, nargs="+", default=[0.5, 0.8])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "learning_curves.csv")
    options = parser.parse_args()
    done = set(read_curves(options.out))
    for seed in range(options.seeds):
        for algorithm in options.algorithms:
            for side in SIDES:
                python = options.trl_ppo if algorithm == "ppo" else options.trl
                if (side, algorithm, seed) in done or (side == "trl" and python is None):
                    continue
                began = time.monotonic()
                version, steps = (
                    ours(algorithm, seed, options.steps)
                    if side == "orhpc"
                    else theirs(python, algorithm, seed, options.steps)
                )
                append(options.out, (side, algorithm, seed), version, steps)
                seconds = time.monotonic() - began
                print(f"{side} {algorithm} seed {seed}: {seconds:.0f} s", file=sys.stderr, flush=True)
    curves = read_curves(options.out)
    report(curves, options.levels)
    plot(curves, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
