"""The model of a launch without its memory: real modules and operations on tensors that have a shape and a type only.

`skeleton` makes the modules on the meta device. Inside `without_memory` their parameters become fake tensors, on which
forward and backward allocate and free what the real ones would, as far as a tracker can see, in a second and in no memory.
What a CPU computes in another way than an accelerator (the attention kernel, 4-bit products, TRL's loss kernels, layer norms
under autocast) is stood in for by functions that allocate what the accelerator's do.
"""

import contextlib
import copy
import functools
import logging
import re
import types
import warnings
import weakref
from collections.abc import Iterator
from unittest import mock

import bitsandbytes
import torch
import torch.nn.functional as F
import trl.kernels.chunked_logprob as logprob_kernels
from peft import get_peft_model
from peft.tuners.lora import dora
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.integrations import moe
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl.trainer.utils import add_fused_lm_head

import loading
import peft_fsdp
import utils


class Skeleton:
    """The base model on the meta device, and which of its decoder layers are alike.

    Attributes:
        model: all of it, never changed; variants are made of copies.
        layers: where its decoder layers are, by full name, in order.
        kinds: of each layer, the index of the first layer that is like it (same shapes, and adapted alike).
    """

    def __init__(self, config, trust_remote_code: bool = False, targets: str = "all-linear", layer_classes=()):
        config, self.targets = copy.deepcopy(config), targets
        self.model = loading.meta_model(config, trust_remote_code)
        wrapped = set(layer_classes) or set(self.model._no_split_modules or ())
        self.layers = {n: m for n, m in self.model.named_modules() if type(m).__name__ in wrapped}
        # A list of decoder layers is what is repeated; other modules that are wrapped (as of a vision tower) stay whole.
        decoder = {id(module) for module in self.model.get_decoder().modules()}
        inside = [name for name, module in self.layers.items() if id(module) in decoder]
        lists = [name.rpartition(".")[0] for name in inside or self.layers]
        self.list_name = max(set(lists), key=lists.count) if lists else None
        self.layers = {n: m for n, m in self.layers.items() if n.rpartition(".")[0] == self.list_name}
        regex = None if targets == "all-linear" or isinstance(utils.target_modules(targets), list) else re.compile(targets)
        first, self.kinds = {}, []
        for index, (name, layer) in enumerate(self.layers.items()):
            adapted = frozenset(n for n, _ in layer.named_modules() if regex and regex.fullmatch(f"{name}.{n}"))
            shapes = tuple((n, p.shape) for n, p in layer.named_parameters())
            entries = tuple(str(value[index]) for value in self._by_layer().values())
            kind = (type(layer).__name__, entries, shapes, adapted)
            self.kinds.append(first.setdefault(kind, index))

    @property
    def depth(self) -> int:
        return len(self.layers)

    def shortened(self, indices: list[int]) -> PreTrainedModel:
        """A copy of the model with these decoder layers only, under their own names."""
        kept = {str(i): self.model.get_submodule(f"{self.list_name}.{i}") for i in indices}
        whole = self.model.get_submodule(self.list_name)._modules.copy()
        container = self.model.get_submodule(self.list_name)
        container._modules.clear()
        container._modules.update(kept)
        try:
            model = copy.deepcopy(self.model)
        finally:
            container._modules.clear()
            container._modules.update(whole)
        text = model.config.get_text_config()
        for key, value in self._by_layer().items():
            setattr(text, key, [value[i] for i in indices])
        text.num_hidden_layers = len(indices)
        return model

    def _by_layer(self) -> dict[str, list]:
        """The lists of the configuration that have one entry for each layer, such as layer_types."""
        text = vars(self.model.config.get_text_config())
        return {key: value for key, value in text.items() if isinstance(value, list) and len(value) == self.depth}


