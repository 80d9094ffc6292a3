"""The data of a run: loaded, tokenised once and cached, cut, mixed, packed, and described before the first step.

    sources.py   which rows there are              formats.py   what a row says
    encoding.py  its tokens and labels             data_report.py   what will be trained on

`prepare` puts them together. The data sets it returns have `input_ids` and `labels` (-100 where the loss does not look), and
`seq_lengths` where they are packed, so that nothing downstream guesses, cuts or masks.
"""

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from datasets import Dataset, Features, IterableDataset, List, Value, concatenate_datasets, interleave_datasets
from transformers import PreTrainedTokenizerBase
from trl import pack_dataset

import data_report
import encoding
import formats
import row_files
import sources
from encoding import IGNORE_INDEX
from errors import out_of_range, raise_first

REPORT_ROWS = 1000  # of a stream, that the report is about
TOKENS = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})
FACTS = Features(
    {**TOKENS}
    | {name: Value(kind) for name, kind in {"length": "int32", "supervised": "int32", "flags": "int32"}.items()}
    | {"digest": Value("uint64"), "problem": Value("string")}
)


RANGES = [  # (argument, what it must be, the test)
    ("max_samples", "at least 1", lambda v: v is None or v >= 1),
    ("max_eval_samples", "at least 1", lambda v: v is None or v >= 1),
    ("max_unsupervised", "a share between 0 and 1", lambda v: 0 <= v <= 1),
    ("shuffle_buffer", "at least 1 (which does not shuffle)", lambda v: v >= 1),
    ("dataset_num_proc", "at least 1", lambda v: v is None or v >= 1),
    ("eval_fraction", "between 0 and 1, such as 0.05", lambda v: v is None or 0 < v < 1),
]


class BadRow(ValueError):
    """(index in its data set, what is wrong with it)"""

    def __str__(self):  # a DataLoader's worker puts its traceback before it
        return super().__str__().rpartition("BadRow: ")[2].strip()


@dataclass
class Prepared:
    """What a run trains and evaluates on."""

    train: Dataset | IterableDataset
    evaluation: Dataset | None
    report: data_report.Report
    fingerprint: Callable[[], dict]  # computed when asked for, since one rank's is enough


@dataclass
class Part:
    """A source in one role, tokenised."""

    source: sources.Source
    role: str  # "train" or "eval"
    format: formats.Format
    tokens: Dataset  # with FACTS, one row for each row of the source
    skipped: list[str]
    cached: bool
    used: int | None = None

    def column(self, name: str) -> np.ndarray:
        return self.tokens.data.column(name).to_numpy()

    @property
    def kept(self) -> np.ndarray:
        """Numbers of the rows that are trained on."""
        dropped = data_report.BAD | data_report.TOO_LONG | data_report.UNSUPERVISED
        return np.flatnonzero((self.column("flags") & dropped) == 0)

    @property
    def usable(self) -> Dataset:
        """The tokens of those rows."""
        return self.tokens.select_columns(list(TOKENS)).select(self.kept)


