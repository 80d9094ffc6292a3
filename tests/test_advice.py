"""What is proposed to make a launch fit, or faster: tried on a made-up estimate, whose answers can be worked out by hand."""

import itertools
import random
from dataclasses import dataclass, fields, replace

import pytest
import torch
from transformers import LlamaConfig

import advice
import memory

GIB = 2**30
CONFIG = LlamaConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2)


@dataclass(frozen=True, eq=False)
class Setup:
    """The fields of `memory.Setup` that advice looks at."""

    sharded = memory.Setup.sharded
    config: LlamaConfig
    strategy: str
    ranks: int
    ranks_here: int
    shard_ranks: int
    device: str = "cuda"
    reshard_after_forward: bool = True
    offload_params: bool = False
    dtype: torch.dtype = torch.bfloat16
    quantization: str | None = None
    nested: bool = True
    storage: torch.dtype = torch.bfloat16
    mixed: torch.dtype | None = torch.bfloat16
    lora_r: int | None = 16
    lora_dropout: float = 0.0
    optimizer: str = "adamw_torch_fused"
    micro_batch: int = 1
    eval_batch: int = 0
    length: int = 2048
    accumulation: int = 1
    checkpointing: bool = True
    offload_activations: bool = False
    attention: str = "sdpa"


@dataclass
class Made:
    peak: int

    def verdict(self, capacity: int) -> str:
        return "fits" if self.peak <= 0.9 * capacity else "tight" if self.peak <= capacity else "does not fit"


def made_up(setup) -> Made:
    """16 GiB of 16-bit weights, and 1 GiB of activations a row when checkpointed."""
    weights = 16 * (0.25 if setup.quantization == "nf4" else 0.5 if setup.quantization else setup.dtype.itemsize / 2)
    weights = 0 if setup.offload_params else weights / setup.shard_ranks
    gathered = 0 if setup.strategy in ("DDP", "one device") else 1 if setup.strategy == "FSDP2" else 1.5
    gathered *= 1 if setup.reshard_after_forward else 6
    rows = setup.micro_batch * setup.length / 2048
    rows *= (
        (1 if setup.checkpointing else 8) * (0.4 if setup.offload_activations else 1) * (1.5 if setup.lora_dropout else 1)
    )
    evaluation = 0.5 * setup.eval_batch
    return Made(int(GIB * (weights + gathered + max(rows, evaluation))))


def setup_of(**changes) -> Setup:
    usual = dict(config=CONFIG, strategy="FSDP1", ranks=2, ranks_here=2, shard_ranks=2, micro_batch=2, accumulation=2)
    return Setup(**usual | changes)


ONE = dict(strategy="one device", ranks=1, ranks_here=1, shard_ranks=1)
DDP = dict(strategy="DDP", shard_ranks=1)


def changes(setup, gib: float, instead: bool = False) -> list[str]:
    return [step.change for step in advice.advise(setup, int(gib * GIB), made_up) if step.instead == instead]


