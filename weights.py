"""A safetensors checkpoint, read in slices and written tensor by tensor; which of its tensors make which model weight.

Opening one reads only headers; reading a range of a tensor's elements reads those bytes and no others. Names are matched by
Transformers' own conversion mapping, so a checkpoint written for an older release, or one that stores experts one by one, is
read as `from_pretrained` would read it.
"""

import copy
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files
from transformers.utils.loading_report import LoadStateDictInfo

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# What bitsandbytes stores beside a 4-bit weight, as suffixes of the weight's own name.
QUANT_STATE_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__")


class Unreadable(ValueError):
    """A file of a checkpoint that is missing, truncated or damaged."""


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Checkpoint:
    """The safetensors files of a model, local or from the Hub.

    Args:
        name: a folder or a Hub id.
        revision: of the Hub repository.
        file_name: of the weights or their index, if not the usual ones (`transformers_weights` in `config.json`).

    Attributes:
        tensors: every tensor by its name in the files.
        bytes_read: of tensor data, so far.

    Raises:
        ValueError: no safetensors, a missing, truncated or damaged file; the message names the file and the fix.
        OSError: it cannot be downloaded.
    """

    def __init__(self, name: str, revision: str | None = None, file_name: str | None = None):
        self.name = name
        self.bytes_read = 0
        self.tensors: dict[str, Stored] = {}
        self._open: tuple[Path | None, BinaryIO | None] = (None, None)
        files, index = find_files(name, revision, file_name)
        for path in files:
            self.tensors |= read_header(path)
        lost = sorted(key for key in index if key not in self.tensors)
        if lost:
            raise ValueError(
                f"{files[0].parent / SAFE_WEIGHTS_INDEX_NAME} names {len(lost)} tensors that its files do not hold (first: "
                f"{lost[0]}, in {index[lost[0]]}): the files are of different versions; download or copy them again"
            )

    def read(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, one-dimensional, on the CPU, in the stored type.

        Raises:
            Unreadable: the file is gone or has become shorter since it was opened.
            OSError: it cannot be read.
        """
        stored = self.tensors[key]
        stop = stored.numel if stop is None else stop
        assert 0 <= start <= stop <= stored.numel, f"{key} has no elements {start} to {stop}"
        out = torch.empty(stop - start, dtype=stored.dtype)
        into = memoryview(out.view(torch.uint8).numpy())
        file, position = self._file(stored.file), stored.offset + start * stored.dtype.itemsize
        while into:  # one call reads at most 2 GiB
            count = os.preadv(file.fileno(), [into], position)
            if count == 0:
                raise Unreadable(f"{stored.file} is truncated or damaged (it ends inside {key}): download or copy it again")
            self.bytes_read += count
            position, into = position + count, into[count:]
        return out

    def whole(self, key: str) -> torch.Tensor:
        """The tensor in its own shape and type."""
        return self.read(key).view(self.tensors[key].shape)

    def close(self) -> None:
        """Close the file that is open. Reading opens it again."""
        if self._open[1] is not None:
            self._open[1].close()
        self._open = (None, None)

    def _file(self, path: Path) -> BinaryIO:
        if self._open[0] != path:
            self.close()
            try:
                self._open = (path, open(path, "rb", buffering=0))
            except OSError as error:
                raise Unreadable(f"{path} cannot be read ({error.strerror}): download or copy it again") from None
        return self._open[1]


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file. The library checks the header, and that the file is as long as it says."""
    # The library reads slices from a map of the whole file. That counts against the memory limit where overcommitting is
    # restricted, and a file that is cut short meanwhile kills the process; so ranges are read here, from its offsets.
    try:
        with safe_open(path, framework="pt", backend="pread") as file:
            file.keys()
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError) as error:
        raise Unreadable(f"{path} is truncated or damaged ({error}): download or copy it again") from None
    tensors = {}
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {key} is stored as {entry['dtype']}, which cannot be loaded")
        tensors[key] = Stored(path, DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
    return tensors


class TensorWriter:
    """A safetensors file written one tensor at a time, in any order, so that never more than one is in memory.

    Args:
        path: of the file; an existing one is replaced.
        layout: type and shape of every tensor, by name.

    Raises:
        OSError: it cannot be written; the file is then incomplete and no reader accepts it.
    """

    def __init__(self, path: Path, layout: dict[str, tuple[torch.dtype, tuple[int, ...]]]):
        self.path, self.layout, self.left = Path(path), layout, set(layout)
        header, self.offsets, end = {"__metadata__": {"format": "pt"}}, {}, 0
        # As the library does: the widest types first, so that every tensor is aligned.
        for name in sorted(layout, key=lambda name: (-layout[name][0].itemsize, name)):
            dtype, shape = layout[name]
            self.offsets[name], end = end, end + torch.Size(shape).numel() * dtype.itemsize
            offsets = [self.offsets[name], end]
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        text = len(text).to_bytes(8, "little") + text
        self.start = len(text)
        self.file = open(self.path, "wb", buffering=0)
        self._put(text, 0)
        self.file.truncate(self.start + end)

    def write(self, name: str, tensor: torch.Tensor) -> str:
        """Put one tensor in its place. Returns the SHA-256 of its bytes."""
        dtype, shape = self.layout[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, tuple(shape)), f"{name} is not what was announced"
        data = as_bytes(tensor)
        self._put(data, self.start + self.offsets[name])
        self.left.discard(name)
        return hashlib.sha256(data).hexdigest()

    def close(self) -> None:
        """Flush to the disk."""
        assert not self.left, f"never written: {sorted(self.left)[:3]}"
        os.fsync(self.file.fileno())
        self.file.close()

    def _put(self, data: bytes | memoryview, position: int) -> None:
        while data:  # one call writes at most 2 GiB
            count = os.pwrite(self.file.fileno(), data, position)
            position, data = position + count, data[count:]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """A copy of the bytes of a tensor, in their own order, on the CPU."""
    # A copy, because a tensor that NumPy has looked at cannot be resized, and FSDP1 frees its units by that.
    return memoryview(tensor.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8).numpy())


