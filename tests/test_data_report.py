"""The data report counts what a plain loop counts, says all of it everywhere, and stops the runs it should."""

import io
import json
import math
import random
import re
import time
import warnings as python_warnings
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

import data_report as d

ALL_FLAGS = (d.DOUBLE_BOS, d.DOUBLE_EOS, d.EMPTY_TURN, d.NOT_ALTERNATING, d.SYSTEM_FOLDED, d.ESCAPED)
COUNTED = dict(
    zip(("double_bos", "double_eos", "empty_turns", "not_alternating", "system_folded", "escaped"), ALL_FLAGS, strict=True)
)


def source(rows, split="train", name="data/train.jsonl", weight=None, used=None, skipped=()):
    """From (length, kept, supervised, flags, digest) of every row."""
    columns = list(zip(*rows, strict=True)) or [()] * 5
    arrays = [
        np.array(column, dtype=kind)
        for column, kind in zip(columns, (np.int64, np.int64, np.int64, np.int32, np.uint64), strict=True)
    ]
    return d.SourceRows(name, split, "messages, recognised; not read: 'id'", weight, *arrays, list(skipped), used)


def good(n, length=10, flags=0, first=0):
    return [(length, length, length // 2, flags, first + index) for index in range(n)]


def report(*sources, **fields):
    packing = {"on": False, "rows": 3, "of": 9, "tokens": 250, "capacity": 100}
    base = d.Report(list(sources), [], 100, "right", "assistant", 4, packing, {"template": "chatml"}, None, False)
    return replace(base, **fields)


def sample(*pieces):
    return d.Sample("train", "data/train.jsonl", 3, list(pieces))


def random_rows(rng, n, max_length=100, drop=False, span=400):
    rows = []
    for _ in range(n):
        length, flags = rng.randint(1, span), sum(flag for flag in (*ALL_FLAGS, d.NO_EOS) if rng.random() < 0.2)
        kept, kind = min(length, max_length), rng.random()
        if length > max_length:
            flags, kept = (flags | d.TOO_LONG, 0) if drop else (flags | d.TRUNCATED, kept)
        if kind < 0.1:
            length, kept, flags = 0, 0, flags | d.BAD
        elif kind < 0.25:  # of a row that is too long as well, only that is counted
            kept, flags = 0, flags | d.UNSUPERVISED
        rows.append(
            (length, kept, rng.randint(1, kept or 9), flags, rng.randint(0, n))
        )  # dropped rows have supervised tokens too
    return rows


def brute(rows):
    """The figures of (length, kept, supervised, flags, digest) rows, one row at a time."""
    count, lengths = Counter(), []
    for length, kept, supervised, flags, _ in rows:
        count["rows"] += 1
        if flags & d.BAD:
            count["bad"] += 1
        else:
            lengths.append(length)
            if flags & d.TOO_LONG:
                count["too_long"] += 1
            elif flags & d.UNSUPERVISED:
                count["unsupervised"] += 1
                count["unsupervised_truncated"] += bool(flags & d.TRUNCATED)
            if flags & d.TRUNCATED:
                count["truncated"] += 1
        if kept:
            count["kept"] += 1
            count["tokens"] += kept
            count["supervised_tokens"] += supervised
            count["tokens_cut"] += length - kept
            count["no_eos"] += bool(flags & d.NO_EOS)
        for name, flag in COUNTED.items():
            count[name] += bool(flags & flag)
    figures = {name: count[name] for name, *_ in d.FIGURES if name not in ("used", "mean", *d.PERCENTILES)}
    figures["supervised_share"] = count["supervised_tokens"] / count["tokens"] if count["tokens"] else None
    figures["mean"] = pytest.approx(sum(lengths) / len(lengths)) if lengths else None
    for name, share in d.PERCENTILES.items():
        reach = [
            length for length in sorted(lengths) if sum(other <= length for other in lengths) * 100 >= share * len(lengths)
        ]
        figures[name] = reach[0] if lengths else None
    return figures


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_count_is_that_of_a_loop(seed, drop):
    rng = random.Random(seed)
    parts = [random_rows(rng, rng.randint(1, 150), drop=drop) for _ in range(3)]
    made = report(source(parts[0], skipped=["row 1: x"]), source(parts[1], name="b"), source(parts[2], "eval"))
    figures = d.summary(made)
    assert json.loads(json.dumps(figures)) == figures
    train, held_out = parts[0] + parts[1], parts[2]
    for split, rows, sources in (("train", train, parts[:2]), ("eval", held_out, parts[2:])):
        found = figures["splits"][split]
        assert found.items() >= brute(rows).items()
        assert found["kept"] + found["bad"] + found["too_long"] + found["unsupervised"] == found["rows"]
        for part, one in zip(sources, found["sources"], strict=True):
            assert one.items() >= (brute(part) | {"used": brute(part)["kept"]}).items()
        edges, counts = found["histogram"]["edges"], found["histogram"]["counts"]
        lengths = [row[0] for row in rows if not row[3] & d.BAD]
        assert counts == [sum(low < length <= high for length in lengths) for low, high in pairwise(edges)]
        assert sum(counts) == len(lengths)
    assert figures["splits"]["train"]["sources"][0]["skipped"] == 1
    seen, repeated = set(), 0
    for _, kept, _, _, digest in train:
        if kept:
            repeated, seen = repeated + (digest in seen), seen | {digest}
    kept = [row for row in held_out if row[1]]
    shared = sum(row[4] in seen for row in kept)
    assert figures["duplicates"] == {"train": repeated, "share": repeated / brute(train)["kept"]}
    assert figures["overlap"] == {"eval_rows_in_train": shared, "share": shared / len(kept) if kept else None}
    assert figures["packing"] == made.packing | {"fill": 250 / 300}


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=60))
@settings(max_examples=150, deadline=None)
def test_the_histogram_holds_every_row_on_a_short_scale(lengths):
    edges = d._edges(np.array(lengths))
    counts = d._histogram(np.array(lengths), edges)
    assert edges == sorted(set(edges)) and 1 <= len(counts) <= 16 and sum(counts) == len(lengths)
    assert edges[0] < min(lengths) and max(lengths) <= edges[-1] < 2 * max(lengths) + 1
    assert counts[0] and counts[-1], "an empty bin at an end"
    assert len(counts) >= 8 or max(lengths) < 4 * min(lengths) or max(lengths) <= 64
    assert len(edges) == 17 or {2**power for power in range(41) if edges[0] <= 2**power <= edges[-1]} <= set(edges)


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_padding_is_that_of_the_shuffled_batches(lengths, batch_size):
    """Every batch is as long as its longest row; the last may be smaller. Checked against sums that do not depend on order."""
    rows = [source([(length, length, length, 0, 0) for length in lengths])]
    padding, kept = d._padding(rows, batch_size), sorted(length for length in lengths if length)
    assert padding["tokens"] == sum(kept)
    batches = [kept[at : at + batch_size] for at in range(0, len(kept), batch_size)]
    assert sum(kept) <= padding["padded_tokens"] <= max(kept, default=0) * len(kept)
    if batch_size == 1 or len(set(kept)) == 1:
        assert padding["padded_tokens"] == sum(kept)
    if len(batches) == 1:
        assert padding["padded_tokens"] == max(kept) * len(kept)
    rng = np.random.default_rng(0)  # and exactly, in the order that is drawn
    order = rng.permutation(rng.permutation(np.array([length for length in lengths if length], dtype=np.int64))).tolist()
    exact = sum(
        max(batch) * len(batch) for batch in (order[at : at + batch_size] for at in range(0, len(order), batch_size))
    )
    assert padding["padded_tokens"] == exact
    assert padding["share"] == ((exact - sum(kept)) / exact if exact else None)
    assert padding["speed_up"] == (exact / sum(kept) if exact else None)


