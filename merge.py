"""Merge an adapter into its base model, tensor by tensor, and check the result by its logits.

    merge.py --adapter DIR --out DIR [--base ID] [--dtype auto|float32|bfloat16|float16]
    merge.py --help

`--adapter` is the output folder of `train.py`, any `checkpoint-N` in it, or any LoRA adapter that PEFT saved. PEFT does the
arithmetic, one layer at a time and in float32: the model and its adapter are built without the base weights, a layer that
the adapter changes is given its own, merged, rounded once, written and dropped. Every other tensor is copied. So the RAM
needed is the adapter and a few copies of the largest tensor, whatever the size of the model.
"""

import copy
import hashlib
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import bitsandbytes
import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils.other import ModulesToSaveWrapper
from safetensors.torch import load_file
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig, GenerationConfig, PretrainedConfig
from transformers.core_model_loading import build_glob_alternation, revert_weight_conversion
from transformers.pytorch_utils import Conv1D
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_SAFE_WEIGHTS_NAME,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
)

import arguments
import checkpoint
import loading
import merge_check
import utils
import weights
from errors import one_line_errors
from merge_check import Comparison, Owner

ADAPTER = "default"  # PEFT's name for it
UNFINISHED = "merge.unfinished"  # in a folder of ours that is not complete
PROMPTS = (
    "The capital of France is Paris, and the largest city of Germany is",
    "Dear customer, thank you for your message. Your order was sent on",
    "def add(a, b):\n    return a + b\n\n\ndef multiply(a, b):",
    "1, 2, 3, 5, 8, 13,",
)
# Initialisations that change the base weights too: what they are merged into is not the base that is on the disk.
CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
CPU = torch.device("cpu")
BLOCK = 1 << 22  # elements that are converted or compared at a time


@dataclass
class MergeArguments:
    """What is merged, where to, and how it is checked."""

    adapter: str | None = field(default=None, metadata={"help": "Folder of the adapter, or a checkpoint-N (required)."})
    base: str | None = field(
        default=None, metadata={"help": "Hub id or local folder of the base; unset: the one adapter_config.json names."}
    )
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a Hub base."})
    out: str | None = field(default=None, metadata={"help": "Folder to write, new or empty (required)."})
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto", metadata={"help": "Type of the merged weights; auto keeps the type each has in the base."}
    )
    max_shard_size: str = field(default="5GB", metadata={"help": "Largest file, such as 5GB or 500MB."})
    base_weights: Literal["stored", "nf4"] = field(
        default="stored",
        metadata={"help": "Merge into the base as it is stored, or as 4-bit training saw it (quantised and expanded again)"},
    )
    trained_in_4bit: Literal["auto", "nf4", "fp4", "no"] = field(
        default="auto",
        metadata={"help": "Whether the adapter was trained on a 4-bit base; auto reads what train.py wrote beside it."},
    )
    verify: bool = field(default=True, metadata={"help": "Compare the logits of the merged and the unmerged model."})
    prompts: str | None = field(
        default=None, metadata={"help": "File of sample prompts, one a line; unset: a built-in few."}
    )


def parse(argv: list[str] | None = None) -> MergeArguments:
    """Read the command line (`sys.argv[1:]` if None).

    Raises:
        ValueError: one line that names the argument and what to write instead.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = arguments.ArgumentParser(MergeArguments)
    parser.prog, parser.usage, parser.description = (
        "merge.py",
        "%(prog)s --adapter DIR --out DIR [--flag value ...]",
        __doc__,
    )
    if any(token in ("-h", "--help") for token in argv):
        parser.print_help()
        sys.exit(0)
    arguments.refuse_unknown(parser, argv)
    values = parser.parse_args(argv)
    for name in ("adapter", "out"):
        if getattr(values, name) is None:
            raise ValueError(f"--{name} is required: merge.py --adapter DIR --out DIR")
    args = MergeArguments(**vars(values))
    if not args.verify and args.prompts is not None:
        raise ValueError(f"--prompts {args.prompts} has no effect with --verify False: drop one")
    if not args.verify and args.base_weights == "stored" and args.trained_in_4bit != "auto":
        raise ValueError(
            f"--trained_in_4bit {args.trained_in_4bit} has no effect with --verify False, which shows no drift: drop "
            "one, or add --base_weights nf4"
        )
    return args


def shard_bytes(text: str) -> int:
    """`--max_shard_size` in bytes: "5GB" is 5·10⁹, "5GiB" 5·2³⁰.

    Raises:
        ValueError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", text.strip(), flags=re.IGNORECASE)
    size = match and float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")
    if not size or size < 1:
        raise ValueError(f"--max_shard_size {text!r} is not a size: write it as 5GB or 500MB")
    return int(size)


# --- The adapter ---------------------------------------------------------------------------------------------------------


@dataclass
class Adapter:
    """An adapter's folder, checked, and what is known of its training.

    Attributes:
        raw: its adapter_config.json.
        trained: train.py's arguments, empty if they were not written down.
    """

    folder: Path
    raw: dict
    trained: dict

    @property
    def weights(self) -> Path:
        return self.folder / ADAPTER_SAFE_WEIGHTS_NAME


