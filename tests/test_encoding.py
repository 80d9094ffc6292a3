"""What is supervised, for every kind of tokenizer and template; what never becomes a control token; how rows are cut."""

import random
import re

import numpy as np
import pytest
import tokenizers
import tokenizers.trainers
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

import chat
import encoding
import zoo
from encoding import Encoder
from formats import Row, choose, read

CHATS = [name for name, family in zoo.FAMILIES.items() if family.has_template]
USER, ANSWER = {"role": "user", "content": "please send refund"}, {"role": "assistant", "content": "hello thanks"}
CHAT = [USER, ANSWER, {"role": "user", "content": "order broken"}, {"role": "assistant", "content": "today"}]


@pytest.fixture(scope="session")
def family_tokenizer(tmp_path_factory):
    """By name: the prepared tokenizer of a family, made once."""
    root, made = tmp_path_factory.mktemp("zoo"), {}

    def get(name):
        if zoo.missing(name):
            pytest.skip(zoo.missing(name))
        if name not in made:
            made[name] = chat.prepare_tokenizer(str(zoo.make(name, root)))[0]
        return made[name]

    return get


@pytest.fixture(scope="module")
def tokenizer(assets):
    return chat.prepare_tokenizer(str(assets["fp32"]), "chatml")[0]


@pytest.fixture(scope="module")
def plain(assets):
    return chat.prepare_tokenizer(str(assets["no_chatml"]), "none")[0]


def read_row(example):
    return read(example, choose(list(example)))


def supervised(encoder, row):
    """The supervised texts, one for each unbroken run of supervised tokens."""
    return [text for text, trained in encoder.pieces(row.input_ids, row.labels) if trained]


# ---- Every family of tokenizers and templates ----


