"""From names to raw rows: what is read, and that every mistake is one line with the file, the line and the fix."""

import gzip
import json
import os
import random
import re
import stat
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, IterableDataset

import row_files
import sources
from row_files import csv_hint
from sources import Loaded, Mixture, Source, load, locate, read_mixture, split_names, split_off


@pytest.fixture(autouse=True, scope="module")
def quiet_cache(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
    patch.undo()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def write(name: str, content) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


def message(call, *args, **kwargs) -> str:
    with pytest.raises(ValueError) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text and text == text.strip() and len(text) < 600
    return text


def rows(name, split="train", **kwargs) -> list[dict]:
    return list(load(Source(name, split), **kwargs).dataset)


TEN = [{"text": f"row {i}"} for i in range(10)]


# ---- what is accepted ---------------------------------------------------------------------------------------------------


def test_files_of_every_kind_hold_the_same_rows():
    write("d.jsonl", TEN)
    write("d.json", json.dumps(TEN))
    write("pretty.json", json.dumps(TEN, indent=2))
    write("lines.json", TEN)
    write("d.csv", "text\n" + "".join(f"row {i}\n" for i in range(10)))
    write("d.jsonl.gz", gzip.compress(Path("d.jsonl").read_bytes()))
    write("d.csv.gz", gzip.compress(Path("d.csv").read_bytes()))
    write("d.json.gz", gzip.compress(Path("d.json").read_bytes()))
    write("bom.jsonl", b"\xef\xbb\xbf" + Path("d.jsonl").read_bytes())
    write("bom.csv", b"\xef\xbb\xbf" + Path("d.csv").read_bytes())
    write("crlf.jsonl", Path("d.jsonl").read_bytes().replace(b"\n", b"\r\n\r\n"))
    write("odd [1]*.jsonl", TEN)
    pq.write_table(pa.table({"text": [row["text"] for row in TEN]}), "d.parquet")
    for name in sorted(os.listdir()):
        found = load(Source(name))
        assert isinstance(found, Loaded) and list(found.dataset) == TEN and found.skipped == [], name
        streamed = load(Source(name), streaming=True).dataset
        assert isinstance(streamed, IterableDataset) and list(streamed) == TEN, name
    assert rows("./d.jsonl") == TEN
    assert rows(os.path.abspath("d.jsonl")) == TEN


def test_json_list_of_texts_is_text():
    write("t.json", '["a", "b"]')
    assert rows("t.json") == [{"text": "a"}, {"text": "b"}]
    assert locate(Source("t.json"), {"text": "b"}) == "t.json element 2"


def test_folder_splits_and_files_that_are_no_data():
    for folder in ("f", "f2/data"):
        write(f"{folder}/train.jsonl", TEN)
        write(f"{folder}/test.jsonl", TEN[:3])
    write("f/README.md", "# notes")
    write("f/train-notes.md", "not data")
    write("f/logo.png", b"\x89PNG")
    write("f/instruction.md", "looks like something else to datasets")
    for name in ("f", "f/", "f2"):
        assert rows(name) == TEN
        assert rows(name, "test") == TEN[:3]
        assert rows(name, "test[1:]+train[:1]") == [*TEN[1:3], TEN[0]]
    assert message(load, Source("f", "validation")) == "f has no split 'validation': it has train, test"


def test_sharded_folder_plain_folder_and_glob():
    Path("s/data").mkdir(parents=True)
    for part in range(2):
        pq.write_table(pa.table({"x": [part]}), f"s/data/train_sft-0000{part}-of-00002.parquet")
    assert rows("s", "train_sft") == [{"x": 0}, {"x": 1}]
    assert message(load, Source("s")) == "s has no split 'train': it has train_sft"
    write("p/b.jsonl", [{"x": 2}])
    write("p/a.jsonl", [{"x": 1}])
    write("p/deep/c.jsonl", [{"x": 3}])
    write("p/notes.txt", "no data")
    assert rows("p") == [{"x": 1}, {"x": 2}, {"x": 3}]
    assert rows("p/*") == rows("p/*.jsonl") == [{"x": 1}, {"x": 2}]
    assert rows("p/**/*.jsonl") == [{"x": 1}, {"x": 2}, {"x": 3}]
    assert message(load, Source("p/*.jsonl", "test")) == (
        "p/*.jsonl has no split 'test': it has train (a single file or pattern is the split train)"
    )


def test_copy_of_a_hub_data_set_says_its_splits_in_the_readme():
    write("h/x/one.jsonl", TEN[:2])
    write("h/x/two.jsonl", TEN[2:5])
    card = "---\nconfigs:\n- config_name: {}\n  data_files:\n  - split: first\n    path: x/one.jsonl\n  - split: second\n    path: x/two.jsonl\n"
    write("h/README.md", card.format("default") + "---\n# it\n")
    assert rows("h", "second") == TEN[2:5]
    assert message(load, Source("h")) == "h has no split 'train': it has first, second"
    write("h/README.md", card.format("a") + card.format("b").split("configs:\n")[1] + "---\n")
    assert message(load, Source("h")).startswith("h holds the configurations a, b: name the files of one")


def test_saved_to_disk():
    Dataset.from_list(TEN).save_to_disk("one")
    DatasetDict({"train": Dataset.from_list(TEN), "test_sft": Dataset.from_list(TEN[:4])}).save_to_disk("two")
    assert rows("one") == rows("two") == TEN
    assert rows("two", "test_sft[:50%]") == TEN[:2]
    assert rows("two", "train[-2:]+test_sft[1:2]") == [TEN[8], TEN[9], TEN[1]]
    assert rows("two", "train", streaming=True) == TEN
    assert message(load, Source("two", "test")) == "two has no split 'test': it has train, test_sft"
    assert message(load, Source("one", "test[:2]")) == "one has no split 'test': it has train"
    Path("one/dataset_info.json").write_text("{")
    assert message(load, Source("one")).startswith("one: ")


@pytest.mark.parametrize("kind", ["file", "disk"])
@pytest.mark.parametrize(
    "split,expected",
    [
        ("train[:3]", TEN[:3]),
        ("train[2:4]", TEN[2:4]),
        ("train[10%:30%]", TEN[1:3]),
        ("train[-1:]", TEN[9:]),
        ("train[:1] + train[5:6]", [TEN[0], TEN[5]]),
        ("train[:99]", TEN),
        ("train+train", TEN + TEN),
    ],
)
def test_split_expressions(kind, split, expected):
    name = write("d.jsonl", TEN)
    if kind == "disk":
        Dataset.from_list(TEN).save_to_disk("saved")
        name = "saved"
    assert rows(name, split) == expected


def test_max_samples():
    write("d.jsonl", TEN)
    for streaming in (False, True):
        assert list(load(Source("d.jsonl", max_samples=4), streaming=streaming).dataset) == TEN[:4]
        assert list(load(Source("d.jsonl", max_samples=99), streaming=streaming).dataset) == TEN
    assert message(load, Source("d.jsonl", max_samples=0)) == "max_samples 0 of d.jsonl must be at least 1"


def test_streaming_refuses_expressions():
    write("d.jsonl", TEN)
    for split in ("train[:5]", "train+test"):
        assert message(load, Source("d.jsonl", split), streaming=True) == (
            f"split '{split}' of d.jsonl is an expression, which cannot be streamed: name one split, --splits train, and limit it with --max_samples"
        )


def test_a_line_of_ten_megabytes_and_rows_after_it():
    big = [{"text": "x"}, {"text": "y" * 11_000_000}, {"text": "z"}]
    assert [len(row["text"]) for row in rows(write("big.jsonl", big))] == [1, 11_000_000, 1]
    write("big.csv", "text\nx\n" + "y" * 1_000_000 + "\n")
    assert [len(row["text"]) for row in rows("big.csv")] == [1, 1_000_000]


def test_columns_and_types_that_only_later_rows_have():
    write("m/a.jsonl", [{"text": None, "n": 1, "m": [{"r": "x"}]}])
    write("m/b.jsonl", [{"text": "x", "n": 1.5, "m": [{"r": "x", "name": "y"}], "more": "z"}])
    found = rows("m")
    assert [row["text"] for row in found] == [None, "x"]
    assert [row["n"] for row in found] == [1, 1.5]
    assert [row["m"] for row in found] == [[{"r": "x"}], [{"r": "x", "name": "y"}]]
    assert [row["more"] for row in found] == [None, "z"]


def test_optional_keys_tool_arguments_and_null_content_load_unchanged():
    chats = [
        {"messages": [{"role": "user", "content": "42"}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"n": 1}}]}]},
        {"messages": [{"role": "assistant", "content": "true", "tool_calls": [{"name": "g", "arguments": {"n": "one"}}]}]},
    ]
    assert rows(write("chats.jsonl", chats)) == chats


