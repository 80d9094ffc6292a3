"""From a data set to token ids and labels: what is read, how a row becomes tokens, and which of them are supervised.

A row is a chat (`messages`), a prompt with its completion, or plain text in one column. Each becomes `input_ids` and
`labels` (-100 where the loss does not look), so nothing downstream guesses: TRL only cuts to length and packs.
"""

from pathlib import Path

import numpy as np
import xxhash
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100
FILE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def load_splits(dataset_name: str, splits: str, config_name: str | None = None) -> tuple[Dataset, Dataset | None]:
    """Load the training split and, if a second one is named, the evaluation split.

    Args:
        dataset_name: Hub id, a file (json, jsonl, csv, parquet), a folder of such files, or a `save_to_disk` folder.
        splits: comma list; the first one is trained on ("train", "train,test", "train_sft,test_sft[:500]").

    Raises:
        ValueError: no such data set or split, an unreadable file, an empty split.
    """
    names = [name.strip() for name in splits.split(",") if name.strip()]
    if not 1 <= len(names) <= 2:
        raise ValueError(f"--splits {splits!r} must name one split to train on and at most one to evaluate on: train,test")
    loaded = [_load_split(dataset_name, name, config_name) for name in names]
    for name, dataset in zip(names, loaded, strict=True):
        if len(dataset) == 0:
            raise ValueError(f"split {name!r} of --dataset_name {dataset_name} has no rows")
    return loaded[0], loaded[1] if len(loaded) == 2 else None


def _load_split(dataset_name: str, split: str, config_name: str | None) -> Dataset:
    path = Path(dataset_name)
    if config_name is not None and path.exists():
        raise ValueError(
            f"--dataset_config_name {config_name} is for Hub data sets, and {dataset_name} is a local one: drop it"
        )
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            stored = load_from_disk(dataset_name)
            if not isinstance(stored, DatasetDict):
                stored = DatasetDict({"train": stored})
            if split not in stored:
                raise ValueError(f'Unknown split "{split}". Should be one of {list(stored)}.')
            return stored[split]
        if path.is_file():
            if path.suffix not in FILE_FORMATS:
                raise ValueError(f"a {path.suffix or 'nameless'} file is not one of {', '.join(FILE_FORMATS)}")
            return load_dataset(FILE_FORMATS[path.suffix], data_files=dataset_name, split=split)
        return load_dataset(dataset_name, name=config_name, split=split)
    except Exception as error:  # datasets raises a dozen types for a file it cannot find, read or parse
        cause = error.__cause__ or error
        reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        raise ValueError(f"--dataset_name {dataset_name} --splits {split}: {reason}") from None


def row_format(columns: list[str], text_field: str, has_template: bool) -> str:
    """How the rows are read: "messages", "prompt-completion" or "text".

    Raises:
        ValueError: the columns fit none, or only a chat without a template; it lists what was found and is accepted.
    """
    if "messages" in columns and has_template:
        return "messages"
    if "prompt" in columns and "completion" in columns:
        return "prompt-completion"
    if text_field in columns:
        return "text"
    if "messages" in columns:
        raise ValueError(
            "the rows are chats (column 'messages') but there is no chat template: set --chat_template_format chatml, "
            "zephyr or a .jinja file"
        )
    raise ValueError(
        f"no usable column among {columns}: expected 'messages', or 'prompt' and 'completion', or text in the column named "
        f"by --dataset_text_field (now {text_field!r})"
    )


def tokenize(
    dataset: Dataset,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    text_field: str = "text",
    num_proc: int | None = None,
    **options,
) -> Dataset:
    """Replace every column by `input_ids` and `labels`; `options` are those of `encode_example`.

    Raises:
        ValueError: a row that cannot be used, with its number, or a split in which nothing is supervised.
    """
    row_format(dataset.column_names, text_field, tokenizer.chat_template is not None)

    def encode(example, index):
        try:
            return encode_example(example, tokenizer, text_field=text_field, **options)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"row {index} of split {split!r}: {error}") from None

    tokens = dataset.map(
        encode, with_indices=True, remove_columns=dataset.column_names, num_proc=num_proc, desc=f"Tokenizing {split}"
    )
    if not any(any(label != IGNORE_INDEX for label in labels) for labels in tokens["labels"]):
        raise ValueError(f"no token of split {split!r} is supervised: there would be nothing to learn from")
    return tokens