def test_a_mixture_pads_the_rows_it_uses():
    rows = [source(good(100, 10), used=30), source(good(5, 7), used=12)]
    assert d._padding(rows, 1)["tokens"] == 30 * 10 + 12 * 7
    assert d._padding(rows, 1)["share"] == 0
    written = d.text(report(*rows))
    assert re.search(r"taken into the mixture +42 \(40\.0%\)", written)
    assert re.search(r"taken into the mixture +30 \(30\.0%\) +12 \(240\.0%\)", written)
    assert "mixture" not in d.text(report(source(good(5))))


# ------------------------------------------------------------------------------------------------------------------ gates


TOO_LONG = [(200, 0, 0, d.TOO_LONG, 1)]
CUT = [(200, 0, 0, d.TRUNCATED | d.UNSUPERVISED, 1)]
NOTHING = [(50, 0, 0, d.UNSUPERVISED, 1)]
WORSE = [(0, 0, 0, d.BAD, 0)]


def stopped(*sources, limit=0.05, **fields):
    with pytest.raises(ValueError) as error:
        d.gates(report(*sources, **fields), limit)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_split_without_rows_is_stopped():
    assert stopped() == "the train split has no row: check --splits and its files"
    bad = source(WORSE * 3, skipped=["a.jsonl row 0: no\n'content'"])
    assert stopped(bad) == (
        "the train split has no row left: all 3 are bad (first: a.jsonl row 0: no\\n'content'); mend or remove them"
    )
    assert stopped(source(TOO_LONG * 2)) == (
        "the train split has no row left: all 2 are longer than --max_length 100 and dropped; raise --max_length or use "
        "--truncation right"
    )
    assert stopped(source(CUT * 2), limit=1) == (
        "the train split has no row left: all 2 are cut by --max_length 100 before anything supervised; raise --max_length "
        "or use --truncation left"
    )
    assert stopped(source(NOTHING), limit=1) == (
        "the train split has no row left: all 1 are without anything supervised (no assistant turn); check the rows and "
        "--loss_on assistant"
    )
    mixed = stopped(source(WORSE + TOO_LONG * 2 + CUT * 3 + NOTHING * 4), truncation="left", loss_on="completion")
    assert "1 are bad, 2 are longer than --max_length 100 and dropped, 3 are cut by" in mixed
    assert "4 are without anything supervised (an empty completion); mend or remove them;" in mixed
    assert "or use --truncation right; check the rows and --loss_on completion" in mixed
    assert stopped(source(good(3)), source([], "eval")) == "the eval split has no row: check --splits and its files"
    assert stopped(source(good(3)), source(WORSE, "eval"), streamed=1000).startswith(
        "the eval split (first 1,000 rows) has no row left"
    )