def answers(messages: list[dict], family) -> list[str]:
    """What the family's published format writes for each of the assistant's turns, end of turn included, by its rules."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    texts = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        text = message["content"]
        if family.strips_thinking and family.name == "qwen3":
            thought = message.get("reasoning_content", "")
            if "</think>" in text:
                thought, text = text.split("</think>")[0].rstrip("\n").split("<think>")[-1], text.split("</think>")[-1]
                text = text.lstrip("\n")
            if index > users[-1] and (index == len(messages) - 1 or thought):
                text = "<think>\n" + thought.strip("\n") + "\n</think>\n\n" + text.lstrip("\n")
        elif family.strips_thinking:
            text = text.split("</think>")[-1] if "</think>" in text else text
        text = text.strip() if family.trims else text
        texts.append(text + (" " if family.name == "llama2" else "") + (family.turn_end or ""))
    return texts


def written(text, tokenizer):
    """A text as the tokenizer gives it back, whatever it is a part of."""
    before = tokenizer.decode(tokenizer("x:", add_special_tokens=False)["input_ids"])
    return tokenizer.decode(tokenizer("x:" + text, add_special_tokens=False)["input_ids"]).removeprefix(before)


@pytest.mark.parametrize("name", CHATS)
def test_what_is_supervised_is_the_assistants_turns_exactly(family_tokenizer, name):
    family, tokenizer = zoo.FAMILIES[name], family_tokenizer(name)
    encoder, rng = Encoder(tokenizer, append_concat_token=False), random.Random(name)
    slow = Encoder(tokenizer, append_concat_token=False)
    slow._is_plain = lambda *_: False  # by the offsets of all tokens
    for _ in range(60):
        messages = zoo.conversations(rng, family)
        row = encoder.one(Row(messages=messages))
        got, want = supervised(encoder, row), answers(messages, family)
        # Two answers with nothing but the header between them are two runs, since the header is not supervised.
        assert len(got) == len(want), messages
        for text, wanted in zip(got, want, strict=True):
            # Some tokenizers compose characters, write "▁" for a space, or have the space before an answer in its first token.
            forms = {written(wanted, tokenizer), " " * (not encoder.template.header) + written(wanted, tokenizer)}
            if name == "phi3":  # its markers take the white space after them
                text, forms = text.lstrip(), {form.lstrip() for form in forms}
            if family.turn_end is None:  # white space at the end may be one token with the template's
                text, forms = text.rstrip(), {form.rstrip() for form in forms}
            assert text in forms, messages
        assert np.array_equal(slow.one(Row(messages=messages)).labels, row.labels)
        assert np.array_equal(row.labels[row.labels != -100], row.input_ids[row.labels != -100])


@pytest.mark.parametrize("name", CHATS)
def test_the_tokens_are_those_of_the_rendered_chat(family_tokenizer, name):
    family, tokenizer = zoo.FAMILIES[name], family_tokenizer(name)
    encoder, rng = Encoder(tokenizer, append_concat_token=False), random.Random(name)
    seen = 0
    for _ in range(40):
        messages = zoo.conversations(rng, family)
        if messages[0]["role"] == "system" and not encoder.template.takes_system:
            continue
        # Where an answer begins there is a break, as in generation, and a token of the whole text may reach over it.
        messages = [m | {"content": m["content"].strip()} if m["role"] == "assistant" else m for m in messages]
        ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
        if not encoder.template.header.endswith(" "):
            assert encoder.one(Row(messages=messages)).input_ids.tolist() == ids
            seen += 1
    assert seen > 10 or encoder.template.header.endswith(" ")


def test_an_answer_begins_with_a_token_of_its_own(family_tokenizer):
    """As in generation, where the prompt is tokenised by itself: "\\n" and "\\n" are not one token across the border."""
    tokenizer = family_tokenizer("qwen2")
    answer = ANSWER | {"content": "\n\nhello"}
    row = Encoder(tokenizer).one(Row(messages=[USER, answer]))
    prompt = tokenizer.apply_chat_template([USER], tokenize=True, add_generation_prompt=True)["input_ids"]
    whole = tokenizer(tokenizer.apply_chat_template([USER, answer], tokenize=False))["input_ids"]
    assert row.input_ids[: len(prompt)].tolist() == prompt != whole[: len(prompt)]
    assert (row.labels[: len(prompt)] == -100).all() and row.labels[len(prompt)] == row.input_ids[len(prompt)]


@pytest.mark.parametrize("name", CHATS)
def test_text_from_the_data_never_becomes_a_control_token(family_tokenizer, name):
    family, tokenizer = zoo.FAMILIES[name], family_tokenizer(name)
    encoder, rng = Encoder(tokenizer, append_concat_token=False), random.Random(name)
    special = set(encoder.special)

    def controls(messages):
        row = encoder.one(Row(messages=messages))
        return [id for id in row.input_ids.tolist() if id in special], row

    forgeries = zoo.injections(family)
    assert len(forgeries) > 3
    for forgery in forgeries:
        messages = zoo.conversations(rng, family)
        place = rng.randrange(len(messages))
        benign = [m | {"content": "word"} if i == place else m for i, m in enumerate(messages)]
        forged = [m | {"content": forgery} if i == place else m for i, m in enumerate(messages)]
        want, (got, row) = controls(benign)[0], controls(forged)
        assert got == want, (forgery, messages[place]["role"])
        assert row.escaped == any(tokenizer.convert_tokens_to_ids(t) in special and t in forgery for t in family.control)
        text = tokenizer.decode(row.input_ids)
        assert forgery.strip() in text or family.strips_thinking, "the text of the data is not changed"
        if messages[place]["role"] == "assistant" and not family.strips_thinking:
            assert any(forgery.strip() in part for part in supervised(encoder, row))


@pytest.mark.parametrize("name", [name for name in CHATS if zoo.FAMILIES[name].tools])
def test_tool_calls_are_supervised_and_their_results_are_not(family_tokenizer, name):
    family, tokenizer = zoo.FAMILIES[name], family_tokenizer(name)
    encoder, rng = Encoder(tokenizer, append_concat_token=False), random.Random(name)
    calls = 0
    for _ in range(40):
        example = {"messages": zoo.conversations(rng, family, tools=True), "tools": zoo.TOOLS}
        row = encoder.one(read_row(example))
        turns = [m for m in example["messages"] if m["role"] == "assistant"]
        parts = supervised(encoder, row)
        assert len(parts) == len(turns)
        for part, turn in zip(parts, turns, strict=True):
            assert part.endswith(family.turn_end) and part.count(family.turn_end) == 1
            for call in turn.get("tool_calls", ()):
                calls += 1
                assert f'"{call["function"]["name"]}"' in part
        assert not any('"result"' in part for part in parts)
    assert calls > 10


# ---- What --loss_on means ----


def test_loss_on(tokenizer):
    def texts(loss_on, row):
        encoder = Encoder(tokenizer, loss_on=loss_on)
        return supervised(encoder, encoder.one(row))

    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    chat_, with_prompt = Row(messages=CHAT), Row(messages=CHAT, prompt=3)
    assert texts(None, chat_) == texts("assistant", chat_) == ["hello thanks<|im_end|>", "today<|im_end|>"]
    assert texts("completion", chat_) == ["today<|im_end|>"] == texts(None, with_prompt) == texts("completion", with_prompt)
    assert texts("assistant", with_prompt) == ["hello thanks<|im_end|>", "today<|im_end|>"]
    assert texts("all", chat_) == texts("all", with_prompt) == [whole]
    unanswered = Row(messages=CHAT[:3])
    assert texts(None, unanswered) == ["hello thanks<|im_end|>"] and texts("completion", unanswered) == []
    assert texts(None, Row(messages=[*CHAT[:1], CHAT[1] | {"weight": 0}, *CHAT[2:]])) == ["today<|im_end|>"]


def test_a_row_is_rendered_once_with_no_extra_tokens(tokenizer):
    row = Encoder(tokenizer).one(Row(messages=CHAT))
    assert tokenizer.decode(row.input_ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert row.input_ids.tolist().count(tokenizer.eos_token_id) == len(CHAT)
    assert row.input_ids.dtype == row.labels.dtype == np.int32


def test_prompt_and_completion_as_text(plain):
    encoder = Encoder(plain)
    row = encoder.one(read_row({"prompt": "please send : ", "completion": "refund"}))
    assert supervised(encoder, row) == [" refund</s>"]  # the token "Ġrefund" straddles the end of the prompt
    assert supervised(encoder, Encoder(plain, loss_on="all").one(read_row({"prompt": "a", "completion": "b"}))) == ["ab</s>"]


def test_tokens_of_spaces_are_supervised(plain):
    """Byte-level tokenizers leave spaces out of a token's offsets; an answer is code as often as not."""
    encoder = Encoder(plain)
    code = "today:\n\n        if thanks:\n            hello   \n"
    row = encoder.one(read_row({"prompt": "please\n", "completion": code}))
    assert supervised(encoder, row) == [code + "</s>"]


