"""Each mistake in a launch is found, graded, all of them at once; and what is shipped has none."""

import copy
import importlib.metadata
import os
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from torch.distributed.fsdp import ShardingStrategy
from transformers import AutoConfig

import checks
import findings
import launch
import utils
from launching import ROOT, environment
from test_launch import config, no_launch_around  # noqa: F401 (a fixture)

LORA = ["--dataset_name", "d", "--max_steps", "1000", "--learning_rate", "1e-4"]
FULL = [*LORA, "--use_peft_lora", "False", "--learning_rate", "1e-5"]
Q4 = ["--use_4bit_quantization", "True"]
FSDP2 = dict(base="fsdp2_config")


@pytest.fixture
def collected(assets, tmp_path):
    """A function: the findings of a launch with a shipped config and the tiny model, each changed as said."""

    def collect(flags=(), keys=None, *, model="bf16", here=False, rows=None, base_flags=LORA, **more):
        argv = ["--model_name_or_path", str(assets[model]), "--output_dir", str(tmp_path / "out"), *base_flags, *flags]
        read = launch.read(["--config_file", config(tmp_path, **(keys or {})), "--", *argv])
        config_of_model = utils.load_config(str(assets[model]))
        return findings.collect(read, *launch.build(read), config_of_model, here=here, rows=rows, **more)

    return collect


def found_in(found: list, grade: str, pattern: str) -> list:
    return [finding for finding in found if finding.grade == grade and re.search(pattern, finding.line)]


def assert_quiet(found: list, grades=("error", "warning")) -> None:
    assert [finding.line for finding in found if finding.grade in grades] == []