FSDP2 = "--config_file configs/fsdp2_config.yaml --num_processes 2"
SMALLER = "--per_device_train_batch_size {} --gradient_accumulation_steps {}"
CASES = [  # setup, GiB of the card, what has to be proposed, in order
    ("16 bit", dict(dtype=torch.float32), 14, ["--dtype bfloat16"]),
    ("no dropout", dict(lora_dropout=0.1), 13, ["--lora_dropout 0"]),
    ("both free ones", dict(dtype=torch.float32, lora_dropout=0.1), 13, ["--dtype bfloat16", "--lora_dropout 0"]),
    ("evaluation", dict(eval_batch=64), 13, ["--per_device_eval_batch_size 4"]),
    ("FSDP2", {}, 12.3, [FSDP2]),
    ("sharded again", dict(reshard_after_forward=False), 13, [FSDP2]),
    (
        "sharded again under FSDP2",
        dict(strategy="FSDP2", reshard_after_forward=False),
        13,
        ["fsdp_reshard_after_forward: true (Accelerate config)"],
    ),
    ("checkpointing", dict(checkpointing=False), 13, ["--gradient_checkpointing True"]),
    ("and offload", dict(checkpointing=False, micro_batch=4, accumulation=1), 12, [FSDP2, "--gradient_checkpointing True", "--activation_offloading True"]),
    ("only what is needed", dict(dtype=torch.float32, checkpointing=False), 14, ["--dtype bfloat16", "--gradient_checkpointing True"]),
    ("smaller batch", ONE | dict(micro_batch=12, accumulation=2, offload_activations=True), 22, [SMALLER.format(8, 3)]),
    ("not sharded", DDP, 13, [FSDP2]),
    ("4 bits", ONE, 8, ["--use_4bit_quantization True"]),
    ("8 bits to 4", ONE | dict(quantization="int8"), 8, ["--use_4bit_quantization True --use_8bit_quantization False"]),
    ("offload", dict(strategy="FSDP2", quantization="nf4"), 3, ["--activation_offloading True", "fsdp_offload_params: true (Accelerate config)"]),
    ("offload under FSDP1", dict(quantization="nf4", offload_params=True), 3.4, ["--config_file configs/fsdp2_config_qlora.yaml --num_processes 2"]),
    ("what helps only after others", dict(strategy="FSDP2", checkpointing=False, eval_batch=20), 16, ["--per_device_eval_batch_size 10", "--gradient_checkpointing True"]),
    ("a little of what was tried", ONE | dict(micro_batch=8, offload_activations=True), 7.5, [SMALLER.format(4, 4), "--use_4bit_quantization True"]),
    ("shorter rows", ONE | dict(micro_batch=1, accumulation=1, quantization="nf4", offload_activations=True), 4.7, ["--max_length 1024"]),
]  # fmt: skip


