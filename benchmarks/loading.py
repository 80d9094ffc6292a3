"""The memory a rank needs to load a model, what it reads and how long it takes: this loader beside `from_pretrained`.

    python benchmarks/loading.py                      # a random 0.85B Llama, 1, 2 and 4 ranks, 16-bit and NF4
    python benchmarks/loading.py --shape 70b --ranks 8 --fake --cases plain       # rank 0 of 8, really 70B wide
    python benchmarks/loading.py --shape 70b --ranks 2 --fake --device cuda --offload

Each case is a launch of its own. Memory is each rank's anonymous memory, sampled every 2 ms and checked against smaps_rollup
at the end, so the page cache that reading fills does not count; above what the process held before it touched the model
(imports, process group).
`--fake` runs rank 0 alone with a process group that only pretends to communicate; the checkpoint is a sparse file of zeros,
which no disk has to hold. With `--device cuda` the peak is the allocator's.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {
    "tiny": dict(hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2),
    "0.1b": dict(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4
    ),
    "0.85b": dict(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=8
    ),
    "7b": dict(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32
    ),
    "70b": dict(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    ),
}
GIB = 2**30


def anonymous(source: str = "status", field: str = "RssAnon:") -> int:
    """Bytes of anonymous memory of this process: the kernel's counter, or added up page by page ("smaps_rollup")."""
    with open(f"/proc/self/{source}", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


@contextlib.contextmanager
def sampled_peak():
    """Yield a list whose only item becomes the most anonymous memory that the process had meanwhile."""
    peak, done = [anonymous()], threading.Event()

    def sample():
        while not done.is_set():
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.002)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield peak
    finally:
        done.set()
        sampler.join()
        peak[0] = max(peak[0], anonymous())


def config_of(shape: str):
    from transformers import LlamaConfig

    vocabulary = 512 if shape == "tiny" else 32000
    return LlamaConfig(vocab_size=vocabulary, max_position_embeddings=4096, dtype="bfloat16", **SHAPES[shape])


def make_checkpoint(folder: Path, shape: str, sparse: bool) -> Path:
    """A Llama of that shape in bfloat16: random numbers, or a sparse file of zeros that takes no room on the disk."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    folder = folder / f"{shape}{'-sparse' if sparse else ''}"
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True)
    config = config_of(shape)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    if sparse:
        header, position = {}, 0
        for name, tensor in state.items():
            size = tensor.numel() * 2
            header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [position, position + size]}
            position += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / "model.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + position)
    else:
        files: list[dict] = [{}]
        for name, tensor in state.items():
            if sum(t.numel() for t in files[-1].values()) > 2**28:
                files.append({})
            files[-1][name] = torch.randn(tensor.shape, dtype=torch.bfloat16) * 0.02
        weight_map = {}
        for index, tensors in enumerate(files):
            file = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
            save_file(tensors, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config.save_pretrained(folder)  # last: it says that the rest is there
    return folder


def settings(args):
    import utils

    return utils.quantization_config(
        use_4bit=args.case == "nf4"
    )  # NF4 with double quantisation, computed and stored in bfloat16


def load_ours(args, device) -> dict:
    """Through the loader, wrapped by FSDP2 or FSDP1, as `train.py` does; returns what the rank owns."""
    import torch
    from peft import LoraConfig, get_peft_model
    from peft.utils.other import fsdp_auto_wrap_policy
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy, fully_shard
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    import loading

    config = config_of(args.shape)
    deferred = loading.defer(str(args.model), config, quantization=settings(args))
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear")
    with deferred.recorded():
        model = get_peft_model(deferred.model, lora)
    place = torch.device("cpu") if args.offload else None
    if args.strategy == "fsdp2":
        policy = CPUOffloadPolicy(pin_memory=device.type != "cpu") if args.offload else OffloadPolicy()
        for layer in model.get_base_model().model.layers:
            fully_shard(layer, offload_policy=policy)
        fully_shard(model, offload_policy=policy)
    else:
        with loading.wrapping_without_memory():
            model = FSDP(
                model, auto_wrap_policy=fsdp_auto_wrap_policy(model), device_id=device, use_orig_params=False,
                param_init_fn=lambda module: module, cpu_offload=CPUOffload(args.offload),
            )  # fmt: skip
    deferred.fill(model, device, place, progress=False)
    tensors = deferred.checkpoint.tensors.values()
    return {"shard": deferred.held_bytes, "read": deferred.checkpoint.bytes_read, "largest": max(t.nbytes for t in tensors)}


def load_theirs(args, device) -> dict:
    """As PEFT's SFT example calls it: float32 unless quantised, whole on every rank."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        args.model,
        quantization_config=settings(args),
        dtype=torch.bfloat16 if args.case == "nf4" else torch.float32,
    )
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    stored = sum(file.stat().st_size for file in Path(args.model).glob("*.safetensors"))
    return {"shard": held, "read": stored, "largest": 0}


