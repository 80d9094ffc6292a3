"""The zoo's tokenizers and templates against the published formats: rendered text, special tokens, round trips."""

# ruff: noqa: RUF001
import random

import pytest
from transformers import AutoTokenizer

import zoo

CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi! "},
    {"role": "assistant", "content": " Hello."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you."},
]
# The whole chat, and the chat without its last answer plus the generation prompt (None: what precedes the last answer).
RENDERED = {
    "llama2": (
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi! [/INST] Hello. </s><s>[INST] Bye [/INST] See you. </s>",
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi! [/INST] Hello. </s><s>[INST] Bye [/INST]",
    ),
    "mistral": ("<s>[INST] Hi!  [/INST] Hello.</s>[INST] Bye [/INST]See you.</s>", None),
    "mistral_v3": (
        "<s>[INST] Hi! [/INST] Hello.</s>[INST] Bye[/INST] See you.</s>",
        "<s>[INST] Hi! [/INST] Hello.</s>[INST] Be kind.\n\nBye[/INST]",
    ),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi!<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nSee you.<|eot_id|>",
        None,
    ),
    "qwen2": (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi! <|im_end|>\n<|im_start|>assistant\n Hello.<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\nSee you.<|im_end|>\n",
        None,
    ),
    "qwen3": (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi! <|im_end|>\n<|im_start|>assistant\n Hello.<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nSee you.<|im_end|>\n",
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi! <|im_end|>\n<|im_start|>assistant\n Hello.<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
    ),
    "gemma2": (
        "<bos><start_of_turn>user\nHi!<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\nSee you.<end_of_turn>\n",
        None,
    ),
    "phi3": (
        "<|system|>\nBe kind.<|end|>\n<|user|>\nHi! <|end|>\n<|assistant|>\n Hello.<|end|>\n"
        "<|user|>\nBye<|end|>\n<|assistant|>\nSee you.<|end|>\n<|endoftext|>",
        None,
    ),
    "zephyr": (
        "<|system|>\nBe kind.</s>\n<|user|>\nHi! </s>\n<|assistant|>\n Hello.</s>\n"
        "<|user|>\nBye</s>\n<|assistant|>\nSee you.</s>\n",
        None,
    ),
    "deepseek": (
        "<｜begin▁of▁sentence｜>Be kind.<｜User｜>Hi! <｜Assistant｜> Hello.<｜end▁of▁sentence｜>"
        "<｜User｜>Bye<｜Assistant｜>See you.<｜end▁of▁sentence｜>",
        None,
    ),
    "deepseek_r1": (
        "<｜begin▁of▁sentence｜>Be kind.<｜User｜>Hi! <｜Assistant｜> Hello.<｜end▁of▁sentence｜>"
        "<｜User｜>Bye<｜Assistant｜>See you.<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>Be kind.<｜User｜>Hi! <｜Assistant｜> Hello.<｜end▁of▁sentence｜>"
        "<｜User｜>Bye<｜Assistant｜><think>\n",
    ),
    "smollm2": (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi! <|im_end|>\n<|im_start|>assistant\n Hello.<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\nSee you.<|im_end|>\n",
        None,
    ),
    "command_r_like": ("System: Be kind.\nUser: Hi! \nAssistant:  Hello.\nUser: Bye\nAssistant: See you.\n", None),
}
TEXTS = [
    "Grüße aus München, schöne Straßen", "你好，世界！ 龙", "emoji 😀🎉 and 👍🏽", "two  spaces   and    more", " a leading space",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2345))\t# done", "I'm <b>bold</b> [INST] {'k': [1, 2]} …", "trailing \n",
]  # fmt: skip
# Lowest ids, the tokens put before a text, EOS and PAD.
TOKENS = {
    "llama2": (["<unk>", "<s>", "</s>"], "<s>", "</s>", None),
    "mistral": (["<unk>", "<s>", "</s>"], "<s>", "</s>", None),
    "mistral_v3": (["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"], "<s>", "</s>", None),
    "llama3": ([], "<|begin_of_text|>", "<|eot_id|>", None),
    "llama3_base": ([], "<|begin_of_text|>", "<|end_of_text|>", None),
    "qwen2": ([], None, "<|im_end|>", "<|endoftext|>"),
    "qwen3": ([], None, "<|im_end|>", "<|endoftext|>"),
    "gemma2": (["<pad>", "<eos>", "<bos>", "<unk>"], "<bos>", "<eos>", "<pad>"),
    "phi3": (["<unk>", "<s>", "</s>"], None, "<|endoftext|>", "<|endoftext|>"),
    "zephyr": (["<unk>", "<s>", "</s>"], "<s>", "</s>", "</s>"),
    "deepseek": ([zoo.DEEPSEEK_BOS, zoo.DEEPSEEK_EOS, "<｜▁pad▁｜>"], zoo.DEEPSEEK_BOS, zoo.DEEPSEEK_EOS, "<｜▁pad▁｜>"),
    "deepseek_r1": ([zoo.DEEPSEEK_BOS, zoo.DEEPSEEK_EOS, "<｜▁pad▁｜>"], zoo.DEEPSEEK_BOS, zoo.DEEPSEEK_EOS, "<｜▁pad▁｜>"),
    "smollm2": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None, "<|im_end|>", "<|im_end|>"),
    "gpt2": ([], None, "<|endoftext|>", None),
    "command_r_like": (["<PAD>", "<UNK>"], "<BOS_TOKEN>", "<EOS_TOKEN>", "<PAD>"),
}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    root, loaded = tmp_path_factory.mktemp("zoo"), {}

    def get(name):
        if zoo.missing(name):
            pytest.skip(zoo.missing(name))
        if name not in loaded:
            loaded[name] = AutoTokenizer.from_pretrained(zoo.make(name, root))
        return loaded[name]

    return get


