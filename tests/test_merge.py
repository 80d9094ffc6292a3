"""Merging: what the files compute is what base and adapter compute unmerged, in little memory, or one line says why not.

The reference is always PEFT's own unmerged model on the base that `from_pretrained` loads; nothing of `merge.py` is in it.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GPT2Config, MixtralConfig, Qwen3MoeConfig

import checkpoint
import loading
import merge
import merge_check
import tiny
from launching import ROOT, environment

SHAPE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
IDS = dict(bos_token_id=1, eos_token_id=2)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EVERYTHING = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="session")
def bases(assets, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    size = len(tiny.make_tokenizer(False))
    configs = {
        "gpt2": GPT2Config(vocab_size=size, n_embd=32, n_layer=2, n_head=2, n_positions=128, **IDS),
        "mixtral": MixtralConfig(vocab_size=size, intermediate_size=48, num_local_experts=4, **SHAPE),
        "qwen3_moe": Qwen3MoeConfig(
            vocab_size=size,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
            head_dim=8,
            **SHAPE,
        ),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(root / name)
        tiny.make_tokenizer(False).save_pretrained(root / name)
    return {**{name: assets[name] for name in ("fp32", "bf16", "no_chatml", "tied")}, **{n: root / n for n in configs}}


def grow(model, tokenizer) -> list[int]:
    """Add two tokens and, as in training, rows for them that are the mean of the others. Returns their ids."""
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) == rows:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for layer in {model.get_input_embeddings(), model.get_output_embeddings()}:
        weight = layer.weight.data
        weight[rows:] = weight[:rows].double().mean(0).to(weight.dtype)
    return list(range(rows, len(tokenizer)))


def make_adapter(folder: Path, base: Path, added_tokens: bool = False, strength: float = 0.05, **config) -> Path:
    """An adapter with every trained value moved at random, saved by PEFT with its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base)
    if added_tokens:
        ids = grow(model, tokenizer)
        names = ["embed_tokens"] if model.config.tie_word_embeddings else ["embed_tokens", "lm_head"]
        config["trainable_token_indices"] = dict.fromkeys(names, ids)
    peft_model = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **config}))
    generator = torch.Generator().manual_seed(2)
    for parameter in peft_model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape, generator=generator) * strength
    peft_model.save_pretrained(folder, save_embedding_layers=False)
    tokenizer.save_pretrained(folder)
    return folder


def unmerged(base: Path, adapter: Path, **options):
    """Base and adapter as anyone loads them."""
    model = AutoModelForCausalLM.from_pretrained(base, **{"dtype": torch.float32, **options})
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        grow(model, tokenizer)
    return PeftModel.from_pretrained(model, adapter).eval()


@torch.no_grad()
def logits(model) -> torch.Tensor:
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, size, (2, 40), generator=torch.Generator().manual_seed(3))
    ids[0, :4] = torch.arange(size - 4, size)  # the rows of added tokens
    return model(input_ids=ids).logits.float()


def run(adapter: Path, out: Path, *flags: str) -> list[str]:
    lines = []
    merge.merge(merge.parse(["--adapter", str(adapter), "--out", str(out), *flags]), lines.append)
    return lines


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).abs().max() / one.abs().max()).item()


