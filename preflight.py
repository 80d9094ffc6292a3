"""Know before a launch whether it will work and fit: only the model's config.json and tokenizer are read.

    python preflight.py [preflight flags] [accelerate launch flags] train.py <train.py flags>
    python preflight.py --gpu h100-80gb --config_file configs/fsdp_config.yaml train.py --model_name_or_path ID ...
    LAUNCH="python preflight.py --gpu 4090" bash run_peft_qlora_fsdp.sh

It is the command of the launch with `python preflight.py` for `accelerate launch`; `--` can stand for train.py. The exit
status is 0 if there is no error and it fits, 1 otherwise.
"""

import argparse
import os
import sys
import time

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when huggingface_hub is imported, so before anything else

import dataclasses
import json

import psutil
import torch

import advice
import cards
import chat
import findings
import launch as launches
import memory
import memory_report
import utils
from errors import OTHER_RANKS_WAIT_SECONDS, one_line_errors


def read_flags(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Preflight's own flags, which stand anywhere before the script, and everything else in its order.

    Raises:
        ValueError: a flag of preflight without its value, or with a wrong one.
    """
    parser = argparse.ArgumentParser(
        prog="preflight.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [preflight flags] [accelerate launch flags] (train.py | --) <train.py flags>",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="card the launch is for, such as h100-80gb, 4090 or 48GiB; else those here"
    )
    parser.add_argument("--exact", action="store_true", help="also simulate a step, some seconds more, and show both")
    parser.add_argument("--find_max_batch", action="store_true", help="also find the largest micro-batch that fits")
    parser.add_argument("--rows", type=int, metavar="N", help="training rows, to check the schedule without the data")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON; - is the terminal, instead of the tables")
    parser.add_argument("--plot", metavar="FILE", help="draw the memory by phase and term as a .png; needs matplotlib")

    def refuse(message: str):
        raise ValueError(f"preflight.py: {message}")

    parser.error = refuse
    at = next((index for index, word in enumerate(argv) if word == "--" or word.endswith(".py")), len(argv))
    flags, rest = parser.parse_known_args(argv[:at])
    if flags.rows is not None and flags.rows < 1:
        raise ValueError(f"--rows {flags.rows} must be at least 1")
    if flags.plot and not flags.plot.endswith(".png"):
        raise ValueError(f"--plot {flags.plot}: the picture is a PNG: name a .png file")
    return flags, rest + argv[at:]


def device(gpu: str | None, use_cpu: bool) -> cards.Card | None:
    """The card the launch is for: the one named, else the smallest of this machine; None on a CPU.

    Raises:
        ValueError: there is none, or a card is named for a launch on a CPU.
    """
    if use_cpu and gpu:
        raise ValueError(f"--gpu {gpu} and --use_cpu True contradict each other: drop one")
    if use_cpu:
        return None
    if gpu:
        return cards.find(gpu)
    here = cards.present()
    if not here:
        raise ValueError("there is no accelerator here: say which card the launch is for, such as --gpu h100-80gb")
    return min(here, key=lambda card: card.memory)


def added_tokens(model_args, training_args, config) -> tuple[int, int]:
    """How many embedding rows will be trained because no checkpoint fills them, and the size of the tokenizer."""
    tokenizer, new_ids = chat.prepare_tokenizer(
        model_args.model_name_or_path,
        model_args.chat_template_format,
        model_args.model_revision,
        training_args.trust_remote_code,
        model_args.new_special_tokens,
    )
    return len(chat.unfilled_rows(tokenizer, new_ids, config)), len(tokenizer)


def check(launch: launches.Launch, built: tuple, flags: argparse.Namespace) -> memory_report.Report:
    """Everything that is known about a launch: findings, memory, advice.

    Args:
        launch: what is started.
        built: what `launch.build` makes of it.
        flags: those of `read_flags`.

    Raises:
        ValueError: it cannot be told at all, since the model or the card is not known.
    """
    command, model_args, data_args, training_args, fsdp = built
    here, card = flags.gpu is None, device(flags.gpu, training_args.use_cpu)
    config = utils.load_config(model_args.model_name_or_path, model_args.model_revision, training_args.trust_remote_code)
    if not hasattr(config.get_text_config(), "vocab_size"):
        raise ValueError(
            f"--model_name_or_path {model_args.model_name_or_path}: a {config.model_type} model has no vocabulary"
        )
    found, new_tokens, tokenizer_size = [], 0, None
    try:
        new_tokens, tokenizer_size = added_tokens(model_args, training_args, config)
    except ValueError as error:
        found.append(findings.Finding("error", str(error)))
    found += findings.collect(
        launch, command, model_args, data_args, training_args, fsdp, config, tokenizer_size, here=here, rows=flags.rows
    )
    kept = findings.checkpoints_kept(training_args, findings.total_steps(training_args, flags.rows))
    result = memory_report.Report(card=card, findings=found)
    try:
        setup = memory.from_launch(
            model_args,
            training_args,
            fsdp,
            config,
            launch.processes,
            launch.processes_per_machine,
            tokenizer_size or 0,
            new_tokens,
            kept,
        )
        result.estimate = memory.estimate(setup)
        result.estimate.notes += not_modelled(training_args, result.estimate)
        found += lacking_positions(setup)
    except Exception as error:  # of PEFT, Transformers or the model, whose words say what does not fit together
        if result.works:
            words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            what = f"the model cannot be made and run with these arguments: {words}"
            found.append(findings.Finding("error", what, "so what it takes is not known"))
        return result
    if flags.exact:
        import simulation  # takes seconds to import

        peak = {"simulated step": {"all of it": simulation.simulate(setup)}}
        result.exact = dataclasses.replace(result.estimate, phases=peak)
    if here:
        result.ram = psutil.virtual_memory().total
        found += lacking_ram(result)
        found += findings.check_disk(training_args, kept, result.estimate.disk["one checkpoint"])
    elif card is not None and card.capability:
        found += findings.check_card(card.capability, card.name, model_args, training_args)
    if card is not None:
        found += lacking_memory(result)
        result.steps = advice.advise(setup, card.memory, capability=card.capability)
        if flags.find_max_batch:
            result.max_batch = advice.find_max_batch(setup, card.memory)
    return result


def not_modelled(training_args, result: memory.Estimate) -> list[str]:
    """What makes the estimate a rough one."""
    setup, notes = result.setup, []
    if training_args.torch_compile:
        notes.append("--torch_compile True is not in the estimate: what it fuses is not allocated, so it takes less")
    if training_args.use_liger_kernel:
        notes.append("--use_liger_kernel True is not in the estimate: its kernels allocate less")
    if setup.quantization == "int8":
        notes.append("8-bit products are estimated roughly, as 4-bit ones")
    experts = {parameter.dim() for parameter in setup.skeleton.model.parameters()} & {3}
    counted = result.parameters - (result.trained if setup.lora_r is not None else 0)
    if counted > 1.001 * sum(parameter.numel() for parameter in setup.skeleton.model.parameters()):
        notes.append("layers of this model share weights, which are counted once for each: it takes less")
    if setup.quantization is not None and experts:
        notes.append("bitsandbytes quantises linear layers: the experts of this model stay in 16 bit")
    return notes


def lacking_positions(setup: memory.Setup) -> list[findings.Finding]:
    """A finding if rows may be longer than a table of learned positions, as GPT-2 and OPT have it."""
    model, positions = setup.skeleton.model, getattr(setup.config.get_text_config(), "max_position_embeddings", None)
    tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m is not model.get_input_embeddings()]
    if not positions or setup.length <= positions or not any(0 <= t.num_embeddings - positions <= 2 for t in tables):
        return []
    what = f"--max_length {setup.length} is more than the {positions} learned positions of the model"
    return [findings.Finding("warning", what, "a longer row stops the run", f"--max_length {positions}")]


def lacking_memory(result: memory_report.Report) -> list[findings.Finding]:
    """A finding if the memory of the device is not enough, or only just."""
    if result.verdict == "fits":
        return []
    least, most = (size / cards.GIB for size in result.best.in_use())
    what = f"{result.verdict} on {result.card.name}, which has {result.card.memory / cards.GIB:.1f} GiB"
    grade = "warning" if result.verdict == "tight" else "error"
    return [findings.Finding(grade, what, f"{least:.1f} to {most:.1f} GiB will be in use", "see the changes below")]


def lacking_ram(result: memory_report.Report) -> list[findings.Finding]:
    """A finding if this machine has less RAM than the launch takes."""
    needed = sum(result.estimate.ram.values())
    if needed <= result.ram:
        return []
    what = f"the launch takes {needed / cards.GIB:.1f} GiB of RAM and this machine has {result.ram / cards.GIB:.1f} GiB"
    parts = ", ".join(f"{term} {size / cards.GIB:.1f}" for term, size in result.estimate.ram.items())
    return [findings.Finding("error", what, f"in GiB: {parts}", "fewer processes here, or a machine with more RAM")]


def report(launch: launches.Launch, built: tuple, flags: argparse.Namespace) -> int:
    """Check a launch, as in `check`; print and write what is found. Returns the exit status."""
    result = check(launch, built, flags)
    if flags.json == "-":
        print(json.dumps(memory_report.to_json(result), indent=2))
    else:
        memory_report.show(result)
    if flags.json not in (None, "-"):
        memory_report.write_json(flags.json, result)
    if flags.plot:
        if result.estimate is None:
            raise ValueError(f"--plot {flags.plot}: there is nothing to draw until the errors are gone")
        memory_report.draw(flags.plot, result.estimate, result.card, result.exact)
    return 0 if result.works else 1


def of_this_launch() -> int:
    """`train.py --dry_run`: check the launch this process is a rank of. Every rank knows the status, the first prints."""
    launch, flags = launches.Launch.from_environment(), read_flags([])[0]
    built = launches.build(launch)
    if os.environ.get("RANK", "0") != "0":
        status = 0 if check(launch, built, flags).works else 1
        # The launcher stops all ranks as soon as one fails, also the one that prints.
        time.sleep(OTHER_RANKS_WAIT_SECONDS * status)
        return status
    return report(launch, built, flags)


def run(argv: list[str]) -> int:
    """Check the launch of a command line and print what is found. Returns the exit status.

    Raises:
        ValueError: the command line is wrong, in one line.
    """
    flags, rest = read_flags(argv)
    launch = launches.read(rest)
    return report(launch, launches.build(launch), flags)


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(run(sys.argv[1:]))
