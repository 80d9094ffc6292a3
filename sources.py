"""From names to data sets of raw rows: Hub ids, files, folders, `save_to_disk` folders, and mixtures of them.

`datasets` does the reading. What it cannot say or would get wrong is added here: every mistake is one line that names the
file, the line of the file and the fix, and no value is changed on the way. Left to itself, `datasets` reads a column of
'a', '42' and 42 as 'a', 42 and 42, turns the numbers of a later file into text (or '007' into 7), makes an empty row of a
line `null`, and shifts the columns of a CSV whose first row is too long. So JSON and CSV files are read through once before
they are loaded, and the findings are kept in the cache folder of `datasets` by the content of the files:

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
import difflib
import glob
import gzip
import io
import json
import logging
import math
import os
import re
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import xxhash
import yaml
from datasets import Dataset, Features, IterableDataset, ReadInstruction, Value, concatenate_datasets
from datasets.data_files import _get_data_files_patterns, resolve_pattern, sanitize_patterns
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCard
from pandas._libs.parsers import STR_NA_VALUES

KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class Source:
    """Where rows come from, and which of them."""

    name: str  # Hub id, file, folder, glob ("data/*.jsonl") or `save_to_disk` folder
    split: str = "train"  # a split or an expression: test_sft[:500], train[10%:20%], train+validation
    config: str | None = None  # configuration of a Hub data set
    weight: float | None = None  # share in a mixture
    max_samples: int | None = None  # the first N rows
    format: str | None = None
    columns: dict | None = None
    text_field: str | None = None


@dataclass
class Loaded:
    """The rows of a source; `skipped` has one line, with file and line number, for each row that was left out."""

    source: Source
    dataset: Dataset | IterableDataset
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Mixture:
    """What is trained on and evaluated on, and when the epoch of a mixture ends."""

    train: list[Source]
    evaluation: list[Source] = field(default_factory=list)
    stop: str = "first_exhausted"


def load(source: Source, *, on_bad_row: str = "error", streaming: bool = False) -> Loaded:
    """Load the raw rows of a source.

    Args:
        on_bad_row: "error", or "skip" to leave out rows of JSON and CSV files that cannot be used.
        streaming: give an `IterableDataset`. JSON and CSV files are still checked first; columns that begin later than in
            the first 10 MB of a file cannot be streamed.

    Raises:
        ValueError: one line; no such file, data set or split, a file or row that cannot be read, no rows.
    """
    if on_bad_row not in ("error", "skip"):
        raise _error(f"--on_bad_row {on_bad_row!r} is neither error nor skip")
    if source.max_samples is not None and source.max_samples < 1:
        raise _error(f"max_samples {source.max_samples} of {source.name} must be at least 1")
    names = _split_parts(source.split)
    if streaming and names != [source.split]:
        raise _error(
            f"split {source.split!r} of {source.name} is an expression, which cannot be streamed: name one split, "
            f"--splits {names[0]}, and limit it with --max_samples"
        )
    kind, found = _find(source)
    skipped = []
    if kind == "hub":
        dataset = _load_hub(source, streaming)
    else:
        missing = [name for name in names if name not in found]
        if missing:
            why = "" if Path(source.name).expanduser().is_dir() else " (a single file or pattern is the split train)"
            raise _error(f"{source.name} has no split {missing[0]!r}: it has {', '.join(found)}{why}")
        if kind == "disk":
            parts = {name: _load_saved(source.name, found[name]) for name in dict.fromkeys(names)}
        else:
            loaded = {
                name: _load_files(source.name, kind, found[name], on_bad_row, streaming) for name in dict.fromkeys(names)
            }
            parts = {name: part for name, (part, _) in loaded.items()}
            skipped = [line for _, lines in loaded.values() for line in lines]
        dataset = parts[names[0]] if streaming else _select(source, parts)
        if streaming and isinstance(dataset, Dataset) and len(dataset):
            dataset = dataset.to_iterable_dataset()
    if isinstance(dataset, IterableDataset):
        if source.max_samples is not None:
            dataset = dataset.take(source.max_samples)
        with _reasons(source.name):
            empty = next(iter(dataset.take(1)), None) is None
    else:
        empty = len(dataset) == 0
        if source.max_samples is not None:
            dataset = dataset.select(range(min(source.max_samples, len(dataset))))
    if empty:
        raise _error(f"split {source.split!r} of {source.name} has no rows")
    return Loaded(source, dataset, skipped)


def split_names(splits: str) -> list[str]:
    """The one or two splits, or expressions (`train[:10%]`), of a comma list; the second one is evaluated on."""
    names = [name.strip() for name in splits.split(",") if name.strip()]
    if not 1 <= len(names) <= 2:
        raise _error(f"--splits {splits!r} must name one split to train on and at most one to evaluate on: train,test")
    for name in names:
        _split_parts(name)
    return names


def split_off(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split rows at random into those to train on and the `fraction` to evaluate on, at least one row each."""
    if not 0 < fraction < 1:
        raise _error(f"--eval_fraction {fraction} must lie between 0 and 1: 0.05 evaluates on every twentieth row")
    if math.ceil(fraction * len(dataset)) >= len(dataset):
        raise _error(f"--eval_fraction {fraction} of {len(dataset)} rows leaves none to train on: lower it or add rows")
    halves = dataset.train_test_split(test_size=fraction, seed=seed)
    return halves["train"], halves["test"]


