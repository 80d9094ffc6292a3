"""The prepared data: tokenised once and cached, cut, mixed, packed, streamed, reported, and refused where nothing is left."""

import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
from datasets import Dataset, IterableDataset

import chat
import data
import data_report
import encoding
import formats
import tiny
from arguments import DataArguments, TrainingConfig


@pytest.fixture(scope="module")
def tokenizer(assets):
    return chat.prepare_tokenizer(str(assets["fp32"]), "chatml")[0]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def prepare(tokenizer, tmp_path):
    """Prepare data as train.py does; options of DataArguments and TrainingConfig alike."""

    def prepare(dataset_name=None, tokenizer=tokenizer, **options):
        names = DataArguments.__dataclass_fields__
        data_args = DataArguments(**{"dataset_name": str(dataset_name), **{k: v for k, v in options.items() if k in names}})
        rest = {"output_dir": str(tmp_path / "out"), "use_cpu": True} | {k: v for k, v in options.items() if k not in names}
        return data.prepare(data_args, TrainingConfig(**rest), tokenizer)

    return prepare


def write(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat_row(answer: str, question: str = "please send") -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def texts(dataset, tokenizer) -> list[str]:
    return [tokenizer.decode(ids) for ids in dataset["input_ids"]]


def test_rows_become_what_the_encoder_makes_of_them(prepare, assets, tokenizer):
    prepared = prepare(assets["data"], splits="train,test", eval_strategy="epoch")
    encoder = encoding.Encoder(tokenizer)
    for dataset, rows in ((prepared.train, tiny.rows(64, 0)), (prepared.evaluation, tiny.rows(8, 1))):
        assert dataset.column_names == ["input_ids", "labels"] and len(dataset) == len(rows)
        for got, row in zip(dataset, rows, strict=True):
            want = encoder.one(formats.Row(messages=row["messages"]))
            assert got["input_ids"] == want.input_ids.tolist() and got["labels"] == want.labels.tolist()
    assert not prepared.report.cached and prepared.report.loss_on == "assistant"


@pytest.mark.parametrize("processes", [None, 2])
def test_the_second_time_nothing_is_tokenised(prepare, assets, monkeypatch, processes):
    options = dict(splits="train,test", eval_strategy="epoch", packing=True, max_length=64, dataset_num_proc=processes)
    first = prepare(assets["data"], **options)
    monkeypatch.setattr(encoding.Encoder, "encode", lambda *_: pytest.fail("tokenised again"))
    second = prepare(assets["data"], **options)
    assert second.report.cached and second.fingerprint() == first.fingerprint()
    assert second.train.to_dict() == first.train.to_dict() and second.evaluation.to_dict() == first.evaluation.to_dict()
    assert data_report.summary(second.report) | {"cached": False} == data_report.summary(first.report)


CHANGES = {
    "tokenizer": lambda a: {"tokenizer": chat.prepare_tokenizer(str(a["no_chatml"]), "chatml")[0]},
    "template": lambda a: {"tokenizer": chat.prepare_tokenizer(str(a["fp32"]), "zephyr")[0]},
    "new token": lambda a: {"tokenizer": chat.prepare_tokenizer(str(a["fp32"]), "chatml", new_tokens="<|x|>")[0]},
    "loss": lambda a: {"loss_on": "all"},
    "length": lambda a: {"max_length": 40},
    "truncation": lambda a: {"truncation": "left"},
    "BOS": lambda a: {"add_special_tokens": True},
    "EOS": lambda a: {"append_concat_token": False},
    "format": lambda a: {"format": "text", "dataset_text_field": "content"},
    "rows": lambda a: {"splits": "train[:63]"},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_decides_the_tokens_is_in_the_fingerprint(prepare, assets, change):
    prepare(assets["data"])
    assert not prepare(assets["data"], **CHANGES[change](assets)).report.cached
    assert prepare(assets["data"]).report.cached


@pytest.mark.parametrize("packing", [False, True])
def test_a_cache_that_was_cut_short_is_made_anew(prepare, assets, tmp_path, packing):
    first = prepare(assets["data"], packing=packing, max_length=64)
    rows, fingerprint = first.train.to_dict(), first.fingerprint()
    files = list((tmp_path / "cache" / "tokenized").glob("*.arrow"))
    assert len(files) == 1 + packing
    for file in files:
        half = file.read_bytes()[: file.stat().st_size // 2]
        file.unlink()  # the first data set has it mapped
        file.write_bytes(half)
    again = prepare(assets["data"], packing=packing, max_length=64)
    assert again.fingerprint() == fingerprint and again.train.to_dict() == rows


def test_a_file_that_changed_is_tokenised_again(prepare, tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", [chat_row("hello"), chat_row("today")])
    assert "hello" in texts(prepare(file).train, tokenizer)[0]
    write(file, [chat_row("thanks"), chat_row("today")])
    changed = prepare(file)
    assert not changed.report.cached and "thanks" in texts(changed.train, tokenizer)[0]


def test_nothing_is_written_beside_the_data(prepare, tmp_path):
    saved = tmp_path / "saved"
    Dataset.from_list([chat_row("hello")] * 3).save_to_disk(saved)
    before = sorted(saved.rglob("*"))
    prepare(saved, packing=True, max_length=64)
    assert sorted(saved.rglob("*")) == before


def test_eval_fraction(prepare, assets, tokenizer):
    prepared = prepare(assets["data"], eval_fraction=0.25, eval_strategy="epoch")
    assert (len(prepared.train), len(prepared.evaluation)) == (48, 16)
    both = Counter(texts(prepared.train, tokenizer)) + Counter(texts(prepared.evaluation, tokenizer))
    assert both == Counter(texts(prepare(assets["data"]).train, tokenizer))
    assert [rows.split for rows in prepared.report.rows] == ["train", "eval"]
    assert len(prepare(assets["data"], eval_fraction=0.25, eval_strategy="epoch", max_eval_samples=5).evaluation) == 5
    again = prepare(assets["data"], eval_fraction=0.25, eval_strategy="epoch")
    assert again.fingerprint() == prepared.fingerprint() and again.report.cached
    assert prepare(assets["data"], eval_fraction=0.25, eval_strategy="epoch", seed=1).fingerprint() != prepared.fingerprint()


def test_max_samples(prepare, assets):
    prepared = prepare(assets["data"], splits="train,test", eval_strategy="epoch", max_samples=5, max_eval_samples=3)
    assert (len(prepared.train), len(prepared.evaluation)) == (5, 3)


# ---- Mixtures ----


def mixture(tmp_path, weights, counts=(300, 100), stop="first_exhausted", more="") -> str:
    lines = ["train:"]
    for name, weight, count in zip("ab", weights, counts, strict=True):
        write(tmp_path / f"{name}.jsonl", [chat_row(f"{name} {i}") for i in range(count)])
        lines += [f"  - name: {tmp_path / name}.jsonl"] + ([f"    weight: {weight}"] if weight else [])
    path = tmp_path / "mixture.yaml"
    path.write_text("\n".join([*lines, *([f"stop: {stop}"] if weights[0] else []), more]))
    return str(path)


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
def test_a_mixture_has_its_weights(prepare, tmp_path, tokenizer, stop):
    prepared = prepare(dataset_mixture=mixture(tmp_path, (1, 3), stop=stop))
    names = [re.search(r"assistant\n(\w)", text).group(1) for text in texts(prepared.train, tokenizer)]
    counts = Counter(names)
    assert [rows.used for rows in prepared.report.rows] == [counts["a"], counts["b"]]
    assert [rows.weight for rows in prepared.report.rows] == [0.25, 0.75]
    assert counts["b"] / len(names) == pytest.approx(0.75, abs=0.08)
    rows = texts(prepared.train, tokenizer)
    if stop == "first_exhausted":
        assert counts["b"] == 100 and len(set(rows)) == len(rows), "every row of the smaller one once, none twice"
    else:
        assert counts["a"] >= 300 and counts["b"] > 700
    assert names != sorted(names), "the sources are interleaved"
    assert prepare(dataset_mixture=mixture(tmp_path, (1, 3), stop=stop)).fingerprint() == prepared.fingerprint()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_source_of_which_nothing_is_left_does_not_change_the_weights_in_silence(prepare, tmp_path, streaming):
    path = mixture(tmp_path, (1, 3), (20, 20))
    write(tmp_path / "b.jsonl", [chat_row("today " * 100)] * 20)
    with pytest.raises(ValueError, match=r"no row of .*b.jsonl is left in the train split"):
        prepare(dataset_mixture=path, truncation="drop", max_length=40, streaming=streaming, max_steps=4)


def test_a_mixture_without_weights_is_all_rows_in_order(prepare, tmp_path, tokenizer):
    write(tmp_path / "held.jsonl", [{"prompt": "please ", "completion": "today"}] * 4)
    more = f"eval:\n  - name: {tmp_path}/held.jsonl\n    format: prompt-completion\n    max_samples: 3"
    prepared = prepare(dataset_mixture=mixture(tmp_path, (None, None), (3, 2), more=more), eval_strategy="epoch")
    got = [re.search(r"assistant\n(\w \d)", text).group(1) for text in texts(prepared.train, tokenizer)]
    assert got == ["a 0", "a 1", "a 2", "b 0", "b 1"] and len(prepared.evaluation) == 3
    assert "prompt-completion, as asked for" in prepared.report.rows[-1].format


# ---- Packing ----


def test_packed_rows_are_the_rows_and_the_report_measures_them(prepare, assets, tokenizer):
    rows = prepare(assets["data"], packing=False).train
    prepared = prepare(assets["data"], packing=True, max_length=64)
    cut = []
    for row in prepared.train:
        assert len(row["input_ids"]) == sum(row["seq_lengths"]) <= 64
        ends = np.cumsum([0, *row["seq_lengths"]])
        cut += [tuple(row["input_ids"][a:b]) for a, b in itertools.pairwise(ends)]
    assert sorted(cut) == sorted(map(tuple, rows["input_ids"]))
    tokens = sum(map(len, cut))
    assert prepared.report.packing == {"on": True, "rows": len(prepared.train), "of": 64, "tokens": tokens, "capacity": 64}
    fill = data_report.summary(prepared.report)["packing"]["fill"]
    assert fill == pytest.approx(tokens / (64 * len(prepared.train))) and fill > 0.8


def test_bfd_split_loses_no_token(prepare, assets):
    whole = prepare(assets["data"]).train
    packed = prepare(assets["data"], packing=True, packing_strategy="bfd_split", max_length=16).train
    assert (
        sum(map(len, packed["input_ids"])) == sum(map(len, whole["input_ids"])) and max(map(len, packed["input_ids"])) <= 16
    )


# ---- Rows that cannot be used, and gates ----

BAD = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]},
    {"messages": []},
    {"messages": [{"role": None, "content": "x"}]},
]


def test_a_bad_row_is_named_by_file_and_line(prepare, tmp_path):
    for number, bad in enumerate(BAD):
        file = write(tmp_path / f"{number}.jsonl", [chat_row("hello"), chat_row("today"), bad, chat_row("thanks")])
        with pytest.raises(ValueError) as caught:
            prepare(file)
        assert re.match(
            rf"{file} line 3: .*; correct the row, or leave such rows out with --on_bad_row skip", str(caught.value)
        )
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("processes", [None, 2])
def test_bad_rows_can_be_left_out_and_are_counted(prepare, tmp_path, tokenizer, processes):
    rows = [chat_row(f"word {i}") for i in range(20)]
    rows[7:7], rows[15:15] = BAD[:1], BAD[1:]
    file = write(tmp_path / "a.jsonl", rows)
    prepared = prepare(file, on_bad_row="skip", dataset_num_proc=processes)
    figures = data_report.summary(prepared.report)["splits"]["train"]
    assert (figures["rows"], figures["kept"], figures["bad"]) == (23, 20, 3) and len(prepared.train) == 20
    lines = [re.match(rf"{file} line (\d+): ", line).group(1) for line in prepared.report.rows[0].skipped]
    assert lines == ["8", "16", "17"]
    with pytest.raises(ValueError, match="line 8: "):  # the tokens are cached, the rows are still bad
        prepare(file, on_bad_row="error", dataset_num_proc=processes)


def test_lines_that_are_no_rows_are_left_out_and_counted(prepare, tmp_path):
    file = write(tmp_path / "a.jsonl", [chat_row("hello")] * 3)
    file.write_text(file.read_text() + "{broken\n" + json.dumps(chat_row("x")) + "\n")
    with pytest.raises(ValueError, match=f"{file} line 4: "):
        prepare(file)
    prepared = prepare(file, on_bad_row="skip")
    assert len(prepared.train) == 4 and prepared.report.rows[0].skipped[0].startswith(f"{file} line 4: ")


UNANSWERED = {"messages": [{"role": "user", "content": "hello there"}]}


def test_rows_without_supervision_are_dropped_or_stop_the_run(prepare, tmp_path):
    file = write(tmp_path / "a.jsonl", [chat_row("hello")] * 18 + [UNANSWERED] * 2)
    with pytest.raises(ValueError, match=r"nothing supervised in 2 of 20 rows \(10.0%\), more than --max_unsupervised 0.05"):
        prepare(file)
    prepared = prepare(file, max_unsupervised=0.1)
    assert len(prepared.train) == 18
    assert data_report.summary(prepared.report)["splits"]["train"]["unsupervised"] == 2
    with pytest.raises(ValueError, match="the train split has no row left"):
        prepare(write(tmp_path / "b.jsonl", [UNANSWERED] * 3), max_unsupervised=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_length=5), "all 64 are cut by --max_length 5 before anything supervised"),
        (dict(max_length=5, truncation="drop"), "no row left"),
        (dict(max_length=5, truncation="error"), "line 1: it has .* tokens, more than --max_length 5"),
        (dict(loss_on="completion", format="text", dataset_text_field="content"), "--loss_on completion needs prompts"),
        (dict(loss_on="assistant", format="text", dataset_text_field="content"), "--loss_on assistant needs chats"),
        (dict(format="instruction"), "--format instruction needs 'instruction', 'output' and the data have"),
        (dict(columns="messages=chat"), "there is no column 'chat'"),
        (dict(eval_fraction=1.5), "--eval_fraction 1.5 must be between 0 and 1"),
        (dict(eval_fraction=0.1), "--eval_fraction sets rows aside to evaluate on but --eval_strategy is no"),
        (dict(eval_fraction=0.1, eval_strategy="epoch", splits="train,test"), "two ways: drop one"),
        (dict(splits="train,test"), "--splits train,test names a split to evaluate on but --eval_strategy is no"),
        (dict(eval_strategy="epoch"), "needs rows to evaluate on: name a second split in --splits"),
        (dict(splits="train,dev", eval_strategy="epoch"), "has no split 'dev': it has train, test"),
        (dict(splits="train,test", eval_strategy="epoch", eval_fraction=0.5), "two ways: drop one"),
        (dict(max_eval_samples=2), "--max_eval_samples has no effect without rows to evaluate on"),
        (dict(eval_packing=True), "--eval_packing has no effect without rows to evaluate on"),
        (dict(control_tokens_in_text="keep"), "--control_tokens_in_text has no effect on chats"),
        (dict(dataset_num_proc=0), "--dataset_num_proc 0 must be at least 1"),
        (dict(packing=True, packing_strategy="wrapped"), "lets rows attend to each other"),
        (dict(packing=True, packing_strategy="bfd_split", truncation="drop"), "--truncation drop has no effect with"),
        (dict(packing=True, max_length=None), "--packing True needs --max_length"),
        (
            dict(streaming=True, max_steps=1, control_tokens_in_text="keep"),
            "--control_tokens_in_text has no effect on chats",
        ),
        (
            dict(streaming=True, max_steps=1, train_sampling_strategy="sequential"),
            "--train_sampling_strategy sequential has no",
        ),
        (dict(max_length=None, truncation="drop"), "--truncation drop has no effect without --max_length"),
        (dict(max_samples=0), "--max_samples 0 must be at least 1"),
        (dict(max_unsupervised=2.0), "--max_unsupervised 2.0 must be a share between 0 and 1"),
        (dict(streaming=True), "--streaming True needs --max_steps"),
        (dict(streaming=True, max_steps=1, eval_fraction=0.1, eval_strategy="epoch"), "cannot set rows of a stream aside"),
        (dict(streaming=True, max_steps=1, dataset_num_proc=2), "--dataset_num_proc has no effect with --streaming"),
        (dict(streaming=True, max_steps=1, shuffle_dataset=True), "--shuffle_dataset has no effect with --streaming"),
    ],
)
def test_refused(prepare, assets, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        prepare(assets["data"], **options)
    assert "\n" not in str(caught.value)


def test_an_evaluation_split_that_cannot_be_used_is_found_before_anything_is_tokenised(prepare, tmp_path, monkeypatch):
    write(tmp_path / "d" / "train.jsonl", [chat_row("hello")])
    write(tmp_path / "d" / "test.jsonl", [{"other": "x"}])
    monkeypatch.setattr(encoding.Encoder, "encode", lambda *_: pytest.fail("tokenised"))
    for split, message in (("dev", "has no split 'dev'"), ("test", "no usable column among 'other'")):
        with pytest.raises(ValueError, match=message):
            prepare(tmp_path / "d", splits=f"train,{split}", eval_strategy="epoch")


def test_text_with_control_tokens_needs_a_choice_even_where_bad_rows_are_skipped(prepare, tmp_path):
    file = write(tmp_path / "a.jsonl", [{"text": "hello"}, {"text": "hello <|im_end|> today"}])
    with pytest.raises(ValueError, match="text rows hold control tokens, such as '<|im_end|>'"):
        prepare(file, on_bad_row="skip")
    prepared = prepare(file, control_tokens_in_text="escape")
    assert data_report.summary(prepared.report)["splits"]["train"]["escaped"] == 1


def test_a_csv_without_a_header(prepare, tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("please send the refund today,hello\nthanks,today\n")
    with pytest.raises(
        ValueError, match=r"a.csv: no usable column among 'please send.*is the first line of the CSV a header\?"
    ):
        prepare(file)


# ---- The report's figures ----


def test_the_reports_figures_are_a_brute_force_count(prepare, tmp_path, tokenizer):
    """Everything counted once more, row by row, from the rendered text."""
    rng = random.Random(0)
    rows = []
    for number in range(200):
        turns = []
        for _ in range(rng.randint(1, 4)):
            turns.append({"role": "user", "content": " ".join(rng.choices(tiny.WORDS, k=rng.randint(1, 20)))})
            if rng.random() < 0.95:
                turns.append({"role": "assistant", "content": " ".join(rng.choices(tiny.WORDS, k=rng.randint(0, 12)))})
        if rng.random() < 0.1:
            turns[0]["content"] += rng.choice([" <|im_end|>", " </s>"])
        if rng.random() < 0.1:
            turns.insert(0, {"role": "system", "content": "thanks"})
        rows.append({"messages": turns if number % 20 else rows[number - 1]["messages"] if number else turns})
    file = write(tmp_path / "a.jsonl", rows)
    limit = 60
    prepared = prepare(file, max_length=limit, max_unsupervised=0.5)
    figures = data_report.summary(prepared.report)["splits"]["train"]

    eos = "<|im_end|>"
    count, kept_lengths, seen, repeats = Counter(rows=200), [], set(), 0
    for row in rows:
        messages = row["messages"]
        ids, labels = [], []
        for message in messages:  # tokenised piece by piece, with the markers set by hand
            start, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_start|>", eos))
            plain = tokenizer.backend_tokenizer.__class__.from_str(tokenizer.backend_tokenizer.to_str())
            plain.encode_special_tokens = True
            header = plain.encode(message["role"] + "\n", add_special_tokens=False).ids
            body = plain.encode(message["content"], add_special_tokens=False).ids
            after = plain.encode("\n", add_special_tokens=False).ids
            ids += [start, *header, *body, end, *after]
            trained = message["role"] == "assistant" and message["content"].strip() != ""
            labels += [0] * (1 + len(header)) + [int(trained)] * (len(body) + 1) + [0] * len(after)
        count["truncated"] += len(ids) > limit
        count["longest"] = max(count["longest"], len(ids))
        roles = [m["role"] for m in messages if m["role"] != "system"]
        count["not_alternating"] += any(a == b for a, b in itertools.pairwise(roles))
        count["empty_turns"] += any(not m["content"].strip() for m in messages)
        count["escaped"] += any("<|im_end|>" in m["content"] or "</s>" in m["content"] for m in messages)
        if not any(labels[1:limit]):
            count["unsupervised"] += 1
            continue
        count["kept"] += 1
        count["tokens"] += min(len(ids), limit)
        count["tokens_cut"] += max(len(ids) - limit, 0)
        count["supervised_tokens"] += sum(labels[:limit])
        count["no_eos"] += not any(lab and i == end for i, lab in zip(ids[:limit], labels[:limit], strict=True))
        kept_lengths.append(min(len(ids), limit))
        repeats += tuple(ids) in seen
        seen.add(tuple(ids))
    got = {name: figures[name] for name in count if name != "tokens_cut"}
    assert got == {name: value for name, value in count.items() if name != "tokens_cut"}
    assert min(count.values()) > 0, f"a count that was never tried: {count}"
    assert prepared.train["input_ids"] and list(map(len, prepared.train["input_ids"])) == kept_lengths
    assert data_report.summary(prepared.report)["duplicates"]["train"] == repeats > 0


def test_rows_that_are_in_both_splits_are_reported(prepare, tmp_path):
    write(tmp_path / "d" / "train.jsonl", [chat_row("hello"), chat_row("today")] * 3)
    write(tmp_path / "d" / "test.jsonl", [chat_row("today"), chat_row("thanks")])
    report = prepare(tmp_path / "d", splits="train,test", eval_strategy="epoch").report
    assert data_report.summary(report)["overlap"]["eval_rows_in_train"] == 1
    assert any("are in the train split too" in line for line in data_report.warnings(report))


def test_samples_show_what_is_supervised(prepare, tmp_path):
    report = prepare(write(tmp_path / "a.jsonl", [UNANSWERED] + [chat_row(f"hello {i}") for i in range(30)])).report
    assert [sample.row for sample in report.samples] == [1, 2, 3]
    assert [text for text, trained in report.samples[0].pieces if trained] == ["hello 0<|im_end|>"]


# ---- Streams ----


def test_a_stream_gives_the_rows_of_the_data(prepare, assets, tokenizer):
    whole = prepare(assets["data"]).train
    prepared = prepare(
        assets["data"], streaming=True, max_steps=4, shuffle_buffer=1, splits="train,test", eval_strategy="epoch",
        max_eval_samples=3,
    )  # fmt: skip
    assert isinstance(prepared.train, IterableDataset) and len(prepared.evaluation) == 3
    assert list(prepared.train) == list(whole)
    assert prepared.report.streamed is None, "all 64 rows were looked at"
    assert data_report.summary(prepared.report)["splits"]["train"]["kept"] == 64
    shuffled = list(prepare(assets["data"], streaming=True, max_steps=4).train)
    assert shuffled != list(whole) and sorted(map(str, shuffled)) == sorted(map(str, whole))


def test_a_stream_is_packed_and_mixed(prepare, assets, tmp_path, tokenizer):
    packed = list(prepare(assets["data"], streaming=True, max_steps=4, packing=True, max_length=64).train)
    rows = prepare(assets["data"]).train
    assert sum(len(row["input_ids"]) for row in packed) == sum(map(len, rows["input_ids"]))
    assert all(sum(row["seq_lengths"]) == len(row["input_ids"]) <= 64 for row in packed)
    prepared = prepare(dataset_mixture=mixture(tmp_path, (1, 3)), streaming=True, max_steps=4)
    names = [re.search(r"assistant\n(\w)", tokenizer.decode(row["input_ids"])).group(1) for row in prepared.train]
    assert Counter(names)["b"] / len(names) == pytest.approx(0.75, abs=0.1)


def test_a_bad_row_of_a_stream(prepare, tmp_path):
    rows = [chat_row(f"word {i}") for i in range(1500)]
    rows[1200] = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]}
    file = write(tmp_path / "a.jsonl", rows)
    prepared = prepare(file, streaming=True, max_steps=4, shuffle_buffer=1)
    assert prepared.report.streamed == data.REPORT_ROWS
    stream = prepared.train
    with pytest.raises(data.BadRow, match=f"{file} line 1201: .*--on_bad_row skip"):
        list(stream)
    assert len(list(prepare(file, streaming=True, max_steps=4, on_bad_row="skip").train)) == 1499


