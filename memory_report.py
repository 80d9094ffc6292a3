"""The preflight report: findings, memory by phase and term, verdict and advice, as tables, as JSON and as a picture."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from cards import GIB, Card
from health import human

WIDTH = 120  # columns of the terminal's tables
# Okabe and Ito's colours, which colour-blind people can tell apart; terms beyond them repeat with a hatch.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")


@dataclass
class Report:
    """All there is to report on a launch."""

    estimate: Any = None  # memory.Estimate, by the formula; None if errors leave nothing to estimate
    exact: Any = None  # memory.Estimate of a simulated step
    card: Card | None = None  # the device it is held against
    ram: int | None = None  # bytes of RAM of this machine, if the launch is for it
    findings: list = field(default_factory=list)  # findings.Finding
    steps: list = field(default_factory=list)  # advice.Step
    max_batch: int | None = None  # rows, if it was asked for

    @property
    def best(self):
        """The simulated estimate if there is one."""
        return self.exact or self.estimate

    @property
    def verdict(self) -> str | None:
        """ "fits", "tight" or "does not fit"; None without a card."""
        return self.best.verdict(self.card.memory) if self.card and self.best else None

    @property
    def works(self) -> bool:
        """Whether nothing speaks against the launch but warnings."""
        return self.verdict != "does not fit" and all(finding.grade != "error" for finding in self.findings)


def to_json(report: Report) -> dict:
    """The report, ready for JSON. Every amount of memory is in bytes.

    Keys: `setup` (what decides the memory), `phases` (phase -> term -> bytes of one rank's device), `peak_phase`, `peak`
    (allocated), `in_use` ([least, most] that nvidia-smi will show), `exact` (None, or `phases`, `peak`, `peak_phase` and
    `difference`, the formula's peak over it, minus 1), `ram` and `disk` (term -> bytes, of one machine), `ram_here` (of this
    machine, or None), `parameters`, `trained` (numbers), `notes`, `card` (None or its facts), `verdict`, `max_batch` (rows,
    or None), `findings` (`grade`, `what`, `why`, `change`), `advice` (`change`, `saved`, `slow_down`, `why`, `verdict`,
    `instead`) and `works` (whether preflight exits with 0). Without an estimate, its keys are missing.
    """
    estimate, exact = report.estimate, report.exact
    found = {
        "ram_here": report.ram,
        "card": report.card and dataclasses.asdict(report.card),
        "verdict": report.verdict,
        "max_batch": report.max_batch,
        "findings": [vars(finding) for finding in report.findings],
        "advice": [{key: value for key, value in vars(step).items() if key != "setup"} for step in report.steps],
        "works": report.works,
    }
    if estimate is None:
        return found
    plain = (int, float, str, type(None))
    setup = {key: str(value) if isinstance(value, torch.dtype) else value for key, value in vars(estimate.setup).items()}
    setup = {"model_type": estimate.setup.config.model_type} | {k: v for k, v in setup.items() if isinstance(v, plain)}
    return found | {
        "setup": setup,
        "phases": estimate.phases,
        "peak_phase": estimate.peak_phase,
        "peak": estimate.peak,
        "in_use": list(report.best.in_use()),
        "exact": exact
        and {
            "phases": exact.phases,
            "peak_phase": exact.peak_phase,
            "peak": exact.peak,
            "difference": estimate.peak / exact.peak - 1,
        },
        "ram": estimate.ram,
        "disk": estimate.disk,
        "parameters": estimate.parameters,
        "trained": estimate.trained,
        "notes": estimate.notes,
    }


def write_json(path, report: Report) -> None:
    """`to_json` as a file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(to_json(report), file, indent=2)
        file.write("\n")


# ---------------------------------------------------------------------------------------------------------------- terminal


def show(report: Report, console: Console | None = None) -> None:
    """Print the report."""
    console = console or Console(width=WIDTH, markup=False, highlight=False)
    known = [_phases(report), _machine(report), _advice(report)] if report.estimate else []
    for table in [_findings(report), *known]:
        if table.row_count:
            console.print(table)
            console.print()
    for line in _verdict(report):
        console.print(line)


def _table(title: str, *columns: str, right: bool = False) -> Table:
    """A table whose columns after the first hold figures if `right`."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=bool(columns))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if right and number else "left", vertical="top")
    return table


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _unit(report: Report) -> tuple[str, int]:
    """What the memory of a rank is counted in: GiB, or for tiny models MiB."""
    return ("GiB", GIB) if report.estimate.peak >= GIB else ("MiB", 2**20)


def _findings(report: Report) -> Table:
    table = _table("Findings")
    for grade in ("error", "warning", "advice"):
        for finding in report.findings:
            if finding.grade == grade:
                parts = (finding.what, finding.why and f"why: {finding.why}", finding.change and f"change: {finding.change}")
                table.add_row(grade, "\n".join(part for part in parts if part))
    return table


def _terms(estimates) -> list[str]:
    return list(dict.fromkeys(term for estimate in estimates for terms in estimate.phases.values() for term in terms))


def _phases(report: Report) -> Table:
    estimate, exact = report.estimate, report.exact
    setup = estimate.setup
    columns = {name + (" (peak)" if name == estimate.peak_phase else ""): terms for name, terms in estimate.phases.items()}
    if exact:
        columns[exact.peak_phase] = exact.phases[exact.peak_phase]
    unit, size_of = _unit(report)
    title = f"{unit} of one rank ({setup.strategy}, {setup.ranks} ranks, {setup.micro_batch} x {setup.length} tokens)"
    table = _table(title, "", *columns, right=True)
    for term in _terms([estimate, exact] if exact else [estimate]):
        table.add_row(term, *(f"{terms[term] / size_of:.2f}" if term in terms else "" for terms in columns.values()))
    table.add_row("allocated", *(f"{sum(terms.values()) / size_of:.2f}" for terms in columns.values()), style="bold")
    return table


def _machine(report: Report) -> Table:
    """RAM and disk, by term."""
    table = _table("GiB of one machine")
    for kind, amounts in (("RAM", report.estimate.ram), ("disk", report.estimate.disk)):
        if amounts:
            parts = ", ".join(f"{term} {_gib(size)}" for term, size in amounts.items())
            has = f" (this machine has {_gib(report.ram)})" if kind == "RAM" and report.ram else ""
            table.add_row(kind, f"{_gib(sum(amounts.values()))}{has}", parts)
    return table


def _advice(report: Report) -> Table:
    faster = report.verdict == "fits"
    title = "To go faster, still fitting, one after the other" if faster else "To make it fit, one after the other"
    table = _table(title, "change", "GiB", "time of a step", "why", "then it")
    for step in report.steps:
        change = f"or instead of all these: {step.change}" if step.instead and len(report.steps) > 1 else step.change
        signed = f"{-step.saved / GIB:+.2f}"
        table.add_row(change, signed, step.slow_down, step.why, step.verdict)
    return table


def _verdict(report: Report) -> list[str]:
    best, estimate = report.best, report.estimate
    errors = sum(finding.grade == "error" for finding in report.findings)
    if estimate is None:
        return [f"NOT OK: {errors} error{'s' if errors > 1 else ''}; what it takes cannot be told before they are corrected"]
    low, high = best.in_use()
    unit, size_of = _unit(report)
    lines = [
        f"Trained: {human(estimate.trained)} of {human(estimate.parameters)} parameters",
        f"Peak: {best.peak / size_of:.2f} {unit} allocated on a rank in {best.peak_phase}"
        + (
            f"; nvidia-smi will show {_gib(low)} to {_gib(high)} GiB, with the CUDA context, NCCL and fragmentation"
            if estimate.setup.device != "cpu"
            else ""
        ),
    ]
    if report.exact:
        difference = estimate.peak / report.exact.peak - 1
        lines.append(
            f"Formula: {estimate.peak / size_of:.2f} {unit}, {difference:+.1%} from the simulated "
            f"{report.exact.peak / size_of:.2f} {unit}"
        )
    if report.max_batch is not None:
        rows = f"--per_device_train_batch_size {report.max_batch}" if report.max_batch else "not even one row fits"
        lines.append(f"Largest micro-batch that fits: {rows}")
    lines += [f"Note: {note}" for note in estimate.notes]
    words = [f"{report.verdict} on {report.card.name} ({_gib(report.card.memory)} GiB)"] if report.card else []
    words += [f"{errors} error{'s' if errors > 1 else ''}"] if errors else []
    lines.append(f"{'OK' if report.works else 'NOT OK'}: {', '.join(words) or 'no errors; not held against a card'}")
    return lines


# ----------------------------------------------------------------------------------------------------------------- picture


def draw(path, estimate, card: Card | None = None, exact=None):
    """Write a PNG: the memory of one rank by phase, stacked by term, and the card's. Returns matplotlib's figure.

    Args:
        path: where it is written.
        estimate: a `memory.Estimate`; each phase is a bar.
        card: its memory is drawn as a line.
        exact: a simulated `memory.Estimate`; its peak is one more bar.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bars = dict(estimate.phases)
    if exact:
        bars[exact.peak_phase] = exact.phases[exact.peak_phase]
    bottoms = [0.0] * len(bars)
    for number, term in enumerate(_terms([estimate, exact] if exact else [estimate])):
        heights = [terms.get(term, 0) / GIB for terms in bars.values()]
        colour, hatch = COLOURS[number % len(COLOURS)], "" if number < len(COLOURS) else "..."
        axes.bar(
            range(len(bars)), heights, bottom=bottoms, width=0.7, label=term, color=colour, hatch=hatch, edgecolor="white"
        )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for position, total in enumerate(bottoms):
        axes.text(position, total, f"{total:.1f}", ha="center", va="bottom")
    low, high = (size / GIB for size in (exact or estimate).in_use())
    axes.axhspan(
        low, high, facecolor="none", edgecolor="#888888", hatch="//", linewidth=0, alpha=0.5, label="in use, at the peak"
    )
    if card:
        memory = card.memory / GIB
        axes.axhline(memory, color="black", linewidth=2, linestyle="--", label=f"{card.name}: {memory:.1f} GiB")
    setup = estimate.setup
    axes.set_xticks(range(len(bars)), [name.replace(" ", "\n") for name in bars])
    axes.set(
        ylabel="GiB on one rank's device",
        title=f"Memory of one rank: {setup.strategy}, {setup.ranks} ranks, {setup.micro_batch} x {setup.length} tokens",
        ylim=(0, 1.08 * max([*bottoms, high, card.memory / GIB if card else 0])),
    )
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)
    figure.savefig(path)
    return figure
