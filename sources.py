"""From names to data sets of raw rows: Hub ids, files, folders, `save_to_disk` folders, and mixtures of them.

Every mistake is one line that names the file, the line of the file and the fix. What is in a file is the subject of
row_files.py.
"""

import contextlib
import difflib
import glob
import json
import math
import os
import re
import zlib
from dataclasses import dataclass, field, fields
from pathlib import Path

import datasets
import yaml
from datasets import Dataset, IterableDataset, ReadInstruction, concatenate_datasets
from datasets.data_files import _get_data_files_patterns, resolve_pattern, sanitize_patterns
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCard

from row_files import (
    KINDS,
    comparable,
    kind_of,
    load_files,
    number_in,
    one_line,
    plain_rows,
    reason_of,
    reasons,
    unique_keys,
)


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
        raise one_line(f"--on_bad_row {on_bad_row!r} is neither error nor skip")
    if source.max_samples is not None and source.max_samples < 1:
        raise one_line(f"max_samples {source.max_samples} of {source.name} must be at least 1")
    names = _split_parts(source.split)
    if streaming and names != [source.split]:
        raise one_line(
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
            raise one_line(f"{source.name} has no split {missing[0]!r}: it has {', '.join(found)}{why}")
        if kind == "disk":
            parts = {name: _load_saved(source.name, found[name]) for name in dict.fromkeys(names)}
        else:
            loaded = {
                name: load_files(source.name, kind, found[name], on_bad_row, streaming) for name in dict.fromkeys(names)
            }
            parts = {name: part for name, (part, _) in loaded.items()}
            skipped = [line for _, lines in loaded.values() for line in lines]
        dataset = parts[names[0]] if streaming else _select(source, parts)
        if streaming and isinstance(dataset, Dataset) and len(dataset):
            dataset = dataset.to_iterable_dataset()
    if isinstance(dataset, IterableDataset):
        if source.max_samples is not None:
            dataset = dataset.take(source.max_samples)
        with reasons(source.name):
            empty = next(iter(dataset.take(1)), None) is None
    else:
        empty = len(dataset) == 0
        if source.max_samples is not None:
            dataset = dataset.take(source.max_samples)
    if empty:
        raise one_line(f"split {source.split!r} of {source.name} has no rows")
    return Loaded(source, dataset, skipped)


def split_names(splits: str) -> list[str]:
    """The one or two splits, or expressions (`train[:10%]`), of a comma list; the second one is evaluated on."""
    names = [name.strip() for name in splits.split(",") if name.strip()]
    if not 1 <= len(names) <= 2:
        raise one_line(f"--splits {splits!r} must name one split to train on and at most one to evaluate on: train,test")
    for name in names:
        _split_parts(name)
    return names


def split_off(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split rows at random into those to train on and the `fraction` to evaluate on, at least one row each."""
    if not 0 < fraction < 1:
        raise one_line(f"--eval_fraction {fraction} must lie between 0 and 1: 0.05 evaluates on every twentieth row")
    if math.ceil(fraction * len(dataset)) >= len(dataset):
        raise one_line(f"--eval_fraction {fraction} of {len(dataset)} rows leaves none to train on: lower it or add rows")
    halves = dataset.train_test_split(test_size=fraction, seed=seed)
    return halves["train"], halves["test"]


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
    wanted = comparable(example, kind == "csv")
    for file in (file for name in names for file in found.get(name, [])):
        # What follows an unreadable place cannot be searched.
        with contextlib.suppress(ValueError, OSError, EOFError, zlib.error):
            for where, row in plain_rows(file, kind):
                if comparable(row, kind == "csv") == wanted:
                    return f"{file} {where}"
    return None


# ---- finding ------------------------------------------------------------------------------------------------------------


def _split_parts(split: str) -> list[str]:
    """The names in a split expression, checked."""
    try:
        ReadInstruction.from_spec(split)
    except ValueError:
        raise one_line(
            f"split {split!r} is not a split or a part of one: write for instance train, train[:500], train[10%:20%] or "
            "train+validation"
        ) from None
    return [re.split(r"[\[(]", part)[0].strip() for part in split.split("+")]


def _select(source: Source, parts: dict[str, Dataset]) -> Dataset:
    with reasons(f"{source.name} split {source.split}"):
        sizes = {name: len(part) for name, part in parts.items()}
        picked = ReadInstruction.from_spec(source.split).to_absolute(sizes)
        pieces = [
            parts[piece.splitname]
            if (piece.from_, piece.to) == (0, sizes[piece.splitname])
            else parts[piece.splitname].select(range(piece.from_, piece.to) if piece.from_ < piece.to else [])
            for piece in picked
        ]
        return pieces[0] if len(pieces) == 1 else concatenate_datasets(pieces)


def _find(source: Source) -> tuple[str, dict]:
    """The kind of a source ("hub", "disk", or that of its files) and what it has, by split: a folder or files."""
    name, path = source.name, Path(source.name).expanduser()
    pattern = glob.has_magic(name) and not path.exists()
    if source.config is not None and (path.exists() or pattern):
        raise one_line(f"--dataset_config_name {source.config} is for Hub data sets, and {name} is a local one: drop it")
    if "://" in name:
        raise one_line(f"{name} is a URL: download it and name the file, or name the Hub id alone")
    if not name.strip() or (not path.exists() and not pattern):
        if not name.strip() or Path(name).suffix in (*KINDS, ".gz") or name[:1] in "./~" or name.count("/") > 1:
            raise one_line(f"{name!r} does not exist: name a file, a folder, a pattern in quotes or a Hub id")
        if name in _PACKAGED_DATASETS_MODULES:  # `datasets` would read whatever files are in the current directory
            raise one_line(f"{name!r} is a file format, not a data set: name the file, the folder or a Hub id")
        return "hub", {}
    accepted = f"is not one of {', '.join(KINDS)} (.gz of all but parquet)"
    if path.is_file():
        if kind_of(path.name) is None:
            raise one_line(f"{name}: a {''.join(path.suffixes[-2:]) or 'nameless'} file {accepted}")
        found = {"train": [str(path)]}
    elif pattern:
        every = sorted(file for file in glob.glob(str(path), recursive=True) if os.path.isfile(file))
        found = {"train": [file for file in every if kind_of(file)]}
        if not every:
            raise one_line(f"{name} matches no file")
        if not found["train"]:
            raise one_line(f"{name} matches {every[0]} and others like it, which {accepted}")
    else:
        if not os.access(path, os.R_OK | os.X_OK):
            raise one_line(f"{name} cannot be read: permission denied (chmod +rx {name})")
        if (path / "state.json").is_file():
            return "disk", {"train": path}
        if (path / "dataset_dict.json").is_file():
            with reasons(name):
                return "disk", {
                    split: path / split for split in json.loads((path / "dataset_dict.json").read_text())["splits"]
                }
        found = _folder(name, path)
    files = [file for group in found.values() for file in group]
    by_kind = {kind_of(file): file for file in reversed(files)}
    if len(by_kind) > 1:
        seen = " and ".join(f"{kind} ({by_kind[kind]})" for kind in sorted(by_kind))
        raise one_line(f"{name} mixes files of the kinds {seen}: name those of one kind, for instance '{name}/*.jsonl'")
    for file in files:
        try:
            open(file, "rb").close()
        except OSError as error:
            raise one_line(f"{file} cannot be read: {error.strerror} (chmod +r {file})") from None
    return kind_of(files[0]), found


def _folder(name: str, path: Path) -> dict[str, list[str]]:
    """The data files of a folder by split, as `load_dataset(folder)` finds them, whatever else lies there."""
    base = path.resolve().as_posix()

    def resolve(pattern: str) -> list[str]:
        every = resolve_pattern(pattern, glob.escape(base), allowed_extensions=list(KINDS))
        found = [str(path / os.path.relpath(file, base)) for file in every if kind_of(file)]
        if not found:
            raise FileNotFoundError(pattern)
        return sorted(found)

    card = path / "README.md"
    with reasons(name):
        configs = (
            MetadataConfigs.from_dataset_card_data(DatasetCard.load(card).data) if card.is_file() else MetadataConfigs()
        )
    chosen = configs.get_default_config_name() or next(iter(configs), None)
    if len(configs) > 1 and configs.get_default_config_name() is None:
        raise one_line(
            f"{name} holds the configurations {', '.join(configs)}: name the files of one, '{name}/{chosen}/*.parquet'"
        )
    for file in path.rglob("*"):
        if kind_of(file.name) and file.is_symlink() and not file.exists():
            raise one_line(f"{file} is a link to {os.readlink(file)}, which does not exist: mend or remove it")
    try:
        every = resolve("**")
        # The README.md of a copied Hub data set says which files are which split.
        listed = configs[chosen].get("data_files") if chosen else None
        patterns = sanitize_patterns(listed) if listed else _get_data_files_patterns(resolve)
    except FileNotFoundError:
        raise one_line(f"{name} holds no {', '.join(KINDS)} file") from None
    found = {}
    for split, split_patterns in patterns.items():
        for pattern in split_patterns:
            with contextlib.suppress(FileNotFoundError):
                found[str(split)] = sorted({*found.get(str(split), []), *resolve(pattern)})
    # `datasets` would take the most frequent kind and drop the others without a word; the caller names both.
    return {"train": every} if len({kind_of(file) for file in every}) > 1 else found


def _load_hub(source: Source, streaming: bool) -> Dataset | IterableDataset:
    try:
        return datasets.load_dataset(source.name, source.config, split=source.split, streaming=streaming)
    except Exception as error:
        if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in ("httpx", "httpcore", "requests"):
            raise one_line(
                f"--dataset_name {source.name} is neither a local path nor a Hub data set that can be reached: "
                f"{reason_of(error)}"
            ) from None
        raise one_line(f"{source.name} split {source.split}: {reason_of(error)}") from None


def _load_saved(name: str, path: Path) -> Dataset:
    with reasons(name):
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if not state["_data_files"]:  # `load_from_disk` fails on a data set that was saved with no rows
            return Dataset.from_dict({})
        return datasets.load_from_disk(str(path))


# ---- mixtures -----------------------------------------------------------------------------------------------------------


def read_mixture(value: str) -> Mixture:
    """Read a mixture: the path of a .yaml, .yml or .json file, or the JSON text of the same content.

    The content is `train` (a list of entries with the fields of `Source`; a bare list means this), `eval` (the same,
    optional) and `stop` (first_exhausted or all_exhausted). Paths are relative to the current directory.

    Raises:
        ValueError: one line that names the file, the number of the entry and the key.
    """
    from arguments import UniqueKeyLoader  # imports TRL, which takes seconds and which a single data set does not need

    is_text = value.lstrip()[:1] in ("{", "[")
    where = "mixture" if is_text else f"mixture {value}"
    try:
        text = value if is_text else Path(value).expanduser().read_text(encoding="utf-8-sig")
        is_json = is_text or value.endswith(".json")
        content = json.loads(text, object_pairs_hook=unique_keys) if is_json else yaml.load(text, Loader=UniqueKeyLoader)
    except FileNotFoundError:
        raise one_line(f"{where} does not exist: give the path of a .yaml or .json file, or JSON text") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise one_line(f"{where} cannot be read: {error}") from None
    content = {"train": content} if isinstance(content, list) else content
    if not isinstance(content, dict):
        raise one_line(f"{where} must hold train: with a list of entries, not {content!r:.40}")
    _refuse_unknown(where, content, ["train", "eval", "stop"])
    if not content.get("train"):
        raise one_line(f"{where} lacks train: a list of entries such as - name: data/mine.jsonl")
    lists = {}
    for key in ("train", "eval"):
        entries = content.get(key) or []
        if not isinstance(entries, list):
            raise one_line(f"{where}: {key} must be a list of entries such as - name: data/mine.jsonl")
        lists[key] = [_entry(f"{where} {key} entry {number}", entry) for number, entry in enumerate(entries, 1)]
    weighed = [source.weight is not None for source in lists["train"]]
    if any(weighed) and not all(weighed):
        number = weighed.index(False) + 1
        raise one_line(
            f"{where} train entry {number} has no weight, and others have one: give every entry a weight, or none"
        )
    for number, source in enumerate(lists["eval"], 1):
        if source.weight is not None:
            raise one_line(f"{where} eval entry {number}: weight has no effect in an evaluation: drop it")
    stop = content.get("stop", "first_exhausted")
    if stop not in ("first_exhausted", "all_exhausted"):
        raise one_line(f"{where}: stop: {stop} is neither first_exhausted nor all_exhausted")
    if "stop" in content and not any(weighed):
        raise one_line(f"{where}: stop has no effect without weights: give every entry one, or drop it")
    return Mixture(lists["train"], lists["eval"], stop)


def _refuse_unknown(where: str, content: dict, known: list[str]) -> None:
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            raise one_line(
                f"{where}: unknown key {key!r}; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}")
            )


def _entry(where: str, entry) -> Source:
    if not isinstance(entry, dict):
        raise one_line(f"{where} is {entry!r:.40}: write - name: data/mine.jsonl")
    _refuse_unknown(where, entry, [item.name for item in fields(Source)])
    values = {key: value for key, value in entry.items() if value is not None}
    for key, value in values.items():
        if key == "weight":
            value = values[key] = number_in(value) if isinstance(value, str) else value  # YAML reads 1e-1 as text
            good, wanted = type(value) in (int, float) and 0 < value < math.inf, "a number above 0"
        elif key == "max_samples":
            good, wanted = type(value) is int and value >= 1, "a whole number of at least 1"
        elif key == "columns":
            good = isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)
            wanted = "a mapping such as {messages: chat}"
        else:
            good, wanted = isinstance(value, str) and value.strip() != "", "text"
        if not good:
            raise one_line(f"{where}: {key}: {value!r:.60} must be {wanted}")
    if "name" not in values:
        raise one_line(f"{where} has no name: write name: data/mine.jsonl or name: a Hub id")
    if values["name"].endswith((".yaml", ".yml")):
        raise one_line(f"{where}: {values['name']} is another mixture: copy its entries into this one")
    try:
        _split_parts(values.get("split", "train"))
    except ValueError as error:
        raise one_line(f"{where}: {error}") from None
    return Source(**values)