def test_too_many_rows_with_nothing_supervised_are_stopped():
    rows = good(95) + CUT * 3 + NOTHING * 2
    d.gates(report(source(rows)), 0.05)
    assert stopped(source(rows), limit=0.049) == (
        "the train split has nothing supervised in 5 of 100 rows (5.0%), more than --max_unsupervised 0.049: 3 are cut by "
        "--max_length 100 before anything supervised, 2 are without anything supervised (no assistant turn); raise "
        "--max_length or use --truncation left; check the rows and --loss_on assistant; or raise --max_unsupervised"
    )
    # bad rows do not count; neither does a share that only rounding puts above the limit
    assert "5 of 100 rows" in stopped(source(rows + WORSE * 900), limit=0.049)
    d.gates(report(source(good(71) + NOTHING * 29)), 0.29)
    only = stopped(source(good(9)), source(good(9) + CUT, "eval"), limit=0)
    assert "the eval split" in only and "all 1 are cut by --max_length 100" in only and "--loss_on" not in only


@pytest.mark.parametrize(("flag", "kept"), [(d.TRUNCATED, 100)])
def test_a_split_of_rows_that_are_all_too_long_is_stopped(flag, kept):
    long = [(length, kept, 5, flag, length) for length in (150, 200, 1300)]
    assert stopped(source(long + WORSE)) == (
        "the train split has only rows longer than --max_length 100 (all 3; median 200 tokens, longest 1,300): raise "
        "--max_length"
    )
    d.gates(report(source(long + good(1))), 0.05)
    assert "only rows longer" in stopped(source(long + TOO_LONG))


def test_good_data_pass_and_give_no_warning():
    made = report(source(good(40)), source(good(10, first=1000), "eval"))
    d.gates(made, 0.0)
    assert d.warnings(made) == []
    assert "WARNING" not in d.text(made) and 'class="warning"' not in d.html(made)