@dataclass
class Preparation:
    """Everything that decides what rows become. The arguments are `train.py`'s (see arguments.py)."""

    data_args: object
    training_args: object
    tokenizer: PreTrainedTokenizerBase
    parts: list[Part] = field(default_factory=list)

    def __post_init__(self):
        data_args, args = self.data_args, self.training_args
        splits_rows = args.packing and args.packing_strategy == "bfd_split"  # long rows go on in the next packed row
        self.encoder = encoding.Encoder(
            self.tokenizer,
            loss_on=data_args.loss_on,
            add_special_tokens=data_args.add_special_tokens,
            append_concat_token=data_args.append_concat_token,
            max_length=None if splits_rows else args.max_length,
            truncation=data_args.truncation,
            control_tokens=data_args.control_tokens_in_text,
        )

    # ---- Which rows ----

    def plan(self) -> tuple[list[sources.Source], list[sources.Source], str]:
        """The sources to train on, those to evaluate on, and when a mixture ends."""
        data_args = self.data_args
        if data_args.dataset_mixture is not None:
            mixture = sources.read_mixture(data_args.dataset_mixture)
            return mixture.train, mixture.evaluation, mixture.stop
        names = sources.split_names(data_args.splits)
        found = [sources.Source(data_args.dataset_name, split, data_args.dataset_config_name) for split in names]
        return found[:1], found[1:], "first_exhausted"

    def format_of(self, source: sources.Source, columns: list[str]) -> formats.Format:
        data_args, named = self.data_args, source.columns
        try:
            chosen = formats.choose(
                columns,
                source.format or data_args.format,
                source.text_field or self.training_args.dataset_text_field,
                formats.parse_columns(data_args.columns) if named is None else named,
                has_template=self.tokenizer.chat_template is not None,
            )
        except ValueError as error:
            hint = row_files.csv_hint(columns) if source.name.endswith(".csv") else ""
            raise ValueError(f"{source.name}: {error}{hint}") from None
        loss_on = data_args.loss_on
        if loss_on == "assistant" and not chosen.is_chat and (chosen.name == "text" or self.tokenizer.chat_template is None):
            raise ValueError(f"--loss_on assistant needs chats; the rows of {source.name} are {chosen.name}")
        if loss_on == "completion" and chosen.name == "text":
            raise ValueError(
                f"--loss_on completion needs prompts with completions, or chats; the rows of {source.name} are text"
            )
        return chosen

    # ---- Tokens ----

    def encode_batch(self, batch: dict, indices: list[int], format: formats.Format, stop_at_bad: bool) -> pa.Table:
        """What `Dataset.map` calls: FACTS of a batch of rows."""
        rows, problems = [], {}
        has_template = self.tokenizer.chat_template is not None
        for place in range(len(indices)):
            example = {column: batch[column][place] for column in format.columns.values()}
            try:
                rows.append((place, formats.read(example, format, has_template)))
            except ValueError as error:
                problems[place] = str(error)
        encoded = dict(zip((place for place, _ in rows), self.encoder.encode([row for _, row in rows]), strict=True))
        problems |= {place: str(result) for place, result in encoded.items() if isinstance(result, ValueError)}
        if problems and stop_at_bad:
            place = min(problems)
            raise BadRow(indices[place], problems[place])
        nothing = np.empty(0, dtype=np.int32)
        facts = []
        for place in range(len(indices)):
            if place in problems:
                facts.append((nothing, nothing, 0, 0, data_report.BAD, 0, problems[place]))
                continue
            row = encoded[place]
            supervised = int((row.labels != IGNORE_INDEX).sum())
            flags = self._flags(row, supervised)
            dropped = flags & (data_report.TOO_LONG | data_report.UNSUPERVISED)
            ids, labels = (nothing, nothing) if dropped else (row.input_ids, row.labels)
            facts.append((ids, labels, row.length, supervised, flags, row.digest, None))
        columns = dict(zip(FACTS, zip(*facts, strict=True), strict=True))
        for name in TOKENS:
            ends = np.cumsum([0, *map(len, columns[name])], dtype=np.int32)
            columns[name] = pa.ListArray.from_arrays(ends, np.concatenate(columns[name]))
        return pa.table(columns, schema=FACTS.arrow_schema)

    def _flags(self, row: encoding.Encoded, supervised: int) -> int:
        bos, eos, ids = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, row.input_ids
        twice = ids[:-1][ids[:-1] == ids[1:]]
        flags = {
            data_report.TRUNCATED: row.truncated,
            data_report.TOO_LONG: row.too_long,
            # The first token is never predicted, so a row in which it alone is supervised teaches nothing.
            data_report.UNSUPERVISED: not row.too_long and not (row.labels[1:] != IGNORE_INDEX).any(),
            data_report.DOUBLE_BOS: bos is not None and bos != eos and bool((twice == bos).any()),
            data_report.DOUBLE_EOS: bool((twice == eos).any()),
            data_report.NO_EOS: supervised > 0 and not (row.labels == eos).any(),
            data_report.EMPTY_TURN: row.empty_turn,
            data_report.NOT_ALTERNATING: row.not_alternating,
            data_report.SYSTEM_FOLDED: row.system_folded,
            data_report.ESCAPED: row.escaped,
        }
        return sum(flag for flag, is_set in flags.items() if is_set)

    def tokenise(self, rows: Dataset, source: sources.Source, role: str, skipped: list[str]) -> Part:
        """Tokenise a data set, or take its tokens from the cache.

        Raises:
            ValueError: a row that cannot be used, by its file and line, unless --on_bad_row skip.
        """
        format = self.format_of(source, rows.column_names)
        fingerprint = self.cache_key(rows, format)
        cache = Path(datasets.config.HF_DATASETS_CACHE) / "tokenized"
        cache.mkdir(parents=True, exist_ok=True)
        stop = self.data_args.on_bad_row == "error"
        cached = any(cache.glob(f"{fingerprint}*.arrow"))

        def tokens_of(rows: Dataset) -> Dataset:
            return rows.map(
                self.encode_batch,
                batched=True,
                with_indices=True,
                fn_kwargs={"format": format, "stop_at_bad": stop},
                remove_columns=rows.column_names,
                features=FACTS,
                num_proc=self.training_args.dataset_num_proc,
                cache_file_name=str(cache / f"{fingerprint}.arrow"),
                new_fingerprint=fingerprint,
                desc=f"Tokenizing {source.name}",
            )

        try:
            tokens = anew_if_damaged(lambda: tokens_of(rows), cache, fingerprint)
        except BadRow as error:
            self.refuse(source, rows, *error.args)
        part = Part(source, role, format, tokens, skipped, cached)
        bad = np.flatnonzero(part.column("flags") & data_report.BAD)
        for index in bad.tolist():
            problem = tokens.data.column("problem")[index].as_py()
            if stop:  # cached by a run that skipped
                self.refuse(source, rows, index, problem)
            part.skipped.append(f"{self.where(source, rows, index) if len(bad) <= 20 else f'row {index}'}: {problem}")
        return part

    @staticmethod
    def where(source: sources.Source, rows: Dataset, index: int) -> str:
        """A row's file and line, or else its number."""
        return sources.locate(source, rows[index]) or f"row {index} of {source.name} ({source.split})"

    def refuse(self, source, rows, index: int, problem: str) -> None:
        raise ValueError(refusal(self.where(source, rows, index), problem))

    def cache_key(self, rows: Dataset, format: formats.Format) -> str:
        """A fingerprint of the rows, the tokenizer, its template, the options, and the code that makes tokens of a row."""
        encoder = self.encoder
        options = [encoder.loss_on, encoder.add_special_tokens, encoder.append_concat_token, encoder.max_length]
        options += [encoder.truncation, encoder.control_tokens, format.name, format.columns]
        options += [self.tokenizer.chat_template, self.tokenizer.special_tokens_map]
        digest = hashlib.sha256(json.dumps([rows._fingerprint, self.tools, *options], default=str).encode())
        return digest.hexdigest()[:32]

    @functools.cached_property
    def tools(self) -> str:
        """A fingerprint of the tokenizer, which takes a moment to write out, and of the code."""
        digest = hashlib.sha256(self.encoder.backend.to_str().encode())
        for file in (formats.__file__, encoding.__file__, encoding.chat.__file__, __file__):
            digest.update(Path(file).read_bytes())
        return digest.hexdigest()

    def check_text(self) -> None:
        if self.data_args.control_tokens_in_text is not None and all(part.format.is_chat for part in self.parts):
            raise ValueError("--control_tokens_in_text has no effect on chats, in which they are always text: drop it")

    # ---- Putting it together ----

    def open(self, found: list[sources.Source]) -> list[sources.Loaded]:
        """The raw rows of sources that can be read: asked for all before any is tokenised."""
        loaded = [sources.load(source, on_bad_row=self.data_args.on_bad_row) for source in found]
        for source in loaded:
            self.format_of(source.source, source.dataset.column_names)
        return loaded

    def load(self, found: list[sources.Loaded], role: str) -> list[Dataset]:
        """Tokenise the sources of a role, as `self.parts`, and return what is used of each."""
        fraction = self.data_args.eval_fraction
        limit = self.data_args.max_samples if role == "train" else self.data_args.max_eval_samples
        used = []
        for loaded in found:
            source, rows, held_out = loaded.source, loaded.dataset, None
            if fraction:
                rows, held_out = sources.split_off(rows, fraction, self.training_args.seed)
                if self.data_args.max_eval_samples is not None:
                    held_out = held_out.take(self.data_args.max_eval_samples)
            if limit is not None:
                rows = rows.take(limit)
            for part_rows, part_role in ((rows, role), (held_out, "eval")):
                if part_rows is not None:
                    skipped = loaded.skipped if part_role == role else []
                    self.parts.append(self.tokenise(part_rows, source, part_role, list(skipped)))
            part = self.parts[-2 if fraction else -1]
            used.append(part.usable)
        return used

    def mix(self, tokens: list[Dataset], found: list[sources.Source], stop: str) -> Dataset:
        """One data set of several: by weight if they have any, else one after the other."""
        joined = concatenate_datasets(tokens)
        if len(tokens) == 1 or found[0].weight is None or not all(map(len, tokens)):  # the gates refuse an empty one
            return joined
        edges = np.cumsum([0, *map(len, tokens)])
        numbers = [Dataset.from_dict({"row": range(edges[i], edges[i + 1])}) for i in range(len(tokens))]
        drawn = interleave_datasets(numbers, shares(found), seed=self.training_args.seed, stopping_strategy=stop)["row"]
        drawn = np.asarray(drawn)
        for part, low, high in zip([p for p in self.parts if p.role == "train"], edges, edges[1:], strict=False):
            part.used = int(((drawn >= low) & (drawn < high)).sum())
        return joined.select(drawn)

    def pack(self, tokens: Dataset, on: bool) -> Dataset:
        args = self.training_args
        if not on or not len(tokens):
            return tokens
        key = hashlib.sha256(f"{tokens._fingerprint} {args.max_length} {args.packing_strategy}".encode()).hexdigest()[:32]
        where = Path(datasets.config.HF_DATASETS_CACHE) / "tokenized" / f"{key}.arrow"
        options = {
            "num_proc": args.dataset_num_proc,
            "cache_file_name": str(where),
            "new_fingerprint": key,
            "desc": "Packing",
        }
        return anew_if_damaged(
            lambda: pack_dataset(tokens, args.max_length, args.packing_strategy, options), where.parent, key
        )

    def evaluation(self, held_out: list[Dataset]) -> Dataset | None:
        args = self.training_args
        packs = args.packing if args.eval_packing is None else args.eval_packing
        return self.pack(concatenate_datasets(held_out), packs) if held_out else None

    def packing_facts(self, tokens: Dataset, packed: Dataset) -> dict | None:
        """What packing does; of the first rows, what it would do, if it is off."""
        args = self.training_args
        if args.max_length is None or not len(tokens):
            return None
        if not args.packing:
            tokens = tokens.take(REPORT_ROWS)
            room = min(args.max_length, int(_lengths(tokens).sum()))  # packing takes memory for each token of a row
            options = {"keep_in_memory": True, "load_from_cache_file": False, "desc": "Trying to pack"}
            packed = pack_dataset(tokens, room, "bfd", options)
        size = int(_lengths(packed).sum())
        return {"on": args.packing, "rows": len(packed), "of": len(tokens), "tokens": size, "capacity": args.max_length}

    def report(self, train: Dataset, packed: Dataset, streamed: int | None = None) -> data_report.Report:
        args, data_args = self.training_args, self.data_args
        total = sum(part.source.weight or 0 for part in self.parts if part.role == "train")
        rows = [
            data_report.SourceRows(
                source=part.source.name + (f" ({part.source.split})" if part.source.split != "train" else ""),
                split=part.role,
                format=str(part.format),
                weight=part.source.weight / total if part.source.weight and part.role == "train" else None,
                lengths=part.column("length"),
                kept=_lengths(part.tokens),
                supervised=part.column("supervised"),
                flags=part.column("flags"),
                digests=part.column("digest"),
                skipped=part.skipped,
                used=part.used,
            )
            for part in self.parts
        ]
        samples = []
        for part in (p for p in self.parts if p.role == "train"):
            for row in part.kept[: 3 - len(samples)].tolist():
                example = part.tokens[row]
                pieces = self.encoder.pieces(example["input_ids"], example["labels"])
                samples.append(data_report.Sample(part.role, part.source.name, row, pieces))
        return data_report.Report(
            rows=rows,
            samples=samples,
            max_length=args.max_length,
            truncation=data_args.truncation,
            loss_on=data_args.loss_on or default_loss(self.parts),
            batch_size=args.per_device_train_batch_size,
            packing=self.packing_facts(train, packed),
            tokenizer=self.tokenizer_facts(),
            streamed=streamed,
            cached=all(part.cached for part in self.parts),
        )

    def tokenizer_facts(self) -> dict[str, str]:
        tokenizer, template = self.tokenizer, self.encoder.template
        facts = {
            name: f"{token!r} ({tokenizer.convert_tokens_to_ids(token)})" if token is not None else "none"
            for name, token in (("BOS", tokenizer.bos_token), ("EOS", tokenizer.eos_token), ("PAD", tokenizer.pad_token))
        }
        if template is None:
            return facts | {"chat template": "none"}
        end = f"{template.turn_end!r} ends {'each' if template.ends_every_turn else 'the last'} answer"
        if template.turn_end is None:
            end = "it writes no token at the end of an answer" + (
                "; EOS is added at the end of each row"
                if self.encoder.append_concat_token
                else ", so the model does not learn to stop"
            )
        system = "" if template.takes_system else "; a system prompt goes into the first user's turn, since it takes none"
        return facts | {"chat template": f"{len(tokenizer.chat_template)} characters; {end}{system}"}


