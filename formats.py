"""How a row is read: chats, prompts with completions, instructions or plain text, from whatever columns they are in.

A format is named by `--format` or recognised by its columns, and says which column it takes for what, so that the choice
can be printed. `read` turns a row of any format into one `Row`, or says what is wrong with it.
"""

import itertools
import json
from dataclasses import dataclass

# What each format reads: (required columns, optional columns), by the names they have unless --columns says otherwise.
FORMATS = {
    "messages": (("messages",), ("tools",)),
    "sharegpt": (("conversations",), ("system", "tools")),
    "prompt-completion": (("prompt", "completion"), ("tools",)),
    "instruction": (("instruction", "output"), ("input", "system")),
    "text": (("text",), ()),
}
ACCEPTED = (
    "'messages' (a list of {role, content}), 'conversations' (ShareGPT's {from, value}), 'prompt' and 'completion', "
    "'instruction' and 'output' (with 'input'), or text in the column named by --dataset_text_field"
)
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "chatgpt": "assistant", "system": "system", "observation": "tool", "tool": "tool", "function_response": "tool",
    "function_call": "function_call",
}  # fmt: skip


@dataclass(frozen=True)
class Format:
    """A format and the column of the data that it takes for each of its parts."""

    name: str
    columns: dict[str, str]
    recognised: bool = True
    others: tuple[str, ...] = ()  # formats that the columns would fit too
    unread: tuple[str, ...] = ()

    @property
    def is_chat(self) -> bool:
        return self.name in ("messages", "sharegpt")

    def __str__(self) -> str:
        parts = [f"{part} <- {column!r}" for part, column in self.columns.items()]
        found = f"{self.name}, {'recognised' if self.recognised else 'as asked for'}; {', '.join(parts)}"
        found += f"; not read: {', '.join(map(repr, self.unread))}" if self.unread else ""
        return found + (f"; --format {' or '.join(self.others)} would fit too" if self.others else "")


@dataclass
class Row:
    """One example: a chat, or text. Messages before `prompt`, or characters of the text before it, are the prompt."""

    messages: list[dict] | None = None
    tools: list | None = None
    text: str | None = None
    prompt: int | None = None


def choose(
    columns: list[str],
    wanted: str | None = None,
    text_field: str = "text",
    renamed: dict[str, str] | None = None,
    has_template: bool = True,
) -> Format:
    """The format of a data set with these columns.

    Args:
        wanted: the format that was asked for; None takes the first of `FORMATS` whose required columns are there.
        renamed: columns by what they are, where they have another name: {"prompt": "question"}.

    Raises:
        ValueError: the columns fit none, or not the one asked for, or there are only chats and no template.
    """
    renamed = dict(renamed or {})
    known = {part for required, optional in FORMATS.values() for part in required + optional}
    for part, column in renamed.items():
        if part not in known:
            raise ValueError(
                f"--columns {part}={column}: {part!r} is no part of a format; known are {', '.join(sorted(known))}"
            )
        if column not in columns:
            raise ValueError(f"--columns {part}={column}: there is no column {column!r}; the data have {_list(columns)}")
    repeated = [column for column in renamed.values() if list(renamed.values()).count(column) > 1]
    if repeated:
        raise ValueError(f"--columns takes {repeated[0]!r} for two parts of a row")
    if wanted is not None and wanted not in FORMATS:
        raise ValueError(f"--format {wanted} is unknown: use {', '.join(FORMATS)}, or leave it out to have it recognised")

    def column_of(part):
        return renamed.get(part, text_field if part == "text" else part)

    fitting = [name for name, (required, _) in FORMATS.items() if all(column_of(part) in columns for part in required)]
    if wanted is None and not has_template and set(fitting) - {"messages", "sharegpt"}:
        fitting = [name for name in fitting if name not in ("messages", "sharegpt")]
    name = wanted or (fitting[0] if fitting else None)
    if name is None:
        raise ValueError(
            f"no usable column among {_list(columns)}: expected {ACCEPTED} (now {text_field!r}); or say which is what with "
            "--columns, such as prompt=question,completion=answer"
        )
    required, optional = FORMATS[name]
    missing = [column_of(part) for part in required if column_of(part) not in columns]
    if missing:
        raise ValueError(
            f"--format {name} needs {_list(missing)} and the data have {_list(columns)}: say which column is what with "
            f"--columns {','.join(f'{part}=...' for part in required)}"
        )
    if name in ("messages", "sharegpt") and not has_template:
        raise ValueError(
            f"the rows are chats (column {column_of(required[0])!r}) but there is no chat template: set "
            "--chat_template_format chatml, zephyr or a .jinja file"
        )
    taken = {part: column_of(part) for part in required + optional if column_of(part) in columns}
    useless = [part for part in renamed if part not in taken]
    if useless:
        raise ValueError(f"--columns {useless[0]}={renamed[useless[0]]}: format {name} does not read {useless[0]!r}")
    return Format(
        name,
        taken,
        recognised=wanted is None,
        others=tuple(other for other in fitting if other != name),
        unread=tuple(column for column in columns if column not in taken.values()),
    )


