"""Every shipped file that people copy: configurations, launchers, recipes and the README's commands."""

import importlib
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

import arguments
from launching import ROOT, environment

GUIDE_FSDP = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": False,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_use_orig_params": False,
}
GUIDE = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "FSDP",
    "downcast_bf16": "no",
    "fsdp_config": GUIDE_FSDP,
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
ACCELERATE = [path for path in CONFIGS if "recipe" not in path.name]
RECIPES = [path for path in CONFIGS if "recipe" in path.name]
LAUNCHERS = sorted(ROOT.glob("run_*.sh"))
MODULES = sorted(path.stem for path in ROOT.glob("*.py"))


def test_the_guides_configs_key_for_key():
    qlora = {
        **GUIDE,
        "fsdp_config": {**GUIDE_FSDP, "fsdp_offload_params": True},
        "mixed_precision": "no",
        "num_processes": 2,
    }
    assert yaml.safe_load((ROOT / "configs/fsdp_config.yaml").read_text()) == GUIDE
    assert yaml.safe_load((ROOT / "configs/fsdp_config_qlora.yaml").read_text()) == qlora


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda p: p.name)
def test_accelerate_configs_load(path):
    """Accelerate takes any key under fsdp_config and ignores what it does not know, so the keys are checked here."""
    from accelerate.commands.launch import launch_command_parser

    config = load_config_from_file(str(path))
    known = {action.dest for action in launch_command_parser()._actions}
    assert set(config.fsdp_config or {}) <= known, "a key that Accelerate ignores"
    if (config.fsdp_config or {}).get("fsdp_version") == 2:
        only_fsdp1 = {"fsdp_sharding_strategy", "fsdp_use_orig_params", "fsdp_sync_module_states", "fsdp_backward_prefetch"}
        assert not only_fsdp1 & set(config.fsdp_config)
    text = path.read_text()
    assert (text.startswith("# ") and "accelerate launch" in text.split("compute_environment")[0]) or "run_peft" in text


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_recipes_parse(path):
    command = arguments.parse([str(path), "--use_cpu", "True", "--model_name_or_path", "m"])
    assert {"dataset_name", "learning_rate"} <= command.given


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda p: p.name)
def test_launchers(path):
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text()
    assert "set -euo pipefail" in text and len(text.splitlines()) <= 40 and text.startswith("#!/usr/bin/env bash")
    for name in re.findall(r"configs/[\w.]+", text):
        assert (ROOT / name).is_file(), name
    if "train.py" in text and path.name.startswith("run_peft"):
        assert '"$@"' in text
        flags = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text).split("train.py", 1)[1].replace('"$@"', "")
        arguments.parse([*shlex.split(flags.replace("\\\n", " ")), "--use_cpu", "True"])


def readme_commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def test_readme_opens_with_the_two_commands():
    assert readme_commands()[:2] == ["bash run_demo.sh", "bash run_tests.sh"]


@pytest.mark.parametrize("command", readme_commands())
def test_readme_commands_parse(command):
    """Files exist, and every call of train.py parses, recipe and flags."""
    words = [word for word in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=", word)]
    for word in words:
        if re.fullmatch(r"[\w/]+\.(sh|py|yaml|txt)", word) and not word.startswith(("my_", "my/")):
            assert (ROOT / word).exists(), word
    if "train.py" in words and "--help" not in words:
        flags = words[words.index("train.py") + 1 :]
        arguments.parse([*flags, "--use_cpu", "True"])


def test_modules_import_without_side_effects():
    """Importing changes no global state that a copied file would bring along: no process group, no patched library."""
    code = f"""
import importlib, os, torch, accelerate.state, torch.distributed.fsdp._init_utils as f, transformers, trl, peft
def state():
    patched = (accelerate.state.AcceleratorState.__init__, f._get_compute_device, torch.get_num_threads())
    return patched, dict(os.environ), torch.distributed.is_initialized(), torch.get_default_dtype()
for name in {MODULES}:
    before = state()
    importlib.import_module(name)
    after = state()
    changed = {{k for k in after[1] if after[1].get(k) != before[1].get(k)}}
    assert changed <= ({{"HF_HUB_DISABLE_TELEMETRY"}} if name in ("train", "preflight") else set()), (name, changed)
    assert before[0] == after[0] and before[2:] == after[2:] and not after[2], name
"""
    env = {k: v for k, v in environment().items() if k != "HF_HUB_DISABLE_TELEMETRY"}
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


def test_train_reads_in_one_screenful():
    assert len((ROOT / "train.py").read_text().splitlines()) <= 250
    assert "fsdp_auto_wrap_policy(" in (ROOT / "train.py").read_text()


def test_every_module_is_covered_by_the_readme():
    readme = (ROOT / "README.md").read_text()
    for name in MODULES:
        assert f"`{name}.py`" in readme, f"{name}.py is not in the README's list of files"
        assert importlib.util.find_spec(name) is not None
