"""Loading under FSDP: bit for bit what one process loads, no more memory than the shard, and one line when it cannot."""

import errno
import importlib.util
import json
import re
import shutil
import sys
import time
from contextlib import nullcontext

import bitsandbytes
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

import arguments
import checks
import loading
import peft_fsdp
import tiny
import utils
import weights
from launching import ROOT, accelerate, probe, run
from strategies import FSDP1, FSDP2, NO_FSDP, assert_sharded

_spec = importlib.util.spec_from_file_location("loading_benchmark", ROOT / "benchmarks" / "loading.py")
loading_benchmark = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(loading_benchmark)

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


def make(folder, kind, dtype=torch.float32, chatml=True):
    tokenizer = tiny.make_tokenizer(chatml)
    tokenizer.save_pretrained(folder)
    config = AutoConfig.for_model(
        kind, **ARCHITECTURES[kind] | dict(vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=2)
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
    made["no-chatml-bf16"] = make(root / "no-chatml-bf16", "llama", torch.bfloat16, chatml=False)
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
    for name in cases:
        if "moe" in name or "mixtral" in name:
            cases[f"{name}"] = (models[name], {"lora_target_modules": "q_proj,k_proj,v_proj,o_proj"})
    cases["mixtral-experts"] = (models["mixtral-fp32"], {"lora_dropout": 0.0})
    cases |= {
        f"{name}-nf4": (models[name], NF4 | FP32_STORAGE) for name in ("llama-fp32", "qwen2-fp32", "phi3-fp32", "gpt2-fp32")
    }
    cases["mixtral-fp32-nf4"] = (models["mixtral-fp32"], NF4 | FP32_STORAGE | cases["mixtral-fp32"][1])
    cases["llama-bf16-nf4"] = (models["llama-bf16"], NF4)
    cases["llama-bf16-fp4"] = (models["llama-bf16"], NF4 | {"bnb_4bit_quant_type": "fp4", "use_nested_quant": False})
    cases["llama-as-bf16"] = (models["llama-fp32"], {"dtype": "bfloat16"})
    cases["llama-dora"] = (models["llama-fp32"], {"use_dora": True})
    cases["llama-bf16-dora-nf4"] = (models["llama-bf16"], NF4 | {"use_dora": True, "bf16": True})
    cases["gpt2-dora"] = (models["gpt2-fp32"], {"use_dora": True})
    cases["added"] = (assets["no_chatml"], {})
    cases["added-tied"] = (assets["tied"], {})
    cases["added-as-bf16"] = (assets["no_chatml"], {"dtype": "bfloat16"})
    cases["added-as-fp32"] = (models["no-chatml-bf16"], {"dtype": "float32"})
    cases["added-nf4"] = (assets["no_chatml"], NF4)
    cases["full"] = (models["qwen2-fp32"], {"use_peft_lora": False, "lora_r": None})
    return cases


def under(name):
    # LoRA on fused experts is refused under FSDP1.
    return [("-fsdp2", FSDP2)] if name == "mixtral-experts" else [("-fsdp1", FSDP1), ("-fsdp2", FSDP2)]


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
        # FSDP1 gathers QDoRA in bfloat16 mixed precision, so only its weights can be compared with those of one process.
        dump = "weights" if name == "llama-bf16-dora-nf4" else "logits"
        return {"name": name + suffix, "env": env, "dump": dump, "argv": argv(model, assets, tmp_path / "o", **flags)}

    probe([case(name, "", NO_FSDP) for name in wanted], tmp_path / "one", 1)
    sharded = [case(name, suffix, env) for name in wanted for suffix, env in under(name)]
    facts = probe(sharded, tmp_path / "many", ranks)
    for name in wanted:
        reference = load_file(tmp_path / "one" / f"{name}.safetensors")
        assert ("logits" in reference) == (name != "llama-bf16-dora-nf4")
        assert "logits" not in reference or reference["logits"].isfinite().all()
        for version in [int(env["FSDP_VERSION"]) for _, env in under(name)]:
            full = f"{name}-fsdp{version}"
            assert_sharded(facts[full], version, replicated="trainable_tokens_delta" if version == 1 else None)
            same(reference, load_file(tmp_path / "many" / f"{full}.safetensors"), full)


def test_a_checkpoint_that_is_already_in_4_bits(models, assets, tmp_path):
    """As it is published, packed in uint8: sliced, not dequantised; the same bytes as in one process."""
    folder = tmp_path / "stored"
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    AutoModelForCausalLM.from_pretrained(
        models["llama-bf16"], quantization_config=settings, dtype=torch.bfloat16
    ).save_pretrained(folder, max_shard_size="60KB")
    tiny.make_tokenizer(chatml=True).save_pretrained(folder)
    assert weights.Checkpoint(str(folder)).tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8

    def case(name, env, model, **extra):
        return {"name": name, "env": env, "dump": "logits", "argv": argv(model, assets, tmp_path / "o", **NF4 | extra)}

    probe([case("one", NO_FSDP, folder), case("made", NO_FSDP, models["llama-bf16"])], tmp_path / "one", 1)
    two = [case("fsdp1", FSDP1, folder), case("fsdp2", FSDP2, folder), case("dora", FSDP2, folder, use_dora=True)]
    facts = probe(two, tmp_path / "many", 2)
    reference = load_file(tmp_path / "one" / "one.safetensors")
    made = load_file(tmp_path / "one" / "made.safetensors")
    # The settings that say how it is packed differ, the weights and their statistics do not.
    same(
        {k: v for k, v in made.items() if "quant_state" not in k},
        {k: v for k, v in reference.items() if "quant_state" not in k},
        "made",
    )
    for name, version in (("fsdp1", 1), ("fsdp2", 2)):
        assert_sharded(facts[name], version)
        same(reference, load_file(tmp_path / "many" / f"{name}.safetensors"), name)
    assert_sharded(facts["dora"], 2)


def test_quantising_in_blocks_is_quantising_at_once():
    """Sizes below, at and beyond a block of the loader's, also with values that one scale cannot hold."""
    for kind, nested, dtype in (("nf4", True, torch.bfloat16), ("fp4", False, torch.float32), ("nf4", False, torch.float16)):
        for shape in ((64, 64), (1024, 1024), (1536, 1024), (1030, 2048)):
            values = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
            whole, state = bitsandbytes.functional.quantize_4bit(
                values.to(dtype), compress_statistics=nested, quant_type=kind, quant_storage=torch.bfloat16
            )
            like = bitsandbytes.nn.Params4bit(
                torch.empty(0), quant_type=kind, compress_statistics=nested, quant_storage=torch.bfloat16
            )
            packed, ours = loading.quantize_4bit(values.reshape(-1), values.shape, dtype, torch.device("cpu"), like)
            assert torch.equal(packed.view(torch.uint8), whole.view(torch.uint8)), (kind, shape)
            theirs, ours = state.as_dict(), ours.as_dict()
            assert set(theirs) == set(ours)
            for key, value in theirs.items():
                equal = torch.equal(ours[key], value) if isinstance(value, torch.Tensor) else ours[key] == value
                assert equal, (kind, nested, shape, key)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_a_rank_needs_its_shard_and_one_tensor(tmp_path, strategy):
    """Measured from the kernel's counters, on 2 ranks: 16-bit and NF4, and what from_pretrained needs beside it."""
    folder = [
        "--folder",
        ROOT / "outputs" / "benchmarks",
        "--shape",
        "0.1b",
        "--strategy",
        strategy,
        "--json",
        tmp_path / "out.json",
    ]
    run([sys.executable, "benchmarks/loading.py", *folder, "--ranks", "2", "--sides", "ours"])
    for row in json.loads((tmp_path / "out.json").read_text()):
        for fact in row["runs"][0]:
            limit = 1.15 * (fact["shard"] + fact["largest"])
            assert fact["shard"] > 2**25 and fact["peak"] > 0.9 * fact["shard"], fact  # what is measured is real
            assert fact["peak"] <= limit, f"{row['case']}: {fact['peak'] / limit:.2f} of what it may be"


def test_offloaded_shards_are_filled(tmp_path):
    """The wrapping that parameter offload uses, on a CPU: FSDP1's and FSDP2's own, without pinned memory."""
    for strategy in ("fsdp2", "fsdp1"):
        flags = ["--shape", "tiny", "--ranks", "2", "--sides", "ours", "--cases", "nf4", "--offload", "--folder", tmp_path]
        run([sys.executable, "benchmarks/loading.py", *flags, "--strategy", strategy])


# Bad checkpoints: what is done to a good one, and what the one line says.


def truncate(folder):
    file = sorted(folder.glob("model-*"))[1]
    file.write_bytes(file.read_bytes()[:-100])


def scramble(folder):
    file = sorted(folder.glob("model-*"))[0]
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])


