"""Gather, write, check and load what is trained, and nothing else, under one device, DDP, FSDP1 and FSDP2.

A full state dict gathers the frozen base model on one rank to write a few megabytes, a sharded one leaves no adapter to
load, and wrapper names that FSDP and activation checkpointing insert make PEFT match no key at all and write an empty
file. Here the trained parameters alone are gathered, one FSDP unit at a time, under the names they had before wrapping,
and each is on the disk before the next is gathered.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, distribute_tensor

import weights


class WrongAdapter(ValueError):
    """A saved adapter that is not one of this model and LoRA configuration."""


def unwrapped_name(name: str) -> str:
    """A parameter's name without what DDP, FSDP1, activation checkpointing and torch.compile insert into it."""
    if name.startswith("module."):  # DDP, at the front only: a model may have a submodule of this name
        name = name.removeprefix("module.")
    for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name


def trained_tensors(model: nn.Module, writeback: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
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
        yield clean, whole(parameter).detach()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a shard, or the tensor itself. A collective for a shard."""
    if not isinstance(tensor, DTensor):
        return tensor
    # An offloaded shard lies on the CPU, where the accelerator's process group cannot gather it.
    return tensor.to(tensor.device_mesh.device_type).full_tensor()


def trained_layout(model: nn.Module) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and whole shape of every trained parameter, by the name `trained_tensors` gives it. No communication."""
    reshard(model)
    layout = {}
    for prefix, unit in model.named_modules():
        if isinstance(unit, FSDP) and unit._handle is not None:
            flat = unit._handle.flat_param
            if flat.requires_grad:
                start = unwrapped_name(f"{prefix}.") if prefix else ""
                for name, shape in zip(flat._fqns, flat._shapes, strict=True):
                    layout[start + unwrapped_name(name)] = (flat.dtype, tuple(shape))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not name.endswith("_flat_param"):
            layout.setdefault(unwrapped_name(name), (parameter.dtype, tuple(parameter.shape)))
    return layout


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
def load_trained(model: nn.Module, shapes: dict[str, tuple[int, ...]], read: Callable[[str], torch.Tensor]) -> None:
    """Overwrite every trained parameter with the full tensor of its name, one at a time. A collective.

    Args:
        shapes: of every tensor that is there, by parameter name.
        read: gives one of them.

    Raises:
        WrongAdapter: a trained parameter is missing, or there are others, or a shape differs; nothing is changed then.
    """
    expected = {name: shape for name, (_, shape) in trained_layout(model).items()}
    missing = [name for name, shape in expected.items() if shapes.get(name) != shape]
    left = [name for name in shapes if name not in expected]
    if missing or left:
        raise WrongAdapter(
            f"the adapter does not belong to this model and LoRA configuration: {len(missing)} trained tensors are missing "
            f"or have another shape (first: {missing[:1]}), {len(left)} are not trained here (first: {left[:1]})"
        )
    parameters = {unwrapped_name(name): p for name, p in model.named_parameters()}
    for name, tensor in trained_tensors(model, writeback=True):
        value = read(name)
        parameter = parameters.get(name)
        if isinstance(parameter, DTensor):
            value = value.to(device=parameter.device, dtype=parameter.dtype)
            parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None))
        else:
            tensor.copy_(value)


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


class AdapterFile:
    """The safetensors file of an adapter, written tensor by tensor, then read back and compared.

    Args:
        path: of the file.
        layout: type and shape of every tensor, by PEFT's key.
    """

    def __init__(self, path: Path, layout: dict[str, tuple[torch.dtype, tuple[int, ...]]]):
        self.path, self.layout, self.digests = path, layout, {}
        self.writer = weights.TensorWriter(path, layout)

    def write(self, key: str, tensor: torch.Tensor) -> None:
        self.digests[key] = self.writer.write(key, tensor)

    def close(self) -> None:
        """Finish the file and compare it with what was in memory.

        Raises:
            WrongAdapter: it does not hold that.
            OSError: it cannot be written or read.
        """
        self.writer.close()
        wrong = check_adapter(self.path, self.layout, self.digests)
        if wrong:
            raise WrongAdapter(f"{self.path} does not hold the adapter that was in memory: {wrong[0]}")


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes, so that a NaN equals itself: the comparison is about the file, not the numbers."""
    return hashlib.sha256(weights.as_bytes(tensor)).hexdigest()


def check_adapter(
    path: Path,
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    digests: dict[str, str] | None = None,
    trained: bool = False,
) -> list[str]:
    """What is wrong with an adapter file, one line each; empty if nothing.

    Args:
        layout: type and shape of every tensor it has to hold, by PEFT's key. Others are wrapper names that no loader
            matches, or frozen weights.
        digests: SHA-256 of each tensor's bytes in memory, to compare with.
        trained: whether training is over, so that an all-zero lora_B or a value that is no number is a failed run.
    """
    file = weights.Checkpoint(str(path.parent), file_name=path.name)
    found, wrong = file.tensors, []
    for key in sorted(set(layout) - set(found)):
        wrong.append(f"it lacks {key}")
    for key in sorted(set(found) - set(layout)):
        kind = "the name of a wrapper, which no loader matches" if unwrapped_name(key) != key else "not trained here"
        wrong.append(f"it holds {key}: {kind}")
    zero = []
    for key in sorted(set(layout) & set(found)):
        dtype, shape = layout[key]
        if (found[key].dtype, found[key].shape) != (dtype, tuple(shape)):
            wrong.append(f"{key} is {found[key].dtype} {list(found[key].shape)}, not {dtype} {list(shape)}")
            continue
        tensor = file.whole(key)
        if digests is not None and digest(tensor) != digests[key]:
            wrong.append(f"{key} has other bytes")
        # An expert that no token was sent to is still what it was.
        if trained and "lora_" in key and "_B" in key and not tensor.any() and ".experts." not in key:
            zero.append(key)
        if trained and not torch.isfinite(tensor).all():
            wrong.append(f"{key} holds values that are not finite")
    file.close()
    if zero:
        wrong.append(f"{len(zero)} lora_B are all zero, as before training (first: {zero[0]}): they have learned nothing")
    return wrong