def test_what_is_in_a_csv_is_text():
    """pandas would make numbers, nulls and truth values of answers."""
    write("answers.csv", "text,n\nNA,0\nNone,1\nTrue,\n007,1.50\n")
    want = [{"text": t, "n": n} for t, n in (("NA", "0"), ("None", "1"), ("True", None), ("007", "1.50"))]
    assert rows("answers.csv") == want
    write("late.csv", "text\n" + "1\n" * 300_000 + "x\n")
    write("zeros.csv", "text\nx\n" + "007\n" * 300_000)
    assert load(Source("late.csv")).dataset[-1:]["text"] == ["x"]
    assert load(Source("zeros.csv")).dataset[-1:]["text"] == ["007"], "a number was made of text"
    write("c/a.csv", "a,b\n1,x\n")
    write("c/b.csv", "b,a\n007,1.5\n")
    assert rows("c") == [{"a": "1", "b": "x"}, {"a": "1.5", "b": "007"}]


def test_dates_are_text():
    """Arrow would make times of them, or write those of a later part of the file in another form."""
    call = {"name": "f", "arguments": {"day": "2024-01-01"}}
    table = [{"text": f"2024-01-{i % 28 + 1:02}", "m": [{"role": "a", "calls": [call]}]} for i in range(30)]
    write("dates.jsonl", "".join(json.dumps(row) + "\n" for row in table))
    assert rows("dates.jsonl") == table == list(load(Source("dates.jsonl"), streaming=True).dataset)
    # Parts of a file are parsed on their own: here later ones hold nothing but dates.
    late = [{"text": "x" * 1000}] * 3000 + [{"text": f"2024-01-{i % 28 + 1:02}"} for i in range(200_000)]
    write("late.jsonl", "".join(json.dumps(row) + "\n" for row in late))
    assert os.path.getsize("late.jsonl") > 3 * row_files.SMALL_PART
    assert load(Source("late.jsonl")).dataset[-9:]["text"] == [row["text"] for row in late[-9:]]
    assert locate(Source("dates.jsonl"), table[7]) == "dates.jsonl line 8"


