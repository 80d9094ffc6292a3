"""preflight.py: cards by name, the report as tables, JSON and a picture, and what a launch is told, in process."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers

import advice
import cards
import findings
import memory
import memory_report
import preflight
from launching import ROOT
from test_launch import no_launch_around  # noqa: F401 (a fixture)

GIB = 2**30


@pytest.mark.parametrize(
    "name, card",
    [
        ("h100", "h100-80gb"),
        ("H100-80GB", "h100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("RTX4090", "4090"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("rtx 3060-12", "3060-12gb"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "4070ti-super"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("AMD Instinct MI300X", "mi300x"),
        *((card, card) for card in cards.KNOWN),
    ],
)
def test_cards_are_found_however_they_are_written(name, card):
    found = cards.find(name)
    assert found.name == card
    label = {"h200": 141, "b200": 192, "gb200": 192, "mi250x": 64, "mi300x": 192}  # GB
    assert 4 * GIB < found.memory <= label.get(card, 96) * GIB
    assert found.capability is None or (7, 0) <= found.capability <= (12, 0)


def test_a_size_is_a_card():
    assert cards.find("48GiB").memory == 48 * GIB
    assert cards.find("24.5 gib").memory == int(24.5 * GIB)
    assert cards.find("48gb").memory == 48 * 10**9


@pytest.mark.parametrize(
    "name, said",
    [
        ("a100", "a100-40gb, a100-80gb"),
        ("v100", "v100-16gb, v100-32gb"),
        ("h10", "h100-80gb"),
        ("4099", "4090"),
        ("banana", "known are t4, v100-16gb"),
        ("0.5gib", "less than 1 GiB"),
        ("", "known are"),
    ],
)
def test_an_unknown_card_is_told_the_nearest(name, said):
    with pytest.raises(ValueError, match=said):
        cards.find(name)


def test_cards_of_this_machine(monkeypatch):
    devices = [
        SimpleNamespace(name="NVIDIA H200", total_memory=150 * 10**9, major=9, minor=0),
        SimpleNamespace(name="NVIDIA Nonesuch", total_memory=10**10, major=7, minor=5),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)
    known, unknown = cards.present()
    assert (known.name, known.memory, known.capability) == ("h200", 150 * 10**9, (9, 0))
    assert (unknown.name, unknown.memory, unknown.capability) == ("NVIDIA Nonesuch", 10**10, (7, 5))
    assert preflight.device(None, use_cpu=False) == unknown, "the smallest card decides"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cards.present() == []


def made_up_report(**more) -> memory_report.Report:
    """A report on an estimate of two phases and three terms."""
    model = SimpleNamespace(model_type="llama")
    setup = SimpleNamespace(
        config=model, strategy="FSDP2", ranks=8, micro_batch=1, length=2048, dtype=torch.bfloat16, device="cuda"
    )
    phases = {
        "load": {"base weights": 3 * GIB, "one tensor": GIB // 4},
        "backward": {"base weights": 3 * GIB, "work": 2 * GIB},
    }
    estimate = memory.Estimate(setup, phases, {"processes": 24 * GIB}, {"checkpoint": GIB}, 7_000_000_000, 20_000_000)
    return memory_report.Report(estimate, **more)


def simulated() -> memory.Estimate:
    made = made_up_report().estimate
    return memory.Estimate(made.setup, {"simulated step": {"all of it": 6 * GIB}}, {}, {})


def test_the_picture_has_a_bar_for_each_phase_and_a_part_for_each_term(tmp_path):
    report, card = made_up_report(), cards.find("3060")
    figure = memory_report.draw(tmp_path / "memory.png", report.estimate, card, simulated())
    (axes,) = figure.axes
    heights = {container.get_label(): [bar.get_height() for bar in container] for container in axes.containers}
    assert heights == {"base weights": [3, 3, 0], "one tensor": [0.25, 0, 0], "work": [0, 2, 0], "all of it": [0, 0, 6]}
    assert [bar.get_y() for bar in axes.containers[2]] == [3.25, 3, 0], "the last term is not on top of the others"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["load", "backward", "simulated\nstep"]
    (line,) = axes.lines
    assert line.get_ydata() == pytest.approx([11.62, 11.62], abs=0.01) and "3060-12gb" in line.get_label()
    low, high = (size / GIB for size in simulated().in_use())
    (band,) = [patch for patch in axes.patches if patch.get_label().startswith("in use")]
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((low, high))
    assert axes.get_ylim()[1] > max(high, 11.62)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_terms_are_told_apart_however_many_there_are(tmp_path):
    report = made_up_report()
    report.estimate.phases["load"] = {f"term {number}": GIB for number in range(12)}
    figure = memory_report.draw(tmp_path / "memory.png", report.estimate)
    looks = [(bars[0].get_facecolor(), bars[0].get_hatch()) for bars in figure.axes[0].containers]
    assert len(set(looks)) == len(looks) == 14
    assert not figure.axes[0].lines


def test_the_json_adds_up():
    step = advice.Step("--lora_dropout 0", made_up_report().estimate.setup, 5, "none", "w", "fits")
    finding = findings.Finding("warning", "what", "why", "change")
    report = made_up_report(exact=simulated(), card=cards.find("4090"), findings=[finding], steps=[step], max_batch=3, ram=7)
    made = json.loads(json.dumps(memory_report.to_json(report)))
    assert made["peak"] == sum(made["phases"][made["peak_phase"]].values()) == 5 * GIB
    assert made["exact"]["peak"] == sum(made["exact"]["phases"]["simulated step"].values()) == 6 * GIB
    assert made["exact"]["difference"] == pytest.approx(5 / 6 - 1)
    assert made["in_use"] == list(simulated().in_use())
    assert made["findings"] == [{"grade": "warning", "what": "what", "why": "why", "change": "change"}]
    assert made["advice"] == [
        {"change": "--lora_dropout 0", "saved": 5, "slow_down": "none", "why": "w", "verdict": "fits", "instead": False}
    ]
    assert (made["max_batch"], made["ram_here"], made["verdict"], made["works"]) == (3, 7, "fits", True)
    assert (
        made["setup"]["model_type"] == "llama" and made["setup"]["dtype"] == "torch.bfloat16" and made["setup"]["ranks"] == 8
    )
    documented = set(memory_report.to_json.__doc__.split("`")[1::2])
    assert set(made) <= documented


@pytest.mark.parametrize("grade, gib, works", [("warning", 80, True), ("error", 80, False), ("advice", 4, False)])
def test_what_speaks_against_a_launch(grade, gib, works):
    report = made_up_report(card=cards.find(f"{gib}GiB"), findings=[findings.Finding(grade, "w")])
    assert report.works == works


def test_the_tables(capsys):
    step = advice.Step("--lora_dropout 0", made_up_report().estimate.setup, 3 * GIB, "none", "because", "fits")
    more = advice.Step("--num_processes 16", made_up_report().estimate.setup, GIB, "none", "each less", "fits", instead=True)
    finding = findings.Finding("error", "[bold]what[/bold]", "the reason", "the fix")
    report = made_up_report(
        exact=simulated(), card=cards.find("5GiB"), findings=[finding], steps=[step, more], max_batch=0, ram=GIB
    )
    report.estimate.notes.append("not modelled: x")
    memory_report.show(report)
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    assert ["base", "weights", "3.00", "3.00"] in rows
    assert ["work", "2.00"] in rows
    assert ["allocated", "3.25", "5.00", "6.00"] in rows
    assert ["error", "[bold]what[/bold]"] in rows
    for said in (
        "backward (peak)",
        "simulated step",
        "why: the reason",
        "change: the fix",
        "24.00 (this machine has 1.00)",
        "--lora_dropout 0",
        "-3.00",
        "or instead of all these:",
        "-16.7% from the simulated 6.00 GiB",
        "not even one row fits",
        "Note: not modelled: x",
        "NOT OK: does not fit on 5GiB (5.00 GiB), 1 error",
    ):
        assert said in text, said


# ------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def argv(assets, tmp_path):
    """A function: the command line for a launch of the tiny model."""

    def make(*own, config="fsdp_config", flags=()) -> list[str]:
        train = ["--model_name_or_path", str(assets["bf16"]), "--dataset_name", "d", "--output_dir", str(tmp_path / "out")]
        return [*own, "--config_file", str(ROOT / f"configs/{config}.yaml"), "--", *train, *flags]

    return make


@pytest.mark.parametrize("config", ["fsdp_config", "fsdp2_config", "fsdp2_config_qlora", "ddp_config", "single_config"])
def test_a_launch_that_works(argv, config, capsys):
    flags = ["--use_4bit_quantization", "True"] if "qlora" in config else []
    assert preflight.run(argv("--gpu", "4090", config=config, flags=flags)) == 0
    text = capsys.readouterr().out
    assert "OK: fits on 4090 (23.52 GiB)" in text and "NOT OK" not in text


def test_a_launch_that_does_not_fit(argv, capsys):
    assert preflight.run(argv("--gpu", "1GiB")) == 1
    assert "NOT OK: does not fit on 1GiB" in capsys.readouterr().out


def test_mistakes_are_listed_and_fail(argv, capsys):
    wrong = ["--lora_r", "0", "--use_8bit_quantization", "True", "--chat_template_format", "chatmll"]
    assert preflight.run(argv("--gpu", "4090", flags=wrong)) == 1
    text = " ".join(capsys.readouterr().out.split())
    for said in ("--lora_r 0 must be at least 1", "8-bit integer weights", "chatmll"):
        assert said in text, said


def test_a_warning_does_not_fail(argv, capsys):
    assert preflight.run(argv("--rows", "4", "--gpu", "4090")) == 0
    assert "warning" in capsys.readouterr().out, "4 rows are fewer than a batch of 8 processes"


def test_rows_longer_than_learned_positions(argv, assets, tmp_path, capsys):
    shutil.copytree(assets["bf16"], tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2).save_pretrained(tmp_path / "model")
    assert preflight.run(argv("--gpu", "4090", flags=["--model_name_or_path", str(tmp_path / "model")])) == 0
    assert "--max_length 2048 is more than the 1024 learned positions" in " ".join(capsys.readouterr().out.split())


def test_on_the_cpu_of_this_machine(argv, capsys, monkeypatch):
    flags = ["--use_cpu", "True"]
    assert preflight.run(argv(config="fsdp2_config_cpu", flags=flags)) == 0
    assert "OK: no errors; not held against a card" in capsys.readouterr().out
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: SimpleNamespace(total=GIB // 2))
    assert preflight.run(argv(config="fsdp2_config_cpu", flags=flags)) == 1
    assert "of RAM and this machine has 0.5 GiB" in capsys.readouterr().out


def test_the_disk_of_this_machine(argv, capsys, monkeypatch):
    monkeypatch.setattr(findings.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert preflight.run(argv(config="fsdp2_config_cpu", flags=["--use_cpu", "True"])) == 1
    assert "its disk has 0 GiB free" in " ".join(capsys.readouterr().out.split())


def test_a_model_without_a_tokenizer(argv, assets, tmp_path, capsys):
    (tmp_path / "config.json").write_bytes((assets["bf16"] / "config.json").read_bytes())
    assert preflight.run(argv("--gpu", "4090", flags=["--model_name_or_path", str(tmp_path)])) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "tokenizer" in text and "1 error" in text and "allocated" in text, "the memory is told all the same"


@pytest.mark.parametrize(
    "config, said",
    [
        (transformers.T5Config(num_layers=1), "a t5 model is no causal language model"),
        (transformers.BertConfig(num_hidden_layers=1), "the model cannot be made and run with these arguments: "),
    ],
)
def test_a_model_that_cannot_be_trained(config, said, argv, assets, tmp_path, capsys):
    shutil.copytree(assets["bf16"], tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    config.save_pretrained(tmp_path / "model")
    assert preflight.run(argv("--gpu", "4090", flags=["--model_name_or_path", str(tmp_path / "model")])) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert said in text and len(text) < 1000, text


def test_a_change_that_cannot_be_run_is_not_proposed(argv, monkeypatch, capsys):
    estimate = memory.estimate
    monkeypatch.setattr(memory, "estimate", lambda setup: estimate(setup) if setup.checkpointing else [][0])
    assert preflight.run(argv("--gpu", "4090")) == 0
    text = capsys.readouterr().out
    assert "To go faster" in text and "--gradient_checkpointing False" not in text


@pytest.mark.parametrize("works", [True, False])
def test_a_rank_that_prints_nothing_lets_the_first_print(works, monkeypatch):
    waited = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(preflight.launches, "build", lambda launch: ())
    monkeypatch.setattr(preflight, "check", lambda *args: SimpleNamespace(works=works))
    monkeypatch.setattr(preflight.time, "sleep", waited.append)
    assert preflight.of_this_launch() == (0 if works else 1)
    assert sum(waited) == (0 if works else preflight.OTHER_RANKS_WAIT_SECONDS)


def test_everything_that_is_written(argv, tmp_path, capsys, monkeypatch):
    asked = []
    exact = SimpleNamespace(simulate=lambda setup: asked.append(setup) or memory.estimate(setup).peak)
    monkeypatch.setitem(sys.modules, "simulation", exact)
    picture, file = tmp_path / "memory.png", tmp_path / "memory.json"
    own = ["--gpu", "4090", "--exact", "--find_max_batch", "--plot", str(picture)]
    assert preflight.run(argv(*own, "--json", str(file))) == 0
    assert "+0.0% from the simulated" in capsys.readouterr().out
    assert preflight.run(argv("--gpu", "4090", "--json", "-")) == 0
    printed, written = json.loads(capsys.readouterr().out), json.loads(file.read_text())
    assert printed == written | {"exact": None, "max_batch": None}
    printed = written
    assert len(asked) == 1 and asked[0].strategy == "FSDP1" and asked[0].ranks == 8
    assert printed["max_batch"] >= 1 and picture.stat().st_size > 10_000
    for phase in printed["phases"].values():
        assert sum(phase.values()) <= printed["peak"]


@pytest.mark.parametrize(("exact", "seconds"), [([], 20), (["--exact"], 90)], ids=["formula", "exact"])
def test_a_70b_is_answered_at_once_and_in_little_ram(exact, seconds, assets, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(assets["fp32"] / name, tmp_path)
    shutil.copy(ROOT / "tests/published/llama-2-70b/config.json", tmp_path)
    flags = ["--model_name_or_path", tmp_path, "--dataset_name", "d", "--output_dir", tmp_path / "out", "--packing", "True"]
    config = ["--config_file", ROOT / "configs/fsdp_config.yaml"]
    command = [sys.executable, ROOT / "preflight.py", *exact, "--gpu", "h100-80gb", *config, "train.py", *flags]
    process = subprocess.Popen([str(word) for word in command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    printed = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0 and "fits on h100-80gb" in printed
    assert used.ru_utime + used.ru_stime <= seconds, "seconds of one core, as other tests run beside"
    assert used.ru_maxrss <= 3 * 2**20, "KiB"


def test_tokens_that_are_added_are_counted(argv, tmp_path, assets, capsys):
    def setup(*flags) -> dict:
        preflight.run(argv("--gpu", "4090", "--json", "-", flags=flags))
        return json.loads(capsys.readouterr().out)["setup"]

    def new_tokens(*flags) -> int:
        return setup(*flags)["new_tokens"]

    vocabulary = setup()["vocabulary"]
    assert new_tokens() == 0 and vocabulary > 250
    assert new_tokens("--new_special_tokens", "<|a|>,<|b|>") == 2
    assert setup("--new_special_tokens", "<|a|>,<|b|>")["vocabulary"] == vocabulary + 2
    assert new_tokens("--new_special_tokens", "<|a|>", "--use_peft_lora", "False", "--learning_rate", "1e-5") == 0


def test_own_flags_stand_anywhere_before_the_script():
    flags, rest = preflight.read_flags(
        ["--num_processes", "4", "--gpu", "h100", "--multi_gpu", "--exact", "train.py", "--gpu", "x", "--json", "y"]
    )
    assert (flags.gpu, flags.exact, flags.json) == ("h100", True, None)
    assert rest == ["--num_processes", "4", "--multi_gpu", "train.py", "--gpu", "x", "--json", "y"]


@pytest.mark.parametrize(
    "own, said",
    [
        (["--gpu"], "--gpu: expected one argument"),
        (["--rows", "many"], "--rows"),
        (["--rows", "0"], "--rows 0 must be at least 1"),
        (["--plot", "memory.jpg"], "name a .png file"),
        (["--gpu", "nonesuch"], "not a known card"),
        ([], "there is no accelerator here: .*--gpu h100-80gb"),
    ],
)
def test_a_wrong_command_is_one_line(argv, own, said):
    with pytest.raises(ValueError, match=said) as error:
        preflight.run(argv(*own))
    assert "\n" not in str(error.value)


def test_a_card_and_the_cpu_contradict_each_other(argv):
    with pytest.raises(ValueError, match="--gpu 4090 and --use_cpu True"):
        preflight.run(argv("--gpu", "4090", config="fsdp2_config_cpu", flags=["--use_cpu", "True"]))


@pytest.mark.parametrize("name", ["fsdp", "qlora_fsdp", "ddp", "single"])
def test_the_launchers_can_be_checked(name):
    """LAUNCH replaces `accelerate launch`, and nothing else."""
    env = {**os.environ, "LAUNCH": "echo preflight --gpu 4090", "PORT": "1"}
    out = subprocess.run(
        ["bash", ROOT / f"run_peft_{name}.sh", "--lora_r", "3"], env=env, check=True, capture_output=True, text=True
    )
    words = out.stdout.split()
    assert words[:4] == ["preflight", "--gpu", "4090", "--config_file"]
    assert "train.py" in words and words[-2:] == ["--lora_r", "3"]
