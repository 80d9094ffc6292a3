"""Seconds, bytes and peak memory of a save: this repository's checkpoint beside the gather of a full state dict.

    python benchmarks/saving.py                                  # a random 0.85B Llama, 2 ranks, FSDP2 and FSDP1
    python benchmarks/saving.py --shape 0.1b --ranks 2 4 --repeats 5

One training step of `train.py` under the real wrapping, LoRA r=8 on all linear layers; then both saves, in turn, on the same
model in the same process. "checkpoint" is all that `checkpoint-N` is: adapter, optimizer, tokenizer, state, read back,
hashed, flushed to the disk and renamed. "full gather" is what the Trainer does under FULL_STATE_DICT: Accelerate's
`get_state_dict`, PEFT's `save_pretrained` of it and the optimizer's full state, not flushed. Memory is each rank's anonymous
memory above what it was before the save, sampled every 2 ms; page cache does not count.
"""

import argparse
import ctypes
import gc
import importlib.util
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# benchmarks/loading.py: it makes the model, and a module of its name is on the path already.
spec = importlib.util.spec_from_file_location("loading_benchmark", Path(__file__).with_name("loading.py"))
models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(models)

MIB = 2**20


def make_tokenizer(folder: Path) -> None:
    """One token for each byte, with the ChatML markers, so that nothing has to be downloaded."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special[3:],
    ).save_pretrained(folder)


def measured(save, folder: Path) -> dict:
    """Run one save with memory sampled; what it wrote is counted and removed."""
    import torch.distributed as dist

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what training has freed does not hide what the save takes
    dist.barrier()
    baseline = models.anonymous()
    with models.sampled_peak() as peak:
        started = time.perf_counter()
        save()
        dist.barrier()
        seconds = time.perf_counter() - started
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    return {"seconds": seconds, "peak": peak[0] - baseline, "bytes": written}


def worker(args) -> None:
    import torch.distributed as dist
    import transformers.trainer
    from accelerate.utils import save_fsdp_optimizer
    from torch.distributed.fsdp import FullStateDictConfig, StateDictType
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from transformers import TrainerCallback

    import adapter
    import train

    rows = []

    class Measure(TrainerCallback):
        def on_train_end(self, args_, state, control, model=None, **kwargs):
            trainer = Measure.trainer
            plugin, accelerator = trainer.accelerator.state.fsdp_plugin, trainer.accelerator
            out = Path(args_.output_dir)

            def checkpoint():
                trainer._save_checkpoint(trainer.model, None)

            def full_gather():
                folder = out / "full"
                folder.mkdir(exist_ok=True)
                plugin.state_dict_config = plugin.optim_state_dict_config = None  # or those of the other type stay
                plugin.set_state_dict_type(StateDictType.FULL_STATE_DICT)
                if plugin.fsdp_version == 2:
                    gathered = accelerator.get_state_dict(trainer.model)
                else:  # as Accelerate does, less `offload_to_cpu`, with which torch 2.13 frees what is on the CPU already
                    whole = FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
                    with FSDP.state_dict_type(trainer.model, StateDictType.FULL_STATE_DICT, whole):
                        gathered = trainer.model.state_dict()
                if args_.should_save:
                    trainer.peft_model.save_pretrained(folder, state_dict=gathered)
                save_fsdp_optimizer(plugin, accelerator, trainer.optimizer, trainer.model, str(folder))

            layout = adapter.trained_layout(trainer.model)
            sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in layout.values()]
            for _ in range(args.repeats):
                for name, save, folder in (
                    ("checkpoint", checkpoint, out / f"checkpoint-{state.global_step}"),
                    ("full gather", full_gather, out / "full"),
                ):
                    rows.append({"save": name, "adapter": sum(sizes), **measured(save, folder)})

    transformers.trainer.DEFAULT_CALLBACKS.append(Measure)
    build = train.AdapterSFTTrainer.__init__

    def remember(self, *a, **k):
        build(self, *a, **k)
        Measure.trainer = self

    train.AdapterSFTTrainer.__init__ = remember
    out = Path(os.environ["BENCH_OUT"])
    train.main(
        f"--model_name_or_path {args.model} --dataset_name {ROOT / 'demo_data'} --chat_template_format chatml "
        "--use_cpu True --dtype float32 --max_steps 1 --max_length 16 --per_device_train_batch_size 1 --lora_r 8 "
        f"--learning_rate 1e-3 --save_strategy no --disable_tqdm True --output_dir {out / 'run'}".split()
    )
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(rows))


def launch(args, strategy: str, ranks: int) -> list[list[dict]]:
    """The rows of each rank."""
    with tempfile.TemporaryDirectory(dir=args.folder) as out:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "BENCH_OUT": out}
        environment |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": strategy[-1], "FSDP_SHARDING_STRATEGY": "FULL_SHARD"}
        environment |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_USE_ORIG_PARAMS": "false"}
        environment |= {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), __file__]
        command += ["--worker", "--model", str(args.model), "--repeats", str(args.repeats)]
        quiet = None if args.verbose else subprocess.PIPE
        result = subprocess.run(command, env=environment, stdout=quiet, stderr=quiet, text=True)
        if result.returncode:
            sys.exit(f"the launch failed:\n{(result.stderr or '')[-6000:]}")
        return [json.loads((Path(out) / f"{rank}.json").read_text()) for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=models.SHAPES, default="0.85b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--strategies", nargs="+", choices=["fsdp2", "fsdp1"], default=["fsdp2", "fsdp1"])
    parser.add_argument("--repeats", type=int, default=3, help="of each save, in turn; the report shows the spread")
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmarks"), help="where model and saves are made")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    args.folder = args.folder.absolute()
    args.model = models.make_checkpoint(args.folder, args.shape, sparse=False)
    make_tokenizer(args.model)
    report = []
    print("| strategy | ranks | save | s | peak MiB, largest rank | peak over the adapter | written MiB |")
    print("|---|---|---|---|---|---|---|")
    for strategy in args.strategies:
        for ranks in args.ranks:
            each = launch(args, strategy, ranks)
            for name in ("checkpoint", "full gather"):
                rows = [[row for row in rank if row["save"] == name] for rank in each]
                seconds = [max(rank[i]["seconds"] for rank in rows) for i in range(args.repeats)]
                peak = max(row["peak"] for rank in rows for row in rank)
                adapter = rows[0][0]["adapter"]
                print(
                    f"| {strategy} | {ranks} | {name} | {statistics.median(seconds):.2f} "
                    f"({min(seconds):.2f}-{max(seconds):.2f}) | {peak / MIB:.1f} | {peak / adapter:.2f} "
                    f"| {rows[0][0]['bytes'] / MIB:.1f} |",
                    flush=True,
                )
            report.append({"strategy": strategy, "ranks": ranks, "shape": args.shape, "each": each})
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