# ---- BOS and EOS ----


def test_append_concat_token_acts_and_never_doubles(plain, tokenizer):
    eos = plain.eos_token_id
    row = Encoder(plain).one(Row(text="hello"))
    assert row.input_ids[-1] == row.labels[-1] == eos
    assert eos not in Encoder(plain, append_concat_token=False).one(Row(text="hello")).input_ids
    assert Encoder(plain).one(Row(text="hello</s>")).input_ids.tolist().count(eos) == 1
    assert Encoder(tokenizer).one(Row(messages=CHAT)).input_ids.tolist().count(tokenizer.eos_token_id) == len(CHAT)


def test_a_template_without_eos_gets_one_that_is_supervised_if_the_answer_is_last(family_tokenizer):
    tokenizer = family_tokenizer("command_r_like")
    encoder = Encoder(tokenizer)
    assert encoder.template.turn_end is None
    assert encoder.one(Row(messages=CHAT)).labels[-1] == tokenizer.eos_token_id
    open_end = encoder.one(Row(messages=CHAT[:3]))
    assert open_end.input_ids[-1] == tokenizer.eos_token_id and open_end.labels[-1] == -100


def test_add_special_tokens_acts_and_bos_is_there_once(family_tokenizer):
    tokenizer = family_tokenizer("llama3_base")
    bos = tokenizer.bos_token_id
    first = lambda row, **options: Encoder(tokenizer, **options).one(row).input_ids[:2].tolist()  # noqa: E731
    assert first(Row(text="hello there"))[0] == bos and first(Row(text="hello there"))[1] != bos
    assert first(Row(text="hello there"), add_special_tokens=False)[0] != bos
    assert first(Row(text=f"{tokenizer.bos_token}hello there")) == first(Row(text="hello there"))
    chats = family_tokenizer("llama3")
    for add in (None, True, False):
        ids = Encoder(chats, add_special_tokens=add).one(Row(messages=CHAT)).input_ids.tolist()
        assert ids.count(chats.bos_token_id) == 1 and ids[0] == chats.bos_token_id, add


