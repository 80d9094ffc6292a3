"""What PEFT and TRL need changed to train under FSDP: one function for each cause, with the condition for removing it."""

import dataclasses
import functools

import torch
import torch.distributed as dist
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils.other import TrainableTokensWrapper
from torch import nn


def keep_lora_input_dtype(model: nn.Module) -> int:
    """Stop PEFT's layers from casting their input to the adapter's dtype; autocast does it. Returns the layers changed.

    PEFT casts the input to `lora_A.weight.dtype`. Under FSDP1 with mixed precision that is float32 while the unit is
    sharded and bfloat16 once it is gathered, so the forward saves float32 and non-reentrant checkpointing recomputes
    bfloat16: CheckpointError at the first step. For every PEFT layer type that casts, not only LoRA's Linear.
    Remove when PEFT decides by the autocast dtype (peft 0.21 `BaseTunerLayer._cast_input_dtype`).
    """
    layers = [module for module in model.modules() if hasattr(module, "cast_input_dtype_enabled")]
    for layer in layers:
        layer.cast_input_dtype_enabled = False
    return len(layers)


def check_gatherable(model: nn.Module) -> None:
    """Raise ValueError, for FSDP1, if LoRA adapts parameters of a layer instead of linear layers, as for fused experts.

    PEFT 0.21 reads lora_A and lora_B without calling them there, so units of their own are never gathered; FSDP2 gathers
    them with their decoder layer. Remove when `ParamWrapper` calls them.
    """
    names = sorted({module.parameter_name for module in model.modules() if isinstance(module, ParamWrapper)})
    if names:
        raise ValueError(
            f"--lora_target_modules: LoRA on {', '.join(names)} of this mixture of experts does not work under FSDP1; use "
            "an FSDP2 config, or name the attention's linear layers, such as q_proj,k_proj,v_proj,o_proj"
        )


def restore_fp32_masters(model: nn.Module) -> int:
    """Put trained 16-bit parameters back to float32 for the optimizer. Returns how many.

    TRL 1.16 casts a QLoRA adapter to bfloat16; AdamW then updates bfloat16 weights, and a step smaller than 1/256 of a
    weight is lost. FSDP and autocast compute in bfloat16 either way. Remove when TRL keeps them (its note: peft#2889).
    """
    changed = 0
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
            changed += 1
    return changed


def replicate_token_rows(model: nn.Module, device: torch.device) -> list[nn.Module]:
    """Keep trained token rows out of FSDP1's flat parameters; returns the modules to give it as `ignored_modules`.

    They are a few rows inside an embedding that is frozen, and `use_orig_params: false` cannot flatten frozen and trained
    weights together. So every rank holds them whole, and a hook averages their gradients as FSDP does for its own.
    Averaging what is already equal on all ranks changes nothing, so it is also right with gradient accumulation.
    FSDP2 shards parameters one by one and does not need this.
    """
    ignored = [m for name, m in model.named_modules() if name.endswith("trainable_tokens_delta")]

    def average(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())

    for module in ignored:
        module.to(device)  # FSDP moves only what it manages
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)  # nor does it synchronise what it does not manage
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(average)
    return ignored


def give_token_rows_a_bias(model: nn.Module) -> None:
    """Let TRL's fused loss read the output embedding when PEFT trains some of its rows.

    TRL 1.16 reads `lm_head.weight` and `lm_head.bias` without calling the layer, and PEFT's wrapper has no `bias`.
    Remove when TRL calls the head or PEFT passes the attribute on.
    """
    for module in model.modules():
        if isinstance(module, TrainableTokensWrapper) and isinstance(module.token_adapter.base_layer, nn.Linear):
            module.bias = module.token_adapter.base_layer.bias


def let_the_root_hold_the_head(model: nn.Module, fsdp_plugin) -> list[str]:
    """For FSDP2, keep Accelerate from making the output embedding a unit of its own. Returns notes for the health check.

    TRL 1.16 reads the head's weight without calling it, so a unit of its own is never gathered: the weight stays a shard,
    on the CPU under parameter offload, and the loss would be computed there. In the root it is gathered with the first
    forward, as under FSDP1, which costs no more than the copy TRL makes otherwise. Tied embeddings are in one unit, which
    the input embedding gathers; but Accelerate 1.15 sees that by comparing `weight`, and PEFT's wrapper of trained token
    rows returns a new tensor each time, so then the root holds both. Remove when TRL calls the head.
    """
    layers = [
        getattr(m, "token_adapter", m)
        for m in (model.get_input_embeddings(), model.get_output_embeddings())
        if m is not None
    ]
    trained_rows = any(isinstance(layer, TrainableTokensLayer) for layer in layers)
    weights = [(layer.base_layer if isinstance(layer, TrainableTokensLayer) else layer).weight for layer in layers]
    tied = len(weights) == 1 or weights[0] is weights[1]
    if not tied or trained_rows:
        model.get_output_embeddings = lambda: None
    if not (tied and trained_rows):
        return []
    model.get_input_embeddings = lambda: None
    if fsdp_plugin.cpu_ram_efficient_loading:
        # It ties the weights again after loading and fails on the wrapper. Every rank has read the weights by now anyway.
        fsdp_plugin.cpu_ram_efficient_loading = False
        return ["fsdp_cpu_ram_efficient_loading: true is off: it does not work with tied embeddings and added tokens"]
    return []


def detach_dora_norm(model: nn.Module) -> int:
    """Compute DoRA's weight norm without a graph, which PEFT detaches anyway. Returns how many layers were changed.

    The norm calls lora_A and lora_B a first time in each forward. Under FSDP1 with mixed precision (torch 2.13) that first
    call takes the hook that reduces the gradient, the change of type between the two calls discards it, and every rank
    trains on its own, unreduced gradient or fails in the optimizer. Remove when PEFT 0.21's `DoraLinearLayer` has no graph
    there.
    """
    layers = [module for module in model.modules() if isinstance(module, DoraLinearLayer)]
    for layer in layers:
        layer.get_lora_weight = torch.no_grad()(layer.get_lora_weight)
    return len(layers)


def keep_buffers_as_computed(fsdp_plugin) -> None:
    """For FSDP1, stop casting buffers to the mixed-precision type, now and when the Trainer sets it again for 4-bit weights.

    Accelerate 1.15 sets `buffer_dtype`, so at the first forward FSDP1 rounds the rotary frequencies to bfloat16: up to 0.2 %
    each, which at position 2048 is a phase wrong by radians, and not what the model was trained with or will be used with.
    FSDP2 and DDP leave buffers alone. Remove when Accelerate leaves it be.
    """
    original = fsdp_plugin.set_mixed_precision

    def keep():
        if fsdp_plugin.mixed_precision_policy is not None:
            fsdp_plugin.mixed_precision_policy = dataclasses.replace(fsdp_plugin.mixed_precision_policy, buffer_dtype=None)

    @functools.wraps(original)
    def set_mixed_precision(*args, **kwargs):
        original(*args, **kwargs)
        keep()

    fsdp_plugin.set_mixed_precision = set_mixed_precision
    keep()


def keep_outputs_as_computed(fsdp_plugin) -> None:
    """For FSDP2, stop casting what the model returns to the mixed-precision type.

    Accelerate 1.15 sets `output_dtype`, so the per-token log-probabilities that TRL's fused head returns, and the loss
    summed from them, are rounded to bfloat16's three digits. FSDP1 does not cast them. Remove when Accelerate leaves it be.
    """
    policy = fsdp_plugin.mixed_precision_policy
    if policy is not None:
        fsdp_plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)