# (name, grade, what is said, flags of train.py, keys of the Accelerate config)
LAUNCHES = [
    # checks.py, all of whose functions are asked
    ("4 and 8 bit", "error", "exclude each other", [*Q4, "--use_8bit_quantization", "True"], {}),
    ("8 bit and FSDP", "error", "8-bit integer weights", ["--use_8bit_quantization", "True"], {}),
    ("storage against dtype", "error", "contradicts --bnb_4bit_quant_storage_dtype", [*Q4, "--dtype", "float32"], {}),
    ("fp16 storage", "error", "needs float32 storage", [*Q4, "--fp16", "True"], {}),
    ("fp16 weights", "error", "needs float32 weights", ["--fp16", "True"], {}),
    ("FlashAttention in float32", "error", "float32 weights without mixed precision", ["--use_flash_attn", "True", "--bf16", "False", "--dtype", "float32"], {}),
    ("original parameters", "error", "fsdp_use_orig_params: true .* loses LoRA's memory", [], {"fsdp": {"fsdp_use_orig_params": True}}),
    ("original parameters by default", "error", "missing key, which means true", [], {"fsdp": {"fsdp_use_orig_params": None}}),
    ("original parameters, every weight", "error", "not supported under FSDP1", FULL, {"fsdp": {"fsdp_use_orig_params": True}}),
    ("checkpointing twice", "error", "asked for twice", [], {"fsdp": {"fsdp_activation_checkpointing": True}}),
    ("optimizer", "error", "paged_adamw_8bit has no sharded state", ["--optim", "paged_adamw_8bit"], {}),
    ("wrap class", "error", "GPT2Block is not a module", [], {"fsdp": {"fsdp_transformer_layer_cls_to_wrap": "GPT2Block"}}),
    ("hybrid on one rank", "error", "HYBRID_SHARD shards over the devices", [], {"num_processes": 1, "fsdp": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}),
    ("targets", "error", "qproj matches no module", ["--lora_target_modules", "qproj,v_proj"], {}),
    ("ranges", "error", "--lora_r 0 must be", ["--lora_r", "0"], {}),
    ("template", "error", "chat_template_format llama is unknown", ["--chat_template_format", "llama"], {}),
    ("packing without a length", "error", "--padding_free True", ["--padding_free", "True"], {}),
    ("use_cpu in the config only", "error", "use_cpu: true in .* and no --use_cpu True", [], {"use_cpu": True}),
    ("one process of several", "error", "Accelerate started one", [], {"distributed_type": "MULTI_CPU", "fsdp_config": None}),
    # values and keys of the Accelerate config
    ("boolean", "error", "fsdp_offload_params: ture .* must be true or false", [], {"fsdp": {"fsdp_offload_params": "ture"}}),
    ("boolean null", "error", "fsdp_forward_prefetch: maybe", [], {"fsdp": {"fsdp_forward_prefetch": "maybe"}}),
    ("state dict type", "error", r"fsdp_state_dict_type: SHARDED_STATE in .*did you mean SHARDED_STATE_DICT", [], {"fsdp": {"fsdp_state_dict_type": "SHARDED_STATE"}}),
    ("wrap policy", "error", "fsdp_auto_wrap_policy: TRANSFORMER_WRAP in .* is none of", [], {"fsdp": {"fsdp_auto_wrap_policy": "TRANSFORMER_WRAP"}}),
    ("prefetch", "error", "fsdp_backward_prefetch: BACKWARD in .* is none of", [], {"fsdp": {"fsdp_backward_prefetch": "BACKWARD"}}),
    ("smallest unit", "error", "fsdp_min_num_params: 1e8 .* whole number", [], {"fsdp": {"fsdp_min_num_params": "1e8"}}),
    ("reshard under FSDP1", "error", "fsdp_reshard_after_forward: false is not read under FSDP1", [], {"fsdp": {"fsdp_reshard_after_forward": False}}),
    ("reshard of FSDP1 under FSDP2", "error", "must be true or false under FSDP2", [], {**FSDP2, "fsdp": {"fsdp_reshard_after_forward": "FULL_SHARD"}}),
    ("strategy under FSDP2", "error", "fsdp_sharding_strategy: SHARD_GRAD_OP is not read under FSDP2", [], {**FSDP2, "fsdp": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}),
    ("local state under FSDP2", "error", "LOCAL_STATE_DICT is not supported", [], {**FSDP2, "fsdp": {"fsdp_state_dict_type": "LOCAL_STATE_DICT"}}),
    ("activation offload", "error", "fsdp_activation_checkpointing_offload: true needs", [], {**FSDP2, "fsdp": {"fsdp_activation_checkpointing_offload": True}}),
    ("misspelt key", "error", r"fsdp_ofload_params under fsdp_config in .* \(did you mean fsdp_offload_params\?\)", [], {"fsdp": {"fsdp_ofload_params": True}}),
    ("misspelt key without fsdp_", "error", r"fsdp_ofload_params under fsdp_config", [], {"fsdp": {"ofload_params": True}}),
    ("keys of FSDP1 under FSDP2", "advice", "fsdp_backward_prefetch: BACKWARD_PRE in .* is not read under FSDP2", [], {**FSDP2, "fsdp": {"fsdp_backward_prefetch": "BACKWARD_PRE"}}),
    ("original parameters under FSDP2", "advice", "fsdp_use_orig_params: True in .* is not read under FSDP2", [], {**FSDP2, "fsdp": {"fsdp_use_orig_params": True}}),
    ("forward prefetch under FSDP2", "warning", "fsdp_forward_prefetch: True in .* is not read", [], {**FSDP2, "fsdp": {"fsdp_forward_prefetch": True}}),
    ("key of FSDP2 under FSDP1", "advice", "fsdp_reshard_after_forward: True in .* fsdp_sharding_strategy decides", [], {"fsdp": {"fsdp_reshard_after_forward": True}}),
    ("fsdp_config without FSDP", "warning", "fsdp_config in .* is not read: distributed_type is MULTI_GPU", [], {"distributed_type": "MULTI_GPU"}),
    ("no wrapping, LoRA", "advice", "NO_WRAP is not used with LoRA under FSDP1", [], {"fsdp": {"fsdp_auto_wrap_policy": "NO_WRAP"}}),
    ("wrapping by size, LoRA", "advice", "SIZE_BASED_WRAP is not used with LoRA", [], {"fsdp": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}}),
    ("no wrapping, FSDP2", "warning", "makes one unit of the whole model", [], {**FSDP2, "fsdp": {"fsdp_auto_wrap_policy": None}}),
    ("no wrapping, every weight", "warning", "makes one unit of the whole model", FULL, {"fsdp": {"fsdp_auto_wrap_policy": "NO_WRAP"}}),
    ("mixed precision", "advice", "mixed_precision: no in the Accelerate config is overruled .*: bf16", [], {"mixed_precision": "no"}),
    # saving and evaluating
    ("evaluation without rows", "error", "needs rows to evaluate on", ["--eval_strategy", "epoch"], {}),
    ("rows without evaluation", "error", "--eval_strategy is no", ["--splits", "train,test"], {}),
    ("best without evaluation", "error", "saves after evaluations", ["--save_strategy", "best", "--load_best_model_at_end", "True"], {}),
    ("best by nothing", "error", "needs --load_best_model_at_end True", ["--save_strategy", "best", "--eval_strategy", "epoch", "--splits", "a,b"], {}),
    ("unknown metric", "error", r"--metric_for_best_model eval_los is not measured.*did you mean loss", ["--metric_for_best_model", "eval_los", "--load_best_model_at_end", "True", "--save_strategy", "best", "--eval_strategy", "epoch", "--splits", "a,b"], {}),
    ("saves after the end", "warning", "--save_steps 5000 is more than the 1000 steps", ["--save_steps", "5000"], {}),
    ("no saves in a long run", "warning", "saves nothing in 1000 steps", ["--save_strategy", "no"], {}),
    ("evaluations after the end", "advice", "--eval_steps 2000 is more than", ["--eval_strategy", "steps", "--eval_steps", "2000", "--splits", "a,b"], {}),
    ("logs after the end", "advice", "--logging_steps 2000 is more than", ["--logging_steps", "2000"], {}),
    # the schedule
    ("all warm-up", "warning", "--warmup_steps 1000 is 1000 of 1000 steps: the learning rate never gets to 0.0001", ["--warmup_steps", "1000"], {}),
    ("all warm-up, as a share", "warning", "--warmup_steps 0.9999 is 1000 of 1000", ["--warmup_steps", "0.9999"], {}),
    ("warm-up ignored", "error", "no effect with --lr_scheduler_type constant: use constant_with_warmup", ["--lr_scheduler_type", "constant", "--warmup_steps", "9"], {}),
    ("rate too high", "warning", "--learning_rate 0.1 is unusual for LoRA: it is likely to diverge", ["--learning_rate", "0.1"], {}),
    ("rate too low", "warning", "--learning_rate 1e-08 is unusual for LoRA: it learns next to nothing", ["--learning_rate", "1e-8"], {}),
    ("rate too high for all weights", "warning", "--learning_rate 0.005 is unusual for training every weight", [*FULL, "--learning_rate", "0.005"], {}),
    ("dropout", "advice", "--lora_dropout 0.1 keeps a dropped copy", ["--lora_dropout", "0.1"], {}),
    # elsewhere
    ("FlashAttention elsewhere", "advice", "flash-attn or kernels on the machine", ["--use_flash_attn", "True"], {}),
]  # fmt: skip