# ---- Control tokens in plain text ----


def test_control_tokens_in_text_need_a_choice(plain):
    eos = plain.eos_token_id
    row = Row(text="hello</s> today")
    with pytest.raises(
        encoding.ChoiceNeeded, match="text rows hold control tokens, such as '</s>'.*--control_tokens_in_text"
    ):
        Encoder(plain).encode([Row(text="fine"), row])
    kept = Encoder(plain, control_tokens="keep").one(row)
    text = Encoder(plain, control_tokens="escape").one(row)
    assert (kept.input_ids.tolist().count(eos), text.input_ids.tolist().count(eos)) == (2, 1)
    assert not kept.escaped and text.escaped
    assert plain.decode(text.input_ids) == plain.decode(kept.input_ids) == "hello</s> today</s>"
    assert not Encoder(plain).one(Row(text="<s>hello today</s>\n")).escaped, "BOS and EOS at the ends mean what they say"
    pair = Encoder(plain, control_tokens="escape").one(Row(text="a</s>b</s>", prompt=5))
    assert supervised(Encoder(plain), pair) == ["b</s></s>"] and pair.input_ids.tolist().count(eos) == 1


# ---- Truncation ----


@pytest.mark.parametrize("limit", [1, 5, 12, 13, 400])
def test_truncation(tokenizer, limit):
    row = Row(messages=CHAT)
    whole = Encoder(tokenizer).one(row)
    right, left, dropped = (Encoder(tokenizer, max_length=limit, truncation=t).one(row) for t in ("right", "left", "drop"))
    is_long = limit < whole.length
    for cut in (right, left, dropped):
        assert (cut.length, cut.digest) == (whole.length, whole.digest), "facts of the row before it is cut"
    assert (
        right.input_ids.tolist() == whole.input_ids[:limit].tolist()
        and right.labels.tolist() == whole.labels[:limit].tolist()
    )
    assert (
        left.input_ids.tolist() == whole.input_ids[-limit:].tolist()
        and left.labels.tolist() == whole.labels[-limit:].tolist()
    )
    assert (right.truncated, left.truncated, dropped.too_long) == (is_long,) * 3 and not dropped.truncated
    if is_long:
        with pytest.raises(ValueError, match=rf"it has {whole.length} tokens, more than --max_length {limit}"):
            Encoder(tokenizer, max_length=limit, truncation="error").one(row)


def test_cutting_on_the_left_keeps_bos(family_tokenizer):
    tokenizer = family_tokenizer("llama3")
    cut = Encoder(tokenizer, max_length=8, truncation="left").one(Row(messages=CHAT))
    whole = Encoder(tokenizer).one(Row(messages=CHAT))
    assert cut.input_ids.tolist() == [tokenizer.bos_token_id, *whole.input_ids[-7:].tolist()]


# ---- What cannot be used ----


def template(text):
    def with_template(assets):
        tokenizer = chat.prepare_tokenizer(str(assets["fp32"]), "chatml")[0]
        tokenizer.chat_template = text
        return tokenizer

    return with_template


