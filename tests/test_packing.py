"""Packed rows do not see each other: the loss of a packed batch is that of its rows on their own, for every attention."""

import functools

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, Gemma2Config, GPT2Config, Mamba2Config, Qwen3Config

import chat
import checks
import data
import loading
import tiny
from arguments import DataArguments, TrainingConfig
from trainer import AdapterSFTTrainer


def token_losses(trainer, batch) -> tuple[float, int]:
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=torch.tensor(1))
    return loss.item(), int((batch["labels"] != -100).sum())


SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
MODELS = {
    "llama": None,  # the one of the assets
    "qwen3": lambda size: Qwen3Config(vocab_size=size, head_dim=16, **SIZES),
    "gemma2": lambda size: Gemma2Config(vocab_size=size, head_dim=16, sliding_window=8, query_pre_attn_scalar=16, **SIZES),
    "gpt2": lambda size: GPT2Config(vocab_size=size, n_embd=64, n_layer=2, n_head=4, n_positions=256),
}


@pytest.fixture(scope="module")
def models(assets, tmp_path_factory):
    folders = {"llama": assets["fp32"]}
    for name, config in MODELS.items():
        if config is not None:
            folders[name] = tmp_path_factory.mktemp(name)
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config(len(tiny.make_tokenizer(chatml=True)))).save_pretrained(folders[name])
    return folders


@pytest.mark.parametrize("loss_on", ["all", "assistant"])
@pytest.mark.parametrize(
    ("model", "attention"),
    [
        ("llama", "sdpa"), ("llama", "eager"), ("llama", "flex_attention"), ("qwen3", "sdpa"), ("qwen3", "eager"),
        ("gemma2", "eager"), ("gpt2", "sdpa"), ("gpt2", "eager"),
    ],
)  # fmt: skip
def test_packed_loss_equals_unpacked(assets, models, tmp_path, monkeypatch, loss_on, model, attention):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer, _ = chat.prepare_tokenizer(str(assets["fp32"]), "chatml")
    data_args = DataArguments(dataset_name=str(assets["data"]), splits="train[:12]", loss_on=loss_on)
    totals = {}
    for packing in (False, True):
        args = TrainingConfig(
            output_dir=str(tmp_path), use_cpu=True, packing=packing, max_length=128, per_device_train_batch_size=1, seed=0
        )
        rows = data.prepare(data_args, args, tokenizer).train
        loaded = AutoModelForCausalLM.from_pretrained(models[model], attn_implementation=attention)
        assert loaded.config._attn_implementation == attention
        trainer = AdapterSFTTrainer(model=loaded, args=args, train_dataset=rows, processing_class=tokenizer)
        trainer.model.eval()
        pairs = [token_losses(trainer, batch) for batch in trainer.get_train_dataloader()]
        totals[packing] = (sum(p[0] for p in pairs), sum(p[1] for p in pairs), len(pairs))
    assert totals[True][2] < totals[False][2] / 2, "nothing was packed"
    # A row's first token is never predicted; packing marks it unsupervised, alone it has no position before it.
    assert totals[True][0] == pytest.approx(totals[False][0], rel=1e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Mamba2Config(num_hidden_layers=1), "Mamba2ForCausalLM has recurrent layers, whose state runs on"),
        (BloomConfig(n_layer=1), "BloomForCausalLM takes no position_ids"),
    ],
)
def test_models_that_would_mix_packed_rows_are_refused(tmp_path, config, message):
    meta = functools.partial(loading.meta_model, config)
    for option in ({"packing": True}, {"padding_free": True, "max_length": None}):
        args = TrainingConfig(output_dir=str(tmp_path), use_cpu=True, **option)
        with pytest.raises(ValueError, match=f"set --{next(iter(option))} False: {message}"):
            checks.check_packing(args, meta)
    checks.check_packing(TrainingConfig(output_dir=str(tmp_path), use_cpu=True), meta)