def shares(found: list[sources.Source]) -> list[float]:
    """The weights of a mixture, adding up to 1."""
    total = sum(source.weight for source in found)
    return [source.weight / total for source in found]


def anew_if_damaged(make: Callable[[], Dataset], folder: Path, fingerprint: str) -> Dataset:
    """What `make` returns, made anew where its cache files were cut short (a full disk, a machine that went down)."""
    try:
        return make()
    except (pa.ArrowInvalid, OSError):
        damaged = list(folder.glob(f"{fingerprint}*.arrow"))
        if not damaged:
            raise
        for file in damaged:
            file.unlink()
        return make()


def _lengths(tokens: Dataset) -> np.ndarray:
    """Tokens of each row, without reading them."""
    if tokens._indices is not None:
        return _lengths_of(tokens.data.column("input_ids"))[np.asarray(tokens._indices.column(0))]
    return _lengths_of(tokens.data.column("input_ids"))


def _lengths_of(column: pa.ChunkedArray) -> np.ndarray:
    chunks = [np.asarray(chunk.value_lengths()) for chunk in column.chunks]
    return np.concatenate(chunks) if chunks else np.empty(0, dtype=np.int32)


def default_loss(parts: list[Part]) -> str:
    """What is supervised if --loss_on does not say, in words."""
    names = {"messages": "assistant", "sharegpt": "assistant", "text": "all"}
    return " and ".join(sorted({names.get(part.format.name, "completion") for part in parts}))