def csv_hint(columns: list[str]) -> str:
    """A question to add to a message about missing columns, if the names look like the first row of data."""

    def looks_like_data(name: str) -> bool:
        return (
            (" " in name and len(name) > 20) or _number(name) is not None or re.fullmatch(r"Unnamed: \d+", name) is not None
        )

    # pandas writes a second column `a` as `a.1`.
    repeated = any(re.sub(r"\.\d+$", "", name) in columns for name in columns if re.search(r"\.\d+$", name))
    doubtful = repeated or len(set(columns)) < len(columns) or any(looks_like_data(name) for name in columns)
    return " (is the first line of the CSV a header?)" if doubtful else ""


def locate(source: Source, example: dict) -> str | None:
    """Where a row comes from: `data/train.jsonl line 8`, or element (JSON list) or row (parquet); None if it is not found.

    Goes by content, so the data set may have been sliced or shuffled. Missing keys and null are equal, since Arrow adds
    nulls; of equal rows the first is named.
    """
    try:
        kind, found = _find(source)
        names = dict.fromkeys(_split_parts(source.split))
    except ValueError:
        return None
    if kind in ("hub", "disk"):
        return None
    wanted = _comparable(example, kind == "csv")
    for file in (file for name in names for file in found.get(name, [])):
        with contextlib.suppress(
            ValueError, OSError, EOFError, zlib.error
        ):  # what follows an unreadable place cannot be searched
            for where, row in _plain_rows(file, kind):
                if _comparable(row, kind == "csv") == wanted:
                    return f"{file} {where}"
    return None


# ---- finding ------------------------------------------------------------------------------------------------------------


def _error(message: str) -> ValueError:
    return ValueError(" ".join(message.split()))


def _reason(error: BaseException) -> str:
    """The first line of why `datasets` failed, without the wrapper that says only that it did."""
    cause = error
    while isinstance(cause, datasets.exceptions.DatasetGenerationError) and cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [type(cause).__name__]
    # "Config name is missing." and "Couldn't cast" say nothing without the line that follows.
    return " ".join(lines[:2] if len(lines[0]) < 30 else lines[:1])


@contextlib.contextmanager
def _reasons(name: str):
    """One line for whatever `datasets` raises, and no logging or traceback of its own."""
    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:  # a dozen types, for a file it cannot find, read, parse or join
        raise _error(f"{name}: {_reason(error)}") from None
    finally:
        logger.setLevel(level)


def _split_parts(split: str) -> list[str]:
    """The names in a split expression, checked."""
    try:
        ReadInstruction.from_spec(split)
    except ValueError:
        raise _error(
            f"split {split!r} is not a split or a part of one: write for instance train, train[:500], train[10%:20%] or "
            "train+validation"
        ) from None
    return [re.split(r"[\[(]", part)[0].strip() for part in split.split("+")]


def _select(source: Source, parts: dict[str, Dataset]) -> Dataset:
    with _reasons(f"{source.name} split {source.split}"):
        sizes = {name: len(part) for name, part in parts.items()}
        picked = ReadInstruction.from_spec(source.split).to_absolute(sizes)
        pieces = [
            parts[piece.splitname]
            if (piece.from_, piece.to) == (0, sizes[piece.splitname])
            else parts[piece.splitname].select(range(piece.from_, piece.to) if piece.from_ < piece.to else [])
            for piece in picked
        ]
        return pieces[0] if len(pieces) == 1 else concatenate_datasets(pieces)


