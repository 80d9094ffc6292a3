"""The guide's two recipes, on tiny models: every strategy, precision and checkpointing mode, and both launchers verbatim."""

import itertools
import json
import re
import sys

import pytest
from safetensors import safe_open

from launching import ROOT, free_port, probe, run
from strategies import FSDP1, FSDP2, assert_frozen, assert_sharded, losses

GUIDE_LORA = """--seed 100 --model_name_or_path "meta-llama/Llama-2-70b-hf" --dataset_name "smangrul/ultrachat-10k-chatml"
--chat_template_format "chatml" --add_special_tokens False --append_concat_token False --splits "train,test"
--max_seq_len 2048 --num_train_epochs 1 --logging_steps 5 --log_level "info" --logging_strategy "steps"
--eval_strategy "epoch" --save_strategy "epoch" --push_to_hub --hub_private_repo True --hub_strategy "every_save"
--bf16 True --packing True --learning_rate 1e-4 --lr_scheduler_type "cosine" --weight_decay 1e-4 --warmup_steps 0
--max_grad_norm 1.0 --output_dir "llama-sft-lora-fsdp" --per_device_train_batch_size 8 --per_device_eval_batch_size 8
--gradient_accumulation_steps 4 --gradient_checkpointing True --use_reentrant False --dataset_text_field "content"
--use_flash_attn True --use_peft_lora True --lora_r 8 --lora_alpha 16 --lora_dropout 0.1
--lora_target_modules "all-linear" --use_4bit_quantization False"""
GUIDE_QLORA = (
    GUIDE_LORA.replace("llama-sft-lora-fsdp", "llama-sft-qlora-fsdp")
    .replace("train_batch_size 8", "train_batch_size 2")
    .replace("eval_batch_size 8", "eval_batch_size 2")
    .replace("accumulation_steps 4", "accumulation_steps 2")
    .replace("use_reentrant False", "use_reentrant True")
    .replace("--use_4bit_quantization False", "--use_4bit_quantization True --use_nested_quant True")
    + ' --bnb_4bit_compute_dtype "bfloat16" --bnb_4bit_quant_storage_dtype "bfloat16"'
)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora_keys(layers=2, dora=False) -> set[str]:
    parts = ["lora_A.weight", "lora_B.weight"] + (["lora_magnitude_vector"] if dora else [])
    return {
        f"base_model.model.model.layers.{layer}.{'mlp' if p in PROJECTIONS[4:] else 'self_attn'}.{p}.{part}"
        for layer in range(layers)
        for p in PROJECTIONS
        for part in parts
    }


def read_adapter(folder) -> dict:
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}


@pytest.mark.parametrize(("script", "guide"), [("run_peft_fsdp.sh", GUIDE_LORA), ("run_peft_qlora_fsdp.sh", GUIDE_QLORA)])
def test_launchers_hold_the_guides_commands(script, guide):
    text = (ROOT / script).read_text()
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text).split("train.py", 1)[1].replace("\\\n", " ").replace('"$@"', "")
    assert text.split() == guide.split()


def flags(assets, out, quantised, reentrant, bf16) -> list:
    """The guide's command, cut down to a tiny run: what differs from the guide stands here."""
    dtype = "bfloat16" if bf16 else "float32"
    changed = {
        "model_name_or_path": assets["bf16" if bf16 else "fp32"],
        "dataset_name": assets["data"],
        "output_dir": out,
        "use_flash_attn": False,
        "push_to_hub": False,
        "use_cpu": True,
        "bf16": bf16,
        "use_reentrant": reentrant,
        "max_seq_len": 128,
        "eval_packing": False,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "learning_rate": 2e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "num_train_epochs": 4,
        "save_strategy": "steps",
        "save_steps": 8,
    }
    if quantised:
        changed |= {"bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_storage_dtype": dtype}
    guide = (GUIDE_QLORA if quantised else GUIDE_LORA).replace('"', "")
    guide = guide.replace("--hub_private_repo True --hub_strategy every_save", "")
    return [*guide.split(), *(token for key, value in changed.items() for token in (f"--{key}", value))]


