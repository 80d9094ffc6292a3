"""The command line: every argument of `train.py`, from flags, from a YAML or JSON recipe, or from both.

    train.py --model_name_or_path ID --dataset_name ID [flags]
    train.py --config recipe.yaml [flags]        flags win over the recipe
    train.py recipe.yaml [flags]

A recipe is turned into flags before anything is read from it, so one parser checks types, choices and names wherever a
value was written: `1e-4` is a number, `"False"` is false, and an unknown key is an error that names the nearest one.
"""

import argparse
import dataclasses
import difflib
import json
import re
import sys
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from transformers import HfArgumentParser
from trl import SFTConfig


@dataclass
class ModelArguments:
    """What is loaded, how it is quantised and what is trained on it."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id or local folder of the base model (required)."}
    )
    model_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a Hub model."})
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = field(
        default="auto",
        metadata={
            "aliases": ["--torch_dtype"],
            "help": "Type of the base weights; auto keeps the checkpoint's (float32 costs 16 GiB per GPU at 70B on 8)",
        },
    )
    use_flash_attn: bool = field(
        default=False, metadata={"help": "FlashAttention 2, from flash-attn or else the hub kernel; otherwise SDPA."}
    )
    chat_template_format: str | None = field(
        default=None,
        metadata={
            "help": "chatml, zephyr, none (rows are plain text), model (the tokenizer's own) or a .jinja file; "
            "unset: model if there is one"
        },
    )
    new_special_tokens: str | None = field(
        default=None,
        metadata={
            "help": "Comma list of control tokens that a template or the data need; those that are missing are added and "
            "their rows trained"
        },
    )

    use_4bit_quantization: bool = field(default=False, metadata={"help": "QLoRA: 4-bit base weights (bitsandbytes)."})
    use_8bit_quantization: bool = field(default=False, metadata={"help": "8-bit base weights; not under FSDP."})
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = field(default="nf4", metadata={"help": "4-bit data type."})
    use_nested_quant: bool = field(default=True, metadata={"help": "Also quantise the 4-bit statistics."})
    bnb_4bit_compute_dtype: Literal["bfloat16", "float16", "float32"] = field(
        default="bfloat16", metadata={"help": "Type the 4-bit weights are expanded to for a matrix product."}
    )
    bnb_4bit_quant_storage_dtype: Literal["bfloat16", "float16", "float32", "uint8"] = field(
        default="bfloat16", metadata={"help": "Type the 4-bit weights are packed in; FSDP shards only floating ones."}
    )

    use_peft_lora: bool = field(default=True, metadata={"help": "Train LoRA adapters; False trains every weight."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the adapters, divided by the rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before lora_A; 0 saves memory and time."})
    lora_target_modules: str = field(
        default="all-linear", metadata={"help": "all-linear, a comma-separated list of names, or a regex of full names."}
    )
    use_rslora: bool = field(default=False, metadata={"help": "Scale by alpha / sqrt(r) (rank-stabilised LoRA)."})
    use_dora: bool = field(default=False, metadata={"help": "DoRA: also train a magnitude per output; slower."})


@dataclass
class DataArguments:
    """What is trained on."""

    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Hub id, local file, folder or glob (json, jsonl, csv, parquet), or save_to_disk folder. Required"
        },
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    splits: str = field(
        default="train", metadata={"help": "Comma list: the first split is trained on, a second one is evaluated on."}
    )
    dataset_mixture: str | None = field(
        default=None,
        metadata={"help": "YAML file with several data sets and their weights, instead of --dataset_name; see the README"},
    )
    eval_fraction: float | None = field(
        default=None, metadata={"help": "Evaluate on this share of the training rows, which are then not trained on."}
    )
    max_samples: int | None = field(default=None, metadata={"help": "Train on the first N rows of each data set only."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first N rows only."})
    streaming: bool = field(
        default=False, metadata={"help": "Read and tokenise rows as they are needed, instead of all of them first."}
    )
    shuffle_buffer: int = field(default=1000, metadata={"help": "Rows of a stream among which the next is drawn."})

    format: Literal["messages", "sharegpt", "prompt-completion", "instruction", "text"] | None = field(
        default=None, metadata={"help": "What a row is; unset: recognised by its columns, and printed."}
    )
    columns: str | None = field(
        default=None, metadata={"help": "Names of columns, where they differ: prompt=question,completion=answer."}
    )
    on_bad_row: Literal["error", "skip"] = field(
        default="error", metadata={"help": "Stop at a row that cannot be used, or leave it out and count it."}
    )
    add_special_tokens: bool | None = field(
        default=None,
        metadata={"help": "Let the tokenizer add its BOS/EOS; unset: yes for plain text, no after a chat template."},
    )
    append_concat_token: bool = field(
        default=True, metadata={"help": "End every row with EOS unless it ends with one already."}
    )
    control_tokens_in_text: Literal["keep", "escape"] | None = field(
        default=None,
        metadata={
            "help": "Control tokens written in plain text are such (it was rendered before), or text; unset: ask; in chats "
            "they are text"
        },
    )
    loss_on: Literal["assistant", "completion", "all"] | None = field(
        default=None,
        metadata={"help": "Tokens to learn from; unset: assistant for chats, completion after a prompt, all of plain text"},
    )
    truncation: Literal["right", "left", "drop", "error"] = field(
        default="right", metadata={"help": "What is done with rows longer than --max_length; counted in the data report."}
    )
    max_unsupervised: float = field(
        default=0.05, metadata={"help": "Stop if a larger share of the rows has no token to learn from."}
    )
    data_only: bool = field(
        default=False, metadata={"help": "Prepare the data, write the report to --output_dir and stop, without the model."}
    )


@dataclass
class TrainingConfig(SFTConfig):
    """TRL's `SFTConfig` (with every `TrainingArguments` field) under the guide's names and this project's defaults."""

    max_length: int | None = field(
        default=2048,
        metadata={
            "aliases": ["--max_seq_len", "--max-seq-len", "--max_seq_length", "--max-seq-length"],
            "help": "Tokens per row; see --truncation for longer ones.",
        },
    )
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "help": "auto: the newest good checkpoint-N of --output_dir, or anew if there is none; True: there must be one; "
            "a folder; False"
        },
    )
    dry_run: bool = field(
        default=False,
        metadata={"help": "Check the launch, print what it needs and stop, before anything is loaded; see preflight.py."},
    )
    use_reentrant: bool | None = field(
        default=None, metadata={"help": "Reentrant gradient checkpointing; unset: False, PyTorch's recommendation."}
    )

    def __post_init__(self):
        # The Trainer copies the checkpointing kwargs while it is built, so they have to be right before it starts.
        kwargs = self.gradient_checkpointing_kwargs
        try:
            kwargs = dict(json.loads(kwargs) if isinstance(kwargs, str) else kwargs or {})
        except (TypeError, ValueError):
            raise ValueError(f"--gradient_checkpointing_kwargs {kwargs!r} is not a JSON object like {{}}") from None
        if self.use_reentrant is not None and kwargs.get("use_reentrant", self.use_reentrant) != self.use_reentrant:
            raise ValueError(
                f"--use_reentrant {self.use_reentrant} contradicts --gradient_checkpointing_kwargs {kwargs}: drop one"
            )
        if self.use_reentrant is not None:
            kwargs["use_reentrant"] = self.use_reentrant
        kwargs.setdefault("use_reentrant", False)
        # Transformers renames both fields in v6 and mirrors the old names from the new ones until then.
        self.activation_checkpointing, self.activation_checkpointing_kwargs = self.gradient_checkpointing, kwargs
        self.dataset_kwargs = {"skip_prepare_dataset": True}  # rows come with their labels, cut and packed (see data.py)
        # bf16 by default, as TRL has it, but not where it is emulated: on most CPUs it is an order of magnitude slower.
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu
        super().__post_init__()