def find_files(name: str, revision: str | None = None, file_name: str | None = None) -> tuple[list[Path], dict[str, str]]:
    """A model's safetensors files and, if it has an index, the file name of each tensor. See `Checkpoint`."""

    def find(file: str) -> str | None:
        return cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)

    usual = file_name or SAFE_WEIGHTS_NAME
    single = find(usual) if usual.endswith(".safetensors") else None
    if single is not None:
        return [Path(single)], {}
    index_file = find(file_name if file_name and file_name.endswith(".json") else SAFE_WEIGHTS_INDEX_NAME)
    if index_file is None:
        pickles = [file for file in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME) if find(file) is not None]
        if pickles:
            raise ValueError(
                f"{name} holds its weights as pickles ({pickles[0]}), which run code when they are read: convert them "
                "first, with save_pretrained() or the Hub's safetensors converter"
            )
        raise ValueError(f"{name} holds no {SAFE_WEIGHTS_NAME} and no {SAFE_WEIGHTS_INDEX_NAME}: no weights to load")
    try:
        index = json.loads(Path(index_file).read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(index.values()))
        if any(Path(file).name != file or not file.endswith(".safetensors") for file in names):
            raise ValueError("a file in it is not the plain name of a safetensors file")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index_file} is damaged ({error!r}): download or copy it again") from None
    if Path(name).is_dir():
        files = [Path(name) / file for file in names]
    else:
        files = [Path(file) for file in get_checkpoint_shard_files(name, index_file, revision=revision)[0]]
    for path in files:
        if not path.is_file():
            raise ValueError(f"{index_file} names {path.name}, which does not exist beside it: download or copy it again")
    return files, index