def _kind(file: str) -> str | None:
    path = Path(file[:-3] if file.endswith(".gz") else file)
    kind = KINDS.get(path.suffix)
    return None if file.endswith(".gz") and kind == "parquet" else kind


def _find(source: Source) -> tuple[str, dict]:
    """The kind of a source ("hub", "disk", or that of its files) and what it has, by split: a folder or files."""
    name, path = source.name, Path(source.name).expanduser()
    pattern = glob.has_magic(name) and not path.exists()
    if source.config is not None and (path.exists() or pattern):
        raise _error(f"--dataset_config_name {source.config} is for Hub data sets, and {name} is a local one: drop it")
    if "://" in name:
        raise _error(f"{name} is a URL: download it and name the file, or name the Hub id alone")
    if not name.strip() or (not path.exists() and not pattern):
        if not name.strip() or Path(name).suffix in (*KINDS, ".gz") or name[:1] in "./~" or name.count("/") > 1:
            raise _error(f"{name!r} does not exist: name a file, a folder, a pattern in quotes or a Hub id")
        if name in _PACKAGED_DATASETS_MODULES:  # `datasets` would read whatever files are in the current directory
            raise _error(f"{name!r} is a file format, not a data set: name the file, the folder or a Hub id")
        return "hub", {}
    accepted = f"is not one of {', '.join(KINDS)} (.gz of all but parquet)"
    if path.is_file():
        if _kind(path.name) is None:
            raise _error(f"{name}: a {''.join(path.suffixes[-2:]) or 'nameless'} file {accepted}")
        found = {"train": [str(path)]}
    elif pattern:
        every = sorted(file for file in glob.glob(str(path), recursive=True) if os.path.isfile(file))
        found = {"train": [file for file in every if _kind(file)]}
        if not every:
            raise _error(f"{name} matches no file")
        if not found["train"]:
            raise _error(f"{name} matches {every[0]} and others like it, which {accepted}")
    else:
        if not os.access(path, os.R_OK | os.X_OK):
            raise _error(f"{name} cannot be read: permission denied (chmod +rx {name})")
        if (path / "state.json").is_file():
            return "disk", {"train": path}
        if (path / "dataset_dict.json").is_file():
            with _reasons(name):
                return "disk", {
                    split: path / split for split in json.loads((path / "dataset_dict.json").read_text())["splits"]
                }
        found = _folder(name, path)
    files = [file for group in found.values() for file in group]
    by_kind = {_kind(file): file for file in reversed(files)}
    if len(by_kind) > 1:
        seen = " and ".join(f"{kind} ({by_kind[kind]})" for kind in sorted(by_kind))
        raise _error(f"{name} mixes files of the kinds {seen}: name those of one kind, for instance '{name}/*.jsonl'")
    for file in files:
        try:
            open(file, "rb").close()
        except OSError as error:
            raise _error(f"{file} cannot be read: {error.strerror} (chmod +r {file})") from None
    return _kind(files[0]), found


def _folder(name: str, path: Path) -> dict[str, list[str]]:
    """The data files of a folder by split, as `load_dataset(folder)` finds them, whatever else lies there."""
    base = path.resolve().as_posix()

    def resolve(pattern: str) -> list[str]:
        every = resolve_pattern(pattern, base, allowed_extensions=list(KINDS))
        found = [str(path / os.path.relpath(file, base)) for file in every if _kind(file)]
        if not found:
            raise FileNotFoundError(pattern)
        return sorted(found)

    card = path / "README.md"
    with _reasons(name):
        configs = (
            MetadataConfigs.from_dataset_card_data(DatasetCard.load(card).data) if card.is_file() else MetadataConfigs()
        )
    chosen = configs.get_default_config_name() or next(iter(configs), None)
    if len(configs) > 1 and configs.get_default_config_name() is None:
        raise _error(
            f"{name} holds the configurations {', '.join(configs)}: name the files of one, '{name}/{chosen}/*.parquet'"
        )
    try:
        every = resolve("**")
        # The README.md of a copied Hub data set says which files are which split.
        listed = configs[chosen].get("data_files") if chosen else None
        patterns = sanitize_patterns(listed) if listed else _get_data_files_patterns(resolve)
    except FileNotFoundError:
        raise _error(f"{name} holds no {', '.join(KINDS)} file") from None
    found = {}
    for split, split_patterns in patterns.items():
        for pattern in split_patterns:
            with contextlib.suppress(FileNotFoundError):
                found[str(split)] = sorted({*found.get(str(split), []), *resolve(pattern)})
    # `datasets` would take the most frequent kind and drop the others without a word; the caller names both.
    return {"train": every} if len({_kind(file) for file in every}) > 1 else found


