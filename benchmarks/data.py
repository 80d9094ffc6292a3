"""Speed and memory of preparing the data, here and by TRL; a second start from the cache; the share of padding.

    python benchmarks/data.py                                  # 100,000 generated conversations
    python benchmarks/data.py --rows 5000 --repeats 5 --threads all

"here" is `data.prepare`; "TRL" is `load_dataset` and SFTTrainer's `_prepare_dataset` with assistant_only_loss, from the same
JSONL file with the same tokenizer (SmolLM2's, with ChatML; TRL's template also marks the answers), cut to 2048 tokens, with
and without packing. First the tokens and labels that both make of 1000 rows are compared. Each measurement is a process of
its own that times the preparation, not imports: one with an empty cache, then one with the cache that the first has left.
Memory is anonymous memory above what the process held before, sampled every 2 ms; memory-mapped files do not count.
"""

import argparse
import ctypes
import importlib.util
import itertools
import json
import os
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

MIB, COMPARED, MAX_LENGTH = 2**20, 1000, 2048
COMMON = """the of and to in a is that for it as was with be by on not he this are or his from at which but have an had they
you were their one all we can her has there been if more when will would who so no said what up its about into than them only
some could time these two may then do first any my now such like our over man me even most made after also did""".split()
STEMS = """act form port press struct connect order light view mark count place point sign charge train play print load work
write build turn test file table model paper water green market engine school letter number garden window river""".split()
PREFIXES, SUFFIXES = ",re,un,over,inter,sub,non,out".split(","), ",s,ed,ing,er,ers,able,ment,less,ness,ation,ist".split(",")
WORDS = COMMON + ["".join(parts) for parts in itertools.product(PREFIXES, STEMS, SUFFIXES)]
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
            sentences.append(", ".join(" ".join(part) for part in (chosen[:7], chosen[7:]) if part).capitalize() + ".")
            left -= size
        return "".join(sentence + draw.choice(("\n\n", " ", " ", " ", " ")) for sentence in sentences).strip()

    with open(path, "w", encoding="utf-8") as file:
        for _ in range(rows):
            rounds, words = draw.randint(1, 5), draw.lognormvariate(4.35, 0.9)
            messages = [{"role": "system", "content": text(12)}] if draw.random() < 0.25 else []
            for _ in range(rounds):
                share = words / rounds * draw.uniform(0.5, 1.5)
                for role, part in (("user", 0.3), ("assistant", 0.7)):
                    messages.append({"role": role, "content": text(share * part)})
            file.write(json.dumps({"messages": messages}) + "\n")


def preparation(args, side: str, packing: bool):
    """The tokenizer, and the function that prepares the data."""
    import chat

    tokenizer, _ = chat.prepare_tokenizer(str(args.folder / "smollm2"), "chatml")
    common = {"max_length": MAX_LENGTH, "packing": packing, "use_cpu": True, "output_dir": str(args.folder / "run")}
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
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **small))
    one = [{"messages": [{"role": role, "content": "Yes."} for role in ("user", "assistant")]}]
    trainer = SFTTrainer(model, config, train_dataset=datasets.Dataset.from_list(one), processing_class=tokenizer)
    file, rest = {"path": "json", "data_files": args.data, "split": "train"}, (tokenizer, config, packing, None, "train")
    return tokenizer, lambda: trainer._prepare_dataset(datasets.load_dataset(**file), *rest)


def worker(args) -> None:
    import datasets
    import torch
    from torch.utils.data import DataLoader
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    import data_report

    datasets.disable_progress_bars()
    side, variant, step, args.data = args.worker
    tokenizer, prepare = preparation(args, side, variant == "packed")
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free already does not hide what the preparation takes
    baseline = memory.anonymous()
    with memory.sampled_peak() as peak:
        started, started_cpu = time.perf_counter(), time.process_time()
        result = prepare()
        facts = {"seconds": time.perf_counter() - started, "cpu seconds": time.process_time() - started_cpu}
    rows = result.train if side == "here" else result
    facts |= {"peak": peak[0] - baseline, "rows": len(rows)}
    if step == "compare":
        facts = {name: rows[:COMPARED][name] for name in ("input_ids", "labels")}
    if side == "here" and step == "first with padding":
        torch.manual_seed(0)
        batches = DataLoader(rows, 8, shuffle=True, collate_fn=DataCollatorForLanguageModeling(tokenizer.pad_token_id))
        sizes = [(int(batch["attention_mask"].sum()), batch["input_ids"].numel()) for batch in batches]
        measured = 1 - sum(real for real, _ in sizes) / sum(padded for _, padded in sizes)
        said = data_report.summary(result.report)
        facts["padding"] = {"measured": measured, "report": said["padding"]["share"], "fill": said["packing"]["fill"]}
        facts["tokens"] = said["splits"]["train"]["tokens"]
    args.json.write_text(json.dumps(facts))