def test_deep_nesting_is_one_line():
    write("deep.jsonl", '{"text": "a"}\n{"text": ' + "[" * 600 + "]" * 600 + "}\n")
    assert message(load, Source("deep.jsonl")) == (
        "deep.jsonl line 2: lists and objects in each other, more than 30 deep: fix the line, or --on_bad_row skip"
    )


def test_folders_with_brackets_and_links_to_nothing():
    write("br[ack]et/train.jsonl", '{"text": "a"}\n')
    assert rows("br[ack]et") == [{"text": "a"}]
    write("linked/a.jsonl", '{"text": "a"}\n')
    os.symlink("gone.jsonl", "linked/b.jsonl")
    assert (
        message(load, Source("linked")) == "linked/b.jsonl is a link to gone.jsonl, which does not exist: mend or remove it"
    )


def test_capital_suffixes():
    write("A.JSONL", '{"text": "a"}\n')
    assert rows("A.JSONL") == [{"text": "a"}]


# ---- what is refused ----------------------------------------------------------------------------------------------------


def bad_lines(*lines) -> str:
    return write("data/train.jsonl", "".join(line if line.endswith("\n") else line + "\n" for line in lines))


GOOD = '{"text": "a"}'


@pytest.mark.parametrize(
    "line,reason",
    [
        ('{"text": 1 "b": 2}', "not JSON (Expecting ',' delimiter at column 12)"),
        ('{"text": "b', "not JSON (Unterminated string starting at column 10)"),
        ("[1]", 'a list, not an object such as {"text": ...}'),
        ("5", 'a number, not an object such as {"text": ...}'),
        ('"x"', 'text, not an object such as {"text": ...}'),
        ("null", 'null, not an object such as {"text": ...}'),
        ('{"text": 42}', "column 'text' has the number 42 where other lines have text"),
        ('{"text": ["b"]}', "column 'text' has a list where other lines have text"),
        ('{"text": true}', "column 'text' has true where other lines have text"),
        ('{"text": {"a": 1}}', "column 'text' has an object where other lines have text"),
        ('{"text": "a", "text": "b"}', "key 'text' is written twice"),
        (r'{"text": "\ud800"}', r"\ud800 is half of a character (a lone surrogate)"),
    ],
)
def test_bad_line_of_jsonl(line, reason):
    name = bad_lines(GOOD, GOOD, "", line, GOOD)
    assert message(load, Source(name)) == f"data/train.jsonl line 4: {reason}: fix the line, or --on_bad_row skip"
    assert (
        message(load, Source(name), streaming=True)
        == f"data/train.jsonl line 4: {reason}: fix the line, or --on_bad_row skip"
    )
    found = load(Source(name), on_bad_row="skip")
    assert found.skipped == [f"data/train.jsonl line 4: {reason}"]
    assert list(found.dataset) == [{"text": "a"}] * 3
    assert list(load(Source(name), on_bad_row="skip", streaming=True).dataset) == [{"text": "a"}] * 3
    assert os.listdir("data") == ["train.jsonl"], "something was written beside the file"


def test_truncated_last_line_and_several_bad_lines():
    name = write("t.jsonl", GOOD + "\n{oops\n" + GOOD + '\n{"text": "ab')
    assert message(load, Source(name)) == (
        "t.jsonl line 2: not JSON (Expecting property name enclosed in double quotes at column 2): fix the line, or --on_bad_row skip (and 1 more)"
    )
    assert [line.split(":")[0] for line in load(Source(name), on_bad_row="skip").skipped] == [
        "t.jsonl line 2",
        "t.jsonl line 4",
    ]