def build(setup, indices: list[int]) -> nn.Module:
    """The model as the Trainer has it before it is wrapped, with these decoder layers, on the meta device.

    In the types of training: adapters in float32 (see `peft_fsdp.restore_fp32_masters`), 4-bit weights packed.
    """
    model = setup.skeleton.shortened(indices)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(setup.dtype)
    loading.set_types(model, setup.dtype)
    if setup.quantization is not None:
        four = setup.quantization != "int8"
        loading.replace_linear_layers(
            model,
            utils.quantization_config(
                four,
                not four,
                setup.quantization if four else "nf4",
                setup.nested,
                str(setup.compute).removeprefix("torch."),
                str(setup.storage).removeprefix("torch."),
            ),
            setup.dtype,
        )
    grow_vocabulary(model, setup.vocabulary)
    model.config._attn_implementation = setup.attention
    add_fused_lm_head(model)
    model.train()
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # PEFT uses names that go away
        if setup.lora is not None:
            with torch.device("meta"), _expands():
                model = get_peft_model(model, setup.lora)
            peft_fsdp.give_token_rows_a_bias(model)
        if setup.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            if setup.lora is not None:
                model.enable_input_require_grads()  # as TRL does
    if setup.lora is not None or (setup.sharded and setup.mixed is not None):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(setup.trained_dtype)
    _with_packed_weights(model, setup.storage, setup.nested)
    if setup.strategy == "FSDP1" and (setup.mixed is not None or setup.quantization is not None):
        peft_fsdp.keep_lora_input_dtype(model)
        peft_fsdp.detach_dora_norm(model)
    return model


def layers(model: nn.Module, setup, indices: list[int]) -> list[nn.Module]:
    """Decoder layers of a built model, by their indices."""
    modules = dict(model.named_modules())
    name = next(name for name in modules if f".{name}".endswith(f".{setup.skeleton.list_name}"))
    return [modules[f"{name}.{index}"] for index in indices]


def grow_vocabulary(model: PreTrainedModel, rows: int) -> None:
    """Give the embeddings of a meta model as many rows as the tokenizer has tokens, if they have fewer."""
    for layer in {model.get_input_embeddings(), model.get_output_embeddings()} - {None}:
        if rows > layer.weight.shape[0]:
            layer.weight.data = layer.weight.data.new_empty(rows, layer.weight.shape[1])