def read_json(path: Path) -> dict:
    """A JSON object.

    Raises:
        ValueError: the file is not one.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): copy it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged (not a JSON object): copy it again")
    return content


def open_adapter(name: str) -> Adapter:
    """Check all that can be known of an adapter from its folder.

    Raises:
        ValueError: it is none, is damaged, or is one that cannot be merged.
    """
    folder = Path(name)
    if not folder.is_dir():
        raise ValueError(f"--adapter {name} is not a folder: give the output folder of train.py or a checkpoint-N in it")
    path = folder / ADAPTER_CONFIG_NAME
    if not path.is_file():
        whole = [file.name for file in sorted(folder.glob("model*.safetensors"))]
        if whole:
            raise ValueError(f"--adapter {name} holds a whole model ({whole[0]}), not an adapter: there is nothing to merge")
        checkpoints = sorted((p.parent.name for p in folder.glob(f"*/{ADAPTER_CONFIG_NAME}")), key=lambda n: (len(n), n))
        hint = f"give one of its folders, such as {folder / checkpoints[-1]}" if checkpoints else "give an adapter's folder"
        raise ValueError(f"--adapter {name} holds no {ADAPTER_CONFIG_NAME}: {hint}")
    raw = read_json(path)
    refuse_unmergeable(path, raw)
    adapter = Adapter(folder, raw, {})
    if not adapter.weights.is_file():
        pickled = folder / "adapter_model.bin"
        reason = (
            "only a pickle, which runs code when it is read: save it again with PEFT" if pickled.is_file() else "no weights"
        )
        raise ValueError(f"--adapter {name} holds no {ADAPTER_SAFE_WEIGHTS_NAME} ({reason})")
    weights.read_header(adapter.weights)
    problem = checkpoint.problem_with(folder) if (folder / checkpoint.MANIFEST).is_file() else None
    if problem:
        raise ValueError(f"--adapter {name}: {problem}: copy it again, or use another checkpoint")
    for file in ("run.json", "training_state.json"):
        if (folder / file).is_file():
            found = read_json(folder / file).get("arguments")
            adapter.trained = found if isinstance(found, dict) else {}
            break
    return adapter


def refuse_unmergeable(path: Path, raw: dict) -> None:
    """Raise ValueError for the varieties of adapter that have no merged form."""
    init = raw.get("init_lora_weights")
    if raw.get("peft_type") != "LORA":
        raise ValueError(
            f"{path} describes a {raw.get('peft_type')} adapter: only LORA (with DoRA and rsLoRA) is merged here"
        )
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        raise ValueError(f"{path} has task_type {raw['task_type']}: only CAUSAL_LM adapters are merged here")
    if isinstance(init, str) and init.lower().startswith(CHANGES_THE_BASE):
        raise ValueError(
            f"{path} has init_lora_weights {init!r}, which changes the base weights too: convert it to plain LoRA with "
            "PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...) first"
        )
    for name in ("layer_replication", "alora_invocation_tokens", "arrow_config"):
        if raw.get(name):
            raise ValueError(f"{path} has {name}, which cannot be merged into the weights: use the adapter unmerged")


def attach(model: nn.Module, adapter: Adapter) -> PeftModel:
    """Put the adapter, with its weights in float32, on a model of placeholders.

    Raises:
        ValueError: it is not an adapter of this model.
    """
    where = f"--adapter {adapter.folder}"
    config = LoraConfig.from_pretrained(adapter.folder)
    config.inference_mode = True
    tensors = load_file(adapter.weights)
    try:
        # Without memory at first: PEFT would compute initial values, of DoRA from the base weights, to drop them at once.
        peft_model = get_peft_model(model, config, low_cpu_mem_usage=True)
        result = set_peft_model_state_dict(peft_model, tensors, ADAPTER, low_cpu_mem_usage=True)
    except (ValueError, KeyError, RuntimeError, TypeError, AttributeError, IndexError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:240]
        raise ValueError(
            f"{where} does not fit the base {model.config.name_or_path} ({reason}): name its own base in --base"
        ) from None
    expected = {name: p for name, p in peft_model.named_parameters(remove_duplicate=False) if f".{ADAPTER}" in name}
    absent = set(result.missing_keys)
    there = {id(p) for name, p in expected.items() if name not in absent}  # a tied layer's is there under another name
    missing = [name for name, p in expected.items() if name in absent and id(p) not in there]
    if missing or result.unexpected_keys:
        raise ValueError(
            f"{where} does not fit the base {model.config.name_or_path} ({len(missing)} tensors are missing: {missing[:1]}, "
            f"{len(result.unexpected_keys)} have no place: {result.unexpected_keys[:1]}): name its own base in --base"
        )
    for parameter in expected.values():
        parameter.data = parameter.data.float()
        if not parameter.isfinite().all():
            raise ValueError(f"{adapter.weights} holds values that are not finite: use an earlier checkpoint")
    return peft_model.eval()


# --- The base ------------------------------------------------------------------------------------------------------------


@dataclass
class Quantization:
    """The 4 bits an adapter was trained on, and the type of the weights that are not quantised."""

    config: BitsAndBytesConfig
    dtype: str


def trained_quantization(adapter: Adapter, stated: str) -> tuple[Quantization | None, bool]:
    """The 4-bit settings of the training run, and whether anything is known of it."""
    given = adapter.trained
    if stated == "auto" and "use_4bit_quantization" not in given:
        return None, False
    if stated == "no" or (stated == "auto" and not given["use_4bit_quantization"]):
        return None, True
    storage = given.get("bnb_4bit_quant_storage_dtype", "bfloat16")
    config = utils.quantization_config(
        use_4bit=True,
        quant_type=given.get("bnb_4bit_quant_type", "nf4") if stated == "auto" else stated,
        nested=given.get("use_nested_quant", True),
        compute_dtype=given.get("bnb_4bit_compute_dtype", "bfloat16"),
        storage_dtype=storage,
    )
    return Quantization(config, storage if storage != "uint8" else given.get("dtype", "auto")), True


def load_base_config(name: str, revision: str | None, source: str) -> tuple[PretrainedConfig, dict]:
    """The base's configuration, and its config.json as it is written.

    Raises:
        ValueError: there is none, or its weights are quantised in a way that cannot be undone here.
    """
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        raw = read_json(Path(cached_file(name, CONFIG_NAME, revision=revision)))
    except Exception as error:  # a damaged config.json raises what its reader happens to
        raise ValueError(
            f"no base model at {name} ({source}): give a Hub id you can reach or a local folder with --base "
            f"({(str(error) or repr(error)).splitlines()[0]})"
        ) from None
    stored = utils.stored_quantization(config)
    if stored and not stored.get("load_in_4bit"):
        raise ValueError(
            f"the base {name} is quantised ({stored.get('quant_method')}): merge into its 16-bit original, with --base"
        )
    return config, raw


def blocks(size: int) -> Iterator[slice]:
    """The elements of a flattened tensor, a few megabytes at a time."""
    return (slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK))


def read_weight(source: loading.StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """A weight as its layer computes with it, in its own shape and in `dtype`, without a second copy in the stored type."""
    if isinstance(source, loading.QuantizedWeight):
        packed, state = source.packed(CPU)
        state.dtype = source.layer.compute_dtype  # bitsandbytes expands into it, whatever type the weight once had
        value = bitsandbytes.functional.dequantize_4bit(packed, state).to(dtype)
        return value.T.contiguous() if issubclass(source.layer.source_cls, Conv1D) else value
    if source.group.converter is not None:
        return source.base_weight(CPU).to(dtype)
    out = torch.empty(source.shape, dtype=dtype)
    flat = out.view(-1)
    for part in blocks(flat.numel()):
        flat[part] = source[part].to(source.dtype)
    return out


class Base:
    """The base model without its weights, and each of them when it is asked for.

    Args:
        stored: 4-bit settings of a base that is stored so, else None.
        trained: 4-bit settings of the training, if its weights are wanted too.
        vocabulary: rows that the embeddings need at least.
        row_dtype: the type in which training took the mean that new rows start from; None: the stored one.

    Attributes:
        model: modules on the CPU whose parameters are placeholders; nothing is in memory but buffers.
        names: the name of every parameter in the model, before an adapter is attached. Tied ones have two.
    """

    def __init__(self, name, revision, config, stored, trained: Quantization | None, vocabulary: int, row_dtype):
        config = copy.deepcopy(config)  # building a model writes its type there
        config.__dict__.pop("quantization_config", None)
        load = dict(revision=revision, stored_in_4bit=stored is not None)
        plain = loading.defer(name, copy.deepcopy(config), dtype=torch.float32, **load)
        self.checkpoint, self.groups, self.model = plain.checkpoint, plain.groups, plain.model
        self.rows = self.model.get_input_embeddings().weight.shape[0]
        self.grown = vocabulary > self.rows
        if self.grown:
            self._grow(plain, vocabulary, row_dtype)
        self.sources = {owner: source.name for owner, source in plain.sources.items()}
        self._plain = {source.name: source for source in plain.sources.values()}
        self._expanded = {}
        quantization = stored or trained
        if quantization is not None:
            quantized = loading.defer(name, config, dtype=quantization.dtype, quantization=quantization.config, **load)
            quantized.grow_vocabulary(vocabulary)
            self._expanded = {source.name: source for source in quantized.sources.values()}
            self.unquantized_dtype = quantized.dtype
        self.stored_in_4bit = stored is not None
        self.names: dict[Owner, str] = {}
        for prefix, module in self.model.named_modules():
            for attribute in module._parameters:
                if (module, attribute) in self.sources:
                    self.names[module, attribute] = f"{prefix}.{attribute}" if prefix else attribute
        self._put_placeholders()

    def _grow(self, plain: loading.Deferred, size: int, row_dtype) -> None:
        head = self.model.get_output_embeddings()
        if head is not None and head.bias is not None:
            raise ValueError(
                f"{self.checkpoint.name}: tokens were added and the output embedding has a bias, which cannot grow: use the "
                "adapter unmerged"
            )
        sources = {plain.sources[m, "weight"] for m in (self.model.get_input_embeddings(), head) if m is not None}
        for source in sources:
            source.dtype = row_dtype or self.checkpoint.tensors[source.group.key].dtype
        plain.grow_vocabulary(size)
        for source in sources:
            source.dtype, source.extra = torch.float32, source.extra.float()

    def _put_placeholders(self) -> None:
        made: dict[int, nn.Parameter] = {}  # tied weights stay one parameter
        for module, attribute in self.names:
            old = module._parameters[attribute]
            module._parameters[attribute] = made.setdefault(id(old), merge_check.placeholder(old))
        left = [name for name, parameter in self.model.named_parameters() if parameter.is_meta]
        assert not left, f"nothing is known to fill {left[:3]} with"

    def value(self, owner: Owner, expanded: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A parameter's values, in memory of their own, in `dtype`. See `read_weight`.

        Args:
            expanded: what its 4 bits stand for, instead of what is stored.
        """
        return read_weight((self._expanded if expanded or self.stored_in_4bit else self._plain)[self.sources[owner]], dtype)

    def is_quantized(self, owner: Owner, expanded: bool) -> bool:
        """Whether `value` differs from the stored tensor by quantisation."""
        source = self._expanded.get(self.sources[owner])
        return (expanded or self.stored_in_4bit) and isinstance(source, loading.QuantizedWeight)

    def tied(self) -> tuple[Owner, Owner] | None:
        """Input and output embedding, if they share their weight."""
        pair = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if None in pair or not self.model.all_tied_weights_keys:
            return None
        owners = (pair[0], "weight"), (pair[1], "weight")
        return owners if all(o in self.sources for o in owners) and len({self.sources[o] for o in owners}) == 1 else None


