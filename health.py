"""The health check: what is really in force, read from the prepared model, printed once before the first step.

It runs when the Trainer has wrapped the model and before a batch is seen, and it stops the run if FSDP was asked for and
the parameters are not sharded.
"""

from collections import defaultdict

from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback

import sharding

SAMPLE_ROWS = 1000  # of the training data, that their facts are measured on


def human(number: float, unit: str = "") -> str:
    """1.35e8 -> "135M"; with a unit of "B", binary multiples: 2**30 -> "1.00 GiB"."""
    if unit == "B":
        for suffix in ("B", "KiB", "MiB", "GiB", "TiB"):
            if abs(number) < 1024 or suffix == "TiB":
                return f"{number:.0f} B" if suffix == "B" else f"{number:.2f} {suffix}"
            number /= 1024
    for suffix in ("", "K", "M", "B"):
        if abs(number) < 1000 or suffix == "B":
            return f"{number:.4g}{suffix}{unit}"
        number /= 1000


def count_parameters(model) -> dict[str, tuple[int, int, int]]:
    """(parameters, trained parameters, bytes) by stored type of an unwrapped model; 4-bit weights are counted unpacked."""
    counts = defaultdict(lambda: (0, 0, 0))
    for parameter in model.parameters():
        kind, numel = str(parameter.dtype).removeprefix("torch."), parameter.numel()
        if type(parameter).__name__ == "Params4bit":
            numel = (
                parameter.quant_state.shape.numel()
                if parameter.quant_state is not None
                else 2 * numel * parameter.element_size()
            )
            kind = f"{parameter.quant_type} in {kind}"
        elif type(parameter).__name__ == "Int8Params":
            kind = "int8"
        all_, trained, size = counts[kind]
        counts[kind] = (
            all_ + numel,
            trained + (numel if parameter.requires_grad else 0),
            size + parameter.numel() * parameter.element_size(),
        )
    return dict(counts)