# Arguments of the underlying libraries that would be accepted and then do nothing here, with what to use instead.
REFUSED = {
    "fsdp": "FSDP is configured by the Accelerate config file, see configs/",
    "fsdp_config": "FSDP is configured by the Accelerate config file, see configs/",
    "deepspeed": "this script trains with FSDP, DDP or on one device",
    "model_init_kwargs": "the model is built from --model_revision, --dtype, --use_flash_attn and the quantisation flags",
    "dataset_kwargs": "use --add_special_tokens and --append_concat_token",
    "chat_template_path": "use --chat_template_format FILE.jinja",
    "eos_token": "the end-of-turn token follows the chat template: use --chat_template_format",
    "assistant_only_loss": "use --loss_on assistant, which is also the default for chats",
    "completion_only_loss": "use --loss_on completion, or --loss_on all",
    "truncation_mode": "use --truncation right, left, drop or error",
    "pad_token": "a padding token that is not EOS is chosen and printed by the health check",
    "activation_checkpointing": "use --gradient_checkpointing",
    "activation_checkpointing_kwargs": "use --use_reentrant or --gradient_checkpointing_kwargs",
    "do_train": "train.py always trains",
    "do_predict": "train.py trains and evaluates only",
    "do_eval": "set --eval_strategy and name a second split in --splits",
    "hub_token": "the Trainer would upload it inside training_args.bin; set HF_TOKEN or run `hf auth login`",
    "enable_jit_checkpoint": "SIGTERM and SIGINT always stop all ranks at one step, with a checkpoint",
    "ignore_data_skip": "a resumed run goes on with the rows that come next",
    "neftune_noise_alpha": "it changes the forward of the embedding that FSDP shards and is not supported",
}

