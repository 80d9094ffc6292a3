import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch

import tiny


@pytest.fixture(scope="session")
def assets(tmp_path_factory) -> dict[str, Path]:
    """Tiny models and a data set, made once."""
    root = tmp_path_factory.mktemp("assets")
    return {
        "fp32": tiny.make_model(root / "fp32", chatml=True),
        "bf16": tiny.make_model(root / "bf16", dtype=torch.bfloat16, chatml=True),
        "no_chatml": tiny.make_model(root / "no_chatml"),
        "tied": tiny.make_model(root / "tied", tied=True),
        "data": tiny.write_dataset(root / "data"),
    }
