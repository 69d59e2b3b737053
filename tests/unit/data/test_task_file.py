"""Task files have every row of their source once, in a fixed order; a bad row or source is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orhpc.config.data import DataSettings
from orhpc.data.task_file import main, write_tasks
from orhpc.errors import ConfigError, OrhpcError
from tests.hub import Hub, commit_of

ROWS = [
    {"prompt": "a", "label": "1", "level": 3, "info": {"answer": "x", "json": '{"deep": 7}'}},
    {"prompt": "b", "label": "2", "level": 1, "info": {"answer": "y", "json": '{"deep": 8}'}},
    {"prompt": "a", "label": "1", "level": 2, "info": {"answer": "z", "json": '{"deep": 9}'}},
]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tasks(folder: Path, split: str = "train") -> list[dict[str, Any]]:
    with (folder / f"{split}.jsonl").open() as lines:
        return [json.loads(line) for line in lines]


def written(tmp_path: Path, rows: list[dict[str, Any]] = ROWS, **settings: Any) -> list[dict[str, Any]]:
    source = write_lines(tmp_path / "source.jsonl", rows)
    write_tasks(DataSettings(path=str(source), **settings), tmp_path / "out", "data")
    return tasks(tmp_path / "out")


def test_equal_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "source.jsonl", ROWS)
    counts = write_tasks(DataSettings(path=str(source)), tmp_path / "out", "data")
    assert counts == {"train": (2, 1)}
    assert tasks(tmp_path / "out") == [{"prompt": "a", "label": "1"}, {"prompt": "b", "label": "2"}]


def test_tasks_are_sorted_by_difficulty(tmp_path: Path) -> None:
    found = written(tmp_path, difficulty="level", deduplicate=False)
    assert [task["prompt"] for task in found] == ["b", "a", "a"]


def test_columns_may_be_nested_and_templates_have_braces(tmp_path: Path) -> None:
    found = written(tmp_path, prompt="{prompt}: \\boxed{{{info.answer}}}", label="info.json.deep")
    assert found[0] == {"prompt": "a: \\boxed{x}", "label": 7}


def test_a_conversation_of_one_message_is_its_text(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "hello"}], "label": 3}]
    assert written(tmp_path, rows) == [{"prompt": "hello", "label": 3}]


def test_a_function_gets_the_whole_row(tmp_path: Path) -> None:
    (task, *_) = written(tmp_path, verifier="my:judge", label=None)
    assert task == {"prompt": "a", "row": ROWS[0]}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["parquet", "csv", "json"])
def test_other_formats_have_the_same_rows(tmp_path: Path, suffix: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": row["prompt"], "label": row["label"]} for row in ROWS]
    file = tmp_path / f"source.{suffix}"
    if suffix == "json":
        file.write_text(json.dumps(rows))
    else:
        getattr(datasets.Dataset.from_list(rows), f"to_{suffix}")(str(file))
    write_tasks(DataSettings(path=str(file), verifier="exact"), tmp_path / "out", "data")
    assert [str(task["label"]) for task in tasks(tmp_path / "out")] == ["1", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2])
def test_saved_datasets_have_the_same_rows(tmp_path: Path, splits: int) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": row["prompt"], "label": row["label"]} for row in ROWS]
    saved = datasets.Dataset.from_list(rows)
    if splits == 2:
        saved = datasets.DatasetDict({"train": saved, "test": saved})
    saved.save_to_disk(str(tmp_path / "saved"))
    counts = write_tasks(
        DataSettings(path=str(tmp_path / "saved"), verifier="exact"), tmp_path / "out", "data"
    )
    assert len(counts) == splits
    assert [str(task["label"]) for task in tasks(tmp_path / "out")] == ["1", "2"]


def test_splits_of_a_folder_and_of_a_mapping(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for split, rows in (("train", ROWS[:2]), ("test", ROWS[1:])):
        plain = [{"prompt": row["prompt"], "label": row["label"]} for row in rows]
        write_lines(folder / f"{split}.jsonl", plain)
    write_tasks(DataSettings(path=str(folder)), tmp_path / "all", "data")
    assert [t["prompt"] for t in tasks(tmp_path / "all", "test")] == ["b", "a"]
    chosen = {"train": str(folder / "test.jsonl"), "easy": f"{folder}:train"}
    write_tasks(DataSettings(path=chosen), tmp_path / "chosen", "data")
    assert [t["prompt"] for t in tasks(tmp_path / "chosen", "train")] == ["b", "a"]
    assert [t["prompt"] for t in tasks(tmp_path / "chosen", "easy")] == ["a", "b"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train.csv", "train.jsonl"])
def test_a_folder_has_the_same_rows_as_its_file(tmp_path: Path, name: str) -> None:
    """The package datasets would make 7, 2020-01-01 00:00:00 and a missing value of these labels."""
    pytest.importorskip("datasets")
    labels = ["007", "008"] if name.endswith("csv") else ["2020-01-01", "2020-01-02"]
    rows = [{"prompt": f"p{number}", "label": label} for number, label in enumerate(labels)]
    source = write_lines(tmp_path / "data" / name, rows)
    if name.endswith("csv"):
        source.write_text("prompt,label\n" + "".join(f"{row['prompt']},{row['label']}\n" for row in rows))
    for path, out in ((source, "file"), (source.parent, "folder")):
        write_tasks(DataSettings(path=str(path), verifier="exact"), tmp_path / out, "data")
    assert tasks(tmp_path / "folder") == tasks(tmp_path / "file") == rows


@pytest.mark.slow
def test_options_that_a_dataset_declares_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "some.csv").write_text("prompt;label\na;1\n")
    card = "configs:\n- config_name: default\n  data_files: some.csv\n  sep: ';'\n"
    (tmp_path / "data" / "README.md").write_text(f"---\n{card}---\n")
    write_tasks(DataSettings(path=str(tmp_path / "data")), tmp_path / "out", "data")
    assert tasks(tmp_path / "out") == [{"prompt": "a", "label": 1}]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("data/rows.tsv", "data/rows.tsv: a file's name ends with one of .jsonl, .json, .csv"),
        ("data/rows.jsonl.gz", "data/rows.jsonl.gz: a file's name ends with one of"),
        ("data/rows.jsonl:test", "a single file is the split train, not test"),
    ],
)
def test_a_file_that_exists_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / name.partition(":")[0], ROWS)
    with pytest.raises(ConfigError, match=re.escape(message)):
        write_tasks(DataSettings(path=name), tmp_path / "out", "data")


@pytest.mark.slow
def test_a_dataset_of_the_hub_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    plain = [{"prompt": row["prompt"], "label": row["label"]} for row in ROWS]
    write_lines(tmp_path / "hub" / "Acme" / "Sums" / "train.jsonl", plain)
    with Hub(tmp_path / "hub") as hub:
        # A child process: the client reads these variables when it is imported.
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        assert _program(tmp_path, {"path": "Acme/Sums"}) == {"folder": str(tmp_path / "out")}
        assert tasks(tmp_path / "out")[1] == {"prompt": "b", "label": "2"}
        commit = commit_of(tmp_path / "hub" / "Acme" / "Sums")
        assert (tmp_path / f"cache/hub/datasets--Acme--Sums/snapshots/{commit}").is_dir()
        refused = _program(tmp_path, {"path": "Acme/Nothing"})
        assert refused["kind"] == "ModelError"
        assert "environments.sums.data.path: Acme/Nothing" in refused["error"]
        assert "no such dataset" in refused["error"]


def _program(tmp_path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    import subprocess
    import sys

    command = [sys.executable, "-m", "orhpc.data.task_file", "--settings-json", json.dumps(settings)]
    command += ["--folder", str(tmp_path / "out"), "--setting", "environments.sums.data"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ('{"prompt": "a"}\n', {}, "row 1: there is no column 'label'; there are: prompt"),
        ('{"prompt": "a", "label": 1}\n{"label": 2}\n', {}, "row 2: there is no column 'prompt'"),
        ("{\n", {}, "line 1 is not JSON"),
        ("[1]\n", {}, "line 1 is not an object"),
        ("", {}, "has no rows"),
        ('{"prompt": {"x": 1}, "label": 1}\n', {}, "neither text nor a list of messages"),
        ('{"prompt": "a", "label": 1, "level": "hard"}\n', {"difficulty": "level"}, "could not convert"),
        ('{"prompt": "a", "label": 1}\n', {"prompt": "{prompt"}, "row 1: "),
        ('{"prompt": [{"role": "system", "content": "s"}], "label": 1}\n', {}, "a conversation of system"),
        ('{"prompt": "a", "label": null}\n', {"verifier": "exact"}, "row 1: column 'label' is empty"),
        ('{"prompt": "a", "label": NaN}\n', {"verifier": "exact"}, "row 1: column 'label' is empty"),
        ('{"prompt": "a", "label": " "}\n', {"verifier": "regex"}, "row 1: column 'label' is empty"),
        (
            '{"prompt": "a", "label": ["4", "four"]}\n',
            {"verifier": "regex"},
            "row 1: column 'label' is a list",
        ),
        ('{"prompt": "a", "label": {"x": 1}}\n', {}, "row 1: column 'label' is a dict"),
        ('{"prompt": NaN, "label": 1}\n', {}, "row 1: the prompt is neither text nor a list of messages"),
        ('{"prompt": "a", "label": 1, "level": NaN}\n', {"difficulty": "level"}, "column 'level' is empty"),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "label": 1}\n',
            {},
            "row 1: the message's content is not text, but list",
        ),
        (
            '{"prompt": [{"role": "user", "content": null}], "label": 1}\n',
            {},
            "row 1: the message's content is not text, but NoneType",
        ),
        ('{"prompt": "a", "label": "(4"}\n', {"verifier": "regex"}, "row 1: column 'label' is not a regular"),
        ('{"prompt": "\\ud800", "label": 1}\n', {}, "surrogates not allowed"),
        (
            '{"prompt": "a", "label": 1, "x": ' + "[" * 5000 + "]" * 5000 + "}\n",
            {},
            "line 1 is nested too deeply",
        ),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, content: str, settings: dict[str, Any], message: str) -> None:
    source = tmp_path / "source.jsonl"
    source.write_text(content)
    with pytest.raises(ConfigError, match="data") as caught:
        write_tasks(DataSettings(path=str(source), **settings), tmp_path / "out", "data")
    assert message in str(caught.value)
    assert not (tmp_path / "out" / "source.json").exists()


@pytest.mark.parametrize("path", ["nothing.jsonl", "no/such/folder", "x.parquet"])
def test_a_missing_source_is_named(tmp_path: Path, path: str) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(OrhpcError, match="no such file or folder"):
        write_tasks(DataSettings(path=path), tmp_path / "out", "data")


def test_the_program_says_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "source.jsonl", ROWS)
    settings = DataSettings(path=str(source)).model_dump_json()
    assert main(["--settings-json", settings, "--folder", str(tmp_path / "out")]) == 0
    assert "split train: 2 tasks, 1 duplicates left out" in capsys.readouterr().err


@pytest.mark.slow
@given(st.lists(st.tuples(st.text(min_size=1), st.integers()), min_size=1, max_size=20))
def test_every_distinct_row_is_written_once_and_in_order(rows: list[tuple[str, int]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        source = write_lines(Path(folder) / "source.jsonl", [{"prompt": p, "label": n} for p, n in rows])
        write_tasks(DataSettings(path=str(source)), Path(folder) / "out", "data")
        found = [(task["prompt"], task["label"]) for task in tasks(Path(folder) / "out")]
    assert found == list(dict.fromkeys(rows))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "\xe9", "label": 1}\n', "a.jsonl, line 1 is not UTF-8"),
        ("a.json", b'{"prompt": "a", "label": 1}\n{"prompt": "b", "label": 2}\n', "a.json is not JSON"),
        ("a.json", b'{"prompt": "a", "label": 1}', "is not a list of objects"),
        ("a.json", b"[1]", "is not a list of objects"),
    ],
)
def test_a_damaged_file_gives_one_error_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    settings = json.dumps({"path": str(tmp_path / name)})
    assert main(["--settings-json", settings, "--folder", str(tmp_path / "out")]) == 2
    assert message in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path, suffix: str) -> None:
    row = json.dumps({"prompt": "a", "label": 1})
    file = tmp_path / f"a.{suffix}"
    file.write_text(f"[{row}]" if suffix == "json" else row + "\r\n", encoding="utf-8-sig")
    write_tasks(DataSettings(path=str(file)), tmp_path / "out", "data")
    assert tasks(tmp_path / "out") == [{"prompt": "a", "label": 1}]


def test_duplicates_have_the_same_prompt_and_label_whatever_else_their_rows_have(tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": "a", "label": "1"} for i in range(3)]
    assert [t["row"]["id"] for t in written(tmp_path, rows, verifier="my:judge")] == [0]
    assert (
        len(written(tmp_path, rows, verifier="my:judge", label=None)) == 3
    )  # the label is somewhere in the row


@pytest.mark.parametrize("path", ["{folder}", "{folder}:trian"])
def test_a_mapping_of_a_dataset_names_one_of_its_splits(tmp_path: Path, path: str) -> None:
    """The last of several splits, often the test split, would otherwise be trained on."""
    pytest.importorskip("datasets")
    for split in ("train", "test"):
        write_lines(tmp_path / "data" / f"{split}.jsonl", [{"prompt": split, "label": "1"}])
    chosen = {"train": path.format(folder=tmp_path / "data")}
    with pytest.raises(ConfigError, match=":SPLIT of "):
        write_tasks(DataSettings(path=chosen), tmp_path / "out", "data")
    assert not (tmp_path / "out" / "source.json").exists()


def test_columns_of_a_csv_file_are_the_text_that_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfprompt,label\r\n"a, b",007\r\nb,2\r\nc,2.5\r\nd,None\r\n')
    write_tasks(DataSettings(path=str(tmp_path / "a.csv"), verifier="exact"), tmp_path / "out", "data")
    assert [task["prompt"] for task in tasks(tmp_path / "out")] == ["a, b", "b", "c", "d"]
    assert [task["label"] for task in tasks(tmp_path / "out")] == ["007", "2", "2.5", "None"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prompt,label\na,1\nb\n", "a.csv, line 3 has not the columns of the first line"),
        ("prompt,label\na,1,2\n", "a.csv, line 2 has not the columns of the first line"),
        ("prompt,label\na,\n", "row 1: column 'label' is empty"),
        ("prompt,answer\na,1\n", "there is no column 'label'; there are: prompt, answer"),
    ],
)
def test_a_bad_line_of_a_csv_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(ConfigError, match=message):
        write_tasks(DataSettings(path=str(tmp_path / "a.csv"), verifier="exact"), tmp_path / "out", "data")
