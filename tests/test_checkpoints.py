"""A run goes on exactly where it stopped, whatever stopped it, and nothing that is damaged is gone on from."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import checkpoint
import checks
from launching import ROOT, Launches, assert_fsdp, environment, free_port
from strategies import FSDP1, FSDP2, NO_FSDP, assert_sharded

FILES = ("adapter_model.safetensors", "optimizer.safetensors", "training_state.json", "trainer_state.json")


def flags(assets, out, **extra) -> list[str]:
    values = {
        "model_name_or_path": assets["fp32"],
        "dataset_name": assets["data"],
        "chat_template_format": "chatml",
        "use_cpu": True,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "lora_r": 4,
        "lora_dropout": 0.1,
        "logging_steps": 3,
        "save_strategy": "steps",
        "output_dir": out,
    } | extra
    return [str(token) for key, value in values.items() for token in (f"--{key}", value)]


def same_state(folder: Path, other: Path) -> None:
    """Two checkpoints hold the same bits, but for where they were to be written."""
    for name in FILES[:2]:
        assert (folder / name).read_bytes() == (other / name).read_bytes(), f"{folder}: {name}"
    for name in FILES[2:]:
        a, b = (json.loads((path / name).read_text()) for path in (folder, other))
        for state in (a, b):
            for key in ("output_dir", "resume_from_checkpoint", "max_steps", "num_train_epochs"):
                state.get("arguments", {}).pop(key, None)
            for row in state.get("log_history", []):  # how long it took is not part of the run's state
                for key in [key for key in row if key.endswith(("_runtime", "_per_second"))]:
                    del row[key]
            if state.get("best_model_checkpoint"):
                state["best_model_checkpoint"] = Path(state["best_model_checkpoint"]).name
        assert a.keys() == b.keys()
        assert not [key for key in a if a[key] != b[key]], f"{folder}: {name}"


def went_on_from(text: str) -> int:
    """The step that the health check says a run went on from; its lines are broken anywhere."""
    return int(re.search(r"checkpoint-(\d+)(,which\d+processeswrote)?;step\1isdone", re.sub(r"\s", "", text))[1])


def global_order(facts: list[dict]) -> dict[str, list[str]]:
    """The rows of each step, in the order in which the ranks take them from the data."""
    steps = {}
    for batches in zip(*(fact["batches"] for fact in facts), strict=True):
        for step, rows in batches:
            steps.setdefault(step, []).extend(rows)
    return steps


# ---- Exact resume ----

LAYOUTS = {
    "lora-fsdp1": (FSDP1, {}),
    "lora-fsdp2": (FSDP2, {}),
    "qlora-fsdp1": (FSDP1, {"use_4bit_quantization": True}),
    "qlora-fsdp2": (FSDP2, {"use_4bit_quantization": True}),
    "ddp": (NO_FSDP, {}),
}
FOUR_BIT = {"bnb_4bit_compute_dtype": "float32", "bnb_4bit_quant_storage_dtype": "float32"}


@pytest.fixture(scope="module")
def resumed(assets, tmp_path_factory):
    """10 steps of 8 to an epoch; 5, a new process and 5 more; the same at other numbers of ranks."""
    launches = Launches(tmp_path_factory.mktemp("resumed"))
    for name, (env, extra) in LAYOUTS.items():
        extra = extra | (FOUR_BIT if extra else {})
        common = dict(save_steps=5, max_steps=10, **extra)
        whole = launches.add(name, flags(assets, launches.out / name, **common), env)
        launches.add(
            f"{name}-rest",
            flags(assets, launches.out / f"{name}-rest", **common, resume_from_checkpoint=whole / "checkpoint-5"),
            env,
            gathered=True,
        )
    for name, source, env, world, accumulation in (
        ("2-to-1", "lora-fsdp1", NO_FSDP, 1, 4),
        ("2-to-4", "lora-fsdp2", FSDP1, 4, 1),
        ("4-to-2", "2-to-4", FSDP2, 2, 2),
    ):
        at = 10 if source == "2-to-4" else 5
        change = dict(gradient_accumulation_steps=accumulation, max_steps=at + 5, save_steps=5)
        resume = launches.out / source / f"checkpoint-{at}"
        argv = flags(assets, launches.out / name, **change, resume_from_checkpoint=resume)
        launches.add(name, argv, env, world, gathered=True)
    launches.run().assert_ended_well()
    return launches


@pytest.mark.parametrize("name", LAYOUTS)
def test_ten_steps_are_five_and_five(resumed, name):
    whole, rest = resumed.out / name, resumed.out / f"{name}-rest"
    same_state(whole / "checkpoint-10", rest / "checkpoint-10")
    assert (whole / FILES[0]).read_bytes() == (rest / FILES[0]).read_bytes()
    order, again = global_order(resumed.facts(name)), global_order(resumed.facts(f"{name}-rest"))
    assert list(again) == [5, 6, 7, 8, 9] and all(order[step] == again[step] for step in again)
    if name != "ddp":
        for facts in (resumed.facts(name), resumed.facts(f"{name}-rest")):
            assert_sharded(facts, int(name[-1]))
    logs = [
        [(row["step"], row["loss"], row["num_tokens"]) for row in resumed.facts(case)[0]["history"] if "loss" in row]
        for case in (name, f"{name}-rest")
    ]
    assert logs[0] == logs[1] and [step for step, *_ in logs[0]] == [3, 6, 9], "a sum or a count starts again"


@pytest.mark.parametrize(
    ("name", "source", "at"), [("2-to-1", "lora-fsdp1", 5), ("2-to-4", "lora-fsdp2", 5), ("4-to-2", "2-to-4", 10)]
)
def test_another_number_of_ranks(resumed, name, source, at):
    """What is loaded is what was saved, put together by torch's own gathering, and the rows come in the same order."""
    saved = load_file(resumed.out / source / f"checkpoint-{at}" / "optimizer.safetensors")
    loaded = load_file(resumed.out / f"{name}.safetensors")
    assert set(loaded) == set(saved) and all(torch.equal(loaded[key], saved[key]) for key in saved)
    if name != "2-to-1":
        assert_sharded(resumed.facts(name), 1 if name == "2-to-4" else 2)
    again = global_order(resumed.facts(name))
    assert list(again) == list(range(at, at + 5))
    if at == 5:
        order = global_order(resumed.facts(source))
        assert all(order[step] == again[step] for step in again)
    state = json.loads((resumed.out / name / f"checkpoint-{at + 5}" / "trainer_state.json").read_text())
    assert state["global_step"] == at + 5 and [row["step"] for row in state["log_history"]][:1] == [3]


