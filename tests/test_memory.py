"""The memory model against published and simulated figures; tests/test_memory_launch.py holds it against real ranks."""

import contextlib
import dataclasses
import functools

import pytest
import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, Gemma3Config, LlamaConfig, MixtralConfig

import fake_model
import memory
import simulation
import working_set
from launching import ROOT
from memory import GIB

PUBLISHED = ROOT / "tests" / "published"  # config.json of models, by their published numbers
QLORA = {"quantization": "nf4", "ranks": 2, "ranks_here": 2, "shard_ranks": 2, "micro_batch": 2, "accumulation": 2}
OTHERS = {"adapter_dtype": torch.bfloat16, "mixed": None}  # all in bfloat16, as fsdp_qlora and torchtune train


@functools.cache
def skeleton(name: str, targets: str = "all-linear") -> fake_model.Skeleton:
    return fake_model.Skeleton(AutoConfig.from_pretrained(PUBLISHED / name), targets=targets)


def setup(name: str, targets: str = "all-linear", **changes) -> memory.Setup:
    """The guide's LoRA launch, with another model or other settings."""
    guide = {
        "strategy": "FSDP1", "ranks": 8, "ranks_here": 8, "shard_ranks": 8, "lora_r": 8, "lora_dropout": 0.1,
        "micro_batch": 8, "length": 2048, "packing": True, "attention": "flash_attention_2",
    }  # fmt: skip
    return memory.Setup(skeleton(name, targets), **guide | changes)


def peak(*args, **changes) -> float:
    """GiB allocated."""
    return memory.estimate(setup(*args, **changes)).peak / GIB


WITHOUT_O = "q_proj,k_proj,v_proj,gate_proj,up_proj,down_proj"
WITHOUT_K = "q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
# fsdp_qlora computes the loss from all logits, on padded rows
FSDP_QLORA = OTHERS | {"lora_r": 64, "full_logits": True, "packing": False, "attention": "sdpa"}
SEVEN_B = FSDP_QLORA | {"ranks": 2, "ranks_here": 2, "shard_ranks": 2, "micro_batch": 1}
TORCHTUNE = OTHERS | {"strategy": "FSDP2", "lora_r": 16, "lora_dropout": 0.0, "micro_batch": 2}


@pytest.mark.parametrize(
    ("expected", "band", "args", "changes"),
    [
        # The guide's LoRA launch. Measured by FSDPMemTracker in a pretended group of 8 ranks.
        pytest.param(67.9, 0.03, ("llama-2-70b",), {"dtype": torch.float32}, id="70B LoRA, float32 base"),
        pytest.param(51.9, 0.03, ("llama-2-70b",), {}, id="70B LoRA, bfloat16 base"),
        # Measured by fsdp_qlora on 2 cards (benchmarks_03_2024.md), allocated.
        pytest.param(8.28, 0.03, ("llama-2-7b", WITHOUT_O), SEVEN_B | {"length": 512}, id="fsdp_qlora 7B, 512 tokens"),
        pytest.param(9.16, 0.03, ("llama-2-7b", WITHOUT_O), SEVEN_B, id="fsdp_qlora 7B, 2048 tokens"),
        # torchtune's README. That run was compiled, which fuses some of the working set away: hence a wider band.
        pytest.param(27.6, 0.04, ("llama-3-70b", WITHOUT_K), TORCHTUNE, id="torchtune 70B LoRA"),
        # What a closed formula for Llamas gives for the guide's QLoRA launch. It adds the weight that is expanded for a product
        # to a moment at which it is not there, as the simulation below shows: hence a wider band where that weighs most.
        pytest.param(28.3, 0.03, ("llama-2-70b",), QLORA, id="70B QLoRA"),
        pytest.param(11.1, 0.035, ("llama-2-70b",), QLORA | {"offload_params": True}, id="70B QLoRA, offload"),
    ],
)
def test_allocated_anchors(expected, band, args, changes):
    assert abs(peak(*args, **changes) / expected - 1) <= band


