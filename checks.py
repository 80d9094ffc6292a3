"""What can be known to fail before any weight is read: one line for each mistake, that names the value and the fix.

A function named `..._problems` yields all it finds; train.py raises the first of them as ValueError, findings.py lists all.
"""

import functools
import importlib.util
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils import str_to_bool
from accelerate.utils.constants import (
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
)
from accelerate.utils.dataclasses import get_module_class_from_name
from huggingface_hub import get_token, is_offline_mode

import checkpoint
import cpu_fsdp
import loading
import run_record
import utils
from errors import nearest, out_of_range, raise_first, refusals


@dataclass
class FsdpSettings:
    """The FSDP part of the Accelerate config, as `accelerate launch` passes it on (or as torchrun users export it)."""

    version: int
    sharding_strategy: str
    offload_params: bool
    use_orig_params: bool
    state_dict_type: str
    activation_checkpointing: bool
    layer_classes: list[str]
    reshard_after_forward: bool = True  # whether layers are let go between forward and backward

    @property
    def name(self) -> str:
        return f"FSDP{self.version}"

    @property
    def hybrid(self) -> bool:
        """Whether weights are sharded over the ranks of a machine and repeated on each."""
        return "HYBRID" in self.sharding_strategy or self.sharding_strategy in ("4", "5")

    def shard_ranks(self, ranks: int, ranks_here: int) -> int:
        """Over how many ranks a weight is sharded: all, those of one machine (HYBRID_*), or one (NO_SHARD)."""
        if self.version == 2 or self.sharding_strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "1", "2"):
            return ranks
        return ranks_here if self.hybrid else 1

    @classmethod
    def from_environment(cls) -> "FsdpSettings | None":
        """None unless FSDP was asked for (ACCELERATE_USE_FSDP=true)."""
        asked = os.environ.get("ACCELERATE_USE_FSDP", "false")
        if asked.lower() not in ("true", "false", ""):
            raise ValueError(f"ACCELERATE_USE_FSDP={asked} would be ignored: Accelerate reads only true and false")
        if not cpu_fsdp.fsdp_requested():
            return None

        def flag(name: str) -> bool:
            return _truth(os.environ.get(name, "false")) or False  # fsdp_value_problems names what is neither

        strategy = os.environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
        if strategy.upper() not in FSDP_SHARDING_STRATEGY and not strategy.isdigit():
            raise ValueError(
                f"fsdp_sharding_strategy: {strategy} in the Accelerate config is none of {', '.join(FSDP_SHARDING_STRATEGY)}"
            )
        version = os.environ.get("FSDP_VERSION", "1")
        if version not in ("1", "2"):
            raise ValueError(f"fsdp_version: {version} in the Accelerate config must be 1 or 2")
        keeps = ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "2", "5")
        reshards = strategy.upper() not in keeps
        if version == "2":
            reshards = _truth(os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true")) is not False
        return cls(
            version=int(version),
            sharding_strategy=strategy.upper(),
            offload_params=flag("FSDP_OFFLOAD_PARAMS"),
            use_orig_params=flag("FSDP_USE_ORIG_PARAMS"),
            state_dict_type=os.environ.get(
                "FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT" if version == "2" else "FULL_STATE_DICT"
            ).upper(),
            activation_checkpointing=flag("FSDP_ACTIVATION_CHECKPOINTING"),
            layer_classes=[c for c in os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "").split(",") if c],
            reshard_after_forward=reshards,
        )


def check_processes(use_cpu: bool, fsdp: FsdpSettings | None) -> None:
    """Stop a launch that would become N independent runs, one process where several were asked for, or DDP for FSDP.

    Needs nothing but the environment, so it can run before the process group exists.
    """
    raise_first(process_problems(use_cpu, fsdp))
    raise_first(device_problems(use_cpu, fsdp))


def _on_cpu(use_cpu: bool) -> bool:
    return use_cpu or os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true"


