"""Load a model under FSDP so that a rank reads and keeps its shard, and one tensor more while it loads.

`from_pretrained` reads every weight on every rank, and bitsandbytes puts a whole 4-bit model on every GPU. Here the model
and its adapter are built without memory (on the meta device), FSDP wraps and shards them, and only then are the shards
filled, each from the slice of the safetensors file that it is. In order:

    deferred = loading.defer(name, config, ...)      # reads headers; a checkpoint that does not fit is refused here
    with deferred.recorded():                         # LoRA draws its initial values; how is recorded, not the values
        trainer = SFTTrainer(model=deferred.model, peft_config=...)
    deferred.fill_when_wrapped(trainer)               # the Accelerator shards, then the shards are filled

- Plain weights are copied slice by slice into the shard, in the type the model has.
- 4-bit weights are quantised in blocks, all of a tensor on every rank, because double quantisation's offset is a mean over
  the whole tensor; packed bytes and statistics are bit for bit those of one process. The rank keeps its slice. Weights that
  are stored in 4 bits are sliced as they are.
- LoRA's initial values, DoRA's magnitudes and the rows of added tokens are those of one process with the same seed.
"""

import contextlib
import functools
import time
from collections.abc import Iterator
from types import SimpleNamespace

import bitsandbytes
import psutil
import torch
import torch.distributed as dist
from bitsandbytes.functional import QuantState, get_4bit_type, quantize_blockwise
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, _init_utils
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation
from transformers.modeling_utils import local_torch_dtype
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer

import weights
from sharding import from_all

# Elements of a tensor that are quantised or averaged at a time on the CPU. bitsandbytes' kernel there needs 20 bytes for
# each, on an accelerator none, so there it can be more. A multiple of every block size, so no block is cut.
CHUNK = 1 << 18
CHUNK_ON_ACCELERATOR = 1 << 24
ADAPTER_MATRICES = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")  # PEFT's, by layer type


class LoadingFailed(ValueError):
    """A weight could not be read or there was no memory for it, after the checks had passed."""


