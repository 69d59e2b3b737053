"""The whole loop on one machine: completed, killed and resumed, stopped, with faults, and exported."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from orhpc.rollout.buffer import read_group
from orhpc.rundir import CommitName, RunDir, commits
from orhpc.rundir.events import read_events, steps_of
from orhpc.rundir.record import RolloutFile, read_step
from orhpc.rundir.trained import read_trained
from orhpc.types import Rollout
from tests.local import kit
from tests.metric_names import unexplained

pytestmark = pytest.mark.slow

STEPS = 6
SECRET = {"OPENAI_API_KEY": "canary-3f9a", "WANDB_MODE": "offline"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """One uninterrupted run that several tests examine."""
    root = tmp_path_factory.mktemp("finished")
    overrides = [f"train.steps={STEPS}", "secrets.openai_api_key=null", "evaluation.interval=3"]
    overrides += ["evaluation.splits={orhpc/letters: [test]}", "evaluation.num_samples=3"]
    overrides += ["train.profile_steps=[2]"]
    result = kit.run(root, *overrides, env=SECRET)
    assert result.returncode == 0, result.stdout + result.stderr
    return RunDir(root / "tiny")


def test_a_run_reports_every_step_and_commits(finished: RunDir) -> None:
    events = read_events(finished.events)
    steps = steps_of(events)
    assert sorted(steps) == list(range(1, STEPS + 1))
    for event in steps.values():
        assert {"reward_mean", "loss", "grad_norm", "tokens_per_s", "logprob_diff_mean"} <= event.keys()
        assert {"rollout", "update", "sync", "record", "checkpoint"} <= event["phases"].keys()
        assert event["attempt"] == 1
    assert [e["step"] for e in events if e["event"] == "commit"] == [2, 4, 6]
    assert [e["step"] for e in events if e["event"] == "evaluation"] == [0, 3, 6]
    assert events[-1]["event"] == "finished"
    assert finished.lineage()[0].step == STEPS


def test_the_log_of_a_successful_run_has_its_steps_and_no_lines_of_ray(finished: RunDir) -> None:
    text = (finished.attempt(1) / "driver.log").read_text()
    steps = [f"step {step}/{STEPS}  reward " for step in range(1, STEPS + 1)]
    rest = ["starting from the base model", "committed step 4 (", "evaluation after step 3: "]
    for lines in [*steps, *rest, f"finished after step {STEPS}"]:
        assert text.count(lines) == 1, lines
    assert "\x1b" not in text
    others = [line for line in text.splitlines() if " INFO orhpc." not in line]
    libkineto = ("profiler_st", "External init callback")  # printed during the profiled step
    assert [line for line in others if not any(own in line for own in libkineto)] == []


def test_a_profiled_step_writes_its_profile(finished: RunDir) -> None:
    assert [p.name for p in (finished.path / "profiles").iterdir()] == ["step_2"]
    assert "aten::mm" in (finished.profile_of(2) / "rank_000.txt").read_text()
    with gzip.open(finished.profile_of(2) / "rank_000.json.gz") as file:
        assert any(event["name"] == "aten::mm" for event in json.load(file)["traceEvents"])


def test_every_metric_of_a_step_is_explained(finished: RunDir) -> None:
    assert unexplained(finished) == set()


def test_the_record_holds_advantages_and_the_trainers_log_probabilities(finished: RunDir) -> None:
    for step in range(1, STEPS + 1):
        trained = read_trained(finished.rollouts_of(step))
        rollouts = {s.id: s for s in read_step(finished.rollouts_of(step))}
        assert trained.keys() == rollouts.keys()
        for group in {s.group_id for s in rollouts.values()}:
            advantages = [trained[s.id].advantage for s in rollouts.values() if s.group_id == group]
            assert sum(advantages) == pytest.approx(0, abs=1e-4)
        for name, summary in rollouts.items():
            assert summary.location.file is not None
            with RolloutFile(summary.location.file) as record:
                engine_T = record.arrays(summary.location.row)["logprobs_T"]
            np.testing.assert_allclose(trained[name].logprobs_T, engine_T, atol=1e-4)


def test_engine_and_trainer_agree_on_log_probabilities(finished: RunDir) -> None:
    """Weights are current at every step; a stale or mixed sync would increase the difference."""
    for event in steps_of(read_events(finished.events)).values():
        assert event["logprob_diff_max"] < 1e-4
        assert event["staleness_mean"] == 0
    log = (finished.attempt(1) / "driver.log").read_text()
    assert log.count("engines and trainer agree within") == 1
    (ready,) = [e for e in read_events(finished.events) if e["event"] == "ready"]
    assert ready["model_check"].startswith("within ")


def test_the_record_contains_every_trained_rollout(finished: RunDir) -> None:
    for step in range(1, STEPS + 1):
        rollouts = read_step(finished.rollouts_of(step))
        assert len(rollouts) == 16
        assert {r.min_version for r in rollouts} == {step - 1}
    assert list(finished.buffer.iterdir()) == []
    assert kit.assert_balanced(finished).trained == 4 * STEPS
    assert kit.started_before_update_ended(finished) == 0  # as some do in an asynchronous run
    location = read_step(finished.rollouts_of(1))[0].location
    with RolloutFile(location.file or "") as record:
        rollout = record.rollout(location.row)
    user, assistant = rollout.messages[:2]
    assert (user["role"], assistant["role"]) == ("user", "assistant")
    assert user["content"].startswith("Letters ")
    assert {m["role"] for m in rollout.messages[2:]} <= {"tool"}
    # The prompt comes first, then the sampled tokens, with one log-probability for each.
    (first, *_), sampled = rollout.loss_mask_T, rollout.loss_mask_T.sum()
    assert not first
    assert 0 < sampled <= 12
    assert (rollout.logprobs_T[rollout.loss_mask_T] < 0).all()
    assert not rollout.logprobs_T[~rollout.loss_mask_T].any()


def test_a_finished_run_reports_it_and_starts_nothing(finished: RunDir) -> None:
    again = kit.run(finished.path.parent, *_like(finished), env=SECRET)
    assert again.returncode == 0
    assert "finished" in again.stdout
    assert finished.newest_attempt() == 1


def test_another_seed_is_refused(finished: RunDir) -> None:
    again = kit.run(finished.path.parent, *_like(finished), "run.seed=5", env=SECRET)
    assert again.returncode == 2
    assert "run.seed" in again.stderr
    assert again.stderr.count("\n") == 1


def test_secrets_appear_in_no_file(finished: RunDir) -> None:
    needle = b"canary-3f9a"
    hits = [p for p in finished.path.rglob("*") if p.is_file() and needle in p.read_bytes()]
    assert hits == []
    assert not list(finished.attempts.glob("*/engine.key"))
    assert not list(finished.attempts.glob("*/ray.token"))


def test_no_process_of_the_run_is_left(finished: RunDir) -> None:
    assert kit.wait_gone(finished) == []


def test_status_view_and_export(finished: RunDir, tmp_path: Path) -> None:
    def orhpc(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "orhpc.commands.cli", *arguments]
        return subprocess.run(line, cwd=kit.ROOT, capture_output=True, text=True, check=False)

    status = json.loads(orhpc("status", str(finished.path), "--json").stdout)
    assert (status["step"], status["committed"][0], status["last_failure"]) == (6, "step_6.a001", None)
    listing = orhpc("view", str(finished.path), "--step", "2").stdout
    assert "16 rollouts" in listing
    assert (
        "Letters" in orhpc("view", str(finished.path), "--rollout", listing.splitlines()[1].split()[0]).stdout
    )
    out = tmp_path / "hf"
    exported = orhpc("export", str(finished.path), "--out", str(out))
    assert exported.returncode == 0, exported.stderr
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM, AutoTokenizer;"
        "m = AutoModelForCausalLM.from_pretrained(sys.argv[1]);"
        "t = AutoTokenizer.from_pretrained(sys.argv[1]);"
        "print(m(**t('hello', return_tensors='pt')).logits.isfinite().all().item())"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=False
    )
    assert loaded.stdout.strip() == "True", loaded.stderr
    line = [sys.executable, "-m", "orhpc.commands.cli", "chat", str(finished.path), "--max-tokens", "3"]
    talked = subprocess.run(line, cwd=kit.ROOT, input="hello\n", capture_output=True, text=True, check=False)
    assert talked.returncode == 0, talked.stderr
    assert (finished.export / "step_6/config.json").is_file()
    assert f"orhpc chat {finished.export / 'step_6'}" in talked.stdout
    refused = orhpc("export", str(finished.path), "--step", "1")
    assert refused.returncode != 0
    assert refused.stderr.count("\n") == 1
    assert orhpc("status", str(tmp_path)).returncode == 2


def test_a_killed_and_resumed_run_has_the_parameters_of_an_uninterrupted_one(
    finished: RunDir, tmp_path: Path
) -> None:
    """Both runs replay the same record; one is SIGKILLed twice, in an update and in a save."""
    replay = [f"train.steps={STEPS}", f"train.replay_rollouts={finished.rollouts}", "wandb.enabled=false"]
    straight = kit.run(tmp_path / "straight", *replay)
    assert straight.returncode == 0, straight.stderr
    rundir = RunDir(tmp_path / "killed" / "tiny")
    for kill_at in (3, 5):
        with kit.started(tmp_path / "killed", *replay) as process:
            kit.wait_for(process, rundir, lambda e, at=kill_at: e["event"] == "step" and e["step"] >= at)
        assert kit.wait_gone(rundir) == []
    last = kit.run(tmp_path / "killed", *replay)
    assert last.returncode == 0, last.stderr
    assert rundir.newest_attempt() == 3
    assert rundir.started_from(2) is not None
    assert _shards(rundir) == _shards(RunDir(tmp_path / "straight" / "tiny"))


def test_a_corrupt_commit_is_skipped_on_resume(finished: RunDir, tmp_path: Path) -> None:
    replay = [f"train.replay_rollouts={finished.rollouts}", "wandb.enabled=false", kit.ONE_DEVICE]
    assert kit.run(tmp_path, *replay, "train.steps=4").returncode == 0
    rundir = RunDir(tmp_path / "tiny")
    newest = rundir.lineage()[0]
    assert newest.step == 4
    shard = next((rundir.checkpoints / str(newest)).glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    resumed = kit.run(tmp_path, *replay, "train.steps=6")
    assert resumed.returncode == 0, resumed.stderr
    assert rundir.started_from(2) == CommitName(2, 1)
    assert "its content changed" in resumed.stdout


def test_ctrl_c_commits_and_the_same_command_resumes(tmp_path: Path) -> None:
    """Steps leave unfinished rollouts to the next ones: those of one environment have several long turns."""
    rundir = RunDir(tmp_path / "tiny")
    partial = ["rollout.partial=true", "rollout.oversample=2", "rollout.stale_tokens=train", kit.ONE_DEVICE]
    partial.append("rollout.max_total_tokens=1000")
    several_turns = "nudge: Go on., max_nudges: 4, max_turns: 5, max_response_tokens: 200"
    partial += [f"environments.t={{serve: treasure, {several_turns}}}"]
    with kit.started(tmp_path, *partial, "checkpoint.save_interval=1000", "train.steps=200") as process:
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["step"] >= 2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=800)
    assert process.returncode == 75, output
    assert "the same command resumes" in output
    run_id = (rundir.path / "wandb_id").read_text()
    stopped_at = rundir.lineage()[0].step
    assert stopped_at >= 2
    begun = _buffered(rundir, "begun_*.h5")
    assert begun  # those of the environment with long rollouts
    settings = [*partial, "checkpoint.save_interval=1000", f"train.steps={stopped_at + 4}"]
    resumed = kit.run(tmp_path, *settings)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    steps = [e["step"] for e in read_events(rundir.events) if e["event"] == "step" and e["attempt"] == 2]
    assert steps == [stopped_at + n for n in (1, 2, 3, 4)]
    continued = several = 0
    replayed: dict[str, int] = {}
    for step in range(1, steps[-1] + 1):
        for rollout in _recorded(rundir.rollouts_of(step)):
            versions = rollout.versions_T[rollout.loss_mask_T]
            assert (np.diff(versions) >= 0).all()
            several += versions[0] < versions[-1]
            if (old := begun.get(rollout.id)) is not None:
                assert rollout.tokens_T[: old.length].tolist() == old.tokens_T.tolist()
                continued += rollout.length > old.length
                replayed[rollout.id] = rollout.replayed_turns
                assert rollout.replayed_turns == (0 if old.end.trainable else len(old.turns) - 1)
    assert continued
    assert any(replayed.values()), [(old.id, old.end, len(old.turns)) for old in begun.values()]
    assert several  # of one rollout, tokens of several policies
    events = steps_of(read_events(rundir.events)).values()
    assert sum(event["carried_tokens"] for event in events) > 0
    assert sum(event.get("replayed_rollouts", 0) for event in events) >= sum(map(bool, replayed.values()))
    assert sum(event.get("replay_mismatches", 0) for event in events) == 0
    assert all(event["logprob_diff_max"] < 1e-4 for event in events if not event["carried_tokens"])
    assert unexplained(rundir) == set()
    offline = [p.name for p in (rundir.path / "wandb").glob("offline-run-*")]
    assert len(offline) == 2
    assert all(name.endswith(f"-{run_id}") for name in offline)  # one W&B run, continued
    assert kit.assert_balanced(rundir).repeated == 0


@pytest.mark.long
def test_wandb_has_the_rows_of_a_killed_attempt(tmp_path: Path) -> None:
    """The next attempt writes every row, whatever the killed one had written before."""
    rundir = RunDir(tmp_path / "tiny")
    offline = {"WANDB_MODE": "offline"}
    with kit.started(tmp_path, kit.ONE_DEVICE, "train.steps=200", env=offline) as process:
        kit.wait_for(process, rundir, lambda e: e["event"] == "commit" and e["step"] >= 4)
    assert kit.wait_gone(rundir) == []
    start = rundir.lineage()[0].step
    last = kit.run(tmp_path, kit.ONE_DEVICE, f"train.steps={start + 2}", env=offline)
    assert last.returncode == 0, last.stdout + last.stderr
    _, newest = sorted((rundir.path / "wandb").glob("offline-run-*/*.wandb"))
    assert _wandb_rows(newest) >= start + 2
    assert kit.assert_balanced(rundir).step == start + 2


def _wandb_rows(path: Path) -> int:
    """Number of rows in W&B's file, by keys that each row has once; a block border may split one."""
    data = path.read_bytes()
    return max(data.count(key) for key in (b"reward/reward_std", b"phase/update", b"perf/train_tokens"))