def test_warnings():
    def only(*sources, **fields):
        (line,) = d.warnings(report(*sources, **fields))
        assert line.replace("\n", " ") == line and line in " ".join(d.text(report(*sources, **fields)).split()).replace(
            "  ", " "
        )
        return line

    assert only(source(good(40)), source(good(10, first=35), "eval")) == (
        "5 of 10 rows of the eval split (50.0%) are in the train split too, so the eval loss will look better than it is"
    )
    assert only(source(good(40, flags=d.NO_EOS))).startswith(
        "EOS is supervised in no row of the train split, so the model is"
    )
    assert only(source(good(16) + good(4))) == "4 of 20 rows of the train split (20.0%) repeat an earlier row exactly"
    assert d.warnings(report(source(good(18) + good(2)))) == []
    cut = [(1200, 100, 5, d.TRUNCATED, 7)]
    assert only(source(good(15, first=50) + cut)) == (
        "1 of 16 rows of the train split (6.2%) are longer than --max_length 100 and cut; the longest has 1,200 tokens"
    )
    assert "100 and dropped; the" in only(source(good(15, first=50) + TOO_LONG))
    assert d.warnings(report(source(good(19, first=50) + cut))) == []
    assert only(source(good(9) + good(1, flags=d.DOUBLE_BOS, first=9))).startswith(
        "1 of 10 rows of the train split (10.0%) have two BOS"
    )
    assert "two EOS in a row" in only(source(good(9) + good(1, flags=d.DOUBLE_EOS, first=9)))
    assert "eval split (100.0%) have two turns of one role" in only(
        source(good(9)), source(good(2, flags=d.NOT_ALTERNATING, first=9), "eval")
    )
    assert only(source(good(16) + good(4)), streamed=20).endswith("exactly (first 20 rows)")


# ----------------------------------------------------------------------------------------------------------------- output


def numbers(value, name=""):
    """(name, number) of every number in the summary, the first edge of a histogram apart: bins begin after it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner[1:] if key == "edges" else inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner, name)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, value


def full_report(**fields):
    rng = random.Random(1)
    sources = [
        source(
            random_rows(rng, 5000, span=300), weight=0.8, used=3217, skipped=[f"row {row}: <b>no</b>" for row in range(1234)]
        ),
        source(random_rows(rng, 200), name="https-free/源" * 20, weight=0.2, used=801),
        source(random_rows(rng, 300), "eval", "data/eval.jsonl"),
    ]
    samples = [
        sample(("<user>\n", False), ("<script>alert('x')</script>\n\n  «oui»", True), ("\n", False)),
        sample(("\x1b[31mred\u202e " + "漢字 " * 500 + "\r\n", False), ("a\tb", True)),
        sample(("x" * 9000, False), ("y" * 9000, True), ("end", True)),
    ]
    return report(
        *sources,
        samples=samples,
        tokenizer={"template": "<chatml>", "notes": ["one", "two"], "EOS": "'</s>' (2)\nx"},
        **fields,
    )


def test_the_text_has_every_number_of_the_summary():
    made = full_report(streamed=5000)
    written = d.text(made)
    for name, value in numbers(d.summary(made)):
        if name in ("share", "supervised_share", "fill", "weight"):
            wanted = d._percent(value, 1)
        else:
            wanted = f"{value:,.1f}" if name == "mean" else f"{value:.2f}x" if name == "speed_up" else f"{value:,}"
        assert re.search(rf"(?<![\d,.]){re.escape(wanted)}(?![\d]|,\d)", written), (name, wanted)


@pytest.mark.parametrize("width", [60, 80, 110])
def test_lines_fit(width):
    made = full_report(streamed=10_000)
    assert max(cell_len(line) for line in d.text(made).split("\n")) <= 110
    shown = io.StringIO()
    d.show(made, Console(file=shown, force_terminal=True, width=width, color_system=None))
    assert max(cell_len(line) for line in shown.getvalue().split("\n")) <= width


def test_text_keeps_the_lines_of_a_sample_and_marks_what_is_supervised():
    made = report(source(good(5)), samples=[sample(("a\n\n  b\x1b[0m", False), ("c\n", True), ("d", False))])
    assert "between « and »" in d.text(made)
    assert "| a\n| \n|   b\\x1b[0m«c\n| »d\n" in d.text(made)
    made.samples.append(sample(("« a »", True)))
    assert "between ⟦ and ⟧" in d.text(made) and "⟦« a »⟧" in d.text(made)


def test_a_long_sample_is_cut_in_the_middle():
    pieces = [("h" * 50, False), ("m" * 100, True), ("t" * 50, False)]
    assert d._cut(pieces, 200) == pieces
    short = d._cut([("h", False)] * 50 + pieces[1:], 120)
    assert short == [
        ("h" * 50, False),
        ("m" * 10, True),
        ("\n[... 80 characters left out ...]\n", None),
        ("m" * 10, True),
        ("t" * 50, False),
    ]
    made = report(source(good(5)), samples=[sample(("h" * 4000, False), ("t" * 4000, True))])
    assert "2,000 characters left out" in d.text(made) and "2,000 characters left out" in d.html(made)
    shown = io.StringIO()
    d.show(made, Console(file=shown))
    assert "6,500 characters left out" in shown.getvalue()


def test_show_colours_on_a_terminal_and_marks_elsewhere():
    made = report(source(good(5)), samples=[sample(("q [b]x[/b] ", False), ("answer", True))])
    plain, coloured, ascii_only = io.StringIO(), io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    d.show(made, Console(file=plain))
    assert "q [b]x[/b] «answer»" in plain.getvalue() and "\x1b" not in plain.getvalue()
    assert plain.getvalue() == "\n" + d.text(made)
    d.show(made, Console(file=coloured, force_terminal=True, color_system="standard", width=100))
    assert "q [b]x[/b] \x1b[1;32manswer\x1b[0m" in coloured.getvalue() and "«" not in coloured.getvalue()
    d.show(made, Console(file=ascii_only))  # a terminal that lacks the marks
    ascii_only.flush()
    assert b"q [b]x[/b] ?answer?" in ascii_only.buffer.getvalue()


class Checker(HTMLParser):
    """Open and closed tags match; keeps the tags, the text, and the marked text."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.words, self.marked = [], [], "", ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data
        self.marked += data if "mark" in self.open else ""