def worker(args) -> None:
    """One rank: waits at the baseline, loads, reports."""
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    import loading  # noqa: F401  what both sides import belongs to the baseline

    device = torch.device(args.device)
    if args.fake:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=args.ranks, store=FakeStore())
    else:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    # bitsandbytes compiles its kernels' look-up tables at first use.
    torch.ops.bitsandbytes.quantize_4bit.default(torch.ones(64), 64, "nf4", torch.uint8)
    dist.barrier()
    baseline = anonymous()
    out = Path(os.environ["BENCH_OUT"]) / f"{dist.get_rank()}.json"
    with sampled_peak() as peak:
        started = time.perf_counter()
        facts = (load_ours if args.side == "ours" else load_theirs)(args, device)
        facts["seconds"] = time.perf_counter() - started
    exact = anonymous("smaps_rollup", "Anonymous:")  # adding it up is too slow to sample
    assert abs(exact - anonymous()) < 2**24, f"the kernel counts {anonymous()} bytes, its pages are {exact}"
    facts |= {"peak": peak[0] - baseline, "baseline": baseline}
    if device.type == "cuda":
        facts["cuda_peak"] = torch.cuda.max_memory_allocated(device)
        facts["card"] = torch.cuda.get_device_name(device)
    out.write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


def launch(args, side: str, case: str, ranks: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as out:
        own = ["--worker", "--side", side, "--case", case, "--ranks", str(ranks), "--model", str(args.model)]
        own += ["--shape", args.shape, "--strategy", args.strategy, "--device", args.device]
        own += ["--offload"] * args.offload + ["--fake"] * args.fake
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "BENCH_OUT": out}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        command = [sys.executable] if args.fake else command
        subprocess.run(
            [*command, __file__, *own], check=True, env=environment, stderr=None if args.verbose else subprocess.PIPE
        )
        return [json.loads((Path(out) / f"{rank}.json").read_text()) for rank in range(1 if args.fake else ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.85b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--cases", nargs="+", choices=["plain", "nf4"], default=["plain", "nf4"])
    parser.add_argument("--sides", nargs="+", choices=["ours", "theirs"], default=None)
    parser.add_argument("--strategy", choices=["fsdp2", "fsdp1"], default="fsdp2")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--offload", action="store_true", help="shards stay on the CPU")
    parser.add_argument("--fake", action="store_true", help="rank 0 of --ranks, alone, with a sparse checkpoint")
    parser.add_argument("--repeats", type=int, default=1, help="interleaved; the report shows the spread")
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmarks"), help="where the model is made and kept")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--verbose", action="store_true")
    for hidden in ("--worker", "--side", "--case", "--model"):
        parser.add_argument(hidden, **({"action": "store_true"} if hidden == "--worker" else {}), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        args.ranks = args.ranks[0]
        return worker(args)
    args.model = make_checkpoint(args.folder.absolute(), args.shape, sparse=args.fake)
    rows = []
    print("| ranks | weights | loader | shard GiB | peak above baseline GiB | of shard + largest tensor | read GiB | s |")
    print("|---|---|---|---|---|---|---|---|")
    for ranks in args.ranks:
        for case in args.cases:
            sides = args.sides or (["ours"] if args.fake else ["ours", "theirs"])
            runs = {side: [] for side in sides}
            for _ in range(args.repeats):
                for side in sides:
                    runs[side].append(launch(args, side, case, ranks))
            for side, repeats in runs.items():
                every = [fact for run in repeats for fact in run]
                worst = max(every, key=lambda fact: fact["peak"])
                seconds = [max(fact["seconds"] for fact in run) for run in repeats]
                ratio = f"{worst['peak'] / (worst['shard'] + worst['largest']):.2f}" if side == "ours" else ""
                spread = f" ({min(seconds):.1f}-{max(seconds):.1f})" if len(seconds) > 1 else ""
                print(
                    f"| {ranks} | {case} | {side} | {max(f['shard'] for f in every) / GIB:.3f} | {worst['peak'] / GIB:.3f} "
                    f"| {ratio} | {max(f['read'] for f in every) / GIB:.2f} | {statistics.median(seconds):.1f}{spread} |",
                    flush=True,
                )
                if "cuda_peak" in worst:
                    print(f"\n{worst['card']}: peak allocated {max(f['cuda_peak'] for f in every) / GIB:.3f} GiB\n")
                rows.append({"ranks": ranks, "case": case, "side": side, "runs": repeats})
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