@dataclass
class Group:
    """Checkpoint tensors that together make one or more weights of a model.

    Most groups are one tensor that is one weight. `converter` is Transformers' for the others, e.g. experts that are stored
    one by one and kept in one parameter. `statistics` are those of a weight that is stored in 4 bits.
    """

    checkpoint: Checkpoint
    keys: list[tuple[str, str]]  # (name in the checkpoint, the converter's source pattern)
    target: str
    converter: WeightConverter | None = None
    statistics: dict[str, str] = field(default_factory=dict)  # suffix after "weight." -> name in the checkpoint

    @property
    def key(self) -> str:
        return self.keys[0][0]

    def convert(self, model, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's weights by name, made from what `read` returns for each checkpoint name.

        Args:
            model: has `config` and `get_parameter(name)`, whose shape some conversions ask for.
        """
        if self.converter is None:
            return {self.target: read(self.key)}
        converter = copy.deepcopy(self.converter)
        for key, pattern in self.keys:
            converter.add_tensor(self.target, key, pattern, lambda key=key: read(key))
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def match(model: PreTrainedModel, checkpoint: Checkpoint, quantized: bool = False) -> dict[str, Group]:
    """Which checkpoint tensors make each parameter and persistent buffer of a model that is on the meta device.

    Args:
        quantized: whether `config.json` says that the checkpoint is in 4 bits.

    Returns:
        The group of each name. Of tied weights, those that the checkpoint holds.

    Raises:
        ValueError: missing, unexpected or wrongly shaped tensors, listed; or tied weights that are stored with different
            values.
    """
    expected = model.state_dict()
    renamings, converters = [], []
    for transform in get_model_conversion_mapping(model):
        (renamings if isinstance(transform, WeightRenaming) else converters).append(transform)
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    groups: dict[str, Group] = {}
    unexpected, statistics = set(), {}
    for key in sorted(checkpoint.tensors, key=dot_natural_key):
        stem, dot, suffix = key.partition(".weight.")
        if dot and suffix.startswith(QUANT_STATE_PARTS) and f"{stem}.weight" in checkpoint.tensors:
            statistics.setdefault(f"{stem}.weight", {})[suffix] = key
            continue
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, expected)
        if name not in expected and key in expected:
            name, pattern = key, None
        if name not in expected:
            unexpected.add(name)
            continue
        group = groups.setdefault(name, Group(checkpoint, [], name, by_pattern.get(pattern)))
        group.keys.append((key, pattern))

    made: dict[str, Group] = {}
    wrong = []
    for group in groups.values():
        group.statistics = statistics.get(group.key, {})
        try:
            meta = group.convert(model, lambda key: torch.empty(checkpoint.tensors[key].shape, device="meta"))
        except Exception as error:  # a conversion of Transformers that these shapes do not fit raises what it happens to
            raise ValueError(
                f"{checkpoint.tensors[group.key].file}: {group.key} and {len(group.keys) - 1} others do not make "
                f"{group.target} ({error}); config.json and the weights do not belong together"
            ) from None
        for name, value in meta.items():
            if name not in expected:
                unexpected.add(name)
            elif group.statistics and not quantized:
                raise ValueError(
                    f"{checkpoint.tensors[group.key].file} stores {name} in 4 bits, but config.json has no "
                    "quantization_config: copy the config.json that was saved with these weights"
                )
            elif not group.statistics and tuple(value.shape) != tuple(expected[name].shape):
                wrong.append((group, name, tuple(value.shape), tuple(expected[name].shape)))
            made[name] = group
    if wrong:
        group, name, has, wants = wrong[0]
        raise ValueError(
            f"{checkpoint.tensors[group.key].file} holds {name} as {list(has)}, but config.json asks for {list(wants)} "
            f"({len(wrong)} such weights): config.json and the weights do not belong together"
        )
    report = LoadStateDictInfo(set(expected) - set(made), unexpected, set(), [], {}, set())
    _leave_out_tied(model, made, report.missing_keys)
    tied = set(expected) - set(made) - report.missing_keys
    model._adjust_missing_and_unexpected_keys(report)
    # What Transformers would initialise anew has no values here either.
    report.missing_keys |= {name for name, _ in model.named_parameters()} - set(made) - tied
    folder = checkpoint.tensors[next(iter(checkpoint.tensors))].file.parent if checkpoint.tensors else checkpoint.name
    refuse_mismatch(str(folder), report.missing_keys, report.unexpected_keys)
    return made


def refuse_mismatch(where: str, missing: set[str], unexpected: set[str]) -> None:
    """Raise ValueError, listing names, unless a checkpoint holds what its `config.json` asks for and nothing else."""
    for keys, what in (
        (missing, "lacks {} weights that its config.json asks for"),
        (unexpected, "holds {} weights that its config.json has no place for"),
    ):
        if keys:
            listed = ", ".join(sorted(keys, key=dot_natural_key)[:5]) + (", ..." if len(keys) > 5 else "")
            raise ValueError(
                f"{where} {what.format(len(keys))} ({listed}): config.json and the weights do not belong together, or "
                "files are missing"
            )


def _leave_out_tied(model: PreTrainedModel, made: dict[str, Group], missing: set[str]) -> None:
    # Tied weights are one parameter: any name of it will do, and two that differ cannot both be loaded.
    for target, source in model.all_tied_weights_keys.items():
        if target in made and source in made:
            if not _same_values(made[target], made[source]):
                raise ValueError(
                    f"{made[target].checkpoint.name} stores {target} and {source} with different values, but its "
                    "config.json ties them: set tie_word_embeddings to false there"
                )
            del made[target]
        if target in made or source in made:
            missing -= {target, source}


def _same_values(a: Group, b: Group, step: int = 1 << 22) -> bool:
    size = a.checkpoint.tensors[a.key].numel
    spans = [(start, min(start + step, size)) for start in range(0, size, step)]
    return all(torch.equal(a.checkpoint.read(a.key, *span), b.checkpoint.read(b.key, *span)) for span in spans)
