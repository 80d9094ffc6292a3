"""What `accelerate launch` would start: its processes, their environment and the arguments of `train.py`.

Accelerate's own code reads the flags and the YAML file, so its defaults and its precedence are the real ones.
"""

import contextlib
import logging
import os
import sys
import types
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

import arguments
import checks
from errors import nearest

OF_A_RANK = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")  # what torchrun tells each process about its place


@dataclass
class Launch:
    """A launch that was read, or the one this process is part of.

    Attributes:
        config_file: the Accelerate config that is in force; None if there is none, or if it cannot be known.
        yaml: what is written in it.
        environment: the variables a launched rank 0 sees beside those of this shell.
        processes: of all machines.
        arguments: those of the script.
        counted: whether Accelerate took the number of processes from the devices of this machine.
    """

    config_file: str | None
    yaml: dict
    environment: dict[str, str]
    processes: int
    machines: int
    arguments: list[str]
    script: str
    counted: bool = False

    @property
    def processes_per_machine(self) -> int:
        return self.processes // self.machines

    @contextlib.contextmanager
    def in_force(self):
        """Inside, `os.environ` is that of a launched rank 0."""
        with _restored_environment():
            os.environ.update(self.environment)
            yield

    @classmethod
    def from_environment(cls) -> "Launch":
        """The launch that this process is part of. The file it was configured by is not known here."""
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        machines = processes // int(os.environ.get("LOCAL_WORLD_SIZE", str(processes)))
        return cls(None, {}, _launch_variables(dict(os.environ)), processes, machines, sys.argv[1:], sys.argv[0])


@contextlib.contextmanager
def _restored_environment():
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _launch_variables(environment: dict[str, str]) -> dict[str, str]:
    """Those about the launch, and those that differ from this shell's."""
    ours = ("ACCELERATE_", "FSDP_")
    return {k: v for k, v in environment.items() if k.startswith(ours) or k in OF_A_RANK or os.environ.get(k) != v}


def read(argv: list[str]) -> Launch:
    """The launch that `accelerate launch ARGV` would make; `--` in ARGV stands for the path of train.py.

    Raises:
        ValueError: one line, for what Accelerate would stop at, and for a config file that says what it does not read.
    """
    # Imported here because it gives the root logger a handler.
    from accelerate.commands import launch as accelerate_launch
    from accelerate.commands.config import default_config_file
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    at = next((index for index, word in enumerate(argv) if word == "--" or word.endswith(".py")), None)
    if at is None:
        raise ValueError(
            "no script is named: write accelerate launch's flags, then train.py (or --), then train.py's arguments"
        )
    flags, script_arguments = argv[:at], argv[at + 1 :]
    script = str(Path(__file__).with_name("train.py")) if argv[at] == "--" else argv[at]
    if not Path(script).is_file():
        raise ValueError(f"{script} does not exist: give the path of train.py")
    args = _parse(accelerate_launch.launch_command_parser(), flags, script)

    config_file = args.config_file
    if config_file is None and not args.cpu and Path(default_config_file).is_file():
        config_file = default_config_file
    content = {} if config_file is None else _read_config(config_file)
    counted = config_file is None and args.num_processes is None
    args, _, _ = _accelerates(accelerate_launch._validate_launch_command, args)
    for name in ("use_deepspeed", "use_megatron_lm", "tpu", "use_parallelism_config"):
        if getattr(args, name):
            raise ValueError(f"{name} is asked for, and train.py trains with FSDP, DDP or on one device: see configs/")
    if not (args.use_fsdp or args.multi_gpu) or args.cpu:
        environment, processes, machines = _accelerates(prepare_simple_launcher_cmd_env, args)[1], 1, 1
    else:
        processes, machines = args.num_processes, args.num_machines or 1
        _check_machines(args, processes, machines)
        args.main_process_port = 0  # so that a port that is in use here does not matter; no variable depends on it
        environment = _accelerates(prepare_multi_gpu_env, args)
        rank_0 = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes // machines, "RANK": 0, "LOCAL_RANK": 0}
        environment |= {name: str(value) for name, value in rank_0.items()}
    return Launch(
        config_file, content, _launch_variables(environment), processes, machines, script_arguments, script, counted
    )


def _parse(parser, flags: list[str], script: str):
    def refuse(message: str):
        raise ValueError(f"accelerate launch: {message}")

    parser.error = refuse
    known = [option for option in parser._option_string_actions if option.startswith("--") and "-" not in option[2:]]
    for word in flags:
        name = word.partition("=")[0]
        if name.startswith("-") and name not in parser._option_string_actions:
            hint = nearest("--" + name[2:].replace("-", "_"), known) or ": the arguments of train.py stand after its name"
            raise ValueError(f"accelerate launch has no flag {name}{hint}")
    args = parser.parse_args([*flags, script])
    if args.training_script != script:
        raise ValueError(f"{args.training_script!r} before {script} belongs to no flag of accelerate launch")
    return args