def test_html_is_whole_and_escaped():
    made = full_report()
    made.samples.append(sample(("\nstarts", False)))
    made.samples.append(sample(("see & <img src=x onerror=y>", True)))
    page = d.html(made)
    found = Checker(page)
    assert re.findall(r"<[^a-z/!]|&(?!amp;|lt;|gt;|quot;|#x27;)", page) == []
    assert "http" not in page.replace("https-free", "") and not {"script", "img", "b>no", "chatml"} & set(found.tags)
    assert not re.search(r"\bsrc=|href|url\(|@import", page.replace("&lt;img src=x", ""))
    assert "<script>alert('x')</script>\n\n  «oui»" in found.marked and "see & <img src=x onerror=y>" in found.marked
    assert "row 3: <b>no</b>" in found.words and "and 1,224 more" in found.words and "\\x1b[31mred\\u202e" in found.words
    assert "<pre>\n\nstarts</pre>" in page  # a browser leaves out the first newline of a <pre>
    assert "viewport" in page and "prefers-color-scheme:dark" in page and found.tags.count("svg") == 2
    assert "Dashed line: max_length 100 is" in found.words and found.tags.count("line") == 2
    for label, cells in d._cells(list(d.summary(made)["splits"].items())):
        assert label.strip() in found.words and all(cell in found.words for cell in cells)
    assert len(page) < 60_000


def contrast(one, two):
    def light(colour):
        colour = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
        parts = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((light(one), light(two)))
    return (high + 0.05) / (low + 0.05)


def test_text_can_be_read_in_both_schemes():
    colours = re.findall(r"--(\w+):#(\w+)", d.CSS)
    for scheme in (dict(colours[:7]), dict(colours[7:])):
        assert set(scheme) == {"bg", "fg", "line", "bar", "warn", "edge", "mark"}
        assert all(contrast(scheme["fg"], scheme[behind]) >= 7 for behind in ("bg", "warn", "mark"))
        assert all(contrast(scheme[drawn], scheme["bg"]) >= 3 for drawn in ("bar", "edge"))


@pytest.mark.parametrize(
    ("max_length", "said"),
    [
        (64, "max_length 64 is here: rows below are longer"),
        (70, "max_length 70 is in the bin above"),
        (1000, "max_length 1,000 is here: no row is longer"),
        (2, "max_length 2 is here: every row is longer"),
    ],
)
def test_max_length_is_marked_in_the_histogram(max_length, said):
    made = report(source([(length, length, 1, 0, length) for length in range(33, 129)]), max_length=max_length)
    lines, page = d.text(made).split("\n"), Checker(d.html(made)).words
    (at,) = [index for index, line in enumerate(lines) if said in line]
    assert f"Dashed line: {said}." in page
    if max_length == 64:
        assert lines[at - 1].split()[:3] == ["61", "to", "64"] and lines[at + 1].split()[0] == "65"
    if max_length == 70:
        assert lines[at - 1].split()[:3] == ["65", "to", "72"]
    assert "no max_length" in d.text(replace(made, max_length=None)) and "is here" not in d.text(
        replace(made, max_length=None)
    )


