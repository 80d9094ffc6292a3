"""What to change in a launch: the cheapest changes that make it fit on a card, or what to turn off if it fits easily.

Each change is tried on the estimate, so what saves nothing here is not proposed, and train.py's own checks are asked
whether it would take the result.
"""

import bisect
import dataclasses
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

import checks
import memory

# Time of a step by this change, as a factor or in words.
SLOW_DOWN = {
    "16-bit base": "none: half as much to gather and to read",
    "dropout": "none: a little faster",
    "optimizer": "none",
    "attention": "none: faster",
    "evaluation": "of evaluation only",
    # torchtitan, docs/fsdp.md: 7 % lower peak than FSDP1 and no slower (Llama-7B, 8 x H100).
    "FSDP2": "none",
    # An all-gather of each layer again in the backward pass, hidden unless the link is slow.
    "reshard": "x1.05 to x1.3 (estimated)",
    # fsdp_qlora, benchmarks_03_2024.md: 7B LoRA on 2 x 4090, 437 s -> 481 s, with a larger batch; x1.36 on 2 x 3090.
    "DDP": "x1.1 (fsdp_qlora: 7B on 2 x 4090); more on a slow link",
    # torchtune's README, its levers one after the other on a 3B: 21 % fewer tokens/s for 42 % less memory.
    "checkpointing": "x1.27 (torchtune: -21 % tokens/s)",
    # The same table: -0.1 % tokens/s, where the copies overlap with computing; more on a slow link to the host.
    "activation offload": "x1.0 to x1.05 (torchtune: -0.1 % tokens/s)",
    # fsdp_qlora: 7B QLoRA on 2 x 3090, 936 s at batch 10, 998 s at 4, 1564 s at 1.
    "micro-batch": "x1.07 from 10 rows to 4, x1.6 from 4 to 1 (fsdp_qlora: 7B on 2 x 3090)",
    # torchtune's README: 8B on a 4090, 3083 -> 2413 tokens/s.
    "NF4": "x1.3 (torchtune: 8B on a 4090) to x1.5 (estimated)",
    # fsdp_qlora: made up for by a batch twice as large on PCIe 4 x16, "many times slower" on a cloud machine.
    "parameter offload": "x1.5 to many times, by the link to the host (estimated)",
    "ranks": "none for each card",
    "length": "none",
}

LONGEST_SEARCH = 1024  # rows of a micro-batch that are tried at most


@dataclass
class Step:
    """One change. Steps of a list build on each other, unless `instead`."""

    change: str  # the flag or the line to write
    setup: memory.Setup  # after it
    saved: int  # bytes at the peak of one device; negative if it takes more
    slow_down: str  # time of a step, as a factor or in words
    why: str
    verdict: str  # on the card, after it
    instead: bool = False  # it replaces the steps before it: more devices, and everything else as it was


Options = list[tuple[str, dict]]  # (what to write, the fields of the setup that change), the mildest first


def _config(name: str, ranks: int, setup) -> str:
    name += "_qlora" if setup.offload_params and name == "fsdp2_config" else ""
    return f"--config_file configs/{name}.yaml --num_processes {ranks}"


def _to_16_bit(setup) -> Options:
    # In full fine-tuning the trained weights would lose precision, and float16 mixed precision needs float32 weights.
    if setup.dtype != torch.float32 or setup.quantization or setup.lora_r is None or setup.mixed == torch.float16:
        return []
    also = "" if setup.mixed else " --bf16 True"
    return [(f"--dtype bfloat16{also}", {"dtype": torch.bfloat16, "mixed": torch.bfloat16})]


def _no_dropout(setup) -> Options:
    on = setup.lora_r is not None and setup.lora_dropout > 0
    return [("--lora_dropout 0", {"lora_dropout": 0.0})] if on else []


def _fused_optimizer(setup) -> Options:
    plain = setup.optimizer in ("adamw_torch", "adamw_hf")
    return [("--optim adamw_torch_fused", {"optimizer": "adamw_torch_fused"})] if plain else []


def _flash_attention(setup) -> Options:
    return [("--use_flash_attn True", {"attention": "flash_attention_2"})] if setup.attention == "eager" else []