def parse_columns(value: str | None) -> dict[str, str]:
    """`--columns prompt=question,completion=answer` as {"prompt": "question", "completion": "answer"}; JSON is fine too."""
    if (value or "").lstrip().startswith("{"):  # a mapping in a recipe
        try:
            return {str(part): str(column) for part, column in json.loads(value).items()}
        except ValueError:
            raise ValueError(f"--columns {value} is not JSON: write prompt=question,completion=answer") from None
    pairs = [pair.split("=", 1) for pair in (value or "").split(",") if pair.strip()]
    if any(len(pair) != 2 or not pair[0].strip() or not pair[1].strip() for pair in pairs):
        raise ValueError(f"--columns {value} must be part=column pairs, such as prompt=question,completion=answer")
    columns = {part.strip(): column.strip() for part, column in pairs}
    if len(columns) < len(pairs):
        raise ValueError(f"--columns {value} gives one part twice")
    return columns


def read(example: dict, format: Format, has_template: bool = True) -> Row:
    """The row of a data set as a chat or text.

    Raises:
        ValueError: it does not hold what its format says, with the message and the key that do not.
    """
    values = {part: example.get(column) for part, column in format.columns.items()}
    if format.name == "text":
        return Row(text=_text(values["text"], format.columns["text"]))
    if format.name == "instruction":
        return _instruction(values, format, has_template)
    if format.name == "prompt-completion":
        return _prompt_completion(values, format, has_template)
    name = format.columns["messages" if format.name == "messages" else "conversations"]
    turns = values.get("messages", values.get("conversations"))
    if format.name == "sharegpt":
        turns = _sharegpt(turns, name)
    messages = _messages(turns, name)
    if values.get("system"):
        messages = [{"role": "system", "content": _text(values["system"], format.columns["system"])}, *messages]
    return Row(messages=messages, tools=_tools(values.get("tools")))


def _list(names) -> str:
    return ", ".join(repr(name) for name in names) or "none"


def _short(value) -> str:
    shown = "null" if value is None else repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _text(value, column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"column {column!r} holds {_short(value)}, which is not text")
    return value


def _instruction(values: dict, format: Format, has_template: bool) -> Row:
    instruction, output = (_text(values[part], format.columns[part]) for part in ("instruction", "output"))
    given = _text(values["input"] or "", format.columns["input"]) if values.get("input") is not None else ""
    system = _text(values["system"], format.columns["system"]) if values.get("system") else ""
    if not output.strip():
        raise ValueError(f"column {format.columns['output']!r} is empty: there is nothing to learn")
    if has_template:
        user = f"{instruction}\n\n{given}" if given.strip() else instruction
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": output}]
        return Row(messages=[{"role": "system", "content": system}] * bool(system) + messages, prompt=1 + bool(system))
    sections = [f"### Instruction:\n{instruction}"] + ([f"### Input:\n{given}"] if given.strip() else [])
    prompt = "\n\n".join(([system] if system else []) + sections) + "\n\n### Response:\n"
    return Row(text=prompt + output, prompt=len(prompt))


