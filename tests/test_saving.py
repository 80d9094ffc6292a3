"""What is written: complete under every layout, loadable, and enough to go on from."""

import json
import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import adapter
from launching import ROOT, free_port, probe, run
from strategies import FSDP1, FSDP2, NO_FSDP, assert_sharded, losses
from test_recipes import lora_keys, read_adapter

FULL = {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
FSDP_CHECKPOINTING = {"FSDP_ACTIVATION_CHECKPOINTING": "true"}
OFF = {"FSDP_ACTIVATION_CHECKPOINTING": "false"}


def flags(assets, out, **extra):
    values = {
        "model_name_or_path": assets["fp32"],
        "dataset_name": assets["data"],
        "chat_template_format": "chatml",
        "use_cpu": True,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "output_dir": out,
        "lora_r": 4,
    } | extra
    return [token for key, value in values.items() for token in (f"--{key}", value)]


def test_the_adapter_is_complete_under_every_layout(assets, tmp_path):
    """State-dict types and FSDP's own activation checkpointing: the layouts that lose or empty the adapter elsewhere."""
    layouts = {
        f"fsdp{env['FSDP_VERSION']}-{kind}-{'ac' if checkpointing is FSDP_CHECKPOINTING else 'no'}": {
            **env,
            **(FULL if kind == "full" else {}),
            **checkpointing,
        }
        for env in (FSDP1, FSDP2)
        for kind in ("full", "sharded")
        for checkpointing in (OFF, FSDP_CHECKPOINTING)
    }
    cases = [
        {
            "name": name,
            "env": env,
            "argv": flags(
                assets, tmp_path / name, gradient_checkpointing="-no" in name, save_strategy="steps", save_steps=1
            ),
        }
        for name, env in layouts.items()
    ]
    results = probe(cases, tmp_path / "facts", 2)
    reference = None
    for name in layouts:
        assert_sharded(results[name], int(name[4]))
        final = read_adapter(tmp_path / name)
        for folder in (tmp_path / name, tmp_path / name / "checkpoint-1", tmp_path / name / "checkpoint-2"):
            tensors = read_adapter(folder)
            assert set(tensors) == lora_keys(), f"{folder}: {sorted(set(tensors) ^ lora_keys())[:3]}"
            assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
            assert (folder / "adapter_config.json").is_file() and (folder / "tokenizer.json").is_file()
        assert all((final[key] == value).all() for key, value in read_adapter(tmp_path / name / "checkpoint-2").items())
        assert any((final[key] != value).any() for key, value in read_adapter(tmp_path / name / "checkpoint-1").items())
        reference = reference or final
        for key, tensor in final.items():
            assert torch.allclose(tensor, reference[key], atol=1e-5), f"{name}: {key}"


def test_resuming_goes_on_where_the_checkpoint_stopped(assets, tmp_path):
    """6 steps are 3 steps, a checkpoint and 3 more: the same losses and the same adapter, with dropout."""
    cases = []
    for name, env in (("fsdp1", FSDP1), ("fsdp2", FSDP2), ("ddp", NO_FSDP)):
        common = dict(max_steps=6, save_strategy="steps", lora_dropout=0.1)
        whole, rest = tmp_path / name, tmp_path / f"{name}-rest"
        cases.append({"name": name, "env": env | OFF, "argv": flags(assets, whole, save_steps=3, **common)})
        resume = dict(save_steps=100, resume_from_checkpoint=whole / "checkpoint-3")
        cases.append({"name": f"{name}-rest", "env": env, "argv": flags(assets, rest, **common, **resume)})
    results = probe(cases, tmp_path / "facts", 2)
    for name in ("fsdp1", "fsdp2", "ddp"):
        assert losses(results[f"{name}-rest"][0])[-3:] == losses(results[name][0])[-3:], name
        whole, rest = read_adapter(tmp_path / name), read_adapter(tmp_path / f"{name}-rest")
        assert all(torch.equal(rest[key], tensor) for key, tensor in whole.items()), name


@pytest.mark.parametrize("base", ["tied", "no_chatml"])
def test_added_tokens_survive_an_evaluation_before_the_save(assets, tmp_path, base):
    """The guide evaluates and saves each epoch. Under FSDP2 the evaluation leaves 16-bit copies in the root unit."""
    cases = []
    for name, env in (("fsdp1", FSDP1), ("fsdp2", FSDP2 | {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"})):
        common = dict(
            model_name_or_path=assets[base], splits="train,test", eval_strategy="steps", eval_steps=2, save_strategy="steps",
            max_steps=4, bf16=True, load_best_model_at_end=True,
        )  # fmt: skip
        whole, rest = tmp_path / name, tmp_path / f"{name}-rest"
        cases.append({"name": name, "env": env | OFF, "argv": flags(assets, whole, save_steps=2, **common)})
        resume = dict(save_steps=2, resume_from_checkpoint=whole / "checkpoint-2")
        cases.append({"name": f"{name}-rest", "env": env, "argv": flags(assets, rest, **common, **resume)})
    results = probe(cases, tmp_path / "facts", 2)
    for name, version in (("fsdp1", 1), ("fsdp2", 2)):
        assert_sharded(results[name], version, replicated="trainable_tokens_delta" if version == 1 else None)
        final, rest = read_adapter(tmp_path / name), read_adapter(tmp_path / f"{name}-rest")
        rows = [key for key in final if "trainable_tokens_delta" in key]
        assert len(rows) == (1 if base == "tied" else 2)
        for folder in (tmp_path / name, tmp_path / name / "checkpoint-2", tmp_path / name / "checkpoint-4"):
            assert {tensor.dtype for tensor in read_adapter(folder).values()} == {torch.float32}, folder
        evaluations = {row["step"]: row["eval_loss"] for row in results[name][0]["history"] if "eval_loss" in row}
        best = read_adapter(tmp_path / name / f"checkpoint-{min(evaluations, key=evaluations.get)}")
        assert all(torch.equal(final[key], tensor) for key, tensor in best.items()), "not the best checkpoint"
        assert all(torch.equal(rest[key], tensor) for key, tensor in final.items()), "resumed run differs"


def test_auto_takes_the_last_complete_checkpoint(tmp_path):
    import checks

    for step, files in ((3, ["trainer_state.json", "scheduler.pt", "optimizer.pt"]), (12, ["adapter_model.safetensors"])):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        for name in files:
            (folder / name).write_text("")
    assert checks.last_complete_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-3")
    assert checks.last_complete_checkpoint(str(tmp_path / "none")) is None


def test_training_every_weight_saves_a_whole_model(assets, tmp_path):
    cases = [
        {
            "name": name,
            "env": env | OFF,
            "argv": [*flags(assets, tmp_path / name)[:-2], "--use_peft_lora", "False"],
        }
        for name, env in (("fsdp1", FSDP1), ("fsdp2", FSDP2), ("ddp", NO_FSDP))
    ]
    results = probe(cases, tmp_path / "facts", 2)
    states = {name: AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in results}
    start = AutoModelForCausalLM.from_pretrained(assets["fp32"]).state_dict()
    assert_sharded(results["fsdp1"], 1)
    assert_sharded(results["fsdp2"], 2)
    for name, state in states.items():
        assert set(state) == set(start)
        assert any((state[key] != start[key]).any() for key in start), name
        assert all(torch.allclose(state[key], states["ddp"][key], atol=1e-4) for key in start), name


def test_torchrun_with_the_guides_variables(assets, tmp_path):
    """The Accelerate config is optional: torchrun and the environment the guide names do the same."""
    plan = tmp_path / "cases.json"
    out = tmp_path / "facts"
    out.mkdir()
    case = {"name": "torchrun", "env": {}, "argv": flags(assets, tmp_path / "out")}
    plan.write_text(json.dumps({"cases": [case], "out": out}, default=str))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 2, "--master_port", free_port()]
    guide = {
        **FSDP1,
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_SYNC_MODULE_STATES": "true",
        "FSDP_OFFLOAD_PARAMS": "true",
    }
    result = run([*command, ROOT / "tests" / "probe.py", plan], **guide)
    assert_sharded([json.loads((out / f"torchrun.rank{rank}.json").read_text()) for rank in range(2)], 1)
    for setting in ("fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states", "fsdp_offload_params"):
        assert f"{setting}: true has no effect on CPU" in result.stdout, "a changed setting is not reported"


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("_fsdp_wrapped_module.base_model.model.a._fsdp_wrapped_module.lora_A.default.weight", "base_model.model.a.lora_A.default.weight"),
        ("module.base_model.model.module.weight", "base_model.model.module.weight"),
        ("a._checkpoint_wrapped_module.b._orig_mod.weight", "a.b.weight"),
    ],
)  # fmt: skip
def test_wrapper_names(wrapped, plain):
    assert adapter.unwrapped_name(wrapped) == plain


def test_an_empty_or_damaged_adapter_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "adapter_model.safetensors"
    with pytest.raises(RuntimeError, match="would be empty"):
        adapter.write_adapter(path, {})
    monkeypatch.setattr(adapter, "load_file", lambda file: {"a": torch.zeros(2)})
    with pytest.raises(RuntimeError, match="does not hold the adapter"):
        adapter.write_adapter(path, {"a": torch.ones(2)})
    assert not path.exists()


def test_loading_another_models_adapter_is_an_error():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="does not belong to this model"):
        adapter.load_trained(model, {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)})
    with pytest.raises(ValueError, match="1 are not trained here"):
        adapter.load_trained(model, {"weight": torch.zeros(2, 2), "bias": torch.zeros(2), "extra": torch.zeros(1)})
    adapter.load_trained(model, {"weight": torch.ones(2, 2), "bias": torch.zeros(2)})
    assert (model.weight == 1).all()