def test_the_adapter_that_is_loaded_is_the_one_that_was_saved(resumed, assets, tmp_path):
    """On another number of ranks, before a step changes it: a run whose last step is done saves what it has read."""
    launches = Launches(tmp_path)
    for world, env, accumulation in ((1, NO_FSDP, 4), (4, FSDP1, 1)):
        folder = tmp_path / f"{world}"
        shutil.copytree(resumed.out / "qlora-fsdp2" / "checkpoint-10", folder / "checkpoint-10")
        change = dict(use_4bit_quantization=True, max_steps=10, gradient_accumulation_steps=accumulation, **FOUR_BIT)
        change["save_steps"] = 1  # a step that is not to be done would leave a checkpoint
        launches.add(f"{world}", flags(assets, folder, **change, resume_from_checkpoint="auto"), env, world)
    launches.run().assert_ended_well()
    for world in (1, 4):
        saved, again = (load_file(f / FILES[0]) for f in (tmp_path / f"{world}" / "checkpoint-10", tmp_path / f"{world}"))
        assert set(saved) == set(again) and all(torch.equal(saved[key], again[key]) for key in saved)
        assert [step for step, _ in checkpoint.numbered(tmp_path / f"{world}")] == [10], "a finished run trained on"


# ---- Faults and signals ----

# Faults after which a second run is started too. What the others leave behind is compared byte by byte only.
GOES_ON = ["kill-1-before-model", "kill-1-before-optimizer", "kill-1-before-commit", "kill-after-rename", "raise-with-workers", "no-space-for-model"]  # fmt: skip
COMMON = dict(
    gradient_checkpointing=False,
    save_steps=3,
    eval_strategy="steps",
    eval_steps=3,
    splits="train,test",
    max_steps=8,
    logging_steps=2,
)
BEFORE = {  # what a save is about to do, by the name of the function that does it
    "model": "begin",
    "optimizer": "TensorWriter",
    "random numbers": "_write_training_state",
    "state": "_write_trainer_state",
    "commit": "commit",
}
FAULTS = {
    **{
        f"kill-{len(ranks)}-before-{phase.replace(' ', '-')}": {"at": at, "ranks": ranks, "do": "kill"}
        for phase, at in BEFORE.items()
        for ranks in ([0], [0, 1])
    },
    "kill-other-rank": {"at": "begin", "ranks": [1], "do": "kill"},
    "kill-before-rename": {"at": "rename", "ranks": [0], "do": "kill"},
    "kill-after-rename": {"at": "renamed", "ranks": [0], "do": "kill"},
    "kill-in-training": {"at": "training", "ranks": [1], "do": "kill"},
    "no-space-for-model": {"at": "write", "ranks": [0], "do": "ENOSPC"},
    "no-space-for-manifest": {"at": "commit", "ranks": [0], "do": "ENOSPC"},
    "read-only": {"at": "begin", "ranks": [0], "do": "EROFS"},
    "raise-in-training": {"at": "training", "ranks": [1], "do": "raise"},
    "raise-with-workers": {"at": "training", "ranks": [1], "do": "raise"},
    "raise-in-save": {"at": "_write_training_state", "ranks": [0], "do": "raise"},
    "raise-in-save-elsewhere": {"at": "begin", "ranks": [1], "do": "raise"},
}
SIGNALS = {
    "term-in-a-step": {"at": "micro-batch", "ranks": [1], "do": "SIGTERM"},
    "int-before-evaluation": {"at": "training", "ranks": [0], "do": "SIGINT", "step": 6},
    "term-in-evaluation": {"at": "evaluation", "ranks": [1], "do": "SIGTERM", "step": 6},
    "term-after-a-step": {"at": "training", "ranks": [0, 1], "do": "SIGTERM"},
    "term-at-the-epoch": {"at": "training", "ranks": [1], "do": "SIGTERM", "step": 8},
}


