"""Runs train.py's main() under a launcher for several cases, and writes what each rank really held. Used by the tests.

    accelerate launch --config_file C tests/probe.py cases.json
    PROBE_OUT=prefix SCRIPT=tests/probe.py bash run_peft_fsdp.sh ...    one run with the launcher's own flags

A case is {"name", "argv", "env"}; `env` overrides what the Accelerate config set (FSDP_VERSION, ACCELERATE_USE_FSDP, ...),
so one launch, and its ten seconds of imports, serves several strategies. Facts come from the parameters, never from what
the script prints: after wrapping, before the first step and after the last.
"""

import gc
import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import transformers.trainer
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

FACTS: dict = {}


def local_bytes(parameter) -> torch.Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else getattr(parameter, "_local_shard", parameter)
    return local.detach().contiguous().view(-1).view(torch.uint8)


def frozen_hash(model) -> str:
    """Of every frozen byte this rank holds, in order."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves the root gathered
    fsdp1 = any(isinstance(module, FSDP) for module in model.modules())
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        # bitsandbytes hangs a parameter on a 4-bit layer during a forward; under FSDP1 its memory is freed afterwards.
        if fsdp1 and not name.endswith("_flat_param"):
            continue
        if not parameter.requires_grad and parameter.numel():
            digest.update(name.encode() + local_bytes(parameter).numpy().tobytes())
    return digest.hexdigest()


def describe(model) -> list[dict]:
    out = []
    for name, parameter in model.named_parameters():
        kind = "DTensor" if isinstance(parameter, DTensor) else type(parameter.data).__name__
        full = parameter.numel()
        local = parameter.to_local().numel() if isinstance(parameter, DTensor) else full
        if name.endswith("_flat_param"):
            kind, full = "FlatParameter", parameter._unpadded_unsharded_size.numel()
        item = {"name": name, "kind": kind, "local": local, "full": full, "dtype": str(parameter.dtype)}
        out.append(item | {"trained": parameter.requires_grad})
    return out


class Probe(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        FACTS.update(parameters=describe(model), frozen_before=frozen_hash(model))
        FACTS["fsdp1_units"] = sum(isinstance(m, FSDP) for m in model.modules())
        FACTS["fsdp2_units"] = sum(isinstance(m, FSDPModule) for m in model.modules())
        FACTS["world"] = dist.get_world_size() if dist.is_initialized() else 1

    def on_train_end(self, args, state, control, model=None, **kwargs):
        FACTS["frozen_after"] = frozen_hash(model)
        FACTS["history"] = [dict(row) for row in state.log_history]


def run(case: dict, out: Path) -> None:
    import train

    os.environ.update(case.get("env", {}))
    FACTS.clear()
    FACTS["name"] = case["name"]
    trainer = train.main([str(item) for item in case["argv"]])
    rank = dist.get_rank() if dist.is_initialized() else 0
    (out / f"{case['name']}.rank{rank}.json").write_text(json.dumps(FACTS))
    trainer.accelerator.free_memory()
    del trainer
    gc.collect()
    if dist.is_initialized():
        dist.barrier()
    # The next case makes its own Accelerator; the process group stays.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


if __name__ == "__main__":
    if not sys.argv[1].endswith(".json"):
        prefix = Path(os.environ["PROBE_OUT"])
        transformers.trainer.DEFAULT_CALLBACKS.append(Probe)
        run({"name": prefix.name, "argv": sys.argv[1:]}, prefix.parent)
        sys.exit()
    cases = json.loads(Path(sys.argv[1]).read_text())
    transformers.trainer.DEFAULT_CALLBACKS.append(Probe)
    for case in cases["cases"]:
        run(case, Path(cases["out"]))