def test_not_utf8():
    name = write("l.jsonl", b'{"text": "a"}\n{"text": "b"}\n{"text": "xxxxx \xe9"}\n')
    reason = "l.jsonl line 3: byte 0xe9 at column 17 is not UTF-8"
    assert (
        message(load, Source(name))
        == f"{reason}: convert the file, for instance iconv -f latin1 -t utf-8, or --on_bad_row skip"
    )
    assert load(Source(name), on_bad_row="skip").skipped == [reason]
    name = write("l.csv", "text\na\né\n".encode("latin1"))
    assert message(load, Source(name)) == (
        "l.csv line 3: byte 0xe9 at column 1 is not UTF-8: convert the file, for instance iconv -f latin1 -t utf-8, or --on_bad_row skip"
    )
    assert rows(name, on_bad_row="skip") == [{"text": "a"}]
    name = write("l.json", '[{"text": "a"},\n{"text": "é"}]'.encode("latin1"))
    assert message(load, Source(name)) == (
        "l.json line 2: byte 0xe9 at column 11 is not UTF-8: convert the file, for instance iconv -f latin1 -t utf-8"
    )
    for name in ("u.jsonl", "u.csv"):
        write(name, 'text\n"a"'.encode("utf-16"))
        assert message(load, Source(name)) == f"{name} is UTF-16: convert the file, for instance iconv -f utf-16 -t utf-8"
    name = write("h.csv", "té,b\n1,2\n".encode("latin1"))
    assert message(load, Source(name)).startswith("h.csv line 1: byte 0xe9 at column 2 is not UTF-8: convert the file")


def test_nested_mixture_is_found_and_majority_decides():
    text = {"messages": [{"role": "user", "content": "42"}]}
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}
    name = write("n.jsonl", [parts, text, text])
    assert message(load, Source(name)) == (
        "n.jsonl line 1: column 'messages[].content' has a list where other lines have text: fix the line, or --on_bad_row skip"
    )
    assert rows(name, on_bad_row="skip") == [text, text]


def test_mixture_across_files_is_found():
    write("x/a.jsonl", [{"text": "a"}, {"text": "b"}])
    write("x/b.jsonl", [{"text": 42}])
    assert message(load, Source("x")) == (
        "x/b.jsonl line 1: column 'text' has the number 42 where other lines have text: fix the line, or --on_bad_row skip"
    )
    found = load(Source("x"), on_bad_row="skip")
    assert list(found.dataset) == [{"text": "a"}, {"text": "b"}] and len(found.skipped) == 1


def test_null_and_mixed_numbers_are_not_mixed():
    given = [{"a": None, "b": 1}, {"a": "x", "b": 1.5}, {"b": None}]
    assert rows(write("n.jsonl", given)) == [{"a": None, "b": 1.0}, {"a": "x", "b": 1.5}, {"a": None, "b": None}]


def test_json_lists():
    name = write("d.json", '[{"a": 1},\n {"a" 2}]')
    assert message(load, Source(name)) == (
        "d.json line 2: not JSON (Expecting ':' delimiter at column 7): fix it; bad rows can be skipped only in a file with one object per line"
    )
    name = write("e.json", json.dumps([{"a": 1}, 5, {"a": "x"}, {"a": 2}]))
    assert message(load, Source(name)) == (
        'e.json element 2: a number, not an object such as {"text": ...}: fix the element, or --on_bad_row skip (and 1 more)'
    )
    assert rows(name, on_bad_row="skip") == [{"a": 1}, {"a": 2}]
    assert message(load, Source(write("none.json", "[]"))) == "none.json has no rows"
    assert rows(write("digits.json", '[{"a": 0.12345678901234567}]')) == [{"a": 0.12345678901234567}], "rounded"


@pytest.mark.parametrize("indent", [None, 1])
def test_json_object_around_the_rows(indent):
    name = write("d.json", json.dumps({"version": "1", "data": [{"text": "a"}, {"text": "b"}]}, indent=indent))
    assert message(load, Source(name)) == (
        "d.json: the top level is an object whose 'data' holds the 2 rows: save that list alone, for instance jq .data d.json > rows.json"
    )


def test_one_object_is_a_row_only_on_one_line():
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}]}
    assert rows(write("one.json", json.dumps(chat))) == [chat]
    assert message(load, Source(write("two.json", json.dumps({"text": ["a", "b"]}, indent=1)))) == (
        "two.json: the top level is one object, not rows: put them in a list, [{...}, {...}], or one on each line"
    )


@pytest.mark.parametrize(
    "content,line,count",
    [
        ("a,b\n1,x\n2,y,z\n3,w\n", 3, 3),
        ("a,b\n1,x,q\n2,y\n", 2, 3),
        ("a,b\n1,x\n2\n3,w\n", 3, 1),
        ('a,b\n1,"x\nx"\n2,y,z\n', 4, 3),
    ],
)
def test_ragged_csv(content, line, count):
    name = write("r.csv", content)
    reason = f"r.csv line {line}: {count} fields where the header has 2"
    assert message(load, Source(name)) == f"{reason}: fix the line, or --on_bad_row skip"
    found = load(Source(name), on_bad_row="skip")
    assert found.skipped == [reason]
    assert len(found.dataset) == content.count("\n") - 2 - content.count('"x\n')
    assert found.dataset.column_names == ["a", "b"]


def test_other_csv_mistakes():
    name = write("q.csv", 'a,b\n1,x\n2,"y\n3,z\n')
    for skip in ("error", "skip"):
        assert message(load, Source(name), on_bad_row=skip) == (
            'q.csv line 3: a quote is opened and never closed: close it, or write "" for a quote'
        )
    assert rows(write("inch.csv", 'a,b\n1,5" pipe\n')) == [{"a": "1", "b": '5" pipe'}]
    write("two/a.csv", "a,b\n1,x\n")
    write("two/b.csv", "a,c\n1,x\n")
    assert message(load, Source("two")) == (
        "two/b.csv has the columns a, c, and two/a.csv has a, b: give all files of one split the same columns"
    )