def prepare(data_args, training_args, tokenizer: PreTrainedTokenizerBase) -> Prepared:
    """The data sets of a run and the report on them.

    Raises:
        ValueError: no such data, rows that cannot be used, or nothing to learn from; one line that names the fix.
    """
    check_choices(data_args, training_args)
    work = Preparation(data_args, training_args, tokenizer)
    train_sources, eval_sources, stop = work.plan()
    check_evaluation(data_args, training_args, eval_sources)
    if data_args.streaming:
        return _prepare_stream(work, train_sources, eval_sources, stop)
    to_train, to_evaluate = work.open(train_sources), work.open(eval_sources)
    train = work.mix(work.load(to_train, "train"), train_sources, stop)
    work.check_text()
    if data_args.eval_fraction:
        held_out = [part.usable for part in work.parts if part.role == "eval"]
    else:
        held_out = work.load(to_evaluate, "eval")
    if training_args.shuffle_dataset:
        train = train.shuffle(seed=training_args.seed)
    packed = work.pack(train, training_args.packing)
    report = work.report(train, packed)
    data_report.gates(report, data_args.max_unsupervised)
    return Prepared(packed, work.evaluation(held_out), report, lambda: fingerprint(train))


def check_choices(data_args, training_args) -> None:
    """Raise ValueError for numbers out of range and for choices that exclude each other."""
    raise_first(out_of_range(RANGES, data_args, training_args))
    if training_args.packing and training_args.packing_strategy == "wrapped":
        raise ValueError(
            "--packing_strategy wrapped lets rows attend to each other and cuts them anywhere: use bfd or bfd_split"
        )
    if training_args.max_length is None and (training_args.packing or training_args.eval_packing):
        raise ValueError("--packing True needs --max_length, the tokens of a packed row")
    if training_args.packing and training_args.packing_strategy == "bfd_split":
        if data_args.truncation != "right":
            raise ValueError(
                f"--truncation {data_args.truncation} has no effect with --packing_strategy bfd_split, which packs long "
                "rows in pieces: use bfd, or drop it"
            )
        if training_args.eval_packing is False:
            raise ValueError("--eval_packing False with --packing_strategy bfd_split would leave long rows whole: use bfd")
    if training_args.max_length is None and data_args.truncation != "right":
        raise ValueError(f"--truncation {data_args.truncation} has no effect without --max_length: drop one")
    if not data_args.streaming:
        return
    if training_args.train_sampling_strategy != "random":
        raise ValueError(
            f"--train_sampling_strategy {training_args.train_sampling_strategy} has no effect with --streaming True, which "
            "takes rows as they come: use --shuffle_buffer 1 for their order"
        )
    if training_args.max_steps < 1 and not data_args.data_only:
        raise ValueError("--streaming True needs --max_steps: how many rows there are is not known")
    if data_args.eval_fraction is not None:
        raise ValueError(
            "--eval_fraction cannot set rows of a stream aside: name a split in --splits, with --max_eval_samples"
        )
    if training_args.dataset_num_proc is not None:
        raise ValueError("--dataset_num_proc has no effect with --streaming True: use --dataloader_num_workers")
    if training_args.shuffle_dataset:
        raise ValueError("--shuffle_dataset has no effect with --streaming True: use --shuffle_buffer")


