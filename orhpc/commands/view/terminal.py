"""``orhpc view`` in a terminal: a list of rollouts, a group side by side, and one rollout's tokens.

Drawn with Textual (https://textual.textualize.io); it fits 80 columns and 24 lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from rich.style import Style
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import HorizontalScroll, VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from orhpc.commands.view.filter import HELP, Filter
from orhpc.commands.view.library import Library, title_of
from orhpc.commands.view.transcript import message_lines
from orhpc.errors import ConfigError, OrhpcError
from orhpc.process.terminal import safe

_COLUMNS = ("id", "reward", "advantage", "tokens", "turns", "end", "task")
_COLUMN_CELLS = 38
"""Width of a rollout in a group, so that two fit 80 columns."""
_MOST_FOUND = 2000
_COLORINGS = ("difference", "log-probability", "age", "nothing")
_LEGENDS = {
    "difference": "trainer's minus engine's log-probability: blue above, red below, full at 1",
    "log-probability": "of the sampled token: magenta where it was improbable, full at -5",
    "age": "updates between sampling and training: magenta, full at 4",
    "nothing": "",
}


class Viewer(App[int]):
    """The application; its first screen is the list."""

    TITLE = "orhpc view"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #title, #legend { height: 1; background: $panel; padding: 0 1; }
    #prompt { display: none; }
    #prompt.open { display: block; }
    DataTable { height: 1fr; }
    .column { width: 38; border-right: solid $panel; padding: 0 1; }
    .head { text-style: bold; }
    """

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.library = library

    def on_mount(self) -> None:
        self.push_screen(ListScreen(self.library))


class RolloutTable(DataTable[Any]):
    """The list, which shows in the footer what Enter does."""

    BINDINGS: ClassVar[list[BindingType]] = [("enter", "select_cursor", "Read")]


