"""Gather, save and load what was trained, and nothing else, under one device, DDP, FSDP1 and FSDP2.

A full state dict gathers the frozen base model on one rank to write a few megabytes, a sharded one leaves no adapter to
load, and wrapper names that FSDP and activation checkpointing insert make PEFT match no key at all and write an empty
file. Here the trained parameters alone are gathered, one FSDP unit at a time, under the names they had before wrapping.
"""

import os
from pathlib import Path

import torch
from accelerate.utils import save_fsdp_optimizer
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.trainer import SCHEDULER_NAME
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME
from trl import SFTTrainer


class WrongAdapter(ValueError):
    """A saved adapter that is not one of this model and LoRA configuration."""


def unwrapped_name(name: str) -> str:
    """A parameter's name without what DDP, FSDP1, activation checkpointing and torch.compile insert into it."""
    if name.startswith("module."):  # DDP, at the front only: a model may have a submodule of this name
        name = name.removeprefix("module.")
    for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name


def trained_tensors(model: nn.Module, writeback: bool = False):
    """Yield (name, full tensor) for every trained parameter, on every rank, holding one FSDP unit at a time.

    A collective: all ranks have to run it to the end. Under FSDP1 a tensor is valid only until the next is asked for, and
    changes to it are kept if `writeback`; under FSDP2 it is a copy; otherwise it is the parameter.
    """
    reshard(model)
    units = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDP)]
    if units:
        units[0][1].check_is_root()  # before any other unit is used, or FSDP takes that one for the root
    seen = set()
    for prefix, unit in units:
        if unit._handle is None:
            continue
        flat = unit._handle.flat_param
        if not any(p.requires_grad for p in flat._params or [flat]):  # `_params` is kept with use_orig_params only
            continue
        own = {unwrapped_name(name) for name in flat._fqns}
        with FSDP.summon_full_params(unit, recurse=False, writeback=writeback):
            for name, parameter in unit.named_parameters():
                name = unwrapped_name(name)
                if parameter.requires_grad and name in own:
                    name = unwrapped_name(f"{prefix}." if prefix else "") + name
                    seen.add(name)
                    yield name, parameter.detach()
    for name, parameter in model.named_parameters():
        clean = unwrapped_name(name)
        if not parameter.requires_grad or clean in seen or (units and name.endswith("_flat_param")):
            continue
        yield clean, parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()


def reshard(model: nn.Module) -> None:
    """Free what FSDP2 still holds gathered. After an evaluation the root is, and its parameters are 16-bit copies."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_trained(model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
    """All trained parameters as contiguous CPU tensors in their own dtype; empty where `keep` is false. A collective."""
    gathered = {}
    for name, tensor in trained_tensors(model):
        if keep:
            gathered[name] = tensor.to("cpu", copy=True).contiguous()
    return gathered


@torch.no_grad()
def load_trained(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Overwrite every trained parameter with the full tensor of its name. A collective.

    Raises:
        WrongAdapter: a trained parameter is missing from `state`, or `state` has others, or a shape differs.
    """
    reshard(model)
    missing, left = [], dict(state)
    parameters = {unwrapped_name(name): p for name, p in model.named_parameters()}
    for name, tensor in trained_tensors(model, writeback=True):
        value = left.pop(name, None)
        if value is None or value.shape != tensor.shape:
            missing.append(name)
            continue
        parameter = parameters.get(name)
        if isinstance(parameter, DTensor):
            value = value.to(device=parameter.device, dtype=parameter.dtype)
            parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None))
        else:
            tensor.copy_(value)
    if missing or left:
        raise WrongAdapter(
            f"the adapter does not belong to this model and LoRA configuration: {len(missing)} trained tensors are missing "
            f"or have another shape (first: {missing[:1]}), {len(left)} are not trained here (first: {list(left)[:1]})"
        )


