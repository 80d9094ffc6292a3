"""Compare a merged model with the unmerged one by their logits, holding one decoder layer of a model at a time.

Each model is modules without memory. A forward pass gives a layer its weights in float32 just before it runs and takes them
away after it, so that a model of any size runs in the RAM of its largest layer, and what is compared is the arithmetic of
the weights that are on the disk, not the rounding of a 16-bit forward pass.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.nn import functional

# Of the largest logit: what the order of summation costs in float32, with room for deep models. A merge that leaves out a
# layer, or scales it wrongly, is orders of magnitude above it unless the adapter does next to nothing.
FLOAT32_BOUND = 1e-4
# Share of the adapter's effect that rounding to 16 bits may change before the user is told.
ROUNDING_WARNING = 0.1
MAX_PROMPTS, MAX_TOKENS = 16, 64  # all logits of one pass are kept, so their number is bounded

Owner = tuple[nn.Module, str]  # a module and the name of one of its parameters


@dataclass
class Comparison:
    """Two models' logits over the same tokens.

    Attributes:
        largest: the largest difference of any logit; `mean` the mean absolute one.
        relative: `largest`, divided by the largest logit of the first.
        kl: divergence of the second from the first, mean over the tokens, in nats.
        top1: share of the tokens at which both have the same first choice.
    """

    largest: float
    mean: float
    relative: float
    kl: float
    top1: float

    @classmethod
    def of(cls, first: torch.Tensor, second: torch.Tensor) -> "Comparison":
        """Of logits [tokens, vocabulary]."""
        largest, total, kl, same = 0.0, 0.0, 0.0, 0
        for one, other in zip(first.split(8), second.split(8), strict=True):  # in float64, so a few tokens at a time
            difference = (one - other).abs()
            largest, total = max(largest, difference.max().item()), total + difference.sum(dtype=torch.float64).item()
            logs = [functional.log_softmax(logits.double(), -1) for logits in (one, other)]
            kl += functional.kl_div(logs[1], logs[0], log_target=True, reduction="sum").item()
            same += (one.argmax(-1) == other.argmax(-1)).sum().item()
        relative = largest / max(first.abs().max().item(), 1e-30)
        return cls(largest, total / first.numel(), relative, max(kl / len(first), 0.0), same / len(first))

    def row(self, title: str) -> str:
        return f"{title:<34}{self.largest:>11.3g}{self.mean:>11.3g}{self.relative:>11.2g}{self.kl:>11.2g}{self.top1:>9.1%}"


HEADER = f"{'logits':<34}{'max |Δ|':>11}{'mean |Δ|':>11}{'relative':>11}{'KL':>11}{'top-1':>9}"


def effect_kept(base: torch.Tensor, unmerged: torch.Tensor, merged: torch.Tensor) -> float:
    """Share of the adapter's effect on the logits, by root mean square, that the merged model has: 1 is all of it."""
    effect = (unmerged - base).norm().item()
    return 1 - (merged - unmerged).norm().item() / effect if effect else 1.0


def placeholder(like: torch.Tensor) -> nn.Parameter:
    """A parameter of that shape, in float32, that takes no memory; what computes with it gets NaN."""
    return nn.Parameter(torch.full((), torch.nan).expand(like.shape), requires_grad=False)


@contextlib.contextmanager
def streamed(model: nn.Module, owners: set[Owner], read: Callable[[Owner], torch.Tensor]) -> Iterator[None]:
    """While open, the model's parameters are there while the layer they are in runs, and not before or after.

    Args:
        owners: the parameters that are placeholders.
        read: returns the values of one, in float32.
    """
    modules = {module for module, _ in owners}

    def fill(unit, *_):
        for module in unit.modules():
            for name in [name for name in module._parameters if (module, name) in owners]:
                kept[module, name] = module._parameters[name]
                module._parameters[name] = nn.Parameter(read((module, name)), requires_grad=False)

    def free(unit, *_):
        for owner in [(m, n) for m in unit.modules() for n in m._parameters if (m, n) in kept]:
            owner[0]._parameters[owner[1]] = kept.pop(owner)

    kept: dict[Owner, nn.Parameter] = {}
    handles = []
    for unit in units(model, modules):
        handles.append(unit.register_forward_pre_hook(fill))
        handles.append(unit.register_forward_hook(free))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for (module, name), parameter in kept.items():  # a forward pass that failed
            module._parameters[name] = parameter


def units(model: nn.Module, modules: set[nn.Module]) -> list[nn.Module]:
    """What is filled as a whole: decoder layers, whose code may use a weight of any module in them, and, around them, PEFT's
    wrappers, which use the weight they wrap, and single modules.
    """
    layers = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    found: list[nn.Module] = []

    def visit(module):
        wrapper = isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        if wrapper or module in modules or type(module).__name__ in layers:
            found.append(module)
        else:
            for child in module.children():
                visit(child)

    visit(model)
    return found


@torch.no_grad()
def logits(
    model: nn.Module, prompts: list[list[int]], owners: set[Owner], read: Callable[[Owner], torch.Tensor]
) -> torch.Tensor:
    """Logits of every token of every prompt, [tokens, vocabulary], float32; every weight is read once.

    Raises:
        ValueError: they are not finite.
    """
    longest = max(map(len, prompts))
    ids = torch.tensor([row + [row[-1]] * (longest - len(row)) for row in prompts])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in prompts])
    with streamed(model, owners, read):
        out = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    out = out[mask.bool()].float()
    if not out.isfinite().all():
        raise ValueError(
            "logits that are not finite: the weights overflow, or this architecture reads weights outside of the layer they "
            "are in; --verify False skips the comparison"
        )
    return out