def test_ways_down():
    """70B LoRA on 8 ranks and QLoRA on 2, one change after the other."""
    now, said = {"dtype": torch.float32}, []
    for change in (
        {}, {"dtype": torch.bfloat16}, {"lora_dropout": 0.0}, {"strategy": "FSDP2"}, {"offload_activations": True},
    ):  # fmt: skip
        now |= change
        said.append(peak("llama-2-70b", **now))
    assert said == pytest.approx([68.0, 52.0, 48.4, 47.9, 29.0], rel=0.03)
    now, said = QLORA | {"offload_params": True}, []
    for change in ({"lora_dropout": 0.0}, {"strategy": "FSDP2"}, {"offload_activations": True}):
        now |= change
        said.append(peak("llama-2-70b", **now))
    assert said == pytest.approx([10.2, 9.7, 5.0], rel=0.05)
    stretch = QLORA | {"micro_batch": 1, "lora_dropout": 0.0, "strategy": "FSDP2", "offload_activations": True}
    assert peak("llama-2-70b", **stretch) == pytest.approx(21, rel=0.03), "70B on 2 x 24 GB without parameter offload"


def test_documented_totals_of_devices():
    """In use by nvidia-smi, or reserved by the allocator: held against the band that an estimate gives for them."""
    low, high = (size / GIB for size in memory.estimate(setup("llama-2-70b", dtype=torch.float32)).in_use())
    assert low <= 72 and 80 <= high, "the guide's LoRA launch, which had a float32 base"
    low, high = (size / GIB for size in memory.estimate(setup("llama-2-70b")).in_use())
    assert high < 80, "and could not have had a bfloat16 one"
    offloaded = QLORA | FSDP_QLORA | {"offload_params": True}
    allocated = peak("llama-2-70b", WITHOUT_O, **offloaded)
    assert memory.LEAST_RESERVED * allocated <= 14.92 <= memory.MOST_RESERVED * allocated + 0.2, "reserved, by fsdp_qlora"
    # The guide's QLoRA launch: 35.6 in use without offload, 19.6 with. The difference fits, the second total does not.
    without, with_offload = (memory.estimate(setup("llama-2-70b", **QLORA, offload_params=on)) for on in (False, True))
    assert (without.peak - with_offload.peak) / GIB == pytest.approx(35.6 - 19.6, rel=0.08)
    low, high = (size / GIB for size in without.in_use())
    assert low <= 35.6 <= high
    assert with_offload.in_use()[1] / GIB < 19.6


def test_ram_and_disk():
    found = memory.estimate(setup("llama-2-70b", **QLORA, offload_params=True))
    assert sum(found.ram.values()) / 1e9 == pytest.approx(42, rel=0.05), "107 in the guide, which loaded all of it in 16 bit"
    assert found.parameters - found.trained == 68_976_648_192, "the published number"
    assert found.trained == 8 * 80 * (2 * 8192 + 2 * (8192 + 1024) + 2 * 8192 + 3 * (8192 + 28672))
    assert found.disk["base model, 16 bit"] == 2 * (found.parameters - found.trained)
    assert found.disk["one checkpoint"] == 12 * found.trained
    single = memory.estimate(setup("llama-3-8b", strategy="one device", ranks=1, ranks_here=1, shard_ranks=1))
    assert single.ram["loading: the model for each rank"] == 2 * (single.parameters - single.trained) + 4 * single.trained
    offloaded = memory.estimate(setup("llama-2-70b", offload_activations=True))
    assert offloaded.ram["offloaded activations"] == 8 * 80 * 2 * 8192 * 8 * 2048


def test_the_closed_formula_of_a_llama():
    """A layer's working set is what can be written down for this architecture: T (22 h + 12 f), and T (18 h + 3 f)."""
    h, f, tokens = 8192, 28672, 8 * 2048
    terms = memory.estimate(setup("llama-2-70b", lora_dropout=0.0)).phases["backward"]
    assert terms["working set"] == pytest.approx(tokens * (22 * h + 12 * f), rel=0.1)
    dropped = memory.estimate(setup("llama-2-70b")).phases["backward"]["working set"] - terms["working set"]
    assert dropped == pytest.approx(tokens * (18 * h + 3 * f), rel=0.02)
    assert terms["activation checkpoints"] == pytest.approx(2 * h * 80 * tokens, rel=0.02)
    layer = 2 * h * h + 2 * h * 1024 + 3 * h * f
    assert terms["gathered layers"] == pytest.approx(2 * layer * 2, rel=0.001)
    assert terms["gathered embeddings"] == pytest.approx(2 * 2 * 32000 * h, rel=0.001)


