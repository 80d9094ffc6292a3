"""Packed rows do not see each other: the loss of a packed batch is that of its rows on their own."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import chat
import data
from arguments import TrainingConfig
from trainer import AdapterSFTTrainer


def token_losses(trainer, batch) -> tuple[float, int]:
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=torch.tensor(1))
    return loss.item(), int((batch["labels"] != -100).sum())


@pytest.mark.parametrize("assistant_only", [False, True])
def test_packed_loss_equals_unpacked(assets, tmp_path, assistant_only):
    tokenizer, _ = chat.prepare_tokenizer(str(assets["fp32"]), "chatml")
    rows, _ = data.load_splits(str(assets["data"]), "train[:12]")
    rows = data.tokenize(rows, "train", tokenizer, assistant_only_loss=assistant_only)
    totals = {}
    for packing in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(assets["fp32"], attn_implementation="sdpa")
        args = TrainingConfig(
            output_dir=str(tmp_path), use_cpu=True, packing=packing, max_length=128, per_device_train_batch_size=1, seed=0
        )
        trainer = AdapterSFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
        trainer.model.eval()
        pairs = [token_losses(trainer, batch) for batch in trainer.get_train_dataloader()]
        totals[packing] = (sum(p[0] for p in pairs), sum(p[1] for p in pairs), len(pairs))
    assert totals[True][2] < totals[False][2] / 2, "nothing was packed"
    # A row's first token is never predicted; packing marks it unsupervised, alone it has no position before it.
    assert totals[True][0] == pytest.approx(totals[False][0], rel=1e-5)
