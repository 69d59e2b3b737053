"""The record as ``orhpc view`` shows it: parts, rows, tokens, and what a search finds."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from orhpc.commands.view.filter import Filter
from orhpc.commands.view.library import Library
from orhpc.commands.view.tokens import TokenTexts, segments
from orhpc.errors import ConfigError, RecordError
from orhpc.rundir.record import RolloutFile, read_step, record_path, write_rollouts
from orhpc.rundir.trained import TrainedRollout, write_trained
from tests.unit.commands.view.kit import byte_tokenizer, library_of, make_run


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return library_of(make_run(tmp_path_factory.mktemp("run"), steps=11))


def found(library: Library, line: str) -> list[tuple[str, str]]:
    answers = library.search(Filter.parse(line))
    return [(answer["part"], answer["row"]["id"]) for answer in answers if "row" in answer]


def test_parts_are_in_the_order_of_their_steps(library: Library) -> None:
    about = library.about()
    assert about["parts"] == [*(f"step_{n}" for n in range(1, 12)), "evaluation_0"]
    assert (about["first"], about["problem"]) == ("step_11", "")


def test_rows_have_what_training_computed(library: Library) -> None:
    rows = library.rows("step_3")
    assert [row["id"] for row in rows] == ["30.0", "30.1", "30.2", "31.0", "31.1", "31.2"]
    assert [row["advantage"] for row in rows[:3]] == [-1.0, 1.0, None]
    assert [row["trained"] for row in rows[:3]] == [True, True, False]
    assert {row["age"] for row in rows} == {1}  # version 1 sampled what version 2 was trained with
    assert {row["age"] for row in library.rows("evaluation_0")} == {None}


def test_tokens_show_what_was_sampled_and_what_was_not(library: Library) -> None:
    prompt, sampled = library.rollout("step_3", "30.1")["segments"]
    assert (prompt["text"], prompt["count"]) == ("Open the door.", len("Open the door."))
    pieces, _, engine, trainer, versions = zip(*sampled["tokens"], strict=True)
    assert "".join(pieces) == "grüße 30.1"
    assert len(pieces) == len("grüße 30.1".encode())
    assert (set(engine), set(trainer), set(versions)) == ({-0.5}, {-0.625}, {1})
    # Not trained on: the trainer has computed nothing.
    assert {token[3] for token in library.rollout("step_3", "30.2")["segments"][1]["tokens"]} == {None}


def test_tokens_of_a_step_with_a_critic_have_an_advantage_and_a_value(library: Library) -> None:
    record = library.record("step_3", "30.1")
    assert record is not None
    logprobs_T = record[1].logprobs_T
    trained = TrainedRollout(0.0, logprobs_T, 2 * logprobs_T, 4 * logprobs_T)
    sampled = segments(record[1], trained, library._texts)[1]
    assert {tuple(token[5:]) for token in sampled["tokens"]} == {(-1.0, -2.0)}


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_the_texts_of_all_tokens_are_the_text(text: str) -> None:
    folder = byte_tokenizer(Path(os.environ.get("TMPDIR", "/tmp")) / f"orhpc-test-tokenizer-{os.getuid()}")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert "".join(TokenTexts(folder).decode(tokenizer.encode(text).ids)) == text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("GRÜSSE 110.1", [("step_11", "110.1")]),
        ("it broke step:11", []),  # an error is not part of the transcript
        ("failed:yes step:11", [("step_11", "110.2"), ("step_11", "111.2")]),
        ("end:failed env:org/env1 step:2..3", [("step_3", "31.2"), ("step_2", "21.2")]),
        ("reward:1 step:11..", [("step_11", "110.1"), ("step_11", "111.1")]),
        ("reward:0.5.. trained:yes step:..0", []),
        ("org/env0/train/110 reward:0..0", [("step_11", "110.0")]),
        ("</script><script> step:4 reward:1", [("step_4", "40.1"), ("step_4", "41.1")]),
        ("trained:no step:0", [("evaluation_0", "900.0")]),
    ],
)
def test_a_filter_finds_exactly_what_it_says(
    library: Library, line: str, expected: list[tuple[str, str]]
) -> None:
    assert found(library, line) == expected


def test_a_found_text_comes_with_its_surroundings(library: Library) -> None:
    answers = [a for a in library.search(Filter.parse("locked step:5")) if "row" in a]
    assert len(answers) == 6
    assert {answer["snippet"] for answer in answers} == {"It may be locked."}


def test_a_damaged_step_is_left_out_of_a_search_and_named_when_asked_for(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (file,) = run.rollouts_of(2).glob("a*.h5")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    library = library_of(run)
    assert {part for part, _ in found(library, "")} == {"step_1", "step_3", "evaluation_0"}
    with pytest.raises(RecordError, match="checksum"):
        library.rows("step_2")


def test_rows_of_a_step_that_was_repeated_are_read_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    library = library_of(run)
    assert len(library.rows("step_1")) == 6
    (file,) = run.rollouts_of(1).glob("a*.h5")
    (again,) = run.rollouts_of(2).glob("a*.h5")
    file.with_name("a002.worker_000.h5").write_bytes(again.read_bytes())
    assert next(row["group"] for row in library.rows("step_1")) == 20


def test_without_a_tokenizer_messages_are_still_read(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    library = library_of(run)
    assert "tokenizer.json" in library.about()["problem"]
    rollout = library.rollout("step_1", "10.0")
    assert rollout["segments"] == []
    assert len(rollout["messages"]) == 3


@pytest.mark.parametrize(
    "line", ["end:nowhere", "reward:a..b", "reward:", "trained:maybe", "step:1..x", "reward:nan"]
)
def test_a_wrong_filter_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match=line.split(":")[0]):
        Filter.parse(line)


@given(st.text())
def test_any_line_is_a_filter_or_an_error(line: str) -> None:
    with contextlib.suppress(ConfigError):
        Filter.parse(line)


def test_words_without_a_known_name_are_text() -> None:
    wanted: Any = Filter.parse("http://a b env:x c")
    assert (wanted.text, wanted.environment) == ("http://a b c", "x")


def test_half_a_character_of_a_tool_call_is_shown_as_a_replacement(tmp_path: Path) -> None:
    """JSON can escape half of an emoji, which no page can hold."""
    run = make_run(tmp_path)
    (name,) = {s.id for s in read_step(run.rollouts_of(2)) if s.id.endswith("0.0")}
    library = library_of(run)
    found = library.record("step_2", name)
    assert found is not None
    found[1].messages.append({"role": "assistant", "tool_calls": [{"arguments": {"text": "hi \ud83d"}}]})
    library.record = lambda part, id: found  # type: ignore[method-assign]
    shown = json.dumps(library.rollout("step_2", name), ensure_ascii=False)
    assert "hi ?" in shown.encode("utf-8").decode()


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_json_lacks_do_not_break_a_page(tmp_path: Path, number: float) -> None:
    """A policy can write 1e999 in a tool call, and training can end in NaN."""
    run = make_run(tmp_path)
    folder = run.rollouts_of(2)
    worker = record_path(folder, 1, 0)
    with RolloutFile(worker) as record:
        recorded = [record.rollout(row) for row in range(len(record))]
    for rollout in recorded:
        rollout.messages.append(
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": number}}]}
        )
    write_rollouts(worker, recorded)
    write_trained(folder, {r.id: TrainedRollout(number, r.logprobs_T + number) for r in recorded})
    library = library_of(run)
    rows = library.rows("step_2")
    rollout = library.rollout("step_2", rows[0]["id"])
    json.dumps([rows, rollout], allow_nan=False)
    assert rollout["messages"][-1]["tool_calls"][0]["arguments"]["x"] in ("NaN", "Infinity")
    assert rollout["advantage"] is None
    assert {token[3] for s in rollout["segments"] for token in s.get("tokens", ())} == {None}


def test_a_search_does_not_list_all_steps_once_per_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2000 steps, that took 16 seconds."""
    library = library_of(make_run(tmp_path))
    listed: list[str] = []
    glob = Path.glob

    def counted(path: Path, pattern: str) -> Iterator[Path]:
        listed.extend([pattern] if path.name == "rollouts" else [])
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", counted)
    assert len(found(library, "")) == 19
    assert sorted(listed) == ["evaluation_*", "step_*"]


@pytest.mark.parametrize("part", ["step_9", "../rollouts/step_1", "step_1/..", "step_", ""])
def test_only_a_part_s_own_name_is_opened(tmp_path: Path, part: str) -> None:
    with pytest.raises(RecordError, match="there is no"):
        library_of(make_run(tmp_path, steps=1)).rows(part)


def test_a_step_removed_while_it_is_searched_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by ``orhpc clean``, between the listing of a folder and the look at its files."""
    library = library_of(make_run(tmp_path))
    stat = Path.stat

    def gone(path: Path, **options: Any) -> os.stat_result:
        if path.suffix == ".h5" and path.parent.name == "step_2":
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", gone)
    assert {part for part, _ in found(library, "")} == {"step_1", "step_3", "evaluation_0"}
