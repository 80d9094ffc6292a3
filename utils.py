"""The model, its quantisation, its attention and its LoRA configuration, built from arguments.

Pure functions of what they are given: nothing here reads the command line, and importing this file changes nothing.
"""

import re

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import is_kernels_available

import loading
import weights

FLASH_ATTENTION_KERNEL = "kernels-community/flash-attn2"


def load_config(model_name_or_path: str, revision: str | None = None, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's `config.json`, the only file needed to check a launch.

    Raises:
        ValueError: there is none, or it describes no causal language model.
    """
    try:
        return AutoConfig.from_pretrained(model_name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged config.json raises what its reader happens to
        raise ValueError(
            f"no model at --model_name_or_path {model_name_or_path}: give a Hub id you can reach or a local folder with a "
            f"config.json ({str(error).splitlines()[0]})"
        ) from None


def attention_implementation(use_flash_attn: bool, use_cpu: bool = False) -> str | None:
    """What `--use_flash_attn` stands for on this machine: an installed flash-attn, else the hub kernel; never a fallback.

    Without it, None: the model's own choice, which is SDPA unless its code has none (Gemma-2).

    Raises:
        ValueError: FlashAttention was asked for and cannot be had.
    """
    if not use_flash_attn:
        return None
    if use_cpu or not torch.cuda.is_available():
        raise ValueError("--use_flash_attn True needs a CUDA GPU: set --use_flash_attn False to use SDPA here")
    if _flash_attn_installed():
        return "flash_attention_2"
    if is_kernels_available():
        return FLASH_ATTENTION_KERNEL
    raise ValueError(
        "--use_flash_attn True needs a FlashAttention kernel and none is installed: `pip install -r requirements-gpu.txt` "
        "for flash-attn, or `pip install kernels` for the prebuilt one from the Hub; or set --use_flash_attn False"
    )


def _flash_attn_installed() -> bool:
    from transformers.utils import is_flash_attn_2_available

    return is_flash_attn_2_available()


def quantization_config(
    use_4bit: bool = False,
    use_8bit: bool = False,
    quant_type: str = "nf4",
    nested: bool = True,
    compute_dtype: str = "bfloat16",
    storage_dtype: str = "bfloat16",
) -> BitsAndBytesConfig | None:
    """The bitsandbytes configuration, or None. `storage_dtype` packs the 4-bit values; FSDP shards only floating types."""
    if use_4bit:
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quant_type,
            bnb_4bit_compute_dtype=getattr(torch, compute_dtype),
            bnb_4bit_use_double_quant=nested,
            bnb_4bit_quant_storage=getattr(torch, storage_dtype),
        )
    return BitsAndBytesConfig(load_in_8bit=True) if use_8bit else None


def stored_quantization(config: PretrainedConfig) -> dict:
    """The settings of a checkpoint that is already quantised, as in its `config.json`; empty if it is not."""
    stored = getattr(config, "quantization_config", None) or {}
    stored = stored.to_dict() if hasattr(stored, "to_dict") else dict(stored)
    return {key.removeprefix("_"): value for key, value in stored.items()}


def create_and_prepare_model(
    model_args, use_cpu: bool, trust_remote_code: bool, tokenizer, config: PretrainedConfig, sharded: bool
) -> tuple[PreTrainedModel, loading.Deferred | None]:
    """The base model with room for the tokenizer's added tokens, whose rows start as the mean of the others.

    Base weights keep the checkpoint's type unless `--dtype` says otherwise. A 4-bit model's other weights take the
    quantisation storage type, because FSDP flattens a unit only if all its frozen weights share one type.

    Args:
        sharded: whether FSDP will shard it. Then no weight is read yet; see `loading.py`.

    Returns:
        The model, and what will fill it if it is sharded. Otherwise it is on CPU, or, if quantised for a GPU, there.
    """
    quantization = quantization_config(
        model_args.use_4bit_quantization,
        model_args.use_8bit_quantization,
        model_args.bnb_4bit_quant_type,
        model_args.use_nested_quant,
        model_args.bnb_4bit_compute_dtype,
        model_args.bnb_4bit_quant_storage_dtype,
    )
    stored = stored_quantization(config)
    if stored and quantization is not None:  # 4-bit weights stay what they are; what they are computed in can be chosen
        quantization = BitsAndBytesConfig(
            **{key: value for key, value in stored.items() if key.startswith(("llm_", "bnb_", "load_in"))}
            | {"bnb_4bit_compute_dtype": quantization.bnb_4bit_compute_dtype}
            | ({"bnb_4bit_quant_storage": quantization.bnb_4bit_quant_storage} if sharded else {})
        )
        if sharded:
            del config.quantization_config  # the loader applies it
        else:
            config.quantization_config, quantization = quantization.to_dict(), None
    dtype = model_args.dtype
    if model_args.use_4bit_quantization and model_args.bnb_4bit_quant_storage_dtype != "uint8":
        dtype = model_args.bnb_4bit_quant_storage_dtype
    name, revision = model_args.model_name_or_path, model_args.model_revision
    attention = attention_implementation(model_args.use_flash_attn, use_cpu)
    deferred = None
    if sharded:
        deferred = loading.defer(
            name,
            config,
            revision=revision,
            stored_in_4bit=bool(stored),
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            attention=attention,
            quantization=quantization,
        )
        model = deferred.model
        deferred.grow_vocabulary(len(tokenizer))
    else:
        model = _whole_model(name, config, revision, trust_remote_code, dtype, attention, quantization)
        _grow_vocabulary(model, len(tokenizer))
    _agree_on_special_tokens(model, tokenizer)
    return model, deferred


def _whole_model(name, config, revision, trust_remote_code, dtype, attention, quantization) -> PreTrainedModel:
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            revision=revision,
            trust_remote_code=trust_remote_code,
            quantization_config=quantization,
            attn_implementation=attention,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            use_safetensors=True,  # a pickle runs code when it is read
            output_loading_info=True,
        )
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"--model_name_or_path {name}: its weights cannot be loaded ({reason})") from error
    # Transformers fills missing ones with random numbers and goes on.
    weights.refuse_mismatch(
        f"--model_name_or_path {name}: the checkpoint", loaded["missing_keys"], loaded["unexpected_keys"]
    )
    return model


def _grow_vocabulary(model: PreTrainedModel, size: int) -> None:
    # Never shrink: many checkpoints pad their vocabulary beyond the tokenizer's.
    rows = model.get_input_embeddings().weight.shape[0]
    if size <= rows:
        return
    with torch.random.fork_rng(devices=[]):  # the draws are overwritten, and LoRA's do not depend on them
        model.resize_token_embeddings(size, mean_resizing=False)
    for layer in {model.get_input_embeddings(), model.get_output_embeddings()} - {None}:
        weight = layer.weight.data
        mean = loading.mean_of_rows(weight.view(-1), rows, weight.shape[1], weight.dtype)
        weight[rows:] = mean.to(weight.dtype)
        if getattr(layer, "bias", None) is not None:
            layer.bias.data[rows:] = 0


def _agree_on_special_tokens(model: PreTrainedModel, tokenizer) -> None:
    # EOS decides where generation stops, so the token the tokenizer ends a turn with has to be among the model's.
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if model.generation_config is not None:
        known = model.generation_config.eos_token_id
        known = [known] if isinstance(known, int) else list(known or [])
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, *(i for i in known if i != tokenizer.eos_token_id)]
        model.generation_config.pad_token_id = tokenizer.pad_token_id


def target_modules(value: str) -> str | list[str]:
    """`--lora_target_modules` as PEFT takes it: "all-linear", a list of module names, or a regex of full names.

    A value made of names, commas and spaces is a list; any other value is a regex.
    """
    if value == "all-linear":
        return value
    if not value.strip():
        raise ValueError("--lora_target_modules is empty: use all-linear, a comma list of names or a regex")
    names = [name.strip() for name in value.split(",") if name.strip()]
    if names and all(re.fullmatch(r"\w+(\.\w+)*", name) for name in names):
        return names
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"--lora_target_modules {value!r} is neither a comma list of names nor a regex ({error})") from None
    return value


def check_target_modules(value: str, model: PreTrainedModel) -> None:
    """Raise ValueError, naming the model's linear layers, if `--lora_target_modules` matches none, or what is not one."""
    targets = target_modules(value)
    if targets == "all-linear":
        return
    modules = dict(model.named_modules())
    adaptable = {n for n, m in modules.items() if isinstance(m, (nn.Linear, nn.Embedding)) or type(m).__name__ == "Conv1D"}
    has = ", ".join(sorted({name.split(".")[-1] for name in adaptable}))
    for target in targets if isinstance(targets, list) else [targets]:
        if isinstance(targets, list):
            matched = {name for name in modules if name == target or name.endswith(f".{target}")}
        else:
            matched = {name for name in modules if re.fullmatch(target, name)}
        if not matched:
            raise ValueError(f"--lora_target_modules: {target} matches no module of the model; it has {has}")
        if matched - adaptable:
            name = sorted(matched - adaptable)[0]
            raise ValueError(
                f"--lora_target_modules: {target} matches {name}, a {type(modules[name]).__name__}, which LoRA cannot "
                f"adapt; the model has {has}"
            )


def token_rows(new_token_ids: list[int], model: PreTrainedModel) -> dict[str, list[int]]:
    """The rows to train of each embedding, by its name, as PEFT takes them: of both, or of the one if they are tied."""
    names = {module: name.split(".")[-1] for name, module in model.named_modules()}
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    tied = embeddings[1] is None or embeddings[0].weight is embeddings[1].weight
    return {names[module]: new_token_ids for module in embeddings[: 1 if tied else 2]}


def create_peft_config(model_args, new_token_ids: list[int], model: PreTrainedModel) -> LoraConfig | None:
    """The LoRA configuration, or None to train every weight. Rows of added tokens are trained and travel in the adapter."""
    if not model_args.use_peft_lora:
        return None
    rows = None
    if new_token_ids:
        rows = token_rows(new_token_ids, model)
        if set(rows) & set(re.split(r"[^\w]+", model_args.lora_target_modules)):
            raise ValueError(
                f"--lora_target_modules {model_args.lora_target_modules}: tokens were added, so rows of "
                f"{' and '.join(rows)} are trained, and PEFT cannot adapt a layer in both ways; leave it out"
            )
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=target_modules(model_args.lora_target_modules),
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        trainable_token_indices=rows,
        bias="none",
    )
