"""JSON, CSV and parquet files as rows: each mistake by its file and line, and no value changed on the way.

`datasets` does the reading. Left to itself it reads a column of 'a', '42' and 42 as 'a', 42 and 42, makes times of a column
of dates, turns the numbers of a later file into text (or '007' into 7), makes an empty row of a line `null`, and shifts the
columns of a CSV whose first row is too long. So JSON and CSV files are read through once before they are loaded, and the
findings are kept in the cache folder of `datasets` by the content of the files:

- Within a column, and within the lists and objects it holds, all values must be of one kind: text, number, true/false, list
  or object. null and missing keys are no kind and pass; integers beside fractions are both numbers. The kind that most
  values have is the right one. Objects with differing keys (tool arguments) are kept as they are, whatever they hold.
- Rows that cannot be used are an error, or are left out with one line each (`on_bad_row="skip"`).
- If `datasets` cannot join files or parts of a file that are fine (a column that only later rows have), they are written as
  one file to the cache folder, which is read in one piece. Nothing is ever written beside the user's files.
"""

import codecs
import collections
import contextlib
import csv
import glob
import gzip
import io
import json
import logging
import os
import re
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import xxhash
from datasets import Dataset, Features, IterableDataset, Value

SMALL_PART = 2 << 20  # bytes of a JSON file that are parsed at once
MAX_DEPTH = 30  # of lists and objects in each other; Arrow reads no more than about 60
KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def one_line(message: str) -> ValueError:
    return ValueError(" ".join(message.split()))


def reason_of(error: BaseException) -> str:
    """The first line of why `datasets` failed, without the wrapper that says only that it did."""
    cause = error
    while isinstance(cause, datasets.exceptions.DatasetGenerationError) and cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [type(cause).__name__]
    # "Config name is missing." and "Couldn't cast" say nothing without the line that follows.
    return " ".join(lines[:2] if len(lines[0]) < 30 else lines[:1])


@contextlib.contextmanager
def reasons(name: str):
    """One line for whatever `datasets` raises, and no logging or traceback of its own."""
    loggers = {logger: logger.level for logger in map(logging.getLogger, ("datasets", "huggingface_hub.repocard"))}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:  # a dozen types, for a file it cannot find, read, parse or join
        raise one_line(f"{name}: {reason_of(error)}") from None
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)


def kind_of(file: str) -> str | None:
    path = Path(file[:-3] if file.endswith(".gz") else file)
    kind = KINDS.get(path.suffix.lower())
    return None if file.endswith(".gz") and kind == "parquet" else kind


# ---- loading ------------------------------------------------------------------------------------------------------


def load_files(
    name: str, kind: str, files: list[str], on_bad_row: str, streaming: bool
) -> tuple[Dataset | IterableDataset, list[str]]:
    """The rows of files that are one split, and a line for each row that was skipped."""

    def read(files: list[str], **options) -> Dataset | IterableDataset:
        data_files = {"train": [glob.escape(os.path.abspath(file)) for file in files]}
        with reasons(name):
            if kind == "json" and findings["times"]:  # in one piece, or those of a later part are cast from times to text
                options["chunksize"] = max(map(os.path.getsize, files)) + 1
            found = datasets.load_dataset(kind, data_files=data_files, split="train", streaming=streaming, **options)
            # Arrow makes times of a column in which every text is a date; as Json it stays what it is.
            if kind == "json" and found.features and (kept := _without_times(found.features)) != found.features:
                options["features"] = Features(kept)
                found = datasets.load_dataset(kind, data_files=data_files, split="train", streaming=streaming, **options)
            return found

    if kind == "parquet":
        return read(_check_parquet(name, files)), []
    findings = _findings(files, kind)
    lines = [f"{file} {where}: {reason}" for file, where, reason in findings["bad"]]
    good = [file for file in files if findings["rows"][file]]
    if lines and on_bad_row == "error":
        _, where, reason = findings["bad"][0]
        utf8 = "convert the file, for instance iconv -f latin1 -t utf-8"
        fix = utf8 if reason.endswith("not UTF-8") else f"fix the {where.split()[0]}"
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        raise one_line(f"{lines[0]}: {fix}, or --on_bad_row skip{more}")
    if not good:
        if lines:
            raise one_line(f"{lines[0]}: none of the {len(lines)} rows of {name} can be used")
        raise one_line(
            f"{name} has no rows" + (", only a header line" if kind == "csv" and os.path.getsize(files[0]) else "")
        )
    # By default pandas guesses the types of a CSV anew every 10000 lines, and '007' becomes '7' in a column of text.
    # A CSV has text only: 'None' and 'NA' are words, and 0 may be an answer.
    options = {}
    if kind == "json" and not streaming:  # parsing takes a dozen times the memory of what is parsed at once
        options = {"chunksize": SMALL_PART}
    if kind == "csv":
        features = Features({name: Value("string") for name in _named(_csv_columns(good[0]))})
        options = {"chunksize": None, "features": features, "keep_default_na": False, "na_values": [""]}
    try:
        # `datasets` would round the numbers of a JSON list to ten decimals.
        rewrite = lines or any(_first_byte(file) == b"[" for file in good if kind == "json")
        rewrite = rewrite or (findings["times"] and any(file.endswith(".gz") for file in good))  # to know its size
        return read([_joined(files, kind, findings)] if rewrite else good, **options), lines
    except ValueError:  # rows that are fine, but whose types or columns differ from those that were read first
        file = _joined(files, kind, findings)
        if kind == "csv":
            return read([file], **options), lines
        return read([file], chunksize=os.path.getsize(file) + 1), lines