@pytest.mark.parametrize("given, gib, expected", [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_cheapest_changes_that_make_it_fit(given, gib, expected):
    assert changes(setup_of(**given), gib) == expected


FASTER = [
    ("checkpointing", ONE | dict(accumulation=1, lora_dropout=0.1), 60, ["--gradient_checkpointing False"]),
    (
        "offload",
        dict(strategy="FSDP2", offload_params=True, micro_batch=8, accumulation=1),
        26,
        ["fsdp_offload_params: false (Accelerate config)", "fsdp_reshard_after_forward: false (Accelerate config)"],
    ),
    ("DDP ends offload too", dict(offload_params=True, accumulation=1, checkpointing=False), 40, ["--config_file configs/ddp_config.yaml --num_processes 2"]),
    ("activations", ONE | dict(offload_activations=True, micro_batch=4, accumulation=1), 30, ["--activation_offloading False"]),
    ("4 bits", ONE | dict(quantization="nf4", micro_batch=4, accumulation=1), 30, ["--use_4bit_quantization False"]),
    ("larger batch", ONE | dict(micro_batch=2, accumulation=6), 25, [SMALLER.format(6, 2)]),
]  # fmt: skip


@pytest.mark.parametrize("given, gib, expected", [case[1:] for case in FASTER], ids=[case[0] for case in FASTER])
def test_what_to_turn_off_if_it_fits_easily(given, gib, expected):
    assert changes(setup_of(**given), gib) == expected


NEVER = [  # setup, what train.py would refuse after it
    ("no 8-bit optimizer under FSDP", DDP | dict(optimizer="paged_adamw_8bit"), "fsdp2_config"),
    ("no adafactor under FSDP2", dict(optimizer="adafactor"), "fsdp2_config"),
    ("no 4 bits for trained weights", dict(lora_r=None), "4bit"),
    ("no 16 bits for trained weights", dict(lora_r=None, dtype=torch.float32), "--dtype bfloat16"),
    ("no 16-bit weights under float16", dict(mixed=torch.float16, dtype=torch.float32), "--dtype bfloat16"),
    ("no FSDP of 8 bits", DDP | dict(quantization="int8", optimizer="paged_adamw_8bit"), "fsdp2_config"),
    ("4-bit storage that FSDP2 would convert", dict(quantization="nf4", storage=torch.float32), "fsdp2_config"),
]


@pytest.mark.parametrize("given, part", [case[1:] for case in NEVER], ids=[case[0] for case in NEVER])
def test_what_is_refused_is_not_proposed(given, part):
    for gib in (1, 3, 5, 8, 12, 16, 24, 48, 200):
        for step in advice.advise(setup_of(**given), gib * GIB, made_up):
            assert part not in step.change


def test_where_nothing_is_enough():
    """All that saves something is listed, and nothing that does not."""
    assert changes(setup_of(optimizer="adamw_torch", lora_r=None, accumulation=1), 0.5) == [
        FSDP2,
        "--activation_offloading True",
        SMALLER.format(1, 2),
        "fsdp_offload_params: true (Accelerate config)",
    ]


def test_not_hundreds_of_devices_that_are_not_enough():
    assert not [change for change in changes(setup_of(**ONE), 0.5) if "--num_processes" in change]


def test_more_devices_rather_than_other_data():
    """A smaller step with 4 devices would do as well, if the rows were cut; 5 need no cut."""
    made = advice.advise(
        setup_of(**ONE, lora_r=None, micro_batch=1, accumulation=1, offload_activations=True), int(5.5 * GIB), made_up
    )
    assert [step.change for step in made if not step.instead] == [
        "--config_file configs/fsdp2_config.yaml --num_processes 5"
    ]


def test_activations_that_are_not_checkpointed_are_not_offloaded():
    assert not advice._offload_activations(setup_of(checkpointing=False))
    assert advice._offload_activations(setup_of(checkpointing=True))


def test_a_checkpoint_that_is_quantised_stays_so():
    config = LlamaConfig(
        quantization_config={"load_in_4bit": True, "quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}
    )
    config.quantization_config["bnb_4bit_use_double_quant"] = True
    made = setup_of(**ONE, config=config, quantization="nf4")
    assert "--use_4bit_quantization False" not in changes(made, 200)
    assert "--use_4bit_quantization False" in changes(replace(made, config=CONFIG), 200)


def test_an_old_card_is_not_told_to_use_flash_attention():
    def eager_is_large(setup):
        return Made(made_up(setup).peak + (8 * GIB if setup.attention == "eager" else 0))

    made = setup_of(**ONE, attention="eager", quantization="nf4", offload_activations=True)
    for capability, proposed in (((7, 5), False), ((8, 6), True), (None, True)):
        steps = advice.advise(made, 10 * GIB, eager_is_large, capability)
        assert ("--use_flash_attn True" in [step.change for step in steps]) == proposed, capability


def random_setups(count: int):
    rng = random.Random(0)
    for _ in range(count):
        strategy = rng.choice(["one device", "DDP", "FSDP1", "FSDP2"])
        ranks = 1 if strategy == "one device" else rng.choice([2, 4, 8])
        sharded, quantization = strategy.startswith("FSDP"), rng.choice([None, None, "nf4", "int8"])
        quantization = None if sharded and quantization == "int8" else quantization
        checkpointing = rng.random() < 0.5
        made = Setup(
            CONFIG,
            strategy,
            ranks,
            ranks,
            ranks if sharded else 1,
            reshard_after_forward=rng.random() < 0.7,
            offload_params=sharded and rng.random() < 0.2,
            dtype=torch.bfloat16 if quantization else rng.choice([torch.float32, torch.bfloat16]),
            quantization=quantization,
            lora_dropout=rng.choice([0.0, 0.1]),
            eval_batch=rng.choice([0, 1, 32]),
            micro_batch=rng.choice([1, 4, 6, 8]),
            accumulation=rng.choice([1, 2, 4]),
            length=rng.choice([512, 2048]),
            checkpointing=checkpointing,
            offload_activations=checkpointing and rng.random() < 0.3,
        )
        yield made, int(rng.choice([2, 4, 6, 8, 12, 16, 24, 40, 80]) * GIB)


def test_of_random_launches():
    """No step can be left out, none is dearer than one after it, the global batch stays, and few estimates are made."""
    dearness = {lever.why: index for index, lever in enumerate(advice.LEVERS)}
    longest, most, reached, unreachable = 0, 0, 0, 0
    for start, capacity in random_setups(300):
        asked = []
        steps = advice.advise(start, capacity, lambda setup, asked=asked: asked.append(setup) or made_up(setup))
        most = max(most, len(asked))
        plan = [step for step in steps if not step.instead]
        assert all(advice.allowed(step.setup) for step in steps)
        before = start
        parts = []
        for step in plan:
            names = [f.name for f in fields(start) if getattr(step.setup, f.name) != getattr(before, f.name)]
            parts.append({name: getattr(step.setup, name) for name in names})
            assert step.saved == made_up(before).peak - made_up(step.setup).peak
            rows = step.setup.micro_batch * step.setup.accumulation * step.setup.ranks
            assert rows == start.micro_batch * start.accumulation * start.ranks or "--num_processes" in step.change
            before = step.setup
        if made_up(start).verdict(capacity) == "fits":
            assert all(step.verdict == "fits" for step in plan)
            continue
        if made_up(before).verdict(capacity) != "fits":
            unreachable += 1
            assert all(step.saved > 0 for step in plan)
            continue
        order = [dearness[step.why] for step in plan]
        assert order == sorted(order) or start.quantization == "int8"  # which has to become 4 bits before FSDP
        reached += 1
        longest = max(longest, len(plan))
        for left_out in range(len(plan)):
            rest = {k: v for index, part in enumerate(parts) if index != left_out for k, v in part.items()}
            without = replace(start, **rest)
            sound = without.strategy.startswith("FSDP") or not without.offload_params
            sound = sound and (without.checkpointing or not without.offload_activations) and advice.allowed(without)
            assert not (sound and made_up(without).verdict(capacity) == "fits"), (
                {f.name: getattr(start, f.name) for f in fields(start) if f.name != "config"},
                capacity / GIB,
                [step.change for step in plan],
                parts,
                left_out,
            )
    assert reached > 50 and unreachable and longest >= 4  # or the launches above would show little
    assert most <= 25


@pytest.mark.parametrize("gib", [1, 9.5, 10, 12, 17, 40, 300, 5000])
def test_the_largest_micro_batch_is_that_of_trying_all(gib):
    made, capacity = setup_of(), int(gib * GIB)
    fitting = (n for n in itertools.count(1) if made_up(replace(made, micro_batch=n)).verdict(capacity) != "fits")
    expected = min(next(fitting) - 1, advice.LONGEST_SEARCH)
    asked = []
    assert advice.find_max_batch(made, capacity, lambda setup: asked.append(setup) or made_up(setup)) == expected
    assert len(asked) <= 20


@pytest.mark.parametrize("gib", [5, 6, 8, 10])
def test_as_few_more_devices_as_are_enough(gib):
    made = setup_of(accumulation=240)
    (step,) = [step for step in advice.advise(made, gib * GIB, made_up) if step.instead]
    enough = [
        n
        for n in (3, 4, 5, 6, 7, *range(8, 65, 8))
        if made_up(replace(made, ranks=n, shard_ranks=n)).peak <= 0.9 * gib * GIB
    ]
    assert step.setup.ranks == enough[0]
    assert step.change.startswith(f"--num_processes {enough[0]}")
    assert step.saved == made_up(made).peak - made_up(step.setup).peak
    rows = made.accumulation * made.ranks
    assert step.setup.accumulation == (rows // enough[0] if rows % enough[0] == 0 else made.accumulation)
