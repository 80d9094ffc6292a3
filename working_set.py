"""What one rank's decoder layers and loss allocate for a micro-batch, read off a forward and backward without memory.

One layer of each kind runs unsharded, on tensors of the real size that have no memory (`fake_model.py`), in about a second.
Everything that grows with the depth or is shared among ranks is added by `memory.py`, with formulas.
"""

from dataclasses import dataclass, field

import torch

import fake_model


@dataclass
class WorkingSet:
    """Bytes. Layers go by their kind, the index of the first layer that is like them.

    Attributes:
        base: what is there from before the first layer to the end: the batch, masks, the embedded tokens.
        saved: of each kind, what its forward leaves for the backward: with checkpointing, its output.
        forward: of each kind, the peak of its forward above what was there before.
        backward: of each kind, the peak of its backward, recomputation included, above what the forward had left.
        loss: the peak of final norm, output embedding and loss, both ways, above what the layers had left.
    """

    base: int = 0
    saved: dict[int, int] = field(default_factory=dict)
    forward: dict[int, int] = field(default_factory=dict)
    backward: dict[int, int] = field(default_factory=dict)
    loss: int = 0


BY_KIND = ("saved", "forward", "backward")
LARGE = 1 << 16  # tokens of a micro-batch; TRL's loss goes through them in blocks of 4096, so more take long


def of_rows(setup, batch: int, training: bool = True) -> WorkingSet:
    """As `trace`; of a large micro-batch extrapolated from two smaller ones, since each row adds the same.

    Not where it does not: packed rows are one row, whose mask grows with the square; on a CPU the loss makes temporaries.
    """
    more = max(LARGE // setup.length, 2)
    squares = setup.packing and setup.attention != "flash_attention_2"
    if batch <= more or squares or setup.device == "cpu":
        return trace(setup, batch, training)
    few = more // 2
    one, two = trace(setup, few, training), trace(setup, more, training)

    def line(a: int, b: int) -> int:
        return b + (b - a) * (batch - more) // (more - few)

    lines = {name: {k: line(v, getattr(two, name)[k]) for k, v in getattr(one, name).items()} for name in BY_KIND}
    return WorkingSet(base=line(one.base, two.base), loss=line(one.loss, two.loss), **lines)


def trace(setup, batch: int, training: bool = True) -> WorkingSet:
    """Run one layer of each kind on a micro-batch of `batch` rows.

    Args:
        setup: a `memory.Setup`.
        training: False for an evaluation, which keeps nothing for a backward.
    """
    # Of each kind the last, and before them the first of all, whose input is kept by others and may need no gradient.
    kinds = dict(enumerate(setup.skeleton.kinds))
    indices = sorted({0, *{kind: index for index, kind in kinds.items()}.values()})
    model = fake_model.build(setup, indices)
    with fake_model.without_memory(setup.device), fake_model.AllocationTracker() as tracker:
        # Under FSDP a layer computes with the weights in the type in which they are gathered.
        fake_model.materialise(model, setup.gathered_dtype if setup.sharded else None)
        tracker.reset()
        seen = fake_model.Segments(model, fake_model.layers(model, setup, indices), tracker)
        batch = fake_model.inputs(setup, batch)
        with torch.set_grad_enabled(training):
            loss = forward(model, setup, batch)
        if training:
            loss.backward()
        seen.finish(training)
    found = WorkingSet(base=seen.levels[0], loss=seen.loss - seen.levels[-1])
    for position, index in enumerate(indices):
        kind = kinds[index]
        found.saved[kind] = seen.levels[position + 1] - seen.levels[position]
        found.forward[kind] = seen.forward[position] - seen.levels[position]
        if training:  # gradients of weights are counted with what is held
            found.backward[kind] = seen.backward[position] - seen.levels[position + 1] - seen.gradients[position]
    return found


def forward(model, setup, batch: dict) -> torch.Tensor:
    """The loss of a micro-batch as TRL computes it."""
    with torch.autocast("cpu", setup.mixed, enabled=setup.mixed is not None):
        count = torch.ones((), dtype=torch.long)
        return model(**batch, fused_lm_head=not setup.full_logits, num_items_in_batch=count, use_cache=False).loss