# Arguments that may be null in a recipe.
OPTIONAL = {
    field.name
    for cls in (ModelArguments, DataArguments, TrainingConfig)
    for field in dataclasses.fields(cls)
    if type(None) in typing.get_args(field.type)
}

# Flags that act only together with another; given without it they would be ignored.
NEEDS = [
    (r"bnb_4bit_.*|use_nested_quant", "use_4bit_quantization"),
    (r"lora_.*|use_dora|use_rslora", "use_peft_lora"),
    (r"use_reentrant|gradient_checkpointing_kwargs", "gradient_checkpointing"),
    (r"packing_strategy", "packing"),
    (r"shuffle_buffer", "streaming"),
    (r"metric_for_best_model|greater_is_better", "load_best_model_at_end"),
]

# --help, by subject. The first pattern that matches a name decides; the rest is shown last.
HELP_GROUPS = [
    ("model", r"model_name_or_path|model_revision|dtype|use_flash_attn|trust_remote_code|router_aux_loss_coef"),
    ("LoRA", r"use_peft_lora|lora_.*|use_rslora|use_dora"),
    ("quantisation (QLoRA)", r"use_4bit_quantization|use_8bit_quantization|bnb_.*|use_nested_quant"),
    (
        "data",
        r"dataset_.*|splits|chat_template_format|new_special_tokens|add_special_tokens|append_concat_token|max_length"
        r"|truncation|.*packing.*|padding_free|pad_to_multiple_of|shuffle_(dataset|buffer)|loss_on|format|columns|on_bad_row"
        r"|eval_fraction|max_(eval_)?samples|streaming|control_tokens_in_text|max_unsupervised|data_only",
    ),
    (
        "optimisation",
        r"num_train_epochs|max_steps|learning_rate|lr_scheduler.*|warmup_.*|weight_decay|max_grad_norm|optim.*|adam_.*"
        r"|loss_type|label_smoothing_factor|average_tokens_across_devices",
    ),
    ("batch", r"per_device_.*|gradient_accumulation_steps|auto_find_batch_size|train_sampling_strategy|group_by_length"),
    (
        "memory and precision",
        r"gradient_checkpointing.*|use_reentrant|activation_offloading|bf16.*|fp16.*|tf32|torch_empty_cache_steps"
        r"|use_liger_kernel|liger_.*|torch_compile.*|use_cpu|use_cache",
    ),
    (
        "evaluation",
        r"eval_.*|prediction_loss_only|metric_for_best_model|greater_is_better|load_best_model_at_end|batch_eval.*",
    ),
    ("saving and resuming", r"output_dir|dry_run|save_.*|resume_from_checkpoint|restore_.*|ignore_data_skip|enable_jit_.*"),
    ("logging", r"log.*|report_to|run_name|project|trackio.*|disable_tqdm|include_.*|.*_tokens_seen"),
    ("Hub", r"push_to_hub|hub_.*"),
    ("reproducibility", r"seed|data_seed|full_determinism"),
    ("data loading and processes", r"dataloader_.*|ddp_.*|accelerator_config|parallelism_config|remove_unused_columns"),
]


