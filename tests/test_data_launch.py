"""Data under real launches: streams on several ranks, resuming one, waiting for the main process, EOS that is learned."""

import json
import sys

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from launching import ROOT, Launches, run
from strategies import FSDP1, FSDP2, NO_FSDP, assert_sharded, losses


def flags(assets, out, **options):
    values = {
        "model_name_or_path": assets["fp32"], "dataset_name": assets["data"], "chat_template_format": "chatml", "use_cpu": True,
        "bf16": False, "max_steps": 6, "logging_steps": 1, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 2, "lora_r": 4, "save_strategy": "no", "output_dir": out, "seed": 7,
        "gradient_checkpointing": False,
    } | options  # fmt: skip
    return [token for key, value in values.items() for token in (f"--{key}", value)]


STREAM = {"streaming": True, "shuffle_buffer": 20}
CASES = {  # environment, ranks, flags
    "one": (NO_FSDP, 1, STREAM | {"per_device_train_batch_size": 4}),
    "ddp": (NO_FSDP, 2, STREAM),
    "fsdp1": (FSDP1, 2, STREAM),
    "fsdp2": (FSDP2, 2, STREAM),
    "fsdp2-whole": (FSDP2, 2, STREAM | {"max_steps": 8}),
    "fsdp2-again": (FSDP2, 2, STREAM | {"max_steps": 4, "save_strategy": "steps", "save_steps": 4}),
    "fsdp2-packed": (FSDP2, 2, STREAM | {"packing": True, "max_length": 64}),
    "fsdp2-uneven": (FSDP2, 2, STREAM | {"max_samples": 13, "max_steps": 9}),  # 13 rows, 4 a step: over two ends
    "fsdp2-workers": (FSDP2, 2, STREAM | {"dataloader_num_workers": 2}),
    "slow": (FSDP2, 2, {"max_steps": 1, "ddp_timeout": 12}),
}


@pytest.fixture(scope="module")
def launches(assets, tmp_path_factory):
    launches = Launches(tmp_path_factory.mktemp("data"))
    for name, (env, world, options) in CASES.items():
        more = {"prepares_for": 18} if name == "slow" else {}
        launches.add(name, flags(assets, launches.out / name, **options), env, world, **more)
    again = STREAM | {"max_steps": 8, "resume_from_checkpoint": "auto"}
    launches.add("fsdp2-rest", flags(assets, launches.out / "fsdp2-again", **again), FSDP2)
    launches.run().assert_ended_well()
    return launches


def test_a_stream_is_spread_over_ranks_as_over_one(launches):
    reference = losses(launches.facts("one")[0])
    assert len(reference) == 6 and reference[-1] < reference[0] - 0.3
    for name in ("ddp", "fsdp1", "fsdp2"):
        facts = launches.facts(name)
        assert losses(facts[0]) == pytest.approx(reference, abs=1e-4), name
        if name.startswith("fsdp"):
            assert_sharded(facts, int(name[4]))


def test_a_stream_that_ends_in_mid_batch_hangs_no_rank(launches):
    assert len(losses(launches.facts("fsdp2-uneven")[0])) == 9
    assert len(losses(launches.facts("fsdp2-packed")[0])) == len(losses(launches.facts("fsdp2-workers")[0])) == 6


def test_a_stream_goes_on_where_it_was(launches):
    whole, rest = (load_file(launches.out / name / "adapter_model.safetensors") for name in ("fsdp2-whole", "fsdp2-again"))
    assert whole.keys() == rest.keys() and all(torch.equal(whole[key], rest[key]) for key in whole)


def test_preparing_may_take_longer_than_the_process_group_waits(launches):
    """The main process prepares for 18 seconds, and collectives give up after 12."""
    assert launches.exits("slow")["seconds"] > 18
    assert launches.facts("slow")[0]["collectives_wait"] == 12
    assert len(losses(launches.facts("slow")[0])) == 1


def test_tokens_are_made_once_for_all_ranks(launches):
    assert "Tokenizing" in launches.text("fsdp2-packed", 0) or "tokens from the cache" in launches.text("fsdp2-packed", 0)
    assert "Tokenizing" not in launches.text("fsdp2-packed", 1)


def test_generation_stops_after_ten_samples(assets, tmp_path):
    """A tiny model, fine-tuned on ten samples with LoRA, answers each of them and stops."""
    rows = [json.loads(line) for line in (assets["data"] / "train.jsonl").read_text().splitlines()]
    rows = {row["messages"][0]["content"]: row for row in rows if len(row["messages"][1]["content"].split()) <= 6}
    rows = list(rows.values())[:10]
    file = tmp_path / "ten.jsonl"
    file.write_text("".join(json.dumps({"messages": row["messages"]}) + "\n" for row in rows))
    argv = flags(
        assets, tmp_path / "out", dataset_name=file, max_steps=80, per_device_train_batch_size=10, lora_r=32, learning_rate=5e-3,
        logging_steps=40,
    )  # fmt: skip
    run([sys.executable, ROOT / "train.py", *argv])
    base, tokenizer = AutoModelForCausalLM.from_pretrained(assets["fp32"]), AutoTokenizer.from_pretrained(tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert tokenizer.eos_token_id in settings["eos_token_id"] and settings["pad_token_id"] != tokenizer.eos_token_id
    limit = 40

    def answer(model, row):
        prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_tensors="pt")[
            "input_ids"
        ]
        ends = {name: settings[name] for name in ("eos_token_id", "pad_token_id")}
        return model.generate(input_ids=prompt, max_new_tokens=limit, do_sample=False, **ends)[0, prompt.shape[1] :]

    assert all(len(answer(base.eval(), row)) == limit for row in rows), "the base model stops too: nothing is shown"
    model = PeftModel.from_pretrained(base, tmp_path / "out").eval()
    for row in rows:
        out = answer(model, row)
        assert out[-1] == tokenizer.eos_token_id and len(out) < limit
        assert tokenizer.decode(out, skip_special_tokens=True) == row["messages"][1]["content"]
