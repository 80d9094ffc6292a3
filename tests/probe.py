"""Runs train.py's main() under a launcher for several cases, and writes what each rank really held. Used by the tests.

    accelerate launch --config_file C tests/probe.py cases.json
    PROBE_OUT=prefix SCRIPT=tests/probe.py bash run_peft_fsdp.sh ...    one run with the launcher's own flags

A case is {"name", "argv", "env"}; `env` overrides what the Accelerate config set (FSDP_VERSION, ACCELERATE_USE_FSDP, ...),
so one launch, and its ten seconds of imports, serves several strategies. Facts come from the parameters, never from what
the script prints: after wrapping, before the first step and after the last.
"""

import gc
import hashlib
import itertools
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import transformers.trainer
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
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


def full_bytes(model) -> dict[str, torch.Tensor]:
    """Every parameter, whole, as bytes, and the statistics of 4-bit weights, under names that no wrapper changes. Collective."""
    out = {}

    def keep(name, tensor):
        # PEFT and FSDP insert these; a 4-bit weight is a vector to FSDP1 and a column elsewhere, so bytes are compared.
        for part in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module."):
            name = name.replace(part, "")
        out[name] = tensor.detach().contiguous().view(-1).view(torch.uint8).clone()

    units = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDP)]
    if units:
        units[0][1].check_is_root()
    for prefix, unit in units:
        if unit._handle is None:
            continue
        infos = {(id(i.module), i.param_name): i for i in unit._handle.flat_param._param_infos}
        with FSDP.summon_full_params(unit, recurse=False, writeback=False):
            for name, module in unit.named_modules():
                for (owner, attribute), info in infos.items():
                    if owner == id(module):
                        keep(f"{prefix}.{name}.{attribute}".lstrip("."), getattr(module, info.param_name))
    for name, parameter in model.named_parameters():
        if not name.endswith("_flat_param"):
            keep(name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)
    for name, module in model.named_modules():
        if getattr(module, "quant_state", None) is not None:
            for part, value in module.quant_state.as_dict(packed=True).items():
                keep(f"{name}.{part}", value)
    for name, buffer in model.named_buffers():
        keep(f"{name} (buffer)", buffer)
    return out


def logits(model) -> torch.Tensor:
    """Of a fixed input, in evaluation mode, without autocast. A collective."""
    training = model.training
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        out = model(input_ids=torch.arange(24).view(2, 12) + 5).logits
    model.train(training)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return out.contiguous()


class Dump(TrainerCallback):
    """For cases with "dump" (their `argv` with `bf16 False`; "logits" adds those): the whole model as it was loaded, before the first step and after every check, from rank 0."""

    def __init__(self, path, with_logits):
        self.path, self.with_logits = path, with_logits

    def on_epoch_begin(self, args, state, control, model=None, **kwargs):
        tensors = full_bytes(model)
        if self.with_logits:
            tensors["logits"] = logits(model)
        if args.process_index == 0:
            save_file(tensors, self.path)