class ListScreen(Screen[None]):
    """The rollouts of a step or an evaluation, or those found in all of them."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("g", "group", "Group"),
        ("left_square_bracket", "move(-1)", "Previous"),
        ("right_square_bracket", "move(1)", "Next"),
        ("slash", "filter", "Filter"),
        ("escape", "clear", "All"),
        ("q", "app.quit", "Quit"),
    ]

    def __init__(self, library: Library) -> None:
        super().__init__()
        self._library = library
        about = library.about()
        self._name: str = about["name"]
        self._part: str = about["first"]
        self._found: list[tuple[str, dict[str, Any]]] = []

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        yield RolloutTable(cursor_type="row", zebra_stripes=True)
        yield Input(id="prompt", placeholder=HELP)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(DataTable).add_columns(*_COLUMNS)
        self.action_clear()
        self.query_one(DataTable).focus()

    def action_clear(self) -> None:
        """Show the whole step or evaluation, without a filter."""
        self.query_one("#prompt").remove_class("open")
        self.query_one(DataTable).focus()
        if not self._part:
            self._say("no rollout is recorded yet")
            return
        try:
            rows = self._library.rows(self._part)
        except OrhpcError as error:
            self._say(str(error))
            return
        judged = [row["reward"] for row in rows if row["reward"] is not None]
        mean = f", mean reward {sum(judged) / len(judged):.3f}" if judged else ""
        self._list([(self._part, row) for row in rows])
        self._say(f"{title_of(self._part)}: {len(rows)} rollouts{mean}")

    def action_move(self, by: int) -> None:
        """Go to the next or previous step or evaluation."""
        parts = self._library.parts()
        place = parts.index(self._part) + by if self._part in parts else len(parts) - 1
        if 0 <= place < len(parts):
            self._part = parts[place]
            self.action_clear()

    def action_filter(self) -> None:
        """Ask for a filter."""
        prompt = self.query_one("#prompt", Input)
        prompt.add_class("open")
        prompt.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        try:
            wanted = Filter.parse(event.value)
        except ConfigError as error:
            self._say(str(error))
            return
        self.query_one("#prompt").remove_class("open")
        self.query_one(DataTable).focus()
        self._search(wanted)

    @work(thread=True, exclusive=True)
    def _search(self, wanted: Filter) -> None:
        found: list[tuple[str, dict[str, Any]]] = []
        try:
            for answer in self._library.search(wanted):
                if "row" in answer:
                    found.append((answer["part"], answer["row"]))
                else:
                    said = (
                        f"{len(found)} found in {answer['searched']} of {answer['of']} steps and evaluations"
                    )
                    self.app.call_from_thread(self._say, said)
                if len(found) >= _MOST_FOUND:
                    break
        except OrhpcError as error:
            self.app.call_from_thread(self._say, str(error))
        self.app.call_from_thread(self._list, found)

    def action_group(self) -> None:
        """Show the chosen rollout's group side by side."""
        if (chosen := self._chosen()) is not None:
            part, row = chosen
            try:
                names = [r["id"] for r in self._library.rows(part) if r["group"] == row["group"]]
            except OrhpcError as error:
                self._say(str(error))
                return
            self.app.push_screen(GroupScreen(self._library, part, names))

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Read the chosen rollout."""
        if (chosen := self._chosen()) is not None:
            part, row = chosen
            self.app.push_screen(RolloutScreen(self._library, part, row["id"]))

    def _chosen(self) -> tuple[str, dict[str, Any]] | None:
        place = self.query_one(DataTable).cursor_row
        return self._found[place] if 0 <= place < len(self._found) else None

    def _list(self, found: list[tuple[str, dict[str, Any]]]) -> None:
        self._found = found
        table = self.query_one(DataTable)
        table.clear()
        several = len({part for part, _ in found}) > 1
        for part, row in found:
            where = f"{title_of(part)} " if several else ""
            table.add_row(
                Text(row["id"]),
                Text(_number(row["reward"])),
                Text(_number(row["advantage"], 2)),
                Text(str(row["length"])),
                Text(str(row["turns"])),
                Text(row["end"]),
                Text(safe(f"{where}{row['task']}  {row['error']}")),
            )

    def _say(self, text: str) -> None:
        self.query_one("#title", Static).update(Text(safe(f"{self._name}  {text}"), no_wrap=True))


class RolloutScreen(Screen[None]):
    """One rollout as messages or as colored tokens."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("t", "tokens", "Tokens"),
        ("c", "color", "Color"),
        ("left", "move(-1)", "Previous"),
        ("right", "move(1)", "Next of the group"),
        ("escape", "app.pop_screen", "Back"),
        ("q", "app.quit", "Quit"),
    ]

    def __init__(self, library: Library, part: str, name: str) -> None:
        super().__init__()
        self._library, self._part, self._id = library, part, name
        self._tokens, self._coloring = False, 0

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        with VerticalScroll():
            yield Static(id="text")
        yield Static(id="legend")
        yield Footer()

    def on_mount(self) -> None:
        self._draw()

    def action_tokens(self) -> None:
        """Change between messages and tokens."""
        self._tokens = not self._tokens
        self._draw()

    def action_color(self) -> None:
        """Color the tokens by the next quantity."""
        self._coloring = (self._coloring + 1) % len(_COLORINGS) if self._tokens else self._coloring
        self._tokens = True
        self._draw()

    def action_move(self, by: int) -> None:
        """Go to another rollout of the group."""
        try:
            rows = self._library.rows(self._part)
        except OrhpcError as error:
            self.query_one("#text", Static).update(Text(safe(str(error))))
            return
        group = next((row["group"] for row in rows if row["id"] == self._id), None)
        names = [row["id"] for row in rows if row["group"] == group]
        if names:  # else the step was done again meanwhile, with other rollouts
            self._id = names[(names.index(self._id) + by) % len(names)]
        self._draw()

    def _draw(self) -> None:
        try:
            rollout = self._library.rollout(self._part, self._id)
        except OrhpcError as error:
            self.query_one("#text", Static).update(Text(safe(str(error))))
            return
        about = f"{title_of(self._part)}, {self._id}: {_summary(rollout)}"
        self.query_one("#title", Static).update(Text(safe(about), no_wrap=True))
        legend, text = "", Text("\n".join(_messages(rollout)))
        if self._tokens:
            coloring = _COLORINGS[self._coloring]
            problem = self._library.about()["problem"]
            legend = f"no tokenizer: {problem}" if problem else f"{coloring}: {_LEGENDS[coloring]}"
            text = text if problem else _colored(rollout, coloring)
        self.query_one("#legend", Static).update(Text(safe(legend), no_wrap=True))
        self.query_one("#text", Static).update(text)


