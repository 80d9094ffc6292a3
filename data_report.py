"""The data report: what the rows became, before anything is trained on them, and the gates that stop a run on bad data.

Everything here is a function of arrays with one entry for each row; reading and tokenising happen elsewhere. The same
report goes to the terminal (`show`), and to `data_report.txt` and `data_report.html` (`write`).
"""

import os
import re
import textwrap
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

# What is true of a row, as bits.
TRUNCATED = 1  # longer than max_length and cut
TOO_LONG = 2  # longer than max_length and dropped (truncation "drop")
UNSUPERVISED = 4  # no token supervised after truncation: dropped, since it teaches nothing
DOUBLE_BOS = 8  # two BOS in a row
DOUBLE_EOS = 16  # two EOS in a row
NO_EOS = 32  # no EOS is supervised in it
EMPTY_TURN = 64  # a chat with an empty message, or without messages
NOT_ALTERNATING = 128  # a chat where two turns of one role follow each other (system and tool turns apart)
SYSTEM_FOLDED = 256  # its system prompt went into the first user turn, since the template has no system role
ESCAPED = 512  # text that looks like a control token, kept as text
BAD = 1024  # could not be used and was skipped

WIDTH = 110  # columns of the text
LABEL, CELL, BIN = 34, 19, 24  # columns of a label and of a figure in its tables, and of a bin of its histogram
TERMINAL_SAMPLE, FILE_SAMPLE = 1_500, 6_000  # characters of a sample that are shown
SKIPPED_SHOWN = 10  # lines of a source
MANY_TRUNCATED, MANY_DUPLICATES = 0.05, 0.10  # shares above which there is a warning
MARKS = (("«", "»"), ("⟦", "⟧"), ("{{{", "}}}"), ("<<<<<", ">>>>>"))  # the first pair that is in no sample is used

PERCENTILES = {"median": 50, "p95": 95, "p99": 99, "longest": 100}
FIGURES = (  # key in the summary, label, and the key it is printed as a share of
    ("rows", "rows", None),
    ("kept", "  kept", "rows"),
    ("used", "  taken into the mixture", "kept"),
    ("too_long", "  dropped: longer than max_length", "rows"),
    ("unsupervised", "  dropped: nothing supervised", "rows"),
    ("unsupervised_truncated", "    of these, cut by max_length", "rows"),
    ("bad", "  bad, skipped", "rows"),
    ("truncated", "cut to max_length", "rows"),
    ("tokens", "tokens of kept rows", None),
    ("supervised_tokens", "  supervised", "tokens"),
    ("tokens_cut", "  cut off by max_length", None),
    ("median", "tokens of a row, uncut: median", None),
    ("mean", "  mean", None),
    ("p95", "  95th percentile", None),
    ("p99", "  99th percentile", None),
    ("longest", "  longest", None),
    ("no_eos", "kept rows with no EOS supervised", "kept"),
    ("double_bos", "rows with two BOS in a row", "rows"),
    ("double_eos", "rows with two EOS in a row", "rows"),
    ("empty_turns", "chats with an empty turn", "rows"),
    ("not_alternating", "chats with a role twice in a row", "rows"),
    ("system_folded", "system prompt put in a user turn", "rows"),
    ("escaped", "control tokens kept as text", "rows"),
)


@dataclass
class SourceRows:
    """One source of one split. The arrays have shape (rows,), in the order of the rows."""

    source: str  # where it is read from, such as "data/train.jsonl"
    split: str  # "train" or "eval", its role in training
    format: str  # how its rows are read, in words
    weight: float | None  # its share of a mixture, 0 to 1; None outside one
    lengths: np.ndarray  # int, tokens before truncation; 0 for a bad row
    kept: np.ndarray  # int, tokens after truncation; 0 for a dropped or bad row
    supervised: np.ndarray  # int, supervised tokens after truncation
    flags: np.ndarray  # int32, the bits above
    digests: np.ndarray  # uint64, a hash of the tokens before truncation; equal means the same tokens
    skipped: list[str]  # one line for each row left out as bad, and for lines of a file that never became rows
    used: int | None  # rows taken into the mixture; None means every kept one


