"""How much memory a launch takes, on each rank's device, in RAM and on disk, before anything is downloaded or allocated.

    setup = memory.from_launch(...)          # what decides it
    found = memory.estimate(setup)           # phases and terms, in bytes
    memory.estimate(dataclasses.replace(setup, micro_batch=4))

Shards, gathered layers and checkpoints are sums over the shapes of the model with its adapter; what a layer and the loss
need for a micro-batch is read off a run of one layer without memory (`working_set.py`); `simulation.py` runs a whole step.
Peak of a phase = what is held all the time + gathered weights + what earlier layers left + the working set of one layer.
"""

import functools
import itertools
from dataclasses import dataclass, field, replace

import bitsandbytes
import torch
from peft import LoraConfig
from torch import nn
from transformers import PretrainedConfig

import fake_model
import loading
import utils
import working_set

GIB = 2**30


@dataclass(frozen=True)
class Setup:
    """What decides how much memory a launch takes; `dataclasses.replace` makes a variant of it."""

    skeleton: fake_model.Skeleton  # of the base model
    strategy: str  # "FSDP1", "FSDP2", "DDP" or "one device"
    ranks: int = 1
    ranks_here: int = 1  # ranks on one machine
    shard_ranks: int = 1  # ranks that a weight is sharded over
    rank: int = 0  # whose memory it is; the first holds most
    device: str = "cuda"  # or "cpu"
    reshard_after_forward: bool = True
    offload_params: bool = False
    dtype: torch.dtype = torch.bfloat16  # of the base weights that are not quantised
    quantization: str | None = None  # "nf4", "fp4" or "int8"
    nested: bool = True
    storage: torch.dtype = torch.bfloat16
    compute: torch.dtype = torch.bfloat16  # that 4-bit weights are expanded to
    mixed: torch.dtype | None = torch.bfloat16  # mixed precision
    lora_r: int | None = 16  # None: every weight is trained
    lora_dropout: float = 0.0
    use_dora: bool = False
    adapter_dtype: torch.dtype = torch.float32  # of the adapter and its optimizer state; train.py has no other
    vocabulary: int = 0  # tokens of the tokenizer; the embeddings get rows for them
    new_tokens: int = 0  # whose embedding rows are trained
    optimizer: str = "adamw_torch_fused"
    micro_batch: int = 1
    eval_batch: int = 0  # 0: no evaluation
    length: int = 2048  # tokens of a row
    accumulation: int = 1
    packing: bool = False
    checkpointing: bool = True
    offload_activations: bool = False
    attention: str = "sdpa"  # or "eager", "flash_attention_2"
    full_logits: bool = False  # the loss is computed from all logits at once, as label smoothing needs them
    saves: int = 0  # checkpoints that will be kept

    @property
    def config(self) -> PretrainedConfig:
        return self.skeleton.model.config

    @property
    def sharded(self) -> bool:
        return self.strategy.startswith("FSDP")

    @property
    def trained_dtype(self) -> torch.dtype:
        """Of the trained weights, their gradients and, but for bitsandbytes' optimizers, the optimizer's state."""
        if self.lora_r is not None:
            return self.adapter_dtype
        return torch.float32 if self.sharded and self.mixed is not None else self.dtype

    @property
    def gathered_dtype(self) -> torch.dtype | None:
        """Of the weights that FSDP gathers, None: as they are. The Trainer makes it the storage type of 4-bit weights."""
        four = self.quantization is not None and self.quantization != "int8"
        return self.storage if four and self.storage.is_floating_point else self.mixed

    def embedding_apart(self, model: nn.Module) -> bool:
        """Whether the input embedding is a unit of its own: under FSDP2, unless it is tied to the output's."""
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if self.strategy != "FSDP2" or head is None:
            return False
        return not {id(weight) for weight in embedding.parameters()} & {id(weight) for weight in head.parameters()}

    @property
    def lora(self) -> LoraConfig | None:
        if self.lora_r is None:
            return None
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.lora_r,
            lora_dropout=self.lora_dropout,
            target_modules=utils.target_modules(self.skeleton.targets),
            use_dora=self.use_dora,
            trainable_token_indices=utils.token_rows(list(range(self.new_tokens)), self.skeleton.model)
            if self.new_tokens
            else None,
        )