def fingerprint(dataset: Dataset) -> dict:
    """What a tokenised split is: its rows, its tokens, and a hash of every token id and label in order."""
    digest, tokens = xxhash.xxh3_128(), 0
    for table in dataset.select_columns(["input_ids", "labels"]).with_format("arrow").iter(batch_size=1000):
        for name in ("input_ids", "labels"):
            column = table.column(name).combine_chunks()
            digest.update(np.asarray(column.value_lengths(), dtype=np.int64).tobytes())
            digest.update(np.asarray(column.flatten(), dtype=np.int64).tobytes())
        tokens += len(column.flatten())
    return {"rows": len(dataset), "tokens": tokens, "xxh3_128": digest.hexdigest()}


def length_notes(dataset: Dataset, max_length: int | None) -> list[str]:
    """What cutting to `max_length` does, as lines for the health check; none if all rows fit.

    Raises:
        ValueError: no row keeps a supervised token.
    """
    if max_length is None:
        return []
    lengths = [len(ids) for ids in dataset["input_ids"]]
    long = sum(length > max_length for length in lengths)
    lost = sum(all(label == IGNORE_INDEX for label in labels[:max_length]) for labels in dataset["labels"]) if long else 0
    if lost == len(lengths):
        raise ValueError(
            f"--max_length {max_length} cuts every row before its first supervised token (longest: {max(lengths)})"
        )
    notes = []
    if long:
        notes.append(
            f"{long} of {len(lengths)} rows are longer than --max_length {max_length} (longest: {max(lengths)}) and are cut"
        )
    if lost:
        notes.append(
            f"{lost} of {len(lengths)} rows have no supervised token before --max_length {max_length}: they teach nothing"
        )
    return notes


def encode_example(
    example: dict,
    tokenizer: PreTrainedTokenizerBase,
    *,
    text_field: str = "text",
    add_special_tokens: bool | None = None,
    append_concat_token: bool = True,
    assistant_only_loss: bool = False,
    completion_only_loss: bool | None = None,
) -> dict[str, list[int]]:
    """Token ids and labels of one row, uncut.

    Args:
        add_special_tokens: whether the tokenizer adds its own BOS/EOS; None means only where no chat template wrote them.
        append_concat_token: end the row with EOS unless it ends with it already (white space apart).
        assistant_only_loss: for `messages`, supervise the assistant's turns, each with the EOS that ends it.
        completion_only_loss: for `prompt` and `completion`, supervise the completion only; None means True.

    Returns:
        `input_ids` and `labels`, of equal length; `labels` is -100 at every position the loss ignores.

    Raises:
        ValueError: the row does not fit, or the template refuses it.
    """
    kind = row_format(list(example), text_field, tokenizer.chat_template is not None)
    if kind == "messages":
        text, spans = _render_chat(example["messages"], tokenizer, assistant_only_loss)
    elif kind == "prompt-completion":
        text, spans = _render_prompt_completion(example, tokenizer, completion_only_loss is not False)
    else:
        text, spans = example[text_field], None
        if not isinstance(text, str):
            raise ValueError(f"column {text_field!r} holds {text!r}, which is not text")
    if assistant_only_loss and kind != "messages":
        raise ValueError(f"--assistant_only_loss True needs chats in a 'messages' column; these rows are {kind}")
    if completion_only_loss and kind != "prompt-completion":
        raise ValueError(
            f"--completion_only_loss True needs the columns 'prompt' and 'completion'; these rows are {kind}"
            + ("; for chats use --assistant_only_loss True" if kind == "messages" else "")
        )
    rendered = kind == "messages" or (kind == "prompt-completion" and not isinstance(example["prompt"], str))

    encoded = tokenizer(
        text,
        add_special_tokens=not rendered if add_special_tokens is None else add_special_tokens,
        return_offsets_mapping=spans is not None,
    )
    ids = list(encoded["input_ids"])
    offsets = list(encoded["offset_mapping"]) if spans is not None else None
    if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:  # once from the template, once more
        ids, offsets = ids[1:], offsets[1:] if offsets else offsets
    if spans is None:
        labels = list(ids)
    else:
        # A token that straddles the start of an answer ("▁Paris" after a prompt that ends in a space) belongs to the answer.
        labels = [
            token if any(start < high and end > low for low, high in spans) else IGNORE_INDEX
            for token, (start, end) in zip(ids, offsets, strict=True)
        ]
    if append_concat_token and not _ends_with_eos(ids, tokenizer):
        ends_supervised = spans is None or spans[-1][1] >= len(text.rstrip())
        ids.append(tokenizer.eos_token_id)
        labels.append(tokenizer.eos_token_id if ends_supervised else IGNORE_INDEX)
    if not ids:
        raise ValueError("the row is empty")
    return {"input_ids": ids, "labels": labels}