CHATML = chat.CHATML
CASES = {
    "refuses": (
        CHATML.replace("{% for", "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}{% for", 1),
        [USER | {"content": "no"}, ANSWER], "the chat template refuses it (not this)",
    ),
    "leaves a role out": (
        CHATML.replace("{{ '<|im_start|>' + message", "{% if message.role != 'critic' %}{{ '<|im_start|>' + message", 1)
        .replace("'\\n' }}{% endfor %}", "'\\n' }}{% endif %}{% endfor %}", 1),
        [USER, {"role": "critic", "content": "x"}, ANSWER], "leaves out message 1 (role 'critic')",
    ),
    "looks at the text": (
        CHATML.replace("message['content']", "(message['content'] | length | string)"), [USER, ANSWER], "cannot render",
    ),
    "tools": (CHATML, None, "it has tools, which the chat template leaves out"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_chats_that_a_template_cannot_write(assets, name):
    text, messages, message = CASES[name]
    row = Row(messages=messages or CHAT, tools=[{"type": "function"}] if name == "tools" else None)
    with pytest.raises(ValueError, match=re.escape(message)):
        Encoder(template(text)(assets)).one(row)


def test_a_template_that_changes_with_the_text_is_refused(assets):
    odd = CHATML.replace("+ message['content'] +", "+ (message['content'] | length | string) + message['content'] +")
    with pytest.raises(ValueError, match="changes with what a message holds, so its answers cannot be found"):
        Encoder(template(odd)(assets)).one(Row(messages=CHAT))


def test_a_template_that_looks_at_a_users_turn_is_fine(assets):
    odd = CHATML.replace(
        "{{ '<|im_start|>' + message['role']",
        "{% if message['content'].startswith('please') %}!{% endif %}{{ '<|im_start|>' + message['role']",
    )
    tokenizer = template(odd)(assets)
    encoder = Encoder(tokenizer)
    row = encoder.one(Row(messages=CHAT))
    assert supervised(encoder, row) == ["hello thanks<|im_end|>", "today<|im_end|>"]
    assert tokenizer.decode(row.input_ids).startswith("!")


def test_no_place_for_a_system_prompt(family_tokenizer):
    encoder = Encoder(family_tokenizer("gemma2"))
    system = {"role": "system", "content": "Be brief."}
    row = encoder.one(Row(messages=[system, *CHAT]))
    assert row.system_folded and "user\nBe brief.\n\nplease send refund" in family_tokenizer("gemma2").decode(row.input_ids)
    assert supervised(encoder, row) == ["hello thanks<end_of_turn>", "today<end_of_turn>"]
    with pytest.raises(ValueError, match="no place for a system message"):
        encoder.one(Row(messages=[system, ANSWER]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row(messages=[USER | {"content": "\U000f0001"}, ANSWER]), "private planes 15 and 16"),
        (Row(text="", prompt=None), "the row is empty"),
        (Row(text="a", prompt=1), "the completion is empty"),
    ],
)
def test_bad_rows(tokenizer, row, message):
    with pytest.raises(ValueError, match=message):
        Encoder(tokenizer, append_concat_token=False).one(row)


def test_one_bad_row_does_not_spoil_a_batch(tokenizer):
    rows = [Row(messages=CHAT), Row(text=""), Row(messages=CHAT[:2])]
    first, bad, last = Encoder(tokenizer, append_concat_token=False).encode(rows)
    assert isinstance(bad, ValueError) and first.length > last.length > 0


def test_truncation_and_padding_of_a_published_tokenizer_are_off(assets):
    tokenizer = chat.prepare_tokenizer(str(assets["fp32"]), "chatml")[0]
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    assert Encoder(tokenizer).one(Row(messages=CHAT)).length == Encoder(tiny_chatml(assets)).one(Row(messages=CHAT)).length


def tiny_chatml(assets):
    return chat.prepare_tokenizer(str(assets["fp32"]), "chatml")[0]


def test_unusual_texts_survive(tokenizer):
    encoder = Encoder(tokenizer)
    for text in ("ünï çødé 漢字 🙂", "a\r\nb\tc", "x" * 20_000, " lead and trail \n", "\u200b", "0" * 300, "ﬁ ½ é"):
        row = encoder.one(Row(messages=[USER, ANSWER | {"content": text}]))
        assert supervised(encoder, row) == [text + "<|im_end|>"]


# ---- What templates do that hides or forges something ----

CALL = {"type": "function", "function": {"name": "get", "arguments": {"a": "x"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get", "description": "d", "parameters": {"properties": {"a": {"type": "string"}}}},
    }
]
WITH_CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name }} ARGUMENTS </call>{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def calling(arguments, content="") -> Row:
    call = {"type": "function", "function": {"name": "get", "arguments": arguments}}
    return Row(messages=[USER, {"role": "assistant", "content": content, "tool_calls": [call]}, ANSWER])


@pytest.mark.parametrize("content", ["", "Let me check."])
def test_tool_calls_that_a_template_leaves_out_are_refused(tokenizer, content):
    with pytest.raises(ValueError, match="leaves out"):
        Encoder(tokenizer).one(calling({"a": 1}, content))


@pytest.mark.parametrize(
    ("write", "want"),
    [
        ("{{ c.function.arguments | tojson }}", '{"a": true}'),
        ("{{ '' + c.function.arguments }}", '{"a": true}'),  # takes JSON only, as some published templates do
        ("{{ '' ~ c.function.arguments }}", '{"a": true}'),  # would write Python of an object
    ],
)
def test_arguments_of_tool_calls_are_json(assets, write, want):
    encoder = Encoder(template(WITH_CALLS.replace("ARGUMENTS", write))(assets))
    part = supervised(encoder, encoder.one(calling({"a": True})))[0]
    assert part == f"<call>get {want} </call><|im_end|>"


def test_keys_are_text_too(family_tokenizer):
    tokenizer = family_tokenizer("qwen2")
    encoder, end = Encoder(tokenizer), tokenizer.eos_token_id
    tools = [
        {**TOOLS[0], "function": {**TOOLS[0]["function"], "parameters": {"properties": {"<|im_end|>": {"type": "string"}}}}}
    ]
    want = encoder.one(Row(messages=calling({"a": 1}).messages, tools=TOOLS)).input_ids.tolist().count(end)
    for row in (Row(calling({"<|im_end|>": 1}).messages, TOOLS), Row(calling({"a": 1}).messages, tools)):
        got = encoder.one(row)
        assert got.input_ids.tolist().count(end) == want and got.escaped


def test_a_template_that_prints_objects_cannot_hold_control_tokens(assets):
    encoder = Encoder(template(WITH_CALLS.replace("ARGUMENTS", "{{ [c.function.arguments] }}"))(assets))
    encoder.one(calling({"a": "fine"}))
    with pytest.raises(ValueError, match="writes text as code"):
        encoder.one(calling({"a": "x <|im_end|> y"}))


def test_roles_cannot_make_control_tokens(assets):
    tokenizer = chat.prepare_tokenizer(str(assets["fp32"]), "zephyr")[0]
    with pytest.raises(ValueError, match="its role 'im_end' is the name of a control token"):
        Encoder(tokenizer).one(Row(messages=[USER, {"role": "im_end", "content": "q"}, ANSWER]))


@pytest.mark.parametrize("name", ["zephyr", "phi3", "llama2", "llama3"])
def test_a_look_alike_changes_no_other_answer(family_tokenizer, name):
    tokenizer = family_tokenizer(name)
    encoder = Encoder(tokenizer)
    plain = encoder.one(Row(messages=[USER, ANSWER]))
    forged = encoder.one(Row(messages=[USER | {"content": f"please {tokenizer.eos_token}"}, ANSWER]))
    assert forged.escaped and forged.labels[forged.labels >= 0].tolist() == plain.labels[plain.labels >= 0].tolist()


def test_weight_0_is_left_out_of_every_loss(tokenizer):
    messages = [USER, ANSWER | {"weight": 0}, USER, {"role": "assistant", "content": "today"}]
    for loss_on in ("assistant", "all"):
        encoder = Encoder(tokenizer, loss_on=loss_on)
        text = "".join(supervised(encoder, encoder.one(Row(messages=messages))))
        assert "today<|im_end|>" in text and "hello thanks" not in text
        assert text.count("please send refund") == (2 if loss_on == "all" else 0)
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}, {"from": "gpt", "value": "c"}]
    encoder = Encoder(tokenizer)
    assert supervised(encoder, encoder.one(read_row({"conversations": turns}))) == ["c<|im_end|>"]


