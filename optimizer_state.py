"""An optimizer's state as whole tensors under parameter names: the same file whatever sharded it, on any number of ranks.

FSDP1 keeps a flat piece of several parameters' state on each rank, FSDP2 keeps slices, DDP and one device keep all of it.
The file holds what one device would hold, so a run can go on under another strategy or with another number of ranks. A few
megabytes are gathered at a time, and nobody keeps them. The format is safetensors, with JSON values for what is no
tensor: nothing in it runs code when it is read.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from adapter import Held, gathered, held_parameters


class NotSavable(ValueError):
    """An optimizer whose state has a form that cannot be put together from its shards."""


def held_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[Held]]:
    """For each parameter group, what each of its parameters is, in order."""
    by_id = {id(item.parameter): item for item in held_parameters(model)}
    return [[by_id[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def describe(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict, dict]:
    """What there is to save, without communication: the layout of the tensors, and the rest as JSON values.

    Returns:
        (type and shape of each tensor by "KEY.PARAMETER", {"groups": [...], "values": {parameter: {key: value}}}).

    Raises:
        NotSavable: a state that is neither a number nor a tensor shaped like its parameter.
    """
    layout, values = {}, {}
    held = held_by(model, optimizer)
    for item in (item for group in held for item in group):
        for key, state in optimizer.state.get(item.parameter, {}).items():
            if isinstance(state, torch.Tensor):
                for name, shape in zip(item.names, _shapes(item, key, state, optimizer), strict=True):
                    layout[f"{key}.{name}"] = (state.dtype, tuple(shape))
            elif state is None or isinstance(state, bool | int | float | str):
                for name in item.names:
                    values.setdefault(name, {})[key] = state
            else:
                raise NotSavable(
                    f"{type(optimizer).__name__} keeps {key}, a {type(state).__name__}, which cannot be saved: use "
                    "--optim adamw_torch_fused"
                )
    groups = [
        {"lr": float(group["lr"]), "initial_lr": float(group.get("initial_lr", group["lr"])), "parameters": names}
        for group, names in zip(
            optimizer.param_groups, [[name for item in items for name in item.names] for items in held], strict=True
        )
    ]
    return layout, {"groups": groups, "values": values}


def _shapes(item: Held, key: str, state: torch.Tensor, optimizer) -> list[torch.Size]:
    if state.dim() == 0:  # a step count, the same for everything in the parameter
        return [state.shape] * len(item.names)
    if state.shape == item.parameter.shape:
        return item.shapes
    if item.unit is None:  # factored or quantised statistics, of a parameter that is not cut or whose shards are
        return [state.shape]
    raise NotSavable(
        f"{type(optimizer).__name__} keeps {key} of shape {list(state.shape)} for a flat shard of {item.parameter.numel()}, "
        "which cannot be put together under FSDP1: use --optim adamw_torch_fused, or an FSDP2 config"
    )


def whole_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ("KEY.PARAMETER", tensor) for every tensor of `describe`'s layout, on every rank. A collective."""
    items = [item for group in held_by(model, optimizer) for item in group]
    states = [
        (key, item, state)
        for item in items
        for key, state in optimizer.state.get(item.parameter, {}).items()
        if isinstance(state, torch.Tensor)
    ]
    for key, item, state in states:
        if state.dim() == 0:
            yield from ((f"{key}.{name}", state) for name in item.names)
    keys = [key for key, _, state in states if state.dim()]
    pairs = ((item, state) for _, item, state in states if state.dim())
    for key, (item, tensors) in zip(keys, gathered(pairs), strict=True):
        yield from ((f"{key}.{name}", tensor) for name, tensor in zip(item.names, tensors, strict=True))


def moved(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    """The parameters that a gradient has ever reached: a statistic of theirs is not zero. A collective."""
    return {name.partition(".")[2] for name, state in whole_states(model, optimizer) if state.dim() and state.any()}


@torch.no_grad()
def load(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: set[str], read: Callable[[str], torch.Tensor], rest: dict
) -> None:
    """Put a saved state into a new optimizer of the same parameters. No communication: each rank reads what it needs.

    Args:
        names: of the tensors in the file.
        read: gives one of them, whole.
        rest: the JSON values of `describe`.

    Raises:
        ValueError: the file lacks a parameter's state or has one that is not trained here.
    """
    by_parameter: dict[str, set[str]] = {}
    rates = {name: group for group in rest["groups"] for name in group["parameters"]}
    held = held_by(model, optimizer)
    wanted = {name for group in held for item in group for name in item.names}
    for entry in names:
        key, _, name = entry.partition(".")
        by_parameter.setdefault(name, set()).add(key)
    if set(rates) != wanted or set(by_parameter) - wanted:
        odd = sorted(set(rates) ^ wanted)[:1] or sorted(set(by_parameter) - wanted)[:1]
        raise ValueError(f"the optimizer state is not one of these trained parameters (first difference: {odd})")
    states, groups, index = {}, [], 0
    for group, items in zip(optimizer.param_groups, held, strict=True):
        saved = rates[items[0].names[0]] if items else {}
        groups.append({key: value for key, value in group.items() if key != "params"})
        groups[-1] |= {key: saved[key] for key in ("lr", "initial_lr") if key in saved}
        groups[-1]["params"] = list(range(index, index + len(items)))
        for item in items:
            first = item.names[0]
            state = dict(rest["values"].get(first, {}))
            for key in sorted(by_parameter.get(first, ())):
                value = read(f"{key}.{first}")
                if value.dim():
                    value = item.shard(lambda name, key=key: read(f"{key}.{name}"), value.dtype)
                state[key] = value
            if state:
                states[index] = state
            index += 1
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    # torch gives a state its parameter's type, but some optimizers keep float32 for 16-bit parameters.
    for number, item in enumerate(item for items in held for item in items):
        for key, value in states.get(number, {}).items():
            now = optimizer.state[item.parameter][key]
            if isinstance(value, torch.Tensor) and now.dtype != value.dtype:
                optimizer.state[item.parameter][key] = value.to(now.device)
