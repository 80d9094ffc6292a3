"""The tokenizer and its chat template: which tokens end a turn, which one pads, and which rows are new.

`prepare_tokenizer` settles four facts before any row is read: the template, EOS (the token that ends a turn), PAD
(never EOS, or a collator that masks padding would also mask the end of every answer), and the tokens that had to be
added. An added token has an untrained row in the embeddings, so its id is returned and its row is trained.
"""

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
PAD_CANDIDATES = ["<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|endoftext|>", "<|end_of_text|>"]


def prepare_tokenizer(
    model_name_or_path: str,
    chat_template_format: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """Load a tokenizer and settle its template, EOS and PAD.

    Args:
        chat_template_format: "chatml", "zephyr", "none" (no template), "model" (its own), a Jinja file, or None for its
            own if it has one.

    Returns:
        The tokenizer, and the ids of the tokens added to it whose embedding rows have to be trained.

    Raises:
        ValueError: no such tokenizer or template.
    """
    check_template_name(chat_template_format)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no tokenizer for --model_name_or_path {model_name_or_path}: give a Hub id you can reach or a local folder "
            f"with tokenizer files ({str(error).splitlines()[0]})"
        ) from None
    vocabulary_before = len(tokenizer)

    if chat_template_format == "none":
        tokenizer.chat_template = None
    elif chat_template_format in TEMPLATES:
        tokenizer.chat_template = TEMPLATES[chat_template_format]
    elif chat_template_format not in (None, "model"):
        tokenizer.chat_template = Path(chat_template_format).read_text(encoding="utf-8")
    elif chat_template_format == "model" and tokenizer.chat_template is None:
        raise ValueError(
            f"--chat_template_format model: the tokenizer of {model_name_or_path} has no chat template; "
            f"use {', '.join(TEMPLATES)} or a .jinja file"
        )

    if chat_template_format == "chatml":
        missing = [token for token in ("<|im_start|>", "<|im_end|>") if token not in tokenizer.get_vocab()]
        tokenizer.add_special_tokens({"additional_special_tokens": missing}, replace_extra_special_tokens=False)
        tokenizer.eos_token = "<|im_end|>"
    if tokenizer.eos_token is None:
        raise ValueError(f"the tokenizer of {model_name_or_path} has no EOS token: set eos_token in tokenizer_config.json")
    new_token_ids = list(range(vocabulary_before, len(tokenizer)))
    choose_pad_token(tokenizer)
    return tokenizer, new_token_ids


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
