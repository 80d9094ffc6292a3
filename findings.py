"""What is worth knowing about a launch before it starts, graded: all of it, where train.py stops at the first mistake.

error    it would stop, or silently do something else than was asked for
warning  it would run, and lose memory, time or results
advice   it runs as it is; this could be better, or cannot be seen from here
"""

import copy
import importlib.metadata
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from packaging.requirements import Requirement

import chat
import checks
import data
from errors import nearest, raise_first, refusals
from launch import Launch

GRADES = ("error", "warning", "advice")
LORA_RATES, FULL_RATES = (1e-6, 1e-2), (1e-8, 1e-3)  # learning rates outside of these are seldom meant
LONG_RUN_STEPS = 500
FSDP1_ONLY = [
    "fsdp_sharding_strategy", "fsdp_use_orig_params", "fsdp_sync_module_states", "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
]  # fmt: skip


@dataclass
class Finding:
    """One thing about a launch, each part one line. An error of checks.py says all in `what`.

    Attributes:
        change: the flag, key or command to write.
    """

    grade: Literal["error", "warning", "advice"]
    what: str
    why: str = ""
    change: str = ""

    @property
    def line(self) -> str:
        return ": ".join(part for part in (self.what, self.why, self.change) if part)


def notes(found: list[Finding]) -> list[str]:
    """The findings as lines for the health check; an error is raised as ValueError."""
    raise_first(finding.line for finding in found if finding.grade == "error")
    return [finding.line for finding in found]


def collect(
    launch: Launch,
    command,
    model_args,
    data_args,
    training_args,
    fsdp,
    config,
    tokenizer_size: int | None = None,
    *,
    here: bool,
    rows: int | None = None,
) -> list[Finding]:
    """All findings about a launch, the worst first.

    Args:
        launch, command, model_args, data_args, training_args, fsdp: as `launch.build` gives them.
        config: the model's.
        tokenizer_size: tokens of the tokenizer as train.py prepares it, if known.
        here: whether it will run on this machine, whose devices and files then count.
        rows: of the prepared training data, if known.
    """
    training_args = copy.copy(training_args)  # some checks write to it
    with launch.in_force():
        found = _mistakes(command, model_args, data_args, training_args, fsdp, config, here)
        found += _accelerate_config(launch, command, model_args, fsdp)
        for note in checks.settle_mixed_precision(training_args):
            found.append(Finding("advice", note, "", f"mixed_precision: {training_args.mixed_precision!r}"))
    if not list(checks.range_problems(model_args, training_args)):
        found += check_schedule(training_args, rows)
    found += _learning_rate(model_args, training_args) + _hub(training_args, here) + _versions()
    if here:
        found += _this_machine(model_args, training_args)
    else:
        found += _to_check_there(launch, model_args)
    if model_args.use_peft_lora and model_args.lora_dropout > 0:
        what = f"--lora_dropout {model_args.lora_dropout:g} keeps a dropped copy of each adapted layer's input"
        found.append(Finding("advice", what, "it costs memory and time", "--lora_dropout 0"))
    vocabulary = config.get_text_config().vocab_size
    if tokenizer_size is not None and tokenizer_size > vocabulary:
        what = f"the tokenizer has {tokenizer_size - vocabulary} tokens more than the model"
        found.append(Finding("advice", what, "their embedding rows are added, trained and saved in the adapter"))
    return sorted(found, key=lambda finding: GRADES.index(finding.grade))


def _mistakes(command, model_args, data_args, training_args, fsdp, config, here: bool) -> list[Finding]:
    """What train.py would refuse. Inside the launch's environment."""
    problems = [
        *checks.process_problems(command.use_cpu, fsdp),
        *checks.launch_problems(model_args, training_args, fsdp, config),
        *refusals(chat.check_template_name, model_args.chat_template_format),
        *refusals(data.check_choices, data_args, training_args),
    ]
    if data_args.dataset_mixture is None:  # whether a mixture names rows to evaluate on is seen when it is read
        problems += refusals(data.check_evaluation, data_args, training_args, data_args.splits.split(",")[1:])
    found = []
    if here:
        problems += checks.device_problems(command.use_cpu, fsdp)
        problems += checks.machine_problems(model_args, training_args)
        try:
            training_args.resume_from_checkpoint, skipped = checks.find_checkpoint(training_args, repair=False)
            problems += checks.file_problems(model_args, training_args)
            found = [Finding("warning", line) for line in skipped]
        except ValueError as error:
            problems.append(str(error))
    return [Finding("error", problem) for problem in problems] + found


