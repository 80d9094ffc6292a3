"""Templates, EOS, PAD and added tokens."""

import pytest
from transformers import AutoTokenizer

import chat
import tiny
import zoo


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


# ---- What a template does, for every family of tokenizers ----

QUESTION, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}


@pytest.fixture(scope="module")
def zoo_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("zoo")


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_eos_is_what_ends_an_answer_and_pad_is_something_else(zoo_folder, name):
    if zoo.missing(name):
        pytest.skip(zoo.missing(name))
    family, folder = zoo.FAMILIES[name], zoo.make(name, zoo_folder)
    published = AutoTokenizer.from_pretrained(folder)
    tokenizer, new = chat.prepare_tokenizer(str(folder))
    assert new == [] and tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    reused = tokenizer.pad_token in published.get_vocab()
    assert reused or not set(chat.PAD_CANDIDATES) & (set(published.get_vocab()) - {tokenizer.eos_token})
    if not family.has_template:
        assert tokenizer.eos_token == published.eos_token
        return
    assert tokenizer.eos_token == (family.turn_end or published.eos_token)
    again = published.apply_chat_template([QUESTION, ANSWER, QUESTION, ANSWER], tokenize=False)
    assert tokenizer.apply_chat_template([QUESTION, ANSWER, QUESTION, ANSWER], tokenize=False) == again, "the format changed"
    tokenizer.save_pretrained(zoo_folder / f"{name}-saved")
    saved = AutoTokenizer.from_pretrained(zoo_folder / f"{name}-saved")
    assert (saved.eos_token, saved.pad_token) == (tokenizer.eos_token, tokenizer.pad_token)
    assert saved.apply_chat_template([QUESTION, ANSWER, QUESTION, ANSWER], tokenize=False) == again
    template = chat.inspect(tokenizer)
    assert template.takes_tools == family.tools and template.turn_end == family.turn_end
    prompt = tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
    assert template.header in prompt and (template.header != "" or prompt.endswith("[/INST]"))


def test_new_special_tokens_are_added_once_and_trained(assets):
    tokenizer, new = chat.prepare_tokenizer(str(assets["fp32"]), "zephyr", new_tokens="<|user|>, <|im_end|>,<|assistant|>")
    before = len(tiny.make_tokenizer(chatml=True))
    assert new == [before, before + 1] and tokenizer.convert_ids_to_tokens(new) == ["<|user|>", "<|assistant|>"]
    assert len(tokenizer("<|user|>", add_special_tokens=False)["input_ids"]) == 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages %}{{ m.text }}{% endfor %}",
            "cannot render a user's turn and the assistant's: it leaves the answer",
        ),
        ("{{ raise_exception('not here') }}", "cannot render a user's turn and the assistant's: not here"),
        ("{% for m in messages %}", "cannot render a user's turn"),
    ],
)
def test_a_template_that_cannot_be_used(assets, tmp_path, template, message):
    file = tmp_path / "mine.jinja"
    file.write_text(template)
    with pytest.raises(ValueError, match=message) as caught:
        chat.prepare_tokenizer(str(assets["fp32"]), str(file))
    assert "\n" not in str(caught.value)