def render(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def ids(tokenizer, text, **options):
    return tokenizer(text, add_special_tokens=False, **options)["input_ids"]


def test_every_family_is_described():
    assert set(TOKENS) == set(zoo.FAMILIES)
    assert set(RENDERED) == {name for name, family in zoo.FAMILIES.items() if family.has_template}


@pytest.mark.parametrize("name", RENDERED)
def test_the_rendered_text_and_the_generation_prompt_are_the_published_ones(load, name):
    tokenizer, family, (whole, prompt) = load(name), zoo.FAMILIES[name], RENDERED[name]
    chat = CHAT[1:] if family.system == "refused" else CHAT
    assert render(tokenizer, chat) == whole
    prompt = whole[: whole.rindex("See you.")] if prompt is None else prompt
    assert render(tokenizer, chat[:-1], add_generation_prompt=True) == prompt


@pytest.mark.parametrize("name", RENDERED)
def test_roles_that_a_template_refuses(load, name):
    tokenizer, family = load(name), zoo.FAMILIES[name]
    if family.system == "refused":
        refusal = "roles must alternate" if name == "mistral" else "System role not supported"
        with pytest.raises(Exception, match=refusal):
            render(tokenizer, CHAT)
    if name == "mistral":
        with pytest.raises(Exception, match="Only user and assistant roles are supported!"):
            render(tokenizer, [*CHAT[1:2], {"role": "tool", "content": "x"}])
    doubled = [CHAT[1], CHAT[1], CHAT[2]]
    if family.alternates:
        with pytest.raises(Exception, match="roles must alternate"):
            render(tokenizer, doubled)
    else:
        assert render(tokenizer, doubled).count("Hi!") == 2


def test_default_system_prompts(load):
    qwen, smol = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", "<|im_start|>user\nBye<|im_end|>\n"
    assert render(load("qwen2"), CHAT[3:4]) == f"<|im_start|>system\n{qwen}<|im_end|>\n{smol}"
    assert render(load("qwen3"), CHAT[3:4]) == smol
    text = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert render(load("smollm2"), CHAT[3:4]) == text + smol


def test_thoughts(load):
    thought = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nHello."}
    chat = [CHAT[1], thought, CHAT[3], thought]
    start = "<|im_start|>user\nHi! <|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    last = "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nHello.<|im_end|>\n"
    assert render(load("qwen3"), chat) == start + last
    apart = {"role": "assistant", "content": "Hello.", "reasoning_content": "Hm."}
    assert render(load("qwen3"), [CHAT[1], apart, CHAT[3], apart]) == start + last
    spaced = {"role": "assistant", "content": "\n\n Hello."}
    assert render(load("qwen3"), [CHAT[1], spaced, CHAT[3], spaced]) == (
        start.replace("\nHello.", "\n\n\n Hello.") + "<|im_start|>assistant\n<think>\n\n</think>\n\n Hello.<|im_end|>\n"
    )
    prompt = render(load("qwen3"), chat[:-1], add_generation_prompt=True, enable_thinking=False)
    assert prompt == start + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert render(load("deepseek_r1"), chat[:2]).endswith("<｜Assistant｜>\n\nHello.<｜end▁of▁sentence｜>")
    assert render(load("deepseek"), chat[:2]).endswith(f"<｜Assistant｜>{thought['content']}<｜end▁of▁sentence｜>")


TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
TOOL_TEXT = '{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}'
CALL = {"type": "function", "id": "abcdefgh1", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL_CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "name": "add", "content": "2", "tool_call_id": "abcdefgh1"},
    {"role": "tool", "name": "add", "content": "2", "tool_call_id": "abcdefgh1"},
    {"role": "assistant", "content": "2"},
]
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def qwen_tools(last: str) -> str:
    return (
        "<|im_start|>system\nBe kind.\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{TOOL_TEXT}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
        'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        f"<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n{CALL_TEXT}\n{CALL_TEXT}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{last}<|im_end|>\n"
    )