class ArgumentParser(HfArgumentParser):
    """`HfArgumentParser` that raises `ValueError` instead of printing its usage and leaving, and refuses prefixes."""

    def __init__(self, *dataclass_types):
        super().__init__(
            dataclass_types,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            prog="train.py",
            usage="%(prog)s [recipe.yaml] [--flag value ...]",
        )
        self.description = __doc__

    def error(self, message: str) -> None:
        # argparse lists both spellings of a name; one is enough.
        raise ValueError(re.sub(r"^argument (--[^/:]+)[^:]*:", r"\1:", message))

    def option(self, name: str):
        """The action of an argument by its name or alias, written with `_` or `-`; None if there is none."""
        return self._option_string_actions.get("--" + name.replace("-", "_"))

    def nearest(self, name: str) -> str:
        """`; did you mean …?` for an unknown name, or nothing if no argument is like it."""
        known = [option[2:] for option in self._option_string_actions if option.startswith("--") and "-" not in option[2:]]
        found = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
        return f"; did you mean {found[0]}?" if found else "; --help lists them"

    def group_help(self) -> None:
        """Sort the arguments of `--help` by subject, one line of help each."""
        actions = [action for action in self._actions if action.dest not in ("help", "config")]
        actions = [action for action in actions if not action.option_strings[0].startswith("--no_")]
        for action in actions:
            first = re.split(r"(?<=[^.][.])\s", " ".join((action.help or "").replace("``", "`").split()))[0].rstrip(".")
            action.help = first if len(first) <= 110 else first[:107].rsplit(" ", 1)[0] + " ..."
            if "%(default)s" not in action.help and action.default is not None:
                action.help += " (default: %(default)s)"
        self._action_groups = self._action_groups[:2]
        for group in self._action_groups:
            group._group_actions = [action for action in group._group_actions if action.dest in ("help", "config")]
        rest = [action for action in actions if action.dest not in REFUSED]
        for title, pattern in [*HELP_GROUPS, ("other TRL and Transformers arguments", ".*")]:
            group = self.add_argument_group(title)
            group._group_actions = [action for action in rest if re.fullmatch(pattern, action.dest)]
            rest = [action for action in rest if action not in group._group_actions]


@dataclass
class Command:
    """A command line that was read and checked; nothing is built from it yet."""

    values: argparse.Namespace
    given: set[str]  # arguments that were written, in a recipe or as a flag

    @property
    def use_cpu(self) -> bool:
        return self.values.use_cpu

    def build(self) -> tuple[ModelArguments, DataArguments, TrainingConfig]:
        """The argument objects. Building `TrainingConfig` also starts the process group.

        Raises:
            ValueError: arguments that contradict each other, or one that would do nothing.
        """
        built = []
        for cls in (ModelArguments, DataArguments, TrainingConfig):
            names = [f.name for f in dataclasses.fields(cls) if f.init]
            built.append(cls(**{name: getattr(self.values, name) for name in names}))
        for pattern, needed in NEEDS:
            for name in sorted(name for name in self.given if re.fullmatch(pattern, name)):
                if not getattr(self.values, needed):
                    raise ValueError(f"--{name} has no effect without --{needed} True: drop one or add the other")
        if "eval_steps" in self.given and self.values.eval_strategy == "no":
            raise ValueError("--eval_steps has no effect with --eval_strategy no: add --eval_strategy steps")
        return tuple(built)

    def build_without_hardware(self) -> tuple[ModelArguments, DataArguments, TrainingConfig]:
        """The argument objects as for a CPU without mixed precision, so that no device has to be there."""
        plain = dict(use_cpu=True, bf16=False, fp16=False, tf32=None, torch_compile=False)
        return Command(argparse.Namespace(**vars(self.values) | plain), self.given).build()


