"""Loading under FSDP: bit for bit what one process loads, no more memory than the shard, and one line when it cannot."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from launching import probe
from strategies import FSDP1, FSDP2, NO_FSDP, assert_sharded

SHARED = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256)
GQA = dict(num_key_value_heads=2)
MOE = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1)
ARCHITECTURES = {
    "llama": SHARED | GQA | dict(mlp_bias=True, attention_bias=True),
    "mistral": SHARED | GQA,
    "qwen2": SHARED | GQA,  # has biases
    "qwen3": SHARED | GQA | dict(head_dim=16),
    "gemma2": SHARED | GQA | dict(head_dim=16),  # tied, scales its embedding
    "phi": SHARED | GQA,  # the head has a bias
    "phi3": SHARED | GQA | dict(pad_token_id=0),
    "mixtral": SHARED | GQA | MOE,  # experts are stored one by one and loaded as one parameter
    "qwen3_moe": SHARED | GQA | MOE | dict(head_dim=16),
    "gpt2": dict(n_embd=64, n_layer=2, n_head=4, n_positions=256),  # Conv1D
}


def make(folder, kind, dtype=torch.float32, vocabulary=None, **extra):
    tokenizer = tiny.make_tokenizer(chatml=True)
    tokenizer.save_pretrained(folder)
    config = AutoConfig.for_model(
        kind, **ARCHITECTURES[kind] | dict(vocab_size=vocabulary or len(tokenizer), bos_token_id=1, eos_token_id=2) | extra
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    # Small shards, so that the index and several files are read; no value is zero or one, so that none can be confused.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    model.save_pretrained(folder, max_shard_size="60KB")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    made = {f"{kind}-fp32": make(root / kind, kind) for kind in ARCHITECTURES}
    made["llama-bf16"] = make(root / "llama-bf16", "llama", torch.bfloat16)
    made["mixtral-bf16"] = make(root / "mixtral-bf16", "mixtral", torch.bfloat16)
    return made


def argv(model, assets, out, **extra):
    values = {
        "model_name_or_path": model,
        "dataset_name": assets["data"],
        "chat_template_format": "chatml",
        "use_cpu": True,
        "bf16": False,
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "output_dir": out,
        "lora_r": 5,
        "seed": 11,
    } | extra
    return [token for key, value in values.items() if value is not None for token in (f"--{key}", value)]


NF4 = {"use_4bit_quantization": True}
FP32_STORAGE = {"bnb_4bit_quant_storage_dtype": "float32", "bnb_4bit_compute_dtype": "float32"}


def cases_of(models, assets, tmp_path):
    """name -> (model, flags): every architecture plain, several in 4 bits, DoRA, added tokens, full fine-tuning."""
    cases = {name: (model, {}) for name, model in models.items()}
    cases |= {
        f"{name}-nf4": (models[name], NF4 | FP32_STORAGE)
        for name in ("llama-fp32", "qwen2-fp32", "phi3-fp32", "mixtral-fp32", "gpt2-fp32")
    }
    cases["llama-bf16-nf4"] = (models["llama-bf16"], NF4)
    cases["llama-bf16-fp4"] = (models["llama-bf16"], NF4 | {"bnb_4bit_quant_type": "fp4", "use_nested_quant": False})
    cases["llama-as-bf16"] = (models["llama-fp32"], {"dtype": "bfloat16"})
    cases["llama-dora"] = (models["llama-fp32"], {"use_dora": True})
    cases["llama-bf16-dora-nf4"] = (models["llama-bf16"], NF4 | {"use_dora": True})
    cases["gpt2-dora"] = (models["gpt2-fp32"], {"use_dora": True})
    cases["added"] = (assets["no_chatml"], {})
    cases["added-tied"] = (assets["tied"], {})
    cases["added-nf4"] = (assets["no_chatml"], NF4 | FP32_STORAGE)
    cases["full"] = (models["qwen2-fp32"], {"use_peft_lora": False, "lora_r": None})
    return {name: (model, flags) for name, (model, flags) in cases.items()}


def same(reference: dict, loaded: dict, name: str) -> None:
    assert set(reference) == set(loaded), (name, sorted(set(reference) ^ set(loaded))[:6])
    wrong = [
        key for key, tensor in reference.items() if not torch.equal(tensor.view(torch.uint8), loaded[key].view(torch.uint8))
    ]
    assert not wrong, f"{name}: {len(wrong)} of {len(reference)} differ: {wrong[:6]}"


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_loaded_is_what_one_process_loads(models, assets, tmp_path, ranks):
    """Every weight, LoRA's and DoRA's initial values, 4-bit bytes and statistics, buffers and logits: bit for bit."""
    wanted = cases_of(models, assets, tmp_path)
    if ranks == 3:  # shards that end inside rows, and ranks that hold nothing of a tensor
        wanted = {name: wanted[name] for name in ("llama-fp32", "llama-bf16-nf4", "mixtral-bf16", "added-tied", "gpt2-dora")}

    def case(name, suffix, env):
        model, flags = wanted[name]
        return {"name": name + suffix, "env": env, "dump": True, "argv": argv(model, assets, tmp_path / "o", **flags)}

    probe([case(name, "", NO_FSDP) for name in wanted], tmp_path / "one", 1)
    sharded = [case(name, suffix, env) for name in wanted for suffix, env in (("-fsdp1", FSDP1), ("-fsdp2", FSDP2))]
    facts = probe(sharded, tmp_path / "many", ranks)
    for name in wanted:
        reference = load_file(tmp_path / "one" / f"{name}.safetensors")
        assert "logits" in reference and reference["logits"].isfinite().all()
        for version in (1, 2):
            full = f"{name}-fsdp{version}"
            assert_sharded(facts[full], version, replicated="trainable_tokens_delta" if version == 1 else None)
            same(reference, load_file(tmp_path / "many" / f"{full}.safetensors"), full)
