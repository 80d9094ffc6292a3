"""Speed and memory of preparing the data, here and by TRL; a second start from the cache; the share of padding.

    python benchmarks/data.py                                  # 100,000 generated conversations
    python benchmarks/data.py --rows 5000 --repeats 5 --threads all

"here" is `data.prepare`; "TRL" is `load_dataset` and SFTTrainer's `_prepare_dataset` with assistant_only_loss, from the same
JSONL file with the same tokenizer (SmolLM2's, with ChatML; TRL's template also marks the answers), cut to 2048, with
and without packing. First the tokens and labels that both make of 1000 rows are compared. Each measurement is a process of
its own, of which the preparation is timed and not the imports: one with an empty cache, then one with the cache that the
first has left. Memory is anonymous memory above what the process held before, sampled every 2 ms; the pages of memory-mapped
files do not count.
"""

import argparse
import ctypes
import gc
import importlib.util
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
# benchmarks/loading.py: it samples memory, and a module of its name is on the path already.
spec = importlib.util.spec_from_file_location("loading_benchmark", Path(__file__).with_name("loading.py"))
memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)

MIB, COMPARED = 2**20, 1000
COMMON = (
    "the of and to in a is that for it as was with be by on not he this are or his from at which but have an had they you "
    "were their one all we can her has there been if more when will would who so no said what up its about into than them"
)
STEMS = (
    "act form port press struct connect order light view mark count place point sign charge train play print load work "
    "write build turn test file table model paper water green market engine school letter number garden window river"
)
PARTS = ",re,un,over,inter,sub,non,out".split(","), STEMS.split(), ",s,ed,ing,er,able,ment,less,ness,ation,ist".split(",")
WORDS = COMMON.split() + ["".join(parts) for parts in itertools.product(*PARTS)]
# ChatML with the marks that TRL needs around what is supervised: an answer and the token that ends it, as here.
CHATML_FOR_TRL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)


def make_rows(path: Path, rows: int) -> None:
    """Conversations of 1 to 5 rounds, of log-normal lengths and words drawn by Zipf's law; always the same."""
    draw, weights = random.Random(0), list(itertools.accumulate(1 / rank for rank in range(3, 3 + len(WORDS))))

    def text(words: float) -> str:
        sentences, left = [], max(1, round(words))
        while left > 0:
            size = min(left, draw.randint(4, 18))
            chosen = draw.choices(WORDS, cum_weights=weights, k=size)
            chosen[-1] = str(draw.randint(1, 9999)) if draw.random() < 0.1 else chosen[-1]
            sentences.append(" ".join(chosen).capitalize() + draw.choice((".\n\n", ". ", "? ", ", ", ". ")))
            left -= size
        return "".join(sentences).strip()

    with open(path, "w", encoding="utf-8") as file:
        for _ in range(rows):
            rounds, words = draw.randint(1, 5), draw.lognormvariate(4.35, 0.9)
            messages = [{"role": "system", "content": text(12)}] if draw.random() < 0.25 else []
            for _ in range(rounds):
                share = words / rounds * draw.uniform(0.5, 1.5)
                messages.append({"role": "user", "content": text(share * 0.3)})
                messages.append({"role": "assistant", "content": text(share * 0.7)})
            file.write(json.dumps({"messages": messages}) + "\n")


def preparation(args, side: str, packing: bool):
    """The tokenizer, and the function that prepares the data."""
    import chat

    tokenizer, _ = chat.prepare_tokenizer(str(args.folder / "smollm2"), "chatml")
    common = {"max_length": 2048, "packing": packing, "use_cpu": True, "output_dir": str(args.folder / "run")}
    if side == "here":
        import arguments
        import data

        flags = common | {"model_name_or_path": "-", "dataset_name": args.data, "loss_on": "assistant", "data_only": True}
        _, data_args, training_args = arguments.parse([f"--{name}={value}" for name, value in flags.items()]).build()
        return tokenizer, lambda: data.prepare(data_args, training_args, tokenizer)
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer.chat_template = CHATML_FOR_TRL
    config = SFTConfig(**common, assistant_only_loss=True, bf16=False, report_to=[])
    size = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size))
    one = [{"messages": [{"role": role, "content": "Yes."} for role in ("user", "assistant")]}]
    trainer = SFTTrainer(model, config, train_dataset=datasets.Dataset.from_list(one), processing_class=tokenizer)

    def prepare():
        rows = datasets.load_dataset("json", data_files=args.data, split="train")
        return trainer._prepare_dataset(rows, tokenizer, config, packing, None, "train")

    return tokenizer, prepare


def padded_share(rows, tokenizer) -> float:
    """The share of padding in micro-batches of 8 rows in random order, from TRL's collator."""
    import torch
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator, order = DataCollatorForLanguageModeling(tokenizer.pad_token_id), torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(rows, 8, shuffle=True, collate_fn=collator, generator=order)
    sizes = [(int(batch["attention_mask"].sum()), batch["input_ids"].numel()) for batch in loader]
    return 1 - sum(real for real, _ in sizes) / sum(padded for _, padded in sizes)