@dataclass
class Sample:
    """A row as text; `pieces` are (text, whether it is supervised), in order."""

    split: str
    source: str
    row: int
    pieces: list[tuple[str, bool]]


@dataclass
class Report:
    """All there is to report."""

    rows: list[SourceRows]
    samples: list[Sample]  # rows of the training split to show
    max_length: int | None  # tokens; None cuts nothing
    truncation: str  # "right", "left", "drop" or "error"
    loss_on: str  # "assistant", "completion" or "all"
    batch_size: int  # rows of a micro-batch
    packing: dict | None  # {"on", "rows" (packed), "of" (rows packed), "tokens" (in them), "capacity" (of one, tokens)}
    tokenizer: dict  # label -> a line, or a list of lines, to print as they are
    streamed: int | None  # N if the data are streamed and the figures are of the first N rows
    cached: bool  # the tokens came from the cache


# ---------------------------------------------------------------------------------------------------------------- figures


def summary(report: Report) -> dict:
    """Every figure of the report, ready for JSON. Shares are 0 to 1; a figure of no rows is None.

    Percentiles are lengths of rows: the smallest that at least that share of the rows does not exceed, bad rows apart.
    Flags are counted over all rows; `no_eos`, duplicates and overlap over the kept ones, of which `tokens` is the sum.
    """
    splits = _splits(report)
    edges = _edges(np.concatenate([_lengths(rows) for rows in splits.values()]))
    figures = {}
    for split, rows in splits.items():
        sources = [{"source": r.source, "weight": r.weight, "skipped": len(r.skipped), **_count([r])} for r in rows]
        histogram = {"edges": edges, "counts": _histogram(_lengths(rows), edges)}
        figures[split] = _count(rows) | {"histogram": histogram, "sources": sources}
    # Sorted and searched, which for a million rows takes a tenth of the time of np.unique and np.isin.
    train, held_out = (np.sort(_joined(splits.get(split, []), "digests", kept=True)) for split in ("train", "eval"))
    repeated = _number(train[1:] == train[:-1])
    shared = _number(np.searchsorted(train, held_out, "left") < np.searchsorted(train, held_out, "right"))
    packing = report.packing
    if packing:
        packing = packing | {"fill": _ratio(packing["tokens"], packing["rows"] * (packing["capacity"] or 0))}
    return {
        "max_length": report.max_length,
        "batch_size": report.batch_size,
        "streamed": report.streamed,
        "cached": report.cached,
        "splits": figures,
        "duplicates": {"train": repeated, "share": _ratio(repeated, len(train))},
        "overlap": {"eval_rows_in_train": shared, "share": _ratio(shared, len(held_out))},
        "padding": _padding(splits["train"], report.batch_size),
        "packing": packing,
    }


def _splits(report: Report) -> dict[str, list[SourceRows]]:
    """Sources by split, "train" first and always there."""
    splits = {"train": []}
    for row in report.rows:
        splits.setdefault(row.split, []).append(row)
    return splits


def _joined(rows: list[SourceRows], name: str, kept: bool = False) -> np.ndarray:
    arrays = [getattr(row, name)[row.kept > 0] if kept else getattr(row, name) for row in rows]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.uint64 if name == "digests" else np.int64)


def _lengths(rows: list[SourceRows]) -> np.ndarray:
    """Tokens before truncation of the rows that are not bad."""
    return _joined(rows, "lengths")[(_joined(rows, "flags") & BAD) == 0]


def _used(row: SourceRows) -> int:
    return _number(row.kept) if row.used is None else int(row.used)


