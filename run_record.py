"""run.json beside the result: what was run, on what, with what, and how it ended.

status     "running" until the end, then "finished", or "stopped" by a signal with a checkpoint to go on from
arguments  every argument as it was resolved; tokens are never among them
versions, git revision, data fingerprint, topology, final metrics
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import time
from pathlib import Path

import torch

FILE = "run.json"
PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "datasets", "bitsandbytes", "flash-attn", "kernels")


class NotWritten(RuntimeError):
    """run.json could not be written."""


def arguments(*parts) -> dict:
    """The values of dataclasses as JSON values, by name."""
    values = {}
    for part in parts:
        values |= part.to_dict() if hasattr(part, "to_dict") else dataclasses.asdict(part)
    hidden = {name for name in values if name.endswith("_token") or name == "token"}
    return json.loads(json.dumps({k: v for k, v in values.items() if k not in hidden}, default=str))


def versions() -> dict[str, str]:
    """Of Python and of every package that is installed of those that decide the result."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def git_revision(folder: Path) -> str | None:
    """The commit that the scripts in `folder` are of, with "+" if they were changed since; None without git."""

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", "-C", folder, *command], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


class Record:
    """The record of one run. Written by the processes that save.

    Args:
        training_args: the resolved `TrainingArguments`.
        about: what every checkpoint keeps too: "arguments" and "data", the fingerprint of the training data.
        strategy: "one device", "DDP", "FSDP1" or "FSDP2".
    """

    def __init__(self, training_args, about: dict, strategy: str):
        self.args, device = training_args, training_args.device
        if not training_args.should_save:
            return
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        self.content = {
            "started": _now(),
            "resumed_from": training_args.resume_from_checkpoint,
            "topology": {
                "strategy": strategy,
                "processes": training_args.world_size,
                "processes_per_node": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
                "device": device.type,
                "device_name": name,
            },
            "versions": versions(),
            "git_revision": git_revision(Path(__file__).resolve().parent),
            **about,
        }

    def write(self, status: str, **more) -> None:
        """Replace run.json in one step, so that it is never half there.

        Raises:
            NotWritten: there is no space, or the folder is read-only.
        """
        if not self.args.should_save:
            return
        path = Path(self.args.output_dir) / FILE
        partial = path.with_name(f"_{FILE}.partial")
        text = json.dumps({"status": status, "written": _now()} | more | self.content, indent=1) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)
        except OSError as error:
            raise NotWritten(f"{path} could not be written ({error.strerror})") from error


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