def test_tools(load):
    assert render(load("qwen2"), TOOL_CHAT, tools=[TOOL]) == qwen_tools("2")
    assert render(load("qwen3"), TOOL_CHAT, tools=[TOOL]) == qwen_tools("<think>\n\n</think>\n\n2")
    call = '{"name": "add", "arguments": {"a": 1}, "id": "abcdefgh1"}'
    result = '[TOOL_RESULTS] {"content": 2, "call_id": "abcdefgh1"}[/TOOL_RESULTS]'
    assert render(load("mistral_v3"), TOOL_CHAT, tools=[TOOL]) == (
        f"<s>[AVAILABLE_TOOLS] [{TOOL_TEXT}][/AVAILABLE_TOOLS][INST] 1+1?[/INST][TOOL_CALLS] [{call}, {call}]</s>"
        f"{result}{result} 2</s>"
    )
    short = [*TOOL_CHAT[:2], {**TOOL_CHAT[2], "tool_calls": [{**CALL, "id": "1"}]}]
    with pytest.raises(Exception, match="alphanumeric strings with length 9"):
        render(load("mistral_v3"), short)


@pytest.mark.parametrize("name", TOKENS)
def test_special_tokens_and_bos(load, name):
    tokenizer, family, (lowest, before, eos, pad) = load(name), zoo.FAMILIES[name], TOKENS[name]
    assert tokenizer.convert_ids_to_tokens(list(range(len(lowest)))) == lowest
    assert (tokenizer.eos_token, tokenizer.pad_token) == (eos, pad)
    plain = zoo.RESPONSE if name == "qwen2" else ()
    for token in {*family.control, *filter(None, [family.turn_end, eos])}:
        assert (len(ids(tokenizer, token)) == 1) == (token not in plain), token
        if token not in plain:
            assert ids(tokenizer, f"a{token}b").count(tokenizer.convert_tokens_to_ids(token)) == 1, token
    with_special = tokenizer("Hello")["input_ids"]
    assert with_special == ([tokenizer.convert_tokens_to_ids(before)] if before else []) + ids(tokenizer, "Hello")
    if name.startswith("qwen"):
        assert tokenizer.bos_token is None
    assert len(tokenizer) == max(tokenizer.get_vocab().values()) + 1 == len(tokenizer.get_vocab())


@pytest.mark.parametrize("name", TOKENS)
def test_texts_come_back_from_their_ids(load, name):
    for text in TEXTS:
        # Mistral v3 puts a space before a text unless it has one, and takes one away.
        assert load(name).decode(ids(load(name), text)) == (text.lstrip() if name == "mistral_v3" else text)