def parse(argv: list[str] | None = None) -> Command:
    """Read the command line (`sys.argv[1:]` if None) and the recipe it names.

    Raises:
        ValueError: one line that names the argument, the value, the recipe it came from and what to write instead.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = ArgumentParser(ModelArguments, DataArguments, TrainingConfig)
    parser.add_argument("--config", metavar="FILE", help="Recipe (YAML or JSON) with any of the arguments below")
    if any(token in ("-h", "--help") for token in argv):
        parser.group_help()
        parser.print_help()
        sys.exit(0)

    recipe, argv = _take_recipe(argv)
    tokens, nulls = _recipe_to_tokens(parser, recipe) if recipe else ([], [])
    if tokens:
        try:
            parser.parse_known_args(tokens)
        except ValueError as error:
            raise ValueError(f"{error} (in {recipe})") from None
    parser.set_defaults(**dict.fromkeys(nulls))
    refuse_unknown(parser, argv)
    given = _given(parser, tokens) | _given(parser, argv)
    for name in sorted(given & set(REFUSED)):
        raise ValueError(f"--{name} has no effect here: {REFUSED[name]}")
    values = parser.parse_args(tokens + argv)
    for name in ("model_name_or_path", "dataset_name"):
        if getattr(values, name) is None and not (name == "dataset_name" and values.dataset_mixture is not None):
            raise ValueError(f"--{name} is required: give it as a flag or in a recipe (train.py recipe.yaml)")
    if values.dataset_mixture is not None:
        for name in sorted(given & {"dataset_name", "dataset_config_name", "splits"}):
            raise ValueError(f"--{name} has no effect with --dataset_mixture, which names the data: drop one")
    return Command(values, given)


def _take_recipe(argv: list[str]) -> tuple[str | None, list[str]]:
    """Split off `--config FILE`, `--config=FILE` or a bare recipe in first place."""
    if argv and not argv[0].startswith("-"):
        if Path(argv[0]).suffix not in (".yaml", ".yml", ".json"):
            raise ValueError(f"{argv[0]!r} is neither a flag (--name value) nor a recipe (.yaml, .yml or .json)")
        return argv[0], argv[1:]
    if sum(token.partition("=")[0] == "--config" for token in argv) > 1:
        raise ValueError("--config is given twice: put everything into one recipe, or into flags")
    for index, token in enumerate(argv):
        if token == "--config":
            if index + 1 == len(argv):
                raise ValueError("--config needs a file: --config recipe.yaml")
            return argv[index + 1], argv[:index] + argv[index + 2 :]
        if token.startswith("--config="):
            return token.partition("=")[2], argv[:index] + argv[index + 1 :]
    return None, argv


class UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word; here the second is an error."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"key {key!r} is written twice")
        return super().construct_mapping(node, deep)


def _recipe_to_tokens(parser: ArgumentParser, recipe: str) -> tuple[list[str], list[str]]:
    """Flags for the recipe's keys, and the names it sets to null."""
    path = Path(recipe)
    if not path.is_file():
        raise ValueError(f"recipe {recipe} does not exist: --config takes the path of a .yaml or .json file")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=UniqueKeyLoader)  # JSON is YAML
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {recipe} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"recipe {recipe} must be a list of `name: value` lines, not a {type(content).__name__}")
    if "fsdp_config" in content and "distributed_type" in content:
        raise ValueError(f"{recipe} is an Accelerate config: give it to `accelerate launch --config_file {recipe}`")
    tokens, nulls, seen = [], [], {}
    for key, value in content.items():
        action = parser.option(str(key))
        if action is None or action.dest in ("help", "config"):
            raise ValueError(f"unknown argument {key!r} in {recipe}{parser.nearest(str(key))}")
        if action.dest in seen:
            raise ValueError(f"{recipe} sets {action.dest} twice: as {seen[action.dest]} and as {key}")
        seen[action.dest] = key
        if value is None:
            if action.dest not in OPTIONAL:
                raise ValueError(f"{key}: null in {recipe}: this argument needs a value; drop the line for its default")
            nulls.append(action.dest)
            continue
        values = _value_to_tokens(action, value)
        tokens += [f"--{key}={values[0]}"] if len(values) == 1 else [f"--{key}", *values]
    return tokens, nulls


def _value_to_tokens(action, value: Any) -> list[str]:
    if isinstance(value, bool):
        is_choice = action.type is not None and getattr(action.type, "__name__", "") != "string_to_bool"
        return ["no" if is_choice and not value else str(value)]  # YAML reads a bare `no` as false
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value)):
        return [json.dumps(value, default=str)]  # YAML makes a date of 2024-01-01
    if isinstance(value, list):
        return [str(item) for item in value] if action.nargs in ("+", "*") else [",".join(str(item) for item in value)]
    return [str(value)]


def refuse_unknown(parser: ArgumentParser, argv: list[str]) -> None:
    """Raise ValueError for a word of the command line that is no argument of the parser, with the nearest one."""
    for token in argv:
        name = token.partition("=")[0]
        if name.startswith("--") and parser.option(name[2:]) is None:
            raise ValueError(f"unknown argument {name}{parser.nearest(name[2:])}")
    unknown = parser.parse_known_args(argv)[1]
    if unknown:
        raise ValueError(f"{unknown[0]!r} on the command line belongs to no argument")


def _given(parser: ArgumentParser, tokens: list[str]) -> set[str]:
    names = (token[2:].partition("=")[0] for token in tokens if token.startswith("--"))
    return {parser.option(name).dest for name in names}
