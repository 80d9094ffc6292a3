"""The command line: aliases, recipes, refusals and help."""

import json
import subprocess
import sys

import pytest

import arguments
from launching import ROOT, environment

BASE = ["--model_name_or_path", "m", "--dataset_name", "d", "--use_cpu", "True"]


def build(*flags):
    return arguments.parse([*BASE, *flags]).build()


def recipe(tmp_path, text, name="recipe.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("flag", ["--max_length", "--max_seq_len", "--max_seq_length", "--max-seq-len"])
def test_max_length_and_its_older_names(flag):
    assert build(flag, "77")[2].max_length == 77


@pytest.mark.parametrize("reentrant", [True, False])
def test_use_reentrant_reaches_the_fields_the_trainer_reads(reentrant):
    args = build("--gradient_checkpointing", "True", "--use_reentrant", str(reentrant))[2]
    assert args.activation_checkpointing is True
    assert args.activation_checkpointing_kwargs == {"use_reentrant": reentrant} == args.gradient_checkpointing_kwargs


def test_contradicting_checkpointing_kwargs_are_refused():
    with pytest.raises(ValueError, match=r"--use_reentrant True contradicts"):
        build("--use_reentrant", "True", "--gradient_checkpointing_kwargs", '{"use_reentrant": false}')


def test_defaults():
    model, data, train = build()
    assert (model.dtype, model.use_peft_lora, model.lora_dropout, model.lora_target_modules) == (
        "auto",
        True,
        0.0,
        "all-linear",
    )
    assert (model.bnb_4bit_compute_dtype, model.bnb_4bit_quant_storage_dtype) == ("bfloat16", "bfloat16")
    assert train.trust_remote_code is False and train.report_to == [] and train.push_to_hub is False
    assert data.splits == "train"


@pytest.mark.parametrize("suffix", ["yaml", "json"])
@pytest.mark.parametrize("how", ["bare", "--config", "--config="])
def test_recipe_values_have_the_types_of_flags(tmp_path, suffix, how):
    if suffix == "json":
        text = json.dumps({"learning_rate": "1e-4", "packing": "False", "max_seq_len": 9, "lora_target_modules": ["a", "b"]})
    else:
        text = "learning_rate: 1e-4\npacking: 'False'\nmax_seq_len: 9\nlora_target_modules: [a, b]\nsave_strategy: no\n"
    path = recipe(tmp_path, text, f"r.{suffix}")
    head = {"bare": [path], "--config": ["--config", path], "--config=": [f"--config={path}"]}[how]
    model, _, train = arguments.parse([*head, *BASE]).build()
    assert (train.learning_rate, train.packing, train.max_length) == (1e-4, False, 9)
    assert model.lora_target_modules == "a,b"
    if suffix == "yaml":
        assert train.save_strategy == "no"


def test_flags_win_over_the_recipe_and_null_unsets(tmp_path):
    path = recipe(tmp_path, "learning_rate: 1e-4\nmax_length: null\nlora_r: 4\n")
    model, _, train = arguments.parse([path, *BASE, "--learning_rate", "3e-5"]).build()
    assert (train.learning_rate, train.max_length, model.lora_r) == (3e-5, None, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", "unknown argument 'learning_rat' in .*did you mean learning_rate"),
        ("learning_rate: fast", r"--learning_rate: invalid float value: 'fast' \(in .*recipe.yaml\)"),
        ("packing: maybe", r"--packing: .*maybe.*recipe.yaml"),
        ("lora_r: 4\nlora_r: 8", "key 'lora_r' is written twice"),
        ("max_seq_len: 4\nmax_length: 8", "sets max_length twice: as max_seq_len and as max_length"),
        ("lora_r: null", "lora_r: null in .* needs a value"),
        ("- a\n- b", "must be a list of `name: value` lines"),
        ("a: [", "cannot be read"),
        ("distributed_type: FSDP\nfsdp_config: {}", "is an Accelerate config: give it to `accelerate launch"),
        ("warmup_ratio: 0.1\nmax_seq_leng: 3", "did you mean"),
    ],
)
def test_bad_recipes(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        arguments.parse([recipe(tmp_path, text), *BASE])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learning_rat", "1"], "unknown argument --learning_rat; did you mean learning_rate"),
        (["--max_len", "3"], "unknown argument --max_len"),
        (["stray"], "'stray' .* belongs to no argument"),
        (["--bnb_4bit_quant_type", "nf5"], "--bnb_4bit_quant_type: invalid choice: 'nf5'"),
        (["--bnb_4bit_quant_type", "fp4"], "no effect without --use_4bit_quantization True"),
        (["--use_peft_lora", "False", "--lora_r", "4"], "--lora_r has no effect without --use_peft_lora True"),
        (["--gradient_checkpointing", "False", "--use_reentrant", "True"], "no effect without --gradient_checkpointing"),
        (["--config", "a.yaml", "--config", "b.yaml"], "--config is given twice"),
        (["--gradient_checkpointing_kwargs", "3"], "is not a JSON object"),
        (["--config", "none.yaml"], "recipe none.yaml does not exist"),
        (["--eval_steps", "3"], "--eval_steps has no effect with --eval_strategy no"),
        (["--metric_for_best_model", "loss"], "no effect without --load_best_model_at_end"),
        (["--hub_token", "hf_x"], "--hub_token has no effect here"),
        *[([f"--{name}", "x"], f"--{name} has no effect here") for name in ("fsdp_config", "dataset_kwargs", "eos_token")],
        *[([f"--{name}", "True"], f"--{name} has no effect here") for name in ("enable_jit_checkpoint", "ignore_data_skip")],
    ],
)
def test_bad_flags(flags, message):
    with pytest.raises(ValueError, match=message):
        build(*flags)


def test_what_is_required_is_named():
    with pytest.raises(ValueError, match="--model_name_or_path is required"):
        arguments.parse(["--dataset_name", "d"])
    with pytest.raises(ValueError, match="--dataset_name is required"):
        arguments.parse(["--model_name_or_path", "m"])


def test_help_is_grouped_by_subject_with_one_line_each():
    result = subprocess.run(
        [sys.executable, "train.py", "--help"], cwd=ROOT, env=environment(COLUMNS="220"), capture_output=True, text=True
    )
    assert result.returncode == 0
    groups = [line[:-1] for line in result.stdout.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert groups[1:5] == ["model", "LoRA", "quantisation (QLoRA)", "data"]
    body = result.stdout.split("\nmodel:\n")[1].split("\nLoRA:\n")[0]
    assert "--model_name_or_path" in body and "--lora_r" not in body
    for name in ("lora_r", "max_length", "learning_rate", "push_to_hub", "fsdp_config"):
        shown = result.stdout.count(f"  --{name} ")
        assert shown == (0 if name in arguments.REFUSED else 1), name
    entries = [line for line in result.stdout.splitlines() if line.startswith("  --")]
    assert len(entries) > 120


def test_every_refused_or_conditional_name_exists():
    parser = arguments.ArgumentParser(arguments.ModelArguments, arguments.DataArguments, arguments.TrainingConfig)
    for name in arguments.REFUSED:
        assert parser.option(name) is not None, name
    for _, needed in arguments.NEEDS:
        assert parser.option(needed) is not None, needed