def _without_times(feature):
    if isinstance(feature, dict):
        return {name: _without_times(below) for name, below in feature.items()}
    if isinstance(feature, datasets.List):
        return datasets.List(_without_times(feature.feature))
    return datasets.Json() if isinstance(feature, Value) and feature.dtype.startswith("timestamp") else feature


def _check_parquet(name: str, files: list[str]) -> list[str]:
    """The parquet files that have rows."""
    schemas, full = {}, []
    for file in files:
        try:
            metadata = pq.read_metadata(file)
            schemas[file] = {field.name: field.type for field in metadata.schema.to_arrow_schema()}
        except (ValueError, OSError) as error:
            raise one_line(
                f"{file} is not a parquet file or is truncated ({reason_of(error)}): copy or write it again"
            ) from None
        full += [file] if metadata.num_rows else []
    if not full:
        raise one_line(f"{name} has no rows")
    first = schemas[full[0]]
    for file in full:
        if schemas[file].keys() != first.keys():
            raise one_line(_other_columns(file, schemas[file], full[0], first))
        for column, type_ in schemas[file].items():
            if {"string", "large_string"} & {str(type_), str(first[column])} and not _alike(type_, first[column]):
                raise one_line(
                    f"{file}: column {column!r} is {type_}, and in {full[0]} it is {first[column]}: write both as one"
                )
    return full


def _alike(one, other) -> bool:
    return len({str(type_).removeprefix("large_") for type_ in (one, other)} - {"null"}) <= 1


def _other_columns(file: str, columns, first: str, expected) -> str:
    return (
        f"{file} has the columns {', '.join(columns)}, and {first} has {', '.join(expected)}: "
        "give all files of one split the same columns"
    )


def _cache_file(files: list[str], kind: str, suffix: str) -> Path:
    """A place in the cache of `datasets` that belongs to these files as long as their names and contents are the same."""
    digest = xxhash.xxh3_128(f"2 {kind}".encode())  # 2: raise it when the checks change
    for file in files:
        digest.update(f"{file} {os.path.getsize(file)} ".encode())
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return Path(datasets.config.HF_DATASETS_CACHE) / "checked" / f"{digest.hexdigest()}{suffix}"