def _load_hub(source: Source, streaming: bool) -> Dataset | IterableDataset:
    try:
        return datasets.load_dataset(source.name, source.config, split=source.split, streaming=streaming)
    except Exception as error:
        if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in ("httpx", "httpcore", "requests"):
            raise _error(
                f"{source.name} is neither a local path nor a Hub data set that can be reached: {_reason(error)}"
            ) from None
        raise _error(f"{source.name} split {source.split}: {_reason(error)}") from None


def _load_saved(name: str, path: Path) -> Dataset:
    with _reasons(name):
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if not state["_data_files"]:  # `load_from_disk` fails on a data set that was saved with no rows
            return Dataset.from_dict({})
        return datasets.load_from_disk(str(path))


# ---- loading files ------------------------------------------------------------------------------------------------------


def _load_files(
    name: str, kind: str, files: list[str], on_bad_row: str, streaming: bool
) -> tuple[Dataset | IterableDataset, list[str]]:
    """The rows of files that are one split, and a line for each row that was skipped."""

    def read(files: list[str], **options) -> Dataset | IterableDataset:
        data_files = {"train": [glob.escape(os.path.abspath(file)) for file in files]}
        with _reasons(name):
            return datasets.load_dataset(kind, data_files=data_files, split="train", streaming=streaming, **options)

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
        raise _error(f"{lines[0]}: {fix}, or --on_bad_row skip{more}")
    if not good:
        if lines:
            raise _error(f"{lines[0]}: none of the {len(lines)} rows of {name} can be used")
        raise _error(f"{name} has no rows" + (", only a header line" if kind == "csv" and os.path.getsize(files[0]) else ""))
    # By default pandas guesses the types of a CSV anew every 10000 lines, and '007' becomes '7' in a column of text.
    options = {"chunksize": None} if kind == "csv" else {}
    try:
        # `datasets` would round the numbers of a JSON list to ten decimals.
        rewrite = lines or any(_first_byte(file) == b"[" for file in good if kind == "json")
        return read([_joined(files, kind, findings)] if rewrite else good, **options), lines
    except ValueError:  # rows that are fine, but whose types or columns differ from those that were read first
        file = _joined(files, kind, findings)
        if kind == "csv":
            return read([file], chunksize=None, features=_csv_features(file)), lines
        return read([file], chunksize=os.path.getsize(file) + 1), lines


