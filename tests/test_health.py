"""The health check stops what is not sharded, and counts what is there."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import health
import sharding
from launching import accelerate
from sharding import Held, NotInForce, check_in_force


def test_fsdp_that_is_not_in_force_is_an_error():
    ddp = Held("DDP", 0, 100, 100, [])
    with pytest.raises(NotInForce, match="FSDP2 was asked for but DDP is in force"):
        check_in_force(ddp, "FSDP2")
    with pytest.raises(NotInForce, match="leaves 1 parameters unsharded"):
        check_in_force(Held("FSDP2", 3, 100, 200, ["a.weight"]), "FSDP2")
    check_in_force(
        Held("FSDP1", 3, 100, 200, ["a.trainable_tokens_delta.default"]), "FSDP1", True, ("trainable_tokens_delta",)
    )
    check_in_force(ddp, "none")


def test_inspect_sees_a_plain_model():
    held = sharding.inspect(nn.Linear(4, 2, bias=False))
    assert (held.strategy, held.local_bytes, held.total_bytes, held.fraction) == ("one device", 32, 32, 1.0)


def test_counts_by_type():
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 2, bias=False).to(torch.bfloat16))
    model[1].weight.requires_grad = False
    assert health.count_parameters(model) == {"float32": (8, 8, 32), "bfloat16": (4, 0, 8)}


@pytest.mark.parametrize(
    ("number", "unit", "text"), [(135_000_000, "", "135M"), (7e10, "", "70B"), (0, "", "0"), (2**30, "B", "1.00 GiB"), (5, "B", "5 B")]
)  # fmt: skip
def test_human(number, unit, text):
    assert health.human(number, unit) == text


def test_it_says_what_loaded_the_model():
    check = object.__new__(health.HealthCheck)
    check.deferred = None
    assert check.loading_facts() == "from_pretrained: every process read and loaded all of them"
    report = {"held": 2**30, "read": 3 * 2**30, "stored": 2**33, "peak": 2**31, "seconds": 4.25}
    check.deferred = SimpleNamespace(report=report)
    facts = "each rank its shard: read 3.00 GiB of 8.00 GiB, at most 2.00 GiB in use, 4.2 s"
    assert check.loading_facts() == facts


def test_a_silent_ddp_is_stopped(assets, tmp_path):
    """If the one line that keeps FSDP in force on a CPU is lost, the run must end before its first step."""
    script = tmp_path / "broken.py"
    script.write_text(
        "import sys; sys.path.insert(0, '.')\n"
        "import cpu_fsdp, train\n"
        "cpu_fsdp._keep_fsdp_in_accelerator_state = lambda: None\n"
        "train.main()\n"
    )
    flags = ["--model_name_or_path", assets["fp32"], "--dataset_name", assets["data"], "--chat_template_format", "chatml"]
    flags += ["--use_cpu", "True", "--output_dir", tmp_path / "out", "--max_steps", "2"]
    result = accelerate("fsdp2_config_cpu.yaml", [script, *flags], check=False)
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if "error: FSDP2 was asked for but DDP is in force" in line]
    assert len(lines) == 1, result.stderr[-3000:]
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()