SOUND = {}  # findings of the launches that nothing was changed in, by their config


@pytest.mark.parametrize(("grade", "said", "flags", "keys"), [row[1:] for row in LAUNCHES], ids=[row[0] for row in LAUNCHES])
def test_found_where_it_is_and_only_there(collected, grade, said, flags, keys):
    found = collected(flags, keys)
    assert len(found_in(found, grade, said)) == 1, [finding.line for finding in found]
    assert all("\n" not in finding.line for finding in found)
    base = keys.get("base", "fsdp_config")
    if base not in SOUND:
        SOUND[base] = collected(keys={"base": base})
    assert not found_in(SOUND[base], grade, said)


@pytest.mark.parametrize("base", ["fsdp_config", "fsdp2_config", "ddp_config", "single_config", "fsdp_config_qlora"])
@pytest.mark.parametrize("flags", [LORA, FULL], ids=["LoRA", "every weight"])
def test_sound_launches_are_quiet(collected, base, flags):
    assert_quiet(collected(keys={"base": base}, base_flags=flags))
    several = ["--eval_strategy", "steps", "--splits", "a,b", "--load_best_model_at_end", "True", "--eval_steps", "500"]
    assert_quiet(collected([*several, "--warmup_steps", "0.1"], {"base": base}, base_flags=flags, rows=10**6))