def process_problems(use_cpu: bool, fsdp: FsdpSettings | None) -> Iterator[str]:
    """What is wrong with a launch on any machine."""
    if "WORLD_SIZE" not in os.environ:
        if fsdp is not None:
            yield (
                "the environment asks for FSDP (ACCELERATE_USE_FSDP=true) but this is a single process without a launcher: "
                "use `accelerate launch --config_file CONFIG train.py` or torchrun"
            )
        if "MASTER_PORT" in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ:
            yield (
                "several processes were asked for but Accelerate started one: on CPU use an Accelerate config with "
                "distributed_type FSDP or MULTI_GPU (not MULTI_CPU, --cpu or NO) and pass --use_cpu True to train.py"
            )
    if _on_cpu(use_cpu) and not use_cpu and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        yield "the Accelerate config says use_cpu: true; say it to train.py as well: add --use_cpu True"


def device_problems(use_cpu: bool, fsdp: FsdpSettings | None) -> Iterator[str]:
    """The processes of a launch against the devices of this machine."""
    if _on_cpu(use_cpu):
        return
    world, local_world = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if accelerators == 0 and (world > 1 or fsdp is not None):
        yield (
            f"{world} processes were launched but this machine has no accelerator: each would train alone and overwrite the "
            "others' output; add --use_cpu True after train.py to rehearse on the CPU"
        )
    if local_world > accelerators > 0:
        yield (
            f"{local_world} processes on a machine with {accelerators} device(s): set --num_processes {accelerators} "
            "(num_processes in the Accelerate config), one process per device"
        )


