"""Runs that must agree: how a global batch is spread over processes, micro-batches and shards does not change training."""

import pytest
from launching import probe
from strategies import FSDP1, FSDP2, NO_FSDP, assert_frozen, assert_sharded, losses

STEPS = 6


def argv(assets, out, batch, accumulation, quantised):
    flags = {
        "model_name_or_path": assets["bf16" if quantised else "fp32"],
        "dataset_name": assets["data"],
        "splits": "train,test",
        "chat_template_format": "chatml",
        "use_cpu": True,
        "bf16": False,
        "dtype": "auto",
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": 1,  # the evaluation loss is a mean over batches, so it depends on their size
        "gradient_accumulation_steps": accumulation,
        "lora_r": 4,
        "lora_dropout": 0.0,
        "eval_strategy": "steps",
        "eval_steps": STEPS,
        "save_strategy": "no",
        "output_dir": out,
        "seed": 7,
    }
    if quantised:
        del flags["dtype"]
        flags |= {
            "use_4bit_quantization": True,
            "bnb_4bit_quant_storage_dtype": "float32",
            "bnb_4bit_compute_dtype": "float32",
        }
    return [token for key, value in flags.items() for token in (f"--{key}", value)]


@pytest.mark.parametrize("quantised", [False, True], ids=["lora", "qlora"])
def test_strategies_agree(assets, tmp_path, quantised):
    """1 process, DDP, FSDP1 and FSDP2 at one global batch of 4, and 4 x 1 against 1 x 4, in fp32 with unequal lengths."""

    def case(name, env, batch, accumulation=1):
        return {"name": name, "env": env, "argv": argv(assets, tmp_path / name, batch, accumulation, quantised)}

    one = probe([case("one_4x1", NO_FSDP, 4), case("one_1x4", NO_FSDP, 1, 4)], tmp_path / "one", 1)
    two_cases = [
        case("ddp", NO_FSDP, 2),
        case("fsdp1", FSDP1, 2),
        case("fsdp2", FSDP2, 2),
        case("fsdp1_1x2", FSDP1, 1, 2),
        case("fsdp2_1x2", FSDP2, 1, 2),
    ]
    two = probe(two_cases, tmp_path / "two", 2)
    reference = losses(one["one_4x1"][0])
    assert len(reference) == STEPS
    assert sum(reference[-3:]) / 3 < reference[0] - 0.2, f"the loss does not fall: {reference}"
    evaluation = [row["eval_loss"] for row in one["one_4x1"][0]["history"] if "eval_loss" in row]
    for name, facts in {**one, **two}.items():
        trajectory = losses(facts[0])
        assert trajectory == pytest.approx(reference, abs=1e-4), name
        assert [row["eval_loss"] for row in facts[0]["history"] if "eval_loss" in row] == pytest.approx(
            evaluation, abs=1e-4
        ), name
        assert_frozen(facts)
        if name.startswith("fsdp"):
            assert_sharded(facts, int(name[4]))
        else:
            assert not any(p["kind"] in ("DTensor", "FlatParameter") for p in facts[0]["parameters"]), name