@contextlib.contextmanager
def _written(path: Path):
    """A file that is at `path` when it is complete, whichever process writes it first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, delete=False) as stream:
        try:
            yield stream
        except BaseException:
            os.unlink(stream.name)
            raise
    os.replace(stream.name, path)


def _findings(files: list[str], kind: str) -> dict:
    """`{"rows": {file: good rows}, "bad": [[file, where, reason], …], "times": any text like one}`, from the cache."""
    try:
        cached = _cache_file(files, kind, ".findings.json")
        if cached.is_file():
            return json.loads(cached.read_text(encoding="utf-8"))
        findings = _scan(files, kind)
    except (OSError, EOFError, zlib.error) as error:
        raise one_line(f"{' '.join(files[:3])} cannot be read: {error}") from None
    with _written(cached) as stream:
        stream.write(json.dumps(findings).encode())
    return findings


def _joined(files: list[str], kind: str, findings: dict) -> str:
    """The good rows of all files as one file in the cache: JSON lines as they were written, CSV under the first header."""
    path = _cache_file(files, kind, ".jsonl" if kind == "json" else ".csv")
    bad = {(file, where) for file, where, _ in findings["bad"]}
    if path.is_file():
        return str(path)
    with _written(path) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8", newline="", write_through=True)
        header = _csv_columns(files[0]) if kind == "csv" else []
        if kind == "csv":
            csv.writer(text).writerow(header)
        for file in files:
            for where, raw, value, _ in _rows(file, kind):
                if (file, where) in bad:
                    continue
                if kind == "csv":
                    csv.writer(text).writerow([value[column] for column in _named(header)])
                else:
                    stream.write(raw + b"\n")
        text.detach()
    return str(path)


def csv_hint(columns: list[str]) -> str:
    """A question to add to a message about missing columns, if the names look like the first row of data."""

    def looks_like_data(name: str) -> bool:
        return (
            (" " in name and len(name) > 20)
            or number_in(name) is not None
            or re.fullmatch(r"Unnamed: \d+", name) is not None
        )

    # pandas writes a second column `a` as `a.1`.
    repeated = any(re.sub(r"\.\d+$", "", name) in columns for name in columns if re.search(r"\.\d+$", name))
    doubtful = repeated or len(set(columns)) < len(columns) or any(looks_like_data(name) for name in columns)
    return " (is the first line of the CSV a header?)" if doubtful else ""


# ---- rows of a file -----------------------------------------------------------------------------------------------------


def _scan(files: list[str], kind: str) -> dict:
    rows, bad, seen = dict.fromkeys(files, 0), {}, _Seen()
    for file in files:
        if kind == "csv" and sorted(_csv_columns(file)) != sorted(_csv_columns(files[0])):
            raise one_line(_other_columns(file, _csv_columns(file), files[0], _csv_columns(files[0])))
        for where, _, value, reason in _rows(file, kind):
            if reason is not None:
                bad[file, where] = reason
            else:
                rows[file] += 1
                if kind == "json":
                    seen.add(value)
    if seen.is_mixed():
        for file in files:
            for where, _, value, reason in _rows(file, kind):
                reason = seen.deviation(value) if reason is None else None
                if reason is not None:
                    bad[file, where] = reason
                    rows[file] -= 1
    order = sorted(bad, key=lambda place: (files.index(place[0]), int(place[1].split()[1])))
    return {"rows": rows, "bad": [[*place, bad[place]] for place in order], "times": seen.times()}


KIND_WORDS = {bool: "true or false", str: "text", list: "a list", dict: "an object", float: "a number"}


class _Seen:
    """Which kinds of values were seen at a place of the rows, and below it."""

    def __init__(self):
        self.kinds, self.below = collections.Counter(), {}
        self.keys = None  # those of the first object
        self.free = False  # objects with differing keys, which `datasets` stores as they are
        self.time = False  # a text that Arrow may take for a time

    @staticmethod
    def kind(value) -> type:
        return float if type(value) is int else type(value)

    def add(self, value, is_row: bool = True) -> None:
        if value is None:
            return
        self.kinds[self.kind(value)] += 1
        if isinstance(value, str):
            self.time = self.time or (value[4:5] == "-" and value[:4].isdigit())
        if isinstance(value, dict) and not is_row:
            self.keys = set(value) if self.keys is None else self.keys
            self.free = self.free or self.keys != value.keys()
        if isinstance(value, dict | list) and not self.free:
            for key, item in value.items() if isinstance(value, dict) else ((0, item) for item in value):
                self.below.setdefault(key, _Seen()).add(item, is_row=False)

    def is_mixed(self) -> bool:
        return len(self.kinds) > 1 or (not self.free and any(place.is_mixed() for place in self.below.values()))

    def times(self) -> bool:
        return self.time or any(place.times() for place in self.below.values())

    def deviation(self, value, label: str = "") -> str | None:
        """The first value that is not of the kind that most are, in words."""
        if value is None:
            return None
        usual = max(self.kinds, key=self.kinds.get)
        if self.kind(value) is not usual:
            what = {float: f"the number {value}", bool: str(value).lower(), str: f"the text {str(value)[:30]!r}"}
            found = what.get(self.kind(value), KIND_WORDS[self.kind(value)])
            return f"column {label!r} has {found} where other lines have {KIND_WORDS[usual]}"
        if isinstance(value, dict | list) and not self.free:
            for key, item in value.items() if isinstance(value, dict) else ((0, item) for item in value):
                step = "[]" if isinstance(value, list) else f".{key}" if label else key
                if (reason := self.below[key].deviation(item, label + step)) is not None:
                    return reason
        return None


def _open(file: str):
    stream = gzip.open(file, "rb") if file.endswith(".gz") else open(file, "rb")
    start = stream.read(3)
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        stream.close()
        raise one_line(f"{file} is UTF-16: convert the file, for instance iconv -f utf-16 -t utf-8")
    stream.seek(3 if start == codecs.BOM_UTF8 else 0)
    return stream


def _first_byte(file: str) -> bytes:
    with _open(file) as stream:
        return stream.read(4096).lstrip()[:1]


def _rows(file: str, kind: str) -> Iterator[tuple[str, bytes, dict | None, str | None]]:
    """Place, text, content and mistake of every row of a JSON or CSV file; the content is None if there is a mistake."""
    return _csv_rows(file) if kind == "csv" else _json_rows(file)


def plain_rows(file: str, kind: str) -> Iterator[tuple[str, dict]]:
    if kind != "parquet":
        yield from ((where, value) for where, _, value, reason in _rows(file, kind) if reason is None)
        return
    number = 0
    for batch in pq.ParquetFile(file).iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield f"row {number}", row


def _json_rows(file: str) -> Iterator[tuple[str, bytes, dict | None, str | None]]:
    start = _first_byte(file)
    is_json = file.removesuffix(".gz").endswith(".json")
    if start == b"[":
        try:
            elements = _json_list(file)
        except ValueError:
            if is_json:
                raise
            elements = None  # a first line that is a list, among lines that are objects
        if elements is not None:
            if elements and all(isinstance(element, str) for element in elements):  # `datasets` reads these as text
                elements = [{"text": element} for element in elements]
            for number, element in enumerate(elements, 1):
                raw = json.dumps(element).encode()
                yield (f"element {number}", raw, *_checked(element, raw))
            return
    if start == b"{" and is_json:
        _refuse_object(file)
    with _open(file) as stream:
        for number, raw in enumerate(stream, 1):
            if raw.strip():
                yield (f"line {number}", raw.strip(), *_parsed(raw.rstrip()))


def _parsed(raw: bytes) -> tuple[dict | None, str | None]:
    try:
        return _checked(json.loads(raw.decode(), object_pairs_hook=unique_keys), raw)
    except UnicodeDecodeError as error:
        return None, _not_utf8(raw, error)
    except json.JSONDecodeError as error:
        return None, f"not JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
    except (ValueError, RecursionError) as error:
        return None, str(error)


def _checked(value, raw: bytes) -> tuple[dict | None, str | None]:
    if not isinstance(value, dict):
        found = "null" if value is None else KIND_WORDS[_Seen.kind(value)]
        return None, f'{found}, not an object such as {{"text": ...}}'
    if _depth(value) > MAX_DEPTH:
        return None, f"lists and objects in each other, more than {MAX_DEPTH} deep"
    if rb"\ud" in raw.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            return None, f"\\u{ord(error.object[error.start]):04x} is half of a character (a lone surrogate)"
    return value, None


def _depth(value) -> int:
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        level = [item for part in level for item in (part.values() if isinstance(part, dict) else part)]
        level, depth = [item for item in level if isinstance(item, dict | list)], depth + 1
    return depth


def unique_keys(pairs: list[tuple]) -> dict:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} is written twice")
    return content


def _not_utf8(raw: bytes, error: UnicodeDecodeError) -> str:
    return f"byte 0x{raw[error.start]:02x} at column {error.start + 1} is not UTF-8"


def _json_list(file: str) -> list:
    with _open(file) as stream:
        data = stream.read()
    try:
        return json.loads(data.decode(), object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise one_line(
            f"{file} line {line}: byte 0x{data[error.start]:02x} at column {column} is not UTF-8: convert the file, for "
            "instance iconv -f latin1 -t utf-8"
        ) from None
    except json.JSONDecodeError as error:
        raise one_line(
            f"{file} line {error.lineno}: not JSON ({error.msg} at column {error.colno}): fix it; bad rows can be skipped "
            "only in a file with one object per line"
        ) from None
    except (ValueError, RecursionError) as error:
        raise one_line(f"{file}: {error}") from None


def _refuse_object(file: str) -> None:
    """Raise for a file that is one object around the rows, or one spread over lines, which would load as one row."""
    with _open(file) as stream:
        lines = (line for line in stream if line.strip())
        content, _ = _parsed(next(lines))
        if content is not None and next(lines, None) is not None:
            return
    on_one_line = content is not None
    if not on_one_line:
        with _open(file) as stream:
            content, _ = _parsed(stream.read())
        if content is None:
            return
    if on_one_line and {"messages", "conversations", "prompt", "text"} & content.keys():
        return
    for key, value in content.items():
        if (
            isinstance(value, list)
            and value
            and all(isinstance(row, dict) and not {"role", "from"} & row.keys() for row in value)
        ):
            raise one_line(
                f"{file}: the top level is an object whose {key!r} holds the {len(value)} rows: save that list alone, for "
                f"instance jq .{key} {file} > rows.json"
            )
    if not on_one_line:
        raise one_line(
            f"{file}: the top level is one object, not rows: put them in a list, [{{...}}, {{...}}], or one on each line"
        )


def _csv_records(file: str) -> Iterator[tuple[str, list[str], str | None]]:
    """Place (its first line), fields and mistake of every record, the header first; blank lines are passed over."""
    read, mistake = [], None

    def lines(stream):
        nonlocal mistake
        for raw in stream:
            try:
                read.append(raw.decode())
            except UnicodeDecodeError as error:
                mistake = mistake or _not_utf8(raw, error)
                read.append(raw.decode(errors="replace"))
            yield read[-1]

    limit = csv.field_size_limit(2**31 - 1)
    try:
        with _open(file) as stream:
            reader, line = csv.reader(lines(stream)), 1
            for values in reader:
                text = "".join(read)
                if text.count('"') % 2 and _is_unclosed(text):
                    raise one_line(
                        f'{file} line {line}: a quote is opened and never closed: close it, or write "" for a quote'
                    )
                if values:
                    yield f"line {line}", values, mistake
                read.clear()
                line, mistake = reader.line_num + 1, None
    except csv.Error as error:
        raise one_line(f"{file} line {line}: {error}") from None
    finally:
        csv.field_size_limit(limit)


def _is_unclosed(text: str) -> bool:
    try:
        list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        return "unexpected end" in str(error)
    return False


def _named(header: list[str]) -> list[str]:
    """Column names as pandas gives them: the second `a` is `a.1`, and a nameless one `Unnamed: 3`."""
    header = [name or f"Unnamed: {position}" for position, name in enumerate(header)]
    return [f"{name}.{header[:i].count(name)}" if name in header[:i] else name for i, name in enumerate(header)]


def _csv_columns(file: str) -> list[str]:
    where, header, mistake = next(_csv_records(file), ("line 1", [], None))
    if mistake is not None:
        raise one_line(f"{file} {where}: {mistake}: convert the file, for instance iconv -f latin1 -t utf-8")
    return header


def _csv_rows(file: str) -> Iterator[tuple[str, bytes, dict | None, str | None]]:
    records = _csv_records(file)
    _, header, _ = next(records, ("", [], None))
    names = _named(header)
    for where, values, mistake in records:
        if mistake is None and len(values) != len(names):
            mistake = f"{len(values)} fields where the header has {len(names)}"
        yield where, b"", None if mistake else dict(zip(names, values, strict=True)), mistake


def number_in(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", text, re.I | re.A) else None


def comparable(value, is_csv: bool):
    if isinstance(value, dict):
        content = {key: comparable(item, is_csv) for key, item in value.items()}
        return {key: item for key, item in content.items() if item is not None}
    if isinstance(value, list):
        return [comparable(item, is_csv) for item in value]
    if is_csv:
        return value or None
    return value