def check_world(num_processes: int) -> None:
    """Raise unless the process group has as many processes as the launcher started. After `PartialState` exists."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes != world:
        raise ValueError(
            f"the launcher started {world} processes but this run sees {num_processes}: they would train alone and "
            "overwrite each other's output; check distributed_type and use_cpu in the Accelerate config"
        )


def quantization_problems(model_args, fsdp: FsdpSettings | None, config) -> Iterator[str]:
    """4-bit and 8-bit flags against each other, the checkpoint, LoRA and FSDP."""
    four, eight = model_args.use_4bit_quantization, model_args.use_8bit_quantization
    if four and eight:
        yield "--use_4bit_quantization True and --use_8bit_quantization True exclude each other: choose one"
    if (four or eight) and not model_args.use_peft_lora:
        yield "quantised weights cannot be trained: set --use_peft_lora True or turn quantisation off"
    if eight and fsdp:
        yield (
            "--use_8bit_quantization True does not work under FSDP, which cannot shard 8-bit integer weights: use "
            "--use_4bit_quantization True, or 8-bit on one device or with DDP"
        )
    if (four or eight) and importlib.util.find_spec("bitsandbytes") is None:
        yield "4-bit and 8-bit weights need the package bitsandbytes: pip install -r requirements.txt"
    storage = model_args.bnb_4bit_quant_storage_dtype
    if four and fsdp and storage == "uint8":
        yield (
            "--bnb_4bit_quant_storage_dtype uint8 cannot be sharded by FSDP (only floating types can; every rank would hold "
            "the whole model): use bfloat16"
        )
    if four and model_args.dtype not in ("auto", storage):
        yield (
            f"--dtype {model_args.dtype} contradicts --bnb_4bit_quant_storage_dtype {storage}: in a 4-bit model the other "
            "weights take the storage type; drop --dtype"
        )
    stored = utils.stored_quantization(config)
    if not stored:
        return
    if stored.get("load_in_4bit") and stored.get("quant_method", "bitsandbytes") == "bitsandbytes":
        if not four:
            yield "the checkpoint is already quantised to 4 bits: add --use_4bit_quantization True"
        for flag, key, default in (
            ("bnb_4bit_quant_type", "bnb_4bit_quant_type", "fp4"),
            ("use_nested_quant", "bnb_4bit_use_double_quant", False),
        ):
            value, kept = getattr(model_args, flag), stored.get(key, default)
            if value != kept:
                yield (
                    f"--{flag} {value}: the checkpoint is already quantised with {kept}, which cannot be changed; pass "
                    f"--{flag} {kept}, or give the 16-bit checkpoint"
                )
    elif four or eight or fsdp:
        yield (
            f"the checkpoint is already quantised ({stored.get('quant_method', 'unknown method')}), which "
            f"{'FSDP cannot shard' if fsdp else '4-bit and 8-bit flags do not change'}: give the 16-bit checkpoint"
            + (", or one in bitsandbytes' 4 bits, and --use_4bit_quantization True" if fsdp else "")
        )


def precision_problems(model_args, training_args, fsdp: FsdpSettings | None, config) -> Iterator[str]:
    """Mixed precision against the types of the weights."""
    four = model_args.use_4bit_quantization
    storage = model_args.bnb_4bit_quant_storage_dtype
    if training_args.fp16 and four and storage != "float32":
        yield (
            f"--fp16 True with --bnb_4bit_quant_storage_dtype {storage}: float16 mixed precision needs float32 storage to "
            "train stably; use --bnb_4bit_quant_storage_dtype float32, or --bf16 True"
        )
    weights = getattr(config, "dtype", None) if model_args.dtype == "auto" else getattr(torch, model_args.dtype)
    if training_args.fp16 and not four and weights in (torch.float16, torch.bfloat16):
        yield (
            f"--fp16 True with {str(weights).removeprefix('torch.')} base weights: float16 mixed precision needs float32 "
            "weights to train stably; use --dtype float32, or --bf16 True"
        )
    if model_args.use_flash_attn and not training_args.use_cpu:
        weights = getattr(torch, storage) if four else weights or torch.float32
        if weights == torch.float32 and not (training_args.fp16 or training_args.bf16):
            yield (
                "--use_flash_attn True computes in 16 bits, and there are float32 weights without mixed precision: add "
                "--bf16 True, or set --use_flash_attn False"
            )
        text = config.get_text_config()
        heads = getattr(text, "num_attention_heads", None)
        size = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
        if size > 256:
            yield f"--use_flash_attn True takes heads of up to 256, and this model's have {size}: set --use_flash_attn False"
    if four and fsdp and fsdp.version == 2 and training_args.bf16 and storage not in ("bfloat16",):
        yield (
            f"--bnb_4bit_quant_storage_dtype {storage} with --bf16 True under FSDP2: mixed precision would convert the "
            "packed 4-bit bytes as if they were numbers; use bfloat16 storage"
        )


def optimizer_name(training_args) -> str:
    """`--optim` as it is written."""
    return str(getattr(training_args.optim, "value", training_args.optim))


# What Accelerate reads of FSDP; `accelerate launch` makes these variables of the keys under fsdp_config.
FSDP_BOOLEANS = [
    "FSDP_OFFLOAD_PARAMS", "FSDP_USE_ORIG_PARAMS", "FSDP_FORWARD_PREFETCH", "FSDP_SYNC_MODULE_STATES",
    "FSDP_CPU_RAM_EFFICIENT_LOADING", "FSDP_ACTIVATION_CHECKPOINTING", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
]  # fmt: skip
FSDP_CHOICES = {
    "FSDP_STATE_DICT_TYPE": FSDP_STATE_DICT_TYPE,
    "FSDP_AUTO_WRAP_POLICY": FSDP_AUTO_WRAP_POLICY,
    "FSDP_BACKWARD_PREFETCH": FSDP_BACKWARD_PREFETCH,
}
FSDP_VARIABLES = [
    *FSDP_BOOLEANS, *FSDP_CHOICES, "FSDP_VERSION", "FSDP_SHARDING_STRATEGY", "FSDP_RESHARD_AFTER_FORWARD",
    "FSDP_MIN_NUM_PARAMS", "FSDP_TRANSFORMER_CLS_TO_WRAP", "FSDP_IGNORED_MODULES",
]  # fmt: skip


def fsdp_key(variable: str) -> str:
    """The key under fsdp_config that a variable is made of."""
    return "fsdp_transformer_layer_cls_to_wrap" if variable == "FSDP_TRANSFORMER_CLS_TO_WRAP" else variable.lower()


def _truth(value: str) -> bool | None:
    """As Accelerate reads it; None if it would stop at it."""
    try:
        return bool(str_to_bool(value))
    except ValueError:
        return None


def unknown_fsdp_variables() -> list[str]:
    """A line for each FSDP_* variable of the environment that nothing reads."""
    unknown = sorted(name for name in os.environ if name.startswith("FSDP_") and name not in FSDP_VARIABLES)
    return [f"{name} in the environment is read by nothing{nearest(name, FSDP_VARIABLES)}" for name in unknown]


def fsdp_value_problems(fsdp: FsdpSettings) -> Iterator[str]:
    """Values that Accelerate stops at once the model is built, and settings of one FSDP that the other does not read."""
    for name in FSDP_BOOLEANS:
        value = os.environ.get(name, "false")
        if _truth(value) is None:
            yield f"{fsdp_key(name)}: {value} in the Accelerate config must be true or false"
    for name, choices in FSDP_CHOICES.items():
        value = os.environ.get(name)
        if value is not None and value.upper() not in choices and not value.isdigit():
            yield (
                f"{fsdp_key(name)}: {value} in the Accelerate config is none of {', '.join(choices)}"
                f"{nearest(value.upper(), choices)}"
            )
    smallest = os.environ.get("FSDP_MIN_NUM_PARAMS", "0")
    if not smallest.isdigit():
        yield f"fsdp_min_num_params: {smallest} in the Accelerate config must be a whole number"
    reshard, strategy = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true"), fsdp.sharding_strategy
    if fsdp.version == 1 and reshard.lower() not in ("true", strategy.lower()):
        yield (
            f"fsdp_reshard_after_forward: {reshard} is not read under FSDP1, where fsdp_sharding_strategy: {strategy} is: "
            "write fsdp_sharding_strategy: SHARD_GRAD_OP to keep gathered weights until the backward pass, or drop the line"
        )
    if fsdp.version == 2 and _truth(reshard) is None:
        yield f"fsdp_reshard_after_forward: {reshard} in the Accelerate config must be true or false under FSDP2"
    if fsdp.version == 2 and strategy not in ("FULL_SHARD", "1"):
        yield (
            f"fsdp_sharding_strategy: {strategy} is not read under FSDP2, which shards over all ranks: drop the line; "
            "fsdp_reshard_after_forward: false is what SHARD_GRAD_OP was"
        )
    if fsdp.version == 2 and fsdp.state_dict_type in ("LOCAL_STATE_DICT", "2"):
        yield "fsdp_state_dict_type: LOCAL_STATE_DICT is not supported under FSDP2: write SHARDED_STATE_DICT"
    if _truth(os.environ.get("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "false")) and (
        fsdp.version == 1 or not fsdp.activation_checkpointing
    ):
        yield (
            "fsdp_activation_checkpointing_offload: true needs FSDP2 and fsdp_activation_checkpointing: true: drop the line"
        )


def fsdp_problems(model_args, training_args, fsdp: FsdpSettings | None, config, meta: Callable) -> Iterator[str]:
    """Settings of the Accelerate config that contradict the arguments or the model."""
    if fsdp is None:
        return
    yield from fsdp_value_problems(fsdp)
    if fsdp.version == 1 and fsdp.use_orig_params and not model_args.use_peft_lora:
        yield (
            "fsdp_use_orig_params: true in the Accelerate config (or a missing key, which means true) is not supported "
            "under FSDP1, whose shards are loaded flat: set fsdp_use_orig_params: false, or use an FSDP2 config"
        )
    if fsdp.version == 1 and fsdp.use_orig_params:
        parameters = sum(p.numel() for p in meta().parameters())
        world = int(os.environ.get("WORLD_SIZE", "1"))
        yield (
            "fsdp_use_orig_params: true in the Accelerate config (or a missing key, which means true) loses LoRA's memory "
            "saving under FSDP1: every unit mixes trained and frozen weights, so gradients are allocated for the frozen "
            f"ones too, here {parameters * 2 / world / 2**30:.2g} GiB per rank ({parameters / 1e9:.3g}B parameters in 16 "
            f"bit on {world} ranks); set fsdp_use_orig_params: false"
        )
    if fsdp.version == 1 and fsdp.hybrid and (training_args.use_cpu or os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"):
        # FSDP counts accelerators for the size of a machine; with one, every rank would train for itself.
        yield (
            f"fsdp_sharding_strategy: {fsdp.sharding_strategy} shards over the devices of a machine, and there is one: "
            "use FULL_SHARD"
        )
    if fsdp.activation_checkpointing and training_args.gradient_checkpointing:
        yield (
            "activation checkpointing is asked for twice: drop fsdp_activation_checkpointing from the Accelerate config, or "
            "pass --gradient_checkpointing False"
        )
    optimizer = optimizer_name(training_args)
    if any(part in optimizer for part in ("8bit", "paged", "bnb", "lion", "ademamix")):  # bitsandbytes' optimizers
        yield (
            f"--optim {optimizer} has no sharded state under FSDP (FSDP2 fails at the first step, FSDP1 when it saves a "
            "checkpoint): use --optim adamw_torch_fused; LoRA's optimizer state is small anyway"
        )
    if optimizer == "adafactor" and fsdp.version == 2:
        yield "--optim adafactor mixes sharded and plain tensors under FSDP2: use --optim adamw_torch_fused"
    if fsdp.layer_classes:
        model = meta()
        for name in fsdp.layer_classes:
            if get_module_class_from_name(model, name) is None:
                yield (
                    f"fsdp_transformer_layer_cls_to_wrap: {name} is not a module of this {config.model_type} model; its "
                    f"layers are {', '.join(sorted(model._no_split_modules or ['unknown']))}: name those, or drop the key"
                )


# What optimizers of other packages need, by a part of their name.
OPTIMIZER_PACKAGES = {
    "schedule_free": "schedulefree", "galore": "galore_torch", "apollo": "apollo_torch", "lomo": "lomo_optim",
    "grokadamw": "grokadamw", "torch_4bit": "torchao", "torch_8bit": "torchao", "stable": "optimi",
    "anyprecision": "torchdistx",
}  # fmt: skip


# What an evaluation measures: Trainer's and TRL's.
EVALUATION_METRICS = (
    "loss entropy mean_token_accuracy num_tokens aux_loss runtime samples_per_second steps_per_second".split()
)


def trainer_problems(model_args, training_args, fsdp: FsdpSettings | None) -> Iterator[str]:
    """Arguments that TRL or the Trainer refuse too, but only once the model is loaded."""
    if training_args.padding_free and not training_args.packing and training_args.max_length is not None:
        yield (
            "TRL refuses --padding_free True with --max_length: use --packing True, which does not pad either, or "
            "max_length: null in a recipe"
        )
    if training_args.save_only_model and fsdp and "SHARDED" in fsdp.state_dict_type:
        yield "--save_only_model True needs fsdp_state_dict_type: FULL_STATE_DICT in the Accelerate config"
    optimizer = optimizer_name(training_args)
    for part, package in OPTIMIZER_PACKAGES.items():
        if part in optimizer and importlib.util.find_spec(package) is None:
            yield f"--optim {optimizer} needs the package {package}: install it, or use --optim adamw_torch_fused"
    targets = re.split(r"[^\w]+", model_args.lora_target_modules)
    if model_args.use_peft_lora and fsdp and fsdp.version == 1 and "embed_tokens" in targets:
        yield (
            "--lora_target_modules embed_tokens: FSDP1 cannot put its frozen and trained weights into one unit; "
            "use an FSDP2 config"
        )
    if model_args.use_peft_lora and "lm_head" in targets:
        yield "--lora_target_modules lm_head: TRL's loss reads the head's weight directly, so LoRA there never trains"
    if training_args.push_to_hub and get_token() is None:
        yield "--push_to_hub needs a login: run `hf auth login` or set HF_TOKEN; or pass --push_to_hub False"
    if training_args.push_to_hub and is_offline_mode():
        yield "--push_to_hub cannot reach the Hub while HF_HUB_OFFLINE is set: unset it, or pass --push_to_hub False"
    if training_args.save_strategy == "best" and training_args.eval_strategy == "no":
        yield "--save_strategy best saves after evaluations and --eval_strategy is no: add --eval_strategy epoch"
    metric = training_args.metric_for_best_model
    if training_args.save_strategy == "best" and metric is None:
        yield "--save_strategy best needs --load_best_model_at_end True, which says by what"
    if metric is not None and metric.removeprefix("eval_") not in EVALUATION_METRICS:
        yield (
            f"--metric_for_best_model {metric} is not measured: choose one of {', '.join(EVALUATION_METRICS)}"
            f"{nearest(metric.removeprefix('eval_'), EVALUATION_METRICS)}"
        )
    schedule = training_args.lr_scheduler_type.value
    if training_args.warmup_steps > 0 and schedule in ("constant", "reduce_lr_on_plateau", "greedy"):
        fix = "use constant_with_warmup" if schedule == "constant" else "use cosine"
        yield f"--warmup_steps {training_args.warmup_steps:g} has no effect with --lr_scheduler_type {schedule}: {fix}, or 0"


def check_packing(training_args, meta: Callable) -> None:
    """Raise ValueError if rows that are packed into one would see each other in the model that `meta` makes."""
    packs = training_args.packing or training_args.eval_packing or training_args.padding_free
    if not packs:
        return
    model = meta()
    name, fix = type(model).__name__, "set --packing False" if training_args.packing else "set --padding_free False"
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"{fix}: {name} has recurrent layers, whose state runs on from one packed row into the next")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{fix}: {name} takes no position_ids, by which packed rows are told apart")


# (argument, what it must be, the test)
RANGES = [
    ("per_device_train_batch_size", "at least 1", lambda v: v >= 1),
    ("per_device_eval_batch_size", "at least 1", lambda v: v >= 1),
    ("gradient_accumulation_steps", "at least 1", lambda v: v >= 1),
    ("learning_rate", "a number above 0", lambda v: 0 < v < math.inf),
    ("weight_decay", "0 or more", lambda v: 0 <= v < math.inf),
    ("max_length", "at least 1, or null in a recipe", lambda v: v is None or v >= 1),
    ("max_steps", "at least 1, or -1 to go by --num_train_epochs", lambda v: v >= 1 or v == -1),
    ("num_train_epochs", "above 0", lambda v: 0 < v < math.inf),
    ("logging_steps", "above 0", lambda v: v > 0),
    ("save_steps", "above 0", lambda v: v > 0),
    ("lora_r", "at least 1", lambda v: v >= 1),
    ("lora_alpha", "above 0", lambda v: v > 0),
    ("lora_dropout", "0 or more and below 1", lambda v: 0 <= v < 1),
]


def range_problems(model_args, training_args) -> Iterator[str]:
    """Numbers that would train nothing, or something else, without an error."""
    return out_of_range(RANGES, model_args, training_args)


def settle_mixed_precision(training_args) -> list[str]:
    """Make the arguments decide, since Accelerate takes its config's mixed precision where they say none.

    Returns a line for the health check if the two differ.
    """
    configured = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    decided = "fp16" if training_args.fp16 else "bf16" if training_args.bf16 else "no"
    os.environ["ACCELERATE_MIXED_PRECISION"] = training_args.mixed_precision = decided
    if decided == configured:
        return []
    return [f"mixed_precision: {configured} in the Accelerate config is overruled by the arguments: {decided}"]


def check_output(training_args) -> None:
    """Raise ValueError if nothing can be written to the output folder."""
    folder = Path(training_args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file: name a folder")
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not os.access(parent, os.W_OK):
        raise ValueError(f"--output_dir {folder} cannot be written: {parent} is read-only for this user")
    if not parent.is_dir():
        raise ValueError(f"--output_dir {folder}: {parent} is a file: name a folder")


def file_problems(model_args, training_args) -> Iterator[str]:
    """The output folder and the checkpoint to resume from."""
    yield from refusals(check_output, training_args)
    folder = Path(training_args.output_dir)
    resumed = training_args.resume_from_checkpoint
    there = checkpoint.numbered(folder)
    if resumed is None:
        if there:
            yield (
                f"--output_dir {folder} holds {there[-1][1].name} of an earlier run: add --resume_from_checkpoint auto to "
                "go on with it, or name another folder, or delete it"
            )
        return
    resumed = Path(resumed)
    yield from checkpoint_problems(resumed, model_args, training_args)
    if folder.resolve() != resumed.resolve().parent:
        return
    step = training_state(resumed)["step"]
    newer = [path.name for number, path in there if number > step and checkpoint.problem_with(path) is None]
    if newer:
        yield (
            f"--resume_from_checkpoint {resumed}: {newer[-1]} beside it is newer and good, and would be mixed with this "
            "run's: use auto to go on from that, or another --output_dir, or delete it"
        )


def find_checkpoint(training_args, repair: bool = True) -> tuple[str | None, list[str]]:
    """What `--resume_from_checkpoint` means: auto (or True) is the newest good checkpoint, False is none, else a folder.

    Every byte of it is verified against its manifest. One at the end of a finished run is taken with auto only, which a
    scheduler runs again whatever happened: nothing is left to train, and the result is saved again.

    Args:
        repair: whether to finish first what an interrupted save left half done; False changes nothing on the disk.

    Returns:
        The folder or None, and a line for each newer checkpoint that was skipped.

    Raises:
        ValueError: a folder that cannot be resumed from, or True and there is none.
    """
    value, output_dir = training_args.resume_from_checkpoint, training_args.output_dir
    if value is None or value.lower() == "false":
        return None, []
    if value.lower() not in ("true", "auto"):
        if not Path(value).is_dir():
            raise ValueError(
                f"--resume_from_checkpoint {value} does not exist: name a checkpoint-N folder, or auto for the newest good "
                "one"
            )
        problem = problem_with_resuming(Path(value))
        if problem:
            raise ValueError(f"--resume_from_checkpoint {value} cannot be used: {problem}; name another, or auto")
        _refuse_finished(Path(value), training_args)
        return value, []
    if repair:
        checkpoint.recover(output_dir)
    skipped = []
    for _, path in reversed(checkpoint.numbered(output_dir)):
        problem = problem_with_resuming(path)
        if problem is None:
            if value.lower() == "true":
                _refuse_finished(path, training_args)
            return str(path), skipped
        skipped.append(f"{path} was skipped: {problem}")
    if skipped:  # starting anew would leave them beside a run they are not of
        raise ValueError(
            f"--resume_from_checkpoint {value}: no checkpoint in {output_dir} is good ({'; '.join(skipped)}): delete them "
            "to start anew, or name another --output_dir"
        )
    if value.lower() == "true":
        raise ValueError(
            f"--resume_from_checkpoint {value}: no checkpoint-N in {output_dir}; use auto to start anew where there is none"
        )
    return None, []


def _refuse_finished(folder: Path, training_args) -> None:
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    step, epoch, limit = state["global_step"], state["epoch"] or 0, training_args.max_steps
    if step >= limit if limit > 0 else epoch >= training_args.num_train_epochs:
        raise ValueError(
            f"--resume_from_checkpoint {folder} is the end of a finished run (step {step}): raise --max_steps or "
            "--num_train_epochs to train further"
        )


def problem_with_resuming(folder: Path) -> str | None:
    """Why a checkpoint cannot be resumed from; None if it can."""
    problem = checkpoint.problem_with(folder)
    if problem:
        return problem
    manifest = checkpoint.manifest_of(folder)
    files, step = manifest["files"], manifest.get("step")
    if folder.name.startswith("checkpoint-") and folder.name != f"checkpoint-{step}":
        return f"it is checkpoint-{step} under another name"
    needed = {"trainer_state.json": "step counters", "training_state.json": "schedule and random numbers"}
    missing = [what for name, what in (needed | {"optimizer.safetensors": "optimizer state"}).items() if name not in files]
    return f"it was saved without {', '.join(missing)} (--save_only_model)" if missing else None


def training_state(folder: Path) -> dict:
    """A checkpoint's training_state.json."""
    return json.loads((folder / "training_state.json").read_text(encoding="utf-8"))


