"""In a fresh process: base model + saved adapter, evaluated without any of this project's training code but what makes tokens of rows.

python tests/reload.py plan.json     a list of {"adapter", "base", "data", "four_bit", "dtype"}; prints a JSON list
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import cpu_fsdp
import encoding
import formats


def evaluate(case: dict) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(case["adapter"])
    dtype = getattr(torch, case["dtype"])
    quantization = None
    if case["four_bit"]:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=dtype,
        )
    base = AutoModelForCausalLM.from_pretrained(case["base"], dtype=dtype, quantization_config=quantization)
    cpu_fsdp.keep_4bit_layout(base)
    if len(tokenizer) > base.get_input_embeddings().weight.shape[0]:
        torch.manual_seed(100)
        base.resize_token_embeddings(len(tokenizer))
    encoder = encoding.Encoder(tokenizer, append_concat_token=False)
    lines = (Path(case["data"]) / "test.jsonl").read_text().splitlines()
    rows = [encoder.one(formats.Row(messages=json.loads(line)["messages"])) for line in lines]

    def loss(model):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=case["dtype"] == "bfloat16"):
            each = [
                model(
                    input_ids=torch.from_numpy(row.input_ids)[None].long(), labels=torch.from_numpy(row.labels)[None].long()
                )
                .loss.float()
                .item()
                for row in rows
            ]
        return sum(each) / len(each)

    before = loss(base.eval())
    return {"base": before, "adapter": loss(PeftModel.from_pretrained(base, case["adapter"]).eval())}


if __name__ == "__main__":
    print("RESULT " + json.dumps([evaluate(case) for case in json.loads(Path(sys.argv[1]).read_text())]))