def edit_json(name, change):
    def edit(folder):
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edit


def drop_tensor(folder):
    file = sorted(folder.glob("model-*"))[0]
    tensors = load_file(file)
    lost = tensors.popitem()[0]
    save_file(tensors, file)
    edit_json("model.safetensors.index.json", lambda index: index["weight_map"].pop(lost))(folder)


def add_tensor(folder):
    file = sorted(folder.glob("model-*"))[0]
    save_file(load_file(file) | {"model.layers.0.surprise.weight": torch.ones(2)}, file)


def as_if_4bit(folder):
    file = sorted(folder.glob("model-*"))[0]
    tensors = load_file(file)
    name = next(key for key in tensors if key.endswith(".weight"))
    save_file(tensors | {f"{name}.absmax": torch.ones(2)}, file)


def pickled(folder):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"not read")


BAD = {
    "truncated": (truncate, r"model-00002-of-\d+.safetensors is truncated or damaged .*copy it again"),
    "damaged": (scramble, r"model-00001-of-\d+.safetensors is truncated or damaged"),
    "missing shard": (lambda f: sorted(f.glob("model-*"))[0].unlink(), r"index.json names model-00001-of-\d+.safetensors, which does not"),
    "index of another version": (
        edit_json("model.safetensors.index.json", lambda i: i["weight_map"].update({"model.old.weight": i["weight_map"]["lm_head.weight"]})),
        r"names 1 tensors that its files do not hold \(first: model.old.weight",
    ),
    "damaged index": (lambda f: (f / "model.safetensors.index.json").write_text("{"), r"index.json is damaged"),
    "index of numbers": (edit_json("model.safetensors.index.json", lambda i: i["weight_map"].update(x=5)), r"index.json is damaged"),
    "index that leaves": (
        edit_json("model.safetensors.index.json", lambda i: i["weight_map"].update(x="../x.safetensors")), r"not the plain name"
    ),
    "4 bits unsaid": (as_if_4bit, r"stores .* in 4 bits, but config.json has no quantization_config"),
    "generation config": (lambda f: (f / "generation_config.json").write_text("[1]"), r"generation_config.json is damaged"),
    "missing weight": (drop_tensor, r"lacks 1 weights that its config.json asks for \(.*weight\)"),
    "unexpected weight": (add_tensor, r"holds 1 weights that its config.json has no place for \(model.layers.0.surprise.weight\)"),
    "another config": (edit_json("config.json", lambda c: c.update(intermediate_size=128)), r"as \[64, 96\], but config.json asks for \[64, 128\]"),
    "more layers": (edit_json("config.json", lambda c: c.update(num_hidden_layers=3)), r"lacks 9 weights"),
    "ties what differs": (edit_json("config.json", lambda c: c.update(tie_word_embeddings=True)), r"with different values, .*tie_word_embeddings"),
    "pickles": (pickled, r"pytorch_model.bin.*run code when they are read: convert them first"),
    "nothing": (lambda f: [file.unlink() for file in f.glob("model*")], r"holds no model.safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_checkpoint_is_refused_by_name(models, tmp_path, fault):
    folder = tmp_path / "bad"
    shutil.copytree(models["mistral-fp32"], folder)
    break_it, message = BAD[fault]
    break_it(folder)
    with pytest.raises(ValueError, match=message) as raised:
        loading.defer(str(folder), AutoConfig.from_pretrained(folder))
    assert str(folder) in str(raised.value)


def test_ranges_are_read_exactly(tmp_path):
    """Against the library, over types and shapes: the same elements, and no byte more."""
    tensors = {
        "a": torch.randn(7, 5),
        "b": torch.randn(3, 4, 2).bfloat16(),
        "c": torch.arange(11, dtype=torch.uint8),
        "d": torch.tensor(2.5),
        "e": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = weights.Checkpoint(str(tmp_path))
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        assert torch.equal(checkpoint.whole(name), tensor)
        for start, stop in ((0, len(flat)), (len(flat) // 3, len(flat)), (len(flat) // 3, len(flat) // 2)):
            before = checkpoint.bytes_read
            part = checkpoint.read(name, start, stop)
            assert part.dtype == tensor.dtype and torch.equal(part, flat[start:stop]), (name, start, stop)
            assert checkpoint.bytes_read - before == part.nbytes
    with pytest.raises(AssertionError, match="a has no elements 30 to 36"):
        checkpoint.read("a", 30, 36)


def test_tied_weights_that_are_both_stored(assets, tmp_path):
    """As older releases saved them: equal values are one weight."""
    folder = tmp_path / "both"
    shutil.copytree(assets["tied"], folder)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    deferred = loading.defer(str(folder), AutoConfig.from_pretrained(folder))
    assert deferred.model.lm_head.weight is deferred.model.model.embed_tokens.weight
    assert (
        deferred.sources[deferred.model.lm_head, "weight"] is deferred.sources[deferred.model.model.embed_tokens, "weight"]
    )


def test_layers_that_stay_in_float32(models, monkeypatch):
    """By Transformers' patterns, which may hold a dot; the types are those of from_pretrained."""
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"mlp.up_proj", "lm_head"})
    folder = str(models["llama-bf16"])
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    deferred = loading.defer(folder, AutoConfig.from_pretrained(folder))
    kinds = {name: parameter.dtype for name, parameter in whole.named_parameters()}
    assert set(kinds.values()) == {torch.float32, torch.bfloat16}
    assert {name: parameter.dtype for name, parameter in deferred.model.named_parameters()} == kinds


def test_a_buffer_that_nothing_computes_is_refused(models, monkeypatch):
    monkeypatch.setattr(
        transformers.models.llama.modeling_llama.LlamaPreTrainedModel, "_init_weights", lambda self, module: None
    )
    with pytest.raises(ValueError, match=r"inv_freq of this llama model is computed where no weights are"):
        loading.defer(str(models["llama-fp32"]), AutoConfig.from_pretrained(models["llama-fp32"]))


def test_lora_on_fused_experts_is_refused_under_fsdp1(models):
    """Where every rank would train on what was never gathered; the attention's layers are fine."""
    folder = str(models["mixtral-fp32"])
    for targets, refused in (("all-linear", True), (["q_proj"], False)):
        deferred = loading.defer(folder, AutoConfig.from_pretrained(folder))
        with deferred.recorded():
            model = get_peft_model(deferred.model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=targets))
        with pytest.raises(ValueError, match="does not work under FSDP1; use an FSDP2 config") if refused else nullcontext():
            peft_fsdp.check_gatherable(model)


def test_rows_of_added_tokens_and_lora_exclude_each_other(assets):
    deferred = loading.defer(str(assets["tied"]), AutoConfig.from_pretrained(assets["tied"]))
    model_args = arguments.ModelArguments(model_name_or_path="m", lora_target_modules="q_proj,embed_tokens")
    with pytest.raises(ValueError, match="rows of embed_tokens are trained, .*leave it out"):
        utils.create_peft_config(model_args, [3], deferred.model)


@pytest.mark.parametrize(
    ("version", "strategy", "ranks"),
    [(2, "FULL_SHARD", 8), (1, "FULL_SHARD", 8), (1, "2", 8), (1, "HYBRID_SHARD", 4), (1, "5", 4), (1, "NO_SHARD", 1)],
)
def test_over_how_many_ranks_a_weight_is_sharded(version, strategy, ranks):
    settings = checks.FsdpSettings(version, strategy, False, False, "SHARDED_STATE_DICT", False, [])
    assert settings.shard_ranks(8, 4) == ranks


def test_no_room_on_the_disk_for_the_download(monkeypatch, tmp_path):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "hub"))

    monkeypatch.setattr(weights, "cached_file", full)
    with pytest.raises(OSError, match="No space left on device: .*hub"):
        weights.Checkpoint("some/model")