def _accelerate_config(launch: Launch, command, model_args, fsdp) -> list[Finding]:
    """What the Accelerate config says that does nothing, or not what it seems. Inside the launch's environment."""
    found = [
        Finding("warning", line, "a setting that was meant is not in force") for line in checks.unknown_fsdp_variables()
    ]
    written, file = launch.yaml.get("fsdp_config") or {}, launch.config_file
    if launch.yaml.get("use_cpu") and not command.use_cpu:
        what = f"use_cpu: true in {file} and no --use_cpu True"
        found.append(Finding("error", what, "train.py looks for accelerators unless it is told the same", "--use_cpu True"))
    if written and fsdp is None:
        what = f"fsdp_config in {file} is not read: distributed_type is {launch.yaml['distributed_type']}"
        found.append(Finding("warning", what, "the model is not sharded", "distributed_type: FSDP"))
        return found
    known = {checks.fsdp_key(variable) for variable in checks.FSDP_VARIABLES}
    for key, value in written.items():
        key = key if key.startswith("fsdp") else f"fsdp_{key}"  # Accelerate takes both
        if key not in known:
            what = f"{key} under fsdp_config in {file} is read by nothing{nearest(key, known)}"
            found.append(Finding("error", what, "Accelerate ignores a key that it does not know", f"remove {key}: {value}"))
        if fsdp.version == 2 and key in FSDP1_ONLY:
            grade = "warning" if key == "fsdp_forward_prefetch" and value is True else "advice"
            found.append(Finding(grade, f"{key}: {value} in {file} is not read under FSDP2", "", f"remove {key}"))
        if fsdp.version == 1 and key == "fsdp_reshard_after_forward":
            what = f"{key}: {value} in {file} is not read under FSDP1"
            found.append(Finding("advice", what, "fsdp_sharding_strategy decides", f"remove {key}"))
    if fsdp is None:
        return found
    policy = os.environ.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP").upper()
    if fsdp.version == 1 and model_args.use_peft_lora:
        if policy != "TRANSFORMER_BASED_WRAP":
            what = f"fsdp_auto_wrap_policy: {policy} is not used with LoRA under FSDP1"
            why = "train.py wraps each layer, and each trained module by itself"
            found.append(Finding("advice", what, why, "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"))
    elif policy == "NO_WRAP":
        what = "fsdp_auto_wrap_policy: NO_WRAP (as also where the key is missing) makes one unit of the whole model"
        why = "every rank gathers all weights at once"
        found.append(Finding("warning", what, why, "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"))
    return found


def total_steps(training_args, rows: int | None) -> int | None:
    """Optimizer steps of the whole run, as the Trainer counts them; None if that takes the number of rows."""
    if training_args.max_steps > 0:
        return training_args.max_steps
    if rows is None:
        return None
    each = training_args.per_device_train_batch_size * training_args.world_size
    batches = rows // each if training_args.dataloader_drop_last else math.ceil(rows / each)
    per_epoch = max(math.ceil(batches / training_args.gradient_accumulation_steps), 1)
    return math.ceil(training_args.num_train_epochs * per_epoch)


def every(steps_or_share: float, steps: int) -> int:
    """An interval such as --save_steps in steps; below 1 it is a share of the run."""
    return max(math.ceil(steps_or_share * steps) if steps_or_share < 1 else int(steps_or_share), 1)


def check_schedule(training_args, rows: int | None) -> list[Finding]:
    """Rows, steps, warm-up and intervals that make no sense together.

    Args:
        rows: of the prepared training data; None if not known, and then only --max_steps says how many steps there are.
    """
    found = []
    micro = training_args.per_device_train_batch_size * training_args.world_size
    batch = micro * training_args.gradient_accumulation_steps
    if rows is not None and rows < micro and training_args.dataloader_drop_last:
        what = f"{rows} rows are fewer than the {micro} of one batch on all processes, and --dataloader_drop_last drops them"
        return [Finding("error", what, "there is nothing to train on", "--dataloader_drop_last False")]
    if rows is not None and rows < batch:
        what = f"{rows} rows are fewer than the {batch} of one step"
        why = "each epoch is one step on fewer rows than asked for" + (", some of them twice" if rows % micro else "")
        change = "--gradient_accumulation_steps 1 or fewer processes"
        found.append(Finding("warning", what, why, change))
    steps = total_steps(training_args, rows)
    if steps is None:
        return found
    warmup = training_args.get_warmup_steps(steps)
    if warmup >= steps and training_args.warmup_steps > 0:
        what = f"--warmup_steps {training_args.warmup_steps:g} is {warmup} of {steps} steps"
        why = f"the learning rate never gets to {training_args.learning_rate:g}"
        found.append(Finding("warning", what, why, f"--warmup_steps {steps // 10}"))
    if training_args.save_strategy == "steps" and every(training_args.save_steps, steps) > steps:
        what = f"--save_steps {training_args.save_steps:g} is more than the {steps} steps of the run"
        found.append(Finding("warning", what, "an interrupted run starts anew", f"--save_steps {max(steps // 4, 1)}"))
    if training_args.save_strategy == "no" and steps > LONG_RUN_STEPS:
        what = f"--save_strategy no saves nothing in {steps} steps"
        found.append(Finding("warning", what, "an interrupted run starts anew", "--save_strategy steps"))
    if training_args.eval_strategy == "steps" and every(training_args.eval_steps, steps) > steps:
        what = f"--eval_steps {training_args.eval_steps:g} is more than the {steps} steps of the run"
        found.append(Finding("advice", what, "it is evaluated at the end only", f"--eval_steps {max(steps // 4, 1)}"))
    if training_args.logging_strategy == "steps" and every(training_args.logging_steps, steps) > steps:
        what = f"--logging_steps {training_args.logging_steps:g} is more than the {steps} steps of the run"
        found.append(Finding("advice", what, "no loss is printed on the way", "--logging_steps 1"))
    return found


