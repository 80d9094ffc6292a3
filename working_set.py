"""What one rank's decoder layers and loss allocate for a micro-batch, read off a forward and backward without memory.

One layer of each kind runs unsharded, on tensors of the real size that have no memory (`fake_model.py`), in about a second.
Everything that grows with the depth or is shared among ranks is added by `memory.py`, with formulas.
"""

import functools
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


def trace(setup, batch: int, training: bool = True) -> WorkingSet:
    """Run one layer of each kind on a micro-batch of `batch` rows.

    Args:
        setup: a `memory.Setup`.
        training: False for an evaluation, which keeps nothing for a backward.
    """
    # Of each kind the last, and before them the first of all, whose input is kept by others and may need no gradient.
    kinds = {index: kind for index, kind in enumerate(setup.skeleton.kinds)}
    indices = sorted({0, *{kind: index for index, kind in kinds.items()}.values()})
    model = fake_model.build(setup, indices)
    fake_model.with_packed_weights(model, setup.storage, setup.nested)
    found, last = WorkingSet(), len(indices)
    left, done, gradients = [], 0, 0  # bytes before each layer and after the last; layers run; gradients of weights so far
    with fake_model.without_memory(setup.device), fake_model.AllocationTracker() as tracker:
        # Under FSDP a layer computes with the weights in the type in which they are gathered.
        fake_model.materialise(model, setup.mixed if setup.sharded else None)
        tracker.reset()

        def reach(position, *_):
            if position != len(left) or position != done:
                return  # the recomputation, or a module inside of a layer
            left.append(tracker.current)
            if position == 0:
                found.base = tracker.current
            else:  # only now is freed what the caller of the layer held
                found.saved[kinds[indices[position - 1]]] = left[position] - left[position - 1]
            tracker.take_peak()

        def leave(position, layer, args, output):
            nonlocal done
            if position != done:
                return
            done += 1
            found.forward[kinds[indices[position]]] = tracker.take_peak() - left[position]
            output = output[0] if isinstance(output, tuple) else output
            if output.requires_grad:  # when its gradient is there, the backward of what follows has ended
                output.register_hook(functools.partial(end_backward, position + 1))

        def end_backward(position, *_):
            nonlocal gradients
            peak = tracker.take_peak()
            if position == last:
                found.loss = peak - left[last]
            else:  # gradients are counted with what is held
                found.backward[kinds[indices[position]]] = peak - left[position + 1] - gradients
                gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)

        for module in model.modules():
            module.register_forward_pre_hook(functools.partial(reach, last))
        for position, index in enumerate(indices):
            layer = fake_model.layer(model, setup, index)
            layer.register_forward_pre_hook(functools.partial(reach, position))
            layer.register_forward_hook(functools.partial(leave, position))
        batch = fake_model.inputs(setup, batch)
        if training:
            forward(model, setup, batch).backward()
            end_backward(0)
        else:
            with torch.no_grad():
                forward(model, setup, batch)
            end_backward(last)
    return found


def forward(model, setup, batch: dict) -> torch.Tensor:
    """The loss of a micro-batch as TRL computes it."""
    with torch.autocast("cpu", setup.mixed, enabled=setup.mixed is not None):
        count = torch.ones((), dtype=torch.long)
        return model(**batch, fused_lm_head=True, num_items_in_batch=count).loss
