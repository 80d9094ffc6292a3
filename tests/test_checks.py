"""Mistakes are refused before a weight is read: one line that names the value and the fix, once, non-zero on every rank."""

import pytest
import torch

import arguments
import checks
import loading
import utils
from launching import ROOT, Launches, accelerate, run
from strategies import FSDP1, FSDP2, NO_FSDP

FSDP_VARIABLES = ("ACCELERATE_", "FSDP_", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith(FSDP_VARIABLES):
            monkeypatch.delenv(name)


def refused(monkeypatch, assets, message, *flags, env=(), model="fp32", world=2):
    for name, value in {**dict(env), "WORLD_SIZE": str(world)}.items():
        monkeypatch.setenv(name, value)
    fsdp = checks.FsdpSettings.from_environment()
    # fp16 on CPU is refused by the Trainer itself, so the object is built without and the field set afterwards.
    base = ["--model_name_or_path", str(assets[model]), "--dataset_name", "d", "--use_cpu", "True", "--output_dir", "out"]
    fp16 = "--fp16" in flags
    monkeypatch.setenv("WORLD_SIZE", "1")
    model_args, _, train_args = arguments.parse([*base, *(f for f in flags if f != "--fp16")]).build()
    monkeypatch.setenv("WORLD_SIZE", str(world))
    if fp16:
        train_args.fp16 = True
    with pytest.raises(ValueError, match=message) as caught:
        checks.check_launch(model_args, train_args, fsdp, utils.load_config(str(assets[model])))
    assert "\n" not in str(caught.value)


Q4 = ["--use_4bit_quantization", "True"]
Q8 = ["--use_8bit_quantization", "True"]


@pytest.mark.parametrize(
    ("message", "flags", "env", "model"),
    [
        ("exclude each other", Q4 + Q8, {}, "fp32"),
        ("8bit_quantization True does not work under FSDP", Q8, FSDP1, "fp32"),
        ("8bit_quantization True does not work under FSDP", Q8, FSDP2, "fp32"),
        ("uint8 cannot be sharded", [*Q4, "--bnb_4bit_quant_storage_dtype", "uint8"], FSDP1, "bf16"),
        ("uint8 cannot be sharded", [*Q4, "--bnb_4bit_quant_storage_dtype", "uint8"], FSDP2, "bf16"),
        ("quantised weights cannot be trained", [*Q4, "--use_peft_lora", "False"], {}, "bf16"),
        ("needs float32 storage", [*Q4, "--fp16"], {}, "bf16"),
        ("needs float32 storage", [*Q4, "--fp16"], FSDP1, "bf16"),
        ("float16 mixed precision needs float32 weights", ["--fp16"], {}, "bf16"),
        ("contradicts --bnb_4bit_quant_storage_dtype", [*Q4, "--dtype", "float32"], {}, "bf16"),
        ("float32 with --bf16 True under FSDP2", [*Q4, "--bf16", "True", "--bnb_4bit_quant_storage_dtype", "float32"], FSDP2, "fp32"),
        ("use_orig_params: true .* not supported under FSDP1", ["--use_peft_lora", "False"], {**FSDP1, "FSDP_USE_ORIG_PARAMS": "true"}, "fp32"),
        ("use_orig_params: true .* GiB per rank .* set fsdp_use_orig_params: false", [], {**FSDP1, "FSDP_USE_ORIG_PARAMS": "true"}, "fp32"),
        ("asked for twice", [], {**FSDP1, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "fp32"),
        ("paged_adamw_8bit has no sharded state", ["--optim", "paged_adamw_8bit"], FSDP2, "fp32"),
        ("adamw_bnb_8bit has no sharded state", ["--optim", "adamw_bnb_8bit"], FSDP1, "fp32"),
        ("GPT2Block is not a module .*LlamaDecoderLayer", [], {**FSDP2, "FSDP_TRANSFORMER_CLS_TO_WRAP": "GPT2Block"}, "fp32"),
        ("qproj matches no module of the model; it has .*q_proj", ["--lora_target_modules", "qproj,v_proj"], {}, "fp32"),
        ("matches no module", ["--lora_target_modules", ".*attentions.*"], {}, "fp32"),
        ("a LlamaRMSNorm, which LoRA cannot adapt", ["--lora_target_modules", ".*attention.*"], {}, "fp32"),
        ("neither a comma list of names nor a regex", ["--lora_target_modules", "(q_proj"], {}, "fp32"),
        ("needs a CUDA GPU", ["--use_flash_attn", "True"], {}, "fp32"),
        ("--lora_r 0 must be at least 1", ["--lora_r", "0"], {}, "fp32"),
        ("--lora_dropout 1.0 must be", ["--lora_dropout", "1"], {}, "fp32"),
        ("--gradient_accumulation_steps -2 must be at least 1", ["--gradient_accumulation_steps", "-2"], {}, "fp32"),
        ("--per_device_train_batch_size 0 must be", ["--per_device_train_batch_size", "0"], {}, "fp32"),
        ("--max_steps 0 must be", ["--max_steps", "0"], {}, "fp32"),
        ("--max_length -4 must be", ["--max_length", "-4"], {}, "fp32"),
        ("--learning_rate nan must be", ["--learning_rate", "nan"], {}, "fp32"),
        ("embed_tokens: FSDP1 cannot", ["--lora_target_modules", "q_proj,embed_tokens"], FSDP1, "fp32"),
        ("lm_head: TRL's loss reads", ["--lora_target_modules", "q_proj,lm_head"], {}, "fp32"),
        ("TRL refuses --padding_free True", ["--padding_free", "True"], {}, "fp32"),
        ("needs fsdp_state_dict_type: FULL_STATE_DICT", ["--save_only_model", "True"], FSDP2, "fp32"),
        ("push_to_hub needs a login", ["--push_to_hub", "True"], {}, "fp32"),
        ("adafactor mixes sharded and plain", ["--optim", "adafactor"], FSDP2, "fp32"),
        ("schedule_free_adamw needs the package schedulefree", ["--optim", "schedule_free_adamw"], {}, "fp32"),
        ("HYBRID_SHARD shards over the devices of a machine, and there is one: use FULL_SHARD", [], {**FSDP1, "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, "fp32"),
        ("lion_32bit has no sharded state", ["--optim", "lion_32bit"], FSDP2, "fp32"),
    ],
)  # fmt: skip
def test_refused_before_loading(monkeypatch, assets, message, flags, env, model):
    refused(monkeypatch, assets, message, *flags, env=env, model=model)


def test_output_folder_that_is_a_file(monkeypatch, assets, tmp_path):
    (tmp_path / "file").write_text("")
    refused(monkeypatch, assets, "is a file", "--output_dir", str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("all-linear", "all-linear"),
        ("q_proj", ["q_proj"]),
        ("q_proj, v_proj", ["q_proj", "v_proj"]),
        ("self_attn.q_proj,mlp.up_proj", ["self_attn.q_proj", "mlp.up_proj"]),
        (r".*layers\.[01]\..*(q|v)_proj", r".*layers\.[01]\..*(q|v)_proj"),
    ],
)
def test_target_modules_list_or_regex(assets, value, expected):
    assert utils.target_modules(value) == expected
    utils.check_target_modules(value, loading.meta_model(utils.load_config(str(assets["fp32"]))))


def test_flash_attention_is_never_replaced_quietly(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(utils, "_flash_attn_installed", lambda: True)
    assert utils.attention_implementation(True) == "flash_attention_2"
    monkeypatch.setattr(utils, "_flash_attn_installed", lambda: False)
    monkeypatch.setattr(utils, "is_kernels_available", lambda: True)
    assert utils.attention_implementation(True) == utils.FLASH_ATTENTION_KERNEL
    monkeypatch.setattr(utils, "is_kernels_available", lambda: False)
    with pytest.raises(ValueError, match=r"requirements-gpu.txt.*pip install kernels"):
        utils.attention_implementation(True)
    assert utils.attention_implementation(False) is None


def test_the_arguments_decide_on_mixed_precision(monkeypatch):
    import os

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    flags = ["--model_name_or_path", "m", "--dataset_name", "d", "--use_cpu", "True", "--bf16", "False"]
    args = arguments.parse(flags).build()[2]
    assert checks.settle_mixed_precision(args) == [
        "mixed_precision: bf16 in the Accelerate config is overruled by the arguments: no"
    ]
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == args.mixed_precision == "no"
    assert checks.settle_mixed_precision(args) == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ACCELERATE_USE_FSDP", "1", "reads only true and false"),
        ("FSDP_SHARDING_STRATEGY", "FULL_SHARDD", "is none of FULL_SHARD"),
    ],
)
def test_environment_values_that_accelerate_would_ignore(monkeypatch, name, value, message):
    for key, setting in {**FSDP1, name: value}.items():
        monkeypatch.setenv(key, setting)
    with pytest.raises(ValueError, match=message):
        checks.FsdpSettings.from_environment()


def test_weights_that_do_not_fit_the_config(assets, tmp_path):
    """Transformers would fill a missing layer with random numbers and train an adapter over it."""
    import json
    import shutil

    def load(change):
        folder = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        shutil.copytree(assets["fp32"], folder)
        change(folder)
        flags = ["--model_name_or_path", str(folder), "--dataset_name", "d", "--use_cpu", "True"]
        model_args = arguments.parse(flags).build()[0]
        tokenizer = __import__("chat").prepare_tokenizer(str(folder), "chatml")[0]
        return utils.create_and_prepare_model(
            model_args, True, False, tokenizer, utils.load_config(str(folder)), sharded=False
        )

    def one_layer_more(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": None}))

    def truncated(folder):
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[:-100])

    assert load(lambda folder: None) is not None
    with pytest.raises(ValueError, match=r"the checkpoint lacks 9 weights .*layers\.2\."):
        load(one_layer_more)
    with pytest.raises(ValueError, match="its weights cannot be loaded"):
        load(truncated)


class TestProcesses:
    def settings(self, monkeypatch, env=FSDP2, **extra):
        for name, value in {**env, **extra}.items():
            monkeypatch.setenv(name, value)
        return checks.FsdpSettings.from_environment()

    def test_fsdp_without_a_launcher(self, monkeypatch):
        with pytest.raises(ValueError, match="single process without a launcher"):
            checks.check_processes(True, self.settings(monkeypatch))

    def test_independent_runs(self, monkeypatch):
        fsdp = self.settings(monkeypatch, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
        with pytest.raises(ValueError, match="no accelerator: each would train alone"):
            checks.check_processes(False, fsdp)

    def test_cpu_config_without_use_cpu(self, monkeypatch):
        fsdp = self.settings(monkeypatch, WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
        with pytest.raises(ValueError, match="add --use_cpu True"):
            checks.check_processes(False, fsdp)

    def test_more_processes_than_devices(self, monkeypatch):
        fsdp = self.settings(monkeypatch, WORLD_SIZE="8", LOCAL_WORLD_SIZE="8")
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        with pytest.raises(ValueError, match=r"8 processes on a machine with 2 device.*--num_processes 2"):
            checks.check_processes(False, fsdp)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
        checks.check_processes(False, fsdp)

    def test_world_size_that_is_not_what_was_started(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ValueError, match="started 2 processes but this run sees 1"):
            checks.check_world(1)
        checks.check_world(2)

    def test_multi_cpu_config_that_starts_one_process(self, monkeypatch):
        monkeypatch.setenv("MASTER_PORT", "29500")
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
        with pytest.raises(ValueError, match="Accelerate started one"):
            checks.check_processes(True, None)


def launched_error(assets, tmp_path, *flags, config="fsdp2_config_cpu.yaml"):
    base = {"model_name_or_path": assets["fp32"], "dataset_name": assets["data"], "use_cpu": True, "output_dir": tmp_path}
    script = [ROOT / "train.py", *(token for key, value in base.items() for token in (f"--{key}", value)), *flags]
    result = accelerate(config, script, check=False)
    assert result.returncode != 0
    assert "Loading weights" not in result.stderr, "weights were read first"
    lines = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert len(lines) == 1, f"the error is not printed once: {lines}\n{result.stderr[-2000:]}"
    assert "Traceback" not in result.stderr.split("torch/distributed/elastic")[0], "a traceback beside the line"
    assert "exitcode  : 1" in result.stderr
    return lines[0]


def test_a_launched_mistake_prints_one_line_once(assets, tmp_path):
    message = "no model at --model_name_or_path no/such-model"
    assert message in launched_error(assets, tmp_path, "--model_name_or_path", "no/such-model")


MISTAKES = [
    (["--dataset_name", "no/such-data"], "--dataset_name no/such-data"),
    (
        ["--splits", "train,dev", "--eval_strategy", "epoch", "--chat_template_format", "chatml"],
        "has no split 'dev': it has",
    ),
    (["--chat_template_format", "none"], "--chat_template_format chatml, zephyr or a .jinja file"),
    (["--config", "no-such.yaml"], "recipe no-such.yaml does not exist"),
    (["--chat_template_format", "llama"], "--chat_template_format llama is unknown"),
]


def test_mistakes_are_one_line_before_anything_is_written(assets, tmp_path):
    launches = Launches(tmp_path)
    common = ["--use_cpu", "True", "--model_name_or_path", assets["fp32"], "--dataset_name", assets["data"]]
    for number, (flags, _) in enumerate(MISTAKES):
        launches.add(str(number), [*map(str, common), "--output_dir", tmp_path / "out", *flags], NO_FSDP, 1)
    launches.run()
    for number, (flags, message) in enumerate(MISTAKES):
        lines = [line for line in launches.text(str(number)).splitlines() if line.startswith("error")]
        assert launches.codes(str(number)) == [1] and len(lines) == 1 and message in lines[0], (flags, lines)
        assert not (tmp_path / "out" / "run.json").exists()


def test_launch_without_use_cpu_stops(assets, tmp_path):
    line = launched_error(assets, tmp_path, "--use_cpu", "False", "--bf16", "False")
    assert "add --use_cpu True" in line


def test_missing_accelerate_config():
    result = run(["accelerate", "launch", "--config_file", "configs/nothing.yaml", "train.py"], check=False)
    assert result.returncode != 0 and "configs/nothing.yaml" in result.stderr
