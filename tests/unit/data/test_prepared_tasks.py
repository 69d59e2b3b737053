"""Task files of OpenReward's training examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orhpc.config import Config
from orhpc.data.prepared_tasks import PreparedTask, hash_of, listed_tasks
from orhpc.errors import ConfigError

CONFIG = Config.model_validate(
    {
        "model": {"path": "bundled:letters"},
        "environments": {
            "Org/One": {"url": "http://h:1"},
            "Two": {"url": "http://h:1"},
            "Eval": {"url": "http://h:1", "splits": []},
        },
        "evaluation": {"splits": {"Eval": ["test"]}},
    }
)


def line(environment: str, split: str, specification: Any, *, as_text: bool = True) -> str:
    """A line as ``prepare_tasks.py`` of OpenReward's slime example writes it."""
    metadata = {"env_name": environment, "deployment_name": "Org/One", "server_name": "One",
                "environment_name": "one", "namespace": "Org", "split": split, "task_spec": specification,
                "task_hash": "of another program"}  # fmt: skip
    prompt = f"[{environment}:{split}:0]"
    return json.dumps(
        {"prompt": prompt, "label": "", "metadata": json.dumps(metadata) if as_text else metadata}
    )


def read(tmp_path: Path, *lines: str) -> Any:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return listed_tasks(CONFIG, path)


def test_tasks_are_listed_by_environment_and_split_in_the_order_of_the_file(tmp_path: Path) -> None:
    lines = [line("Two", "train", {"q": 1}), line("Org/One", "train", {"q": 2}), "",
             line("Two", "train", {"q": 3}, as_text=False), line("Two", "test", {"q": 1}),
             line("Two", "train", {"q": 1})]  # fmt: skip
    assert read(tmp_path, *lines) == {
        ("Two", "train"): [hash_of({"q": 1}), hash_of({"q": 3})],
        ("Org/One", "train"): [hash_of({"q": 2})],
        ("Two", "test"): [hash_of({"q": 1})],
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.slow
@given(st.lists(st.dictionaries(st.text(), JSON, min_size=1), min_size=1, max_size=5))
def test_a_file_that_was_written_here_lists_the_tasks(
    tmp_path_factory: pytest.TempPathFactory, specifications: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("tasks")
    written = [
        PreparedTask("Two", "train", each, "ns/Two", "Two", "two", "ns").line() for each in specifications
    ]
    found = read(folder, *written)["Two", "train"]
    assert found == list(dict.fromkeys(map(hash_of, specifications)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "line 1 is not one of a task file"),
        (
            json.dumps({"prompt": "1 + 1", "label": "2"}),
            r"line 1 is not .* \(metadata: Field required\); orhpc prep",
        ),
        (json.dumps({"metadata": "{}"}), "line 1 is not one of a task file"),
        (
            line("Three", "train", {}),
            "line 1: the config trains on no environment 'Three', but on Org/One, Two",
        ),
        (line("Eval", "train", {}), "line 1: the config trains on no environment 'Eval'"),
        ("", "lists no task"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_line(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        listed_tasks(CONFIG, tmp_path / "absent")