# Arguments that a checkpoint would overrule, or that decide which rows come next: they have to be what they were.
KEPT_ON_RESUME = (
    "use_peft_lora lora_r lora_alpha lora_target_modules use_dora use_rslora use_4bit_quantization use_8bit_quantization "
    "bnb_4bit_quant_type use_nested_quant model_revision learning_rate optim lr_scheduler_type warmup_steps seed data_seed "
    "max_length packing packing_strategy train_sampling_strategy"
).split()


def checkpoint_problems(folder: Path, model_args, training_args) -> Iterator[str]:
    """A good checkpoint against the run that wants to go on from it."""
    name, state = f"--resume_from_checkpoint {folder}", training_state(folder)
    now = run_record.arguments(model_args, training_args)
    for key in KEPT_ON_RESUME:
        was = state["arguments"].get(key)
        if was != now[key]:
            yield (
                f"{name} was trained with --{key} {was}, now it is {now[key]}: going on needs what it was (or start anew in "
                "another --output_dir)"
            )
    batch, accumulation = training_args.per_device_train_batch_size, training_args.gradient_accumulation_steps
    ranks, wanted = training_args.world_size, state["global_batch"]
    if batch * accumulation * ranks != wanted and not training_args.auto_find_batch_size:
        fix = "--per_device_train_batch_size x --gradient_accumulation_steps x processes has to be that"
        if wanted % (batch * ranks) == 0:
            fix = f"with {ranks} processes use --gradient_accumulation_steps {wanted // (batch * ranks)}"
        elif wanted % ranks == 0:
            fix = f"with {ranks} processes use --per_device_train_batch_size {math.gcd(batch, wanted // ranks)} "
            fix += f"--gradient_accumulation_steps {wanted // ranks // math.gcd(batch, wanted // ranks)}"
        yield (
            f"{name} was trained on {wanted} rows for each step, now it would be {batch * accumulation * ranks}: {fix}, so "
            "that every row still comes once"
        )