def check_evaluation(data_args, training_args, eval_sources: list) -> None:
    """Raise ValueError unless there is something to evaluate on exactly if there is an evaluation."""
    evaluates, fraction = training_args.eval_strategy != "no", data_args.eval_fraction
    if training_args.eval_packing is not None and not eval_sources and not fraction:
        raise ValueError("--eval_packing has no effect without rows to evaluate on: drop it")
    if fraction is not None and eval_sources:
        raise ValueError(
            "--eval_fraction and a split to evaluate on (--splits, or eval in the mixture) are two ways: drop one"
        )
    if (eval_sources or fraction) and not evaluates and not data_args.data_only:
        what = "--eval_fraction sets rows aside" if fraction else f"--splits {data_args.splits} names a split"
        what = "the mixture names data" if data_args.dataset_mixture is not None and not fraction else what
        raise ValueError(f"{what} to evaluate on but --eval_strategy is no: add --eval_strategy epoch, or drop it")
    if data_args.max_eval_samples is not None and not eval_sources and not fraction:
        raise ValueError("--max_eval_samples has no effect without rows to evaluate on: name a second split in --splits")
    if evaluates and not eval_sources and not fraction:
        raise ValueError(
            f"--eval_strategy {training_args.eval_strategy.value} needs rows to evaluate on: name a second split in "
            "--splits, or set --eval_fraction 0.05, or --eval_strategy no"
        )


