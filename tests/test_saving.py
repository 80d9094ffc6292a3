"""What is written: complete under every layout, loadable, and enough to go on from."""

import json
import re
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import adapter
import weights
from launching import ROOT, free_port, probe, run
from strategies import FSDP1, FSDP2, NO_FSDP, assert_sharded
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


LAYOUT = {
    "base_model.model.q.lora_A.weight": (torch.float32, (2, 3)),
    "base_model.model.q.lora_B.weight": (torch.float32, (3, 2)),
    "base_model.model.experts.0.up.lora_B.weight": (torch.float32, (3, 2)),
}


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (None, {}),
        ("lora_A.weight holds values that are not finite", {"base_model.model.q.lora_A.weight": torch.full((2, 3), torch.nan)}),
        ("lacks base_model.model.q.lora_A.weight", {"base_model.model.q.lora_A.weight": None}),
        ("holds base_model.model._fsdp_wrapped_module.q.lora_A.weight: the name of a wrapper", {"base_model.model._fsdp_wrapped_module.q.lora_A.weight": torch.ones(2, 3)}),
        ("holds base_model.model.q._checkpoint_wrapped_module.lora_A.weight: the name of a wrapper", {"base_model.model.q._checkpoint_wrapped_module.lora_A.weight": torch.ones(2, 3)}),
        ("holds base_model.model.q.base_layer.weight: not trained here", {"base_model.model.q.base_layer.weight": torch.ones(3, 3)}),
        (r"q.lora_A.weight is torch.float32 \[3, 2\], not torch.float32 \[2, 3\]", {"base_model.model.q.lora_A.weight": torch.ones(3, 2)}),
        ("q.lora_A.weight is torch.bfloat16", {"base_model.model.q.lora_A.weight": torch.ones(2, 3).bfloat16()}),
    ],
)  # fmt: skip
def test_what_makes_an_adapter_file_wrong(tmp_path, message, change):
    tensors = {key: torch.ones(shape) for key, (_, shape) in LAYOUT.items()} | change
    path = tmp_path / "adapter_model.safetensors"
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, path)
    wrong = adapter.check_adapter(path, LAYOUT)
    if message is None:
        assert wrong == []
    else:
        assert len(wrong) == 1 and re.search(message, wrong[0]), wrong


def test_which_adapter_weights_are_as_before_training(tmp_path):
    tensors = {key: torch.ones(shape) for key, (_, shape) in LAYOUT.items()}
    tensors["base_model.model.q.lora_A.weight"] = torch.zeros(2, 3)  # not one that starts at zero
    tensors["base_model.model.q.lora_B.weight"] = torch.zeros(3, 2)
    tensors["base_model.model.embed_tokens.lora_embedding_B"] = torch.zeros(3, 2)
    save_file(tensors, tmp_path / "a.safetensors")
    assert adapter.untrained(tmp_path / "a.safetensors") == [
        "base_model.model.embed_tokens.lora_embedding_B", "base_model.model.q.lora_B.weight",
    ]  # fmt: skip


def test_a_file_that_does_not_hold_what_was_in_memory_is_an_error(tmp_path, monkeypatch):
    file = adapter.AdapterFile(tmp_path / "adapter_model.safetensors", LAYOUT)
    put = weights.TensorWriter._put
    # The disk takes the bytes and keeps others.
    monkeypatch.setattr(weights.TensorWriter, "_put", lambda self, data, at: put(self, bytes(len(data)), at))
    for key, (_, shape) in LAYOUT.items():
        file.write(key, torch.ones(shape))
    with pytest.raises(adapter.WrongAdapter, match="does not hold what it has to: .* has other bytes"):
        file.close()


def test_a_file_written_tensor_by_tensor_is_what_the_library_writes(tmp_path):
    tensors = {
        "wide": torch.randn(3, 5).double(), "scalar": torch.tensor(3.0), "half": torch.randn(7).bfloat16(), "empty": torch.empty(0, 4),
        "bytes": torch.arange(3, dtype=torch.uint8), "transposed": torch.randn(4, 6).t(), "mask": torch.tensor([True, False]),
    }  # fmt: skip
    writer = weights.TensorWriter(tmp_path / "a.safetensors", {k: (t.dtype, tuple(t.shape)) for k, t in tensors.items()})
    for key in reversed(tensors):
        writer.write(key, tensors[key])
    writer.close()
    read = load_file(tmp_path / "a.safetensors")
    assert set(read) == set(tensors)
    assert all(read[key].dtype == t.dtype and torch.equal(read[key], t) for key, t in tensors.items())


def test_loading_another_models_adapter_is_an_error():
    model = nn.Linear(2, 2)
    tensors = {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}

    def load(tensors):
        adapter.load_trained(model, {key: tuple(t.shape) for key, t in tensors.items()}, tensors.__getitem__)

    before = model.weight.clone()
    with pytest.raises(adapter.WrongAdapter, match="does not belong to this model"):
        load(tensors | {"weight": torch.zeros(3, 2)})
    with pytest.raises(adapter.WrongAdapter, match="1 are not trained here"):
        load(tensors | {"extra": torch.zeros(1)})
    assert torch.equal(model.weight, before)
    load(tensors)
    assert (model.weight == 1).all()
