"""The Textual application in 80 columns and 24 lines, driven by keys."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from orhpc.commands.view.terminal import Viewer
from orhpc.errors import StorageRefused
from tests.unit.commands.view.kit import library_of, make_run

Play = Callable[[Viewer, Pilot[int]], Awaitable[None]]


def shown(app: Viewer, name: str) -> str:
    return str(app.screen.query_one(f"#{name}", Static).content)


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Play], None]:
    run = make_run(tmp_path)

    async def played(act: Play) -> None:
        app = Viewer(library_of(run))
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause()
            await act(app, pilot)

    return lambda act: asyncio.run(played(act))


@pytest.mark.slow
def test_steps_are_listed_and_left_with_brackets(play: Callable[[Play], None]) -> None:
    async def act(app: Viewer, pilot: Pilot[int]) -> None:
        assert "step 3: 6 rollouts, mean reward 0.500" in shown(app, "title")
        assert app.screen.query_one(DataTable).row_count == 6
        await pilot.press("left_square_bracket")
        assert "step 2: 6 rollouts" in shown(app, "title")
        await pilot.press("right_square_bracket", "right_square_bracket")
        assert "evaluation after step 0: 1 rollouts" in shown(app, "title")

    play(act)


@pytest.mark.slow
def test_a_rollout_is_read_as_messages_and_as_colored_tokens(play: Callable[[Play], None]) -> None:
    async def act(app: Viewer, pilot: Pilot[int]) -> None:
        await pilot.press("down", "enter")
        await pilot.pause()
        assert "step 3, 30.1: reward 1.000, advantage 1.00" in shown(app, "title")
        assert "--- tool open, reward 0.25" in shown(app, "text")
        assert "\x1b" not in shown(app, "text")
        await pilot.press("t")
        text = app.screen.query_one("#text", Static).content
        assert str(text) == "Open the door.grüße 30.1"
        assert len({str(span.style) for span in text.spans}) == 2  # dim, and one difference
        await pilot.press("c")
        assert shown(app, "legend").startswith("log-probability")
        await pilot.press("right")
        assert "30.2: reward -" in shown(app, "title")
        await pilot.press("escape")
        assert app.screen.query_one(DataTable).row_count == 6

    play(act)


@pytest.mark.slow
def test_a_group_is_shown_side_by_side(play: Callable[[Play], None]) -> None:
    async def act(app: Viewer, pilot: Pilot[int]) -> None:
        await pilot.press("g")
        await pilot.pause()
        assert "step 3: 3 rollouts of a group" in shown(app, "title")
        heads = [str(head.content) for head in app.screen.query(".head").results(Static)]
        assert [head.split(",")[0] for head in heads] == ["reward 0.000", "reward 1.000", "reward -"]

    play(act)


@pytest.mark.slow
def test_a_filter_searches_all_steps_and_a_wrong_one_is_said(play: Callable[[Play], None]) -> None:
    async def act(app: Viewer, pilot: Pilot[int]) -> None:
        await pilot.press("slash", *"reward:x", "enter")
        assert "expected LOW..HIGH" in shown(app, "title")
        await pilot.press("backspace", "1", "enter")
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert app.screen.query_one(DataTable).row_count == 6
        assert "6 found in 4 of 4" in shown(app, "title")

    play(act)


@pytest.mark.slow
def test_a_step_that_cannot_be_read_any_more_does_not_end_the_viewer(tmp_path: Path) -> None:
    """The run goes on while it is read: a step is done again, or the filesystem refuses to read."""
    library = library_of(make_run(tmp_path))

    def refused(*_: object) -> None:
        raise StorageRefused("the filesystem does not answer")

    async def played() -> None:
        app = Viewer(library)
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause()
            await pilot.press("enter")
            library.rows = lambda part: []  # type: ignore[method-assign]
            await pilot.press("right")
            library.rows = library._matches = refused  # type: ignore[method-assign,assignment]
            await pilot.press("right")
            assert "the filesystem does not answer" in shown(app, "text")
            await pilot.press("escape", "g")
            assert "the filesystem does not answer" in shown(app, "title")
            app.screen._say("")  # type: ignore[attr-defined]
            await pilot.press("slash", "enter")
            await app.workers.wait_for_complete()
            await pilot.pause()
            assert "the filesystem does not answer" in shown(app, "title")

    asyncio.run(played())
