"""Templates, EOS, PAD and added tokens."""

import pytest

import chat
import tiny


@pytest.mark.parametrize("template", ["chatml", "zephyr", "none"])
@pytest.mark.parametrize("model", ["fp32", "no_chatml"])
def test_pad_is_never_eos_and_eos_ends_a_turn(assets, template, model):
    tokenizer, new = chat.prepare_tokenizer(str(assets[model]), template)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    if template == "none":
        assert tokenizer.chat_template is None
        return
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text.rstrip().endswith(tokenizer.eos_token)
    assert bool(new) == (template == "chatml" and model == "no_chatml")


def test_tokens_in_the_vocabulary_are_reused(assets):
    before = len(tiny.make_tokenizer(chatml=True))
    tokenizer, new = chat.prepare_tokenizer(str(assets["fp32"]), "chatml")
    assert new == [] and len(tokenizer) == before
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 4 == tokenizer.eos_token_id


def test_missing_tokens_are_added_as_single_tokens(assets):
    before = len(tiny.make_tokenizer(chatml=False))
    tokenizer, new = chat.prepare_tokenizer(str(assets["no_chatml"]), "chatml")
    assert new == [before, before + 1]
    assert tokenizer("<|im_start|>user", add_special_tokens=False)["input_ids"][0] == before
    assert tokenizer.eos_token == "<|im_end|>"


def test_jinja_file(assets, tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    tokenizer, _ = chat.prepare_tokenizer(str(assets["fp32"]), str(file))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi</s>"


@pytest.mark.parametrize(
    ("name", "message"),
    [("llama", "--chat_template_format llama is unknown: use chatml, zephyr, none, model"), ("x.jinja", "does not exist")],
)
def test_unknown_template(name, message):
    with pytest.raises(ValueError, match=message):
        chat.check_template_name(name)


def test_no_template_and_no_tokenizer(assets, tmp_path):
    with pytest.raises(ValueError, match="has no chat template"):
        chat.prepare_tokenizer(str(assets["no_chatml"]), "model")
    with pytest.raises(ValueError, match="no tokenizer for --model_name_or_path"):
        chat.prepare_tokenizer(str(tmp_path))