def _learning_rate(model_args, training_args) -> list[Finding]:
    low, high = LORA_RATES if model_args.use_peft_lora else FULL_RATES
    rate, kind = training_args.learning_rate, "LoRA" if model_args.use_peft_lora else "training every weight"
    if low <= rate <= high or not rate > 0:  # checks.RANGES refuses what is not above 0
        return []
    why = "it learns next to nothing" if rate < low else "it is likely to diverge"
    usual = "1e-4" if model_args.use_peft_lora else "1e-5"
    return [Finding("warning", f"--learning_rate {rate:g} is unusual for {kind}", why, f"--learning_rate {usual}")]


def checkpoints_kept(training_args, steps: int | None) -> int:
    """How many checkpoints lie on the disk at once, at most.

    Args:
        steps: of the whole run; None if not known.
    """
    strategy, limit = training_args.save_strategy, training_args.save_total_limit
    if strategy == "no":
        saves = 0
    elif strategy == "epoch":
        saves = math.ceil(training_args.num_train_epochs)
    elif strategy == "steps" and steps is not None:
        saves = math.ceil(steps / every(training_args.save_steps, steps))
    else:
        saves = 2  # it is not known how many; the next one is whole before the last is deleted
    return saves if limit is None else min(saves, limit + 1)


def check_disk(training_args, kept: int, checkpoint_bytes: int) -> list[Finding]:
    """The checkpoints to come against the free bytes of the output folder's disk."""
    need, folder = kept * checkpoint_bytes, Path(training_args.output_dir).absolute()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if need <= free:
        return []
    what = f"{kept} checkpoints of {checkpoint_bytes / 2**30:.3g} GiB do not fit in --output_dir {training_args.output_dir}"
    why = f"its disk has {free / 2**30:.3g} GiB free"
    fits = free // checkpoint_bytes - 1
    return [Finding("error", what, why, f"--save_total_limit {fits}" if fits > 0 else "--output_dir on another disk")]


def check_card(capability: tuple[int, int], name: str, model_args, training_args) -> list[Finding]:
    """What a card that is not here cannot do, by its CUDA compute capability."""
    found, version = [], ".".join(map(str, capability))
    if capability >= (8, 0):
        return []
    if training_args.bf16:
        what = f"--bf16 True on {name}, of compute capability {version}"
        found.append(Finding("warning", what, "bfloat16 is emulated below 8.0", "--bf16 False --fp16 True --dtype float32"))
    if model_args.use_flash_attn:
        what = f"--use_flash_attn True on {name}, of compute capability {version}"
        found.append(Finding("error", what, "FlashAttention 2 needs 8.0", "--use_flash_attn False"))
    return found