def _smaller_evaluation(setup) -> Options:
    sizes = [setup.eval_batch >> halved for halved in range(1, setup.eval_batch.bit_length())]
    return [(f"--per_device_eval_batch_size {size}", {"eval_batch": size}) for size in sizes]


def _fsdp2(setup) -> Options:
    fields = {"strategy": "FSDP2", "shard_ranks": setup.ranks, "reshard_after_forward": True}
    return [(_config("fsdp2_config", setup.ranks, setup), fields)]


def _fsdp1_to_fsdp2(setup) -> Options:
    return _fsdp2(setup) if setup.strategy == "FSDP1" else []


def _ddp_to_fsdp2(setup) -> Options:
    return _fsdp2(setup) if setup.strategy == "DDP" else []


def _shard_all(setup) -> Options:
    if not setup.sharded or (setup.reshard_after_forward and setup.shard_ranks == setup.ranks):
        return []
    line = "fsdp_sharding_strategy: FULL_SHARD" if setup.strategy == "FSDP1" else "fsdp_reshard_after_forward: true"
    return [(f"{line} (Accelerate config)", {"reshard_after_forward": True, "shard_ranks": setup.ranks})]


def _checkpointing(setup) -> Options:
    return [] if setup.checkpointing else [("--gradient_checkpointing True", {"checkpointing": True})]


def _offload_activations(setup) -> Options:
    # Without checkpointing, TRL would also copy the gathered weights that the backward pass keeps.
    if setup.offload_activations or not setup.checkpointing or setup.device != "cuda":
        return []
    return [("--activation_offloading True", {"offload_activations": True})]


def _micro_batch(setup, size: int, accumulation: int) -> tuple[str, dict]:
    change = f"--per_device_train_batch_size {size} --gradient_accumulation_steps {accumulation}"
    return change, {"micro_batch": size, "accumulation": accumulation}


