"""Rows to tokens: every flag that decides what a row becomes, and what is supervised."""

import json

import pytest
from datasets import Dataset, DatasetDict

import chat
import data
import tiny

CHAT = [
    {"role": "user", "content": "please send refund"},
    {"role": "assistant", "content": "hello thanks"},
    {"role": "user", "content": "order broken"},
    {"role": "assistant", "content": "today"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tiny.make_model(tmp_path_factory.mktemp("t"), chatml=True)
    return chat.prepare_tokenizer(str(folder), "chatml")[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tiny.make_model(tmp_path_factory.mktemp("p"))
    return chat.prepare_tokenizer(str(folder), "none")[0]


def supervised_text(row, tokenizer):
    return tokenizer.decode([t for t, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100])


def test_chat_is_rendered_once_with_no_extra_tokens(tokenizer):
    row = data.encode_example({"messages": CHAT}, tokenizer)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert row["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert row["labels"] == row["input_ids"]
    assert row["input_ids"].count(tokenizer.eos_token_id) == len(CHAT)


def test_assistant_only_loss_supervises_each_answer_and_its_eos(tokenizer):
    row = data.encode_example({"messages": CHAT}, tokenizer, assistant_only_loss=True)
    assert supervised_text(row, tokenizer) == "hello thanks<|im_end|>today<|im_end|>"


@pytest.mark.parametrize("template", ["chatml", "zephyr"])
def test_assistant_only_loss_for_every_template(assets, template):
    tokenizer, _ = chat.prepare_tokenizer(str(assets["fp32"]), template)
    row = data.encode_example({"messages": CHAT}, tokenizer, assistant_only_loss=True)
    assert supervised_text(row, tokenizer) == f"hello thanks{tokenizer.eos_token}today{tokenizer.eos_token}"


def test_add_special_tokens_acts(assets):
    tokenizer, _ = chat.prepare_tokenizer(str(assets["no_chatml"]), "none")
    tokenizer.add_bos_token = True
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    with_bos = data.encode_example({"text": "hello"}, tokenizer, append_concat_token=False)
    without = data.encode_example({"text": "hello"}, tokenizer, append_concat_token=False, add_special_tokens=False)
    assert with_bos["input_ids"] == [1, *without["input_ids"]]
    doubled = data.encode_example({"text": "<s>hello"}, tokenizer, append_concat_token=False)
    assert doubled["input_ids"] == with_bos["input_ids"], "a doubled BOS"


def test_append_concat_token_acts_and_never_doubles(plain, tokenizer):
    eos = plain.eos_token_id
    assert data.encode_example({"text": "hello"}, plain)["input_ids"][-1] == eos
    assert data.encode_example({"text": "hello"}, plain)["labels"][-1] == eos
    assert eos not in data.encode_example({"text": "hello"}, plain, append_concat_token=False)["input_ids"]
    assert data.encode_example({"text": "hello</s>"}, plain)["input_ids"].count(eos) == 1
    assert data.encode_example({"messages": CHAT}, tokenizer)["input_ids"].count(tokenizer.eos_token_id) == len(CHAT)


def test_prompt_completion_supervises_the_completion(plain):
    row = {"prompt": "please send : ", "completion": "refund"}
    assert (
        supervised_text(data.encode_example(row, plain), plain) == " refund</s>"
    )  # the token "Ġrefund" straddles the end of the prompt
    everything = data.encode_example(row, plain, completion_only_loss=False)
    assert everything["labels"] == everything["input_ids"]


def test_conversational_prompt_completion(tokenizer):
    row = {"prompt": CHAT[:1], "completion": CHAT[1:2]}
    assert supervised_text(data.encode_example(row, tokenizer), tokenizer) == "hello thanks<|im_end|>"


def test_text_column_when_there_is_no_template(plain):
    row = data.encode_example({"messages": CHAT, "content": "hello"}, plain, text_field="content")
    assert plain.decode(row["input_ids"]) == "hello</s>"


@pytest.mark.parametrize(
    ("example", "options", "message"),
    [
        ({"other": 1}, {}, r"no usable column among \['other'\]: expected 'messages'"),
        ({"messages": CHAT}, {}, "no chat template"),
        ({"text": None}, {}, "is not text"),
        ({"text": "a"}, {"assistant_only_loss": True}, "needs chats"),
        ({"text": "a"}, {"completion_only_loss": True}, "needs the columns 'prompt' and 'completion'"),
        ({"prompt": "a", "completion": ""}, {}, "completion is empty"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:2]}, {}, "no chat template"),
        ({"text": ""}, {"append_concat_token": False}, "the row is empty"),
    ],
)
def test_bad_rows(plain, example, options, message):
    with pytest.raises(ValueError, match=message):
        data.encode_example(example, plain, **options)


def test_bad_chats(tokenizer):
    with pytest.raises(ValueError, match="no assistant turn"):
        data.encode_example({"messages": CHAT[:1]}, tokenizer, assistant_only_loss=True)
    with pytest.raises(ValueError, match="non-empty list"):
        data.encode_example({"messages": []}, tokenizer)


def test_a_bad_row_is_named(tokenizer):
    rows = Dataset.from_list([{"messages": CHAT}, {"messages": [{"role": "user", "content": "x"}]}])
    with pytest.raises(ValueError, match="row 1 of split 'train'"):
        data.tokenize(rows, "train", tokenizer, assistant_only_loss=True)


def test_template_that_refuses_a_role_is_one_line(tokenizer):
    strict = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% endfor %}"
    )
    saved, tokenizer.chat_template = tokenizer.chat_template, strict
    try:
        with pytest.raises(ValueError, match="the chat template refuses it .*no system role"):
            data.encode_example({"messages": [{"role": "system", "content": "x"}]}, tokenizer)
    finally:
        tokenizer.chat_template = saved