def test_split_and_asynchronous_with_expert_routes_and_several_environments(tmp_path: Path) -> None:
    overrides = ["model.path=bundled:tiny-moe", "rollout.record_routes=true", "rollout.max_staleness=1"]
    overrides += ["rollout.stale_tokens=regenerate", "engine.delta_sync=true", "engine.check_weights=true"]
    overrides += ["train.lr=1e-6"]  # at larger ones, most of each weight changes
    overrides += ["placement.mode=split", "placement.trainer_devices=1", "rollout.max_total_tokens=2048"]
    overrides += ["environments.gym={serve: reasoning-gym}", "environments.t={serve: treasure, max_turns: 3}"]
    result = kit.run(tmp_path, *overrides, "train.steps=4", "wandb.enabled=false")
    assert result.returncode == 0, result.stdout + result.stderr
    rundir = RunDir(tmp_path / "tiny")
    events = steps_of(read_events(rundir.events))
    assert sorted(events) == [1, 2, 3, 4]
    assert all(0 <= e["staleness_mean"] <= 1 for e in events.values())
    # The first steps send all weights, the last ones what has changed; check_weights compares the engines'.
    assert max(events[step]["sync_bytes"] for step in (3, 4)) < events[1]["sync_bytes"]
    seen, ages = set(), set()
    for step in events:
        for summary in read_step(rundir.rollouts_of(step)):
            seen.add(summary.task.environment)
            ages.add(step - 1 - summary.min_version)
            with RolloutFile(summary.location.file or "") as record:
                routes = record.routes(summary.location.row)
            assert routes is not None
            assert routes.shape == (summary.length - 1, 3, 2)
    assert seen == {"orhpc/letters", "gym", "t"}
    assert kit.started_before_update_ended(rundir) > 0
    assert ages == {0, 1}
    assert max(e["staleness_mean"] for e in events.values()) > 0.2
    assert kit.assert_balanced(rundir).step == 4