@pytest.mark.parametrize(
    ("variables", "held"),
    [
        ({"FSDP_OFFLOAD_PARAMS": "ture"}, ValueError),
        ({"FSDP_STATE_DICT_TYPE": "SHARDED_STATE"}, KeyError),
        ({"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_WRAP"}, ValueError),
        ({"FSDP_BACKWARD_PREFETCH": "BACKWARD"}, KeyError),
        ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "1e8"}, ValueError),
        ({"FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD", "FSDP_VERSION": "2"}, ValueError),
        ({"FSDP_STATE_DICT_TYPE": "LOCAL_STATE_DICT", "FSDP_VERSION": "2"}, ValueError),
        ({"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true", "FSDP_VERSION": "2"}, ValueError),
        ({"FSDP_RESHARD_AFTER_FORWARD": "false"}, {"sharding_strategy": ShardingStrategy.FULL_SHARD}),
        ({"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP", "FSDP_VERSION": "2"}, {"reshard_after_forward": True, "sharding_strategy": None}),
        ({"FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE", "FSDP_VERSION": "2"}, {"backward_prefetch": None}),
        ({"FSDP_FORWARD_PREFETCH": "true", "FSDP_VERSION": "2"}, {"forward_prefetch": None}),
        ({"FSDP_USE_ORIG_PARAMS": "true", "FSDP_SYNC_MODULE_STATES": "true", "FSDP_VERSION": "2"}, {"use_orig_params": None, "sync_module_states": None}),
        ({}, {"auto_wrap_policy": None}),
    ],
)  # fmt: skip
def test_accelerate_does_what_is_said_of_it(monkeypatch, variables, held):
    """Its plugin, which is made once the model is built, stops at these values or does not read them."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if isinstance(held, dict):
        plugin = FullyShardedDataParallelPlugin()
        assert {name: getattr(plugin, name) for name in held} == held
    else:
        with pytest.raises(held):
            FullyShardedDataParallelPlugin()


@pytest.mark.parametrize("value", [True, False, "on", "no", "1"])
def test_values_that_accelerate_takes(collected, tmp_path, value):
    keys = {"fsdp": {"fsdp_offload_params": value, "fsdp_cpu_ram_efficient_loading": value}}
    assert_quiet(collected(keys=keys))
    read = launch.read(["--config_file", config(tmp_path, **keys), "--", "--model_name_or_path", "m", *LORA])
    assert launch.build(read)[4].offload_params == (value in (True, "on", "1"))


def test_numbers_out_of_range_do_not_stop_the_rest(collected):
    flags = ["--per_device_train_batch_size", "0", "--save_steps", "0", "--max_steps", "-1", "--optim", "lion_8bit"]
    found = collected(flags, rows=100)
    for part in ("per_device_train_batch_size 0 must be", "save_steps 0.0 must be", "lion_8bit"):
        assert found_in(found, "error", part), part


def test_all_mistakes_at_once_the_worst_first(collected):
    flags = ["--lora_r", "0", "--max_length", "-1", "--lora_target_modules", "qproj,vproj", "--lora_dropout", "0.1"]
    keys = {"fsdp": {"fsdp_offload_params": "ture", "fsdp_use_orig_params": True, "fsdp_whatever": 1}}
    found = collected([*flags, "--optim", "lion_8bit", "--learning_rate", "1"], keys)
    for part in (
        "lora_r 0",
        "max_length -1",
        "qproj matches",
        "vproj matches",
        "ture",
        "orig_params",
        "fsdp_whatever",
        "lion",
    ):
        assert found_in(found, "error", part), part
    grades = [finding.grade for finding in found]
    assert grades == sorted(grades, key=findings.GRADES.index) and set(grades) == set(findings.GRADES)


def test_train_raises_the_first_of_them(collected, assets, monkeypatch):
    read = launch.read(["--", "--model_name_or_path", str(assets["fp32"]), *LORA, "--lora_r", "0", "--max_length", "-1"])
    _, model_args, _, training_args, fsdp = launch.build(read)
    with pytest.raises(ValueError, match="^--max_length -1 must be"):
        checks.check_launch(model_args, training_args, fsdp, utils.load_config(str(assets["fp32"])))


def test_environment_variables_that_nothing_reads(collected, monkeypatch):
    monkeypatch.setenv("FSDP_OFFLOAD_PARAM", "true")
    assert found_in(collected(), "warning", r"FSDP_OFFLOAD_PARAM in the environment .*did you mean FSDP_OFFLOAD_PARAMS\?")
    assert len(checks.unknown_fsdp_variables()) == 1
    monkeypatch.delenv("FSDP_OFFLOAD_PARAM")
    assert checks.unknown_fsdp_variables() == []


def test_wide_heads_have_no_flash_attention(assets):
    model_args = SimpleNamespace(
        use_flash_attn=True, use_4bit_quantization=False, bnb_4bit_quant_storage_dtype="bfloat16", dtype="auto"
    )
    training_args = SimpleNamespace(use_cpu=False, bf16=True, fp16=False)
    config_of_model = AutoConfig.from_pretrained(assets["bf16"])
    for size, count in ((256, 0), (257, 1)):
        config_of_model.head_dim = size
        assert len(list(checks.precision_problems(model_args, training_args, None, config_of_model))) == count


@pytest.mark.parametrize(
    ("rows", "flags", "grade", "said"),
    [
        (100, ["--dataloader_drop_last", "True", "--per_device_train_batch_size", "16"], "error", "100 rows are fewer than the 128 of one batch .*there is nothing to train on"),
        (128, ["--dataloader_drop_last", "True", "--per_device_train_batch_size", "16"], None, ""),
        (65, ["--gradient_accumulation_steps", "2"], "warning", "65 rows are fewer than the 128 of one step.*some of them twice"),
        (64, ["--gradient_accumulation_steps", "2"], "warning", "64 rows are fewer than the 128 of one step: each epoch is one step on fewer rows than asked for: "),
        (128, ["--gradient_accumulation_steps", "2"], None, ""),
        (640, ["--warmup_steps", "10"], "warning", "--warmup_steps 10 is 10 of 10 steps"),
        (641, ["--warmup_steps", "10"], None, ""),
        (640, ["--num_train_epochs", "1.5", "--warmup_steps", "14"], None, ""),
        (None, ["--warmup_steps", "10"], None, ""),
        (640, ["--save_steps", "11"], "warning", "--save_steps 11 is more than the 10 steps"),
        (640, ["--save_steps", "0.5"], None, ""),
    ],
)  # fmt: skip
def test_schedules_by_rows(rows, flags, grade, said):
    """8 rows on each of 8 processes, so 64 for each step unless the flags say otherwise."""
    quiet = ["--save_strategy", "steps" if "--save_steps" in flags else "no", "--logging_steps", "1"]
    base = ["--model_name_or_path", "m", "--dataset_name", "d", "--num_train_epochs", "1", *quiet]
    base += ["--per_device_train_batch_size", "8"]
    read = launch.read(["--config_file", str(ROOT / "configs/fsdp_config.yaml"), "--", *base, *flags])
    found = findings.check_schedule(launch.build(read)[3], rows)
    assert [finding.grade for finding in found] == ([grade] if grade else [])
    assert re.search(said, findings.Finding.line.fget(found[0]) if found else "")
    if grade == "error":
        with pytest.raises(ValueError, match=said):
            findings.notes(found)
    else:
        assert findings.notes(found) == [finding.line for finding in found]


def test_steps_are_those_of_the_trainer(tmp_path):
    """Rows that do not fill the last batch, accumulation that does not fill the last step, and parts of epochs."""
    from torch.utils.data import DataLoader
    from transformers import Trainer, TrainingArguments

    for rows in (4, 5, 17, 40):
        for more in (
            {},
            {"gradient_accumulation_steps": 3},
            {"num_train_epochs": 2.5},
            {"max_steps": 7},
            {"dataloader_drop_last": True},
        ):
            args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=4, **more)
            trainer = Trainer(torch.nn.Linear(1, 1), args)
            counted = trainer.set_initial_training_values(
                args, DataLoader(range(rows), batch_size=4, drop_last=args.dataloader_drop_last)
            )[-1]
            assert findings.total_steps(args, rows) == counted, (rows, more)


@pytest.mark.parametrize(
    ("flags", "steps", "kept"),
    [
        ([], 1000, 2), ([], 1001, 3), (["--save_steps", "0.1"], 1000, 10), (["--save_strategy", "no"], 1000, 0),
        (["--save_strategy", "epoch", "--num_train_epochs", "3"], None, 3), (["--save_steps", "10", "--save_total_limit", "4"], 1000, 5),
        ([], None, 2),
    ],
)  # fmt: skip
def test_disk(tmp_path, monkeypatch, flags, steps, kept):
    base = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", str(tmp_path / "not" / "yet")]
    training_args = launch.build(launch.read(["--", *base, *flags]))[3]
    for free, fits in ((kept * 2**30, True), (max(kept * 2**30 - 1, 0), False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert findings.checkpoints_kept(training_args, steps) == kept
        found = findings.check_disk(training_args, kept, 2**30)
        assert [finding.grade for finding in found] == ([] if fits or not kept else ["error"])
        assert fits or not kept or f"{kept} checkpoints of 1 GiB do not fit" in found[0].line


def whoami(role: str, **token) -> dict:
    orgs = [{"name": "lab", "roleInOrg": "write"}, {"name": "club", "roleInOrg": "read"}]
    return {"name": "me", "orgs": orgs, "auth": {"accessToken": {"role": role, **token}}}


def scoped(name: str, *permissions: str) -> dict:
    return {"fineGrained": {"scoped": [{"entity": {"type": "user", "name": name}, "permissions": list(permissions)}]}}


def refused_by_hub(status: int) -> HfHubHTTPError:
    return HfHubHTTPError("no", response=SimpleNamespace(status_code=status, headers={}, request=None))


@pytest.mark.parametrize(
    ("who", "model_id", "said"),
    [
        (whoami("write"), None, None),
        (whoami("write"), "lab/model", None),
        (whoami("read"), None, "may only read, not write me/out: .*role write"),
        (whoami("write"), "other/model", "me is not a member of other: --hub_model_id me/NAME"),
        (whoami("write"), "club/model", "me may only read in club"),
        (whoami("fineGrained", **scoped("me", "repo.content.read", "repo.write")), None, None),
        (whoami("fineGrained", **scoped("me", "repo.content.read")), None, "fine-grained token may not write me/out"),
        (whoami("fineGrained", **scoped("me", "repo.write")), "lab/model", "may not write lab/model"),
        (refused_by_hub(401), None, "the Hub refuses the token"),
        (refused_by_hub(503), None, "cannot be reached"),
        (RuntimeError("whatever the HTTP library raises"), None, "cannot be reached"),
    ],
)
def test_hub(collected, monkeypatch, who, model_id, said):
    def asked(self):
        if isinstance(who, Exception):
            raise who
        return who

    monkeypatch.setattr(HfApi, "whoami", asked)
    monkeypatch.setattr(checks, "get_token", lambda: "hf_secret")
    monkeypatch.setattr(checks, "is_offline_mode", lambda: False)
    found = collected(["--push_to_hub", "True", *(["--hub_model_id", model_id] if model_id else [])])
    elsewhere = "advice" if said == "cannot be reached" else "error"
    assert not found_in(found, ".*", "hf_secret") and not any("hf_secret" in finding.line for finding in found)
    if said is None:
        assert_quiet(found)
    else:
        assert len(found_in(found, elsewhere, said)) == 1
        args = SimpleNamespace(push_to_hub=True, hub_model_id=model_id, output_dir="out")
        assert [finding.grade for finding in findings._hub(args, here=True)] == ["error"]


def test_hub_without_a_token_or_offline(collected, monkeypatch):
    monkeypatch.setattr(checks, "get_token", lambda: None)
    monkeypatch.setattr(checks, "is_offline_mode", lambda: True)
    found = collected(["--push_to_hub", "True"])
    assert found_in(found, "error", "needs a login") and found_in(found, "error", "while HF_HUB_OFFLINE is set")
    assert_quiet(collected())


def test_versions(monkeypatch, collected):
    real = importlib.metadata.version
    other = {"torch": "2.0.0", "peft": "0.21.3"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: other.get(name) or real(name))
    assert [finding.what for finding in findings._versions()] == ["torch 2.0.0 is not <3,>=2.13.0"]


class TestHere:
    @pytest.fixture
    def device(self, monkeypatch):
        """A machine with some GPUs of a capability; quantising on them is left to the GPUs."""

        def pretend(count: int, capability=(9, 0)):
            monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
            monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
            monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
            monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
            monkeypatch.setattr(utils, "_flash_attn_installed", lambda: True)

        return pretend

    def test_devices_count_here_only(self, collected, device):
        for count, said in ((0, "no accelerator"), (2, r"8 processes on a machine with 2 device")):
            device(count)
            assert found_in(collected(here=True), "error", said)
            assert_quiet(collected(here=False))
        device(8)
        assert_quiet(collected(here=True))

    def test_one_process(self, collected, device):
        single = {"base": "single_config"}
        device(0)
        assert found_in(collected(keys=single, here=True), "error", "no accelerator on this machine: .*--use_cpu True")
        assert_quiet(collected(["--use_cpu", "True"], single, here=True))
        device(4)
        assert found_in(collected(keys=single, here=True), "error", "one process on a machine with 4 GPUs")
        device(1)
        assert_quiet(collected(keys=single, here=True))

    def test_old_cards(self, collected, device):
        device(8, capability=(7, 5))
        found = collected(["--use_flash_attn", "True"], here=True)
        assert found_in(found, "warning", "--bf16 True on a GPU, of compute capability 7.5: bfloat16 is emulated")
        assert found_in(found, "error", "--use_flash_attn True needs a GPU of compute capability 8.0 and a GPU has 7.5")
        device(8, capability=(8, 0))
        assert_quiet(collected(["--use_flash_attn", "True"], here=True))

    def test_flash_attention_that_is_not_installed(self, collected, device, monkeypatch):
        device(8)
        monkeypatch.setattr(utils, "_flash_attn_installed", lambda: False)
        monkeypatch.setattr(utils, "is_kernels_available", lambda: False)
        assert found_in(collected(["--use_flash_attn", "True"], here=True), "error", "none is installed")

    def test_bitsandbytes(self, collected, monkeypatch):
        flags = [*Q4, "--use_cpu", "True"]
        keys = {"base": "fsdp2_config_cpu"}
        assert_quiet(collected(flags, keys, here=True))
        import bitsandbytes.functional

        def no_kernel(*args, **kwargs):
            raise RuntimeError("no kernel image is available\nfor execution on the device")

        monkeypatch.setattr(bitsandbytes.functional, "quantize_4bit", no_kernel)
        assert found_in(
            collected(flags, keys, here=True), "error", "does not run on this device: no kernel image is available for"
        )
        assert_quiet(collected(flags, keys))
        monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
        assert found_in(collected(flags, keys), "error", "need the package bitsandbytes")

    def test_output_folder(self, collected, tmp_path):
        flags, keys = ["--use_cpu", "True"], {"base": "fsdp2_config_cpu"}
        assert_quiet(collected(flags, keys, here=True))
        (tmp_path / "out").mkdir()
        assert_quiet(collected(flags, keys, here=True))
        (tmp_path / "out" / "run.json").write_text("{}")
        found = collected(flags, keys, here=True)
        assert found_in(found, "warning", r"holds the result of an earlier run \(run.json\): it will be overwritten")
        (tmp_path / "out" / "checkpoint-3").mkdir()
        assert found_in(collected(flags, keys, here=True), "error", "holds checkpoint-3 of an earlier run")
        assert found_in(
            collected([*flags, "--resume_from_checkpoint", "auto"], keys, here=True), "error", "no checkpoint in .* is good"
        )
        assert_quiet(collected(flags, keys, here=False))

    def test_looking_for_a_checkpoint_changes_nothing(self, collected, tmp_path):
        left_half_done = tmp_path / "out" / "_checkpoint-3.replaced"
        left_half_done.mkdir(parents=True)
        collected(["--use_cpu", "True", "--resume_from_checkpoint", "auto"], {"base": "fsdp2_config_cpu"}, here=True)
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["_checkpoint-3.replaced"]


def test_processes_that_were_counted_here(assets):
    base = ["--", "--model_name_or_path", str(assets["bf16"]), *LORA]
    config_of_model = utils.load_config(str(assets["bf16"]))
    for flags, said in (([], True), (["--num_processes", "1"], False)):
        read = launch.read([*flags, *base])
        found = findings.collect(read, *launch.build(read), config_of_model, here=False)
        assert bool(found_in(found, "advice", "process.es. were counted on this machine")) == said


def test_tokens_without_rows(collected, assets):
    size = utils.load_config(str(assets["bf16"])).vocab_size
    assert found_in(collected(tokenizer_size=size + 2), "advice", "2 tokens more than the model")
    assert not found_in(collected(tokenizer_size=size), "advice", "tokens more")


def test_the_arguments_are_left_as_they_were(assets, tmp_path):
    path = config(tmp_path, "fsdp2_config_cpu", mixed_precision="bf16")
    flags = ["--use_cpu", "True", "--resume_from_checkpoint", "False", "--output_dir", str(tmp_path / "out"), *LORA]
    read = launch.read(["--config_file", path, "--", "--model_name_or_path", str(assets["bf16"]), *flags])
    built = launch.build(read)
    before, variables = copy.copy(vars(built[3])), dict(os.environ)
    findings.collect(read, *built, utils.load_config(str(assets["bf16"])), here=True)
    assert vars(built[3]) == before and dict(os.environ) == variables


SHIPPED = [
    ("run_peft_fsdp.sh", "configs/fsdp_config.yaml"),
    ("run_peft_fsdp.sh", "configs/fsdp2_config.yaml"),
    ("run_peft_qlora_fsdp.sh", "configs/fsdp_config_qlora.yaml"),
    ("run_peft_qlora_fsdp.sh", "configs/fsdp2_config_qlora.yaml"),
    ("run_peft_ddp.sh", "configs/ddp_config.yaml"),
    ("run_peft_single.sh", "configs/single_config.yaml"),
]


@pytest.mark.parametrize(("script", "shipped"), SHIPPED)
def test_what_is_shipped_has_no_mistake(assets, tmp_path, monkeypatch, script, shipped):
    """The launcher itself says what it would launch, to an `accelerate` that only prints its arguments."""
    stub = tmp_path / "accelerate"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    env = {**environment(), "PATH": path, "CONFIG": shipped}
    words = subprocess.run(["bash", script], cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    assert words[0] == "launch" and "train.py" in words
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(HfApi, "whoami", lambda self: whoami("write"))
    monkeypatch.setattr(checks, "get_token", lambda: "a token")
    monkeypatch.setattr(checks, "is_offline_mode", lambda: False)
    read = launch.read(words[1:-1])
    assert read.yaml["num_processes"] == read.processes and read.config_file == shipped
    found = findings.collect(read, *launch.build(read), utils.load_config(str(assets["bf16"])), here=False, rows=10**4)
    assert_quiet(found)
