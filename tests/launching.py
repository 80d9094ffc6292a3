"""Starts the real launchers from the tests, with their own port and an environment that stays on this machine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from strategies import assert_sharded

ROOT = Path(__file__).resolve().parent.parent
BASE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def environment(**extra: str) -> dict[str, str]:
    drop = ("FSDP_", "ACCELERATE_", "WORLD_SIZE", "RANK", "LOCAL_", "MASTER_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(drop)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    return {**kept, **BASE_ENV, "PATH": path, **extra}


def run(command: list, timeout: int = 400, check: bool = True, **env: str) -> subprocess.CompletedProcess:
    result = subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=environment(**env), capture_output=True, text=True, timeout=timeout
    )
    if check:
        assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
    return result


def accelerate(config: str, script: list, processes: int = 2, **kwargs) -> subprocess.CompletedProcess:
    launcher = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--config_file",
        ROOT / "configs" / config,
    ]
    return run([*launcher, "--num_processes", processes, "--main_process_port", free_port(), *script], **kwargs)


def probe(
    cases: list[dict], out: Path, processes: int, config: str = "fsdp2_config_cpu.yaml", **kwargs
) -> dict[str, list[dict]]:
    """Run cases through tests/probe.py; returns the facts of each case, a list with one entry for each rank."""
    out.mkdir(parents=True, exist_ok=True)
    plan = out / "cases.json"
    plan.write_text(json.dumps({"cases": cases, "out": out}, default=str))
    script = [ROOT / "tests" / "probe.py", plan]
    if processes == 1:
        run([sys.executable, *script], **kwargs)
    else:
        accelerate(config, script, processes, **kwargs)
    return {
        case["name"]: [json.loads((out / f"{case['name']}.rank{rank}.json").read_text()) for rank in range(processes)]
        for case in cases
    }


def assert_fsdp(facts: list[dict], version: int, world: int) -> None:
    """Every rank got as far as the first step, with its shards and no more."""
    assert len(facts) == world
    assert_sharded(facts, version, replicated="trainable_tokens_delta" if version == 1 else None)


class Launches:
    """Cases for tests/forked.py, and what came of them."""

    def __init__(self, out: Path):
        self.out, self.cases = out, []

    def add(self, name: str, argv: list, env: dict, world: int = 2, **more) -> Path:
        self.cases.append({"name": name, "argv": argv, "env": env, "world": world, **more})
        return self.out / name

    def run(self, prefix: tuple = (), timeout: int = 900) -> "Launches":
        plan = self.out / "plan.json"
        plan.write_text(json.dumps({"cases": self.cases, "out": self.out}, default=str))
        run([*prefix, sys.executable, ROOT / "tests" / "forked.py", plan], timeout=timeout)
        for case in self.cases:
            if case["world"] > 1 and case["env"].get("ACCELERATE_USE_FSDP") == "true":
                assert_fsdp(self.facts(case["name"]), int(case["env"]["FSDP_VERSION"]), case["world"])
        return self

    def exits(self, name: str) -> dict:
        return json.loads((self.out / f"{name}.exit.json").read_text())

    def codes(self, name: str) -> list:
        return self.exits(name)["codes"]

    def text(self, name: str, rank: int = 0) -> str:
        return (self.out / f"{name}.rank{rank}.txt").read_text()

    def facts(self, name: str) -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted(self.out.glob(f"{name}.rank*.json"))]

    def assert_ended_well(self) -> None:
        for case in self.cases:
            assert set(self.codes(case["name"])) == {0}, f"{case['name']}: {self.text(case['name'])[-3000:]}"