def _check_parquet(name: str, files: list[str]) -> list[str]:
    """The parquet files that have rows."""
    schemas, full = {}, []
    for file in files:
        try:
            metadata = pq.read_metadata(file)
            schemas[file] = {field.name: field.type for field in metadata.schema.to_arrow_schema()}
        except (ValueError, OSError) as error:
            raise _error(
                f"{file} is not a parquet file or is truncated ({_reason(error)}): copy or write it again"
            ) from None
        full += [file] if metadata.num_rows else []
    if not full:
        raise _error(f"{name} has no rows")
    first = schemas[full[0]]
    for file in full:
        if schemas[file].keys() != first.keys():
            raise _error(_other_columns(file, schemas[file], full[0], first))
        for column, type_ in schemas[file].items():
            if {"string", "large_string"} & {str(type_), str(first[column])} and not _alike(type_, first[column]):
                raise _error(
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
    digest = xxhash.xxh3_128(f"1 {kind}".encode())  # 1: raise it when the checks change
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
    """`{"rows": {file: number of good rows}, "bad": [[file, where, reason], …]}`, kept in the cache."""
    try:
        cached = _cache_file(files, kind, ".findings.json")
        if cached.is_file():
            return json.loads(cached.read_text(encoding="utf-8"))
        findings = _scan(files, kind)
    except (OSError, EOFError, zlib.error) as error:
        raise _error(f"{' '.join(files[:3])} cannot be read: {error}") from None
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


# ---- rows of a file -----------------------------------------------------------------------------------------------------


def _scan(files: list[str], kind: str) -> dict:
    rows, bad, seen = dict.fromkeys(files, 0), {}, _Seen()
    for file in files:
        if kind == "csv" and sorted(_csv_columns(file)) != sorted(_csv_columns(files[0])):
            raise _error(_other_columns(file, _csv_columns(file), files[0], _csv_columns(files[0])))
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
    return {"rows": rows, "bad": [[*place, bad[place]] for place in order]}


KIND_WORDS = {bool: "true or false", str: "text", list: "a list", dict: "an object", float: "a number"}


class _Seen:
    """Which kinds of values were seen at a place of the rows, and below it."""

    def __init__(self):
        self.kinds, self.below = collections.Counter(), {}
        self.keys = None  # those of the first object
        self.free = False  # objects with differing keys, which `datasets` stores as they are

    @staticmethod
    def kind(value) -> type:
        return float if type(value) is int else type(value)

    def add(self, value, is_row: bool = True) -> None:
        if value is None:
            return
        self.kinds[self.kind(value)] += 1
        if isinstance(value, dict) and not is_row:
            self.keys = set(value) if self.keys is None else self.keys
            self.free = self.free or self.keys != value.keys()
        if isinstance(value, dict | list) and not self.free:
            for key, item in value.items() if isinstance(value, dict) else ((0, item) for item in value):
                self.below.setdefault(key, _Seen()).add(item, is_row=False)

    def is_mixed(self) -> bool:
        return len(self.kinds) > 1 or (not self.free and any(place.is_mixed() for place in self.below.values()))

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
        raise _error(f"{file} is UTF-16: convert the file, for instance iconv -f utf-16 -t utf-8")
    stream.seek(3 if start == codecs.BOM_UTF8 else 0)
    return stream


def _first_byte(file: str) -> bytes:
    with _open(file) as stream:
        return stream.read(4096).lstrip()[:1]


def _rows(file: str, kind: str) -> Iterator[tuple[str, bytes, dict | None, str | None]]:
    """Place, text, content and mistake of every row of a JSON or CSV file; the content is None if there is a mistake."""
    return _csv_rows(file) if kind == "csv" else _json_rows(file)


def _plain_rows(file: str, kind: str) -> Iterator[tuple[str, dict]]:
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
        return _checked(json.loads(raw.decode(), object_pairs_hook=_unique), raw)
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
    if rb"\ud" in raw.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            return None, f"\\u{ord(error.object[error.start]):04x} is half of a character (a lone surrogate)"
    return value, None


def _unique(pairs: list[tuple]) -> dict:
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
        return json.loads(data.decode(), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise _error(
            f"{file} line {line}: byte 0x{data[error.start]:02x} at column {column} is not UTF-8: convert the file, for "
            "instance iconv -f latin1 -t utf-8"
        ) from None
    except json.JSONDecodeError as error:
        raise _error(
            f"{file} line {error.lineno}: not JSON ({error.msg} at column {error.colno}): fix it; bad rows can be skipped "
            "only in a file with one object per line"
        ) from None
    except (ValueError, RecursionError) as error:
        raise _error(f"{file}: {error}") from None


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
            raise _error(
                f"{file}: the top level is an object whose {key!r} holds the {len(value)} rows: save that list alone, for "
                f"instance jq .{key} {file} > rows.json"
            )
    if not on_one_line:
        raise _error(
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
                    raise _error(
                        f'{file} line {line}: a quote is opened and never closed: close it, or write "" for a quote'
                    )
                if values:
                    yield f"line {line}", values, mistake
                read.clear()
                line, mistake = reader.line_num + 1, None
    except csv.Error as error:
        raise _error(f"{file} line {line}: {error}") from None
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
        raise _error(f"{file} {where}: {mistake}: convert the file, for instance iconv -f latin1 -t utf-8")
    return header


def _csv_rows(file: str) -> Iterator[tuple[str, bytes, dict | None, str | None]]:
    records = _csv_records(file)
    _, header, _ = next(records, ("", [], None))
    names = _named(header)
    for where, values, mistake in records:
        if mistake is None and len(values) != len(names):
            mistake = f"{len(values)} fields where the header has {len(names)}"
        yield where, b"", None if mistake else dict(zip(names, values, strict=True)), mistake


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", text, re.I | re.A) else None


def _csv_features(file: str) -> Features:
    """Types as pandas finds them in a whole file: numbers where every value is one, text elsewhere."""
    types = {}
    for _, row in _plain_rows(file, "csv"):
        for name, text in row.items():
            missing, number = text in STR_NA_VALUES, _number(text)
            found = (
                "float64"
                if missing
                else "string"
                if number is None
                else "int64"
                if re.fullmatch(r"[+-]?\d{1,18}", text)
                else "float64"
            )
            types[name] = max(types.get(name, "int64"), found, key=["int64", "float64", "string"].index)
    return Features({name: Value(type_) for name, type_ in types.items()})


def _comparable(value, is_csv: bool):
    if isinstance(value, dict):
        content = {key: _comparable(item, is_csv) for key, item in value.items()}
        return {key: item for key, item in content.items() if item is not None}
    if isinstance(value, list):
        return [_comparable(item, is_csv) for item in value]
    if is_csv and value is not None:  # a CSV has text only; pandas made numbers and nulls of it
        text = str(value)
        return None if text in STR_NA_VALUES else text if _number(text) is None else _number(text)
    return value


# ---- mixtures -----------------------------------------------------------------------------------------------------------


def read_mixture(value: str) -> Mixture:
    """Read a mixture: the path of a .yaml, .yml or .json file, or the JSON text of the same content.

    The content is `train` (a list of entries with the fields of `Source`; a bare list means this), `eval` (the same,
    optional) and `stop` (first_exhausted or all_exhausted). Paths are relative to the current directory.

    Raises:
        ValueError: one line that names the file, the number of the entry and the key.
    """
    from arguments import _UniqueKeyLoader  # imports TRL, which takes seconds and which a single data set does not need

    is_text = value.lstrip()[:1] in ("{", "[")
    where = "mixture" if is_text else f"mixture {value}"
    try:
        text = value if is_text else Path(value).expanduser().read_text(encoding="utf-8-sig")
        is_json = is_text or value.endswith(".json")
        content = json.loads(text, object_pairs_hook=_unique) if is_json else yaml.load(text, Loader=_UniqueKeyLoader)
    except FileNotFoundError:
        raise _error(f"{where} does not exist: give the path of a .yaml or .json file, or JSON text") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _error(f"{where} cannot be read: {error}") from None
    content = {"train": content} if isinstance(content, list) else content
    if not isinstance(content, dict):
        raise _error(f"{where} must hold train: with a list of entries, not {content!r:.40}")
    _refuse_unknown(where, content, ["train", "eval", "stop"])
    if not content.get("train"):
        raise _error(f"{where} lacks train: a list of entries such as - name: data/mine.jsonl")
    lists = {}
    for key in ("train", "eval"):
        entries = content.get(key) or []
        if not isinstance(entries, list):
            raise _error(f"{where}: {key} must be a list of entries such as - name: data/mine.jsonl")
        lists[key] = [_entry(f"{where} {key} entry {number}", entry) for number, entry in enumerate(entries, 1)]
    weighed = [source.weight is not None for source in lists["train"]]
    if any(weighed) and not all(weighed):
        number = weighed.index(False) + 1
        raise _error(f"{where} train entry {number} has no weight, and others have one: give every entry a weight, or none")
    for number, source in enumerate(lists["eval"], 1):
        if source.weight is not None:
            raise _error(f"{where} eval entry {number}: weight has no effect in an evaluation: drop it")
    stop = content.get("stop", "first_exhausted")
    if stop not in ("first_exhausted", "all_exhausted"):
        raise _error(f"{where}: stop: {stop} is neither first_exhausted nor all_exhausted")
    return Mixture(lists["train"], lists["eval"], stop)


def _refuse_unknown(where: str, content: dict, known: list[str]) -> None:
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            raise _error(
                f"{where}: unknown key {key!r}; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}")
            )


def _entry(where: str, entry) -> Source:
    if not isinstance(entry, dict):
        raise _error(f"{where} is {entry!r:.40}: write - name: data/mine.jsonl")
    _refuse_unknown(where, entry, [item.name for item in fields(Source)])
    values = {key: value for key, value in entry.items() if value is not None}
    for key, value in values.items():
        if key == "weight":
            good, wanted = type(value) in (int, float) and 0 < value < math.inf, "a number above 0"
        elif key == "max_samples":
            good, wanted = type(value) is int and value >= 1, "a whole number of at least 1"
        elif key == "columns":
            good = isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)
            wanted = "a mapping such as {messages: chat}"
        else:
            good, wanted = isinstance(value, str) and value.strip() != "", "text"
        if not good:
            raise _error(f"{where}: {key}: {value!r:.60} must be {wanted}")
    if "name" not in values:
        raise _error(f"{where} has no name: write name: data/mine.jsonl or name: a Hub id")
    if values["name"].endswith((".yaml", ".yml")):
        raise _error(f"{where}: {values['name']} is another mixture: copy its entries into this one")
    try:
        _split_parts(values.get("split", "train"))
    except ValueError as error:
        raise _error(f"{where}: {error}") from None
    return Source(**values)
