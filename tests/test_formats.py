"""Which format a data set has, and what its rows say."""

import datetime
import json

import pytest

import formats
from formats import Row

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


def read(example, *, has_template=True, wanted=None, **kwargs):
    chosen = formats.choose(list(example), wanted, has_template=has_template, **kwargs)
    return formats.read(example, chosen, has_template)


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        (["messages"], "messages"),
        (["id", "messages", "tools", "text"], "messages"),
        (["conversations", "system"], "sharegpt"),
        (["prompt", "completion"], "prompt-completion"),
        (["instruction", "input", "output"], "instruction"),
        (["instruction", "output"], "instruction"),
        (["text"], "text"),
    ],
)
def test_recognised_by_columns(columns, name):
    chosen = formats.choose(columns)
    assert chosen.name == name and chosen.recognised
    assert set(chosen.columns.values()) | set(chosen.unread) == set(columns)


def test_the_choice_says_what_it_took_and_what_else_would_fit():
    chosen = formats.choose(["messages", "prompt", "completion", "id"])
    assert str(chosen) == (
        "messages, recognised; messages <- 'messages'; not read: 'prompt', 'completion', 'id'; "
        "--format prompt-completion would fit too"
    )
    asked = formats.choose(
        ["question", "answer"], "prompt-completion", renamed={"prompt": "question", "completion": "answer"}
    )
    assert str(asked) == "prompt-completion, as asked for; prompt <- 'question', completion <- 'answer'"


def test_without_a_template_chats_give_way_to_text():
    assert formats.choose(["messages", "content"], text_field="content", has_template=False).name == "text"
    assert formats.choose(["messages", "content"], text_field="content").name == "messages"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(columns=["a", "b"]), "no usable column among 'a', 'b': expected 'messages'"),
        (dict(columns=[]), "no usable column among none"),
        (dict(columns=["messages"], has_template=False), "no chat template: set --chat_template_format"),
        (dict(columns=["text"], wanted="messages"), "--format messages needs 'messages' and the data have 'text'"),
        (dict(columns=["text"], wanted="chat"), "--format chat is unknown: use messages, sharegpt"),
        (dict(columns=["text"], renamed={"prompt": "q"}), "there is no column 'q'; the data have 'text'"),
        (dict(columns=["text"], renamed={"promt": "text"}), "'promt' is no part of a format"),
        (dict(columns=["text", "q"], renamed={"prompt": "q"}), "format text does not read 'prompt'"),
        (dict(columns=["q"], renamed={"prompt": "q", "completion": "q"}), "--columns takes 'q' for two parts of a row"),
    ],
)
def test_columns_that_do_not_fit(kwargs, message):
    with pytest.raises(ValueError) as caught:
        formats.choose(**kwargs)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_columns_are_pairs():
    assert formats.parse_columns("prompt=question, completion=answer") == {"prompt": "question", "completion": "answer"}
    assert formats.parse_columns(None) == formats.parse_columns("") == {}
    assert formats.parse_columns('{"prompt": "question"}') == {"prompt": "question"}
    for wrong in ("prompt", "prompt=", "=x", "a=b,c"):
        with pytest.raises(ValueError, match="part=column pairs"):
            formats.parse_columns(wrong)
    with pytest.raises(ValueError, match="gives one part twice"):
        formats.parse_columns("prompt=a,prompt=b")


def test_messages():
    assert read({"messages": [USER, ANSWER]}) == Row(messages=[USER, ANSWER])
    assert read({"messages": [USER | {"name": None}, ANSWER | {"tool_calls": None}], "tools": None}).messages == [
        USER,
        ANSWER,
    ]
    assert read({"messages": json.dumps([USER, ANSWER])}).messages == [USER, ANSWER]
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert read({"messages": [USER | {"content": parts}, ANSWER]}).messages[0]["content"] == "hi"


def test_tool_calls_in_their_several_spellings():
    want = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    for call in (CALL, CALL["function"], {"function": {"name": "add", "arguments": '{"a": 1}'}}, {**CALL, "id": None}):
        row = read({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [TOOL]})
        assert row.messages[1] == want and row.tools == [TOOL], call
    assert read({"messages": [USER, ANSWER], "tools": json.dumps([TOOL])}).tools == [TOOL]
    # What Arrow makes of two tools with different parameters.
    arrow = {"function": {"name": "add", "arguments": {"a": 1, "city": None}}}
    assert read({"messages": [USER, {"role": "assistant", "tool_calls": [arrow]}]}).messages[1]["tool_calls"] == [CALL]