def test_sources(tmp_path):
    rows = [{"text": f"hello {i}"} for i in range(4)]
    (tmp_path / "f").mkdir()
    for name in ("train", "test"):
        (tmp_path / "f" / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    train, test = data.load_splits(str(tmp_path / "f"), "train,test[:2]")
    assert (len(train), len(test)) == (4, 2)
    assert data.load_splits(str(tmp_path / "f" / "train.jsonl"), "train")[1] is None
    frame = Dataset.from_list(rows)
    frame.to_csv(tmp_path / "a.csv")
    frame.to_parquet(tmp_path / "a.parquet")
    DatasetDict({"train": frame, "held_out": frame}).save_to_disk(tmp_path / "disk")
    assert len(data.load_splits(str(tmp_path / "a.csv"), "train")[0]) == 4
    assert len(data.load_splits(str(tmp_path / "a.parquet"), "train")[0]) == 4
    assert len(data.load_splits(str(tmp_path / "disk"), "train,held_out")[1]) == 4


@pytest.mark.parametrize(
    ("name", "splits", "message"),
    [
        ("missing/folder", "train", "--dataset_name missing/folder --splits train"),
        ("DATA", "train,dev", "dev"),
        ("DATA", "a,b,c", "at most one to evaluate"),
        ("FILE.txt", "train", "not one of"),
        ("BROKEN.jsonl", "train", "BROKEN.jsonl"),
        ("EMPTY.csv", "train", "EMPTY.csv"),
    ],
)
def test_bad_sources_are_one_line(tmp_path, assets, name, splits, message):
    (tmp_path / "FILE.txt").write_text("x")
    (tmp_path / "BROKEN.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "EMPTY.csv").write_text("text\n")
    name = str(assets["data"]) if name == "DATA" else str(tmp_path / name) if "." in name else name
    with pytest.raises(ValueError, match=message) as caught:
        data.load_splits(name, splits)
    assert "\n" not in str(caught.value)


def test_local_data_has_no_configuration_and_long_rows_are_counted(assets, tokenizer):
    with pytest.raises(ValueError, match="is for Hub data sets"):
        data.load_splits(str(assets["data"]), "train", "some_config")
    rows = data.tokenize(data.load_splits(str(assets["data"]), "train")[0], "train", tokenizer)
    longest = max(len(ids) for ids in rows["input_ids"])
    over = sum(len(ids) > 20 for ids in rows["input_ids"])
    assert 0 < over < len(rows)
    assert data.length_notes(rows, 20) == [
        f"{over} of {len(rows)} rows are longer than --max_length 20 (longest: {longest}) and are cut"
    ]
    assert data.length_notes(rows, longest) == [] == data.length_notes(rows, None)
    with pytest.raises(ValueError, match="cuts every row before its first supervised token"):
        answers = data.tokenize(
            data.load_splits(str(assets["data"]), "train")[0], "train", tokenizer, assistant_only_loss=True
        )
        data.length_notes(answers, 3)


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