def test_reasoning_that_a_template_leaves_out_is_refused(family_tokenizer, tokenizer):
    thinking = [USER, ANSWER | {"reasoning_content": "let me think"}]
    qwen3 = Encoder(family_tokenizer("qwen3"))
    assert supervised(qwen3, qwen3.one(Row(messages=thinking))) == [
        "<think>\nlet me think\n</think>\n\nhello thanks<|im_end|>"
    ]
    assert "let me think" not in family_tokenizer("qwen3").decode(qwen3.one(Row(messages=[*thinking, *CHAT[:2]])).input_ids)
    with pytest.raises(ValueError, match="leaves out the reasoning of message 1"):
        Encoder(tokenizer).one(Row(messages=thinking))


def test_a_header_inside_an_answer_whose_beginning_is_dropped(assets):
    """The thinking of earlier turns is left out, and what is left looks like the template's own plain header."""
    strips = chat.ZEPHYR.replace("message['content'] + eos_token", "message['content'].split('</think>')[-1] + eos_token")
    tokenizer = chat.prepare_tokenizer(str(assets["fp32"]), "zephyr")[0]
    tokenizer.chat_template = strips
    encoder = Encoder(tokenizer)
    answer = ANSWER | {"content": "<think>hm</think>see\n<|assistant|>\ntoday"}
    row = encoder.one(Row(messages=[USER, answer, *CHAT[:2]]))
    assert supervised(encoder, row) == ["see\n<|assistant|>\ntoday</s>", "hello thanks</s>"]


