"""What `accelerate launch` would start is read without starting it, and is what it really starts."""

import json
import os
import sys

import pytest
import torch
import yaml
from accelerate import PartialState

import launch
from launching import ROOT, free_port, run

CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if "recipe" not in path.name)
NAMED = ["--model_name_or_path", "m", "--dataset_name", "d"]
SAYS_ITS_ENVIRONMENT = "import json, os, sys; os.environ['RANK'] == '0' and print('ENV', json.dumps(dict(os.environ)))"


@pytest.fixture(autouse=True)
def no_launch_around(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "MASTER_")) or name in launch.OF_A_RANK:
            monkeypatch.delenv(name)


def config(tmp_path, base: str = "fsdp_config", fsdp: dict | None = None, **keys) -> str:
    """A shipped config with other values; a key that is None is left out."""
    content = yaml.safe_load((ROOT / "configs" / f"{base}.yaml").read_text()) | keys
    if fsdp:
        content["fsdp_config"] = {k: v for k, v in (content["fsdp_config"] | fsdp).items() if v is not None}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}))
    return str(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs(path):
    read = launch.read(["--config_file", str(path), "--", *NAMED])
    assert read.yaml == yaml.safe_load(path.read_text()) and read.arguments == NAMED
    assert read.processes == read.yaml["num_processes"] == read.processes_per_machine and read.machines == 1
    sharded = read.yaml["distributed_type"] == "FSDP"
    assert (read.environment.get("ACCELERATE_USE_FSDP") == "true") == sharded
    assert read.environment.get("WORLD_SIZE") == (str(read.processes) if read.processes > 1 else None)
    for key, value in read.yaml.get("fsdp_config", {}).items():
        assert read.environment[key.upper()].lower() == str(value).lower(), key
    assert read.environment["ACCELERATE_MIXED_PRECISION"] == read.yaml["mixed_precision"]


def test_the_environment_is_the_one_that_accelerate_starts(tmp_path):
    script = tmp_path / "says.py"
    script.write_text(SAYS_ITS_ENVIRONMENT)
    flags = ["--config_file", str(ROOT / "configs/fsdp_config_cpu.yaml"), "--fsdp_sharding_strategy", "SHARD_GRAD_OP"]
    flags += ["--num-processes=1", "--mixed_precision", "bf16"]
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", free_port()]
    lines = run([*command, *flags, script]).stdout.splitlines()
    started = json.loads(next(line for line in lines if line.startswith("ENV")).removeprefix("ENV"))
    read = launch.read([*flags, str(script)]).environment
    assert read["FSDP_SHARDING_STRATEGY"] == "SHARD_GRAD_OP" and read["FSDP_USE_ORIG_PARAMS"] == "false"
    of_fsdp = {name for name in started if name.startswith(("FSDP_", "ACCELERATE_")) or name in launch.OF_A_RANK}
    assert of_fsdp and {name: started[name] for name in of_fsdp} == {
        name: value for name, value in read.items() if name.startswith(("FSDP_", "ACCELERATE_")) or name in launch.OF_A_RANK
    }


def test_flags_win_over_the_file_and_defaults_are_accelerates(tmp_path):
    path = config(tmp_path, fsdp={"fsdp_use_orig_params": None, "fsdp_forward_prefetch": None})
    environment = launch.read(["--config_file", path, "--fsdp-offload-params", "true", "--"]).environment
    assert environment["FSDP_OFFLOAD_PARAMS"] == "true" and environment["FSDP_FORWARD_PREFETCH"] == "false"
    assert environment["FSDP_USE_ORIG_PARAMS"] == "true", "a missing key means true"
    several = [
        *"--num_machines 2 --machine_rank 1 --num_processes 16".split(),
        *"--main_process_ip h --main_process_port 1".split(),
    ]
    read = launch.read(["--config_file", path, *several, "--"])
    assert (read.processes, read.machines, read.processes_per_machine) == (16, 2, 8)
    assert read.environment["LOCAL_WORLD_SIZE"] == "8"


def test_without_a_config_it_is_accelerates_default_one_or_none(tmp_path, monkeypatch):
    import accelerate.commands.config as commands
    import accelerate.commands.config.config_args as config_args
    import accelerate.commands.launch as accelerate_launch

    read = launch.read(["--", *NAMED])
    assert read.config_file is None and read.yaml == {} and read.processes == 1 and read.counted
    assert not launch.read(["--multi_gpu", "--num_processes", "4", "--"]).counted
    path = config(tmp_path)
    for module in (commands, config_args, accelerate_launch):
        monkeypatch.setattr(module, "default_config_file", path)
    read = launch.read(["--", *NAMED])
    assert read.config_file == path and read.processes == 8 and not read.counted


def test_in_force_and_restored(tmp_path):
    read, before = launch.read(["--config_file", config(tmp_path), "--"]), dict(os.environ)
    with read.in_force():
        assert [os.environ[name] for name in launch.OF_A_RANK] == ["8", "8", "0", "0"]
        assert os.environ["FSDP_VERSION"] == "1"
        inside = launch.Launch.from_environment()
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    assert dict(os.environ) == before
    assert (inside.processes, inside.machines, inside.yaml, inside.config_file) == (8, 1, {}, None)
    assert inside.environment.items() <= read.environment.items() and "FSDP_VERSION" in inside.environment


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], dict(bf16=True, fp16=False, use_cpu=False, mixed_precision="bf16")),
        (["--fp16", "True"], dict(bf16=False, fp16=True, mixed_precision="fp16")),
        (["--bf16", "False", "--tf32", "True"], dict(bf16=False, tf32=True, mixed_precision="no")),
        (["--use_cpu", "True"], dict(bf16=False, use_cpu=True, mixed_precision="no")),
        (["--torch_compile", "True"], dict(torch_compile=True, bf16=True)),
        (["--torch_compile_mode", "default"], dict(torch_compile=True)),
    ],
    ids=lambda value: " ".join(value) or "default" if isinstance(value, list) else "",
)
def test_built_as_asked_without_a_device(tmp_path, monkeypatch, flags, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "4")  # as inside a launch: no process group may be joined
    monkeypatch.setenv("RANK", "3")
    read = launch.read(["--config_file", config(tmp_path), "--", *NAMED, "--use_flash_attn", "True", *flags])
    command, model_args, data_args, training_args, fsdp = launch.build(read)
    assert {name: getattr(training_args, name) for name in expected} == expected
    assert model_args.use_flash_attn and data_args.dataset_name == "d" and command.use_cpu == training_args.use_cpu
    assert training_args.world_size == 8 and training_args.process_index == 0 and training_args.should_save
    assert fsdp.name == "FSDP1" and not fsdp.use_orig_params
    assert PartialState().num_processes == 1 and not torch.distributed.is_initialized()
    assert os.environ["WORLD_SIZE"] == "4"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config_file", "configs/fsdp_config.yaml"], "no script is named"),
        (["no_such.py"], "no_such.py does not exist: give the path of train.py"),
        (["--config_file", "no.yaml", "--"], "--config_file no.yaml does not exist"),
        (["--num_proceses", "8", "--"], r"has no flag --num_proceses \(did you mean --num_processes\?\)"),
        (["--fsdp-ofload-params", "true", "--"], r"did you mean --fsdp_offload_params\?"),
        (["8", "--"], "'8' before .*train.py belongs to no flag"),
        (["--num_processes", "eight", "--"], "invalid int value: 'eight'"),
        (["--mixed_precision", "bf17", "--"], "invalid choice: 'bf17'"),
        (["--use_deepspeed", "--"], "^use_deepspeed is asked for, and train.py trains with FSDP, DDP or on one device"),
        (["--multi_gpu", "--num_processes", "1", "--"], "at least 2 processes"),
        (["--config_file", "configs/fsdp_config.yaml", "--num_machines", "2", "--"], "2 machines need --main_process_ip"),
        (
            ["--multi_gpu", "--num_processes", "8", "--num_machines", "3", "--"],
            "8 is for all machines and does not divide by",
        ),
        (["--use_fsdp", "--"], "no device to count on this machine: .*--num_processes"),
        (["--config_file", "configs/demo_recipe.yaml", "--"], "no distributed_type .this is a recipe"),
    ],
)
def test_refused_command_lines(argv, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=message) as caught:
        launch.read(argv)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_proceses": 8, "mixed_precison": "no"}, r"mixed_precison \(did you mean mixed_precision\?\), num_proceses"),
        ({"mixed_precision": False}, "mixed_precision: False in .* must be bf16, fp16 or 'no' .in quotes"),
        ({"distributed_type": False}, "distributed_type: False in .* must be FSDP, MULTI_GPU or 'NO'"),
        ({"distributed_type": "FSPD"}, "'FSPD' is not a valid DistributedType"),
        ({"num_processes": "eight"}, "num_processes: eight in .* must be a whole number"),
        ({"num_processes": -2}, "--num_processes -2 and --num_machines 1 must be at least 1"),
        ({"num_machines": -1}, "--num_machines -1 must be at least 1"),
        ({"num_processes": None}, "manually pass in `--num_processes`"),
        ({"use_cpu": "no"}, "use_cpu: no in .* must be true or false"),
        ({"fsdp_config": ["a"]}, "fsdp_config: .* must be a list of `fsdp_...: value` lines"),
        ({"fsdp": {"fsdp_sync_module_states": False}}, "set `--fsdp_sync_module_states` to `True`"),
    ],
)
def test_refused_configs(tmp_path, keys, message):
    with pytest.raises(ValueError, match=message) as caught:
        launch.read(["--config_file", config(tmp_path, **keys), "--"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1", "cannot be read"), ("- a", "not a list"), ("debug: true\ndebug: false", "'debug' is written twice")],
)
def test_files_that_are_no_config(tmp_path, text, message):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        launch.read(["--config_file", str(tmp_path / "bad.yaml"), "--"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bf16", "True", "--fp16", "True"], "At most one of fp16 and bf16"),
        (["--load_best_model_at_end", "True", "--eval_strategy", "epoch"], "save and eval strategy to match"),
        (["--lora_rr", "8"], "did you mean lora_r"),
    ],
)
def test_arguments_that_contradict_each_other(flags, message):
    with pytest.raises(ValueError, match=message):
        launch.build(launch.read(["--", *NAMED, *flags]))