@pytest.mark.parametrize(
    ("stored", "flags", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, NF4, "--bnb_4bit_quant_type nf4.*already quantised with fp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, NF4, "--use_nested_quant True.*pass --use_nested_quant False"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, {}, "add --use_4bit_quantization True"),
        ({"quant_method": "gptq", "bits": 4}, NF4, r"already quantised \(gptq\).*give the 16-bit checkpoint"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, {}, "already quantised .*FSDP cannot shard"),
    ],
)  # fmt: skip
def test_settings_against_a_quantised_checkpoint(stored, flags, message):
    config = AutoConfig.for_model("llama", **ARCHITECTURES["llama"], quantization_config=stored)
    model_args = arguments.ModelArguments(model_name_or_path="m", **flags)
    fsdp = checks.FsdpSettings(2, "FULL_SHARD", False, False, "SHARDED_STATE_DICT", False, [])
    problems = checks.quantization_problems(model_args, fsdp, config)
    assert any(re.search(message, problem) for problem in problems)


def test_no_room_in_memory_is_known_before_loading(tmp_path):
    """A 70B of which the disk holds nothing: shards of two ranks ask for more RAM than the machine has."""
    folder = loading_benchmark.make_checkpoint(tmp_path, "70b", sparse=True)
    tiny.make_tokenizer(chatml=True).save_pretrained(folder)
    deferred = loading.defer(str(folder), AutoConfig.from_pretrained(folder))
    cpu = torch.device("cpu")
    message = (
        r"needs 1\d\d.\d GiB on cpu for the shards of 2 of 2 ranks, and .* use more ranks, --use_4bit_quantization True"
    )
    with pytest.raises(ValueError, match=message):
        deferred.check_room(cpu, offload=False, ranks=2, ranks_here=2)
    deferred.check_room(cpu, offload=False, ranks=1024, ranks_here=1)


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {root!r})
import loading, train
fill = loading.StoredWeight.fill
def broken(self, pieces, device):
    if os.environ["RANK"] == "1" and self.name == "model.layers.1.mlp.up_proj.weight":
        {fault}
    fill(self, pieces, device)
