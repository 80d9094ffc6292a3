"""Tiny models, tokenizers and data sets for the tests, made in a second and the same every time."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

WORDS = "please send order refund delivery arrived broken screen today account password reset invoice thanks hello".split()


def rows(count: int, seed: int = 0) -> list[dict]:
    """Chats of unequal length that repeat, so that a tiny model can learn something."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for index in range(count):
        length = int(torch.randint(2, 14, (1,), generator=generator))
        words = [WORDS[int(i)] for i in torch.randint(0, len(WORDS), (length,), generator=generator)]
        user, assistant = " ".join(words), " ".join(sorted(set(words)))
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        out.append({"messages": messages, "content": f"{user} : {assistant}", "id": index})
    return out


def write_dataset(folder: Path, train: int = 64, test: int = 8) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", train, 0), ("test", test, 1)):
        text = "".join(json.dumps(row) + "\n" for row in rows(count, seed))
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def make_tokenizer(chatml: bool) -> PreTrainedTokenizerFast:
    """A byte-level BPE with Llama-2's special tokens; with `chatml`, also the two ChatML markers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>"] + (["<|im_start|>", "<|im_end|>"] if chatml else [])
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS), "user assistant system"], trainer)
    extra = {"additional_special_tokens": special[3:]} if chatml else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **extra)


def make_model(
    folder: Path, dtype=torch.float32, layers: int = 2, tied: bool = False, chatml: bool = False, hidden: int = 64
) -> Path:
    tokenizer = make_tokenizer(chatml)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