def _hub(training_args, here: bool) -> list[Finding]:
    """Whether the token may write where the run is pushed to. Asks the Hub who it is; nothing is created."""
    if not training_args.push_to_hub or checks.get_token() is None or checks.is_offline_mode():
        return []  # the last two are errors already
    try:
        who = HfApi().whoami()
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            why = "it is mistyped, expired or revoked"
            return [Finding("error", "--push_to_hub: the Hub refuses the token", why, "hf auth login")]
        return [_unreachable(here)]
    except Exception:  # whatever the HTTP library raises without a network
        return [_unreachable(here)]
    token = who.get("auth", {}).get("accessToken", {})
    target = training_args.hub_model_id or Path(training_args.output_dir).absolute().name
    target = target if "/" in target else f"{who['name']}/{target}"
    owner, role = target.split("/")[0], token.get("role")
    writable = {"write": "hf auth login with a token of role write", "owner": f"--hub_model_id {who['name']}/NAME"}
    if role == "read":
        return [Finding("error", f"--push_to_hub: the token may only read, not write {target}", "", writable["write"])]
    if role == "fineGrained":
        scopes = token.get("fineGrained", {}).get("scoped", [])
        names = {s["entity"].get("name") for s in scopes if "repo.write" in s.get("permissions", [])}
        if not names & {owner, target}:
            change = f"give it 'write access to contents' of {owner} on huggingface.co/settings/tokens"
            return [Finding("error", f"--push_to_hub: the fine-grained token may not write {target}", "", change)]
        return []
    roles = {org["name"]: org.get("roleInOrg") for org in who.get("orgs", [])} | {who["name"]: "owner"}
    if owner not in roles:
        what = f"--hub_model_id {target}: {who['name']} is not a member of {owner}"
        return [Finding("error", what, "", writable["owner"])]
    if roles[owner] == "read":
        return [Finding("error", f"--hub_model_id {target}: {who['name']} may only read in {owner}", "", writable["owner"])]
    return []


def _unreachable(here: bool) -> Finding:
    what = "--push_to_hub: the Hub cannot be reached from this machine"
    return Finding("error" if here else "advice", what, "the repository is made when the run starts", "--push_to_hub False")


def _versions() -> list[Finding]:
    """Installed packages against requirements.txt, where it lies beside this file."""
    file, found = Path(__file__).with_name("requirements.txt"), []
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        requirement = Requirement(line)
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # what is needed and missing is an error where it is needed
        if not requirement.specifier.contains(version, prereleases=True):
            what = f"{requirement.name} {version} is not {requirement.specifier}"
            found.append(Finding("warning", what, "this project is tested with those", f"pip install '{requirement}'"))
    return found


def _this_machine(model_args, training_args) -> list[Finding]:
    """What the devices and the files of this machine say, beyond the mistakes that train.py refuses."""
    found, sixteen = [], training_args.bf16 or training_args.fp16
    if not training_args.use_cpu and not torch.accelerator.is_available() and sixteen and training_args.world_size == 1:
        what = "there is no accelerator on this machine"
        found.append(Finding("error", what, "16-bit mixed precision needs one", "--use_cpu True"))
    if not training_args.use_cpu and torch.cuda.is_available() and training_args.bf16:
        capability = torch.cuda.get_device_capability()
        if capability < (8, 0):
            what = f"--bf16 True on {torch.cuda.get_device_name()}, of compute capability {'.'.join(map(str, capability))}"
            found.append(Finding("warning", what, "bfloat16 is emulated below 8.0", "--fp16 True --dtype float32"))
    if model_args.use_4bit_quantization or model_args.use_8bit_quantization:
        found += _bitsandbytes(training_args.use_cpu)
    folder = Path(training_args.output_dir)
    if training_args.resume_from_checkpoint is None:
        there = [name for name in ("run.json", "adapter_model.safetensors", "model.safetensors") if (folder / name).exists()]
        if there and not checks.checkpoint.numbered(folder):
            what = f"--output_dir {folder} holds the result of an earlier run ({there[0]})"
            found.append(Finding("warning", what, "it will be overwritten", "--output_dir ANOTHER"))
    return found


def _bitsandbytes(use_cpu: bool) -> list[Finding]:
    """Quantises 64 numbers on the device: a native library that is missing, or not built for it, shows at once."""
    try:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        device = "cpu" if use_cpu or not torch.accelerator.is_available() else torch.accelerator.current_accelerator()
        packed, state = quantize_4bit(torch.zeros(64, dtype=torch.float32, device=device), quant_type="nf4")
        dequantize_4bit(packed, state).cpu()
    except Exception as error:  # the library raises what its backend happens to
        reason = " ".join(str(error).split())[:200]
        change = "pip install --force-reinstall bitsandbytes, for the CUDA version of torch"
        return [Finding("error", "bitsandbytes does not run on this device", reason, change)]
    return []


def _to_check_there(launch: Launch, model_args) -> list[Finding]:
    found = []
    if launch.counted:
        what = f"there is no config and no --num_processes, so {launch.processes} process(es) were counted on this machine"
        found.append(Finding("advice", what, "Accelerate counts the devices where it is started", "--num_processes N"))
    if model_args.use_flash_attn:
        what = "--use_flash_attn True needs flash-attn or kernels on the machine it runs on"
        found.append(Finding("advice", what, "to check there", "pip install -r requirements-gpu.txt"))
    return found