def _number(mask: np.ndarray) -> int:
    return int(np.count_nonzero(mask))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _count(rows: list[SourceRows]) -> dict:
    flags, kept, lengths = (_joined(rows, name) for name in ("flags", "kept", "lengths"))
    stays = kept > 0
    # A row is dropped once, bad before too long before unsupervised, so that these and the kept rows add up to all.
    truncated, unsupervised = ((flags & (BAD | TOO_LONG | bit)) == bit for bit in (TRUNCATED, UNSUPERVISED))
    tokens, supervised = int(kept.sum()), int(_joined(rows, "supervised")[stays].sum())
    ordered = np.sort(_lengths(rows))
    n = len(ordered)
    return {
        "rows": len(flags),
        "kept": _number(stays),
        "used": sum(_used(row) for row in rows),
        "too_long": _number((flags & (BAD | TOO_LONG)) == TOO_LONG),
        "unsupervised": _number(unsupervised),
        "unsupervised_truncated": _number(unsupervised & truncated),
        "bad": _number(flags & BAD),
        "truncated": _number(truncated),
        "tokens": tokens,
        "supervised_tokens": supervised,
        "supervised_share": _ratio(supervised, tokens),
        "tokens_cut": int((lengths[stays] - kept[stays]).sum()),
        "mean": float(ordered.mean()) if n else None,
        **{name: int(ordered[-(-percent * n // 100) - 1]) if n else None for name, percent in PERCENTILES.items()},
        "no_eos": _number(flags[stays] & NO_EOS),
        "double_bos": _number(flags & DOUBLE_BOS),
        "double_eos": _number(flags & DOUBLE_EOS),
        "empty_turns": _number(flags & EMPTY_TURN),
        "not_alternating": _number(flags & NOT_ALTERNATING),
        "system_folded": _number(flags & SYSTEM_FOLDED),
        "escaped": _number(flags & ESCAPED),
    }


def _edges(lengths: np.ndarray, bins: int = 16) -> list[int]:
    """Powers of two around the lengths, each octave split evenly while that gives at most `bins`; none for no rows.

    A bin is (edge, next edge], so a row of exactly 1,024 tokens is on the side of those that max_length 1,024 leaves whole.
    """
    if not len(lengths):
        return []
    low, high = (max(int(length) - 1, 0).bit_length() for length in (lengths.min(), lengths.max()))
    low -= 1
    if high - low > bins:  # the shortest rows share the first bin
        return [0] + [2**power for power in range(high - bins + 1, high + 1)]
    parts = max(parts for parts in (8, 4, 2, 1) if parts * (high - low) <= bins)
    edges = {int(2.0**power * (1 + part / parts)) for power in range(low, high) for part in range(parts)}
    edges = np.array(sorted(edges | {2**high}))
    first, last = np.searchsorted(edges, [lengths.min(), lengths.max()])  # no empty bins at the ends
    return edges[max(first - 1, 0) : max(last, first, 1) + 1].tolist()


def _histogram(lengths: np.ndarray, edges: list[int]) -> list[int]:
    if not edges:
        return []
    index = np.maximum(np.searchsorted(edges, lengths, side="left") - 1, 0)
    return np.bincount(index, minlength=len(edges) - 1).tolist()


def _padding(rows: list[SourceRows], batch_size: int) -> dict:
    """What micro-batches of the training rows, padded to their longest, would hold: in random order, without packing."""
    rng = np.random.default_rng(0)
    kept = [(rng.permutation(row.kept[row.kept > 0]), _used(row)) for row in rows]
    # Of a source of a mixture, as many rows as are used: some of them more than once if there are too few.
    lengths = [np.resize(array, used) for array, used in kept if len(array)]
    lengths = rng.permutation(np.concatenate(lengths)) if lengths else np.zeros(0, dtype=np.int64)
    batches = -(-len(lengths) // batch_size)
    missing = batches * batch_size - len(lengths)
    longest = np.pad(lengths, (0, missing)).reshape(batches, batch_size).max(axis=1).astype(np.int64)
    tokens = int(lengths.sum())
    padded = int(longest.sum()) * batch_size - missing * int(longest[-1:].sum())  # the last micro-batch may be smaller
    share = _ratio(padded - tokens, padded)
    return {"tokens": tokens, "padded_tokens": padded, "share": share, "speed_up": _ratio(padded, tokens)}


# ------------------------------------------------------------------------------------------------------ gates and warnings


def gates(report: Report, max_unsupervised: float) -> None:
    """Stop a run that would teach nothing, or much less than it seems to.

    Args:
        max_unsupervised: the share (0 to 1) of a split's rows, bad ones apart, that may have nothing supervised.

    Raises:
        ValueError: a split has no row left, too many rows with nothing supervised, or only rows that are too long; one
            line with the reason, the count and the fix.
    """
    limit = f"--max_length {report.max_length}"
    side = "right" if report.truncation == "left" else "left"
    lacks = {"assistant": "no assistant turn", "completion": "an empty completion"}.get(report.loss_on, "no token")
    for split, rows in _splits(report).items():
        count, where = _count(rows), f"the {split} split{_scope(report)}"
        usable, lost, cut = count["rows"] - count["bad"], count["unsupervised"], count["unsupervised_truncated"]
        first = next((f" (first: {textwrap.shorten(_line(line), 200)})" for row in rows for line in row.skipped), "")
        left_out = [
            (count["bad"], f"bad{first}", "mend or remove them"),
            (count["too_long"], f"longer than {limit} and dropped", "raise --max_length or use --truncation right"),
        ]
        unsupervised = [
            (cut, f"cut by {limit} before anything supervised", f"raise --max_length or use --truncation {side}"),
            (lost - cut, f"without anything supervised ({lacks})", f"check the rows and --loss_on {report.loss_on}"),
        ]
        if not count["rows"]:
            raise ValueError(f"{where} has no row: check --splits and its files{first}")
        if not count["kept"]:
            raise ValueError(f"{where} has no row left: {_reasons(left_out + unsupervised, count['rows'])}")
        for row in rows:
            if not _number(row.kept) and len(rows) > 1:
                raise ValueError(
                    f"no row of {row.source} is left in {where}, {len(row.kept):,} are bad, dropped or unsupervised: "
                    "correct it, or take it out of the mixture"
                )
        if lost / usable > max_unsupervised:
            raise ValueError(
                f"{where} has nothing supervised in {lost:,} of {usable:,} rows ({_percent(lost, usable)}), more than "
                f"--max_unsupervised {max_unsupervised:g}: {_reasons(unsupervised, lost)}; or raise --max_unsupervised"
            )
        if count["truncated"] + count["too_long"] == usable:
            raise ValueError(
                f"{where} has only rows longer than {limit} (all {usable:,}; median {count['median']:,} tokens, longest "
                f"{count['longest']:,}): raise --max_length"
            )


def _reasons(causes: list[tuple[int, str, str]], total: int) -> str:
    """Those of the (rows, what they are, the fix) that have rows, in words: all reasons, then all fixes."""
    causes = [cause for cause in causes if cause[0]]
    reasons = [f"{'all ' if number == total else ''}{number:,} are {what}" for number, what, _ in causes]
    return f"{', '.join(reasons)}; {'; '.join(fix for *_, fix in causes)}"


def warnings(report: Report) -> list[str]:
    """What does not stop a run but should be known, one line each."""
    return _warnings(report, summary(report))


def _warnings(report: Report, figures: dict) -> list[str]:
    found, train, scope = [], figures["splits"]["train"], _scope(report)
    if shared := figures["overlap"]["eval_rows_in_train"]:
        of = _of(shared, figures["splits"]["eval"]["kept"], "eval")
        found.append(f"{of} are in the train split too, so the eval loss will look better than it is")
    if train["kept"] and train["no_eos"] == train["kept"]:
        found.append(
            "EOS is supervised in no row of the train split, so the model is not taught to stop: see --append_concat_token "
            "and how the chat template ends an assistant's turn"
        )
    if train["kept"] and (repeated := figures["duplicates"]["train"]) > MANY_DUPLICATES * train["kept"]:
        found.append(f"{_of(repeated, train['kept'], 'train')} repeat an earlier row exactly")
    for split, count in figures["splits"].items():
        rows, usable, longer = count["rows"], count["rows"] - count["bad"], count["truncated"] + count["too_long"]
        limit = f"--max_length {report.max_length} and {'dropped' if count['too_long'] else 'cut'}"
        if longer > MANY_TRUNCATED * usable:
            found.append(
                f"{_of(longer, usable, split)} are longer than {limit}; the longest has {count['longest']:,} tokens"
            )
        for key, what in (
            ("double_bos", "have two BOS in a row: see --add_special_tokens and the chat template"),
            ("double_eos", "have two EOS in a row: see --append_concat_token and the chat template"),
            ("not_alternating", "have two turns of one role in a row, which some chat templates refuse"),
        ):
            if count[key]:
                found.append(f"{_of(count[key], rows, split)} {what}")
    return [f"{line}{scope}" for line in found]


def _of(number: int, total: int, split: str) -> str:
    return f"{number:,} of {total:,} rows of the {split} split ({_percent(number, total)})"


# ----------------------------------------------------------------------------------------------------------------- output


def text(report: Report) -> str:
    """The report as plain text, at most 110 columns wide."""
    marks = _marks(report)
    lines = [line for block in _blocks(report) for line in _lines(*block, WIDTH, FILE_SAMPLE, marks)]
    return "\n".join(lines).lstrip("\n") + "\n"


def show(report: Report, console: Console | None = None) -> None:
    """Print the report, with supervised text in colour, or between marks where there is no colour."""
    console = console or Console()
    width = max(60, min(console.width, WIDTH)) if console.is_terminal else WIDTH
    colour = console.is_terminal and console.color_system is not None and not console.no_color
    styles, marks = {"h1": "bold", "h2": "bold", "h3": "bold", "warning": "bold yellow"}, _marks(report)

    def put(*parts):  # a terminal that cannot show a character of the data must not end the run
        encoded = [(part.encode(console.encoding, "replace").decode(console.encoding), style) for part, style in parts]
        console.print(Text.assemble(*encoded), soft_wrap=not console.is_terminal)

    for kind, content in _blocks(report):
        if kind == "sample" and colour:
            pieces = _cut(content, TERMINAL_SAMPLE)
            put(*((_visible(part), {True: "bold green", None: "dim"}.get(state, "")) for part, state in pieces))
        elif kind == "legend" and colour:
            put(("Supervised text is in bold green.", "bold green"))
        else:
            for line in _lines(kind, content, width, TERMINAL_SAMPLE, marks):
                put((line, styles.get(kind, "")))


def html(report: Report) -> str:
    """The report as one page that needs nothing else: no script, no request."""
    body = "\n".join(_html(*block) for block in _blocks(report))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Data report</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{CSS}</style></head>\n'
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def write(report: Report, folder: str | Path) -> list[Path]:
    """Write data_report.txt and data_report.html to `folder`, each in one step; makes the folder.

    Raises:
        OSError: the folder cannot be made or written to.
    """
    contents, paths = {"data_report.txt": text(report), "data_report.html": html(report)}, []
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        path, partial = Path(folder) / name, Path(folder) / f"_{name}.partial"
        try:
            partial.write_bytes(content.encode())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        paths.append(path)
    return paths


def _blocks(report: Report):
    """What is said, in order, as (kind, content) for `_lines` and `_html`."""
    figures, scope = summary(report), _scope(report)
    splits, padding, packing = figures["splits"], figures["padding"], figures["packing"]
    train, held_out = splits["train"], splits.get("eval")
    yield "h1", f"Data report{scope}"
    if report.streamed is not None:
        yield "p", f"The data are streamed: only the first {report.streamed:,} rows were looked at, and the rest may differ."
    cut = f"max_length {report.max_length:,}, truncation {report.truncation}" if report.max_length else "no max_length"
    tokens = "tokens from the cache" if report.cached else "tokenised in this run"
    yield "p", f"{cut}; loss on {report.loss_on}; micro-batch of {report.batch_size:,}; {tokens}"
    yield from (("warning", line) for line in _warnings(report, figures))
    yield "table", list(splits.items())
    number = figures["duplicates"]["train"]
    exact = f"Exact duplicates: {number:,} kept rows of train repeat an earlier one ({_percent(number, train['kept'])})"
    if held_out:
        number = figures["overlap"]["eval_rows_in_train"]
        exact += f"; {number:,} of eval are in train ({_percent(number, held_out['kept'])})"
    yield "p", exact
    if train["histogram"]["edges"]:
        yield "h2", f"Tokens of a row, before truncation{scope}"
        yield "histogram", ({split: count["histogram"] for split, count in splits.items()}, report.max_length)
    if padding["tokens"]:
        yield "h2", f"Padding and packing{scope}"
        share = _percent(padding["padded_tokens"] - padding["tokens"], padding["padded_tokens"])
        computed = f"{padding['padded_tokens']:,} tokens computed for {padding['tokens']:,} in the rows"
        yield "p", f"Without packing, {share} of a micro-batch is padding: {computed} (train, in random order)."
    if padding["tokens"] and packing:
        does, size = ("is on", "are") if packing["on"] else ("is off", "would be"), packing["capacity"] or 0
        into = f"{packing['of']:,} rows {does[1]} packed into {packing['rows']:,} of {size:,} tokens"
        full = f"{_percent(packing['tokens'], packing['rows'] * size)} full ({packing['tokens']:,} tokens)"
        yield "p", f"Packing {does[0]}: {into}, {full}."
    if padding["tokens"]:
        yield "p", f"Predicted speed-up of packing, counting tokens only: {padding['speed_up']:.2f}x."
    if report.tokenizer:
        yield "h2", "Tokenizer"
    for label, value in report.tokenizer.items():
        values = value if isinstance(value, (list, tuple)) else str(value).split("\n")
        yield from (("pair", ("" if index else label, line)) for index, line in enumerate(values))
    yield "h2", f"Sources{scope}"
    for split, rows in _splits(report).items():
        named = [(f"{split} [{index}]", source) for index, source in enumerate(splits[split]["sources"], start=1)]
        for row, (name, _) in zip(rows, named, strict=True):
            yield "pair", (name, row.source + ("" if row.weight is None else f" (weight {row.weight:.1%})"))
            more = len(row.skipped) - SKIPPED_SHOWN
            lines = [f"{len(row.skipped):,} skipped:", *row.skipped[:SKIPPED_SHOWN]] if row.skipped else []
            yield from (("pair", ("", line)) for line in [row.format, *lines, *([f"and {more:,} more"] if more > 0 else [])])
        if len(named) > 1:
            yield "table", named
    if report.samples:
        yield "h2", f"Samples{scope}"
        yield "legend", None
    for sample in report.samples:
        yield "h3", f"{sample.split}, {sample.source}, row {sample.row:,}"
        yield "sample", sample.pieces


def _lines(kind: str, content, width: int, limit: int, marks: tuple[str, str]):
    """A block as lines of at most `width` columns; a sample is cut to `limit` characters."""
    if kind in ("h1", "h2", "h3"):
        yield from ["", *_wrap(content, width)]
        if kind != "h3":
            yield ("=" if kind == "h1" else "-") * min(cell_len(content), width)
    elif kind == "p":
        yield from _wrap(content, width)
    elif kind == "warning":
        yield from _wrap(content, width, "WARNING  ")
    elif kind == "pair":
        yield from _wrap(content[1], width, f"{textwrap.shorten(_line(content[0]), 20):<20}  ")
    elif kind == "legend":
        yield f"Supervised text is between {marks[0]} and {marks[1]}. A line with : continues the line above it."
    elif kind == "table":
        fit = max(1, (width - LABEL) // CELL)
        for columns in (content[start : start + fit] for start in range(0, len(content), fit)):
            yield from ["", " " * LABEL + "".join(f"{name:>{CELL}}" for name, _ in columns)]
            yield from (f"{label:<{LABEL}}" + "".join(f"{cell:>{CELL}}" for cell in row) for label, row in _cells(columns))
        yield ""
    elif kind == "histogram":
        bins, mark, columns = _bins(*content)
        bar = (width - BIN) // len(columns) - 13
        yield " " * BIN + "".join(f"{split:<{bar + 13}}" for split in columns).rstrip()
        for index in range(len(bins) + 1):
            if mark and index == np.ceil(mark[0]):
                yield f"{'-' * (BIN - 1)} {mark[1]}"
            if index < len(bins):
                bars = (f"{'#' * -(-bar * row[index] // max([1, *row]))} {row[index]:,}" for row in columns.values())
                yield f"{bins[index]:>{BIN - 1}} " + "".join(f"{cell:<{bar + 13}}" for cell in bars).rstrip()
    elif kind == "sample":
        marked = "".join(f"{marks[0]}{part}{marks[1]}" if state else part for part, state in _cut(content, limit))
        for line in _visible(marked).split("\n"):
            pieces = chop_cells(line.expandtabs(4), width - 2) or [""]
            yield from (f"{':' if index else '|'} {piece}" for index, piece in enumerate(pieces))


def _html(kind: str, content) -> str:
    """A block as HTML."""
    if kind == "warning":
        return f'<p class="warning"><b>Warning</b> {_escape(content)}</p>'
    if kind == "pair":
        return f'<p class="pair"><b>{_escape(content[0])}</b><span>{_escape(content[1])}</span></p>'
    if kind == "legend":
        return "<p><mark>Marked like this</mark>: supervised.</p>"
    if kind == "table":
        head = "".join(f'<th scope="col">{_escape(name)}</th>' for name, _ in content)
        rows = [f"<tr><td></td>{head}</tr>"]
        for label, row in _cells(content):
            part = ' class="part"' if label.startswith(" ") else ""
            cells = "".join(f"<td>{_escape(cell)}</td>" for cell in row)
            rows.append(f'<tr><th scope="row"{part}>{_escape(label.strip())}</th>{cells}</tr>')
        return '<div class="scroll"><table>\n' + "\n".join(rows) + "\n</table></div>"
    if kind == "histogram":
        bins, mark, columns = _bins(*content)
        charts = [_svg(split, counts, bins, mark) for split, counts in columns.items()]
        return "\n".join(charts) + (f"\n<p>Dashed line: {mark[1]}.</p>" if mark else "")
    if kind == "sample":
        wrap = {True: "<mark>{}</mark>", False: "{}", None: "<i>{}</i>"}
        pieces = (wrap[state].format(_escape(part)) for part, state in _cut(content, FILE_SAMPLE))
        return f"<pre>\n{''.join(pieces)}</pre>"  # a browser leaves out the first newline
    return f"<{kind}>{_escape(content)}</{kind}>"


def _svg(split: str, counts: list[int], bins: list[str], mark: tuple[float, str] | None) -> str:
    title, drawn = f"{_escape(split)}: rows by tokens before truncation", []
    for index, (label, count) in enumerate(zip(bins, counts, strict=True)):  # 18 units a bin, drawn 1:1 on a phone
        y, long = 18 * index, 150 * count / max([1, *counts])
        drawn += [
            f'<text x="140" y="{y + 13}" text-anchor="end">{label}</text>',
            f'<rect x="146" y="{y + 3}" width="{max(long, 1 if count else 0):.1f}" height="12"/>',
            f'<text x="{152 + long:.1f}" y="{y + 13}">{count:,}</text>',
        ]
    if mark:
        y = f"{18 * mark[0]:.1f}"
        drawn.append(f'<line x1="0" x2="360" y1="{y}" y2="{y}"><title>{mark[1]}</title></line>')
    box = f'viewBox="0 -2 360 {18 * len(bins) + 4}" role="img" aria-label="{title}"'
    return f"<figure><figcaption>{title}</figcaption><svg {box}>" + "\n".join(drawn) + "</svg></figure>"


CSS = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1b1b;--line:#ccc;--bar:#2f6db5;--warn:#fff1dc;--edge:#a85b00;--mark:#ffe08a}
@media(prefers-color-scheme:dark){:root{--bg:#15171a;--fg:#e8e8e8;--line:#444;--bar:#7fb0ee;--warn:#3a2a12;--edge:#ffb454;
--mark:#5c4700}}
body{margin:0;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif}
main{max-width:56rem;margin:auto;padding:1rem;overflow-wrap:anywhere}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2rem}h3{font-size:1rem}
.warning{background:var(--warn);border-left:4px solid var(--edge);padding:.5rem .75rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.15rem .75rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th[scope=row]{text-align:left;font-weight:400;padding-left:0}th.part{padding-left:1rem}
.pair{margin:.2rem 0;display:flex;flex-wrap:wrap;gap:0 1rem}.pair b{flex:0 0 9rem}.pair span{flex:1 1 15rem}
figure{margin:1rem 0;max-width:28rem}svg{width:100%;height:auto;font:12px system-ui,sans-serif}
text{fill:var(--fg)}rect{fill:var(--bar)}line{stroke:var(--edge);stroke-width:2;stroke-dasharray:6 4}
pre{white-space:pre-wrap;border:1px solid var(--line);padding:.75rem;font:14px/1.5 ui-monospace,monospace}
mark{background:var(--mark);color:var(--fg);border-bottom:2px solid var(--edge)}
"""


# ----------------------------------------------------------------------------------------------------------------- pieces


def _cells(columns: list[tuple[str, dict]]):
    """(label, a figure for each column) of every line of a table."""
    for key, label, whole in FIGURES:
        if key == "used" and all(count["used"] == count["kept"] for _, count in columns):
            continue
        cells = []
        for _, count in columns:
            number = count[key]
            cell = "-" if number is None else f"{number:,.1f}" if key == "mean" else f"{number:,}"
            cells.append(cell + (f" ({_percent(number, count[whole])})" if whole and number else ""))
        yield label, cells


def _bins(histograms: dict[str, dict], max_length: int | None):
    """Labels of the bins, where max_length lies (bins from the top, and in words) or None, and the counts by split."""
    edges = histograms["train"]["edges"]
    labels = [f"{low + 1:,} to {high:,}" if low + 1 < high else f"{high:,}" for low, high in pairwise(edges)]
    counts = {split: histogram["counts"] for split, histogram in histograms.items()}
    if max_length is None:
        return labels, None, counts
    position = float(np.interp(max_length, edges, range(len(edges))))
    where = "is in the bin above" if position % 1 else "is here: rows below are longer"
    if position in (0, len(labels)):
        where = "is here: no row is longer" if position else "is here: every row is longer"
    return labels, (position, f"max_length {max_length:,} {where}"), counts


def _cut(pieces: list[tuple[str, bool]], limit: int) -> list[tuple[str, bool | None]]:
    """Pieces, joined where they are alike; what exceeds `limit` characters is left out of the middle (a None piece)."""
    pieces = [("".join(part for part, _ in group), state) for state, group in groupby(pieces, key=lambda piece: piece[1])]
    total, half = sum(len(part) for part, _ in pieces), limit // 2
    if total <= limit:
        return pieces

    def between(low, high):
        at = 0
        for part, state in pieces:
            if inside := part[max(low - at, 0) : max(high - at, 0)]:
                yield inside, state
            at += len(part)

    return [
        *between(0, half),
        (f"\n[... {total - 2 * half:,} characters left out ...]\n", None),
        *between(total - half, total),
    ]


def _marks(report: Report) -> tuple[str, str]:
    shown = "".join(part for sample in report.samples for part, _ in sample.pieces)
    return next((pair for pair in MARKS if not any(mark in shown for mark in pair)), MARKS[-1])


def _wrap(content: str, width: int, first: str = "") -> list[str]:
    """One line of data as lines of at most `width` columns, the first after `first` and the others indented alike."""
    indent = cell_len(first)
    parts = textwrap.wrap(_line(content), width - indent, break_on_hyphens=False)
    parts = [piece for part in parts for piece in chop_cells(part, width - indent)] or [""]
    return [f"{' ' * indent if index else first}{part}" for index, part in enumerate(parts)]


def _visible(content: str) -> str:
    """Control characters, which could drive a terminal or turn text around, as escapes; newlines and tabs stay."""
    hidden = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(hidden, lambda match: match[0].encode("unicode_escape").decode(), content)


def _line(content) -> str:
    return _visible(str(content)).replace("\n", "\\n").replace("\t", " ")


def _escape(content) -> str:
    return escape(_visible(str(content)))


def _scope(report: Report) -> str:
    return "" if report.streamed is None else f" (first {report.streamed:,} rows)"


def _percent(part: float, whole: float) -> str:
    share = part / whole if whole else 0.0
    if 0 < share < 0.0005:
        return "<0.1%"
    return ">99.9%" if 0.9995 <= share < 1 else f"{share:.1%}"