def test_an_answer_that_is_written_twice_is_refused(assets):
    recap = "{% if messages | length > 3 %}Recap: {{ messages[1].content }}\n{% endif %}" + CHATML
    with pytest.raises(ValueError, match="writes message 1 in several places"):
        Encoder(template(recap)(assets)).one(Row(messages=CHAT))


def test_no_second_eos_after_the_template_s_last_token(family_tokenizer):
    tokenizer = family_tokenizer("phi3")
    row = Encoder(tokenizer, loss_on="all").one(Row(messages=CHAT))
    assert row.input_ids[-1] == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert row.input_ids.tolist().count(tokenizer.eos_token_id) == len(CHAT)


def test_the_border_of_an_escaped_prompt(family_tokenizer):
    tokenizer = family_tokenizer("qwen2")
    row = Encoder(tokenizer, control_tokens="escape", append_concat_token=False).one(Row(text="a <|im_end|> b", prompt=6))
    assert (
        tokenizer.eos_token_id not in row.input_ids and row.escaped and tokenizer.decode(row.input_ids) == "a <|im_end|> b"
    )


def test_control_tokens_that_a_normaliser_makes(tmp_path):
    """Full-width brackets are those of a control token under NFKC, if that token is looked for in normalised text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.NFKC()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["please send"], trainer)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=True) for t in ("<|im_start|>", "<|im_end|>")])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>").save_pretrained(tmp_path)
    tokenizer = chat.prepare_tokenizer(str(tmp_path), "chatml")[0]
    row = Encoder(tokenizer).one(Row(messages=[USER | {"content": "x \uff1c|im_end|\uff1e y"}, ANSWER]))
    assert row.input_ids.tolist().count(tokenizer.eos_token_id) == 2


def test_a_template_that_always_ends_in_a_header_is_refused(assets):
    tokenizer = chat.prepare_tokenizer(
        str(assets["fp32"]), new_tokens="<|user|>,<|assistant|>", chat_template_format="none"
    )[0]
    tokenizer.chat_template = "{% for m in messages %}{{ '<|'+m.role+'|>\n'+m.content+'\n' }}{% endfor %}<|assistant|>\n"
    with pytest.raises(ValueError, match="which begins an answer, at the end of every chat"):
        chat.inspect(tokenizer)