def _prepare_stream(work: Preparation, train_sources: list, eval_sources: list, stop: str) -> Prepared:
    """As `prepare`, with training rows that are read and tokenised as they are needed.

    Every rank reads the whole stream and takes its share of each batch, so all have equally many and the order of rows does
    not depend on the number of ranks. The report is about the first rows.
    """
    data_args, args = work.data_args, work.training_args
    streams, samples = [], []
    for source in train_sources:
        loaded = sources.load(source, on_bad_row=data_args.on_bad_row, streaming=True)
        stream = loaded.dataset
        if data_args.max_samples is not None:
            stream = stream.take(data_args.max_samples)
        rows = Dataset.from_list(list(stream.take(REPORT_ROWS)), features=stream.features)
        part = work.tokenise(rows, source, "train", loaded.skipped)
        work.parts.append(part)
        samples.append(part.usable)
        if data_args.shuffle_buffer > 1:
            stream = stream.shuffle(seed=args.seed, buffer_size=data_args.shuffle_buffer)
        encode = EncodeStream(work, source, part.format)
        # A batch is tokenised whole before its first row is used, so a smaller one starts sooner.
        streams.append(stream.map(encode, batched=True, batch_size=100, remove_columns=rows.column_names, features=TOKENS))
    work.check_text()
    sample = concatenate_datasets(samples)
    packed = work.pack(sample, args.packing)
    if len(streams) == 1:
        train = streams[0]
    elif train_sources[0].weight is None:
        train = concatenate_datasets(streams)
    else:
        train = interleave_datasets(streams, shares(train_sources), seed=args.seed, stopping_strategy=stop)
    if args.packing:
        train = pack_dataset(train, args.max_length, args.packing_strategy)
    held_out = []
    for source in eval_sources:
        loaded = sources.load(source, on_bad_row=data_args.on_bad_row, streaming=data_args.max_eval_samples is not None)
        rows = loaded.dataset
        if data_args.max_eval_samples is not None:
            rows = Dataset.from_list(list(rows.take(data_args.max_eval_samples)), features=rows.features)
        part = work.tokenise(rows, source, "eval", loaded.skipped)
        work.parts.append(part)
        held_out.append(part.usable)
    whole = all(len(part.tokens) < REPORT_ROWS for part in work.parts if part.role == "train")
    report = work.report(sample, packed, streamed=None if whole else REPORT_ROWS)
    data_report.gates(report, data_args.max_unsupervised)
    args.accelerator_config.dispatch_batches = False  # the main process would send batches, which differ in length
    return Prepared(train, work.evaluation(held_out), report, lambda: fingerprint(sample))


