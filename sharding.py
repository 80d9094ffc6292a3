"""What is really in force: single device, DDP, FSDP1 or FSDP2, and what each rank holds, read from the parameters."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


class NotInForce(Exception):
    """FSDP was asked for and the parameters are not sharded."""


def from_all(mine) -> list:
    """What every rank says. A collective."""
    ranks = [mine]
    if dist.is_initialized():
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
    return ranks


@dataclass
class Held:
    """What one rank holds of a model, read from its parameters. Sizes are bytes as stored (4-bit weights packed)."""

    strategy: str  # "one device", "DDP", "FSDP1" or "FSDP2"
    units: int  # modules that are gathered and freed on their own
    local_bytes: int
    total_bytes: int
    unsharded: list[str]  # parameters that FSDP does not manage

    @property
    def fraction(self) -> float:
        return self.local_bytes / max(self.total_bytes, 1)


def inspect(model: nn.Module) -> Held:
    """Look at every parameter of a prepared model. Local to the rank: no communication."""
    modules = list(model.modules())
    fsdp1 = [m for m in modules if isinstance(m, FSDP)]
    fsdp2 = [m for m in modules if isinstance(m, FSDPModule)]
    ddp = any(isinstance(m, DistributedDataParallel) for m in modules)
    strategy = "FSDP1" if fsdp1 else "FSDP2" if fsdp2 else "DDP" if ddp else "one device"
    held = Held(strategy, len(fsdp1) or len(fsdp2), 0, 0, [])
    if fsdp1:
        flat = {id(m._handle.flat_param): m._handle for m in fsdp1 if m._handle is not None}
        views = {id(p) for handle in flat.values() for p in (handle.flat_param._params or [])}
        for handle in flat.values():
            item = handle.flat_param.element_size()
            sharded = handle.flat_param._local_shard if hasattr(handle.flat_param, "_local_shard") else handle.flat_param
            held.local_bytes += sharded.numel() * item
            held.total_bytes += handle.flat_param._unpadded_unsharded_size.numel() * item
        rest = [(n, p) for n, p in model.named_parameters() if id(p) not in flat and id(p) not in views]
    else:
        rest = list(model.named_parameters())
    for name, parameter in rest:
        total = parameter.numel() * parameter.element_size()
        local = parameter.to_local().numel() * parameter.element_size() if isinstance(parameter, DTensor) else total
        held.local_bytes += local
        held.total_bytes += total
        if not isinstance(parameter, DTensor):
            held.unsharded.append(name)
    return held


def check_in_force(held: Held, requested: str, shards: bool = True, allowed_unsharded: tuple[str, ...] = ()) -> None:
    """Raise NotInForce unless the strategy that was asked for is the one the parameters show.

    Args:
        requested: "FSDP1", "FSDP2", or anything else for no FSDP.
        shards: whether its settings ask for parameters to be sharded at all (FSDP1's NO_SHARD does not).
        allowed_unsharded: name fragments of parameters that are replicated on purpose.
    """
    if not requested.startswith("FSDP"):
        return
    world = dist.get_world_size() if dist.is_initialized() else 1
    if held.strategy != requested:
        raise NotInForce(f"{requested} was asked for but {held.strategy} is in force: the model is not sharded")
    stray = [name for name in held.unsharded if not any(fragment in name for fragment in allowed_unsharded)]
    if stray:
        raise NotInForce(f"{requested} leaves {len(stray)} parameters unsharded on every rank (first: {stray[0]})")
    if shards and world > 1:
        fractions = from_all(held.fraction)
        if sum(fractions) > 1.5 or min(fractions) >= 1.0:  # 1 in all, and a little padding, if every byte is held once
            raise NotInForce(f"{requested} is in force but each rank holds {held.fraction:.0%} of the parameters")