def _accelerates(function, args):
    """`function(args)`, without the list of defaults that it took, and what it raises in one line."""
    logger = logging.getLogger("accelerate.commands.launch")
    logger.disabled = True
    try:
        return function(args)
    except Exception as error:  # Accelerate raises what its code happens to
        raise ValueError(f"accelerate launch would stop: {' '.join(str(error).split())}") from None
    finally:
        logger.disabled = False


def _check_machines(args, processes: int, machines: int) -> None:
    if processes < 0 or machines < 1:
        raise ValueError(f"--num_processes {processes} and --num_machines {machines} must be at least 1")
    if processes < 1:
        raise ValueError("there is no device to count on this machine: say how many there will be with --num_processes")
    if processes % machines:
        raise ValueError(f"--num_processes {processes} is for all machines and does not divide by --num_machines {machines}")
    for name in ("machine_rank", "main_process_ip", "main_process_port"):
        if machines > 1 and getattr(args, name) is None:
            raise ValueError(f"{machines} machines need --{name}, in the command or in the Accelerate config")


def _read_config(path: str) -> dict:
    """What is written in an Accelerate config, whose keys Accelerate knows and whose values are of their kind."""
    from accelerate.commands.config.config_args import ClusterConfig

    if not Path(path).is_file():
        raise ValueError(f"--config_file {path} does not exist: name an Accelerate config, such as those in configs/")
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=arguments.UniqueKeyLoader)  # JSON is YAML
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config_file {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"--config_file {path} must be a list of `key: value` lines, not a {type(content).__name__}")
    if "distributed_type" not in content:
        other = " (this is a recipe of train.py)" if "model_name_or_path" in content or "dataset_name" in content else ""
        raise ValueError(f"--config_file {path} has no distributed_type{other}: write FSDP, MULTI_GPU or 'NO'")
    known = {item.name for item in fields(ClusterConfig)} | {"fp16", "dynamo_backend"}
    unknown = [f"{key}{nearest(str(key), known)}" for key in content if key not in known]
    if unknown:
        raise ValueError(f"--config_file {path} has keys that Accelerate does not know: {', '.join(unknown)}")
    for key, kind, what in KINDS:
        value = content.get(key)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise ValueError(f"{key}: {value} in {path} must be {what}")
    return content


# (key of an Accelerate config, kind of its value, in words)
KINDS = [
    ("distributed_type", str, "FSDP, MULTI_GPU or 'NO' (in quotes, since YAML reads a bare NO as false)"),
    ("mixed_precision", str, "bf16, fp16 or 'no' (in quotes, since YAML reads a bare no as false)"),
    ("num_processes", int, "a whole number"),
    ("num_machines", int, "a whole number"),
    ("machine_rank", int, "a whole number"),
    ("main_process_port", int, "a whole number"),
    ("use_cpu", bool, "true or false"),
    ("debug", bool, "true or false"),
    ("fsdp_config", dict, "a list of `fsdp_...: value` lines, indented below it"),
]


def build(launch: Launch) -> tuple:
    """The command and the argument objects as a launched rank 0 has them, built without a process group or a device.

    Returns:
        `arguments.Command`, `ModelArguments`, `DataArguments`, `TrainingConfig`, and `checks.FsdpSettings` or None.
    """
    command = arguments.parse(launch.arguments)
    asked = command.values
    with _restored_environment():
        for name in OF_A_RANK:
            os.environ.pop(name, None)
        model_args, data_args, training_args = command.build_without_hardware()
    training_args.fp16 = asked.fp16
    training_args.bf16 = not (asked.fp16 or asked.use_cpu) if asked.bf16 is None else asked.bf16
    training_args._validate_args()  # again, with what is asked for; while use_cpu is set, no hardware is looked for
    training_args.use_cpu, training_args.tf32 = asked.use_cpu, asked.tf32
    training_args.torch_compile |= asked.torch_compile  # a backend or a mode asks for it too
    # What `world_size` and `process_index` are read from.
    training_args.distributed_state = types.SimpleNamespace(
        num_processes=launch.processes, process_index=0, local_process_index=0
    )
    with launch.in_force():
        checks.settle_mixed_precision(training_args)
        fsdp = checks.FsdpSettings.from_environment()
    return command, model_args, data_args, training_args, fsdp
