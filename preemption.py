"""Stop on SIGTERM or SIGINT at a step that all ranks agree on, with a checkpoint to go on from; start again after a crash.

A signal reaches one rank, or all of them at different moments. Each rank only notes it; after every micro-batch, and every
batch of an evaluation, the ranks compare notes, so they leave the same step together. What is saved is the last whole step.
A second signal ends the process at once; what has been committed is not touched by that.
"""

import functools
import importlib
import os
import signal
import time

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from trainer import AdapterSFTTrainer, StopEvaluation

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A launcher passes on the signal that the terminal or the scheduler has sent to the whole process group already, so two
# within this time are one request.
SAME_REQUEST_SECONDS = 3.0


def give_restarts_a_store_of_their_own() -> None:
    """Let ranks that torchrun has started again find each other, and not the addresses of the ranks before them.

    torch 2.13's agent keeps one store for all attempts, with the keys of each under the same names, so whichever new rank
    looks first gets a dead one's address and hangs. Several nodes may not agree on the count of restarts, so there the
    launcher has to be told, with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Call it before the process group exists. Remove when
    the attempts are told apart again.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of this name
    create = rendezvous._create_c10d_store

    @functools.wraps(create)
    def create_for_this_attempt(*args, **kwargs):
        return dist.PrefixStore(f"attempt_{attempt}", create(*args, **kwargs))

    rendezvous._create_c10d_store = create_for_this_attempt


class Preemption(TrainerCallback):
    """Install it last, so that it has the last word on what a stopped run still does.

    Handlers are in place from the first step until `close()`.
    """

    def __init__(self, trainer: AdapterSFTTrainer):
        self.trainer = trainer
        self.received: tuple[int, float] | None = None  # signal and when
        self.agreed = self.leaving = self.whole_step = False
        self.before: dict = {}

    def on_train_begin(self, args, state, control, **kwargs):
        self.before = {number: signal.signal(number, self._note) for number in SIGNALS}
        # A launcher signals a rank's whole process group, and a data loader's worker that dies of it takes the rank along.
        os.register_at_fork(after_in_child=lambda: self.before and signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS))

    def close(self) -> None:
        """Give the signals back to who had them. Call it when everything is saved."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}

    def _note(self, number, frame) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received = (number, now)
            if os.environ.get("RANK", "0") == "0":
                name = signal.Signals(number).name
                os.write(2, f"{name}: stopping after this micro-batch, with a checkpoint; again: at once\n".encode())
        elif now - self.received[1] > SAME_REQUEST_SECONDS:
            os._exit(128 + number)

    def _stop(self) -> bool:
        """Whether any rank was signalled. A collective."""
        asked = self.received is not None
        if dist.is_initialized() and dist.get_world_size() > 1:
            flag = torch.tensor(int(asked), device=self.trainer.args.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            asked = bool(flag.item())
        self.agreed = self.agreed or asked
        return self.agreed

    def on_substep_end(self, args, state, control, **kwargs):
        if self._stop():
            self._leave(control, whole_step=False)

    def on_step_end(self, args, state, control, **kwargs):
        if self._stop() and state.global_step < state.max_steps:  # the last step ends the run anyway
            # This step is whole, but nothing after it has been done: not its evaluation.
            self.trainer.evaluation_owed = control.should_evaluate
            self._leave(control, whole_step=True)

    def _leave(self, control, whole_step: bool) -> None:
        self.leaving, self.whole_step = True, whole_step
        control.should_training_stop = True
        control.should_evaluate = control.should_save = False

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.leaving and not self.trainer.stopped:
            # The Trainer takes the end of its loop for the end of an epoch.
            whole_epoch = self.whole_step and float(state.epoch).is_integer()
            self.trainer.evaluation_owed |= control.should_evaluate and whole_epoch
            control.should_log = control.should_log and whole_epoch
            self.trainer.left_at = "epoch" if whole_epoch else "step"  # it saves once the epoch's log line is written
        if self.leaving or self.trainer.stopped:
            control.should_evaluate = control.should_save = False

    def on_prediction_step(self, args, state, control, **kwargs):
        if self.trainer.is_in_train and self._stop():
            raise StopEvaluation