def check_data(training_args, fingerprint: dict, model_args) -> list[str]:
    """The data of a run against those of the checkpoint it goes on from: other rows would come, or some twice.

    Returns:
        Lines for the health check about what cannot be checked.
    """
    folder = Path(training_args.resume_from_checkpoint)
    state, notes = training_state(folder), []
    was, base = state["data"], state["arguments"]["model_name_or_path"]
    if was != fingerprint:
        raise ValueError(
            f"--resume_from_checkpoint {folder}: the training data are not those it was trained on ({was['rows']} rows and "
            f"{was['tokens']} tokens then, {fingerprint['rows']} and {fingerprint['tokens']} now): give the same "
            "--dataset_name, --splits and --chat_template_format, or start anew in another --output_dir"
        )
    if base != model_args.model_name_or_path:
        notes.append(f"the base model was {base} when {folder.name} was written; it has to be the same weights")
    if training_args.train_sampling_strategy not in ("random", "sequential"):
        notes.append(
            f"--train_sampling_strategy {training_args.train_sampling_strategy} draws its order anew, so some rows of this "
            "epoch may come twice and others not"
        )
    return notes


def target_problems(value: str, model) -> Iterator[str]:
    """Each part of `--lora_target_modules` that matches no module, or one that LoRA cannot adapt."""
    targets = utils.target_modules(value)
    for target in targets if isinstance(targets, list) else [targets]:
        yield from refusals(utils.check_target_modules, target, model)