def _smaller_micro_batch(setup) -> Options:
    rows = setup.micro_batch * setup.accumulation
    sizes = [size for size in range(setup.micro_batch - 1, 0, -1) if rows % size == 0]
    return [_micro_batch(setup, size, rows // size) for size in sizes]


def _to_nf4(setup) -> Options:
    if setup.quantization in ("nf4", "fp4") or setup.lora_r is None:
        return []
    storage = torch.float32 if setup.mixed == torch.float16 else torch.bfloat16
    change = "--use_4bit_quantization True"
    if setup.quantization == "int8":
        change += " --use_8bit_quantization False"
    if storage == torch.float32:
        change += " --bnb_4bit_quant_storage_dtype float32"
    if setup.dtype != storage:
        change += " --dtype auto"
    return [(change, {"quantization": "nf4", "storage": storage, "dtype": storage})]


def _offload_parameters(setup) -> Options:
    if not setup.sharded or setup.offload_params or setup.device != "cuda":
        return []
    return [("fsdp_offload_params: true (Accelerate config)", {"offload_params": True})]


def _more_ranks(setup) -> Options:
    options = []
    for ranks in [*range(2, 8), *range(8, 65, 8), 128, 256, 512]:
        if ranks <= setup.ranks:
            continue
        change = f"--num_processes {ranks}" if setup.sharded else _config("fsdp2_config", ranks, setup)
        fields = {
            "strategy": setup.strategy if setup.sharded else "FSDP2",
            "ranks": ranks,
            "ranks_here": min(ranks, 8),
            "shard_ranks": ranks,
        }
        rows = setup.accumulation * setup.ranks
        if setup.accumulation > 1 and rows % ranks == 0:  # the same global batch
            fields["accumulation"] = rows // ranks
            change += f" --gradient_accumulation_steps {rows // ranks}"
        options.append((change, fields))
    return options


def _shorter_rows(setup) -> Options:
    lengths = [setup.length // part for part in (2, 4, 8) if setup.length // part >= 128]
    return [(f"--max_length {length}", {"length": length}) for length in lengths]


@dataclass(frozen=True)
class Lever:
    """A kind of change: what it can be for a setup, its row in SLOW_DOWN, and what it does."""

    options: Callable[[memory.Setup], Options]
    cost: str
    why: str


RANKS = Lever(_more_ranks, "ranks", "each rank holds a smaller share; this many at least")
LENGTH = Lever(_shorter_rows, "length", "rows are cut: this changes the data, and is the last resort on these devices")
# The cheapest first.
LEVERS = [
    Lever(_to_16_bit, "16-bit base", "frozen weights need no float32"),
    Lever(_no_dropout, "dropout", "dropout keeps a copy of every adapter's input"),
    Lever(_fused_optimizer, "optimizer", "the fused step makes no temporary tensors"),
    Lever(_flash_attention, "attention", "attention scores are never stored"),
    Lever(_smaller_evaluation, "evaluation", "evaluation is the peak, and its batch size changes no result"),
    Lever(_fsdp1_to_fsdp2, "FSDP2", "the embedding is a unit of its own and is let go after use"),
    Lever(_shard_all, "reshard", "no rank keeps more than its shard between uses"),
    Lever(_ddp_to_fsdp2, "DDP", "each rank holds a share of the weights instead of a copy"),
    Lever(_checkpointing, "checkpointing", "one layer's activations are kept at a time, and computed twice"),
    Lever(_offload_activations, "activation offload", "checkpoints wait in pinned CPU RAM"),
    Lever(_smaller_micro_batch, "micro-batch", "activations are those of fewer rows; the global batch stays"),
    Lever(_to_nf4, "NF4", "a quarter of the base weights; they are rounded to 4 bits, so the result changes"),
    Lever(_offload_parameters, "parameter offload", "shards stay in CPU RAM between uses"),
    LENGTH,
    RANKS,
]


# ------------------------------------------------------------------------------------------------- what can be turned off


def _no_parameter_offload(setup) -> Options:
    return [("fsdp_offload_params: false (Accelerate config)", {"offload_params": False})] if setup.offload_params else []


def _no_quantization(setup) -> Options:
    if setup.quantization is None or setup.offload_params:  # 4 bits are also fewer to copy from the RAM
        return []
    flag = "8bit" if setup.quantization == "int8" else "4bit"
    dtype = torch.float32 if setup.mixed == torch.float16 else torch.bfloat16
    return [(f"--use_{flag}_quantization False", {"quantization": None, "dtype": dtype})]


def _no_checkpointing(setup) -> Options:
    if not setup.checkpointing or setup.offload_activations:
        return []
    return [("--gradient_checkpointing False", {"checkpointing": False})]


def _fsdp_to_ddp(setup) -> Options:
    if not setup.sharded or setup.ranks == 1:
        return []
    fields = {"strategy": "DDP", "shard_ranks": 1, "offload_params": False}
    return [(_config("ddp_config", setup.ranks, setup), fields)]


def _larger_micro_batch(setup) -> Options:
    rows = setup.micro_batch * setup.accumulation
    sizes = [size for size in range(rows, setup.micro_batch, -1) if rows % size == 0]
    return [_micro_batch(setup, size, rows // size) for size in sizes]


def _keep_gathered(setup) -> Options:
    if not setup.sharded or not setup.reshard_after_forward or not 1 < setup.shard_ranks == setup.ranks:
        return []
    line = "fsdp_sharding_strategy: SHARD_GRAD_OP" if setup.strategy == "FSDP1" else "fsdp_reshard_after_forward: false"
    return [(f"{line} (Accelerate config)", {"reshard_after_forward": False})]


def _no_activation_offload(setup) -> Options:
    return [("--activation_offloading False", {"offload_activations": False})] if setup.offload_activations else []


# The largest gain first; factors are those of SLOW_DOWN, the other way round.
FASTER = [
    Lever(_no_parameter_offload, "parameter offload", "shards fit on the device"),
    Lever(_no_activation_offload, "activation offload", "checkpoints fit on the device"),
    Lever(_no_checkpointing, "checkpointing", "all activations fit, so nothing is computed twice"),
    Lever(_no_quantization, "NF4", "the 16-bit weights fit: nothing to unpack, and the unrounded model is trained"),
    Lever(_fsdp_to_ddp, "DDP", "a whole copy fits on each device: only the adapter's gradients are exchanged"),
    Lever(_larger_micro_batch, "micro-batch", "fewer, larger products for the same global batch"),
    Lever(_keep_gathered, "reshard", "layers stay gathered until the backward pass has used them"),
]


def allowed(setup) -> bool:
    """Whether train.py's checks take it."""
    fsdp = None
    if setup.sharded:
        fsdp = checks.FsdpSettings(
            version=int(setup.strategy.removeprefix("FSDP")),
            sharding_strategy="FULL_SHARD",
            offload_params=setup.offload_params,
            use_orig_params=False,
            state_dict_type="SHARDED_STATE_DICT",
            activation_checkpointing=False,
            layer_classes=[],
        )
    four, name = setup.quantization in ("nf4", "fp4"), lambda dtype: str(dtype).removeprefix("torch.")
    model_args = SimpleNamespace(
        use_4bit_quantization=four,
        use_8bit_quantization=setup.quantization == "int8",
        use_peft_lora=setup.lora_r is not None,
        use_flash_attn=setup.attention == "flash_attention_2",
        dtype="auto" if four else name(setup.dtype),
        bnb_4bit_quant_storage_dtype=name(setup.storage),
        bnb_4bit_quant_type=setup.quantization,
        use_nested_quant=setup.nested,
    )
    training_args = SimpleNamespace(
        optim=setup.optimizer,
        fp16=setup.mixed == torch.float16,
        bf16=setup.mixed == torch.bfloat16,
        use_cpu=setup.device == "cpu",
        gradient_checkpointing=setup.checkpointing,
    )
    problems = itertools.chain(
        checks.quantization_problems(model_args, fsdp, setup.config),
        checks.precision_problems(model_args, training_args, fsdp, setup.config),
        checks.fsdp_problems(model_args, training_args, fsdp, setup.config, meta=None),
    )
    return next(problems, None) is None


def first(count: int, good: Callable[[int], bool]) -> int:
    """The first of 0 ... count - 1 that is good, if all after it are too; count if none is."""
    return bisect.bisect_left(range(count), True, key=good)


Plan = list[tuple[Lever, int]]  # (a lever, the number of its option), one after the other


class _Search:
    """Setups that follow from one by plans, and what each takes; no setup is estimated twice."""

    def __init__(self, setup: memory.Setup, capacity: int, estimate: Callable):
        self.start, self.capacity, self.estimate, self.estimates = setup, capacity, estimate, {}

    def of(self, setup) -> memory.Estimate:
        changed = frozenset(item for item in vars(setup).items() if item[1] is not getattr(self.start, item[0]))
        if changed not in self.estimates:
            try:
                self.estimates[changed] = self.estimate(setup)
            except Exception:  # a model may run as it is and not, say, without FSDP: such a change is never proposed
                self.estimates[changed] = memory.Estimate(setup, {"forward": {"cannot be run": sys.maxsize}})
        return self.estimates[changed]

    def fits(self, setup) -> bool:
        return self.of(setup).verdict(self.capacity) == "fits"

    def follow(self, plan: Plan) -> list[tuple[str, memory.Setup]] | None:
        """(what to write, the setup after it) of each part; None if one cannot follow those before it, or is refused."""
        made, setup = [], self.start
        for lever, number in plan:
            options = lever.options(setup)
            if number >= len(options):
                return None
            change, fields = options[number]
            setup = dataclasses.replace(setup, **fields)
            if not allowed(setup):
                return None
            made.append((change, setup))
        return made

    def end(self, plan: Plan) -> memory.Setup | None:
        made = self.follow(plan)
        return made if made is None else made[-1][1] if made else self.start

    def reaches(self, plan: Plan) -> bool:
        end = self.end(plan)
        return end is not None and self.fits(end)

    def first(self, plans: list[Plan]) -> int:
        """The number of the first plan that reaches it; they are in order, the mildest first. Their count if none does."""
        if not plans or not self.reaches(plans[-1]):
            return len(plans)
        return first(len(plans) - 1, lambda number: self.reaches(plans[number]))

    def with_one_more(self, plan: Plan, lever: Lever) -> list[Plan]:
        return [[*plan, (lever, number)] for number in range(len(lever.options(self.end(plan))))]

    def steps(self, plan: Plan, instead: bool = False) -> list[Step]:
        steps, before = [], self.of(self.start).peak
        for (lever, _), (change, setup) in zip(plan, self.follow(plan), strict=True):
            now = self.of(setup)
            cost = f"won back: {SLOW_DOWN[lever.cost]}" if lever in FASTER else SLOW_DOWN[lever.cost]
            steps.append(Step(change, setup, before - now.peak, cost, lever.why, now.verdict(self.capacity), instead))
            before = now.peak
        return steps


def advise(
    setup: memory.Setup,
    capacity: int,
    estimate: Callable[[memory.Setup], memory.Estimate] | None = None,
    capability: tuple[int, int] | None = None,
) -> list[Step]:
    """Changes that make a setup fit on a device with `capacity` bytes, or that make one faster that fits.

    If it fits, each step still fits after those before it. If not, the steps end with one that fits, and none of them can
    be left out. Where no changes reach that, they are all those that save something, and the verdict of the last says so.
    A last step may tell how many devices would do without the others (`instead`).

    Args:
        estimate: what a setup takes; `memory.estimate` if None.
        capability: CUDA compute capability of the device, if known.
    """
    search = _Search(setup, capacity, estimate or memory.estimate)
    if search.fits(setup):
        return search.steps(_faster(search))
    levers = [lever for lever in LEVERS if lever.cost != "attention" or (capability or (8, 0)) >= (8, 0)]
    plan = _smaller(search, levers)
    steps = search.steps(plan)
    if RANKS not in [lever for lever, _ in plan]:
        alone = search.with_one_more([], RANKS)
        number = search.first(alone)
        if number < len(alone):
            steps += search.steps(alone[number], instead=True)
    return steps


def _smaller(search: _Search, levers: list[Lever]) -> Plan:
    plan = []
    while not search.reaches(plan):
        # The cheapest that helps now; one that did not before may do so after others.
        longer = next(filter(None, (_helped(search, plan, lever) for lever in levers)), None)
        if longer is None:
            return plan
        plan = longer
    ordered = sorted(plan, key=lambda part: LEVERS.index(part[0]))
    plan = ordered if search.reaches(ordered) else plan
    # Now that the last one made it fit, some may not be needed, or not as much of them: the costliest first.
    for lever, number in plan[::-1]:
        at = plan.index((lever, number))
        before, after = plan[:at], plan[at + 1 :]
        milder = [before + after, *([*before, (lever, less), *after] for less in range(number))]
        plan = [*milder, plan][search.first(milder)]
    return plan


def _helped(search: _Search, plan: Plan, lever: Lever) -> Plan | None:
    """The plan and a lever, as little of it as is enough or as much as there is; None if that saves nothing."""
    longer = [] if lever in [used for used, _ in plan] else search.with_one_more(plan, lever)
    number = search.first(longer)
    if number < len(longer):
        return longer[number]
    if not longer or lever in (LENGTH, RANKS):  # a last resort has to be enough
        return None
    end = search.end(longer[-1])
    return longer[-1] if end is not None and search.of(end).peak < search.of(search.end(plan)).peak else None


def _faster(search: _Search) -> Plan:
    plan = []
    for lever in FASTER:
        longer = search.with_one_more(plan, lever)
        number = search.first(longer)
        if number < len(longer):
            plan = longer[number]
    # A later one may make an earlier one superfluous: DDP also ends parameter offload.
    for part in list(plan):
        others = [other for other in plan if other is not part]
        end = search.end(others)
        if end is not None and vars(end) == vars(search.end(plan)):
            plan = others
    return plan


def find_max_batch(
    setup: memory.Setup, capacity: int, estimate: Callable[[memory.Setup], memory.Estimate] | None = None
) -> int:
    """The largest micro-batch that fits on a device with `capacity` bytes, in rows; 0 if not even one row does.

    Args:
        estimate: what a setup takes; `memory.estimate` if None.
    """
    search = _Search(setup, capacity, estimate or memory.estimate)

    def fails(rows: int) -> bool:
        return not search.fits(dataclasses.replace(setup, micro_batch=rows))

    top = 1
    while top < LONGEST_SEARCH and not fails(top):
        top *= 2
    fitting = top // 2  # and one of the rows up to `top` may be the first that fails
    return fitting + first(top - fitting, lambda more: fails(fitting + more + 1))