def simulated(made: memory.Setup) -> float:
    """The peak of a simulated step over that of the formula, minus 1."""
    return simulation.simulate(made) / memory.estimate(made).peak - 1


CASES = [
    *((name, {"strategy": "FSDP2"}) for name in sorted(path.name for path in PUBLISHED.iterdir())),
    ("llama-2-70b", {}),
    ("llama-2-70b", QLORA),
    ("llama-3-8b", QLORA | {"strategy": "FSDP2", "micro_batch": 1}),  # the peak is where the embeddings are gathered
    ("mistral-7b", {"strategy": "one device", "ranks": 1, "ranks_here": 1, "shard_ranks": 1, "micro_batch": 1}),
    ("qwen2.5-7b", {"strategy": "FSDP2", "lora_r": None, "micro_batch": 1}),
    ("qwen2.5-7b", {"checkpointing": False, "micro_batch": 1, "accumulation": 1}),
    ("llama-2-7b", {"strategy": "FSDP2", "use_dora": True, "micro_batch": 1}),
    ("llama-3-8b", {"new_tokens": 2, "vocabulary": 128258, "micro_batch": 1}),
    ("llama-2-7b", {"attention": "sdpa", "packing": False, "reshard_after_forward": False, "micro_batch": 1}),
]


@pytest.mark.parametrize(("name", "changes"), CASES, ids=lambda value: value if isinstance(value, str) else " ".join(value))
def test_formula_and_simulation_agree(name, changes, monkeypatch):
    monkeypatch.setattr(simulation, "LONG", 4)  # the growth with the depth is exactly even, see below
    moe = {"lora_dropout": 0.0} if name == "mixtral-8x7b" else {}  # PEFT has no dropout for experts
    attention = {} if "gemma" not in name else {"attention": "eager", "packing": False, "micro_batch": 2}
    assert abs(simulated(setup(name, **{"micro_batch": 2} | moe | attention | changes))) < 0.03


def test_the_peak_grows_evenly_with_the_depth(monkeypatch):
    made = setup("llama-3-8b", strategy="FSDP2", micro_batch=1)
    assert simulation.LONG == 6
    far = simulation.simulate(made)
    monkeypatch.setattr(simulation, "LONG", 4)
    assert simulation.simulate(made) == far


def test_pytorchs_own_tracker_sees_the_same():
    """FSDPMemTracker, which knows FSDP2, on 2 and 6 layers: 51.9 with the embeddings in the root, 0.5 less apart from it."""
    made = setup("llama-2-70b", strategy="FSDP2")
    peaks = []
    for depth in (2, 6):
        model = fake_model.build(made, list(range(depth)))
        layers = fake_model.layers(model, made, list(range(depth)))
        with contextlib.ExitStack() as stack:
            stack.enter_context(simulation.pretended(8))
            mesh = init_device_mesh("cpu", (8,))
            stack.enter_context(fake_model.without_memory("cuda"))
            fake_model.materialise(model)
            simulation.shard(model, made, layers, mesh)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
            batch = fake_model.inputs(made, made.micro_batch)
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs(tuple(batch.values()))
            simulation.make_state(optimizer)
            with tracker:
                working_set.forward(model, made, batch).backward()
                optimizer.step()
            peaks.append(sum(terms["Total"] for terms in tracker.get_tracker_snapshot("peak").values()))
    extrapolated = peaks[1] + (peaks[1] - peaks[0]) / 4 * 74
    assert extrapolated / GIB == pytest.approx(51.9 - 0.5, rel=0.03)
    assert memory.estimate(made).peak / extrapolated == pytest.approx(1, rel=0.001)