def test_sharegpt():
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    assert read({"conversations": turns}) == Row(messages=[USER, ANSWER])
    assert read({"conversations": turns, "system": "be nice"}).messages[0] == {"role": "system", "content": "be nice"}
    assert read({"conversations": [USER, ANSWER]}).messages == [USER, ANSWER]
    with pytest.raises(
        ValueError, match=r"conversations\[1\] \(assistant\): content is null"
    ):  # a system prompt is not counted
        read({"conversations": [turns[0], {"from": "gpt", "value": None}], "system": "be nice"})
    call = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": 1}})},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "yes"},
    ]
    row = read({"conversations": call, "tools": json.dumps([TOOL])})
    assert [m["role"] for m in row.messages] == ["user", "assistant", "tool", "assistant"]
    assert row.messages[1]["tool_calls"] == [CALL] and row.messages[2]["content"] == "2"


def test_prompt_completion():
    assert read({"prompt": "a ", "completion": "b"}) == Row(text="a b", prompt=2)
    assert read({"prompt": [USER], "completion": [ANSWER]}) == Row(messages=[USER, ANSWER], prompt=1)


def test_instruction():
    row = read({"instruction": "Add", "input": "1 2", "output": "3", "system": ""})
    assert row == Row(messages=[{"role": "user", "content": "Add\n\n1 2"}, {"role": "assistant", "content": "3"}], prompt=1)
    assert read({"instruction": "Add", "input": None, "output": "3", "system": "s"}).prompt == 2
    text = read({"instruction": "Add", "input": "1 2", "output": "3"}, has_template=False)
    assert text.text == "### Instruction:\nAdd\n\n### Input:\n1 2\n\n### Response:\n3" and text.text[text.prompt :] == "3"


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"text": None}, "column 'text' holds null, which is not text"),
        ({"text": 42}, "column 'text' holds 42"),
        ({"messages": []}, "must be a non-empty list of {role, content}, not []"),
        ({"messages": None}, "must be a non-empty list of {role, content}, not null"),
        ({"messages": "hi"}, "messages: 'hi' is not JSON"),
        ({"conversations": [{"from": ["human"], "value": "x"}]}, "from ['human'] is unknown"),
        ({"messages": [USER, ANSWER], "tools": [{"when": datetime.datetime(2024, 1, 1)}]}, "which JSON has no word for"),
        ({"messages": [USER, {"content": "x"}]}, "messages[1] has no role"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "messages[1] (assistant): content is null"),
        ({"messages": [USER, {"role": "assistant", "content": 3}]}, "messages[1] (assistant): content is 3"),
        ({"messages": [USER | {"content": [{"type": "image"}]}]}, "messages[0] (user): a part of its content is"),
        ({"messages": [USER, ANSWER | {"weight": 0.5}]}, "weight is 0.5; it can be 0 (not trained on) or 1"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"x": 1}]}]}, "has no name"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": "no"}]}, "'no' is not JSON"),
        ({"messages": [USER, ANSWER], "tools": "{"}, "tools: '{' is not JSON"),
        ({"messages": [USER, ANSWER], "tools": "{}"}, "tools: {} must be a list"),
        (
            {"conversations": [{"from": "narrator", "value": "x"}]},
            "conversations[0]: from 'narrator' is unknown; known are human",
        ),
        ({"conversations": [{"from": "human", "value": None}]}, "conversations[0] (user): content is null"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "function_call 'x' is not JSON"),
        ({"conversations": ["x"]}, "must be a list of {from, value}"),
        ({"prompt": "a", "completion": [ANSWER]}, "must both be text or both be lists"),
        ({"prompt": "a", "completion": None}, "must both be text or both be lists"),
        ({"prompt": "a", "completion": ""}, "the completion is empty"),
        ({"prompt": "a", "completion": "b", "tools": [TOOL]}, "tools go with a prompt that is a list"),
        ({"instruction": "a", "output": " "}, "column 'output' is empty"),
        ({"instruction": None, "output": "x"}, "column 'instruction' holds null"),
    ],
)
def test_bad_rows(example, message):
    with pytest.raises(ValueError) as caught:
        read(example)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_chat_as_prompt_needs_a_template():
    with pytest.raises(ValueError, match="there is no chat template"):
        read({"prompt": [USER], "completion": [ANSWER]}, has_template=False)


def test_oddities():
    assert formats.oddities([USER, ANSWER]) == (False, False)
    assert formats.oddities([USER, USER, ANSWER]) == (False, True)
    assert formats.oddities([USER, ANSWER | {"content": " "}]) == (True, False)
    tool = {"role": "tool", "content": "2"}
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert formats.oddities([USER, calling, tool, tool, ANSWER]) == (False, False)
    assert formats.oddities([USER, calling, ANSWER]) == (False, True)