@pytest.mark.parametrize("name", TOKENS)
def test_saved_again_it_is_the_same(load, name, tmp_path):
    tokenizer = load(name)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert type(again) is type(tokenizer) and again.is_fast and again.chat_template == tokenizer.chat_template
    for text in [*TEXTS, *zoo.injections(zoo.FAMILIES[name]), *RENDERED.get(name, ("",))[:1]]:
        for options in ({}, {"add_special_tokens": False}):
            assert again(text, **options)["input_ids"] == tokenizer(text, **options)["input_ids"]


def test_marks_of_each_kind_of_tokenizer(load):
    def tokens(name, text):
        return load(name).convert_ids_to_tokens(ids(load(name), text))

    assert tokens("llama2", "</s>x")[1].startswith("▁") and not tokens("mistral_v3", "[/INST]x")[1].startswith("▁")
    assert tokens("llama2", "x")[0].startswith("▁") and tokens("mistral_v3", "x")[0].startswith("▁")
    assert tokens("gemma2", "x") == ["x"] and tokens("gemma2", "\n\n") == ["\n\n"] and tokens("gemma2", "<b>") == ["<b>"]
    for name in ("llama2", "mistral_v3", "gemma2"):
        assert "<0xF0>" in tokens(name, "😀")
    assert tokens("llama2", "\n")[-1] == "<0x0A>"
    assert ids(load("phi3"), "<|user|>\n \nHi") == ids(load("phi3"), "<|user|>Hi"), "white space after a marker is its own"
    assert load("phi3")("<|end|>\n<|user|>", return_offsets_mapping=True)["offset_mapping"] == [(0, 8), (8, 16)]
    assert len(tokens("zephyr", "<|user|>")) > 3
    for name in ("llama3", "deepseek"):
        assert ids(load(name), "1234567") == [i for part in ("123", "456", "7") for i in ids(load(name), part)]
    for name in ("qwen2", "command_r_like", "smollm2"):
        assert len(tokens(name, "1234567")) == 7
    for name, same in (("qwen2", True), ("command_r_like", True), ("llama3", False), ("llama2", False)):
        assert (ids(load(name), "u\u0308") == ids(load(name), "ü")) == same
    assert load("llama3").backend_tokenizer.model.ignore_merges
    assert load("qwen2").decode(ids(load("qwen2"), "<tool_call>x<|im_end|>"), skip_special_tokens=True) == "<tool_call>x"
    assert load("llama3").decode(ids(load("llama3"), "x<|eot_id|>"), skip_special_tokens=True) == "x"


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("name", TOKENS)
def test_conversations_are_valid_and_varied(load, name, tools):
    tokenizer, family, rng = load(name), zoo.FAMILIES[name], random.Random(0)
    chats = [zoo.conversations(rng, family, tools) for _ in range(60)]
    assert chats[0] == zoo.conversations(random.Random(0), family, tools)
    for chat in chats:
        assert chat[-1]["role"] == "assistant" and all(m["content"].strip() for m in chat if "tool_calls" not in m)
        for message in chat:
            text = message["content"].rsplit("</think>\n\n")[-1] if family.strips_thinking else message["content"]
            assert zoo.without_control(text, family) == text
        if family.has_template:
            assert render(tokenizer, chat, tools=zoo.TOOLS if tools else None)
    contents = [message["content"] for chat in chats for message in chat]
    assert any(text != text.strip() for text in contents) and any("\n" in text for text in contents)
    assert len({len(chat) for chat in chats}) > 4
    assert any(message["role"] == "system" for chat in chats for message in chat) == (family.system != "refused")
    assert any("tool_calls" in message for chat in chats for message in chat) == (tools and family.tools)
    assert any(len({m["content"] for m in chat}) < len(chat) for chat in chats)


@pytest.mark.parametrize("name", TOKENS)
def test_injections_hold_control_tokens(load, name):
    family, texts = zoo.FAMILIES[name], zoo.injections(zoo.FAMILIES[name])
    added = {str(token) for token in load(name).added_tokens_decoder.values()}
    assert all(any(token in text for token in family.control) for text in texts)
    assert all(any(token in text for token in added) for text in texts if not any(t in text for t in zoo.RESPONSE))
    assert any(family.turn_end in text for text in texts) if family.turn_end else True