def mean_of_rows(flat, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """The mean row of an embedding, float64 [width], read a block of rows at a time: what rows of added tokens start from.

    Args:
        flat: `flat[start:stop]` are those elements of the flattened [rows, width] matrix; a tensor or a `StoredWeight`.
        dtype: that the model has them in, which is what is averaged.
    """
    total = torch.zeros(width, dtype=torch.float64)
    step = max(CHUNK // width, 1)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        total += flat[first * width : last * width].view(-1, width).to(dtype).to("cpu", torch.float64).sum(0)
    return total / rows


def quantize_4bit(
    flat, shape: torch.Size, dtype: torch.dtype, device: torch.device, like
) -> tuple[torch.Tensor, QuantState]:
    """What bitsandbytes makes of a weight, bit for bit, with temporaries for a block of elements instead of for all.

    Args:
        flat: `flat[start:stop]` are those elements of the flattened weight, on the CPU; a tensor or a `StoredWeight`.
        shape: [out, in].
        dtype: the type it would have been loaded in; bitsandbytes quantises that.
        device: where to quantise, and where the results are.
        like: a `Params4bit` (of a `Linear4bit`) with the quantisation's settings.

    Returns:
        The packed weight, [n, 1] in the storage type, and its statistics, as `bitsandbytes.functional.quantize_4bit`.
    """
    size = shape.numel()
    chunk = CHUNK if device.type == "cpu" else CHUNK_ON_ACCELERATOR
    packed_per_item = 2 * like.quant_storage.itemsize
    packed = torch.empty(-(-size // packed_per_item), 1, dtype=like.quant_storage, device=device)
    absmax = torch.empty(-(-size // like.blocksize), dtype=torch.float32, device=device)
    for start in range(0, size, chunk):
        part = flat[start : min(start + chunk, size)].to(dtype).to(device)
        bits, peaks = torch.ops.bitsandbytes.quantize_4bit.default(part, like.blocksize, like.quant_type, like.quant_storage)
        packed[start // packed_per_item :][: len(bits)] = bits
        absmax[start // like.blocksize :][: len(peaks)] = peaks
    state = QuantState(
        absmax=absmax,
        shape=shape,
        dtype=dtype,
        blocksize=like.blocksize,
        code=get_4bit_type(like.quant_type, device=device),
        quant_type=like.quant_type,
    )
    if like.compress_statistics:
        state.offset = absmax.mean()
        state.absmax, state.state2 = quantize_blockwise(absmax - state.offset, blocksize=256)
        state.nested = True
    return packed, state


class StoredWeight:
    """A weight that is, or is made of, tensors of the checkpoint; `extra` rows of added tokens follow the stored ones."""

    every_rank = False  # whether a rank that holds nothing of it has to do something all the same

    def __init__(self, name: str, group: weights.Group, shape: torch.Size, dtype: torch.dtype, deferred: "Deferred"):
        self.name, self.group, self.shape, self.dtype, self.deferred = name, group, shape, dtype, deferred
        self.extra: torch.Tensor | None = None

    @property
    def order(self):
        stored = self.group.checkpoint.tensors[self.group.key]
        return (0, str(stored.file), self.group.key)

    @property
    def nbytes(self) -> int:
        return sum(self.group.checkpoint.tensors[key].nbytes for key, _ in self.group.keys)

    def flat(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened weight, in the stored type or, with rows of added tokens, the model's."""
        if self.group.converter is not None:
            return self.deferred.converted(self.group)[self.name].reshape(-1)[start:stop]
        if self.extra is None:
            return self.group.checkpoint.read(self.group.key, start, stop)
        stored = self.group.checkpoint.tensors[self.group.key].numel
        parts = [self.group.checkpoint.read(self.group.key, min(start, stored), min(stop, stored)).to(self.dtype)]
        return torch.cat([*parts, self.extra.reshape(-1)[max(start - stored, 0) : max(stop - stored, 0)]])

    def __getitem__(self, elements: slice) -> torch.Tensor:
        return self.flat(elements.start, elements.stop)

    def whole(self) -> torch.Tensor:
        return self.flat(0, self.shape.numel()).view(self.shape)

    def base_weight(self, device: torch.device) -> torch.Tensor:
        """As the layer computes with it, for DoRA's norm."""
        return self.whole().to(self.dtype).to(device)

    def fill(self, pieces: list["Piece"], device: torch.device) -> None:
        for piece in pieces:  # a block at a time, so that not even the slice is held twice
            for start in range(piece.start, piece.stop, CHUNK_ON_ACCELERATOR // 4):
                part = self.flat(start, min(start + CHUNK_ON_ACCELERATOR // 4, piece.stop))
                piece.into[start - piece.start :][: len(part)].copy_(part)


class QuantizedWeight(StoredWeight):
    """A 4-bit weight, quantised here or stored so; its layer gets the statistics, which every rank needs whole."""

    every_rank = True

    def __init__(self, name, group, layer: nn.Module, dtype, deferred):
        super().__init__(name, group, layer.weight.shape, dtype, deferred)
        self.layer, self.settings = layer, layer.weight

    @property
    def packed_numel(self) -> int:
        out_in = self.layer.in_features * self.layer.out_features
        return -(-out_in // (2 * self.settings.quant_storage.itemsize))

    def stored_statistics(self, device: torch.device) -> QuantState:
        read = self.group.checkpoint.whole
        parts = {f"weight.{suffix}": read(key) for suffix, key in self.group.statistics.items()}
        return QuantState.from_dict(parts, device=device)

    def packed(self, device: torch.device) -> tuple[torch.Tensor, QuantState]:
        if self.group.statistics:
            packed = self.group.checkpoint.read(self.group.key).to(device)
            return packed.view(self.settings.quant_storage).view(-1, 1), self.stored_statistics(device)
        shape = torch.Size((self.layer.out_features, self.layer.in_features))
        values = self  # read a block at a time
        if self.group.converter is not None or issubclass(self.layer.source_cls, Conv1D):
            values = self.deferred.converted(self.group)[self.name]
            values = (values.T if issubclass(self.layer.source_cls, Conv1D) else values).reshape(-1)
        return quantize_4bit(values, shape, self.dtype, device, self.settings)

    def base_weight(self, device):
        return bitsandbytes.functional.dequantize_4bit(*self.packed(device))

    def fill(self, pieces, device):
        if self.group.statistics:  # the bytes are those of the shard already, so only they are read
            self.layer.quant_state = self.stored_statistics(device)
            ratio = self.settings.quant_storage.itemsize / self.group.checkpoint.tensors[self.group.key].dtype.itemsize
            for piece in pieces:
                part = self.group.checkpoint.read(self.group.key, int(piece.start * ratio), int(piece.stop * ratio))
                piece.into.view(torch.uint8).copy_(part.view(torch.uint8))
            return
        packed, self.layer.quant_state = self.packed(device)
        flat = packed.reshape(-1)
        for piece in pieces:
            piece.into.copy_(flat[piece.start : piece.stop])


class InitialLora:
    """A LoRA matrix as PEFT would initialise it: its draw is repeated from the generator's state, one layer at a time."""

    every_rank = False
    order = (1,)

    def __init__(self, layer: LoraLayer, adapter: str, how, state: torch.Tensor, holder: str, steps: list[torch.dtype]):
        self.layer, self.adapter, self.how, self.state, self.holder, self.steps = layer, adapter, how, state, holder, steps
        # PEFT's own initialisation runs on stand-ins of these shapes, since the layer's matrices are shards by then.
        self.shapes = {name: getattr(layer, name)[adapter] for name in ADAPTER_MATRICES if adapter in getattr(layer, name)}
        self.shapes = {name: tuple(getattr(m, "weight", m).shape) for name, m in self.shapes.items()}

    def value(self) -> torch.Tensor:
        made = {name: torch.empty(shape) for name, shape in self.shapes.items()}
        stand_in = SimpleNamespace(
            **{name: {} for name in ADAPTER_MATRICES},
            lora_bias={self.adapter: False},
            r=self.layer.r,
            get_base_layer=lambda: None,
        )
        for name, tensor in made.items():
            is_module = not name.startswith("lora_embedding")
            getattr(stand_in, name)[self.adapter] = SimpleNamespace(weight=tensor) if is_module else tensor
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            LoraLayer.reset_lora_parameters(stand_in, self.adapter, self.how)
        value = made[self.holder]
        for dtype in self.steps:  # PEFT and TRL round on the way to the final type
            value = value.to(dtype)
        return value

    def fill(self, pieces, device):
        value = self.value().reshape(-1) if pieces else None
        for piece in pieces:
            piece.into.copy_(value[piece.start : piece.stop])


class InitialMagnitude:
    """DoRA's magnitude: the norms of the base weight, which LoRA's zero does not change at first."""

    every_rank = False
    order = (2,)

    def __init__(self, layer: DoraLinearLayer, base: StoredWeight, steps: list[torch.dtype]):
        self.layer, self.base, self.steps = layer, base, steps

    def fill(self, pieces, device):
        if not pieces:
            return
        weight = self.base.base_weight(device)
        value = self.layer.get_weight_norm(weight, torch.zeros((), dtype=weight.dtype, device=device), scaling=1)
        for dtype in self.steps:
            value = value.to(dtype)
        for piece in pieces:
            piece.into.copy_(value.reshape(-1)[piece.start : piece.stop])


class Piece:
    """Where elements [start, stop) of a flattened parameter belong on this rank: a one-dimensional view of its shard."""

    def __init__(self, owner: tuple[nn.Module, str], start: int, into: torch.Tensor):
        self.owner, self.start, self.stop, self.into = owner, start, start + into.numel(), into


def pieces_of(model: nn.Module) -> Iterator[Piece]:
    """The parts of parameters that this rank holds of a model that FSDP1 or FSDP2 has sharded."""
    seen = set()
    for module in model.modules():
        handle = module._handle if isinstance(module, FSDP) else None
        if handle is not None:
            flat = handle.flat_param
            for info, part in zip(flat._param_infos, flat._shard_param_infos, strict=True):
                if part.in_shard:
                    into = flat.data[part.offset_in_shard : part.offset_in_shard + part.numel_in_shard]
                    yield Piece((info.module, info.param_name), part.intra_param_start_idx, into)
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, DTensor) or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            shape, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            local = parameter._local_tensor
            assert local.shape == torch.Size(shape) and shape[1:] == parameter.shape[1:], f"{name}: not sharded by rows"
            if local.numel():
                row = parameter.shape[1:].numel()
                yield Piece((module, name), offset[0] * row, local.detach().view(-1))


@contextlib.contextmanager
def wrapping_without_memory():
    """While open, FSDP1 wraps a model on the meta device and takes memory for its shards alone, unfilled; FSDP2 can anyway.

    torch 2.13 gives a meta unit memory as a whole before it shards it, and takes the device it computes on from the weights.
    Here it flattens and shards on meta. Remove when FSDP1 does.
    """
    compute_device, shard = _init_utils._get_compute_device, FlatParamHandle.shard

    def device_of(module, ignored_params, device_from_device_id, rank, device_handle):
        parameter = next(_init_utils._get_orig_params(module, ignored_params), None)
        if parameter is not None and parameter.is_meta:
            cpu = torch.device("cpu")  # without an index, as its tensors have it
            return cpu if device_from_device_id.type == "cpu" else device_from_device_id
        return compute_device(module, ignored_params, device_from_device_id, rank, device_handle)

    def shard_on_meta(handle):
        shard(handle)
        meta = handle.flat_param
        if meta.is_meta:
            device = torch.device("cpu") if handle._offload_params else handle.device
            data = torch.empty(meta.shape, dtype=meta.dtype, device=device)
            data[data.numel() - meta._shard_numel_padded :].zero_()
            handle.flat_param = FlatParameter(data, requires_grad=meta.requires_grad)
            handle.flat_param.__dict__.update(meta.__dict__)
            # Until a unit is first gathered, PEFT reads the shape, type and device of its weights, never an element.
            shapes = {}
            for (name, module, _), shape in zip(meta._param_infos, meta._shapes, strict=True):
                shapes[module, name] = torch.empty((), dtype=meta.dtype, device=handle.device).expand(shape)
                handle._setattr_tensor(module, name, shapes[module, name])
            for name, module, _, first_name, first_module, _ in meta._shared_param_infos:
                handle._setattr_tensor(module, name, shapes[first_module, first_name])

    _init_utils._get_compute_device, FlatParamHandle.shard = device_of, shard_on_meta
    try:
        yield
    finally:
        _init_utils._get_compute_device, FlatParamHandle.shard = compute_device, shard


def memory_held(device: torch.device) -> int:
    """Bytes that loading costs this process: allocated on an accelerator, else anonymous memory (no page cache)."""
    if device.type != "cpu":
        return torch.accelerator.memory_allocated(device)
    try:
        with open("/proc/self/status", encoding="ascii") as file:  # a counter; adding up smaps takes as long as loading
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon:"))
    except (OSError, StopIteration):
        return psutil.Process().memory_info().rss


def memory_available(device: torch.device) -> int:
    """Bytes that can still be had on a device; on the CPU within the machine and the container."""
    if device.type != "cpu":
        return torch.accelerator.get_memory_info(device)[0]
    available = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.stat") as stat:
            anonymous = next(int(line.split()[1]) for line in stat if line.startswith("anon "))
            available = min(available, int(limit.read()) - anonymous)
    return available


def meta_model(config: PretrainedConfig, trust_remote_code: bool = False, **options) -> PreTrainedModel:
    """The model's modules without their weights (on the meta device): names, shapes and classes in about a second.

    Args:
        options: of `from_config`, such as `dtype` and `attn_implementation`.

    Raises:
        ValueError: Transformers has no causal language model for this configuration.
    """
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in AutoModelForCausalLM._model_mapping and not own_code:
        raise ValueError(
            f"a {config.model_type} model is no causal language model: Transformers has no AutoModelForCausalLM for it"
        )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)


def set_types(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Put a meta model's parameters into `dtype`, but those in float32 that its class keeps there."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    pattern, kinds, _ = build_glob_alternation(list(plan))
    for key, parameter in model.named_parameters():
        found = pattern.search(key)
        if found:
            parameter.data = parameter.data.to(plan[kinds[found.lastgroup]])


def replace_linear_layers(
    model: PreTrainedModel, quantization: BitsAndBytesConfig, dtype: torch.dtype, stored_in_4bit: bool = False
) -> None:
    """Swap the linear layers of a meta model for bitsandbytes' own, still without memory."""
    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=stored_in_4bit)
    quantizer.validate_environment()
    with local_torch_dtype(dtype):  # its layers make their biases in the default type
        quantizer.preprocess_model(model=model, dtype=dtype, device_map=None, checkpoint_files=[])
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)


def defer(
    name: str,
    config: PretrainedConfig,
    *,
    revision: str | None = None,
    stored_in_4bit: bool = False,
    trust_remote_code: bool = False,
    dtype: str | torch.dtype = "auto",
    attention: str | None = None,
    quantization: BitsAndBytesConfig | None = None,
) -> "Deferred":
    """The model without its weights, and where each of them will come from.

    Args:
        name: a folder or Hub id with safetensors files.
        stored_in_4bit: whether the checkpoint is already quantised.
        dtype: of the weights; "auto" is the config's, else the checkpoint's.
        quantization: 4-bit settings, or None. A checkpoint that is already in 4 bits brings its own.

    Raises:
        ValueError: the checkpoint is damaged or does not fit the config; see `weights.Checkpoint` and `weights.match`.
    """
    checkpoint = weights.Checkpoint(name, revision, getattr(config, "transformers_weights", None))
    floating = [stored.dtype for stored in checkpoint.tensors.values() if stored.dtype.is_floating_point]
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or next(iter(floating), torch.float32)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    model = meta_model(config, trust_remote_code, dtype=dtype, attn_implementation=attention)
    model.config.name_or_path = name
    groups = weights.match(model, checkpoint, stored_in_4bit)
    set_types(model, dtype)
    if quantization is not None:
        replace_linear_layers(model, quantization, dtype, stored_in_4bit)
    with contextlib.suppress(OSError):  # without the file, it is what the config says
        try:
            model.generation_config = GenerationConfig.from_pretrained(name, revision=revision)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: its generation_config.json is damaged ({error}); repair or delete it") from None
    model.eval()
    deferred = Deferred(model, checkpoint, groups, dtype)
    deferred.fill_buffers()
    return deferred


class Deferred:
    """A model on the meta device, and where each of its weights will come from. See the top of this file.

    Attributes:
        model: without memory for its parameters; its buffers are real.
        held_bytes: after loading, of this rank's shards.
        report: after loading, the largest of any rank: bytes "read" and "peak" (in use by the process, on the device),
            "seconds"; and the checkpoint's "stored" bytes.
    """

    def __init__(self, model: PreTrainedModel, checkpoint: weights.Checkpoint, groups: dict, dtype: torch.dtype):
        self.model, self.checkpoint, self.groups, self.dtype = model, checkpoint, groups, dtype
        self.report: dict = {}
        self.sources: dict[tuple[nn.Module, str], object] = {}
        self.loaded = False
        self._at = None  # the file that is being read
        shapes = {key: parameter.detach() for key, parameter in model.named_parameters()}
        self._shapes = SimpleNamespace(config=model.config, get_parameter=shapes.__getitem__)
        self._last_group: tuple[weights.Group | None, dict] = (None, {})
        self._draws: dict[LoraLayer, tuple] = {}
        by_parameter = {}
        for key, parameter in model.named_parameters(remove_duplicate=False):
            if key in groups:
                layer = model.get_submodule(key.rpartition(".")[0])
                if isinstance(layer, bitsandbytes.nn.Linear4bit) and key.endswith(".weight"):
                    source = QuantizedWeight(key, groups[key], layer, dtype, self)
                    # What FSDP shards is the packed weight, so that is what it has to see.
                    layer.weight = packed = bitsandbytes.nn.Params4bit(
                        torch.empty(source.packed_numel, 1, dtype=parameter.quant_storage, device="meta"),
                        **{k: v for k, v in parameter.__dict__.items() if k not in ("data", "bnb_quantized")},
                        bnb_quantized=True,
                    )
                    by_parameter[id(packed)] = source
                else:
                    by_parameter[id(parameter)] = StoredWeight(key, groups[key], parameter.shape, parameter.dtype, self)
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if id(parameter) in by_parameter:
                    self.sources[module, name] = by_parameter[id(parameter)]

    def converted(self, group: weights.Group) -> dict[str, torch.Tensor]:
        """The weights that a group of stored tensors makes; kept until another group is asked for."""
        if self._last_group[0] is not group:
            self._last_group = (None, {})
            self._last_group = (group, group.convert(self._shapes, self.checkpoint.whole))
        return self._last_group[1]

    def fill_buffers(self) -> None:
        """Compute the buffers that no checkpoint holds (rotary frequencies) and read those that it does."""
        for parameter in self.model.parameters():
            parameter._is_hf_initialized = True
        before = {}
        for start in (0, 1):  # what is not computed keeps what it held before, which differs
            for module in self.model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = torch.full_like(buffer, start, device="cpu")
                module._is_hf_initialized = False
            with torch.no_grad():
                self.model.initialize_weights()
            computed = dict(self.model.named_buffers())
            before = before or computed
        for name, buffer in computed.items():
            if name in self.groups:
                buffer.copy_(self.converted(self.groups[name])[name])
            elif not torch.equal(buffer, before[name]):
                raise ValueError(
                    f"{name} of this {self.model.config.model_type} model is computed where no weights are, which its code "
                    "does not support: train it on one device or with DDP"
                )
        self.checkpoint.close()

    def grow_vocabulary(self, size: int) -> None:
        """Make room for added tokens: rows that start as the mean of the stored ones."""
        if size <= self.model.get_input_embeddings().weight.shape[0]:
            return
        owners = [module for module in (self.model.get_input_embeddings(), self.model.get_output_embeddings()) if module]
        before = [(self.sources[module, "weight"], module) for module in owners]
        bias = next((m for m in owners if (m, "bias") in self.sources), None)
        if bias is not None:
            raise ValueError("the output embedding has a bias, which cannot grow with the vocabulary under FSDP: use DDP")
        self.model.resize_token_embeddings(size, mean_resizing=False)
        after = [module for module in (self.model.get_input_embeddings(), self.model.get_output_embeddings()) if module]
        for (source, old), new in zip(before, after, strict=True):
            if source.extra is None:
                rows, width = source.shape
                mean = mean_of_rows(source, rows, width, source.dtype).to(source.dtype)
                source.extra = mean.expand(size - rows, width).clone()
                source.shape = torch.Size((size, width))
            self.sources.pop((old, "weight"), None)
            self.sources[new, "weight"] = source

    @contextlib.contextmanager
    def recorded(self):
        """While the adapter is made: note how its initial values are drawn, then drop them; nothing is left but shapes."""
        reset, update = LoraLayer.reset_lora_parameters, DoraLinearLayer.update_layer

        def draw(layer, adapter, how):
            dtype = layer._get_base_layer_device_and_dtype(layer.get_base_layer())[1]
            dtype = layer.get_param().dtype if isinstance(layer, ParamWrapper) else dtype
            self._draws[layer] = (adapter, how, torch.get_rng_state(), dtype)
            reset(layer, adapter, how)

        def magnitude(layer, *, base_layer, lora_A, lora_B, scaling, place_on_cpu=False):
            source = self.sources[base_layer, "weight"]
            size = base_layer.embedding_dim if isinstance(base_layer, nn.Embedding) else lora_B.shape[0]
            layer.weight = nn.Parameter(torch.empty(size, dtype=source.dtype, device="meta"))
            self.sources[layer, "weight"] = InitialMagnitude(layer, source, [])

        LoraLayer.reset_lora_parameters, DoraLinearLayer.update_layer = draw, magnitude
        try:
            yield
        finally:
            LoraLayer.reset_lora_parameters, DoraLinearLayer.update_layer = reset, update
        self._trace_adapter()

    def _trace_adapter(self) -> None:
        for layer, (adapter, how, state, dtype) in self._draws.items():
            for holder in ADAPTER_MATRICES:
                matrices = getattr(layer, holder)
                if adapter in matrices:
                    embedding = holder.startswith("lora_embedding")
                    owner = (matrices, adapter) if embedding else (matrices[adapter], "weight")
                    steps = [dtype, owner[0]._parameters[owner[1]].dtype]
                    self.sources[owner] = InitialLora(layer, adapter, how, state, holder, steps)
        for source in self.sources.values():
            if isinstance(source, InitialMagnitude):
                source.steps = [source.layer.weight.dtype]
        # Rows of added tokens are few, so every rank reads them now; FSDP takes them as they are.
        for layer in self.model.modules():
            if isinstance(layer, TrainableTokensLayer) and layer.tied_adapter is None:
                source = self.sources[layer.get_base_layer(), "weight"]
                width = source.shape[1]
                for adapter, ids in layer.token_indices.items():
                    rows = torch.stack([source.flat(i * width, (i + 1) * width) for i in ids]).to(source.dtype)
                    kept = layer.trainable_tokens_original[adapter]
                    layer.trainable_tokens_original[adapter] = rows.to(kept.dtype, copy=True)
                    meta = layer.trainable_tokens_delta[adapter]
                    layer.trainable_tokens_delta[adapter] = nn.Parameter(rows.to(meta.dtype, copy=True))
        self.checkpoint.close()

    def check_room(self, device: torch.device, offload: bool, ranks: int, ranks_here: int) -> None:
        """Raise ValueError if the shards cannot fit: the ranks of this machine share its RAM, each has its own GPU."""
        held = sum(p.numel() * p.element_size() for p in self.model.parameters()) / ranks
        place = torch.device("cpu") if offload else device
        needed = held * (ranks_here if place.type == "cpu" else 1)
        available = memory_available(place)
        if needed > available:
            fixes = ["more ranks"]
            if place.type != "cpu":
                fixes.append("fsdp_offload_params: true")
            if not getattr(self.model, "is_quantized", False):
                fixes.append("--use_4bit_quantization True")
            raise ValueError(
                f"{self.checkpoint.name} needs {needed / 2**30:.1f} GiB on {place} for the shards of {ranks_here} of "
                f"{ranks} ranks, and {available / 2**30:.1f} GiB are available: use {', '.join(fixes)} or a smaller model"
            )

    def fill_when_wrapped(self, trainer) -> None:
        """Have the trainer's Accelerator fill the shards as soon as it has made them, before anything reads a weight."""
        accelerator = trainer.accelerator
        plugin = accelerator.state.fsdp_plugin
        # Each rank reads its own shard, so there is nothing to broadcast, and no rank holds what could be.
        plugin.cpu_ram_efficient_loading = plugin.sync_module_states = False
        plugin.param_init_fn = lambda module: module  # or FSDP1 would give every unit memory
        prepare = accelerator.prepare

        @functools.wraps(prepare)
        def prepare_and_fill(*objects, **kwargs):
            models = [item for item in objects if isinstance(item, nn.Module)]
            if self.loaded or not models:
                return prepare(*objects, **kwargs)
            optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
            owners = {id(p): (m, name) for m in models[0].modules() for name, p in m._parameters.items() if p is not None}
            held = [[[owners[id(p)] for p in group["params"]] for group in item.param_groups] for item in optimizers]
            with wrapping_without_memory():
                result = prepare(*objects, **kwargs)
            results = result if isinstance(result, tuple | list) else [result]
            wrapped = next(item for item in results if isinstance(item, nn.Module))
            place = torch.device("cpu") if isinstance(plugin.cpu_offload, CPUOffloadPolicy) else None
            self.fill(wrapped, accelerator.device, place, progress=not trainer.args.disable_tqdm)
            # Accelerate finds an optimizer's parameters again by their address in memory, which they did not have.
            for item, groups in zip([r for r in results if hasattr(r, "param_groups")], held, strict=True):
                for group, parameters in zip(item.param_groups, groups, strict=True):
                    group["params"] = [module._parameters[name] for module, name in parameters]
            return result

        accelerator.prepare = prepare_and_fill

    @torch.no_grad()
    def fill(self, model: nn.Module, device: torch.device, place: torch.device | None = None, progress: bool = True) -> None:
        """Give the shards of a wrapped model memory and their values. Every rank has to call it.

        Args:
            device: where 4-bit weights are quantised and their statistics are kept.
            place: where the shards are, if not on `device` (parameter offload).

        Raises:
            LoadingFailed: a file cannot be read or memory ran out.
        """
        started = time.perf_counter()
        try:
            if any(parameter.is_meta for parameter in model.parameters()):
                # FSDP2 has sharded on meta, and takes the memory that its shards are given afterwards.
                model._apply(lambda t: torch.empty_like(t, device=place or device) if t.is_meta else t)
            self._fill(model, device, progress)
        except weights.Unreadable as error:
            raise LoadingFailed(str(error)) from error
        except (OSError, MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
            memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            if isinstance(error, RuntimeError) and not memory:
                raise
            fix = "there was no memory for it: use more ranks, fsdp_offload_params: true or 4-bit weights"
            fix = fix if memory else "it changed or became unreadable while it was loaded: check the disk, copy it again"
            raise LoadingFailed(
                f"{self._at or self.checkpoint.name}: {fix} ({type(error).__name__}: {str(error)[:200]})"
            ) from error
        self.checkpoint.close()
        self.loaded = True
        self._report(time.perf_counter() - started)

    def _fill(self, model, device, progress) -> None:
        pieces: dict[tuple, list[Piece]] = {}
        for piece in pieces_of(model):
            pieces.setdefault(piece.owner, []).append(piece)
        work = {}
        for owner, source in self.sources.items():
            if owner in pieces or source.every_rank:
                work.setdefault(source, []).extend(pieces.pop(owner, []))
        # The rows of added tokens are parameters too, and have been real all along.
        unknown = [o for o, parts in pieces.items() if not isinstance(o[0], nn.ParameterDict)]
        assert not unknown, f"nothing is known to fill {unknown[:3]} with"
        sizes = {source: sum(piece.into.nbytes for piece in parts) for source, parts in work.items()}
        self.held_bytes = sum(sizes.values())
        sizes |= {source: source.nbytes for source in work if source.every_rank}  # read whole, to be quantised
        self.peak = memory_held(device)
        main = not dist.is_initialized() or dist.get_rank() == 0
        shown = main and progress
        with tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, desc="Loading weights", disable=not shown) as bar:
            for source, parts in sorted(work.items(), key=lambda item: item[0].order):
                self._at = getattr(source, "group", None) and self.checkpoint.tensors[source.group.key].file
                source.fill(parts, device)
                now = memory_held(device)
                self.peak = max(self.peak, now)
                bar.set_postfix_str(f"{now / 2**30:.2f} GiB held by rank 0", refresh=False)
                bar.update(sizes[source])
        self._last_group = (None, {})

    def _report(self, seconds: float) -> None:
        ranks = from_all((self.checkpoint.bytes_read, self.peak, seconds))
        self.report = dict(zip(("read", "peak", "seconds"), map(max, zip(*ranks, strict=True)), strict=True))
        self.report["stored"] = sum(stored.nbytes for stored in self.checkpoint.tensors.values())