class GroupScreen(Screen[None]):
    """All rollouts of a group side by side."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape", "app.pop_screen", "Back"),
        ("q", "app.quit", "Quit"),
    ]

    def __init__(self, library: Library, part: str, names: list[str]) -> None:
        super().__init__()
        self._library, self._part, self._names = library, part, names

    def compose(self) -> ComposeResult:
        yield Static(Text(f"{title_of(self._part)}: {len(self._names)} rollouts of a group"), id="title")
        with HorizontalScroll():
            for name in self._names:
                with VerticalScroll(classes="column"):
                    yield from self._column(name)
        yield Footer()

    def _column(self, name: str) -> Iterator[Static]:
        try:
            rollout = self._library.rollout(self._part, name)
        except OrhpcError as error:
            yield Static(Text(safe(str(error))))
            return
        yield Static(Text(safe(_summary(rollout))), classes="head")
        yield Static(Text("\n".join(_messages(rollout))))


def _messages(rollout: dict[str, Any]) -> Iterator[str]:
    for message in rollout["messages"]:
        yield from message_lines(message)


def _summary(rollout: dict[str, Any]) -> str:
    advantage = "" if rollout["advantage"] is None else f", advantage {rollout['advantage']:.2f}"
    tokens = f"{rollout['response_tokens']} of {rollout['length']} tokens sampled"
    error = f", {rollout['error']}" if rollout["error"] else ""
    replay = f", {rollout['replayed_turns']} turns replayed after a stop" if rollout["replayed_turns"] else ""
    if rollout["replay_mismatch"]:
        replay = f", generated again after a stop: {rollout['replay_mismatch']}"
    return f"reward {_number(rollout['reward'])}{advantage}, {rollout['end']}, {tokens}{replay}{error}"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _colored(rollout: dict[str, Any], coloring: str) -> Text:
    """The tokens on colored ground; what was not sampled is dim."""
    text = Text()
    for segment in rollout["segments"]:
        if "text" in segment:
            text.append(safe(segment["text"]), Style(dim=True))
            continue
        for piece, _, engine, trainer, version, *_ in segment["tokens"]:
            text.append(safe(piece), _style(coloring, engine, trainer, rollout["version"], version))
    return text


def _style(
    coloring: str, engine: float, trainer: float | None, trained: int | None, sampled: int
) -> Style | None:
    if coloring == "difference" and trainer is not None:
        share = max(-1.0, min(1.0, trainer - engine))
        return _ground((46, 107, 230) if share > 0 else (220, 60, 30), abs(share))
    if coloring == "log-probability":
        return _ground((156, 54, 181), min(1.0, -engine / 5))
    if coloring == "age" and trained is not None:
        return _ground((156, 54, 181), min(1.0, (trained - sampled) / 4))
    return None


def _ground(color: tuple[int, int, int], share: float) -> Style | None:
    """A background between that of the terminal and the color; small values are made visible."""
    if share <= 0.002:
        return None
    strength = share**0.5
    red, green, blue = (round(30 + (one - 30) * strength) for one in color)
    return Style(bgcolor=f"rgb({red},{green},{blue})", color="white")