# Optimizer state by a part of the optimizer's name, the first that matches: how many numbers for each trained weight, and
# their bytes (None: those of the weight; bitsandbytes keeps float32 whatever the weight is).
OPTIMIZER_STATES = [
    ("lion_8bit", 1, 1), ("rmsprop_bnb_8bit", 1, 1), ("ademamix_8bit", 3, 1), ("8bit", 2, 1), ("4bit", 2, 0.5),
    ("ademamix", 3, 4), ("lion", 1, 4), ("rmsprop_bnb", 1, 4), ("paged", 2, 4), ("anyprecision", 2, 4),
    ("schedule_free_sgd", 1, None), ("adafactor", 0, None), ("lomo", 0, None), ("sgd", 0, None), ("adagrad", 1, None),
    ("rmsprop", 1, None),
]  # fmt: skip


@dataclass
class Unit:
    """A decoder layer, or what is outside of them. Bytes on one rank, wherever they are.

    Attributes:
        frozen, trained: of its weights; under FSDP of their shards, with padding.
        updated: of the trained ones without padding, as gradients and the optimizer have them.
        gathered: of the weights that FSDP gathers together, in the type they are gathered in.
        gradients: of its trained weights before they are reduced to shards.
        statistics: of 4-bit weights, which every rank has whole.
        trained_numel: trained elements, before sharding.
        largest: of its largest weight, whole.
    """

    frozen: int = 0
    trained: int = 0
    updated: int = 0
    gathered: int = 0
    gradients: int = 0
    statistics: int = 0
    numel: int = 0
    trained_numel: int = 0
    largest: int = 0
    largest_trained: int = 0

    def __add__(self, other: "Unit") -> "Unit":
        summed = {name: value + getattr(other, name) for name, value in vars(self).items()}
        largest = {name: max(getattr(self, name), getattr(other, name)) for name in ("largest", "largest_trained")}
        return Unit(**summed | largest)


