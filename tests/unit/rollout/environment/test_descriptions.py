"""Specifications of tasks, from the real server."""

from __future__ import annotations

import pytest

from orhpc.data.prepared_tasks import hash_of
from orhpc.errors import ConfigError
from orhpc.rollout.environment import descriptions
from orhpc.rollout.environment.descriptions import describe_tasks, find_tasks
from orhpc.rollout.environment.environment import Environment
from tests.served import Served, TrainSplit, serve
from tests.unit.rollout.environment.kit import Plain, within


class Many(TrainSplit):
    """Not a subclass of one that is served: the server keeps the numbers of tasks in the class."""

    TASKS = [{"a": i} for i in range(2 * descriptions._RANGE + 1)]  # noqa: RUF012
    submit = Plain.submit


@pytest.mark.slow
def test_all_tasks_of_a_split_are_described_by_index() -> None:
    async def body(environment: Environment) -> None:
        assert await describe_tasks(environment, "train") == Many.TASKS

    with serve(Many) as served:
        within(served.url, body, name="many")
        assert served.calls("/many/task_range") == 3
        within(served.url, body, name="many", settings={"variant": "many"})


@pytest.mark.slow
def test_an_older_server_is_asked_for_each_task() -> None:
    async def body(environment: Environment) -> None:
        assert await describe_tasks(environment, "train") == Many.TASKS[:5]

    with serve(Many) as served:
        served.answers["/many/task_range"] = [(404, {})]
        within(served.url, body, name="many", settings={"num_samples": 5})
        assert served.calls("/many/task") == 5


@pytest.mark.slow
def test_tasks_are_found_by_their_specifications(served: Served) -> None:
    async def body(environment: Environment) -> None:
        hashes = [hash_of({"a": 2}), hash_of({"a": 0})]
        assert await find_tasks(environment, "train", hashes) == [2, 0]
        with pytest.raises(
            ConfigError, match=r"task_file: 1 of 3 tasks are not among the 3 of environment 'Org/plain'"
        ):
            await find_tasks(environment, "train", [*hashes, hash_of({"a": 9})])
        with pytest.raises(ConfigError, match="no split 'other'"):
            await find_tasks(environment, "other", hashes)

    within(served.url, body, name="Org/plain", settings={"variant": "plain"})