CASES = {
    "lora": ("fp32", dict(target_modules="all-linear")),
    "rslora": ("fp32", dict(target_modules="all-linear", use_rslora=True, r=8)),
    "dora": ("fp32", dict(target_modules="all-linear", use_dora=True)),
    "patterns": (
        "fp32",
        dict(target_modules=["q_proj", "v_proj"], rank_pattern={"v_proj": 2}, alpha_pattern={"q_proj": 32}),
    ),
    "modules to save": ("fp32", dict(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens", "norm"])),
    "tokens": ("no_chatml", dict(target_modules=EVERYTHING, added_tokens=True)),
    "tokens, tied": ("tied", dict(target_modules=EVERYTHING, added_tokens=True)),
    "embedding, tied": ("tied", dict(target_modules=["embed_tokens", "q_proj"])),
    "head saved, tied": ("tied", dict(target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "gpt2": ("gpt2", dict(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)),
    "gpt2, embedding, tied": ("gpt2", dict(target_modules=["c_attn", "wte"], fan_in_fan_out=True)),
    "mixtral attention": ("mixtral", dict(target_modules=["q_proj", "o_proj"])),
    "mixtral experts": ("mixtral", dict(target_modules=["q_proj"], target_parameters=EXPERTS)),
    "qwen3 experts": ("qwen3_moe", dict(target_modules=["v_proj"], target_parameters=EXPERTS)),
    "bias": ("gpt2", dict(target_modules=["c_attn"], fan_in_fan_out=True, lora_bias=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_merged_files_compute_what_the_adapter_does(case, bases, tmp_path):
    name, config = CASES[case]
    adapter = make_adapter(tmp_path / "adapter", bases[name], **config)
    lines = run(adapter, tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    reference = unmerged(bases[name], adapter)
    expected = logits(reference)
    assert relative(expected, logits(merged)) < 5e-6
    with reference.disable_adapter():
        assert relative(expected, logits(reference)) > 0.05, "the adapter does too little to test anything"
    assert any("100.0% of the adapter's effect" in line for line in lines)
    stored = set(load_file(bases[name] / "model.safetensors"))
    untied = {"lm_head.weight"} if case in ("embedding, tied", "head saved, tied", "gpt2, embedding, tied") else set()
    assert set(load_file(tmp_path / "out/model.safetensors")) == stored | untied, "the base's own names"
    assert merged.config.tie_word_embeddings == (name in ("tied", "gpt2") and not untied)
    rows = merged.get_input_embeddings().weight.shape[0]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer) == len(AutoTokenizer.from_pretrained(adapter)) <= rows == merged.config.vocab_size
    if "tokens" in case:
        assert tokenizer.convert_tokens_to_ids("<|im_end|>") == rows - 1


def test_only_the_embeddings_named_in_the_adapter_grow_without_training(bases, tmp_path):
    """A padding token has a row that nobody trained: the mean of the others, as in training."""
    adapter = make_adapter(tmp_path / "adapter", bases["no_chatml"], target_modules=["q_proj"])
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(adapter)
    run(adapter, tmp_path / "out")
    made, base = (load_file(f / "model.safetensors") for f in (tmp_path / "out", bases["no_chatml"]))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(made[name][:-1], base[name])
        assert torch.equal(made[name][-1], base[name].double().mean(0).float())
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["pad_token_id"] == config["vocab_size"] - 1 == len(base["lm_head.weight"])


def test_embeddings_that_peft_saved_whole(bases, tmp_path):
    """PEFT saves both embeddings when a vocabulary was resized; they take the place of the base's."""
    model = AutoModelForCausalLM.from_pretrained(bases["no_chatml"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(bases["no_chatml"])
    grow(model, tokenizer)
    model.get_input_embeddings().weight.data += 0.1
    peft_model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False))
    peft_model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    tokenizer.save_pretrained(tmp_path / "adapter")
    run(tmp_path / "adapter", tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert relative(logits(peft_model.eval()), logits(merged)) < 5e-6


@pytest.mark.parametrize("targets", [["q_proj"], ["embed_tokens"]])
def test_a_tied_weight_that_is_stored_twice(targets, bases, tmp_path):
    """It is written once while it stays tied, and never as it was before the merge."""
    base = tmp_path / "base"
    base.mkdir()
    for file in bases["tied"].iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    adapter = make_adapter(tmp_path / "adapter", base, target_modules=targets)
    run(adapter, tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert relative(logits(unmerged(bases["tied"], adapter)), logits(merged)) < 5e-6
    assert ("lm_head.weight" in load_file(tmp_path / "out/model.safetensors")) == (targets == ["embed_tokens"])


def test_names_of_an_older_checkpoint_are_kept(bases, tmp_path):
    """GPT-2 on the Hub has no prefix, and holds masks that the model no longer reads."""
    base = tmp_path / "base"
    base.mkdir()
    for file in bases["gpt2"].iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(base / "model.safetensors").items()}
    tensors["h.0.attn.bias"] = torch.tril(torch.ones(128, 128)).view(1, 1, 128, 128)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    adapter = make_adapter(tmp_path / "adapter", bases["gpt2"], target_modules=["c_attn", "wte"], fan_in_fan_out=True)
    run(adapter, tmp_path / "out", "--base", str(base))
    assert set(load_file(tmp_path / "out/model.safetensors")) == {*tensors, "lm_head.weight"}
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert relative(logits(unmerged(bases["gpt2"], adapter)), logits(merged)) < 5e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_are_the_float32_merge_rounded_once(dtype, bases, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", bases["bf16"], target_modules="all-linear")
    run(adapter, tmp_path / "float32", "--dtype", "float32")
    lines = run(adapter, tmp_path / dtype, "--dtype", dtype)
    exact, rounded = (load_file(tmp_path / name / "model.safetensors") for name in ("float32", dtype))
    assert exact.keys() == rounded.keys()
    for name, tensor in exact.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor.to(getattr(torch, dtype)), rounded[name]), name
    reference = unmerged(bases["bf16"], adapter).merge_and_unload().state_dict()
    torch.testing.assert_close(exact, {name: reference[name] for name in exact}, rtol=0, atol=1e-6)
    assert json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == dtype
    assert any("not rounded" in line for line in lines)


def test_auto_keeps_the_type_of_each_tensor_and_copies_the_rest_byte_for_byte(bases, tmp_path):
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(bases["bf16"], dtype=torch.bfloat16).save_pretrained(base)
    AutoTokenizer.from_pretrained(bases["bf16"]).save_pretrained(base)
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    adapter = make_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    run(adapter, tmp_path / "out")
    made = load_file(tmp_path / "out/model.safetensors")
    assert {n: t.dtype for n, t in made.items()} == {n: t.dtype for n, t in tensors.items()}
    differing = {n for n in made if not torch.equal(made[n], tensors[n])}
    assert differing == {f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)}


def test_shards_and_their_index(bases, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", bases["mixtral"], target_modules=["q_proj"], target_parameters=EXPERTS)
    run(adapter, tmp_path / "out", "--max_shard_size", "30KB")
    run(adapter, tmp_path / "one")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    made = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in made.values())
    for file in files:
        held = load_file(file)
        assert all(index["weight_map"][name] == file.name for name in held)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 30_000
    whole = load_file(tmp_path / "one/model.safetensors")
    assert whole.keys() == made.keys() and all(torch.equal(whole[name], made[name]) for name in whole)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert relative(logits(unmerged(bases["mixtral"], adapter)), logits(merged)) < 5e-6


def test_any_checkpoint_of_a_run(bases, tmp_path):
    """A checkpoint-N as training writes it: generation configuration, template, manifest, state, and no base on the line."""
    folder = make_adapter(tmp_path / "run/_checkpoint-6.partial", bases["fp32"], target_modules="all-linear")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 2], "pad_token_id": 0}))
    (folder / "training_state.json").write_text(json.dumps({"arguments": {"use_4bit_quantization": False}}))
    partial, folder = folder, tmp_path / "run/checkpoint-6"
    checkpoint.commit(partial, folder)
    lines = run(folder, tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert relative(logits(unmerged(bases["fp32"], folder)), logits(merged)) < 5e-6
    assert merged.generation_config.eos_token_id == [4, 2]
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
    assert not any("4-bit" in line or "not known" in line for line in lines)
    assert lines[-1].startswith(str(tmp_path / "out")) and not list(tmp_path.glob("_*"))

    data = bytearray((folder / "adapter_model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"adapter_model.safetensors is damaged .*manifest.json"):
        run(folder, tmp_path / "other")


ARGUMENTS = {
    "use_4bit_quantization": True,
    "bnb_4bit_quant_type": "nf4",
    "use_nested_quant": True,
    "bnb_4bit_compute_dtype": "float32",
    "bnb_4bit_quant_storage_dtype": "bfloat16",
}


def quantized(base: Path, adapter: Path):
    """The model as bitsandbytes loads it for training, computing in float32 so that little else differs.

    In evaluation on a CPU, bitsandbytes packs the weights anew for a kernel that computes in bfloat16.
    """
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=torch.bfloat16,
    )
    model = unmerged(base, adapter, quantization_config=settings, dtype=torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16 and not hasattr(parameter, "quant_state"):
            parameter.data = parameter.data.float()
    return model.train()


def own_logits(model, adapter: Path) -> torch.Tensor:
    """On the built-in prompts, one at a time."""
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    rows = [tokenizer(text)["input_ids"][: merge_check.MAX_TOKENS] for text in merge.PROMPTS]
    return torch.cat([model(input_ids=torch.tensor([row])).logits[0].detach() for row in rows])


def test_nf4_drift_is_that_of_bitsandbytes(bases, tmp_path):
    """To the three digits that are printed."""
    adapter = make_adapter(tmp_path / "adapter", bases["bf16"], target_modules="all-linear")
    (adapter / "run.json").write_text(json.dumps({"arguments": ARGUMENTS}))
    row = next(line for line in run(adapter, tmp_path / "out") if line.startswith("4-bit base"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    on_4bit = own_logits(quantized(bases["bf16"], adapter), adapter)
    difference = (on_4bit - own_logits(merged, adapter)).abs()
    printed = [float(value) for value in row.split()[-5:-3]]
    assert printed == pytest.approx([difference.max().item(), difference.mean().item()], rel=0.006)
    assert difference.max() > 0.01, "4 bits do too little here to test anything"

    # Merged into what the 4 bits stand for, there is no drift but rounding.
    run(adapter, tmp_path / "nf4", "--base_weights", "nf4", "--dtype", "float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "nf4", dtype=torch.float32)
    assert relative(on_4bit, own_logits(merged, adapter)) < 1e-5


def test_nf4_base_of_conv1d_layers(bases, tmp_path):
    """GPT-2 keeps its weights transposed, and bitsandbytes does not."""
    adapter = make_adapter(tmp_path / "adapter", bases["gpt2"], target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    (adapter / "run.json").write_text(json.dumps({"arguments": ARGUMENTS}))
    run(adapter, tmp_path / "nf4", "--base_weights", "nf4", "--dtype", "float32")
    model = quantized(bases["gpt2"], adapter)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "nf4", dtype=torch.float32)
    assert relative(own_logits(model, adapter), own_logits(merged, adapter)) < 1e-5


def test_4_bits_are_expanded_into_the_type_that_training_computed_in(bases, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", bases["bf16"], target_modules=["q_proj"])
    written = {"arguments": {**ARGUMENTS, "bnb_4bit_compute_dtype": "bfloat16"}}
    (adapter / "run.json").write_text(json.dumps(written))
    run(adapter, tmp_path / "nf4", "--base_weights", "nf4", "--dtype", "float32")
    layer = quantized(bases["bf16"], adapter).get_base_model().model.layers[0].self_attn.k_proj
    layer.compute_dtype = torch.bfloat16
    rows = layer(torch.eye(64).bfloat16()[None])[0].T
    made = load_file(tmp_path / "nf4/model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(made, rows.float())


def test_what_is_known_of_the_training(bases, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", bases["bf16"], target_modules=["q_proj"])
    lines = run(adapter, tmp_path / "unknown")
    assert any("--trained_in_4bit" in line for line in lines) and not any(line.startswith("4-bit") for line in lines)
    stated = run(adapter, tmp_path / "stated", "--trained_in_4bit", "nf4")
    assert any(line.startswith("4-bit base") for line in stated)
    assert not any(line.startswith("4-bit") for line in run(adapter, tmp_path / "no", "--trained_in_4bit", "no"))
    with pytest.raises(ValueError, match="--trained_in_4bit nf4"):
        run(adapter, tmp_path / "x", "--base_weights", "nf4")


def test_a_base_that_is_stored_in_4_bits_becomes_16_bit(bases, tmp_path):
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(bases["bf16"], quantization_config=settings, dtype=torch.bfloat16).save_pretrained(
        base
    )
    adapter = make_adapter(tmp_path / "adapter", bases["bf16"], target_modules="all-linear")
    run(adapter, tmp_path / "out", "--base", str(base))
    run(adapter, tmp_path / "float32", "--base", str(base), "--dtype", "float32")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(tmp_path / "out/model.safetensors").values()} == {torch.bfloat16}
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), adapter).train()
    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.float32)
    assert relative(own_logits(model, adapter), own_logits(merged, adapter)) < 1e-5


# --- The check itself has to fail when the merge is wrong ----------------------------------------------------------------

value = merge.Merged.value


def not_applied(self, owner, dtype=torch.float32):
    return self.base.value(owner, self.expanded).to(dtype)


def applied_twice(self, owner, dtype=torch.float32):
    return (2 * value(self, owner).float() - self.base.value(owner, self.expanded)).to(dtype)


def wrongly_scaled(self, owner, dtype=torch.float32):
    base = self.base.value(owner, self.expanded)
    return (base + 0.99 * (value(self, owner) - base)).to(dtype)


def one_layer_missing(self, owner, dtype=torch.float32):
    missing = self.base.names[owner] == "model.layers.1.self_attn.o_proj.weight"
    return (self.base.value(owner, self.expanded) if missing else value(self, owner)).to(dtype)


@pytest.mark.parametrize("base", ["fp32", "bf16"])
@pytest.mark.parametrize("wrong", [not_applied, applied_twice, wrongly_scaled, one_layer_missing])
def test_a_wrong_merge_is_refused(wrong, base, bases, tmp_path, monkeypatch):
    adapter = make_adapter(tmp_path / "adapter", bases[base], target_modules="all-linear", strength=0.02)
    monkeypatch.setattr(merge.Merged, "value", wrong)
    with pytest.raises(ValueError, match="the merged model is not the adapter on its base"):
        run(adapter, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"], "nothing is put in place and nothing is left"


@pytest.mark.parametrize("base", ["bf16", "mixtral"])
def test_files_that_are_not_what_was_merged_are_refused(base, bases, tmp_path, monkeypatch):
    """A bit that the disk flips in 16-bit files is smaller than rounding in the logits, and is found all the same."""
    adapter = make_adapter(tmp_path / "adapter", bases[base], target_modules=["q_proj"])
    write = merge.write_weights

    def damage(folder, parts, files):
        write(folder, parts, files)
        path = folder / "model.safetensors"
        tensors = load_file(path)
        name = next(name for name in tensors if name.endswith(("experts.3.w2.weight", "1.mlp.down_proj.weight")))
        tensors[name].view(torch.int16)[-1, -1] ^= 1
        save_file(tensors, path, metadata={"format": "pt"})

    monkeypatch.setattr(merge, "write_weights", damage)
    with pytest.raises(ValueError, match="is not what was merged"):
        run(adapter, tmp_path / "out", "--dtype", "bfloat16")
    assert not (tmp_path / "out").exists()


def test_a_weak_adapter_lost_in_rounding_is_a_warning(bases, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", bases["bf16"], target_modules=["q_proj"], strength=0.001)
    lines = run(adapter, tmp_path / "out")
    assert any(line.startswith("warning: rounding changed") and "--dtype float32" in line for line in lines)
    assert not any("warning" in line for line in run(adapter, tmp_path / "float32", "--dtype", "float32"))


# --- Memory --------------------------------------------------------------------------------------------------------------

PEAK = """
import sys, threading, time
import merge, loading, torch
cpu, peak, done = torch.device("cpu"), [0], []
def watch():
    while not done:
        peak[0] = max(peak[0], loading.memory_held(cpu))
        time.sleep(0.001)
before = loading.memory_held(cpu)
thread = threading.Thread(target=watch)
thread.start()
merge.merge(merge.parse(sys.argv[1:]), lambda line: None)
done.append(1)
thread.join()
print(peak[0] - before)
"""


def test_memory_is_that_of_a_few_tensors(tmp_path):
    """0.24B parameters, 480 MiB in bfloat16, of which the largest tensor is 16 MiB; with and without the check."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=18,
        num_attention_heads=8,
        num_key_value_heads=8,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    config.save_pretrained(base)
    tiny.make_tokenizer(False).save_pretrained(base)
    model = loading.meta_model(config, dtype=torch.bfloat16)
    layout = {name: (torch.bfloat16, tuple(parameter.shape)) for name, parameter in model.named_parameters()}
    writer = merge.weights.TensorWriter(base / "model.safetensors", layout)
    noise = (torch.randn(1 << 20) * 0.02).bfloat16()
    for name, (dtype, shape) in layout.items():
        size = torch.Size(shape).numel()
        drawn = noise.repeat(-(-size // len(noise)))[:size].view(shape)
        writer.write(name, torch.ones(shape, dtype=dtype) if "norm" in name else drawn)
    writer.close()
    peft_model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    peft_model.peft_config["default"].base_model_name_or_path = str(base)
    peft_model.peft_config["default"].save_pretrained(adapter)
    trained = {n.replace(".default", ""): p for n, p in peft_model.named_parameters() if p.requires_grad}
    save_file({name: torch.randn(p.shape) * 0.02 for name, p in trained.items()}, adapter / "adapter_model.safetensors")
    (tmp_path / "prompts.txt").write_text("please refund my order\n")
    stored = (base / "model.safetensors").stat().st_size
    for out, flags in (("a", ["--verify", "False"]), ("b", ["--prompts", str(tmp_path / "prompts.txt")])):
        command = [sys.executable, "-c", PEAK, "--adapter", adapter, "--out", tmp_path / out, *flags]
        result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-2000:]
        assert int(result.stdout) < 0.5 * stored, f"{int(result.stdout) >> 20} MiB of {stored >> 20} MiB"


# --- Mistakes ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(bases, tmp_path_factory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("good") / "adapter", bases["fp32"], target_modules=["q_proj"])


def edited(good: Path, folder: Path, **changes) -> Path:
    """A copy of the adapter with values of its adapter_config.json changed."""
    folder.mkdir()
    for file in good.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((good / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    return folder


def mistakes(good: Path, tmp: Path, bases) -> dict[str, tuple[list[str], str]]:
    """By name: the flags, and what the line has to say."""
    (tmp / "full").mkdir()
    (tmp / "full/theirs").touch()
    (tmp / "file").touch()
    (tmp / "empty.txt").write_text("\n \n")
    (tmp / "_taken.partial").mkdir()
    (tmp / "_taken.partial/theirs").touch()
    cut = edited(good, tmp / "cut")
    (cut / "adapter_model.safetensors").write_bytes((good / "adapter_model.safetensors").read_bytes()[:-50])
    broken = edited(good, tmp / "broken")
    (broken / "adapter_config.json").write_text('{"peft_type": ')
    pickled = edited(good, tmp / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    extra = edited(good, tmp / "extra")
    tensors = load_file(good / "adapter_model.safetensors")
    name = next(iter(tensors))
    save_file(tensors | {name.replace("layers.0", "layers.7"): tensors[name].clone()}, extra / "adapter_model.safetensors")
    lacking = edited(good, tmp / "lacking")
    save_file({k: v for k, v in tensors.items() if k != name}, lacking / "adapter_model.safetensors")
    nan = edited(good, tmp / "nan")
    save_file({k: v * torch.nan for k, v in tensors.items()}, nan / "adapter_model.safetensors")
    loha = LoHaConfig(base_model_name_or_path=str(bases["fp32"]), target_modules=["q_proj"])
    loha.save_pretrained(tmp / "loha")
    cut_base = tmp / "cut_base"
    cut_base.mkdir()
    for file in bases["fp32"].iterdir():
        (cut_base / file.name).write_bytes(file.read_bytes())
    (cut_base / "model.safetensors").write_bytes((bases["fp32"] / "model.safetensors").read_bytes()[:-10])
    wide = tiny.make_model(tmp / "wide", chatml=True, hidden=96)
    fp8 = json.loads((bases["fp32"] / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp / "fp8").mkdir()
    (tmp / "fp8/config.json").write_text(json.dumps(fp8))
    a, here = ["--adapter", str(good)], str(tmp)
    o = ["--out", f"{here}/out"]
    return {
        "no adapter": (["--adapter", f"{here}/none", *o], "--adapter .*none is not a folder"),
        "not one": (["--adapter", here, *o], r"holds no adapter_config.json: give one of its folders"),
        "whole model": (["--adapter", str(bases["fp32"]), *o], r"holds a whole model \(model.safetensors\)"),
        "cut": (["--adapter", str(cut), *o], "adapter_model.safetensors is truncated or damaged"),
        "broken": (["--adapter", str(broken), *o], "adapter_config.json cannot be read"),
        "pickle": (["--adapter", str(pickled), *o], "only a pickle"),
        "nan": (["--adapter", str(nan), *o], "values that are not finite"),
        "other names": ([*a, *o, "--base", str(bases["gpt2"])], "does not fit the base .*gpt2.*q_proj.*--base"),
        "other shapes": ([*a, *o, "--base", str(wide)], "does not fit the base .*wide.*size mismatch.*--base"),
        "extra": (["--adapter", str(extra), *o], "1 have no place.*layers.7"),
        "lacking": (["--adapter", str(lacking), *o], "1 tensors are missing.*layers.0"),
        "base missing": ([*a, *o, "--base", f"{here}/nobase"], r"no base model at .*nobase \(--base\)"),
        "base cut": ([*a, *o, "--base", str(cut_base)], "cut_base/model.safetensors is truncated or damaged"),
        "base fp8": ([*a, *o, "--base", f"{here}/fp8"], r"is quantised \(fp8\): merge into its 16-bit original"),
        "out full": ([*a, "--out", f"{here}/full"], "--out .*full exists and is not empty"),
        "out file": ([*a, "--out", f"{here}/file"], "--out .*file exists and is not empty"),
        "out below file": ([*a, "--out", f"{here}/file/out"], "--out .* is below .*file, which is a file"),
        "partial theirs": ([*a, "--out", f"{here}/taken"], "_taken.partial.* is not from a merge"),
        "dtype": ([*a, *o, "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        "unknown flag": ([*a, *o, "--dtpye", "float32"], "unknown argument --dtpye; did you mean dtype?"),
        "no out": (a, "--out is required"),
        "shard size": ([*a, *o, "--max_shard_size", "5 apples"], "--max_shard_size '5 apples' is not a size"),
        "prompts missing": ([*a, *o, "--prompts", f"{here}/none.txt"], "--prompts .*none.txt cannot be read"),
        "prompts empty": ([*a, *o, "--prompts", f"{here}/empty.txt"], "--prompts .*empty.txt holds no prompt"),
        "prompts unused": ([*a, *o, "--verify", "False", "--prompts", f"{here}/empty.txt"], "no effect with --verify False"),
        "drift unused": ([*a, *o, "--verify", "False", "--trained_in_4bit", "nf4"], "no effect with --verify False"),
        "revision unused": ([*a, *o, "--revision", "main"], "--revision main has no effect: the base .* is a local folder"),
        "loha": (["--adapter", f"{here}/loha", *o], "describes a LOHA adapter: only LORA"),
        "task": (["--adapter", str(edited(good, tmp / "task", task_type="SEQ_CLS")), *o], "task_type SEQ_CLS"),
        "pissa": (["--adapter", str(edited(good, tmp / "pissa", init_lora_weights="pissa")), *o], "'pissa', which changes"),
        "alora": (["--adapter", str(edited(good, tmp / "al", alora_invocation_tokens=[1])), *o], "alora_invocation_tokens"),
        "no base": (["--adapter", str(edited(good, tmp / "nob", base_model_name_or_path=None)), *o], "names no base model"),
    }


def test_every_mistake_is_one_line_before_a_weight_is_read(good, bases, tmp_path, monkeypatch):
    monkeypatch.setattr(merge, "write_weights", lambda *_: pytest.fail("weights were written"))
    table = mistakes(good, tmp_path, bases)
    before = sorted(path for path in tmp_path.rglob("*"))
    failures = []
    for name, (flags, says) in table.items():
        with pytest.raises(ValueError, match=says) as caught:
            merge.merge(merge.parse(flags))
        if len(" ".join(str(caught.value).split())) > 600:
            failures.append(name)
    assert not failures, "too long for a line"
    assert sorted(path for path in tmp_path.rglob("*")) == before, "nothing is written, and nothing is touched"


def test_the_readmes_commands_parse():
    commands = re.findall(r"^python merge.py (.*)$", (ROOT / "README.md").read_text(), flags=re.M)
    assert len(commands) == 2 and commands[1] == "--help"
    assert merge.parse(shlex.split(commands[0])).verify


def test_a_mistake_ends_the_command(good, tmp_path):
    command = [sys.executable, "merge.py", "--adapter", good, "--out", tmp_path / "out", "--prompts", tmp_path / "none"]
    result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    lines = [line for line in result.stderr.splitlines() if "gemm_4bit" not in line]
    assert result.returncode == 1 and len(lines) == 1 and lines[0].startswith("error: --prompts"), result.stderr


def test_a_leftover_of_a_killed_merge_is_replaced_and_an_empty_out_is_used(good, tmp_path):
    (tmp_path / "_out.partial").mkdir()
    (tmp_path / "_out.partial" / merge.UNFINISHED).touch()
    (tmp_path / "_out.partial/old").touch()
    (tmp_path / "out").mkdir()
    run(good, tmp_path / "out", "--verify", "False")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not (tmp_path / "out/old").exists()
    assert not (tmp_path / "out" / merge.UNFINISHED).exists()