@pytest.mark.parametrize(
    ("override", "code", "expected"),
    [
        ("model.path=/nowhere/at/all", 2, "model.path: /nowhere/at/all"),
        ("model.path=bundled:none", 2, "no bundled model"),
        ("train.replay_rollouts=/nowhere", 2, "no such folder"),
        ("checkpoint.load=/nowhere", 2, "is neither a checkpoint folder nor a run directory"),
        ("environments.e={url: ftp://x}", 2, "is not http:"),
        ("placement.device=cuda", 2, "engine.backend: cpu needs placement.device: cpu"),
        ("placement.nodes=2", 2, "--local is one node"),
        ("environments.e={serve: nothing-such}", 2, "nothing-such"),
        ("environments.e={url: 'http://127.0.0.1:1'}", 3, "did not start within 3 s"),
        ("environments.orhpc/letters.serve_options={typo: 1}", 2, "typo"),
        ("environments.Some/One={}", 3, "OPENREWARD_API_KEY must be set"),
        ("rollout.openreward_upload=true", 3, "OPENREWARD_API_KEY must be set"),
        ("secrets.no_such_key_here=null", 3, "NO_SUCH_KEY_HERE"),
        ("rollout.custom_agent=no.such:thing", 2, "rollout.custom_agent"),
    ],
)
def test_invalid_input_gives_one_error_line_and_loses_nothing(
    tmp_path: Path, override: str, code: int, expected: str
) -> None:
    result = kit.run(tmp_path, override, "rollout.environment_start_timeout_s=3", "wandb.enabled=false")
    assert result.returncode == code, result.stdout + result.stderr
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1


def _buffered(run: RunDir, pattern: str) -> dict[str, Rollout]:
    """Rollouts in files of the buffer, by id."""
    return {r.id: r for path in run.buffer.glob(pattern) for r in read_group(path)}


def _recorded(folder: Path) -> list[Rollout]:
    """Rollouts that a step has trained on."""
    found = []
    for summary in read_step(folder):
        with RolloutFile(str(summary.location.file)) as record:
            found.append(record.rollout(summary.location.row))
    return found


def _like(run: RunDir) -> list[str]:
    overrides = [f"train.steps={STEPS}", "secrets.openai_api_key=null", "evaluation.interval=3"]
    return [*overrides, "evaluation.splits={orhpc/letters: [test]}", "evaluation.num_samples=3"]


def _shards(run: RunDir) -> dict[str, str]:
    newest = run.lineage()[0]
    assert newest.step == STEPS
    manifest = commits.verify(run.checkpoints / str(newest))
    return {f.name: f.sha256 for f in manifest.files}