def test_empty_files_and_splits():
    assert message(load, Source(write("e.jsonl", ""))) == "e.jsonl has no rows"
    assert message(load, Source(write("blank.jsonl", "\n \n"))) == "blank.jsonl has no rows"
    assert message(load, Source(write("e.csv", ""))) == "e.csv has no rows"
    assert message(load, Source(write("h.csv", "a,b\n"))) == "h.csv has no rows, only a header line"
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), "e.parquet")
    assert message(load, Source("e.parquet")) == "e.parquet has no rows"
    write("d.jsonl", TEN)
    assert message(load, Source("d.jsonl", "train[10:]")) == "split 'train[10:]' of d.jsonl has no rows"
    Dataset.from_dict({"a": []}).save_to_disk("empty")
    for streaming in (False, True):
        assert message(load, Source("empty"), streaming=streaming) == "split 'train' of empty has no rows"
    DatasetDict({"train": Dataset.from_list(TEN), "test": Dataset.from_dict({"a": []})}).save_to_disk("half")
    assert rows("half") == TEN
    assert message(load, Source("half", "test")) == "split 'test' of half has no rows"
    write("mix/a.jsonl", "")
    write("mix/b.jsonl", TEN)
    assert rows("mix") == TEN


def test_every_row_bad():
    name = write("b.jsonl", "{\n}\n")
    assert message(load, Source(name), on_bad_row="skip") == (
        "b.jsonl line 1: not JSON (Expecting property name enclosed in double quotes at column 2): none of the 2 rows of b.jsonl can be used"
    )


def test_parquet_mistakes():
    pq.write_table(pa.table({"a": list(range(1000))}), "good.parquet")
    good = Path("good.parquet").read_bytes()
    for name, content in (("cut.parquet", good[:-20]), ("text.parquet", b"hello"), ("none.parquet", b"")):
        assert message(load, Source(write(name, content))).startswith(f"{name} is not a parquet file or is truncated (")
    write("rot.parquet", good[:4] + b"\xff" * 60 + good[64:])
    assert message(load, Source("rot.parquet")).startswith("rot.parquet: ")
    Path("p").mkdir()
    pq.write_table(pa.table({"a": ["x"]}), "p/a.parquet")
    pq.write_table(pa.table({"a": [1]}), "p/b.parquet")
    assert (
        message(load, Source("p")) == "p/b.parquet: column 'a' is int64, and in p/a.parquet it is string: write both as one"
    )
    pq.write_table(pa.table({"b": ["x"]}), "p/b.parquet")
    assert (
        message(load, Source("p"))
        == "p/b.parquet has the columns b, and p/a.parquet has a: give all files of one split the same columns"
    )
    pq.write_table(pa.table({"a": pa.array([None], pa.null())}), "p/b.parquet")
    assert rows("p") == [{"a": "x"}, {"a": None}]


def test_damaged_gzip():
    content = gzip.compress(b"".join(b'{"a": "%d"}\n' % i for i in range(9999)))
    assert message(load, Source(write("cut.jsonl.gz", content[:-2000]))).startswith("cut.jsonl.gz cannot be read: ")
    assert message(load, Source(write("not.jsonl.gz", b'{"a": 1}\n'))).startswith(
        "not.jsonl.gz cannot be read: Not a gzipped file"
    )


def test_names_that_lead_nowhere():
    for name in ("missing.jsonl", "./x", "data/x.csv", "a/b/c", "missing.jsonl.gz", ""):
        assert (
            message(load, Source(name)) == f"{name!r} does not exist: name a file, a folder, a pattern in quotes or a Hub id"
        )
    assert message(load, Source("data/*.jsonl")) == "data/*.jsonl matches no file"
    assert (
        message(load, Source(write("d.txt", "x")))
        == "d.txt: a .txt file is not one of .json, .jsonl, .csv, .parquet (.gz of all but parquet)"
    )
    assert message(load, Source("*.txt")).startswith("*.txt matches d.txt and others like it, which is not one of")
    assert "a .parquet.gz file is not one of" in message(load, Source(write("d.parquet.gz", "x")))
    assert message(load, Source("https://x.org/d.jsonl")).startswith("https://x.org/d.jsonl is a URL: download it")
    Path("nothing").mkdir()
    assert message(load, Source("nothing")) == "nothing holds no .json, .jsonl, .csv, .parquet file"
    for name in ("json", "pandas", "csv"):
        assert (
            message(load, Source(name))
            == f"{name!r} is a file format, not a data set: name the file, the folder or a Hub id"
        )
    write("d.jsonl", TEN)
    assert message(load, Source("d.jsonl"), on_bad_row="drop") == "--on_bad_row 'drop' is neither error nor skip"
    for split in ("train[5]", "train[:200%]", "", "train-1", "train[:0.5%]"):
        assert message(load, Source("d.jsonl", split)).startswith(
            f"split {split!r} is not a split or a part of one: write for instance"
        )