@pytest.fixture(scope="module")
def interrupted(assets, tmp_path_factory):
    """One uninterrupted run, and for each fault and signal one that it interrupts and the one that goes on."""
    launches = Launches(tmp_path_factory.mktemp("interrupted"))
    for env, name in ((FSDP2, "reference"), (FSDP1, "reference-fsdp1")):
        launches.add(name, flags(assets, launches.out / name, **COMMON | {"max_steps": 9}), env)
    for name, fault in (FAULTS | SIGNALS).items():
        env = FSDP1 if name in ("term-in-a-step", "kill-1-before-optimizer") else FSDP2
        argv = flags(assets, launches.out / name, **COMMON | {"max_steps": 9}, resume_from_checkpoint="auto")
        argv += ["--dataloader_num_workers", "1"] if name == "raise-with-workers" else []
        step = fault.get("step", 6 if name in FAULTS else 4)
        launches.add(name, argv, env, fault=fault | {"step": step})
        if name in GOES_ON or name in SIGNALS:
            launches.add(f"{name}-rest", argv, env)
    argv = flags(assets, launches.out / "twice", **COMMON)
    launches.add("twice", argv, FSDP2, fault={"at": "training", "ranks": [0], "step": 4, "do": "SIGTERM twice"})
    return launches.run()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_every_rank_and_costs_no_committed_checkpoint(interrupted, name):
    codes = interrupted.codes(name)
    assert "hung" not in codes and 0 not in codes, f"{codes}: {interrupted.text(name)[-2000:]}"
    folder = interrupted.out / name
    reference = interrupted.out / ("reference-fsdp1" if name == "kill-1-before-optimizer" else "reference")
    if FAULTS[name]["do"] in ("ENOSPC", "EROFS"):
        for rank in range(2):
            line = interrupted.text(name, rank).strip().splitlines()[-1]
            assert re.search(r"error.*: .*checkpoint-6 was not saved \((No space|Read-only).*\)", line), line
    committed = 6 if name == "kill-after-rename" else 3
    if name not in GOES_ON:
        assert checks.find_checkpoint(Arguments(folder)) == (str(folder / "checkpoint-3"), [])
        return same_state(folder / "checkpoint-3", reference / "checkpoint-3")
    # The run that went on started from the last committed checkpoint and became the uninterrupted one.
    assert set(interrupted.codes(f"{name}-rest")) == {0}, interrupted.text(f"{name}-rest")[-3000:]
    assert went_on_from(interrupted.text(f"{name}-rest")) == committed
    if name == "raise-with-workers":  # its arguments differ
        return
    for step in (3, 6, 9):
        same_state(folder / f"checkpoint-{step}", reference / f"checkpoint-{step}")
    assert (folder / FILES[0]).read_bytes() == (reference / FILES[0]).read_bytes()
    assert not list(folder.glob("_*")), "what the interrupted save left is still there"
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_stops_all_ranks_at_one_step(interrupted, name):
    assert set(interrupted.codes(name)) == {0}, interrupted.text(name)[-3000:]
    folder, step = interrupted.out / name, SIGNALS[name].get("step", 4)
    stopped = re.search(r"stopped at step (\d+): (\S+) is committed", interrupted.text(name))
    # The part of a step that was done is lost; a step that was done is not.
    assert stopped and stopped[1] == str(step), interrupted.text(name)[-2000:]
    assert stopped[2] == str(folder / f"checkpoint-{step}") and "stopped" not in interrupted.text(name, 1)
    assert set(interrupted.codes(f"{name}-rest")) == {0}, interrupted.text(f"{name}-rest")[-3000:]
    assert went_on_from(interrupted.text(f"{name}-rest")) == step
    reference = interrupted.out / ("reference-fsdp1" if name == "term-in-a-step" else "reference")
    same_state(folder / "checkpoint-9", reference / "checkpoint-9")  # with every log line and evaluation
    assert (folder / FILES[0]).read_bytes() == (reference / FILES[0]).read_bytes()


def test_a_second_signal_ends_the_process_at_once(interrupted):
    codes = interrupted.codes("twice")
    assert codes[0] == 128 + signal.SIGTERM and codes[1] not in (0, "hung"), codes
    folder = interrupted.out / "twice"
    assert [path.name for _, path in checkpoint.numbered(folder)] == ["checkpoint-3"]
    assert checkpoint.problem_with(folder / "checkpoint-3") is None
    assert json.loads((folder / "run.json").read_text())["status"] == "running"


def test_no_space_on_a_real_disk(assets, tmp_path):
    """A file system of 700 KB in a namespace of its own: room for two checkpoints, not for three."""
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    launches = Launches(tmp_path / "log")
    disk = tmp_path / "disk"
    launches.out.mkdir()
    disk.mkdir()
    launches.add("full", flags(assets, disk / "out", save_steps=2, max_steps=6), FSDP2)
    keep = tmp_path / "kept"
    mount = f'mount -t tmpfs -o size=700k tmpfs {disk} && "$@" && ls -a {disk}/out && cp -r {disk}/out {keep}'
    launches.run(prefix=("unshare", "-rm", "sh", "-c", mount, "sh"))
    assert launches.codes("full") == [1, 1]
    assert re.search(r"was not saved \(.*No space left on device", launches.text("full").strip().splitlines()[-1])
    found = [path.name for _, path in checkpoint.numbered(keep)]
    assert found and all(checkpoint.problem_with(keep / name) is None for name in found)
    assert not list(keep.glob("_*")), "a save that failed still takes up the space"


