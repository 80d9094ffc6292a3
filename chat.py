"""The tokenizer and its chat template: which tokens end a turn, which one pads, and which rows are new.

`prepare_tokenizer` settles four facts before any row is read: the template, EOS (the token that ends a turn), PAD
(never EOS, or a collator that masks padding would also mask the end of every answer), and the tokens that had to be
added. An added token has an untrained row in the embeddings, so its id is returned and its row is trained.

What a template does is found by rendering short chats with it, not by knowing its name.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The role markers are plain text, as in the published Zephyr models; a turn ends with the tokenizer's own EOS.
ZEPHYR = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "zephyr": ZEPHYR}

# Tokens that models reserve and do not use for text, in order of preference for padding.
PAD_CANDIDATES = [
    "<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|endoftext|>", "<|end_of_text|>", "<|fim_pad|>",
    "<|vision_pad|>", "<|reserved_special_token_0|>", "<unused0>",
]  # fmt: skip

# Contents of the chats that templates are tried with: letters no vocabulary has a control token for.
_SYSTEM, _USER, _ANSWER, _NEXT = "Qsystemq", "Quserq", "Qanswerq", "Qnextq"


@dataclass(frozen=True)
class Template:
    """What a tokenizer's chat template does."""

    header: str  # what it writes before an answer: the generation prompt; "" if it has none
    turn_end: str | None  # the token that ends an answer; None if the template writes none
    ends_every_turn: bool  # or only the last
    takes_system: bool  # False: it refuses a system message, or leaves it out
    takes_tools: bool
    calls_as_text: bool = False  # it wants a tool call's arguments as JSON, and cannot write them from an object
    markers: frozenset[str] = frozenset()  # added tokens that it writes around messages


def prepare_tokenizer(
    model_name_or_path: str,
    chat_template_format: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    new_tokens: str | None = None,
) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """Load a tokenizer and settle its template, EOS and PAD.

    Args:
        chat_template_format: "chatml", "zephyr", "none" (no template), "model" (its own), a Jinja file, or None for its
            own if it has one.
        new_tokens: comma list of control tokens that a template or the data need; those the vocabulary has are reused.

    Returns:
        The tokenizer, and the ids of the tokens added to it whose embedding rows have to be trained.

    Raises:
        ValueError: no such tokenizer or template, or one that cannot be used.
    """
    check_template_name(chat_template_format)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no tokenizer for --model_name_or_path {model_name_or_path}: give a Hub id you can reach or a local folder "
            f"with tokenizer files ({str(error).splitlines()[0]})"
        ) from None
    if not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer of {model_name_or_path} has no tokenizer.json, which is needed to know which characters a token "
            "is: convert it, or use another model"
        )
    vocabulary_before = len(tokenizer)

    if chat_template_format == "none":
        tokenizer.chat_template = None
    elif chat_template_format in TEMPLATES:
        tokenizer.chat_template = TEMPLATES[chat_template_format]
    elif chat_template_format not in (None, "model"):
        try:
            tokenizer.chat_template = Path(chat_template_format).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--chat_template_format {chat_template_format} cannot be read: {error}") from None
    elif chat_template_format == "model" and tokenizer.chat_template is None:
        raise ValueError(
            f"--chat_template_format model: the tokenizer of {model_name_or_path} has no chat template; "
            f"use {', '.join(TEMPLATES)} or a .jinja file"
        )
    if isinstance(tokenizer.chat_template, dict):  # several by name, as some published tokenizers have them
        if "default" not in tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {model_name_or_path} has several chat templates and no default: give a .jinja file"
            )
        tokenizer.chat_template = tokenizer.chat_template["default"]

    wanted = [token.strip() for token in (new_tokens or "").split(",") if token.strip()]
    wanted += ["<|im_start|>", "<|im_end|>"] if chat_template_format == "chatml" else []
    missing = [token for token in dict.fromkeys(wanted) if token not in tokenizer.get_vocab()]
    tokenizer.add_special_tokens({"additional_special_tokens": missing}, replace_extra_special_tokens=False)
    if chat_template_format == "chatml":
        tokenizer.eos_token = "<|im_end|>"
    if tokenizer.eos_token is None and tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {model_name_or_path} has no EOS token: set eos_token in tokenizer_config.json")
    if tokenizer.chat_template is not None:
        try:
            end_answers_with_eos(tokenizer)
        except ValueError as error:
            raise ValueError(f"--chat_template_format {chat_template_format or 'model'}: {error}") from None
    new_token_ids = list(range(vocabulary_before, len(tokenizer)))
    choose_pad_token(tokenizer)
    return tokenizer, new_token_ids


def _try(tokenizer, *contents: str, **options) -> str | None:
    """A chat with these contents, rendered, or None if the template refuses it."""
    roles = {_SYSTEM: "system", _USER: "user", _ANSWER: "assistant", _NEXT: "user"}
    messages = [{"role": roles[content], "content": content} for content in contents]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception:  # Jinja errors, and whatever a template raises on purpose
        return None