def test_folder_of_two_kinds():
    write("f/train.jsonl", TEN)
    write("f/extra.csv", "text\nx\n")
    assert message(load, Source("f")) == (
        "f mixes files of the kinds csv (f/extra.csv) and json (f/train.jsonl): name those of one kind, for instance 'f/*.jsonl'"
    )


def test_configuration_of_a_local_path():
    write("d.jsonl", TEN)
    assert message(load, Source("d.jsonl", config="main")) == (
        "--dataset_config_name main is for Hub data sets, and d.jsonl is a local one: drop it"
    )


def test_permission_denied(monkeypatch):
    write("d.jsonl", TEN)
    if os.geteuid() != 0:
        os.chmod("d.jsonl", 0)
    else:  # root may read anything
        monkeypatch.setattr(
            sources, "open", lambda *a, **k: (_ for _ in ()).throw(PermissionError(13, "Permission denied")), raising=False
        )
    assert message(load, Source("d.jsonl")) == "d.jsonl cannot be read: Permission denied (chmod +r d.jsonl)"
    os.chmod("d.jsonl", stat.S_IRUSR)
    Path("locked").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert message(load, Source("locked")) == "locked cannot be read: permission denied (chmod +rx locked)"


def test_hub(monkeypatch):
    calls = []

    def fake(name, config, **kwargs):
        calls.append((name, config, kwargs))
        if name == "o/absent":
            raise datasets.exceptions.DatasetNotFoundError(
                "Dataset 'o/absent' doesn't exist on the Hub or cannot be accessed.\nmore"
            )
        if name == "o/configs":
            raise ValueError(
                "Config name is missing.\nPlease pick one among the available configs: ['a', 'b']\nExample of usage:\n\t`x`"
            )
        if kwargs["split"] == "nope":
            raise ValueError("Unknown split \"nope\". Should be one of ['train'].")
        if name == "o/broken":
            raise datasets.exceptions.DatasetGenerationError("An error occurred") from TypeError("Couldn't cast\na: int64")
        return Dataset.from_list(TEN)

    monkeypatch.setattr(datasets, "load_dataset", fake)
    found = load(Source("o/d", "train[:5]", config="c", max_samples=3))
    assert list(found.dataset) == TEN[:3] and calls == [("o/d", "c", {"split": "train[:5]", "streaming": False})]
    assert message(load, Source("o/absent")) == (
        "--dataset_name o/absent is neither a local path nor a Hub data set that can be reached: Dataset 'o/absent' doesn't exist on the Hub or cannot be accessed."
    )
    assert message(load, Source("o/configs")) == (
        "o/configs split train: Config name is missing. Please pick one among the available configs: ['a', 'b']"
    )
    assert message(load, Source("o/d", "nope")) == "o/d split nope: Unknown split \"nope\". Should be one of ['train']."
    assert message(load, Source("o/broken")) == "o/broken split train: Couldn't cast a: int64"


def test_hub_that_cannot_be_reached():
    assert message(load, Source("no-such-owner/nothing")).startswith(
        "--dataset_name no-such-owner/nothing is neither a local path nor a Hub data set that can be reached: "
    )


# ---- skipping and locating ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_skip_counts_equal_brute_force(seed):
    dice = random.Random(seed)
    choices = ['{"text": "t%d"}', '{"text": %d}', "[%d]", "{%d", '{"text": ["t%d"]}', '{"text": null, "n": %d}']
    lines = [(dice.choice(choices) if dice.random() < 0.3 else choices[0]) % i for i in range(400)]
    name = write("many.jsonl", "\n".join(lines))

    def good(line):
        try:
            row = json.loads(line)
        except ValueError:
            return False
        return isinstance(row, dict) and (row["text"] is None or isinstance(row["text"], str))

    found = load(Source(name), on_bad_row="skip")
    assert [row["text"] for row in found.dataset] == [json.loads(line)["text"] for line in lines if good(line)]
    assert [line.split(":")[0] for line in found.skipped] == [
        f"many.jsonl line {i}" for i, line in enumerate(lines, 1) if not good(line)
    ]


def test_findings_and_joined_file_are_kept_by_content(monkeypatch):
    name = write("k.jsonl", GOOD + "\n{bad\n")
    first = load(Source(name), on_bad_row="skip").skipped
    scans = []
    scan = row_files._scan
    monkeypatch.setattr(row_files, "_scan", lambda *args: scans.append(args) or scan(*args))
    assert load(Source(name), on_bad_row="skip").skipped == first and scans == []
    write("k.jsonl", GOOD + "\n" + GOOD + "\n{bad\n")
    assert load(Source(name), on_bad_row="skip").skipped[0].startswith("k.jsonl line 3") and len(scans) == 1
    assert len(rows(name, on_bad_row="skip")) == 2


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "jsonl.gz"])
def test_locate_finds_rows_after_shuffles_and_slices(kind):
    table = [{"text": f"text {i}\nsecond" if i % 3 else f"0{i}", "n": i if i % 4 else None, "x": i / 3} for i in range(200)]
    name = f"d/train.{kind}"
    if kind == "json":
        write(name, json.dumps(table))
    elif kind == "csv":
        write(
            name,
            "text,n,x\n"
            + "".join('"{}",{},{!r}\n'.format(r["text"], "" if r["n"] is None else r["n"], r["x"]) for r in table),
        )
    elif kind == "parquet":
        Path("d").mkdir()
        pq.write_table(pa.Table.from_pylist(table), name)
    else:
        text = "".join(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in table)
        write(name, gzip.compress(text.encode()) if kind.endswith("gz") else text)
    expected, line = [], 2
    for i, row in enumerate(table):
        place = {"json": f"element {i + 1}", "csv": f"line {line}", "parquet": f"row {i + 1}"}.get(kind, f"line {i + 1}")
        expected.append(f"{name} {place}")
        line += 1 + row["text"].count("\n")
    source = Source("d", "train[50:]")
    dataset = load(source).dataset.shuffle(seed=1)
    for row in dataset.select(range(0, len(dataset), 9)):
        assert locate(source, row) == expected[round(float(row["x"]) * 3)]
    assert locate(source, {"text": "absent"}) is None