def statistics_bytes(weights: int, nested: bool) -> int:
    """Of a 4-bit weight with so many elements in blocks of 64: a scale for each block, and the tables to expand them."""
    blocks, table = -(-weights // 64), 16 * 4
    return blocks * 4 + table if not nested else blocks + -(-blocks // 256) * 4 + 256 * 4 + 4 + table


def _with_packed_weights(model: nn.Module, storage: torch.dtype, nested: bool) -> None:
    """Replace the 4-bit weights of a meta model by plain parameters of the packed shape, which is what FSDP shards.

    `Params4bit` cannot be made of a fake tensor. Their statistics, which every rank has whole, become a buffer.
    """
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            packed = -(-module.in_features * module.out_features // (2 * storage.itemsize))
            module.weight = nn.Parameter(torch.empty(packed, 1, dtype=storage, device="meta"), requires_grad=False)
            module.forward = types.MethodType(_four_bit_forward, module)
            scales = statistics_bytes(module.in_features * module.out_features, nested)
            module.register_buffer("statistics", torch.empty(scales, dtype=torch.uint8, device="meta"), persistent=False)
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            module.weight = nn.Parameter(
                torch.empty(module.out_features, module.in_features, dtype=torch.int8, device="meta"), requires_grad=False
            )
            module.forward = types.MethodType(_four_bit_forward, module)


class _FourBitProduct(torch.autograd.Function):
    """What bitsandbytes' product allocates: the weight, expanded, for as long as the product takes, both ways."""

    @staticmethod
    def forward(ctx, x, packed, shape):
        ctx.save_for_backward(packed)
        ctx.shape = shape
        return x @ x.new_empty(shape).t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ grad.new_empty(ctx.shape), None, None


def _four_bit_forward(layer, x):
    kind = x.dtype
    if getattr(layer, "compute_dtype", None) is not None:
        x = x.to(layer.compute_dtype)
    with torch.autocast("cpu", enabled=False):
        out = _FourBitProduct.apply(x, layer.weight, (layer.out_features, layer.in_features))
    return (out if layer.bias is None else out + layer.bias.to(out.dtype)).to(kind)


def _expanded(original, module):
    """What PEFT computes DoRA's norm from."""
    if not isinstance(module, (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)):
        return original(module)
    kind = getattr(module, "compute_dtype", None) or torch.float16
    return module.weight.new_empty(module.out_features, module.in_features, dtype=kind)


def _expands():
    return mock.patch.object(dora, "dequantize_module_weight", functools.partial(_expanded, dora.dequantize_module_weight))


class _FusedAttention(torch.autograd.Function):
    """What FlashAttention and the memory-efficient kernel keep: queries, keys, values, output and its normaliser."""

    @staticmethod
    def forward(ctx, query, key, value, bias):
        # [batch, heads, tokens, width]; the kernels write the output as [batch, tokens, heads, width].
        batch, heads, tokens, _ = query.shape
        out = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, bias, out, query.new_empty(batch, heads, tokens, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _sdpa(query, key, value, attn_mask=None, *args, **kwargs):
    # A mask makes it the memory-efficient kernel, which takes it as numbers to add.
    bias = None if attn_mask is None else attn_mask.to(query.dtype)
    return _FusedAttention.apply(query, key, value, bias)


def _flash_attention(module, query, key, value, attention_mask, **kwargs):
    kind = query.dtype
    if kind == torch.float32 and torch.is_autocast_enabled("cpu"):
        query, key, value = (t.to(torch.get_autocast_dtype("cpu")) for t in (query, key, value))
    return _FusedAttention.apply(query, key, value, None).transpose(1, 2), None


def _layer_norm_in_float32(original, x, shape, weight=None, bias=None, eps=1e-5):
    if torch.is_autocast_enabled("cpu"):
        x, weight, bias = (None if tensor is None else tensor.float() for tensor in (x, weight, bias))
    return original(x, shape, weight, bias, eps)


@contextlib.contextmanager
def without_memory(device: str) -> Iterator[FakeTensorMode]:
    """While open, tensors are fake, and operations allocate what they would on `device` ("cuda" or "cpu")."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_expands())
        # It prints a traceback of what it raises, which is reported by who catches it.
        stack.enter_context(mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))
        # PyTorch's fake product of experts takes bfloat16 only, the real one float32 too; the fallback allocates as much.
        only = mock.patch.object(moe, "_can_use_grouped_mm", lambda states, *_: states.dtype == torch.bfloat16)
        stack.enter_context(only)
        if device != "cpu":
            attentions = {"flash_attention_2": _flash_attention, utils.FLASH_ATTENTION_KERNEL: _flash_attention}
            stack.enter_context(mock.patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping, attentions))
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", _sdpa))
            stack.enter_context(mock.patch.object(F, "layer_norm", functools.partial(_layer_norm_in_float32, F.layer_norm)))
            for kernel in ("_forward_tile", "_backward_tile", "_addmm_fp32"):  # they work in place
                stack.enter_context(mock.patch.object(logprob_kernels, kernel, _nothing))
        yield stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


def _nothing(*args, **kwargs) -> None:
    pass


def materialise(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Inside `without_memory`: give a meta model fake parameters and buffers, floating parameters in `dtype` if given."""
    made = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    floating = dtype is not None and parameter.is_floating_point()
                    data = torch.empty(parameter.shape, dtype=dtype if floating else parameter.dtype)
                    made[id(parameter)] = parameter, nn.Parameter(data, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)][1]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


class AllocationTracker(TorchDispatchMode):
    """Bytes of the tensors that were made while it is open and are still there, and their peak.

    Args:
        late: count memory that FSDP1 gives back until it gives back as much again. On an accelerator it gives a unit back
            while the unit is still computed with (`record_stream`), so the memory is not free when the next is gathered.
    """

    def __init__(self, late: bool = False):
        super().__init__()
        self._late: list[int] | None = [] if late else None
        self.current = self.peak = self._since = 0
        self._sizes: dict[int, int] = {}  # of each storage that is there, by id

    def reset(self) -> None:
        """Count from here on."""
        self.current = self.peak = 0
        self._since += 1

    def settle(self) -> None:
        """Everything is computed, so what was given back late is free."""
        if self._late:
            self.current, self._late = self.current - sum(self._late), []

    def take_peak(self) -> int:
        """The peak since it was last taken."""
        peak, self.peak = self.peak, self.current
        return peak

    def __enter__(self):
        # FSDP frees and takes the memory of a tensor that stays: `UntypedStorage.resize_`, which is no operation.
        self._resize = resize = torch.UntypedStorage.resize_

        def counted(storage, size):
            before = storage.nbytes()
            resize(storage, size)
            if id(storage) in self._sizes:
                change = storage.nbytes() - before
                self._sizes[id(storage)] += change
                if self._late is not None and change < 0:
                    now = [size for size in self._late if size <= -change]
                    self._late = [size for size in self._late if size > -change] + [-change]
                    change = -sum(now)
                self._change(change)

        torch.UntypedStorage.resize_ = counted
        return super().__enter__()

    def __exit__(self, *exception):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:  # it comes back with what the rank holds
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage) -> None:
        key = id(storage)
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self._change(storage.nbytes())
            weakref.finalize(storage, self._freed, key, self._since)

    def _freed(self, key: int, since: int) -> None:
        size = self._sizes.pop(key)
        if since == self._since:
            self._change(-size)

    def _change(self, size: int) -> None:
        self.current += size
        self.peak = max(self.peak, self.current)


class Segments:
    """Peaks of one forward and backward, between the moments at which decoder layers begin and end. Bytes in all.

    Attributes:
        levels: before each layer, and after the last: what is there then.
        before, loss: the peak before the first layer, and from the last one's output to its gradient.
        forward, backward: of each layer, by its position.
    """

    def __init__(self, model: nn.Module, layers: list[nn.Module], tracker: AllocationTracker):
        self.levels, self.forward, self.backward, self.before, self.loss = [], {}, {}, 0, 0
        self._tracker, self._count, self._model, self.gradients = tracker, len(layers), model, {}
        tracker.settle()
        tracker.take_peak()
        for module in model.modules():
            module.register_forward_pre_hook(functools.partial(self._reach, len(layers)), prepend=True)
        for position, layer in enumerate(layers):
            layer.register_forward_pre_hook(functools.partial(self._reach, position), prepend=True)
            layer.register_forward_hook(functools.partial(self._leave, position))

    def _reach(self, position, *_):
        if position != len(self.levels) or position != len(self.forward):
            return  # the recomputation, or a module inside of a layer
        self.levels.append(self._tracker.current)  # by now what only the caller of the layer before held is freed
        peak = self._tracker.take_peak()
        self.before = self.before or peak
        if position == self._count:
            self._tracker.settle()

    def _leave(self, position, layer, args, output):
        if position == len(self.forward):
            self.forward[position] = self._tracker.take_peak()
            output = output[0] if isinstance(output, tuple) else output
            if output.requires_grad:  # when its gradient is there, the backward of what follows has ended
                output.register_hook(functools.partial(self._end, position + 1))

    def _end(self, position, *_):
        peak = self._tracker.take_peak()
        if position == self._count:
            self.loss = peak
        else:
            self.backward[position] = peak
        self.gradients[position - 1] = sum(p.grad.nbytes for p in self._model.parameters() if p.grad is not None)

    def finish(self, trained: bool = True) -> None:
        """After the backward, or after the forward if there is none."""
        self._end(0 if trained else self._count)


def inputs(setup, batch: int) -> dict[str, torch.Tensor]:
    """A micro-batch as the collator makes it: packed rows are laid end to end, others are padded."""
    rows, length = (1, batch * setup.length) if setup.packing else (batch, setup.length)
    ids = torch.zeros(rows, length, dtype=torch.long)
    batch = {"input_ids": ids, "labels": torch.zeros_like(ids)}
    if setup.packing:
        batch["position_ids"] = torch.zeros_like(ids)
    elif setup.attention in ("sdpa", "eager"):  # FlashAttention looks into the mask, which a fake one does not have
        batch["attention_mask"] = torch.ones_like(ids)
    return batch