def launch_problems(model_args, training_args, fsdp: FsdpSettings | None, config) -> Iterator[str]:
    """All that is wrong with the arguments, the Accelerate config and the model's `config.json`, whatever the machine."""
    # About a second for a 70B: made once, and only if a check asks for it.
    meta = functools.cache(functools.partial(loading.meta_model, config, training_args.trust_remote_code))
    yield from quantization_problems(model_args, fsdp, config)
    yield from precision_problems(model_args, training_args, fsdp, config)
    yield from fsdp_problems(model_args, training_args, fsdp, config, meta)
    yield from trainer_problems(model_args, training_args, fsdp)
    yield from range_problems(model_args, training_args)
    yield from refusals(check_packing, training_args, meta)
    if model_args.use_peft_lora:
        try:
            yield from target_problems(model_args.lora_target_modules, meta())
        except ValueError as error:
            yield str(error)


def machine_problems(model_args, training_args) -> Iterator[str]:
    """What is wrong with the arguments on this machine: its devices and its packages."""
    if "WORLD_SIZE" not in os.environ and not training_args.use_cpu and torch.cuda.device_count() > 1:
        yield (
            f"one process on a machine with {torch.cuda.device_count()} GPUs: use `accelerate launch` with several "
            "processes (run_peft_ddp.sh), or make one GPU visible with CUDA_VISIBLE_DEVICES=0"
        )
    yield from refusals(utils.attention_implementation, model_args.use_flash_attn, training_args.use_cpu)
    if model_args.use_flash_attn and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        yield (
            f"--use_flash_attn True needs a GPU of compute capability 8.0 and {torch.cuda.get_device_name()} has "
            f"{'.'.join(map(str, torch.cuda.get_device_capability()))}: set --use_flash_attn False"
        )


def check_launch(model_args, training_args, fsdp: FsdpSettings | None, config) -> None:
    """Raise ValueError for the first thing that is wrong, before any weight is read."""
    raise_first(launch_problems(model_args, training_args, fsdp, config))
    raise_first(machine_problems(model_args, training_args))
    raise_first(file_problems(model_args, training_args))