def test_locate_elsewhere():
    write(
        "d.jsonl",
        [{"text": "a"}, {"text": "a"}, {"text": "b", "m": [{"r": "u"}]}, {"text": "c", "m": [{"r": "v", "n": "w"}]}],
    )
    dataset = load(Source("d.jsonl")).dataset
    assert locate(Source("d.jsonl"), dataset[2]) == "d.jsonl line 3"
    assert locate(Source("d.jsonl"), dataset[1]) == "d.jsonl line 1", "the first of equal rows"
    write("e.jsonl", "{bad\n\n" + GOOD + "\n")
    assert locate(Source("e.jsonl"), {"text": "a", "more": None}) == "e.jsonl line 3"
    Dataset.from_list(TEN).save_to_disk("saved")
    assert locate(Source("saved"), TEN[0]) is None
    assert locate(Source("owner/name"), TEN[0]) is None
    assert locate(Source("missing.jsonl"), TEN[0]) is None


# ---- split_names, split_off, csv_hint -----------------------------------------------------------------------------------


def test_split_names():
    assert split_names("train") == ["train"]
    assert split_names(" train[:10%] , test_sft[:500],") == ["train[:10%]", "test_sft[:500]"]
    for splits in ("", ",", "a,b,c"):
        assert (
            message(split_names, splits)
            == f"--splits {splits!r} must name one split to train on and at most one to evaluate on: train,test"
        )
    assert message(split_names, "train,test[3]").startswith("split 'test[3]' is not a split or a part of one")


def test_split_off():
    dataset = Dataset.from_dict({"i": list(range(20))})
    train, test = split_off(dataset, 0.1, 3)
    assert (len(train), len(test)) == (18, 2)
    assert sorted([*train["i"], *test["i"]]) == list(range(20))
    assert list(split_off(dataset, 0.1, 3)[1]["i"]) == list(test["i"]) != list(split_off(dataset, 0.1, 4)[1]["i"])
    assert [len(part) for part in split_off(dataset.select(range(2)), 0.01, 0)] == [1, 1]
    for fraction in (0, 1, -0.5, 2):
        assert message(split_off, dataset, fraction, 0).startswith(f"--eval_fraction {fraction} must lie between 0 and 1")
    assert (
        message(split_off, dataset.select([0]), 0.5, 0)
        == "--eval_fraction 0.5 of 1 rows leaves none to train on: lower it or add rows"
    )
    assert message(split_off, dataset, 0.99, 0).startswith("--eval_fraction 0.99 of 20 rows leaves none")


@pytest.mark.parametrize(
    "columns,doubtful",
    [
        (["text", "label"], False),
        (["prompt", "a long name of a column"], True),
        (["text", "3"], True),
        (["a", "a"], True),
        (["a", "a.1"], True),
        (["short name"], False),
        (["v1.1", "v1"], True),
        (["Unnamed: 0", "text"], True),
    ],
)
def test_csv_hint(columns, doubtful):
    assert csv_hint(columns) == (" (is the first line of the CSV a header?)" if doubtful else "")


# ---- mixtures -----------------------------------------------------------------------------------------------------------

RECIPE = """
train:
  - name: HuggingFaceH4/ultrachat_200k
    split: train_sft
    weight: 0.7
    max_samples: 10000
  - name: data/mine.jsonl
    weight: 3
    format: messages
    columns: {messages: chat}
eval:
  - name: data/held_out.jsonl
    text_field: body
stop: all_exhausted
"""


def test_read_mixture():
    expected = Mixture(
        [
            Source("HuggingFaceH4/ultrachat_200k", "train_sft", weight=0.7, max_samples=10000),
            Source("data/mine.jsonl", weight=3, format="messages", columns={"messages": "chat"}),
        ],
        [Source("data/held_out.jsonl", text_field="body")],
        "all_exhausted",
    )
    import yaml

    text = json.dumps(yaml.safe_load(RECIPE), indent="\t")
    assert read_mixture(write("m.yaml", RECIPE)) == read_mixture(write("m.json", text)) == read_mixture(text) == expected
    assert read_mixture('[{"name": "a"}]') == Mixture([Source("a")], [], "first_exhausted")
    assert read_mixture(write("l.yml", "- name: a\n- {name: b, config: c}\n")) == Mixture(
        [Source("a"), Source("b", config="c")], [], "first_exhausted"
    )