def refusal(where: str, problem: str) -> str:
    return f"{where}: {problem}; correct the row, or leave such rows out with --on_bad_row skip"


class EncodeStream:
    """Tokens of the rows of a stream that can be trained on."""

    def __init__(self, work: Preparation, source: sources.Source, format: formats.Format):
        self.encode, self.source, self.format = work.encode_batch, source, format
        self.stop = work.data_args.on_bad_row == "error"

    def __call__(self, batch: dict) -> dict:
        count = len(next(iter(batch.values())))
        try:
            facts = self.encode(batch, range(count), self.format, self.stop)
        except encoding.ChoiceNeeded as error:
            raise BadRow(str(error)) from None
        except BadRow as error:
            example = {column: values[error.args[0]] for column, values in batch.items()}
            where = sources.locate(self.source, example) or f"a row of {self.source.name}"
            raise BadRow(refusal(where, error.args[1])) from None
        return facts.select(list(TOKENS)).filter(pc.greater(pc.list_value_length(facts["input_ids"]), 0)).to_pydict()


def fingerprint(dataset: Dataset) -> dict:
    """What a tokenised split is: its rows, its tokens, and a hash of every token id and label in order."""
    digest, tokens = xxhash.xxh3_128(), 0
    for table in dataset.select_columns(list(TOKENS)).with_format("arrow").iter(batch_size=1000):
        for name in TOKENS:
            column = table.column(name).combine_chunks()
            digest.update(np.asarray(column.value_lengths(), dtype=np.int64).tobytes())
            digest.update(np.asarray(column.flatten(), dtype=np.int64).tobytes())
        tokens += len(column.flatten())
    return {"rows": len(dataset), "tokens": tokens, "xxh3_128": digest.hexdigest()}