class Merged:
    """Base and adapter as one: what each parameter is after the merge, computed when it is asked for.

    Attributes:
        peft_model: the unmerged model, of placeholders.
        expanded: whether the base is what its 4 bits stand for.
        tied: input and output embedding, if the base shares their weight.
    """

    def __init__(self, base: Base, adapter: Adapter, expanded: bool):
        self.base, self.expanded, self.tied = base, expanded, base.tied()
        before = {owner: owner[0]._parameters[owner[1]] for owner in base.names}
        self.peft_model = attach(base.model, adapter)
        self.replaced: dict[Owner, torch.Tensor] = {}
        self.saved: set[Owner] = set()  # of them, those of `modules_to_save`
        self.wrappers: dict[nn.Module, list] = {}
        # PEFT saves embeddings, and biases if they are trained, under the base's names: they are the base's from here on.
        loaded = {id(before[o]): o[0]._parameters[o[1]] for o in before if o[0]._parameters[o[1]] is not before[o]}
        for owner, parameter in before.items():
            if id(parameter) in loaded:
                self.replaced[owner] = loaded[id(parameter)].detach().float()
                owner[0]._parameters[owner[1]] = parameter
        for module in self.peft_model.modules():
            if isinstance(module, ModulesToSaveWrapper):
                for name, parameter in module.modules_to_save[ADAPTER].named_parameters():
                    prefix, _, attribute = name.rpartition(".")
                    owner = module.original_module.get_submodule(prefix), attribute
                    self.replaced[owner] = parameter.detach()
                    self.saved.add(owner)
            elif isinstance(module, LoraLayer | TrainableTokensLayer):
                self.wrappers.setdefault(module.get_base_layer(), []).append(module)

    @property
    def model(self) -> nn.Module:
        return self.peft_model.get_base_model()

    def changes(self, owner: Owner) -> bool:
        """Whether the adapter changes a parameter."""
        return owner in self.replaced or bool(self._layers(owner))

    def _layers(self, owner: Owner) -> list:
        module, attribute = owner
        found = []
        for layer in self.wrappers.get(module, ()):
            biased = isinstance(layer, LoraLayer) and layer.lora_bias.get(ADAPTER, False)
            changed = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
            if attribute == changed or (attribute == "bias" and biased):
                found.append(layer)
        return found

    def base_value(self, owner: Owner, expanded: bool | None = None) -> torch.Tensor:
        """As the unmerged model has it: stored, or loaded with the adapter under the base's name."""
        if owner in self.replaced and owner not in self.saved:
            return self.replaced[owner]
        return self.base.value(owner, self.expanded if expanded is None else expanded)

    @torch.no_grad()
    def value(self, owner: Owner, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A parameter after the merge, computed in float32, in `dtype`.

        Raises:
            ValueError: PEFT cannot merge the layer, or the values are not finite in that type.
        """
        module, attribute = owner
        layers = self._layers(owner)
        if owner in self.saved or (owner in self.replaced and not layers):
            value = self.replaced[owner]
        elif not layers:
            value = self.base.value(owner, self.expanded, dtype)
        else:
            # Rows of tokens are put in place of others; nothing is added up, so nothing needs float32.
            rows_only = all(isinstance(layer, TrainableTokensLayer) for layer in layers)
            biased = any(layer.lora_bias.get(ADAPTER) for layer in layers if isinstance(layer, LoraLayer))
            needed = ["weight", "bias"] if biased else [attribute]  # PEFT merges both at once
            kept = {name: module._parameters[name] for name in needed}
            for name in needed:
                kind = dtype if rows_only else torch.float32
                filled = self.replaced.get((module, name))
                filled = (
                    self.base.value((module, name), self.expanded, kind) if filled is None else filled.to(kind, copy=True)
                )
                module._parameters[name] = nn.Parameter(filled, requires_grad=False)
            try:
                for layer in layers:
                    layer.merge(safe_merge=False)
            except (NotImplementedError, ValueError, RuntimeError) as error:
                raise ValueError(
                    f"PEFT cannot merge {self.base.names[owner]} ({' '.join(str(error).split())[:200]})"
                ) from None
            finally:
                value = module._parameters[attribute].data
                module._parameters.update(kept)
                for layer in layers:  # the unmerged model is run as well
                    layer.merged_adapters = []
                    getattr(layer, "_caches", {}).clear()
        value = value.to(dtype)
        if not value.isfinite().all():
            fix = "use --dtype bfloat16" if dtype == torch.float16 else "the base or the adapter is damaged"
            raise ValueError(f"{self.base.names[owner]} is not finite after the merge in {dtype}: {fix}")
        return value

    def stays_tied(self, types: "Types") -> bool:
        """Whether embedding and head, tied in the base, are still equal after the merge, as they are written."""
        if self.tied is None:
            return False
        if not any(self.changes(owner) for owner in self.tied):
            return True
        name = self.base.sources[self.tied[0]]
        dtype = types.of(self.base.groups[name].key, name)
        digests = {hashlib.sha256(weights.as_bytes(self.value(owner, dtype))).digest() for owner in self.tied}
        return len(digests) == 1


# --- The files -----------------------------------------------------------------------------------------------------------


@dataclass
class Part:
    """Tensors of the merged checkpoint that are made together, and how.

    Attributes:
        layout: type and shape of each, by its name in the files.
        make: returns them, by name, of those types and shapes.
    """

    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    make: Callable[[], dict[str, torch.Tensor]]


class Types:
    """The type of every merged tensor: what `--dtype` says, but for what the model keeps in float32.

    Args:
        asked: `--dtype`.
        config: of the base; its type is that of weights that are stored in 4 bits.
    """

    def __init__(self, asked: str, base: Base, config: PretrainedConfig):
        self.asked, self.base = asked, base
        floating = [s.dtype for s in base.checkpoint.tensors.values() if s.dtype.is_floating_point]
        own = getattr(config, "dtype", None) or next(iter(floating), torch.float32)
        own = getattr(torch, own) if isinstance(own, str) else own
        self.nominal = getattr(torch, asked) if asked != "auto" else own
        plan = base.model._get_dtype_plan(self.nominal)
        self._kept = build_glob_alternation(list(plan))[0] if plan else None

    def of(self, key: str, name: str | None = None) -> torch.dtype:
        """Of a tensor by its name in the base's files, and in the model if it is there."""
        stored = self.base.checkpoint.tensors[key].dtype
        if self.asked == "auto":
            return stored if stored.is_floating_point or name is None else self.nominal
        if not stored.is_floating_point and name is None:
            return stored
        return torch.float32 if self._kept and name and self._kept.search(name) else self.nominal


def plan(base: Base, merged: Merged, types: Types, tied: bool, config: PretrainedConfig) -> list[Part]:
    """Every tensor of the merged checkpoint, in the order of the base's files.

    Args:
        tied: whether embedding and head stay one weight.

    Raises:
        ValueError: a layer that the adapter changes is stored in a form that Transformers cannot write again.
    """
    owners: dict[str, list[Owner]] = {}
    for owner in base.names:
        owners.setdefault(base.sources[owner], []).append(owner)
    groups: dict[int, weights.Group] = {id(group): group for group in base.groups.values()}
    made_by: dict[int, list[str]] = {}
    for name, group in base.groups.items():
        made_by.setdefault(id(group), []).append(name)
    bare = loading.meta_model(copy.deepcopy(config))  # Transformers derives the stored form from a model's modules

    def changed(owner):
        embedding = base.grown and owner[0] in (base.model.get_input_embeddings(), base.model.get_output_embeddings())
        return merged.changes(owner) or embedding or base.is_quantized(owner, merged.expanded)

    parts, used = [], set()
    for identity, group in groups.items():
        keys = [key for key, _ in group.keys]
        used |= {*keys, *group.statistics.values()}
        names = made_by[identity]
        # Of tied weights, the one that has the stored name.
        here = {name: min(owners[name], key=lambda o, n=name: base.names[o] != n) for name in names if name in owners}
        if not any(changed(owner) for owner in here.values()):
            parts += [copied(base, merged, key, types.of(key, names[0])) for key in keys]
        elif group.converter is None:
            parts.append(one_to_one(merged, here[names[0]], keys[0], types.of(keys[0], names[0])))
        else:
            parts.append(reverted(merged, here, keys, {key: types.of(key, names[0]) for key in keys}, bare))
    names = {base.names[owner] for owner in merged.tied or ()}
    if merged.tied and not tied:
        written = base.sources[merged.tied[0]]
        owner = next(owner for owner in merged.tied if base.names[owner] != written)
        key = base.groups[written].key
        parts.append(one_to_one(merged, owner, base.names[owner], types.of(key, written)))
    for key in base.checkpoint.tensors:
        # A second copy of a tied weight is not written: which one is read would depend on the reader.
        if key not in used and not any(name == key or name.endswith(f".{key}") for name in names):
            parts.append(copied(base, merged, key, types.of(key)))

    def position(part):
        stored = [base.checkpoint.tensors[key] for key in part.layout if key in base.checkpoint.tensors]
        return min(((str(s.file), s.offset) for s in stored), default=("~", 0))

    return sorted(parts, key=position)


def copied(base: Base, merged: Merged, key: str, dtype: torch.dtype) -> Part:
    """A tensor that the merge does not change, but in type."""

    def make():
        value = base.checkpoint.whole(key)
        if value.is_floating_point() and merged.expanded and not base.stored_in_4bit:
            value = value.to(base.unquantized_dtype)  # what 4-bit training made of the weights that it did not quantise
        return {key: value.to(dtype)}

    return Part({key: (dtype, base.checkpoint.tensors[key].shape)}, make)


def one_to_one(merged: Merged, owner: Owner, key: str, dtype: torch.dtype) -> Part:
    """A parameter that is stored as it is."""
    shape = tuple(owner[0]._parameters[owner[1]].shape)
    return Part({key: (dtype, shape)}, lambda: {key: merged.value(owner, dtype)})


def reverted(merged: Merged, here: dict[str, Owner], keys: list[str], types: dict[str, torch.dtype], bare) -> Part:
    """Parameters that are stored in another form, such as experts one by one."""
    shapes = {key: merged.base.checkpoint.tensors[key].shape for key in keys}

    def revert(read) -> dict[str, torch.Tensor]:
        return revert_weight_conversion(bare, {name: read(owner) for name, owner in here.items()})

    try:
        found = {k: tuple(v.shape) for k, v in revert(lambda o: o[0]._parameters[o[1]].to("meta")).items()}
    except Exception as error:  # a conversion without a reverse raises what it happens to
        found = {"": str(error)}
    if found != shapes:
        raise ValueError(
            f"the adapter changes {next(iter(here))}, which {merged.base.checkpoint.name} stores as {len(keys)} tensors "
            f"({keys[0]}, ...) that Transformers cannot write again in that form: use the adapter unmerged"
        )

    def make():
        with torch.no_grad():
            return {key: value.to(types[key]) for key, value in revert(merged.value).items()}

    return Part({key: (types[key], shapes[key]) for key in keys}, make)


def shards(parts: list[Part], largest: int) -> dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    """The layout of each file, by its name: of at most `largest` bytes, unless one tensor is more."""
    files: list[dict] = [{}]
    size = 0
    for part in parts:
        for key, (dtype, shape) in part.layout.items():
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            if files[-1] and size + nbytes > largest:
                files.append({})
                size = 0
            files[-1][key] = (dtype, shape)
            size += nbytes
    if len(files) == 1:
        return {SAFE_WEIGHTS_NAME: files[0]}
    stem = SAFE_WEIGHTS_NAME.removesuffix(".safetensors")
    return {f"{stem}-{i:05}-of-{len(files):05}.safetensors": layout for i, layout in enumerate(files, 1)}


def write_weights(folder: Path, parts: list[Part], files: dict[str, dict]) -> None:
    """Make and write every tensor, holding one part at a time, and the index if there are several files."""
    where = {key: name for name, layout in files.items() for key in layout}
    writers: dict[str, weights.TensorWriter] = {}
    total = sum(torch.Size(shape).numel() * dtype.itemsize for layout in files.values() for dtype, shape in layout.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc="Merging", disable=None) as bar:
        for part in parts:
            for key, tensor in part.make().items():
                name = where[key]
                if name not in writers:
                    writers[name] = weights.TensorWriter(folder / name, files[name])
                writers[name].write(key, tensor)
                bar.update(tensor.nbytes)
                if not writers[name].left:
                    writers[name].close()
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_configuration(folder: Path, raw: dict, config: PretrainedConfig, types: Types, tied: bool, tokenizer) -> None:
    """config.json: the base's, with the type, the vocabulary, the padding token and the tie that the merged model has."""
    written = {key: value for key, value in raw.items() if key not in ("quantization_config", "transformers_weights")}
    inner = [written] + [written[key] for key in ("text_config",) if isinstance(written.get(key), dict)]
    for place in inner:
        for name in ("dtype", "torch_dtype"):
            if name in place:
                place[name] = str(types.nominal).removeprefix("torch.")
    text = inner[-1]
    if not {"dtype", "torch_dtype"} & set(written):
        written["dtype"] = str(types.nominal).removeprefix("torch.")
    text["vocab_size"] = config.get_text_config().vocab_size
    if tokenizer is not None and tokenizer.pad_token_id is not None:
        text["pad_token_id"] = tokenizer.pad_token_id
    if not tied:
        for place in inner:
            place["tie_word_embeddings"] = False
    (folder / CONFIG_NAME).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def check_out(name: str, adapter: Path) -> tuple[Path, Path]:
    """The folder to write, and the one beside it to write it in first.

    Raises:
        ValueError: it cannot be made, or something that is not ours is there.
    """
    out = Path(os.path.realpath(name))
    partial = checkpoint.partial_of(out)
    parent = next(folder for folder in out.parents if folder.exists())
    if not parent.is_dir():
        raise ValueError(f"--out {name} is below {parent}, which is a file: name a folder")
    if not os.access(parent, os.W_OK):
        raise ValueError(f"--out {name} cannot be made: {parent} is not writable")
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ValueError(f"--out {name} exists and is not empty, and nothing is overwritten: name a new folder")
    if os.path.ismount(out):  # nothing can be renamed to it
        raise ValueError(f"--out {name} is a mount point: name a new folder in it")
    if partial.exists() and not (partial / UNFINISHED).is_file():
        raise ValueError(
            f"{partial}, where --out {name} is made, exists and is not from a merge: move it, or name another --out"
        )
    return out, partial


# --- The check -----------------------------------------------------------------------------------------------------------


def read_prompts(path: str | None) -> list[str]:
    """`--prompts`, or the built-in ones.

    Raises:
        ValueError: the file is missing, not text, or empty.
    """
    if path is None:
        return list(PROMPTS)
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ValueError(f"--prompts {path} cannot be read ({reason}): give a text file, one prompt a line") from None
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise ValueError(f"--prompts {path} holds no prompt: write one a line")
    return lines


def prompt_ids(prompts: list[str], tokenizer, trained_rows: list[int]) -> list[list[int]]:
    """Token ids of the prompts and, so that no trained row goes unchecked, one more with the added tokens."""
    if tokenizer is None:
        raise ValueError("neither the adapter nor the base has a tokenizer, so there are no prompts: use --verify False")
    rows = [tokenizer(text)["input_ids"][: merge_check.MAX_TOKENS] for text in prompts[: merge_check.MAX_PROMPTS]]
    rows.append([token for token in trained_rows for _ in range(2)][: merge_check.MAX_TOKENS])
    return [row for row in rows if row]


@torch.no_grad()
def verify(folder: Path, merged: Merged, prompts: list[list[int]], drift: bool, dtype: torch.dtype) -> Iterator[str]:
    """Compare the files in `folder` with base and adapter unmerged. Yields the lines of the report.

    Args:
        drift: whether to compare with the adapter on the 4-bit base too.

    Raises:
        ValueError: they differ by more than rounding.
    """
    base, owners, model = merged.base, set(merged.base.names), merged.model
    files = loading.defer(str(folder), AutoConfig.from_pretrained(folder, trust_remote_code=False), dtype=torch.float32)
    by_name = {name: owner for owner, name in base.names.items()}
    twins = {}  # the parameter of the unmerged model that one of the files' has to be
    for prefix, module in files.model.named_modules():
        for attribute in module._parameters:
            if (module, attribute) in files.sources:
                twins[module, attribute] = by_name[f"{prefix}.{attribute}" if prefix else attribute]
                module._parameters[attribute] = merge_check.placeholder(module._parameters[attribute])
    types = {stored.dtype for stored in files.checkpoint.tensors.values() if stored.dtype.is_floating_point}

    def from_files(owner):
        return read_weight(files.sources[owner], torch.float32)

    def unrounded(owner):
        value, source = merged.value(twins[owner]), files.sources[owner]
        if source.group.converter is None:
            flat, stored = value.view(-1), files.checkpoint.tensors[source.group.key].dtype
            same = all(torch.equal(flat[part].to(stored), source[part]) for part in blocks(flat.numel()))
        else:
            stored = source.whole()
            same = torch.equal(value.to(stored.dtype), stored)
        if not same:
            raise ValueError(f"{folder}: {source.group.key} is not what was merged; the disk is damaged: use another one")
        return value

    def unmerged_on(expanded):
        return merge_check.logits(model, prompts, owners, lambda owner: merged.base_value(owner, expanded))

    yield f"{len(prompts)} prompts, {sum(map(len, prompts))} tokens (at most {merge_check.MAX_TOKENS} of each), in float32"
    with merged.peft_model.disable_adapter():
        plain = merge_check.logits(model, prompts, owners, lambda owner: base.value(owner, merged.expanded))
    unmerged = unmerged_on(merged.expanded)
    yield merge_check.HEADER
    yield Comparison.of(plain, unmerged).row("base -> adapter (its effect)")
    written = merge_check.logits(files.model, prompts, set(twins), from_files)
    comparisons = {}
    if types != {torch.float32}:
        # Rounding hides mistakes of its own size. So the merge is checked before it is rounded, on the model that the files
        # describe, and the files against it, rounded, bit for bit.
        comparisons["unmerged -> merged, not rounded"] = merge_check.logits(files.model, prompts, set(twins), unrounded)
    label = f"unmerged -> merged, {str(dtype).removeprefix('torch.')}"
    comparisons[label] = written
    rows = {title: Comparison.of(unmerged, other) for title, other in comparisons.items()}
    yield from (row.row(title) for title, row in rows.items())
    exact = next(iter(rows.values()))
    if drift:
        trained_on = unmerged_on(True)
        yield Comparison.of(trained_on, written).row("4-bit base + adapter -> merged")
    if exact.relative > merge_check.FLOAT32_BOUND:
        raise ValueError(
            f"the merged model is not the adapter on its base: logits differ by {exact.relative:.2g} of the largest, and "
            f"at most {merge_check.FLOAT32_BOUND:g} is rounding: nothing was written to --out; use the adapter unmerged"
        )
    kept = merge_check.effect_kept(plain, unmerged, written)
    yield f"{kept:.1%} of the adapter's effect on the logits is in the merged files"
    if 1 - kept > merge_check.ROUNDING_WARNING:
        yield f"warning: rounding changed {1 - kept:.0%} of the adapter's effect: --dtype float32 keeps it"


# --- The command ---------------------------------------------------------------------------------------------------------


def merge(args: MergeArguments, report: Callable[[str], None] = print) -> Path:
    """Merge as asked. Returns the folder.

    Raises:
        ValueError: the request cannot be met, one line that names the value and the fix, or the check failed. Nothing is
            left behind.
    """
    largest = shard_bytes(args.max_shard_size)
    adapter = open_adapter(args.adapter)
    out, partial = check_out(args.out, adapter.folder)
    prompts = read_prompts(args.prompts)
    name = args.base or adapter.raw.get("base_model_name_or_path")
    if not name:
        raise ValueError(f"{adapter.folder / ADAPTER_CONFIG_NAME} names no base model: name it in --base")
    revision = args.revision
    if revision is not None and Path(name).is_dir():
        raise ValueError(f"--revision {revision} has no effect: the base {name} is a local folder, which has none; drop it")
    if args.base is None and revision is None:
        revision = adapter.raw.get("revision") or adapter.trained.get("model_revision")
    config, raw = load_base_config(
        name, revision, "--base" if args.base else f"named by {adapter.folder / ADAPTER_CONFIG_NAME}"
    )
    trained, known = trained_quantization(adapter, args.trained_in_4bit)
    expanded = args.base_weights == "nf4"
    stored = stored_quantization(config, adapter.trained.get("bnb_4bit_compute_dtype"))
    if expanded and trained is None:
        fix = "it was trained on 16-bit weights" if known else "state what it was trained on with --trained_in_4bit nf4"
        raise ValueError(f"--base_weights nf4 is for an adapter that was trained in 4 bits: {fix}")
    tokenizer = load_tokenizer(adapter.folder, name, revision)

    vocabulary = len(tokenizer) if tokenizer is not None and has_tokenizer(adapter.folder) else 0
    row_dtype = trained.dtype if trained else adapter.trained.get("dtype", "auto")
    row_dtype = None if row_dtype == "auto" else getattr(torch, row_dtype)
    wanted = trained if trained and (expanded or args.verify) else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, on what it was never asked to initialise
        base = Base(name, revision, config, stored, wanted, vocabulary, row_dtype)
        merged = Merged(base, adapter, expanded)
    types = Types(args.dtype, base, config)
    if len(prompts) > merge_check.MAX_PROMPTS:
        report(f"note: the first {merge_check.MAX_PROMPTS} of {len(prompts)} prompts are compared")
    ids = prompt_ids(prompts, tokenizer, trained_rows(merged)) if args.verify else []
    rows = base.model.get_input_embeddings().weight.shape[0]
    if args.verify and max(map(max, ids)) >= rows:
        raise ValueError(f"the tokenizer has tokens beyond the {rows} rows of the base's embedding: use --verify False")
    tied = merged.stays_tied(types)
    parts = plan(base, merged, types, tied, config)
    files = shards(parts, largest)
    check_disk(out, files)

    checkpoint.begin(partial)
    try:
        (partial / UNFINISHED).touch()
        write_configuration(partial, raw, base.model.config, types, tied or merged.tied is None, tokenizer)
        write_generation_config(partial, adapter.folder, name, revision)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        write_weights(partial, parts, files)
        report(f"merged {adapter.folder} into {name}: {summary(merged, files, types)}")
        if args.verify:
            for line in verify(partial, merged, ids, trained is not None, types.nominal):
                report(line)
            if not known:
                report(
                    "note: whether the adapter was trained in 4 bits is not known, so no drift is shown (--trained_in_4bit)"
                )
        else:
            report("note: not compared with the unmerged model (--verify False)")
        (partial / UNFINISHED).unlink()
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    report(f"{args.out}: load it with AutoModelForCausalLM.from_pretrained({str(args.out)!r})")
    return out


def stored_quantization(config: PretrainedConfig, compute_dtype: str | None) -> Quantization | None:
    """The settings of a base that is stored in 4 bits, but for the type in which training computed, if it is known."""
    stored = utils.stored_quantization(config)
    if not stored:
        return None
    settings = {key: value for key, value in stored.items() if key.startswith(("llm_", "bnb_", "load_in"))}
    if compute_dtype is not None:
        settings["bnb_4bit_compute_dtype"] = compute_dtype
    return Quantization(BitsAndBytesConfig(**settings), "auto")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json"))


def load_tokenizer(folder: Path, base: str, revision: str | None):
    """The adapter's tokenizer, else the base's, else None.

    Raises:
        ValueError: there is one, and it cannot be read.
    """
    source, options = (folder, {}) if has_tokenizer(folder) else (base, {"revision": revision})
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
    except Exception as error:  # a damaged file raises what its reader happens to
        if source is base:
            return None
        raise ValueError(f"the tokenizer in {folder} cannot be read ({error!r:.200}): copy it again") from None


def write_generation_config(folder: Path, adapter: Path, base: str, revision: str | None) -> None:
    """generation_config.json: the adapter's if it has one, else the base's if it has."""
    own = (adapter / GENERATION_CONFIG_NAME).is_file()
    try:
        found = GenerationConfig.from_pretrained(adapter if own else base, revision=None if own else revision)
    except OSError:
        return
    except (TypeError, ValueError) as error:
        raise ValueError(f"{adapter if own else base}: its generation_config.json is damaged ({error})") from None
    found.save_pretrained(folder)


def check_disk(out: Path, files: dict) -> None:
    """Raise ValueError if the weights do not fit on the disk of `out`."""
    needed = sum(torch.Size(shape).numel() * dtype.itemsize for layout in files.values() for dtype, shape in layout.values())
    free = shutil.disk_usage(next(folder for folder in out.parents if folder.exists())).free
    if needed > free:
        raise ValueError(f"--out {out} needs {needed / 2**30:.1f} GiB and its disk has {free / 2**30:.1f} GiB free")


def trained_rows(merged: Merged) -> list[int]:
    """The tokens whose embedding rows the adapter brings."""
    layers = [m for m in merged.peft_model.modules() if isinstance(m, TrainableTokensLayer)]
    return sorted({int(token) for layer in layers for token in layer.token_indices.get(ADAPTER, ())})


def summary(merged: Merged, files: dict, types: Types) -> str:
    """What was merged, in words."""
    changed = sum(any(isinstance(layer, LoraLayer) for layer in layers) for layers in merged.wrappers.values())
    counts = [f"{changed} layers"]
    if merged.replaced:
        counts.append(f"{len(merged.replaced)} whole tensors")
    if rows := trained_rows(merged):
        counts.append(f"{len(rows)} token rows")
    name = "4-bit, expanded" if merged.expanded or merged.base.stored_in_4bit else "stored"
    return f"{', '.join(counts)}; base weights {name}; {len(files)} file{'s' * (len(files) > 1)}, {types.asked}"


def main(argv: list[str] | None = None) -> None:
    with one_line_errors():
        merge(parse(argv))


if __name__ == "__main__":
    main()