@pytest.mark.parametrize(
    "text,expected",
    [
        ("train:\n  - name: a\n  - nam: b\n", "mixture m.yaml train entry 2: unknown key 'nam'; did you mean name?"),
        ("train:\n  - name: a\n    wieght: 1\n", "mixture m.yaml train entry 1: unknown key 'wieght'; did you mean weight?"),
        ("train: [{name: a}]\nevel: []\n", "mixture m.yaml: unknown key 'evel'; did you mean eval?"),
        ("train: [{name: a}]\nzzz: 1\n", "mixture m.yaml: unknown key 'zzz'; known: train, eval, stop"),
        ("eval: [{name: a}]\n", "mixture m.yaml lacks train: a list of entries such as - name: data/mine.jsonl"),
        ("train: []\n", "mixture m.yaml lacks train: a list of entries such as - name: data/mine.jsonl"),
        ("train: {name: a}\n", "mixture m.yaml: train must be a list of entries such as - name: data/mine.jsonl"),
        ("train: [a.jsonl]\n", "mixture m.yaml train entry 1 is 'a.jsonl': write - name: data/mine.jsonl"),
        ("train: [{split: x}]\n", "mixture m.yaml train entry 1 has no name: write name: data/mine.jsonl or name: a Hub id"),
        (
            "train: [{name: a, weight: 1}, {name: b}]\n",
            "mixture m.yaml train entry 2 has no weight, and others have one: give every entry a weight, or none",
        ),
        ("train: [{name: a, weight: 0}]\n", "mixture m.yaml train entry 1: weight: 0 must be a number above 0"),
        ("train: [{name: a, weight: -1}]\n", "mixture m.yaml train entry 1: weight: -1 must be a number above 0"),
        ("train: [{name: a, weight: true}]\n", "mixture m.yaml train entry 1: weight: True must be a number above 0"),
        ("train: [{name: a, weight: .inf}]\n", "mixture m.yaml train entry 1: weight: inf must be a number above 0"),
        (
            "train: [{name: a, max_samples: 0}]\n",
            "mixture m.yaml train entry 1: max_samples: 0 must be a whole number of at least 1",
        ),
        (
            "train: [{name: a, max_samples: 1.5}]\n",
            "mixture m.yaml train entry 1: max_samples: 1.5 must be a whole number of at least 1",
        ),
        ("train: [{name: 3}]\n", "mixture m.yaml train entry 1: name: 3 must be text"),
        (
            "train: [{name: a, columns: [x]}]\n",
            "mixture m.yaml train entry 1: columns: ['x'] must be a mapping such as {messages: chat}",
        ),
        (
            "train: [{name: a}]\neval: [{name: b, weight: 1}]\n",
            "mixture m.yaml eval entry 1: weight has no effect in an evaluation: drop it",
        ),
        ("train: [{name: a}]\nstop: never\n", "mixture m.yaml: stop: never is neither first_exhausted nor all_exhausted"),
        (
            "train: [{name: other.yaml}]\n",
            "mixture m.yaml train entry 1: other.yaml is another mixture: copy its entries into this one",
        ),
        ("train: [{name: a, name: b}]\n", "mixture m.yaml cannot be read: key 'name' is written twice"),
        ("just text\n", "mixture m.yaml must hold train: with a list of entries, not 'just text'"),
    ],
)
def test_mixture_mistakes(text, expected):
    assert message(read_mixture, write("m.yaml", text)) == expected


def test_more_mixture_mistakes():
    assert (
        message(read_mixture, "absent.yaml")
        == "mixture absent.yaml does not exist: give the path of a .yaml or .json file, or JSON text"
    )
    assert message(read_mixture, write("bad.yaml", "train: [\n")).startswith(
        "mixture bad.yaml cannot be read: while parsing"
    )
    assert message(read_mixture, '[{"name": "a", "name": "b"}]') == "mixture cannot be read: key 'name' is written twice"
    assert message(read_mixture, write("b.json", "{")).startswith("mixture b.json cannot be read: ")
    assert message(read_mixture, '[{"name": "a", "split": "x[1]"}]').startswith(
        "mixture train entry 1: split 'x[1]' is not a split"
    )
    inner = write("inner.json", '{"train": [{"name": "a"}]}')
    assert "top level is an object whose 'train' holds" in message(load, Source(inner))
    assert (
        message(read_mixture, "m.txt")
        == "mixture m.txt does not exist: give the path of a .yaml or .json file, or JSON text"
    )


def test_the_readme_s_mixture_is_one():
    text = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
    write("mixture.yaml", re.search(r"```yaml\n(train:.*?)```", text, re.DOTALL).group(1))
    mixture = read_mixture("mixture.yaml")
    assert [source.weight for source in mixture.train] == [0.7, 0.3] and mixture.evaluation[0].split == "test_sft[:500]"