def adapter_keys(model: PeftModel) -> dict[str, str]:
    """PEFT's file key for every trained parameter, by parameter name. Ask before the model is wrapped."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    markers = {name: torch.tensor(index) for index, name in enumerate(names)}
    # `save_embedding_layers="auto"` would add whole embedding matrices that were never trained, and ask the Hub first.
    saved = get_peft_model_state_dict(model, state_dict=markers, save_embedding_layers=False)
    keys = {names[int(marker)]: key for key, marker in saved.items()}
    lost = [name for name in names if name not in keys]
    assert not lost, f"PEFT would not save these trained parameters: {lost[:3]}"
    return keys


def write_adapter(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file beside `path`, read it back, compare, and only then put it in place.

    Raises:
        RuntimeError: there is nothing to write, or the file does not hold what was in memory.
    """
    if not tensors:
        raise RuntimeError(f"no trained parameter was gathered for {path}: the adapter would be empty")
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    read = load_file(partial)
    wrong = [key for key, tensor in tensors.items() if key not in read or not _same_bytes(read[key], tensor)]
    if wrong or len(read) != len(tensors):
        raise RuntimeError(f"{partial} does not hold the adapter that was in memory (first difference: {wrong[:1]})")
    os.replace(partial, path)


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Bytes, so that a NaN equals itself and the comparison is about the file, not about the numbers.
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def fill_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Give a new optimizer its state tensors (zeros), without changing a weight, so that there is something to load into.

    Accelerate 1.15 asks FSDP1 for the optimizer's state and reads a sharded checkpoint into what it gets. A new optimizer
    has none, so nothing is read, and training goes on from zero moments without a word. Remove when it fills it first.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


class AdapterSFTTrainer(SFTTrainer):
    """TRL's `SFTTrainer`, whose every save is complete under every strategy and state-dict type.

    With PEFT, each `checkpoint-N` and the final folder are adapters that `from_pretrained` loads, with the tokenizer and
    the generation configuration; resuming reads the adapter from there, and FSDP's own copy of it, which Accelerate would
    write and read under names that match nothing, is neither written nor needed.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.peft_model = self.model if isinstance(self.model, PeftModel) else None
        self.base_model = self.model if self.peft_model is None else self.peft_model.get_base_model()
        self.keys = adapter_keys(self.peft_model) if self.peft_model is not None else {}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        # A model without memory is filled when it has been sharded (see loading.py); until then nothing can be moved.
        if not any(parameter.is_meta for parameter in model.parameters()):
            super()._move_model_to_device(model, device)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = Path(output_dir or self.args.output_dir)
        state = gather_trained(self.model, keep=self.args.should_save)
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            if self.peft_model is None:
                self.base_model.save_pretrained(folder, state_dict=state)
            else:
                write_adapter(folder / ADAPTER_SAFE_WEIGHTS_NAME, {self.keys[name]: t for name, t in state.items()})
                self._save_adapter_config(folder)
                if self.base_model.generation_config is not None:
                    self.base_model.generation_config.save_pretrained(folder)
            self.processing_class.save_pretrained(folder)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_adapter_config(self, folder: Path) -> None:
        config = self.peft_model.active_peft_config
        training, config.inference_mode = config.inference_mode, True
        config.save_pretrained(folder)
        config.inference_mode = training

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.peft_model is None or not self.is_fsdp_enabled:
            return super()._save_optimizer_and_scheduler(output_dir)
        # As in the Trainer, less `save_fsdp_model`: `save_model` has written the adapter, and the base does not change.
        save_fsdp_optimizer(self.accelerator.state.fsdp_plugin, self.accelerator, self.optimizer, self.model, output_dir)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and any(isinstance(module, FSDP) for module in self.model.modules()):
            fill_optimizer_state(self.optimizer.optimizer)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.peft_model is None:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        path = Path(resume_from_checkpoint) / ADAPTER_SAFE_WEIGHTS_NAME
        if not path.is_file():
            raise ValueError(f"{resume_from_checkpoint} holds no {ADAPTER_SAFE_WEIGHTS_NAME}: it cannot be resumed from")
        names = {key: name for name, key in self.keys.items()}
        load_trained(model or self.model, {names.get(key, key): tensor for key, tensor in load_file(path).items()})

    def _load_best_model(self) -> None:
        if self.peft_model is None:
            return super()._load_best_model()
        self._load_from_checkpoint(self.state.best_model_checkpoint, self.model)
