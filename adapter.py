"""Gather, write, check and load what is trained, and nothing else, under one device, DDP, FSDP1 and FSDP2.

A full state dict gathers the frozen base model on one rank to write a few megabytes, a sharded one leaves no adapter to
load, and wrapper names that FSDP and activation checkpointing insert make PEFT match no key at all and write an empty
file. Here the trained parameters alone are gathered, a few megabytes at a time, under the names they had before wrapping,
and they are on the disk before the next are gathered.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import weights

BUCKET_BYTES = 1 << 22


class WrongAdapter(ValueError):
    """A saved adapter that is not one of this model and LoRA configuration."""


def unwrapped_name(name: str) -> str:
    """A parameter's name without what DDP, FSDP1, activation checkpointing and torch.compile insert into it."""
    if name.startswith("module."):  # DDP, at the front only: a model may have a submodule of this name
        name = name.removeprefix("module.")
    for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name


@dataclass
class Held:
    """One parameter as this rank holds it, whole or a shard, and the names that are in it (more than one under FSDP1).

    A state of the optimizer is held as its parameter is, so `gathered` and `shard` serve for both.
    """

    parameter: nn.Parameter
    names: list[str]
    shapes: list[tuple[int, ...]]
    unit: FSDP | None = None  # of FSDP1

    @property
    def local(self) -> torch.Tensor:
        """What this rank holds, in full precision. While a unit is gathered, its parameter is another tensor."""
        return getattr(self.parameter, "_local_shard", self.parameter) if self.unit is not None else self.parameter

    def group(self, tensor: torch.Tensor):
        """The ranks that each hold a slice of rows of a tensor like the parameter; None if this one holds all of it."""
        if self.unit is not None:
            return self.unit._handle.process_group if self.unit._handle.uses_sharded_strategy else None
        rows = isinstance(tensor, DTensor) and tuple(tensor.placements) == (Shard(0),)
        return tensor.device_mesh.get_group() if rows else None

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's slice, flat, padded to the length that it has on every rank, where the ranks communicate."""
        if self.unit is not None:
            return tensor.detach().reshape(-1).to(self.unit._handle.device)
        local, mesh = tensor._local_tensor.detach(), tensor.device_mesh
        rows = -(-tensor.shape[0] // mesh.size()) * tensor.shape[1:].numel()
        return nn.functional.pad(local.reshape(-1), (0, rows - local.numel())).to(mesh.device_type)

    def split(self, flat: torch.Tensor, shape: torch.Size) -> list[torch.Tensor]:
        """The tensor of each name, from the slices of all ranks one after the other. `shape` is that of the whole."""
        if self.unit is None:
            return [flat[: shape.numel()].view(shape)]
        return list(self.unit._handle._get_unflat_views(flat[: self.parameter._unpadded_unsharded_size.numel()]))

    def shard(self, read: Callable[[str], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """This rank's slice of what `read` gives whole for each name. No communication."""
        if self.unit is not None:
            out = torch.zeros(self.local.shape, dtype=dtype)
            for name, part in zip(self.names, self.parameter._shard_param_infos, strict=True):
                if part.in_shard:
                    start, length = part.intra_param_start_idx, part.numel_in_shard
                    into = out[part.offset_in_shard : part.offset_in_shard + length]
                    into.copy_(read(name).reshape(-1)[start : start + length])
            return out
        value = read(self.names[0])
        if not isinstance(self.parameter, DTensor) or value.shape != self.parameter.shape:
            return value
        mesh, placements = self.parameter.device_mesh, self.parameter.placements
        value = distribute_tensor(value.to(mesh.device_type), mesh, placements, src_data_rank=None)
        return value.to(self.parameter.device).clone()  # or the slice would keep the memory of the whole


def held_parameters(model: nn.Module) -> list[Held]:
    """Every parameter that this rank holds, in the order of the model, the same on every rank."""
    reshard(model)
    found = []
    for prefix, unit in model.named_modules():
        if isinstance(unit, FSDP) and unit._handle is not None:
            flat, start = unit._handle.flat_param, unwrapped_name(f"{prefix}.") if prefix else ""
            names = [start + unwrapped_name(name) for name in flat._fqns]
            found.append(Held(flat, names, [tuple(shape) for shape in flat._shapes], unit))
    flat = {id(item.parameter) for item in found}
    for name, parameter in model.named_parameters():
        if id(parameter) not in flat:
            found.append(Held(parameter, [unwrapped_name(name)], [tuple(parameter.shape)]))
    return found


def trained_parameters(model: nn.Module) -> list[Held]:
    """Those of `held_parameters` that are trained."""
    return [item for item in held_parameters(model) if item.parameter.requires_grad]


def gathered(items: Iterable[tuple[Held, torch.Tensor]]) -> Iterator[tuple[Held, list[torch.Tensor]]]:
    """For each parameter, or tensor like it, the whole tensor of each of its names, on every rank.

    A collective: all ranks have to run it to the end. Slices are sent `BUCKET_BYTES` at a time, because an adapter is many
    small tensors; more than a bucket, or one tensor if that is larger, is never in memory.
    """
    bucket, size = [], 0
    for item, tensor in items:
        group = item.group(tensor)
        if group is None:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
            bucket, size = yield from _flushed(bucket)
            yield item, [whole] if item.unit is None else item.split(whole.reshape(-1), whole.shape)
            continue
        part = item.part(tensor)
        added = part.nbytes * dist.get_world_size(group)
        if bucket and (size + added > BUCKET_BYTES or (part.dtype, group) != (bucket[0][1].dtype, bucket[0][2])):
            bucket, size = yield from _flushed(bucket)
        bucket.append((item, part, group, tensor.shape))
        size += added
    yield from _flushed(bucket)


def _flushed(bucket):
    if bucket:
        sent = torch.cat([part for _, part, *_ in bucket])
        group = bucket[0][2]
        received = torch.empty(dist.get_world_size(group), sent.numel(), dtype=sent.dtype, device=sent.device)
        dist.all_gather_single(received.view(-1), sent, group=group)
        start = 0
        for item, part, _, shape in bucket:
            flat = received[:, start : start + part.numel()].reshape(-1)
            start += part.numel()
            yield item, item.split(flat, shape)
    return [], 0


def trained_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) for every trained parameter, on every rank. A collective, see `gathered`."""
    for item, tensors in gathered((item, item.local) for item in trained_parameters(model)):
        yield from zip(item.names, tensors, strict=True)


def trained_layout(model: nn.Module) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and whole shape of every trained parameter, by the name `trained_tensors` gives it. No communication."""
    return {
        name: (item.parameter.dtype, shape)
        for item in trained_parameters(model)
        for name, shape in zip(item.names, item.shapes, strict=True)
    }


def reshard(model: nn.Module) -> None:
    """Free what is still gathered. After an evaluation the root is, and under FSDP2 its parameters are 16-bit copies."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, FSDP) and module._handle is not None and module._handle.uses_sharded_strategy:
            local = getattr(module._handle.flat_param, "_local_shard", None)  # once it has run
            if local is not None and module._handle.flat_param.data_ptr() != local.data_ptr():
                module._handle.reshard(True)


def gather_trained(model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
    """All trained parameters as contiguous CPU tensors in their own dtype; empty where `keep` is false. A collective."""
    kept = {}
    for name, tensor in trained_tensors(model):
        if keep:
            kept[name] = tensor.to("cpu", copy=True).contiguous()
    return kept


@torch.no_grad()
def load_trained(model: nn.Module, shapes: dict[str, tuple[int, ...]], read: Callable[[str], torch.Tensor]) -> None:
    """Overwrite every trained parameter with what `read` gives whole for its name. No communication.

    Args:
        shapes: of every tensor that is there, by parameter name.

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
    for item in trained_parameters(model):
        item.local.detach().copy_(item.shard(read, item.parameter.dtype))


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
            WrongAdapter: it does not hold that, or what is in memory are not numbers any more.
            OSError: it cannot be written or read.
        """
        self.writer.close()
        wrong = check_adapter(self.path, self.layout, self.digests)
        if wrong:
            raise WrongAdapter(f"the adapter file does not hold what it has to: {wrong[0]}")


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes, so that a NaN equals itself: the comparison is about the file, not the numbers."""
    return hashlib.sha256(weights.as_bytes(tensor)).hexdigest()


def check_adapter(
    path: Path, layout: dict[str, tuple[torch.dtype, tuple[int, ...]]], digests: dict[str, str] | None = None
) -> list[str]:
    """What is wrong with an adapter file, one line each; empty if nothing.

    Args:
        layout: type and shape of every tensor it has to hold, by PEFT's key. Others are wrapper names that no loader
            matches, or frozen weights.
        digests: SHA-256 of each tensor's bytes in memory, to compare with.
    """
    file = weights.Checkpoint(str(path.parent), file_name=path.name)
    found, wrong = file.tensors, []
    for key in sorted(set(layout) - set(found)):
        wrong.append(f"it lacks {key}")
    for key in sorted(set(found) - set(layout)):
        kind = "the name of a wrapper, which no loader matches" if unwrapped_name(key) != key else "not trained here"
        wrong.append(f"it holds {key}: {kind}")
    for key in sorted(set(layout) & set(found)):
        dtype, shape = layout[key]
        if (found[key].dtype, found[key].shape) != (dtype, tuple(shape)):
            wrong.append(f"{key} is {found[key].dtype} {list(found[key].shape)}, not {dtype} {list(shape)}")
            continue
        tensor = file.whole(key)
        if digests is not None and digest(tensor) != digests[key]:
            wrong.append(f"{key} has other bytes")
        elif not torch.isfinite(tensor).all():
            wrong.append(f"{key} holds values that are not finite")
    file.close()
    return wrong


def is_lora_b(key: str) -> bool:
    """Whether a key is of a matrix that LoRA starts at zero."""
    return bool(re.search(r"\.lora_(embedding_)?B(\.|$)", key))


def untrained(path: Path) -> list[str]:
    """The keys of an adapter file whose lora_B are all zero, as before training."""
    file = weights.Checkpoint(str(path.parent), file_name=path.name)
    zero = [key for key in sorted(file.tensors) if is_lora_b(key) and not file.whole(key).any()]
    file.close()
    return zero