# ---- What a run does once an epoch ----

EPOCHS = dict(
    splits="train[:61],test", eval_strategy="epoch", save_strategy="epoch", logging_strategy="epoch", num_train_epochs=2,
    load_best_model_at_end=True, lr_scheduler_type="constant", include_num_input_tokens_seen=True, eval_on_start=True,
)  # fmt: skip
STOPS = {
    "in-a-step": {"at": "micro-batch", "ranks": [0], "step": 11, "do": "SIGTERM"},
    "before-log-and-evaluation": {"at": "training", "ranks": [1], "step": 8, "do": "SIGTERM"},
    "in-the-last-evaluation": {"at": "evaluation", "ranks": [0], "step": 16, "do": "SIGTERM"},
}


@pytest.fixture(scope="module")
def epochs(assets, tmp_path_factory):
    """61 rows, so that the last batch of an epoch is filled up; 8 steps to an epoch; DDP."""
    launches = Launches(tmp_path_factory.mktemp("epochs"))
    launches.add("whole", flags(assets, launches.out / "whole", **EPOCHS), NO_FSDP)
    for name, fault in STOPS.items():
        argv = flags(assets, launches.out / name, **EPOCHS, resume_from_checkpoint="auto")
        argv += ["--save_only_model", "True"] if name == "in-a-step" else []
        launches.add(name, argv, NO_FSDP, fault=fault)
        launches.add(f"{name}-rest", argv, NO_FSDP)
    launches.run().assert_ended_well()
    return launches


@pytest.mark.parametrize("name", STOPS)
def test_epochs_go_on_with_their_log_evaluation_and_best_model(epochs, name):
    whole, stopped = epochs.out / "whole", epochs.out / name
    rows = []
    for folder in (whole, stopped):
        history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        rows.append([{k: v for k, v in row.items() if not k.endswith(("runtime", "per_second"))} for row in history])
    last = [kind.pop() for kind in rows]
    assert rows[0] == rows[1] and [row["step"] for row in rows[0]] == [0, 8, 8, 16, 16]
    assert last[0]["train_loss"] == pytest.approx(last[1]["train_loss"], rel=1e-6)
    assert (whole / FILES[0]).read_bytes() == (stopped / FILES[0]).read_bytes(), "not the best model"
    assert f"checkpoint-{STOPS[name]['step']} is committed" in epochs.text(name)


def test_a_finished_run_that_is_started_again_saves_the_same(epochs, assets, tmp_path):
    folder = tmp_path / "whole"
    shutil.copytree(epochs.out / "whole", folder)
    (folder / FILES[0]).unlink()
    launches = Launches(tmp_path)
    launches.add("whole", flags(assets, folder, **EPOCHS, resume_from_checkpoint="auto"), NO_FSDP)
    launches.run().assert_ended_well()
    assert (folder / FILES[0]).read_bytes() == (epochs.out / "whole" / FILES[0]).read_bytes(), "the best was not found"
    assert [step for step, _ in checkpoint.numbered(folder)] == [8, 16]


# ---- The Hub, and training every weight ----


@pytest.fixture(scope="module")
def saved(assets, tmp_path_factory):
    launches = Launches(tmp_path_factory.mktemp("saved"))
    common = dict(save_steps=2, max_steps=4, push_to_hub=True)
    for name, strategy in (("every_save", "every_save"), ("all_checkpoints", "all_checkpoints"), ("down", "every_save")):
        argv = flags(assets, launches.out / name, **common, hub_strategy=strategy)
        launches.add(name, argv, FSDP2, hub="down" if name == "down" else "up")
    for name, env, base in (("full-fsdp1", FSDP1, "fp32"), ("full-fsdp2", FSDP2, "tied"), ("full-ddp", NO_FSDP, "tied")):
        common = dict(model_name_or_path=assets[base], use_peft_lora=False, max_steps=4, save_steps=2, learning_rate=1e-3)
        argv = flags(assets, launches.out / name, **common)
        argv = [
            token for i, token in enumerate(argv) if not {"--lora_r", "--lora_dropout"} & set(argv[max(i - 1, 0) : i + 1])
        ]
        launches.add(name, argv, env)
        rest = [str(launches.out / f"{name}-rest") if token == str(launches.out / name) else token for token in argv]
        launches.add(f"{name}-rest", [*rest, "--resume_from_checkpoint", launches.out / name / "checkpoint-2"], env)
    return launches.run()


def test_every_save_pushes_the_adapter_of_a_committed_checkpoint(saved):
    for name in ("every_save", "all_checkpoints"):
        assert set(saved.codes(name)) == {0}, saved.text(name)[-3000:]
        uploads = [json.loads(line) for line in (saved.out / f"{name}.uploads.txt").read_text().splitlines()]
        folder = saved.out / name
        both = [str(folder / "checkpoint-2"), str(folder / "checkpoint-4")]
        each = both if name == "every_save" else [path for path in both for _ in range(2)]
        assert [upload["folder"] for upload in uploads] == [*each, str(folder)]
        for upload in uploads:
            assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} < set(upload["files"])
            whole = upload["to"].startswith("checkpoint-")
            assert ({"optimizer.safetensors", "manifest.json"} < set(upload["files"])) == whole, upload
            assert not [file for file in upload["files"] if file.endswith(".bin") or file.startswith("checkpoint")]
        assert "run.json" in uploads[-1]["files"] and "README.md" in uploads[-1]["files"]