def test_a_control_token_late_in_a_stream_of_text(prepare, tmp_path):
    file = write(tmp_path / "a.jsonl", [{"text": "hello"}] * 1200 + [{"text": "hello <|im_end|> x"}])
    with pytest.raises(data.BadRow, match="text rows hold control tokens"):
        list(prepare(file, streaming=True, max_steps=4).train)


def test_the_fingerprint_is_of_every_token_and_label_in_order():
    rows = {"input_ids": [[1, 2, 3], [4, 5]], "labels": [[1, 2, 3], [-100, 5]]}
    base = data.fingerprint(Dataset.from_dict(rows))
    assert (base["rows"], base["tokens"]) == (2, 5)
    assert data.fingerprint(Dataset.from_dict(rows | {"other": [0, 0]})) == base
    assert data.fingerprint(Dataset.from_dict({k: [v[1], v[0]] for k, v in rows.items()}).select([1, 0])) == base
    for change in (
        {"input_ids": [[1, 2, 9], [4, 5]]},
        {"labels": [[1, 2, 3], [4, 5]]},
        {"input_ids": [[1, 2], [3, 4, 5]], "labels": [[1, 2], [3, -100, 5]]},  # the same numbers in other rows
        {k: v[::-1] for k, v in rows.items()},
    ):
        assert data.fingerprint(Dataset.from_dict(rows | change))["xxh3_128"] != base["xxh3_128"], change