loading.StoredWeight.fill = broken
train.main()
"""


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", None),
        ("self.group.checkpoint.close(); os.truncate({file!r}, 1000)", "is truncated or damaged"),
        ("raise MemoryError()", "there was no memory for it: use more ranks"),
    ],
    ids=["killed", "truncated", "no memory"],
)
def test_a_rank_that_fails_while_loading_ends_all(models, assets, tmp_path, fault, says):
    folder = tmp_path / "model"
    shutil.copytree(models["llama-fp32"], folder)
    file = str(weights.Checkpoint(str(folder)).tensors["model.layers.1.mlp.up_proj.weight"].file)
    script = tmp_path / "broken.py"
    script.write_text(SCRIPT.format(root=str(ROOT), fault=fault.format(file=file)))
    flags = argv(folder, assets, tmp_path / "out")
    started = time.monotonic()
    result = accelerate("fsdp2_config_cpu.yaml", [script, *flags], check=False, timeout=120)
    assert result.returncode != 0 and time.monotonic() - started < 90
    assert "Health check" not in result.stdout
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()
    if says:
        lines = [line for line in result.stderr.splitlines() if "error" in line and says in line]
        # Once, whichever rank met it: both read the file that is cut short.
        assert len(lines) == 1 and lines[0].startswith("error") and file in lines[0], result.stderr[-3000:]