def test_a_failed_push_loses_nothing_and_says_how_to_push_again(saved):
    folder, text = saved.out / "down", saved.text("down")
    assert saved.codes("down")[0] == 1
    last = text.strip().splitlines()[-1]
    assert "the model is saved in" in last and f"hf upload me/model {folder} ." in last and "the Hub is down)" in last
    assert text.count("warning: a push to me/model failed (the Hub is down); training goes on") >= 1
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    assert (folder / FILES[0]).read_bytes() == (saved.out / "every_save" / FILES[0]).read_bytes()
    assert checkpoint.problem_with(folder / "checkpoint-4") is None


@pytest.mark.parametrize("name", ["full-fsdp1", "full-fsdp2", "full-ddp"])
def test_training_every_weight_goes_on_exactly_too(saved, name):
    from transformers import AutoModelForCausalLM

    for case in (name, f"{name}-rest"):
        assert set(saved.codes(case)) == {0}, saved.text(case)[-3000:]
    for at in ("checkpoint-4", "."):
        whole, rest = (load_file(saved.out / case / at / "model.safetensors") for case in (name, f"{name}-rest"))
        assert set(whole) == set(rest) and all(torch.equal(whole[key], rest[key]) for key in whole), at
    optimizers = [load_file(saved.out / case / "checkpoint-4" / FILES[1]) for case in (name, f"{name}-rest")]
    assert all(torch.equal(optimizers[0][key], optimizers[1][key]) for key in optimizers[0])
    state = AutoModelForCausalLM.from_pretrained(saved.out / name / "checkpoint-4").state_dict()
    assert all(torch.equal(state[key], whole[key]) for key in whole)


def test_the_run_record_says_what_was_run(saved, assets):
    record = json.loads((saved.out / "every_save" / "run.json").read_text())
    assert record["status"] == "finished" and record["step"] == 4 and record["metrics"]["train_loss"] > 0
    assert record["topology"] | {"device_name": ""} == {
        "strategy": "FSDP2", "processes": 2, "processes_per_node": 2, "device": "cpu", "device_name": "",
    }  # fmt: skip
    assert record["arguments"]["model_name_or_path"] == str(assets["fp32"]) and record["arguments"]["lora_r"] == 4
    assert not [key for key in record["arguments"] if "token" in key and "hub" in key]
    assert record["versions"]["torch"] == torch.__version__.split("+")[0] or record["versions"]["torch"] == torch.__version__
    assert record["data"]["rows"] == 64 and len(record["data"]["xxh3_128"]) == 32
    state = json.loads((saved.out / "every_save" / "checkpoint-4" / "training_state.json").read_text())
    assert state["arguments"] == record["arguments"] and state["data"] == record["data"]
    resumed = json.loads((saved.out / "full-ddp-rest" / "run.json").read_text())
    assert resumed["resumed_from"].endswith("full-ddp/checkpoint-2")


# ---- The launchers ----


def start(command: list, log: Path, **env) -> subprocess.Popen:
    with open(log, "w") as file:
        return subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env=environment(**env),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def wait_for(path: Path, process: subprocess.Popen, log: Path, seconds: int = 120) -> None:
    for _ in range(seconds * 10):
        if path.exists():
            return
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"{path} did not appear: {log.read_text()[-3000:]}")


def test_a_signal_to_launcher_ranks_and_workers_is_one_request(assets, tmp_path):
    """A terminal signals the whole process group, and the launcher passes it on to the same processes once more."""
    number = signal.SIGINT
    out, log = tmp_path / "out", tmp_path / "log.txt"
    argv = flags(assets, out, save_steps=2, max_steps=2000, logging_steps=1000, save_total_limit=2)
    argv += ["--dataloader_num_workers", "2"]
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file"]
    command += [ROOT / "configs" / "fsdp2_config_cpu.yaml", "--num_processes", 2, "--main_process_port", free_port()]
    process = start([*command, "tests/probe.py", *argv], log, PROBE_OUT=str(tmp_path / "facts"))
    wait_for(out / "checkpoint-6", process, log)
    os.killpg(process.pid, number)
    process.wait(120)
    text = log.read_text()
    step = re.search(r"stopped at step (\d+): .* is committed", text)
    assert step, text[-3000:]
    assert text.count(f"{signal.Signals(number).name}: stopping") == 1
    newest = checkpoint.numbered(out)[-1]
    assert newest[0] == int(step[1]) and checkpoint.problem_with(newest[1]) is None
    assert json.loads((out / "run.json").read_text())["status"] == "stopped"
    assert len(checkpoint.numbered(out)) == 2, "the limit was not kept"
    assert_fsdp([json.loads(path.read_text()) for path in tmp_path.glob("facts.rank*.json")], 2, 2)


