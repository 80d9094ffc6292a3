"""Real FSDP on a CPU, so that a launch for eight GPUs can be rehearsed on a laptop.

Accelerate 1.15 turns an FSDP launch on CPU into plain DDP, without a word: `AcceleratorState` enables FSDP only
when the backend is an accelerator's. `enable()` puts FSDP back in force over Gloo, for FSDP1 and FSDP2, and returns
what it had to change. Call it once, before the `Accelerator` exists; on a machine where the run uses an accelerator,
or where FSDP was not asked for, it does nothing.

Each change below names its cause and the condition for removing it.
"""

import functools
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout


def fsdp_requested() -> bool:
    """Whether the launcher asked for FSDP (`accelerate launch` sets this variable; under torchrun the user does)."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def enable(use_cpu: bool) -> list[str]:
    """Make FSDP real for a CPU run.

    Args:
        use_cpu: whether this run is meant for the CPU (`--use_cpu True`).

    Returns:
        One line for each setting of the Accelerate configuration that was changed because a CPU cannot honour it.
        Empty when there was nothing to do.
    """
    if not use_cpu or not fsdp_requested():
        return []
    changed = _drop_settings_without_a_cpu_form()
    _keep_fsdp_in_accelerator_state()
    _let_fsdp1_take_the_cpu_device()
    return changed


def _drop_settings_without_a_cpu_form() -> list[str]:
    # `sync_module_states` broadcasts from device memory and torch refuses CPU parameters (torch 2.13,
    # `_sync_module_params_and_buffers`); Accelerate's plugin already fails when it looks for a device to use.
    # RAM-efficient loading depends on that broadcast under FSDP1, and parameter offload from CPU to CPU is nothing.
    # Remove each when torch accepts it on CPU.
    changed = []
    fsdp1 = os.environ.get("FSDP_VERSION", "1") == "1"
    drop = {"FSDP_OFFLOAD_PARAMS": "the parameters are on the CPU already"}
    if fsdp1:
        drop["FSDP_SYNC_MODULE_STATES"] = "FSDP1 cannot broadcast CPU parameters"
        drop["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "under FSDP1 it needs fsdp_sync_module_states"
    for variable, reason in drop.items():
        if os.environ.get(variable, "false").lower() == "true":
            os.environ[variable] = "false"
            changed.append(f"{variable.lower()}: true has no effect on CPU and is off ({reason})")
    return changed


def _keep_fsdp_in_accelerator_state() -> None:
    # Accelerate 1.15 `AcceleratorState.__init__` sets `fsdp_plugin` only for GPU-type backends. Repeat what it does
    # for those when the backend is Gloo on CPU. Remove when MULTI_CPU is in that list.
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__
    if getattr(original, "_keeps_fsdp_on_cpu", False):
        return

    @functools.wraps(original)
    def init(self, *args, fsdp_plugin=None, **kwargs):
        fresh = not AcceleratorState._shared_state
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if not fresh or fsdp_plugin is None or self.distributed_type != DistributedType.MULTI_CPU:
            return
        self.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin

    init._keeps_fsdp_on_cpu = True
    AcceleratorState.__init__ = init


def _let_fsdp1_take_the_cpu_device() -> None:
    # torch 2.13 compares the `device_id` it was given, "cpu", with `torch.cpu.current_device()`, read as "cpu:0", and
    # rejects them as different devices. Remove when `FullyShardedDataParallel(..., device_id="cpu")` works.
    from torch.distributed.fsdp import _init_utils

    original = _init_utils._get_compute_device
    if getattr(original, "_takes_the_cpu_device", False):
        return

    @functools.wraps(original)
    def compute_device(module, ignored_params, device_from_device_id, rank, device_handle):
        if device_from_device_id is not None and device_from_device_id.type == "cpu":
            return torch.device("cpu")
        return original(module, ignored_params, device_from_device_id, rank, device_handle)

    compute_device._takes_the_cpu_device = True
    _init_utils._get_compute_device = compute_device


def keep_timeout(use_cpu: bool, seconds: int) -> None:
    """Let collectives on a CPU wait as long as `--ddp_timeout` says.

    Transformers 5.24 hands it to the process group of an accelerator only. Remove when it does so for every backend.
    """
    if use_cpu and dist.is_available() and dist.is_initialized():
        _set_pg_timeout(timedelta(seconds=seconds))


def keep_4bit_layout(model: torch.nn.Module) -> int:
    """Stop bitsandbytes from repacking 4-bit weights at their first evaluation on a CPU with AVX512-BF16.

    bitsandbytes 0.50 repacks the weight in place and rewrites its quant_state. A shard is gathered anew for each forward
    and never stays packed, so the two no longer agree and every evaluation is silently wrong; without FSDP, the frozen
    weight is no longer what was loaded. Remove when the packed copy is kept beside the weight.

    Returns:
        How many layers were changed.
    """
    layers = [module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False
    return len(layers)
