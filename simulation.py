"""One training step of rank 0 without memory, sharded by FSDP itself: the peak that `memory.py` computes with formulas.

The ranks are pretended (torch's "fake" process group) and tensors have no memory, so a laptop can be rank 0 of 64 GPUs. A
step of a few decoder layers and one of a few more are run. The peak of each part of a step (the first layer's forward, the
loss, the last layer's backward, ...) grows by the same amount with each layer, so the rest is extrapolated. A 70B takes ten
seconds.
"""

import contextlib
import functools
import gc
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from peft.utils.other import fsdp_auto_wrap_policy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp._runtime_utils import _lazy_init
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.testing._internal.distributed.fake_pg import FakeStore

import fake_model
import memory
import working_set

SHORT, LONG = 3, 6  # decoder layers that are run; three, so that the first, the last and the one before are different


def simulate(setup: memory.Setup) -> int:
    """The peak of bytes allocated on rank 0's device in a step that is not the first.

    What is offloaded is simulated on the device; what that saves is then taken from the formulas.
    """
    stays = replace(setup, offload_params=False, offload_activations=False)
    if stays != setup:
        return simulate(stays) - (memory.estimate(stays).peak - memory.estimate(setup).peak)
    kinds = setup.skeleton.kinds
    start, period = pattern(kinds)
    short = start + period * math.ceil(SHORT / period)
    long = short + period * math.ceil((LONG - SHORT) / period)
    if long >= len(kinds):
        return max(step(setup, len(kinds)).values())
    few, more = step(setup, short), step(setup, long)
    return max(more[part] + round((more[part] - few[part]) / (long - short) * (len(kinds) - long)) for part in few)


def pattern(kinds: list[int]) -> tuple[int, int]:
    """Where the kinds of layers begin to repeat, and with what period: as (0, 2) if two kinds alternate."""
    for period in range(1, len(kinds)):
        for start in range(min(len(kinds) - period, 8)):
            if all(kinds[i] == kinds[i + period] for i in range(start, len(kinds) - period)):
                return start, period
    return 0, len(kinds)


@contextlib.contextmanager
def pretended(ranks: int) -> Iterator[None]:
    """A process group in which this process is rank 0 and the others answer at once."""
    if dist.is_initialized():
        raise RuntimeError("a simulation makes its own process group: run it outside of a launch")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def step(setup, depth: int) -> dict[str, int]:
    """The peaks of a step with so many decoder layers: part of the step -> bytes."""
    model = fake_model.build(setup, list(range(depth)))
    layers = fake_model.layers(model, setup, list(range(depth)))
    with contextlib.ExitStack() as stack:
        if setup.sharded:
            stack.enter_context(pretended(setup.shard_ranks))
            mesh = init_device_mesh("cpu", (setup.shard_ranks,))
        stack.enter_context(fake_model.without_memory(setup.device))
        tracker = stack.enter_context(fake_model.AllocationTracker(late=setup.strategy == "FSDP1"))
        fake_model.materialise(model)
        if setup.sharded:
            model = (wrap if setup.strategy == "FSDP1" else shard)(model, setup, layers, mesh)
        gc.collect()
        held = tracker.current
        optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
        batch = fake_model.inputs(setup, setup.micro_batch)
        make_state(optimizer)
        trained = optimizer.param_groups[0]["params"] if setup.strategy == "DDP" else []
        buckets = [torch.empty_like(parameter) for parameter in trained]  # in which DDP reduces gradients
        gc.collect()
        seen = fake_model.Segments(model, layers, tracker)
        working_set.forward(model, setup, batch).backward()
        seen.finish()
        optimizer.step()
        last = tracker.take_peak()
        del buckets
    ends = {"first": 0, "last but one": max(depth - 2, 0), "last": depth - 1}
    return (
        {"held": held, "before": seen.before, "loss": seen.loss, "optimizer step": last}
        | {f"forward of the {name} layer": seen.forward[position] for name, position in ends.items()}
        | {f"backward of the {name} layer": seen.backward[position] for name, position in ends.items()}
    )


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make its state, as it does in the first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def shard(model: nn.Module, setup, layers: list[nn.Module], mesh) -> nn.Module:
    """Wrap for FSDP2 as Accelerate and `peft_fsdp.let_the_root_hold_the_head` do."""
    kept = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=setup.gathered_dtype, reduce_dtype=setup.gathered_dtype),
    }
    kwargs = {**kept, "reshard_after_forward": setup.reshard_after_forward}
    for layer in layers:
        fully_shard(layer, **kwargs)
    if setup.embedding_apart(model):
        fully_shard(model.get_input_embeddings(), **kwargs)
    return fully_shard(model, **kept)


def wrap(model: nn.Module, setup, layers: list[nn.Module], mesh) -> nn.Module:
    """Wrap for FSDP1 as `train.py` does with LoRA, and as Accelerate does without."""
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(layer) for layer in layers})
    wrapped = FSDP(
        model,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.FULL_SHARD if setup.reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=policy if setup.lora is None else fsdp_auto_wrap_policy(model),
        use_orig_params=False,
        mixed_precision=MixedPrecision(param_dtype=setup.gathered_dtype, reduce_dtype=setup.gathered_dtype),
        ignored_modules=[module for name, module in model.named_modules() if name.endswith("trainable_tokens_delta")],
        device_id=torch.device("cpu"),
    )
    _lazy_init(wrapped, wrapped)  # else the first forward does it, and takes and frees each unit's memory
    return wrapped