def _ends_with_eos(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    for token in reversed(ids[-4:]):  # a template may write white space after the token that ends a turn
        if token == tokenizer.eos_token_id:
            return True
        if tokenizer.decode([token]).strip():
            return False
    return False


def _render(messages: list[dict], tokenizer: PreTrainedTokenizerBase, add_generation_prompt: bool = False) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # Jinja errors, and whatever a template raises on purpose
        raise ValueError(f"the chat template refuses it ({error})") from None


def _supervised(text: str, start: int, end: int, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """The span of an answer up to the EOS that ends it, without the white space a template writes after that."""
    eos_at = text.rfind(tokenizer.eos_token, start, end)
    if eos_at >= 0 and not text[eos_at + len(tokenizer.eos_token) : end].strip():
        end = eos_at + len(tokenizer.eos_token)
    return start, end


def _render_chat(messages, tokenizer, assistant_only) -> tuple[str, list[tuple[int, int]] | None]:
    """The rendered chat and the character spans to supervise (None: all of it)."""
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError("'messages' must be a non-empty list of {role, content}")
    text = _render(messages, tokenizer)
    if not assistant_only:
        return text, None
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(messages[:index], tokenizer, add_generation_prompt=True)
        after = _render(messages[: index + 1], tokenizer)
        if not (after.startswith(before) and text.startswith(after)):
            raise ValueError(
                "--assistant_only_loss True cannot find the assistant's turns, because the chat template rewrites earlier "
                "turns; use another --chat_template_format or --assistant_only_loss False"
            )
        spans.append(_supervised(text, len(before), len(after), tokenizer))
    if not spans:
        raise ValueError("the chat has no assistant turn to supervise")
    return text, spans


def _render_prompt_completion(example, tokenizer, completion_only) -> tuple[str, list[tuple[int, int]] | None]:
    prompt, completion = example["prompt"], example["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        text = prompt + completion
        if completion_only and not completion:
            raise ValueError("the completion is empty")
        return text, [(len(prompt), len(text))] if completion_only else None
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        raise ValueError("'prompt' and 'completion' must both be text or both be lists of {role, content}")
    if tokenizer.chat_template is None:
        raise ValueError("'prompt' is a chat but there is no chat template: set --chat_template_format")
    text = _render(prompt + completion, tokenizer)
    if not completion_only:
        return text, None
    start = _render(prompt, tokenizer, add_generation_prompt=True)
    if not text.startswith(start):
        raise ValueError(
            "the chat template rewrites the prompt when the completion follows; use --completion_only_loss False"
        )
    return text, [_supervised(text, len(start), len(text), tokenizer)]