def test_more_needs_more():
    """Each of these takes memory, or gives some back, whatever the model."""
    base = setup("mistral-7b", strategy="FSDP2", ranks=4, ranks_here=4, shard_ranks=4, micro_batch=2)
    now = memory.estimate(base).peak
    for more in ({"micro_batch": 3}, {"length": 4096}, {"lora_r": 64}, {"dtype": torch.float32}, {"checkpointing": False}):
        assert memory.estimate(dataclasses.replace(base, **more)).peak > now, more
    for less in ({"ranks": 8, "shard_ranks": 8}, {"lora_dropout": 0.0}, {"quantization": "nf4"}, {"offload_params": True},
                 {"offload_activations": True}, {"micro_batch": 1}):  # fmt: skip
        assert memory.estimate(dataclasses.replace(base, **less)).peak < now, less


@pytest.mark.parametrize("changes", [{}, {"attention": "eager", "packing": False}, {"checkpointing": False}], ids=str)
def test_large_micro_batches_are_on_a_line(changes):
    made = setup("mistral-7b", strategy="FSDP2", **changes)
    assert working_set.of_rows(made, 50) == working_set.trace(made, 50)


def test_pattern():
    assert simulation.pattern([0] * 10) == (0, 1)
    assert simulation.pattern([0, 1] * 5) == (0, 2)
    assert simulation.pattern([0, 1, 1, 1, 1, 1]) == (1, 1)
    assert simulation.pattern([0, 1, 2, 0, 1, 2, 0]) == (0, 3)


def small(config=LlamaConfig, strategy="FSDP2", ranks=4, **changes) -> memory.Setup:
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
    }
    names = {"num_local_experts", "tie_word_embeddings"} & set(changes)
    config = config(**shape, num_key_value_heads=4, **{name: changes.pop(name) for name in names})
    return memory.Setup(fake_model.Skeleton(config), strategy, ranks, ranks, ranks, vocabulary=512, length=16, **changes)


def test_gradients_of_earlier_micro_batches_are_whole():
    """FSDP reduces gradients in the last micro-batch only (Accelerate's no_sync). A measured 43.8 MB was said to be 36.6."""
    once = small(lora_r=None, eval_batch=1)
    more = dataclasses.replace(once, accumulation=2)
    early = memory.estimate(more).phases["loss"]["gradients"]
    assert early == 2 * memory.estimate(once).trained, "in the type in which they are reduced, not sharded"
    assert memory.estimate(more).phases["evaluation"] == memory.estimate(once).phases["evaluation"], "after zero_grad"


def test_optimizer_states_in_bytes():
    made = small(strategy="one device", ranks=1, lora_r=None)  # trained in bfloat16
    for name, each in {"adamw_torch": 4, "adamw_8bit": 2, "lion_8bit": 1, "paged_adamw_32bit": 8, "ademamix": 12,
                       "sgd": 0, "schedule_free_sgd": 2}.items():  # fmt: skip
        assert memory.optimizer_bytes(dataclasses.replace(made, optimizer=name), 2 * 100) == each * 100, name


def test_experts_that_do_not_divide_are_gathered_with_padding():
    few, many = (memory.units_of(small(MixtralConfig, num_local_experts=2, ranks=ranks))[0][0] for ranks in (2, 8))
    experts = 2 * (2 * 128 * 64 + 64 * 128) * 2  # two, in bfloat16
    assert many.gathered - few.gathered > 2.9 * experts


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_dora_of_quantised_weights(quantization):
    assert memory.estimate(small(strategy="one device", ranks=1, quantization=quantization, use_dora=True)).peak


def test_a_tied_embedding_with_new_tokens_is_held_once():
    made = small(tie_word_embeddings=True, new_tokens=2)
    _, embedding, rest = memory.units_of(made)
    assert not embedding.frozen and rest.frozen < 2 * 512 * 64 * 2 / 4


def test_decoder_layers_are_found_beside_a_larger_vision_tower():
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 2, "image_size": 28}
    made = fake_model.Skeleton(Gemma3Config(text_config=text, vision_config=vision))
    assert made.list_name.endswith("language_model.layers") and made.depth == 2


@pytest.mark.parametrize("changes", [{"lora_r": None}, {"use_dora": True}], ids=["every weight", "DoRA"])
def test_a_simulation_of_fsdp1_runs(changes):
    made = small(strategy="FSDP1", optimizer="adamw_torch", **changes)
    assert sum(memory.estimate(made).phases["backward"].values()) < 2 * simulation.simulate(made)