def test_packing_on_off_and_unmeasured():
    made, on = report(source(good(9))), {"on": True, "rows": 3, "of": 9, "tokens": 250, "capacity": 100}
    assert "Packing is off: 9 rows would be packed into 3 of 100 tokens, 83.3% full (250 tokens)." in d.text(made)
    assert "Packing is on: 9 rows are packed into 3 of 100 tokens" in d.text(replace(made, packing=on))
    assert "counting tokens only: 1.00x" in d.text(made)
    assert (
        "Packing is" not in d.text(replace(made, packing=None)) and d.summary(replace(made, packing=None))["packing"] is None
    )


def test_streamed_and_cached_are_said():
    made = report(source(good(16) + good(4)), samples=[sample(("a", True))])
    assert "streamed" not in d.text(made) and "first " not in d.text(made) and "tokenised in this run" in d.text(made)
    made = replace(made, streamed=10_000, cached=True)
    for written in (d.text(made), Checker(d.html(made)).words):
        assert "The data are streamed: only the first 10,000 rows were looked at" in written
        assert "tokens from the cache" in written
        assert written.count("(first 10,000 rows)") >= 6  # title, warning, and every section of figures


def test_write_replaces_its_own_files_only(tmp_path):
    folder = tmp_path / "new" / "out"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "data_report.txt").write_text("old")
    made = full_report()
    paths = d.write(made, folder)
    assert [path.name for path in paths] == ["data_report.txt", "data_report.html"]
    assert paths[0].read_text(encoding="utf-8") == d.text(made) and paths[1].read_text(encoding="utf-8") == d.html(made)
    assert {path.name for path in folder.iterdir()} == {"run.json", "data_report.txt", "data_report.html"}
    assert (folder / "run.json").read_text() == "{}"
    assert [path.parent.name for path in d.write(made, str(tmp_path / "made" / "here"))] == ["here", "here"]


def test_write_leaves_nothing_half_written(tmp_path, monkeypatch):
    d.write(report(source(good(3))), tmp_path)
    before = (tmp_path / "data_report.txt").read_bytes()
    monkeypatch.setattr(d.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        d.write(report(source(good(7))), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data_report.html", "data_report.txt"]
    assert (tmp_path / "data_report.txt").read_bytes() == before


@pytest.mark.parametrize(
    "sources",
    [
        [],
        [source([])],
        [source(WORSE * 3)],
        [source(WORSE), source(WORSE, "eval")],
        [source(NOTHING)],
        [source(good(1))],
        [source(good(1)), source([], "eval")],
        [source([(0, 0, 0, d.UNSUPERVISED, 0)])],
        [source(good(3), "eval")],
        [source(good(2), used=0)],
        [source(WORSE, used=3)],
    ],
)
@pytest.mark.parametrize("max_length", [None, 100])
def test_little_or_no_data_are_reported(sources, max_length):
    with python_warnings.catch_warnings():
        python_warnings.simplefilter("error")
        made = report(
            *sources, max_length=max_length, packing={"on": True, "rows": 0, "of": 0, "tokens": 0, "capacity": None}
        )
        figures = d.summary(made)
        assert not any(math.isnan(value) for _, value in numbers(figures))
        Checker(d.html(made))
        assert "nan" not in d.text(made).lower() and "None" not in d.text(made)
        d.show(made, Console(file=io.StringIO()))
        d.warnings(made)


def test_a_million_rows_are_counted_quickly():
    rng = np.random.default_rng(0)
    n = 1_000_000
    lengths = rng.integers(1, 5000, n)
    kept = np.minimum(lengths, 2048)
    flags = np.where(lengths > 2048, d.TRUNCATED, 0).astype(np.int32)
    rows = d.SourceRows(
        "a", "train", "text", None, lengths, kept, kept // 2, flags, rng.integers(0, 2**62, n, dtype=np.uint64), [], None
    )
    made = report(rows, replace(rows, split="eval"))
    start = time.process_time()
    figures = d.summary(made)
    assert time.process_time() - start < 3
    assert figures["overlap"]["eval_rows_in_train"] == n