class HealthCheck(TrainerCallback):
    """Collects facts of the unwrapped model when it is made, and prints the report at the start of training.

    Args:
        trainer: the built `SFTTrainer`, before `train()`.
        requested: "FSDP1", "FSDP2" or None, from the Accelerate config.
        shards: False if the sharding strategy replicates on purpose (NO_SHARD, HYBRID_*).
        new_token_ids: ids of tokens that were added and whose rows are trained.
        notes: lines to add, such as settings that were changed for this machine.
        deferred: what fills the shards (`loading.Deferred`), or None if `from_pretrained` loaded the model.
    """

    def __init__(self, trainer, requested: str | None, shards=True, new_token_ids=(), notes: list[str] = (), deferred=None):
        self.deferred = deferred
        self.trainer, self.requested, self.shards = trainer, requested, shards
        self.new_token_ids, self.notes = list(new_token_ids), notes  # more may be added until training starts
        self.counts = count_parameters(trainer.model)
        trained = sum(c[1] for c in self.counts.values())
        if trained == 0:
            raise ValueError("no parameter is trained: check --use_peft_lora and --lora_target_modules")

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        held = sharding.inspect(self.trainer.model_wrapped)
        allowed = ("trainable_tokens_delta",) if self.requested == "FSDP1" else ()
        sharding.check_in_force(held, self.requested or held.strategy, self.shards, allowed)
        fractions = sharding.from_all(held.fraction)
        if args.process_index == 0:
            rows = self.report(held, fractions)
            table = Table(title="Health check", title_justify="left", show_header=False, box=None, pad_edge=False)
            for label, value in rows:
                table.add_row(label, value)
            Console(width=120, soft_wrap=False).print(table, markup=False, highlight=False)

    def report(self, held: sharding.Held, fractions: list[float]) -> list[tuple[str, str]]:
        """(label, value) lines; every value is measured on the model, the tokenizer, the data or the resolved arguments."""
        trainer, args = self.trainer, self.trainer.args
        sample = list(trainer.train_dataset.take(SAMPLE_ROWS))
        total = sum(c[0] for c in self.counts.values())
        trained = sum(c[1] for c in self.counts.values())
        rows = [("trained parameters", f"{human(trained)} of {human(total)} ({trained / total:.2%})")]
        for kind, (numel, trainable, size) in sorted(self.counts.items(), key=lambda item: -item[1][0]):
            part = ", trained" if trainable == numel else f", {human(trainable)} trained" if trainable else ""
            rows.append((f"  {kind}", f"{human(numel)} parameters, {human(size, 'B')}{part}"))
        world = len(fractions)
        rows.append(
            ("strategy in force", f"{held.strategy}, {world} process{'es' if world > 1 else ''} on {args.device.type}")
        )
        shares = sorted({f"{fraction:.1%}" for fraction in fractions})
        each = " to ".join([shares[0], shares[-1]] if len(shares) > 1 else shares)
        rows.append(("held by each rank", f"{each} of the parameters ({human(held.local_bytes, 'B')} on rank 0)"))
        if held.units:
            rows.append(("wrapped units", f"{held.units}"))
        rows.append(("weights", self.loading_facts()))
        rows.append(("mixed precision", args.mixed_precision or "no"))
        checkpointing = "off"
        if args.gradient_checkpointing:
            reentrant = args.gradient_checkpointing_kwargs["use_reentrant"]
            checkpointing = "reentrant" if reentrant else "non-reentrant"
        rows.append(("gradient checkpointing", checkpointing))
        base = trainer.base_model
        rows.append(("attention", str(base.config._attn_implementation)))
        rows += self.token_facts(sample)
        sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps * world
        accumulation = f"{args.per_device_train_batch_size} x {args.gradient_accumulation_steps} accumulated x {world}"
        mean = sum(len(row["input_ids"]) for row in sample) / len(sample)
        kind = "packed rows" if args.packing else "sequences"
        rows.append(("effective batch", f"{sequences} {kind} ({accumulation}), about {human(sequences * mean)} tokens"))
        saves = args.save_strategy.value if hasattr(args.save_strategy, "value") else str(args.save_strategy)
        every = {
            "no": "none on the way",
            "epoch": "checkpoint-N each epoch",
            "steps": f"checkpoint-N each {args.save_steps:g} steps",
        }
        if trainer.resumed is not None:
            then = len(trainer.resumed["ranks"])
            was = "" if then == world else f", which {then} processes wrote"
            rows.append(("resumed from", f"{args.resume_from_checkpoint}{was}; step {trainer.state.global_step} is done"))
        hub = f"pushed to the Hub: {args.hub_strategy.value}" if args.push_to_hub else "not pushed to the Hub"
        rows.append(("output", f"{args.output_dir} ({every.get(saves, saves)}; {hub})"))
        return rows + [("note", note) for note in self.notes]

    def loading_facts(self) -> str:
        if self.deferred is None:
            return "from_pretrained: every process read and loaded all of them"
        report = self.deferred.report
        read, stored, peak = (human(report[key], "B") for key in ("read", "stored", "peak"))
        return f"each rank its shard: read {read} of {stored}, at most {peak} in use, {report['seconds']:.1f} s"

    def token_facts(self, sample: list[dict]) -> list[tuple[str, str]]:
        tokenizer = self.trainer.processing_class
        eos, pad = (f"{t!r} ({tokenizer.convert_tokens_to_ids(t)})" for t in (tokenizer.eos_token, tokenizer.pad_token))
        tokens = sum(len(row["input_ids"]) for row in sample)
        supervised = sum(label != -100 for row in sample for label in row["labels"])
        taught = sum(label == tokenizer.eos_token_id for row in sample for label in row["labels"])
        rows = [
            ("EOS, PAD", f"{eos}, {pad}"),
            ("chat template", "none" if tokenizer.chat_template is None else f"{len(tokenizer.chat_template)} characters"),
            (
                "supervised tokens",
                f"{supervised / max(tokens, 1):.1%} (of the first {len(sample)} rows), {taught} of them EOS",
            ),
        ]
        if self.new_token_ids:
            added = ", ".join(tokenizer.convert_ids_to_tokens(self.new_token_ids))
            rows.append(("added tokens", f"{added}: their rows are trained and saved in the adapter"))
        return rows
