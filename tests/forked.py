"""Runs train.py's main() in forked ranks, many launches after one import, and lets a rank die, raise or get a signal.

    python tests/forked.py plan.json

A case is one of tests/probe.py ({"name", "argv", "env"}) with "world" (number of ranks), and optionally

    "fault": {"at": NAME, "ranks": [0], "step": 6, "do": "kill" | "ENOSPC" | "EROFS" | "raise" | "SIGTERM" | "SIGTERM twice"}

NAME is a step of a save (what `trainer.Staged.do` is asked to call), "training", "micro-batch", "evaluation", or, inside the
commit, "rename" and "renamed"; or "prepares_for": seconds that the main process prepares the data for. No launcher watches the ranks: when one dies, the others have to end by themselves. Exit codes
and seconds go to NAME.exit.json, what each rank wrote to NAME.rankR.txt, facts as with probe.py.
"""

import errno
import fnmatch
import json
import os
import signal
import sys
import time
import traceback
from concurrent.futures import Future
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import transformers.trainer
from transformers import TrainerCallback

import checkpoint
import checks
import data
import probe
import train  # noqa: F401  imported once, before the forks
import trainer
from launching import free_port

TIMEOUT = 90  # seconds for a case; a rank that is still there has hung


def act(what: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what in ("ENOSPC", "EROFS"):
        number = getattr(errno, what)
        raise OSError(number, os.strerror(number))
    elif what == "raise":
        raise RuntimeError("a fault of this rank")
    elif what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what.split()[0]))
        if what.endswith("twice"):
            time.sleep(3.3)
            os.kill(os.getpid(), getattr(signal, what.split()[0]))


class AtBatch(TrainerCallback):
    """Acts in the middle of training: after a micro-batch, after a step or in an evaluation."""

    def __init__(self, fault):
        self.fault, self.done = fault, False

    def once(self, at, state):
        if at == self.fault["at"] and state.global_step == self.fault["step"] and not self.done:
            self.done = True
            act(self.fault["do"])

    def on_step_end(self, args, state, control, **kwargs):
        self.once("training", state)

    def on_substep_end(self, args, state, control, **kwargs):
        self.once("micro-batch", state)

    def on_prediction_step(self, args, state, control, **kwargs):
        self.once("evaluation", state)


def inject(fault: dict) -> None:
    """Patch this rank so that it fails where the case says, at that step only."""
    current = {}
    save = trainer.AdapterSFTTrainer._save_checkpoint

    def saving(self, *args):
        current["step"] = self.state.global_step
        save(self, *args)
        current["step"] = None

    trainer.AdapterSFTTrainer._save_checkpoint = saving
    do = trainer.Staged.do

    def faulty(self, write, *args):
        def first(*args):
            act(fault["do"])
            return write(*args)

        if getattr(write, "__name__", None) == fault["at"] and current.get("step") == fault["step"]:
            if fault["do"] in ("ENOSPC", "EROFS"):
                return do(self, first, *args)  # as the writing itself would fail
            act(fault["do"])
        return do(self, write, *args)

    trainer.Staged.do = faulty
    rename = os.rename

    def renaming(source, target):
        mine = current.get("step") == fault["step"] and Path(target).name == f"checkpoint-{fault['step']}"
        if mine and fault["at"] == "rename":
            act(fault["do"])
        rename(source, target)
        if mine and fault["at"] == "renamed":
            act(fault["do"])

    checkpoint.os.rename = renaming
    transformers.trainer.DEFAULT_CALLBACKS.append(AtBatch(fault))


def pretend_hub(case: dict, out: Path) -> None:
    """Uploads are noted in NAME.uploads.txt, with what would be sent; "hub": "down" makes each fail."""
    checks.get_token, checks.is_offline_mode = lambda: "a token", lambda: False
    trainer.AdapterSFTTrainer.init_hf_repo = lambda self, **kwargs: setattr(self, "hub_model_id", "me/model")

    def upload(folder_path, commit_message, ignore_patterns=(), run_as_future=False, path_in_repo="", **kwargs):
        files = sorted(path.relative_to(folder_path).as_posix() for path in Path(folder_path).rglob("*") if path.is_file())
        sent = [file for file in files if not any(fnmatch.fnmatch(file, pattern) for pattern in ignore_patterns)]
        with open(out / f"{case['name']}.uploads.txt", "a") as log:
            log.write(
                json.dumps({"folder": str(folder_path), "message": commit_message, "to": path_in_repo, "files": sent}) + "\n"
            )
        future = Future()
        error = ConnectionError("the Hub is down\nand says more")
        if case["hub"] == "down":
            future.set_exception(error)
            if not run_as_future:
                raise error
        else:
            future.set_result(None)
        return future

    trainer.upload_folder = upload


def child(case: dict, out: Path, rank: int, port: str) -> None:
    log = os.open(out / f"{case['name']}.rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if case["world"] > 1:
        os.environ |= {"WORLD_SIZE": str(case["world"]), "LOCAL_WORLD_SIZE": str(case["world"]), "RANK": str(rank)}
        os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    fault = case.get("fault")
    if fault and rank in fault["ranks"]:
        inject(fault)
    if case.get("hub"):
        pretend_hub(case, out)
    if case.get("prepares_for") and rank == 0:
        prepare = data.prepare
        data.prepare = lambda *args: time.sleep(case["prepares_for"]) or prepare(*args)
    try:
        probe.run(case, out)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def launch(case: dict, out: Path) -> None:
    port, started = free_port(), time.monotonic()
    children = {}
    for rank in range(case["world"]):
        pid = os.fork()
        if pid == 0:
            child(case, out, rank, port)
        children[pid] = rank
    codes = {}
    while children and time.monotonic() - started < TIMEOUT:
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for pid, rank in children.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes[rank] = "hung"
    result = {"codes": [codes[rank] for rank in range(case["world"])], "seconds": time.monotonic() - started}
    (out / f"{case['name']}.exit.json").write_text(json.dumps(result))


if __name__ == "__main__":
    transformers.trainer.DEFAULT_CALLBACKS.append(probe.Probe)
    plan = json.loads(Path(sys.argv[1]).read_text())
    for case in plan["cases"]:
        launch(case, Path(plan["out"]))