def _try_call(tokenizer, arguments) -> str:
    """A chat with a tool call, rendered, or "" if the template refuses it."""
    call = {"type": "function", "id": "abcdefgh1", "function": {"name": _NEXT, "arguments": arguments}}
    messages = [{"role": "user", "content": _USER}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:
        return ""


def inspect(tokenizer: PreTrainedTokenizerBase) -> Template:
    """Find out what a tokenizer's chat template does.

    Raises:
        ValueError: it cannot render a question with its answer.
    """
    chat = _try(tokenizer, _USER, _ANSWER)
    if chat is None or _ANSWER not in chat:
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
            reason = "it leaves the answer out"
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"the chat template cannot render a user's turn and the assistant's: {reason}")
    added = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    any_added = re.compile("|".join(map(re.escape, added)) or "(?!)")

    # The header is what a generation prompt has after the end of the user's turn, and an answer has before it.
    ending, prompt = (
        (_try(tokenizer, _USER, add_generation_prompt=prompted) or "").rpartition(_USER)[2] for prompted in (False, True)
    )
    differing = (n for n, (a, b) in enumerate(zip(ending, prompt, strict=False)) if a != b)
    cut = next(differing, min(len(ending), len(prompt)))
    cut = next((token.start() for token in any_added.finditer(prompt) if token.start() < cut < token.end()), cut)
    before_answer = chat[chat.rfind(_USER) + len(_USER) : chat.index(_ANSWER)] if _USER in chat else ""
    # Some prompts go on with what a thinking model writes itself; the header is what both have.
    header = next((prompt[cut:end] for end in range(len(prompt), cut, -1) if prompt[cut:end] in before_answer), "")

    def token_after(text):
        rest = (text or "").rpartition(_ANSWER)[2].lstrip()
        found = any_added.match(rest)
        return found and found.group()

    turn_end = token_after(chat)
    if not header and turn_end not in (None, tokenizer.eos_token) and any_added.findall(before_answer)[-1:] == [turn_end]:
        raise ValueError(
            f"the chat template writes {turn_end!r}, which begins an answer, at the end of every chat: it should only if "
            "add_generation_prompt is true; correct it and give it as a .jinja file"
        )
    with_system = _try(tokenizer, _SYSTEM, _USER, _ANSWER)
    object_written, text_written = (_try_call(tokenizer, arguments) for arguments in ({"q": "a"}, '{"q": "a"}'))
    asked = _try(tokenizer, _SYSTEM, _USER) or _try(tokenizer, _USER) or ""
    tool = {
        "type": "function",
        "function": {"name": _NEXT, "description": "", "parameters": {"type": "object", "properties": {}}},
    }
    with_tools = _try(tokenizer, _USER, _ANSWER, tools=[tool])
    return Template(
        header=header,
        turn_end=turn_end,
        ends_every_turn=turn_end is not None and token_after(_try(tokenizer, _USER, _ANSWER, _NEXT)) == turn_end,
        takes_system=with_system is not None and _SYSTEM in with_system,
        takes_tools=with_tools is not None and _NEXT in with_tools,
        calls_as_text='"q"' not in object_written and '"q"' in text_written,
        markers=frozenset(token for token in any_added.findall(asked + header + (turn_end or "")) if token.strip(" \n\t▁")),
    )


def end_answers_with_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the token that ends the template's answers the tokenizer's EOS, so that generation stops where they do.

    Some models end a turn with another token than the tokenizer's EOS (Gemma's <end_of_turn>, Phi-3's <|end|>) and say so in
    their generation configuration only, which a fine-tuned adapter does not always travel with.
    """
    turn_end, eos = inspect(tokenizer).turn_end, tokenizer.eos_token
    if turn_end is None and eos is None:
        raise ValueError(
            "neither the tokenizer nor its chat template has a token that ends an answer: set eos_token in "
            "tokenizer_config.json, or use --chat_template_format chatml"
        )
    if turn_end in (None, eos):
        return
    tokenizer.eos_token = turn_end
    if eos is not None and re.search(r"\beos_token\b", tokenizer.chat_template):  # it writes the old EOS somewhere else
        tokenizer.chat_template = "{% set eos_token = " + repr(eos) + " %}" + tokenizer.chat_template


def check_template_name(name: str | None) -> None:
    """Raise ValueError unless `name` is a known template or an existing Jinja file."""
    if name is None or name in TEMPLATES or name in ("none", "model"):
        return
    if name.endswith((".jinja", ".j2")):
        if Path(name).is_file():
            return
        raise ValueError(f"--chat_template_format {name}: this file does not exist")
    raise ValueError(
        f"--chat_template_format {name} is unknown: use {', '.join(TEMPLATES)}, none, model or the path of a .jinja file"
    )


def choose_pad_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer a PAD that is not EOS, from its vocabulary if it can, and pad on the right."""
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        return
    vocabulary = tokenizer.get_vocab()
    candidates = [*PAD_CANDIDATES, tokenizer.unk_token, tokenizer.bos_token]
    usable = [token for token in candidates if token in vocabulary and token != tokenizer.eos_token]
    # Padded positions are neither attended to nor supervised, so an added PAD needs no training.
    tokenizer.add_special_tokens({"pad_token": usable[0] if usable else "<pad>"})


def unfilled_rows(tokenizer, new_token_ids: list[int], config) -> list[int]:
    """Embedding rows that no checkpoint fills and that are trained: of tokens added here, or before without resizing."""
    beyond = range(config.get_text_config().vocab_size, len(tokenizer))
    return sorted({*new_token_ids, *beyond} - {tokenizer.pad_token_id})