SRUN = """#!/usr/bin/env python3
import os, sys
os.setsid()  # SLURM signals the job's steps, not its script
os.environ["SLURM_NODEID"] = "0"
open(os.environ["STEP"], "w").write(str(os.getpid()))
os.execvp(sys.argv[2], sys.argv[2:])
"""
SCONTROL = """#!/usr/bin/env bash
[ "$1" = show ] && echo 127.0.0.1 || echo "$@" >>"$REQUEUED"
"""


def test_slurm_queues_a_stopped_run_again_until_it_is_finished(assets, tmp_path):
    """`run_slurm.sh` with an srun and an scontrol of our own, which do what SLURM's do on one node."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    out, log, step, requeued = (tmp_path / name for name in ("out", "log.txt", "step", "requeued"))
    env = {
        "PATH": f"{tmp_path}{os.pathsep}{environment()['PATH']}", "CONFIG": "configs/fsdp2_config_cpu.yaml", "PORT": free_port(),
        "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "here",
        "STEP": str(step), "REQUEUED": str(requeued), "SCRIPT": "tests/probe.py", "PROBE_OUT": str(tmp_path / "facts"),
    }  # fmt: skip
    argv = flags(assets, out, save_steps=2, max_steps=30, logging_steps=1000, dataloader_num_workers=1)
    process = start(["bash", "run_slurm.sh", *argv], log, **env)
    wait_for(out / "checkpoint-2", process, log)
    os.killpg(int(step.read_text()), signal.SIGTERM)
    process.wait(120)
    assert requeued.read_text() == "requeue 77\n", log.read_text()[-3000:]
    stopped = json.loads((out / "run.json").read_text())
    assert stopped["status"] == "stopped" and checkpoint.problem_with(out / f"checkpoint-{stopped['step']}") is None
    process = start(["bash", "run_slurm.sh", *argv], log, **env | {"PORT": free_port()})
    assert process.wait(120) == 0, log.read_text()[-3000:]
    assert went_on_from(log.read_text()) == stopped["step"]
    assert json.loads((out / "run.json").read_text())["status"] == "finished"
    assert requeued.read_text() == "requeue 77\n"
    assert_fsdp([json.loads(path.read_text()) for path in tmp_path.glob("facts.rank*.json")], 2, 2)


def test_torchrun_starts_again_after_a_rank_was_killed(assets, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log.txt"
    argv = flags(assets, out, save_steps=2, max_steps=20, logging_steps=1000, save_total_limit=3)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 2, "--max-restarts", 1]
    command += ["--master_port", free_port(), "tests/probe.py", *argv, "--resume_from_checkpoint", "auto"]
    process = start(command, log, **FSDP2, PROBE_OUT=str(tmp_path / "facts"))
    wait_for(out / "checkpoint-4", process, log)
    children = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "probe.py"], capture_output=True, text=True).stdout
    os.kill(int(children.split()[-1]), signal.SIGKILL)
    assert process.wait(300) == 0, log.read_text()[-3000:]
    text = log.read_text()
    assert went_on_from(text) >= 4, text[-3000:]
    assert json.loads((out / "run.json").read_text())["status"] == "finished"
    assert [step for step, _ in checkpoint.numbered(out)] == [16, 18, 20]
    assert_fsdp([json.loads(path.read_text()) for path in tmp_path.glob("facts.rank*.json")], 2, 2)


# ---- What is gone on from ----


@pytest.fixture(scope="module")
def good(assets, tmp_path_factory) -> Path:
    """An output folder with checkpoint-2 and checkpoint-4, of one process."""
    launches = Launches(tmp_path_factory.mktemp("good"))
    folder = launches.add("out", flags(assets, launches.out / "out", save_steps=2, max_steps=4), NO_FSDP, 1)
    launches.run().assert_ended_well()
    return folder


class Arguments:
    def __init__(self, output_dir, resume="auto", max_steps=8):
        self.output_dir, self.resume_from_checkpoint = str(output_dir), str(resume)
        self.max_steps, self.num_train_epochs = max_steps, 3


def damage(path: Path, how: str) -> None:
    if how == "removed":
        return path.unlink()
    data = bytearray(path.read_bytes())
    if how == "truncated":
        data = data[: len(data) // 2]
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["truncated", "flipped", "removed"])
def test_a_damaged_file_is_found_and_named(good, tmp_path, how):
    names = sorted(path.name for path in (good / "checkpoint-4").iterdir())
    assert set(FILES) < set(names) and "tokenizer.json" in names and "chat_template.jinja" in names
    for name in names:
        folder = tmp_path / name
        shutil.copytree(good, folder)
        damage(folder / "checkpoint-4" / name, how)
        found, skipped = checks.find_checkpoint(Arguments(folder))
        assert found == str(folder / "checkpoint-2"), f"{name} {how}"
        assert len(skipped) == 1 and name in skipped[0] and "checkpoint-4 was skipped" in skipped[0]
        with pytest.raises(ValueError, match=rf"checkpoint-4 cannot be used: .*{re.escape(name)}"):
            checks.find_checkpoint(Arguments(folder, folder / "checkpoint-4"))


def test_what_resuming_refuses(good, tmp_path):
    assert checks.find_checkpoint(Arguments(good)) == (str(good / "checkpoint-4"), [])
    assert checks.find_checkpoint(Arguments(good, "False")) == (None, [])
    assert checks.find_checkpoint(Arguments(tmp_path)) == (None, [])
    with pytest.raises(ValueError, match="no checkpoint-N in"):
        checks.find_checkpoint(Arguments(tmp_path, "True"))
    with pytest.raises(ValueError, match="does not exist: name a checkpoint-N"):
        checks.find_checkpoint(Arguments(tmp_path, tmp_path / "checkpoint-3"))
    for value in ("True", good / "checkpoint-4"):
        with pytest.raises(ValueError, match=r"the end of a finished run \(step 4\)"):
            checks.find_checkpoint(Arguments(good, value, max_steps=4))
    assert checks.find_checkpoint(Arguments(good, max_steps=4))[0]
    # What the Trainer writes by itself, and a folder whose save was interrupted, have no manifest.
    folder = tmp_path / "plain"
    shutil.copytree(good, folder)
    (folder / "checkpoint-4" / "manifest.json").unlink()
    shutil.copytree(good / "checkpoint-4", folder / "_checkpoint-9.partial")
    (folder / "checkpoint-12.old").mkdir()
    assert checks.find_checkpoint(Arguments(folder))[0] == str(folder / "checkpoint-2")
    (folder / "checkpoint-2" / "manifest.json").unlink()
    with pytest.raises(ValueError, match="no checkpoint in .* is good .*delete them to start anew"):
        checks.find_checkpoint(Arguments(folder))


@pytest.mark.parametrize("lost", ["optimizer.safetensors", "training_state.json", "trainer_state.json"])
def test_a_checkpoint_without_training_state_is_not_resumed_as_if_it_had_it(good, tmp_path, lost):
    partial, folder = tmp_path / "_checkpoint-4.partial", tmp_path / "checkpoint-4"
    shutil.copytree(good / "checkpoint-4", partial)
    (partial / "manifest.json").unlink()
    (partial / lost).unlink()
    checkpoint.commit(partial, folder, {"step": 4})
    assert checkpoint.problem_with(folder) is None
    with pytest.raises(ValueError, match="cannot be used: it was saved without"):
        checks.find_checkpoint(Arguments(tmp_path, folder))


def test_rotation_keeps_the_newest_the_protected_and_what_is_not_ours(good, tmp_path, monkeypatch):
    for step in (1, 2, 3, 4, 5):
        shutil.copytree(good / "checkpoint-2", tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-5" / "manifest.json").unlink()
    assert checkpoint.rotate(tmp_path, 1, [tmp_path / "checkpoint-2"]) == []
    assert [step for step, _ in checkpoint.numbered(tmp_path)] == [2, 4, 5]
    rename = os.rename
    monkeypatch.setattr(checkpoint.os, "rename", lambda *a: (_ for _ in ()).throw(OSError(13, "Permission denied")))
    lines = checkpoint.rotate(tmp_path, 1)
    assert len(lines) == 1 and "checkpoint-2 could not be deleted (Permission denied)" in lines[0]
    monkeypatch.setattr(checkpoint.os, "rename", rename)
    # A deletion that stops half-way leaves nothing under the checkpoint's name.
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *a, **k: (_ for _ in ()).throw(OSError(16, "Busy")))
    assert "Busy" in checkpoint.rotate(tmp_path, 1)[0]
    assert [step for step, _ in checkpoint.numbered(tmp_path)] == [4, 5]


def test_rotation_never_takes_the_checkpoint_that_was_just_saved(good, assets, tmp_path):
    """A damaged checkpoint of a higher number is not the newest good one."""
    shutil.copytree(good, tmp_path / "out")
    damage(tmp_path / "out" / "checkpoint-4" / FILES[0], "truncated")
    launches = Launches(tmp_path)
    change = dict(save_steps=3, max_steps=3, save_total_limit=1, resume_from_checkpoint="auto")
    launches.add("out", flags(assets, tmp_path / "out", **change), NO_FSDP, 1)
    launches.run().assert_ended_well()
    assert checkpoint.problem_with(tmp_path / "out" / "checkpoint-3") is None


def test_a_replacement_that_was_interrupted_is_finished(good, tmp_path):
    for complete in (True, False):
        output = tmp_path / str(complete)
        shutil.copytree(good / "checkpoint-2", output / "_checkpoint-4.replaced")
        shutil.copytree(good / "checkpoint-4", output / "_checkpoint-4.partial")
        if not complete:
            (output / "_checkpoint-4.partial" / "manifest.json").unlink()
        checkpoint.recover(output)
        checkpoint.sweep(output)
        source = good / ("checkpoint-4" if complete else "checkpoint-2")
        assert [path.name for path in output.iterdir()] == ["checkpoint-4"]
        assert (output / "checkpoint-4" / FILES[0]).read_bytes() == (source / FILES[0]).read_bytes()


def test_one_run_at_a_time_in_an_output_folder(tmp_path):
    code = f"import checkpoint, os, time; checkpoint.lock({str(tmp_path)!r}); checkpoint.lock({str(tmp_path)!r})"
    orphan = "; os.fork() or time.sleep(30); print('held', flush=True); time.sleep(30)"
    command = [sys.executable, "-c", code]
    first = subprocess.Popen([*command[:2], code + orphan], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True)
    assert first.stdout.readline() == b"held\n"
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "another run is writing there" in second.stderr
    first.kill()  # its child lives on, and has not kept the lock
    first.wait()
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    os.killpg(first.pid, signal.SIGKILL)


def test_a_copy_under_another_number_is_not_that_checkpoint(good, tmp_path):
    shutil.copytree(good / "checkpoint-2", tmp_path / "checkpoint-7")
    shutil.copytree(good / "checkpoint-4", tmp_path / "checkpoint-4")
    found, skipped = checks.find_checkpoint(Arguments(tmp_path))
    assert found == str(tmp_path / "checkpoint-4") and "it is checkpoint-2 under another name" in skipped[0]


def test_a_commit_replaces_a_damaged_checkpoint_only_when_it_is_complete(good, tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint-4"
    shutil.copytree(good / "checkpoint-2", folder)
    partial = checkpoint.partial_of(folder)
    shutil.copytree(good / "checkpoint-4", partial)
    (partial / "manifest.json").unlink()
    fsync = os.fsync
    monkeypatch.setattr(checkpoint.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        checkpoint.commit(partial, folder)
    assert (folder / FILES[0]).read_bytes() == (good / "checkpoint-2" / FILES[0]).read_bytes()
    monkeypatch.setattr(checkpoint.os, "fsync", fsync)
    checkpoint.commit(partial, folder)
    assert (folder / FILES[0]).read_bytes() == (good / "checkpoint-4" / FILES[0]).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
    # If the second of its two renames fails, the first is taken back.
    shutil.copytree(good / "checkpoint-2", partial)
    (partial / "manifest.json").unlink()
    rename = os.rename

    def fails_once(source, target):
        if Path(source) == partial:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(checkpoint.os, "rename", fails_once)
    with pytest.raises(OSError, match="Input/output"):
        checkpoint.commit(partial, folder)
    assert (folder / FILES[0]).read_bytes() == (good / "checkpoint-4" / FILES[0]).read_bytes()


MISFITS = [
    ("holds checkpoint-4 of an earlier run: add --resume_from_checkpoint auto", {"resume_from_checkpoint": "False"}),
    ("checkpoint-4 beside it is newer and good", {"resume_from_checkpoint": "{good}/checkpoint-2"}),
    ("was trained with --learning_rate 0.01, now it is 0.001", {"learning_rate": 1e-3}),
    ("was trained with --warmup_steps 0, now it is 2", {"warmup_steps": 2}),
    ("was trained with --seed 42, now it is 7", {"seed": 7}),
    ("was trained with --lora_target_modules all-linear, now it is q_proj", {"lora_target_modules": "q_proj"}),
    ("was trained on 4 rows for each step, now it would be 2: with 1 processes use --gradient_accumulation_steps 2", {"gradient_accumulation_steps": 1}),
    ("now it would be 16: with 1 processes use --per_device_train_batch_size 4 --gradient_accumulation_steps 1", {"per_device_train_batch_size": 8}),
    ("the training data are not those it was trained on", {"splits": "train[:50]"}),
]  # fmt: skip


@pytest.fixture(scope="module")
def misfits(good, assets, tmp_path_factory):
    launches = Launches(tmp_path_factory.mktemp("misfits"))
    launches.before = sorted(good.rglob("*"))
    for number, (_, change) in enumerate(MISFITS):
        change = {key: str(value).format(good=good) for key, value in ({"resume_from_checkpoint": "auto"} | change).items()}
        launches.add(str(number), flags(assets, good, **{"max_steps": 8} | change), NO_FSDP, 1)
    launches.run()
    launches.after = sorted(good.rglob("*"))
    return launches


@pytest.mark.parametrize("number", range(len(MISFITS)))
def test_a_run_that_does_not_fit_its_checkpoint(misfits, number):
    assert misfits.codes(str(number)) == [1]
    last = misfits.text(str(number)).strip().splitlines()[-1]
    assert last.startswith("error: ") and MISFITS[number][0] in last, last
    assert misfits.before == misfits.after, "something was written"


def test_a_checkpoint_has_no_pickle_and_loads_as_an_adapter(resumed, assets):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resumed.out / "lora-fsdp1" / "checkpoint-5"
    assert not [path for path in folder.rglob("*") if path.suffix in (".pt", ".pth", ".bin", ".pkl", ".distcp")]
    base = AutoModelForCausalLM.from_pretrained(assets["fp32"])
    model = PeftModel.from_pretrained(base, folder)
    saved = load_file(folder / FILES[0])
    state = {key.replace(".default", ""): value for key, value in model.state_dict().items() if "lora_" in key}
    assert set(state) == set(saved) and all(torch.equal(state[key], saved[key]) for key in saved)
    assert AutoTokenizer.from_pretrained(folder).chat_template


def test_a_checkpoint_of_a_real_run_merges(resumed, tmp_path, capsys):
    """With the drift that training in 4 bits means, which merge.py learns from the checkpoint."""
    import merge

    merge.main(["--adapter", str(resumed.out / "qlora-fsdp1" / "checkpoint-10"), "--out", str(tmp_path / "merged")])
    out = capsys.readouterr().out
    assert "unmerged -> merged, float32" in out and "4-bit base + adapter -> merged" in out
    assert (tmp_path / "merged" / "model.safetensors").is_file()
