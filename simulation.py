"""One training step of rank 0 without memory, sharded by FSDP itself: the peak that `memory.py` computes with formulas.

The ranks are pretended (torch's "fake" process group) and tensors have no memory, so a laptop can be rank 0 of 64 GPUs. A step
of a few decoder layers and of a few more is run under PyTorch's own memory tracker; the peak grows by the same amount with
each layer, so the rest is extrapolated. A 70B takes about a quarter of a minute.
"""

import contextlib
import math

import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fake_model
import working_set

SHORT, LONG = 2, 6  # decoder layers that are run


def simulate(setup) -> int:
    """The peak of bytes allocated on rank 0's device in a step that is not the first, for a `memory.Setup`.

    The peak of each module is extrapolated on its own: in a shallow model the worst moment may be in another place.
    """
    kinds = setup.skeleton.kinds
    start, period = pattern(kinds)
    short = start + period * math.ceil(SHORT / period)
    long = short + period * math.ceil((LONG - SHORT) / period)
    if long >= len(kinds):
        return max(_step(setup, len(kinds)).values())
    few, more = _step(setup, short), _step(setup, long)
    return max(more[at] + round((more[at] - few[at]) / (long - short) * (len(kinds) - long)) for at in few)


def pattern(kinds: list[int]) -> tuple[int, int]:
    """Where the kinds of layers begin to repeat, and with what period: as (0, 2) if two kinds alternate."""
    for period in range(1, len(kinds)):
        for start in range(min(len(kinds) - period, 8)):
            if all(kinds[i] == kinds[i + period] for i in range(start, len(kinds) - period)):
                return start, period
    return 0, len(kinds)


@contextlib.contextmanager
def pretended(ranks: int):
    """A process group in which this process is rank 0 and the others answer at once; none if there are no others."""
    if dist.is_initialized():
        raise RuntimeError("a simulation makes its own process group: run it outside of a launch")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _step(setup, depth: int) -> dict[str | int, int]:
    """The peak of the step, and while decoder layers are at work, counted from the first (0) and the last (-1)."""
    indices = list(range(depth))
    model = fake_model.build(setup, indices)
    fake_model.with_packed_weights(model, setup.storage, setup.nested)
    with contextlib.ExitStack() as stack:
        if setup.sharded:
            stack.enter_context(pretended(setup.shard_ranks))
            mesh = init_device_mesh("cpu", (setup.shard_ranks,))
        stack.enter_context(fake_model.without_memory(setup.device))
        fake_model.materialise(model)
        if setup.sharded:
            shard(model, setup, indices, mesh)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        batch = fake_model.inputs(setup, setup.micro_batch)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs(tuple(batch.values()))
        with tracker:
            for _ in range(2):  # the first makes the optimizer's state
                tracker.reset_mod_stats()
                working_set.forward(model, setup, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        peaks = {module: sum(stats.local_peak.values()) for module, stats in tracker.memory_tracking.items()}
        step = sum(terms["Total"] for terms in tracker.get_tracker_snapshot("peak").values())
    layers = [peaks[fake_model.layer(model, setup, index)] for index in indices]
    half = SHORT // 2
    return {"step": step, **dict(enumerate(layers[:half])), **{i - half: p for i, p in enumerate(layers[-half:])}}


def shard(model, setup, indices: list[int], mesh) -> None:
    """Wrap as Accelerate and `peft_fsdp.let_the_root_hold_the_head` do under FSDP2; FSDP1's root holds the embedding too."""
    policy = MixedPrecisionPolicy(param_dtype=setup.mixed, reduce_dtype=setup.mixed)
    for index in indices:
        fully_shard(
            fake_model.layer(model, setup, index), mesh=mesh, mp_policy=policy, reshard_after_forward=setup.reshard_after_forward
        )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if setup.strategy == "FSDP2" and head is not None and head.weight is not embedding.weight:
        fully_shard(embedding, mesh=mesh, mp_policy=policy, reshard_after_forward=setup.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