def launch(args, side: str, variant: str, step: str, cache: str, rows: Path) -> dict:
    options = {"TOKENIZERS_PARALLELISM": str(args.threads == "all").lower(), "HF_DATASETS_CACHE": cache}
    options = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **options}
    command = [sys.executable, __file__, "--worker", side, variant, step, str(rows), "--json", f"{cache}/facts.json"]
    result = subprocess.run([*command, "--folder", args.folder], env=options, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{side}, {variant}, {step} failed:\n{result.stderr[-6000:]}")
    return json.loads(Path(cache, "facts.json").read_text())


def spread(values, digits: int) -> str:
    low, middle, high = (f"{function(values):.{digits}f}" for function in (min, statistics.median, max))
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
        return worker(args)
    args.folder = args.folder.absolute()
    importlib.import_module("zoo").make("smollm2", args.folder)  # tests/zoo.py
    report = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        make_rows(rows := Path(folder, "rows.jsonl"), args.rows)
        make_rows(first := Path(folder, "first.jsonl"), COMPARED)
        here, trl = (launch(args, side, "plain", "compare", folder, first) for side in ("here", "TRL"))
        differ = {name: sum(a != b for a, b in zip(here[name], trl[name], strict=True)) for name in here}
        print(f"Of {len(here['labels'])} rows {differ['input_ids']} differ in tokens, {differ['labels']} in labels.\n")
        print("| rows | by | s | rows/s | ktokens/s | CPU s | peak MiB | second start s | of first |\n" + "|---" * 9 + "|")
        for variant in ("plain", "packed"):
            runs = {"here": [], "TRL": []}
            for repeat, side in itertools.product(range(args.repeats), runs):
                with tempfile.TemporaryDirectory(dir=folder) as cache:
                    run = launch(args, side, variant, "first" if repeat else "first with padding", cache, rows)
                    runs[side].append(run | {"second": launch(args, side, variant, "second", cache, rows)})
            pairs = list(zip(*runs.values(), strict=True))
            ratios = {name: [b[name] / a[name] for a, b in pairs] for name in ("seconds", "cpu seconds", "peak")}
            for side, found in runs.items():
                seconds, cpu, peak = ([run[name] for run in found] for name in ratios)
                second, tokens = [run["second"]["seconds"] for run in found], runs["here"][0]["tokens"]
                share = spread([100 * b / a for a, b in zip(seconds, second, strict=True)], 1)
                speeds = (spread([number / s for s in seconds], 0) for number in (args.rows, tokens / 1000))
                columns = [spread(seconds, 1), *speeds, spread(cpu, 1), spread([size / MIB for size in peak], 0)]
                print(f"| {variant} | {side} | {' | '.join(columns)} | {spread(second, 2)} | {share} % |", flush=True)
            times, cpu, peak = (spread(values, 2) for values in ratios.values())
            print(f"| {variant} | TRL / here | {times} | | | {cpu} | {peak} | | |", flush=True)
            report[variant] = {"runs": runs, "TRL/here": ratios, "padding": runs["here"][0]["padding"]}
    plain, packed = (figures["padding"] for figures in report.values())
    print(f"\nPadding in micro-batches of 8: {plain['measured']:.1%} (predicted by the data report: {plain['report']:.1%});")
    print(f"of packed rows {packed['measured']:.1%} if padded, none as trained; they are {packed['fill']:.1%} full.")
    versions = {name: version(name) for name in ("datasets", "pyarrow", "tokenizers", "transformers", "trl")}
    facts = {"rows": args.rows, "max_length": MAX_LENGTH, "threads": args.threads, "cores": os.cpu_count()}
    facts |= {"versions": versions, "differ": differ, "variants": report}
    if args.json:
        args.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