def unit_of(modules: list[tuple[str, nn.Module]], setup: Setup) -> Unit:
    """The weights that these modules hold themselves, as one unit.

    Under FSDP2 each weight is cut by rows. Under FSDP1 with LoRA the frozen weights are laid end to end and cut, and so is
    each trained module on its own (PEFT's wrap policy); rows of added tokens stay whole (`peft_fsdp.replicate_token_rows`).
    """
    unit, flat, size_of_flat, seen = Unit(), 0, 1, set()
    ranks, one = setup.shard_ranks if setup.sharded else 1, setup.strategy == "FSDP1"
    for module_name, module in modules:
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            numel, size, trained = parameter.numel(), parameter.itemsize, parameter.requires_grad
            kind = setup.gathered_dtype
            gathered = numel * (kind.itemsize if kind is not None and parameter.is_floating_point() else size)
            if one and setup.lora_r is not None and trained:
                held = own = -(-numel // (1 if "trainable_tokens_delta" in module_name else ranks)) * size
                gathered = 0  # while they are used, and a few kilobytes
            elif one:
                held, own, flat, size_of_flat = 0, 0, flat + numel, size
            else:
                rows, row = -(-parameter.shape[0] // ranks), parameter.shape[1:].numel() * size
                held = rows * row  # of the last ranks' a part, or all, is padding
                gathered = gathered // max(parameter.shape[0], 1) * rows * ranks  # with the padding
                own = min(max(parameter.shape[0] - setup.rank % ranks * rows, 0), rows) * row
            unit.trained += held if trained else 0
            unit.updated += own if trained else 0
            unit.frozen += 0 if trained else held
            # One rank alone computes with its weights as they are, unless they have to be converted.
            unit.gathered += gathered if ranks > 1 or gathered != numel * size else 0
            unit.gradients += gathered if trained else 0
            unit.numel += unpacked(module, parameter)
            unit.trained_numel += numel if trained else 0
            unit.largest = max(unit.largest, numel * size)
            unit.largest_trained = max(unit.largest_trained, numel * size if trained else 0)
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            unit.statistics += module.statistics.nbytes
    if setup.lora_r is None:
        unit.trained += -(-flat // ranks) * size_of_flat
        unit.updated += -(-flat // ranks) * size_of_flat
    else:
        unit.frozen += -(-flat // ranks) * size_of_flat
    return unit


def unpacked(module: nn.Module, parameter: nn.Parameter) -> int:
    """Elements of a parameter; of a packed 4-bit weight, of what it stands for."""
    if isinstance(module, bitsandbytes.nn.Linear4bit) and parameter is module.weight:
        return module.in_features * module.out_features
    return parameter.numel()


@functools.lru_cache(maxsize=64)
def units_of(setup: Setup) -> tuple[dict[int, Unit], Unit, Unit]:
    """The decoder layers by kind, the input embedding if FSDP2 makes it a unit of its own (else nothing), and the rest."""
    kinds = sorted(set(setup.skeleton.kinds))
    model = fake_model.build(setup, kinds)
    layers = dict(zip(kinds, fake_model.layers(model, setup, kinds), strict=True))
    inside = {id(m): kind for kind, layer in layers.items() for m in layer.modules()}
    embedding = model.get_input_embeddings()
    apart = {id(m) for m in embedding.modules()} if setup.embedding_apart(model) else set()
    parts = {kind: [] for kind in layers} | {"embedding": [], "rest": []}
    for name, module in model.named_modules():
        parts["embedding" if id(module) in apart else inside.get(id(module), "rest")].append((name, module))
    units = {kind: unit_of(modules, setup) for kind, modules in parts.items()}
    embedding, rest = units.pop("embedding"), units.pop("rest")
    return units, embedding, rest


@dataclass
class Estimate:
    """Bytes of one launch.

    Attributes:
        phases: phase -> term -> bytes at its worst moment, on the device of the first rank.
        ram: term -> bytes of RAM that one machine needs.
        disk: term -> bytes.
        parameters, trained: elements.
    """

    setup: Setup
    phases: dict[str, dict[str, int]]
    ram: dict[str, int] = field(default_factory=dict)
    disk: dict[str, int] = field(default_factory=dict)
    parameters: int = 0
    trained: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> int:
        """Bytes allocated at the worst moment."""
        return sum(self.phases[self.peak_phase].values())

    def in_use(self) -> tuple[int, int]:
        """What the driver will report, at least and at most: with the context, NCCL and what the allocator keeps."""
        return int(LEAST_RESERVED * self.peak + CONTEXT[0]), int(MOST_RESERVED * self.peak + CONTEXT[1])

    def verdict(self, capacity: int) -> str:
        """ "fits", "tight" or "does not fit" on a device with `capacity` bytes."""
        if self.in_use()[0] > capacity:
            return "does not fit"
        return "fits" if COMFORTABLE * self.peak + sum(CONTEXT) / 2 <= capacity else "tight"


# Not modelled: what a process holds beside its tensors (the CUDA context and NCCL's buffers, 1 to 2 GiB), and how much more
# the allocator reserves than it has handed out. It gives cached blocks back before it fails, so most of it is not needed.
CONTEXT = (1 * GIB, 2 * GIB)
LEAST_RESERVED, COMFORTABLE, MOST_RESERVED = 1.05, 1.15, 1.4

# A Python process with these libraries, without a weight; on a GPU machine with the CUDA libraries.
PROCESS_RAM = {"cpu": 1 * GIB, "cuda": 3 * GIB}

STASH = 5  # activations that TRL's offloading still holds on the device


# Fields that change neither what a layer allocates nor the shards; reset, so that results are found again.
NOT_OF_A_STEP = dict(optimizer="", eval_batch=0, accumulation=1, saves=0, offload_params=False, reshard_after_forward=True)
NOT_OF_A_LAYER = NOT_OF_A_STEP | dict(rank=0, ranks=1, ranks_here=1, shard_ranks=1, micro_batch=1, offload_activations=False)
NOT_OF_A_SHARD = NOT_OF_A_STEP | dict(micro_batch=1, length=1, packing=False, checkpointing=False, attention="sdpa")


def estimate(setup: Setup) -> Estimate:
    """Memory by formula. About a second for a setup of new shapes."""
    units, embedding, rest = units_of(replace(setup, **NOT_OF_A_SHARD))
    whole = sum((units[kind] for kind in setup.skeleton.kinds), embedding + rest)
    trained = "adapter" if setup.lora_r is not None else "trained weights"
    held = {"base weights": whole.frozen, "4-bit statistics": whole.statistics, trained: whole.trained}
    loaded = held.copy()
    held["optimizer state"] = optimizer_bytes(setup, whole.updated)
    if setup.strategy == "DDP":
        held["gradient buckets"] = whole.updated
    offloaded = 0
    if setup.offload_params:  # gradients and the optimizer's state follow
        offloaded = sum(held.values()) + whole.updated - whole.statistics
        held = loaded = {"4-bit statistics": whole.statistics}
    layer = functools.partial(_working_set, replace(setup, **NOT_OF_A_LAYER))
    moments = functools.partial(_step, setup, held, units, embedding, rest)
    phases = {"load": loaded | {"one weight": _loading(setup, whole)}}
    phases |= moments(layer(setup.micro_batch))
    # Without a fused kernel Adam makes copies of what it updates.
    update = {} if setup.offload_params else {"gradients": whole.updated}
    if not ("fused" in setup.optimizer or setup.offload_params):
        update["copies"] = whole.updated
    phases["optimizer step"] = held | update
    if setup.eval_batch:
        evaluation = moments(layer(setup.eval_batch, training=False))
        phases["evaluation"] = max(evaluation.values(), key=lambda terms: sum(terms.values()))
    phases["save"] = held | {"one gathered weight": whole.largest_trained}
    found = Estimate(
        setup,
        {phase: {term: size for term, size in terms.items() if size} for phase, terms in phases.items()},
        _ram(setup, whole, offloaded, layer(setup.micro_batch)),
        _disk(setup, whole),
        whole.numel,
        whole.trained_numel,
    )
    if setup.device == "cpu":
        found.ram["what the ranks allocate"] = found.peak * setup.ranks_here
    return found


def optimizer_bytes(setup: Setup, trained: int) -> int:
    """Of a rank's optimizer state, for so many bytes of trained weights; most have two numbers for each weight."""
    found = ((numbers, size) for part, numbers, size in OPTIMIZER_STATES if part in setup.optimizer)
    numbers, size = next(found, (2, None))  # Adam's
    return int(trained * numbers * (size / setup.trained_dtype.itemsize if size else 1))


@functools.lru_cache(maxsize=64)
def _working_set(setup: Setup, batch: int, training: bool = True) -> working_set.WorkingSet:
    return working_set.of_rows(setup, batch, training)


def _step(setup: Setup, held: dict[str, int], units: dict[int, Unit], embedding: Unit, rest: Unit, layer) -> dict:
    """The worst moments of forward, loss and backward: phase -> term -> bytes."""
    kinds = setup.skeleton.kinds
    left = list(itertools.accumulate((layer.saved[kind] for kind in kinds), initial=layer.base))  # before layer i
    if setup.offload_activations:
        most = layer.base + (STASH + 1) * max(layer.saved.values())
        left = [min(size, most) for size in left]
    gathered = [units[kind].gathered for kind in kinds] if setup.sharded else [0] * len(kinds)
    outside = rest.gathered if setup.sharded else 0
    first = embedding.gathered if setup.sharded else 0
    kept = sum(gathered) if not setup.reshard_after_forward else None
    name = "activation checkpoints" if setup.checkpointing else "activations"

    # Of weights whose backward has run. Those of earlier micro-batches are kept, under FSDP whole: it reduces the last ones.
    trained = [units[kind].updated for kind in kinds]
    everything = sum(trained) + rest.updated + embedding.updated
    early = 0
    if setup.accumulation > 1 and layer.backward:
        numel = sum(units[kind].trained_numel for kind in kinds) + rest.trained_numel + embedding.trained_numel
        kind = setup.gathered_dtype or setup.trained_dtype
        early = numel * kind.itemsize if setup.sharded else everything

    def worst(moments, gradients) -> dict[str, int]:
        terms = [
            held
            | {"gradients": early if setup.offload_params else summed}
            | {"gathered layers": layers if kept is None else kept, "gathered embeddings": root, name: before, work: size}
            for (layers, root, before, work, size), summed in zip(moments, gradients, strict=True)
        ]
        return max(terms, key=lambda each: sum(each.values()))

    last, two = len(kinds) - 1, setup.strategy == "FSDP2"
    forward, backward, reduced = [], [], []
    for i, kind in enumerate(kinds):
        after = gathered[i + 1] if i < last else 0  # gathered while this one computes
        forward.append((gathered[i] + after, outside, left[i], "working set", layer.forward[kind]))
        if two:  # gathers into a buffer and copies out of it; in the forward it keeps the buffer until the next copy is made
            buffer = gathered[i - 1] if i else 0
            forward.append((buffer + 2 * gathered[i], outside + (0 if i else first), left[i], "working set", 0))
        if layer.backward:
            before = gathered[i - 1] if i else first
            root = outside + (rest.gradients if setup.sharded else 0)  # reduced at the end
            later = units[kinds[i + 1]] if i < last else Unit()
            sent = later.gradients if two else 0  # the buffer of the last reduction is still there
            backward.append((gathered[i] + before, root, left[i + 1], "working set", layer.backward[kind] + sent))
            # FSDP1 gives the layer before back while it is computed with: when the next is gathered, three are there.
            waiting = 0 if two else gathered[min(i + 1, last)]
            backward.append((gathered[i] + before + waiting, root, left[i], "working set", 0))
            reduced += 2 * [early or sum(trained[i + 1 :]) + (0 if setup.sharded else rest.updated)]
    if two and first:  # at either end of a step
        forward.append((0, 2 * outside + 2 * first, layer.base, "working set", 0))
        backward.append((0, outside + 2 * first, layer.base, "working set", 0))
        reduced.append(everything)
    loss = [(gathered[last], outside, left[-1], "loss", layer.loss)]
    phases = {"forward": worst(forward, [early] * len(forward)), "loss": worst(loss, [early])}
    return phases | ({"backward": worst(backward, reduced)} if layer.backward else {})


def from_launch(
    model_args, training_args, fsdp, config, ranks: int, ranks_here: int, vocabulary=0, new_tokens=0, saves=0
) -> Setup:
    """The setup of a launch.

    Args:
        fsdp: `checks.FsdpSettings`, or None.
        ranks, ranks_here: of all machines, and of one.
        vocabulary: tokens of the tokenizer.
        new_tokens: how many embedding rows are trained because no checkpoint fills them.
        saves: checkpoints that will be kept.
    """
    lora = model_args.use_peft_lora
    skeleton = fake_model.Skeleton(
        config,
        training_args.trust_remote_code,
        model_args.lora_target_modules if lora else "all-linear",
        fsdp.layer_classes if fsdp else (),
    )
    text = skeleton.model.config.get_text_config()
    four, eight = model_args.use_4bit_quantization, model_args.use_8bit_quantization
    storage = getattr(torch, model_args.bnb_4bit_quant_storage_dtype)
    dtype = model_args.dtype if model_args.dtype != "auto" else (getattr(config, "dtype", None) or torch.float32)
    dtype = storage if four and storage.is_floating_point else getattr(torch, dtype) if isinstance(dtype, str) else dtype
    shard_ranks = fsdp.shard_ranks(ranks, ranks_here) if fsdp else 1
    attention = "flash_attention_2" if model_args.use_flash_attn else skeleton.model.config._attn_implementation
    evaluates = str(getattr(training_args.eval_strategy, "value", training_args.eval_strategy)) != "no"
    return Setup(
        skeleton,
        strategy=fsdp.name if fsdp else "DDP" if ranks > 1 else "one device",
        ranks=ranks,
        ranks_here=ranks_here,
        shard_ranks=shard_ranks,
        device="cpu" if training_args.use_cpu else "cuda",
        reshard_after_forward=fsdp is None or fsdp.reshard_after_forward,
        offload_params=bool(fsdp and fsdp.offload_params and not training_args.use_cpu),
        dtype=dtype,
        quantization=model_args.bnb_4bit_quant_type if four else "int8" if eight else None,
        nested=model_args.use_nested_quant,
        storage=storage,
        compute=getattr(torch, model_args.bnb_4bit_compute_dtype),
        mixed=torch.float16 if training_args.fp16 else torch.bfloat16 if training_args.bf16 else None,
        lora_r=model_args.lora_r if lora else None,
        lora_dropout=model_args.lora_dropout if lora else 0.0,
        use_dora=bool(lora and model_args.use_dora),
        vocabulary=max(vocabulary, text.vocab_size),
        new_tokens=new_tokens if lora else 0,
        optimizer=str(getattr(training_args.optim, "value", training_args.optim)),
        micro_batch=training_args.per_device_train_batch_size,
        eval_batch=training_args.per_device_eval_batch_size if evaluates else 0,
        length=training_args.max_length or getattr(text, "max_position_embeddings", 4096),
        accumulation=training_args.gradient_accumulation_steps,
        packing=training_args.packing or training_args.padding_free,
        checkpointing=training_args.gradient_checkpointing or bool(fsdp and fsdp.activation_checkpointing),
        offload_activations=training_args.activation_offloading,
        attention=attention,
        full_logits=training_args.label_smoothing_factor > 0,
        saves=saves,
    )


def _loading(setup: Setup, whole: Unit) -> int:
    """What filling the shards takes beside them: see `loading.py`. Without FSDP nothing, for the model is moved whole."""
    if not setup.sharded:
        return 0
    block = loading.CHUNK if setup.device == "cpu" else loading.CHUNK_ON_ACCELERATOR
    if setup.quantization is None:
        return block // 4 * 4
    return whole.largest + block * 4


def _ram(setup: Setup, whole: Unit, offloaded: int, layer) -> dict[str, int]:
    """Bytes of RAM on one machine; pages of files that are being read are not counted, they can be dropped."""
    terms = {"processes": PROCESS_RAM["cpu" if setup.device == "cpu" else "cuda"] * setup.ranks_here}
    if setup.sharded:
        terms["loading: one block for each rank"] = 2 * loading.CHUNK_ON_ACCELERATOR * 4 * setup.ranks_here
    elif setup.device != "cpu" and setup.quantization is None:
        terms["loading: the model for each rank"] = (whole.frozen + whole.trained) * setup.ranks_here
    terms["offloaded weights, gradients and optimizer state"] = offloaded * setup.ranks_here
    if setup.offload_activations:
        saved = sum(layer.saved[kind] for kind in setup.skeleton.kinds)
        terms["offloaded activations"] = saved * setup.ranks_here
    return {term: size for term, size in terms.items() if size}


def _disk(setup: Setup, whole: Unit) -> dict[str, int]:
    """Bytes on disk: the checkpoint of the base model, and what the run writes."""
    stored = 2 * (whole.numel - (whole.trained_numel if setup.lora_r is not None else 0))
    adapter = whole.trained_numel * setup.trained_dtype.itemsize
    state = optimizer_bytes(setup, adapter)
    return {"base model, 16 bit": stored, "result": adapter, "one checkpoint": adapter + state} | (
        {"checkpoints kept": setup.saves * (adapter + state)} if setup.saves else {}
    )