def test_every_recipe_trains_saves_and_reloads(assets, tmp_path):
    """LoRA and QLoRA x FSDP1 and FSDP2 x reentrant and not x bf16 and fp32."""
    cases, about = [], {}
    for quantised, env, reentrant, bf16 in itertools.product([False, True], [FSDP1, FSDP2], [False, True], [True, False]):
        version = int(env["FSDP_VERSION"])
        name = (
            f"{'qlora' if quantised else 'lora'}-fsdp{version}-{'re' if reentrant else 'non'}-{'bf16' if bf16 else 'fp32'}"
        )
        about[name] = (version, quantised, bf16)
        cases.append({"name": name, "env": env, "argv": flags(assets, tmp_path / name, quantised, reentrant, bf16)})
        if (
            bf16 and not reentrant
        ):  # DoRA is the other PEFT layer type on offer, and uses lora_A and lora_B twice in a forward
            about[f"{name}-dora"] = about[name]
            dora = [*flags(assets, tmp_path / f"{name}-dora", quantised, reentrant, bf16), "--use_dora", True]
            cases.append({"name": f"{name}-dora", "env": env, "argv": dora})
    results = probe(cases, tmp_path / "facts", 2, timeout=900)

    plan = []
    for name, (version, quantised, bf16) in about.items():
        facts = results[name]
        assert_sharded(facts, version)
        assert_frozen(facts)
        trained = [p for p in facts[0]["parameters"] if p["trained"]]
        assert {p["dtype"] for p in trained} == {"torch.float32"}, f"{name}: no fp32 masters"
        # Mixed precision must not round the rotary frequencies (theta 10000, heads of 16).
        assert facts[0]["inv_freq"] == pytest.approx([10000 ** (-i / 8) for i in range(8)], rel=1e-6), name
        trajectory = losses(facts[0])
        assert trajectory == losses(facts[1]) and len(trajectory) > 8, f"{name}: the ranks report different losses"
        assert sum(trajectory[-3:]) / 3 < trajectory[0] - 0.3, f"{name}: the loss does not fall: {trajectory}"
        checkpoint = tmp_path / name / "checkpoint-8"
        for folder in (tmp_path / name, checkpoint):
            adapter = read_adapter(folder)
            assert set(adapter) == lora_keys(dora=name.endswith("dora")), name
            assert all(tensor.abs().sum() > 0 for tensor in adapter.values()), f"{name}: an all-zero tensor in {folder}"
        plan.append(
            {
                "adapter": tmp_path / name,
                "base": assets["bf16" if bf16 else "fp32"],
                "data": assets["data"],
                "four_bit": quantised,
                "dtype": "bfloat16" if bf16 else "float32",
            }
        )
    (tmp_path / "plan.json").write_text(json.dumps(plan, default=str))
    output = run([sys.executable, "tests/reload.py", tmp_path / "plan.json"]).stdout
    reloaded = json.loads(output.split("RESULT ")[1])
    for (name, (_, _, bf16)), fresh in zip(about.items(), reloaded, strict=True):
        trained = [row["eval_loss"] for row in results[name][0]["history"] if "eval_loss" in row][-1]
        assert fresh["adapter"] == pytest.approx(trained, abs=2e-3 if bf16 else 1e-4), name
        assert fresh["base"] > fresh["adapter"] + 0.2, f"{name}: the adapter changes nothing"


@pytest.mark.parametrize(
    ("script", "config", "base"),
    [
        ("run_peft_fsdp.sh", "configs/fsdp_config.yaml", "no_chatml"),
        ("run_peft_qlora_fsdp.sh", "configs/fsdp_config_qlora.yaml", "bf16"),
        ("run_peft_fsdp.sh", "configs/fsdp2_config.yaml", "no_chatml"),
        ("run_peft_qlora_fsdp.sh", "configs/fsdp2_config_qlora.yaml", "bf16"),
    ],
)
def test_guide_commands_verbatim(assets, tmp_path, script, config, base):
    """The launchers with the shipped GPU configs: only model, data, processes, Hub, FlashAttention and the CPU differ."""
    command = ["bash", script, "--use_cpu", "True", "--push_to_hub", "False", "--use_flash_attn", "False"]
    command += ["--hub_strategy", "every_save"]
    result = run(
        command, check=False, MODEL=str(assets[base]), DATASET=str(assets["data"]), CONFIG=config, NUM_PROCESSES="2",
        OUTPUT_DIR=str(tmp_path / "out"), PORT=free_port(), SCRIPT="tests/probe.py", PROBE_OUT=str(tmp_path / "facts"),
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert re.search(r"weights +each rank its shard: read .* of .*, at most .* in use, [\d.]+ s", result.stdout), (
        result.stdout[-2000:]
    )
    adapter = read_adapter(tmp_path / "out")
    rows = {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"}
    rows |= {"base_model.model.lm_head.token_adapter.trainable_tokens_delta"}
    assert set(adapter) == lora_keys() | (rows if base == "no_chatml" else set())
    assert set(read_adapter(tmp_path / "out" / "checkpoint-1")) == set(adapter)
    facts = [json.loads((tmp_path / f"facts.rank{rank}.json").read_text()) for rank in range(2)]
    assert_sharded(facts, 2 if "fsdp2" in config else 1, replicated=None if "fsdp2" in config else "trainable_tokens_delta")
    assert_frozen(facts)