def _prompt_completion(values: dict, format: Format, has_template: bool) -> Row:
    prompt, completion = values["prompt"], values["completion"]
    names = " and ".join(repr(format.columns[part]) for part in ("prompt", "completion"))
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise ValueError("the completion is empty")
        if values.get("tools"):
            raise ValueError("tools go with a prompt that is a list of {role, content}, and this one is text")
        return Row(text=prompt + completion, prompt=len(prompt))
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        raise ValueError(
            f"columns {names} must both be text or both be lists of {{role, content}}, not {_short(prompt)} and "
            f"{_short(completion)}"
        )
    if not has_template:
        raise ValueError("the prompt is a chat but there is no chat template: set --chat_template_format")
    prompt, completion = _messages(prompt, format.columns["prompt"]), _messages(completion, format.columns["completion"])
    return Row(messages=prompt + completion, tools=_tools(values.get("tools")), prompt=len(prompt))


def _sharegpt(turns, column: str) -> list[dict]:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f"column {column!r} must be a list of {{from, value}}, not {_short(turns)}")
    messages = []
    for number, turn in enumerate(turns):
        if turn.get("from") is None and turn.get("role") is not None:  # the same column is also used for {role, content}
            messages.append(turn)
            continue
        role = SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn.get("from"), str) else None
        if role is None:
            raise ValueError(
                f"{column}[{number}]: from {_short(turn.get('from'))} is unknown; known are {', '.join(SHAREGPT_ROLES)}"
            )
        if role == "function_call":
            try:
                call = json.loads(turn.get("value") or "")
            except (TypeError, ValueError):
                raise ValueError(f"{column}[{number}]: function_call {_short(turn.get('value'))} is not JSON") from None
            messages.append({"role": "assistant", "tool_calls": call if isinstance(call, list) else [call]})
        else:
            messages.append({"role": role, "content": turn.get("value")})
        messages[-1]["weight"] = turn.get("weight")
    return messages


def _messages(turns, column: str) -> list[dict]:
    turns = _json(turns, column, list) if isinstance(turns, str) else turns
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f"column {column!r} must be a non-empty list of {{role, content}}, not {_short(turns)}")
    messages = []
    for number, turn in enumerate(turns):
        where = f"{column}[{number}]"
        message = {key: value for key, value in turn.items() if value is not None}  # Arrow fills missing keys with null
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise ValueError(f"{where} has no role: a message is {{role, content}}, not {_short(turn)}")
        where += f" ({message['role']})"
        if message.get("tool_calls"):
            message["tool_calls"] = [_call(call, where) for call in _json(message["tool_calls"], where, list)]
        else:
            message.pop("tool_calls", None)
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(_part(part, where) for part in content)
        if content is None and "tool_calls" in message:
            content = ""
        if not isinstance(content, str):
            raise ValueError(f"{where}: content is {_short(content)}, which is not text")
        message["content"] = content
        if message.get("weight", 1) not in (0, 1):
            raise ValueError(f"{where}: weight is {_short(message['weight'])}; it can be 0 (not trained on) or 1")
        messages.append(message)
    return messages


def _part(part, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise ValueError(f"{where}: a part of its content is {_short(part)}; only text is trained on")


def _json(value, where: str, kind: type):
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f"{where}: {_short(value)} is not JSON") from None
    if not isinstance(value, kind):
        raise ValueError(f"{where}: {_short(value)} must be a {'list' if kind is list else 'JSON object'}")
    return value


def _without_nulls(value):
    """Arrow gives every struct of a column the keys of all of them; those that a row did not have are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, (str, int, float, type(None))):  # the template would write '<datetime>'
        raise ValueError(f"tools and tool calls hold {_short(value)}, which JSON has no word for: write it as text")
    return value


def _call(call, where: str) -> dict:
    call = _without_nulls(_json(call, where, dict))
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"{where}: tool call {_short(call)} has no name")
    function = {"name": function["name"], "arguments": _json(function.get("arguments") or {}, where, dict)}
    return {**{key: value for key, value in call.items() if key in ("id",)}, "type": "function", "function": function}


def _tools(tools) -> list | None:
    if not tools:
        return None
    return [_without_nulls(_json(tool, "tools", dict)) for tool in _json(tools, "tools", list)]


def oddities(messages: list[dict]) -> tuple[bool, bool]:
    """Whether a message is empty, and whether two turns of one role follow each other (system and tool turns apart)."""
    roles = [message["role"] for message in messages if message["role"] not in ("system", "developer")]
    empty = any(not message["content"].strip() and "tool_calls" not in message for message in messages)
    return empty, any(a == b != "tool" for a, b in itertools.pairwise(roles))
