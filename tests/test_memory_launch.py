"""What the memory model says of launches, held against what their ranks hold and what they allocate."""

import dataclasses
import functools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import launch
import memory
import utils
from launching import Launches
from strategies import FSDP1, FSDP2, NO_FSDP
from tiny import make_tokenizer

LENGTH = 128
FOUR_BIT = ["--use_4bit_quantization", "True", "--dtype", "auto", "--bnb_4bit_quant_storage_dtype", "float32"]
KEEP = ["--gradient_checkpointing", "False"]  # the activations of all layers
ENVIRONMENTS = {"FSDP1": FSDP1, "FSDP2": FSDP2, "DDP": NO_FSDP, "one device": NO_FSDP}
# name -> strategy, model, ranks, flags
CASES = {
    "FSDP2 LoRA": ("FSDP2", "small", 2, []),
    "FSDP2 QLoRA": ("FSDP2", "small", 2, [*FOUR_BIT, *KEEP, "--use_nested_quant", "False"]),
    "FSDP2 dropout": ("FSDP2", "small", 2, [*KEEP, "--lora_dropout", "0.1", "--gradient_accumulation_steps", "2"]),
    "FSDP2 every weight": ("FSDP2", "small", 2, ["--use_peft_lora", "False", *KEEP]),
    "FSDP2 3 ranks": ("FSDP2", "small", 3, ["--lora_target_modules", "q_proj,down_proj"]),
    "FSDP1 QLoRA": ("FSDP1", "small", 2, [*FOUR_BIT, *KEEP]),
    "FSDP1 DoRA": ("FSDP1", "small", 2, ["--use_dora", "True"]),
    "DDP LoRA": ("DDP", "small", 2, KEEP),
    "one device LoRA": ("one device", "small", 1, KEEP),
    "FSDP2 0.2B": ("FSDP2", "0.2B", 2, []),
    "FSDP1 0.2B": ("FSDP1", "0.2B", 2, []),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    shapes = {
        "small": dict(hidden_size=240, intermediate_size=700, num_hidden_layers=5, num_attention_heads=6),
        "0.2B": dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=14, num_attention_heads=16),
    }
    for name, shape in shapes.items():
        tokenizer = make_tokenizer(chatml=True)
        config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=len(tokenizer) if name == "small" else 16000)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = [{"text": "please send order"}] + [{"text": " ".join(["please send order"] * LENGTH)}] * 64  # not all are cut
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arguments_of(models, name: str) -> list[str]:
    _, model, _, flags = CASES[name]
    values = {
        "model_name_or_path": models / model,
        "dataset_name": models / "train.jsonl",
        "chat_template_format": "none",
        "use_cpu": True,
        "max_length": LENGTH,
        "max_steps": 2,
        "per_device_train_batch_size": 2 if model == "small" else 1,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "output_dir": models / "out" / name,
    }
    flags = flags if "--use_peft_lora" in flags else ["--lora_r", "8", *flags]
    return [*(str(token) for key, value in values.items() for token in (f"--{key}", value)), *flags]


@pytest.fixture(scope="module")
def launches(models):
    launches = Launches(models)
    for name, (strategy, _, ranks, _) in CASES.items():
        launches.add(name, arguments_of(models, name), ENVIRONMENTS[strategy], ranks, memory=True)
    launches.run()
    launches.assert_ended_well()
    return launches


@functools.cache
def estimate(models, name: str, rank: int = 0) -> memory.Estimate:
    strategy, _, ranks, _ = CASES[name]
    place = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "RANK": 0, "LOCAL_RANK": 0} if ranks > 1 else {}
    environment = ENVIRONMENTS[strategy] | {key: str(value) for key, value in place.items()}
    its = launch.Launch(None, {}, environment, ranks, 1, arguments_of(models, name), "train.py")
    _, model_args, _, training_args, fsdp = launch.build(its)
    config = utils.load_config(model_args.model_name_or_path)
    setup = dataclasses.replace(memory.from_launch(model_args, training_args, fsdp, config, ranks, ranks), rank=rank)
    assert setup.strategy == strategy
    return memory.estimate(setup)


@pytest.mark.parametrize("name", CASES)
def test_what_a_rank_holds_is_what_was_said_to_the_byte(launches, models, name):
    facts = launches.facts(name)
    assert len(facts) == CASES[name][2]
    for rank, fact in enumerate(facts):
        said = estimate(models, name, rank).phases["optimizer step"]
        assert fact["held"]["frozen"] == said.get("base weights", 0)
        assert fact["held"]["trained"] == said.get("adapter", 0) + said.get("trained weights", 0)
        assert fact["held"]["optimizer"] == said["optimizer state"]


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_step_is_what_was_said(launches, models, name):
    said = estimate(models, name).peak
    for fact in launches.facts(name):
        print(f"{name}: said {said}, measured {fact['peak']}, {said / fact['peak'] - 1:+.1%}")
        assert abs(said / fact["peak"] - 1) < 0.05, (name, said, fact["peak"])