class Probe(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        FACTS.update(parameters=describe(model))
        if not FACTS["memory"]:  # of a large model it takes longer than the training
            FACTS["frozen_before"] = frozen_hash(model)
        FACTS["fsdp1_units"] = sum(isinstance(m, FSDP) for m in model.modules())
        FACTS["fsdp2_units"] = sum(isinstance(m, FSDPModule) for m in model.modules())
        FACTS["world"] = dist.get_world_size() if dist.is_initialized() else 1
        if dist.is_initialized():
            backend = dist.group.WORLD._get_backend(torch.device("cpu"))
            FACTS["collectives_wait"] = backend.options._timeout.total_seconds()
        if "path" in FACTS:  # now, because not every run is meant to reach its end
            Path(FACTS["path"]).write_text(json.dumps(FACTS))

    def on_train_end(self, args, state, control, model=None, **kwargs):
        if not FACTS["memory"]:
            FACTS["frozen_after"] = frozen_hash(model)
        FACTS["inv_freq"] = next(
            (b.float().tolist() for n, b in model.named_buffers() if n.endswith("rotary_emb.inv_freq")), None
        )
        FACTS["history"] = [dict(row) for row in state.log_history]


class Gathered(TrainerCallback):
    """For cases with "gathered": what a resumed run holds before its first step, put together by torch and not by us."""

    def __init__(self, path):
        self.path = path

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        full = StateDictOptions(full_state_dict=True, cpu_offload=True)
        states = get_optimizer_state_dict(model, optimizer.optimizer, options=full).get("state", {})  # rank 0 has it
        tensors = {
            f"{key}.{name}": value.contiguous()
            for name, entry in states.items()
            for key, value in entry.items()
            if isinstance(value, torch.Tensor)
        }
        if args.process_index == 0:
            save_file(tensors, self.path)


class Measured(TrainerCallback):
    """For cases with "memory": what this rank holds before its second step, and the peak of that step by torch's profiler."""

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step != 1:
            return
        flat = [m._handle for m in model.modules() if isinstance(m, FSDP) and m._handle is not None]
        ours = {id(handle.flat_param) for handle in flat}
        shards = [(h.flat_param._local_shard, h.flat_param.requires_grad) for h in flat]
        for parameter in model.parameters():
            if not flat or (id(parameter) not in ours and type(parameter).__name__ != "FlatParameter"):
                shards.append((getattr(parameter, "_local_tensor", parameter), parameter.requires_grad))
        states = [
            s for s in optimizer.optimizer.state.values() for s in s.values() if isinstance(s, torch.Tensor) and s.ndim
        ]
        FACTS["held"] = {
            "frozen": storage_bytes([tensor for tensor, trained in shards if not trained]),
            "trained": storage_bytes([tensor for tensor, trained in shards if trained]),
            "optimizer": storage_bytes([getattr(tensor, "_local_tensor", tensor) for tensor in states]),
        }
        gc.collect()
        FACTS["live"] = storage_bytes(t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter))
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self.profile.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.profile.__exit__(None, None, None)
            events = [e for e in self.profile.profiler.kineto_results.events() if e.name() == "[memory]"]
            now = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
            FACTS["peak"] = FACTS["live"] + max(now)


def storage_bytes(tensors) -> int:
    """Of tensors that are there, each piece of memory counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu")
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def record_batches(trainer_class) -> None:
    """Note which rows each micro-batch of this rank has, by a hash of their tokens, in order."""
    step = trainer_class.training_step

    def recording(self, model, inputs, *args, **kwargs):
        rows = [
            hashlib.sha256(ids[mask.bool()].numpy().tobytes()).hexdigest()[:12]
            for ids, mask in zip(
                inputs["input_ids"], inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])), strict=True
            )
        ]
        FACTS.setdefault("batches", []).append([self.state.global_step, rows])
        return step(self, model, inputs, *args, **kwargs)

    trainer_class.training_step = recording


def run(case: dict, out: Path) -> None:
    import train

    os.environ.update(case.get("env", {}))
    FACTS.clear()
    FACTS["name"], FACTS["memory"] = case["name"], case.get("memory", False)
    FACTS["path"] = str(out / f"{case['name']}.rank{os.environ.get('RANK', '0')}.json")
    callbacks = transformers.trainer.DEFAULT_CALLBACKS
    dump = case.get("dump")
    extra = [Dump(out / f"{case['name']}.safetensors", dump == "logits")] if dump else []
    if case.get("gathered"):
        extra.append(Gathered(out / f"{case['name']}.safetensors"))
    if case.get("memory"):
        extra.append(Measured())
    callbacks.extend(extra)
    if train.AdapterSFTTrainer.training_step.__name__ != "recording":
        record_batches(train.AdapterSFTTrainer)
    trainer = train.main([str(item) for item in case["argv"]])
    del callbacks[len(callbacks) - len(extra) :]
    Path(FACTS["path"]).write_text(json.dumps(FACTS))
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