def worker(args) -> dict:
    import datasets

    datasets.disable_progress_bars()
    side, variant, step, args.data = args.worker
    tokenizer, prepare = preparation(args, side, variant == "packed")
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free already does not hide what the preparation takes
    baseline = memory.anonymous()
    with memory.sampled_peak() as peak:
        started, started_cpu = time.perf_counter(), time.process_time()
        result = prepare()
        facts = {"seconds": time.perf_counter() - started, "cpu seconds": time.process_time() - started_cpu}
    rows = result.train if side == "here" else result
    facts |= {"peak": peak[0] - baseline, "rows": len(rows)}
    if step == "compare":
        return {name: rows[:COMPARED][name] for name in ("input_ids", "labels")}
    if side == "here" and step == "first with padding":
        import data_report

        figures = data_report.summary(result.report)
        facts |= {"padding": padded_share(rows, tokenizer), "tokens": figures["splits"]["train"]["tokens"]}
        facts["report"] = {"padding": figures["padding"]["share"], "fill": figures["packing"]["fill"]}
    return facts


def launch(args, side: str, variant: str, step: str, cache: str, rows: Path) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": cache}
    environment["TOKENIZERS_PARALLELISM"] = str(args.threads == "all").lower()
    command = [sys.executable, __file__, "--worker", side, variant, step, str(rows), "--json", f"{cache}/facts.json"]
    result = subprocess.run([*command, "--folder", str(args.folder)], env=environment, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{side}, {variant}, {step} failed:\n{result.stderr[-6000:]}")
    return json.loads(Path(cache, "facts.json").read_text())


def spread(values, digits: int, unit: float = 1) -> str:
    low, middle, high = (f"{f(values) / unit:.{digits}f}" for f in (min, statistics.median, max))
    return middle if low == high else f"{middle} ({low}-{high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="conversations to generate (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement, in turn; the report shows the spread")
    parser.add_argument("--threads", choices=["one", "all"], default="one", help="of the tokenizer, on both sides")
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmarks"), help="where rows and caches are written")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        args.json.write_text(json.dumps(worker(args)))
        return
    args.folder = args.folder.absolute()
    args.folder.mkdir(parents=True, exist_ok=True)
    import zoo  # tests/zoo.py

    zoo.make("smollm2", args.folder)
    report = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows, first = Path(folder, "rows.jsonl"), Path(folder, "first.jsonl")
        make_rows(rows, args.rows)
        make_rows(first, COMPARED)
        here, trl = (launch(args, side, "plain", "compare", folder, first) for side in ("here", "TRL"))
        differ = {name: sum(a != b for a, b in zip(here[name], trl[name], strict=True)) for name in here}
        print(f"Of {len(here['labels'])} rows {differ['input_ids']} differ in tokens, {differ['labels']} in labels.\n")
        print("| rows | by | s | rows/s | 1000 tokens/s | CPU s | peak MiB | second start s | of the first |")
        print("|---|---|---|---|---|---|---|---|---|")
        for variant in ("plain", "packed"):
            runs = {"here": [], "TRL": []}
            for repeat, side in itertools.product(range(args.repeats), runs):
                with tempfile.TemporaryDirectory(dir=folder) as cache:
                    run = launch(args, side, variant, "first" if repeat else "first with padding", cache, rows)
                    runs[side].append(run | {"second": launch(args, side, variant, "second", cache, rows)})
            pairs = list(zip(runs["here"], runs["TRL"], strict=True))
            ratios = {name: [trl[name] / here[name] for here, trl in pairs] for name in ("seconds", "cpu seconds", "peak")}
            for side, found in runs.items():
                seconds, cpu, peak = ([run[name] for run in found] for name in ratios)
                second = [run["second"]["seconds"] for run in found]
                speed, tokens = [args.rows / s for s in seconds], runs["here"][0]["tokens"] / args.rows
                share = spread([100 * b / a for a, b in zip(seconds, second, strict=True)], 1)
                columns = [spread(seconds, 1), spread(speed, 0), spread(speed, 0, 1000 / tokens), spread(cpu, 1)]
                columns += [spread(peak, 0, MIB), spread(second, 2), f"{share} %"]
                print(f"| {variant} | {side} | {' | '.join(columns)} |", flush=True)
            times, cpu, peak = (spread(values, 2) for values in ratios.values())
            print(f"| {variant} | TRL / here | {times} | | | {cpu} | {peak} | | |", flush=True)
            report[variant] = {"runs": runs, "TRL / here": ratios}
    plain, packed = (report[variant]["runs"]["here"][0] for variant in ("plain", "packed"))
    print(
        f"\nPadding in micro-batches of 8: {plain['padding']:.1%} (the data report says {plain['report']['padding']:.1%});"
    )
    print(
        f"of packed rows {packed['padding']:.1%} if padded, none as trained; they are {packed['report']['fill']:.1%} full."
    )
    names = ("datasets", "pyarrow", "tokenizers", "transformers", "trl")
    facts = {"rows": args.rows, "threads": args.threads, "differ": differ, "variants": report}
    facts["machine"] = {"cores": os.cpu_count(), "python": platform.python_version()} | {n: version(n) for n in names}
    if args.json:
        args.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
