"""The table of metrics: names of other systems are used once, and trackers get sections."""

from __future__ import annotations

from collections import Counter

from orhpc.rundir.metrics import METRICS, metric_of, tracker_name


def test_a_name_of_another_system_means_one_metric() -> None:
    for system in ("verl", "trl", "slime"):
        names = Counter(name for metric in METRICS.values() if (name := getattr(metric, system)))
        assert [name for name, count in names.items() if count > 1] == []


def test_every_metric_has_a_section_and_a_meaning() -> None:
    for name, metric in METRICS.items():
        assert metric.section in ("reward", "rollout", "train", "mismatch", "perf", "memory"), name
        assert metric.meaning
        assert tracker_name(name) == f"{metric.section}/{name}"


def test_the_metric_of_an_environment_is_explained_by_its_name() -> None:
    assert metric_of("reward_mean/acme/puzzles") is METRICS["reward_mean"]
    assert tracker_name("reward_mean/acme/puzzles") == "reward/reward_mean/acme/puzzles"
    assert metric_of("unheard_of") is None
    assert tracker_name("unheard_of") == "other/unheard_of"
