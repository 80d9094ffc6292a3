"""TRL's `SFTTrainer` with saves that are complete, committed at once, and exactly resumable, under every strategy.

A `checkpoint-N` is a PEFT adapter that `from_pretrained` loads, with its tokenizer, and what is needed to go on:

    adapter_model.safetensors, adapter_config.json, tokenizer, generation_config.json
    optimizer.safetensors     whole tensors by parameter name: any strategy and number of ranks can read it
    training_state.json       parameter groups, schedule, gradient scaler, counters, random numbers of every rank, arguments
    trainer_state.json        the Trainer's own log and step
    manifest.json             size and SHA-256 of each, written last (see checkpoint.py)

The writing process writes all of it; the others take part in gathering, a few megabytes at a time. No file is a pickle.
"""

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from accelerate.data_loader import SkipBatchSampler
from huggingface_hub import upload_folder
from peft import PeftModel
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import HubStrategy
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME
from transformers.utils.hub import PushInProgress
from trl import SFTTrainer

import adapter
import checkpoint
import loading
import optimizer_state
import weights
from sharding import from_all

TRAINER_STATE, TRAINING_STATE, OPTIMIZER = "trainer_state.json", "training_state.json", "optimizer.safetensors"


class SaveFailed(RuntimeError):
    """A save could not be completed on some rank; raised on all of them."""


class StopEvaluation(Exception):
    """Raised on every rank at the same batch of an evaluation, to leave it (see preemption.py)."""


class Staged:
    """A folder that the writing processes fill, whose outcome every rank learns.

    Gathering is collective, so a writer that cannot write has to go on taking part: the first error is kept, nothing more
    is written, and `finish` raises it everywhere.
    """

    def __init__(self, partial: Path, writes: bool):
        self.partial, self.writes, self.error = partial, writes, None
        self.do(checkpoint.begin, partial)

    def do(self, write: Callable, *args):
        """Call `write(*args)` on the writing processes and return what it does, unless something failed before."""
        if not self.writes or self.error is not None:
            return None
        try:
            return write(*args)
        except Exception as error:  # the tokenizers library raises a bare one for a full disk
            self.error = error
            return None

    def stream(self, open_file: Callable, path: Path, layout: dict, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write (name, tensor) pairs to the file that `open_file(path, layout)` opens, while every rank makes them."""
        file = self.do(open_file, path, layout)
        for name, tensor in tensors:
            if file is not None:
                self.do(file.write, name, tensor)
        if file is not None:
            self.do(file.close)

    def finish(self, place: Callable, folder: Path, *args) -> None:
        """Put it in place as or in `folder` with `place(partial, folder, *args)`, and agree on the outcome. A collective.

        Raises:
            SaveFailed: on every rank, if any writer failed.
        """
        self.do(place, self.partial, folder, *args)
        text = None
        if self.error is not None:
            if self.writes:
                shutil.rmtree(self.partial, ignore_errors=True)
            what = getattr(self.error, "strerror", None) or f"{type(self.error).__name__}: {_first_line(self.error)}"
            text = f"{folder} was not saved ({what}); the checkpoints that are there are as they were"
        failed = next((error for error in from_all(text) if error), None)
        if failed:
            raise SaveFailed(failed) from self.error


def tell_skipped_loaders_their_remainder() -> None:
    """Let a loader that skips batches know how the last batch of an epoch is filled up.

    Accelerate 1.15's `SkipBatchSampler` has no batch size, so on a resumed run TRL's metrics of that batch are summed over
    other rows than on an uninterrupted one. Remove when it has.
    """
    for name in ("batch_size", "num_processes", "split_batches"):
        if not hasattr(SkipBatchSampler, name):
            setattr(SkipBatchSampler, name, property(lambda self, name=name: getattr(self.batch_sampler, name)))


class RestoreCounters(TrainerCallback):
    """Gives the Trainer back, on a resumed run, what it sets to zero when training begins."""

    def __init__(self, trainer: "AdapterSFTTrainer"):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.restore_counters()


class AdapterSFTTrainer(SFTTrainer):
    """See the top of this file.

    Args:
        about: JSON values to keep in every checkpoint's training_state.json beside what is needed to resume, such as the
            arguments and the fingerprint of the data, which `checks.py` compares when the run is resumed.
    """

    def __init__(self, *args, about: dict | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.about = about or {}
        self.peft_model = self.model if isinstance(self.model, PeftModel) else None
        self.base_model = self.model if self.peft_model is None else self.peft_model.get_base_model()
        self.keys = adapter.adapter_keys(self.peft_model) if self.peft_model is not None else {}
        self.resumed_from: Path | None = None
        self.resumed: dict | None = None  # its training_state.json
        self.push_in_progress, self.pushing = None, []  # uploads, and the folders they read
        self.left_at: str | None = None  # "step" or "epoch", when the Trainer's loop was left by a signal
        self.stopped = False  # by a signal, before the end of training
        self.evaluation_owed = False  # by a run that was stopped before or in it
        self.at_last_step: dict = {}
        self.add_callback(RestoreCounters(self))
        tell_skipped_loaders_their_remainder()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        # A model without memory is filled when it has been sharded (see loading.py); until then nothing can be moved.
        if not any(parameter.is_meta for parameter in model.parameters()):
            super()._move_model_to_device(model, device)

    # ---- Saving ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the adapter (or, when every weight is trained, the model) into a folder that may hold other files."""
        folder = Path(output_dir or self.args.output_dir)
        staged = Staged(folder / "_final.partial", self.args.should_save)
        self._write_model(staged)
        staged.finish(checkpoint.move_into, folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_final()

    def _write_model(self, staged: Staged) -> None:
        folder = staged.partial
        if self.peft_model is None:
            state = adapter.gather_trained(self.model, keep=staged.writes)
            persistent = self.base_model.state_dict().keys()
            state |= {n: b for n, b in self.base_model.named_buffers() if n in persistent and staged.writes}
            staged.do(lambda: self.base_model.save_pretrained(folder, state_dict=state))
        else:
            path = folder / ADAPTER_SAFE_WEIGHTS_NAME
            layout = {self.keys[name]: entry for name, entry in adapter.trained_layout(self.model).items()}
            tensors = ((self.keys[name], tensor) for name, tensor in adapter.trained_tensors(self.model))
            staged.stream(adapter.AdapterFile, path, layout, tensors)
            staged.do(self._write_adapter_config, folder)
        if self.base_model.generation_config is not None:
            staged.do(self.base_model.generation_config.save_pretrained, folder)
        staged.do(self.processing_class.save_pretrained, folder)

    def verify_final(self) -> None:
        """Read the final adapter back and compare it with what the model holds. A collective.

        Raises:
            adapter.WrongAdapter: on every rank: it lacks tensors or has others, or has learned nothing.
        """
        if self.peft_model is None:
            return
        layout, digests = {}, {}
        types = adapter.trained_layout(self.model)
        for name, tensor in adapter.trained_tensors(self.model):
            layout[self.keys[name]] = types[name]
            if self.args.should_save:
                digests[self.keys[name]] = adapter.digest(tensor)
        wrong, untrained = [], []
        if self.args.should_save:
            path = Path(self.args.output_dir) / ADAPTER_SAFE_WEIGHTS_NAME
            wrong, untrained = adapter.check_adapter(path, layout, digests), adapter.untrained(path)
        # Of every rank, since with --save_on_each_node several have a file.
        wrong = sorted({line for lines in from_all(wrong) for line in lines})
        untrained = sorted({key for keys in from_all(untrained) for key in keys})
        if untrained:
            # A layer that no token reaches (an expert, a part for images) stays as it was. One that was trained does not.
            moved = optimizer_state.moved(self.model, self.optimizer.optimizer)
            lost = [key for key in untrained if any(self.keys[name] == key for name in moved)]
            text = f"lora_B are all zero, as before training (first: {(lost or untrained)[0]})"
            if lost or len(untrained) == sum(adapter.is_lora_b(key) for key in layout):
                wrong.append(f"{len(lost or untrained)} {text}: they have learned nothing")
            elif self.is_world_process_zero():
                print(f"warning: {len(untrained)} {text}: no gradient ever reached them", flush=True)
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise adapter.WrongAdapter(f"{self.args.output_dir} was saved, but do not use its adapter: {wrong[0]}{more}")

    def _write_adapter_config(self, folder: Path) -> None:
        config = self.peft_model.active_peft_config
        training, config.inference_mode = config.inference_mode, True
        config.save_pretrained(folder)
        config.inference_mode = training

    def _save_checkpoint(self, model: nn.Module, trial) -> None:
        step = self.state.global_step
        folder = Path(self.args.output_dir) / f"checkpoint-{step}"
        self.store_flos()
        self._note_best(saving=step)
        ranks = self._gather_rank_states(self.at_last_step if self.stopped else self._rank_state())

        staged = Staged(checkpoint.partial_of(folder), self.args.should_save)
        self._write_model(staged)
        if not self.args.save_only_model or self.stopped:  # what is stopped has to be gone on with
            self._write_optimizer(staged)
            staged.do(self._write_training_state, staged.partial, ranks)
        staged.do(self._write_trainer_state, staged.partial)
        staged.finish(checkpoint.commit, folder, {"step": step})

        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        if self.args.should_save and self.args.save_total_limit:
            busy = self.pushing if self.push_in_progress is not None and not self.push_in_progress.is_done() else []
            best = [self.state.best_model_checkpoint] if self.state.best_model_checkpoint else []
            for line in checkpoint.rotate(self.args.output_dir, self.args.save_total_limit, [folder, *busy, *best]):
                print(f"warning: {line}", flush=True)

    def _note_best(self, saving: int | None = None) -> None:
        best = self.state.best_global_step
        folder = Path(self.args.output_dir) / f"checkpoint-{best}"
        if best and (best == saving or folder.is_dir()):
            self.state.best_model_checkpoint = str(folder)

    def _write_optimizer(self, staged: Staged) -> None:
        optimizer = self.optimizer.optimizer
        # Every rank finds out alike, so a state that cannot be saved ends the run on all of them.
        try:
            layout, self.optimizer_values = optimizer_state.describe(self.model, optimizer)
        except optimizer_state.NotSavable as error:
            staged.error = error
            return
        states = optimizer_state.whole_states(self.model, optimizer)
        staged.stream(weights.TensorWriter, staged.partial / OPTIMIZER, layout, states)

    def _write_training_state(self, folder: Path, ranks: list[dict]) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        state = {
            "step": self.state.global_step,
            "evaluation_owed": self.evaluation_owed,
            "num_tokens": ranks[0]["num_tokens"],
            "global_batch": self._train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size,
            "optimizer": self.optimizer_values,
            "scheduler": self.lr_scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
            "ranks": ranks,
        }
        try:
            text = json.dumps(state | self.about)
        except TypeError as error:
            raise optimizer_state.NotSavable(
                f"the state of --lr_scheduler_type {self.args.lr_scheduler_type} cannot be saved ({error})"
            ) from None
        (folder / TRAINING_STATE).write_text(text, encoding="utf-8")

    def _write_trainer_state(self, folder: Path) -> None:
        # As in the Trainer: callbacks that keep a state are asked for it now.
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, kept = type(callback).__name__, self.state.stateful_callbacks
                if isinstance(kept[name], list):
                    kept[name].append(callback.state())
                else:
                    kept[name] = callback.state()
        self.state.save_to_json(str(folder / TRAINER_STATE))

    # ---- What each rank has to remember ----

    def _rank_state(self) -> dict:
        """This rank's random numbers, and what its next log line will average."""
        state = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.random.get_rng_state(),
            "loss": self._tr_loss.clone(),
            "loss_total": self._total_loss_scalar,
            "logged_step": self._globalstep_last_logged,
            "metrics": {key: list(values) for key, values in self._metrics["train"].items()},
            "num_tokens": self._total_train_tokens,
            "flos": self.current_flos,
            "input_tokens": self.state.num_input_tokens_seen,
        }
        if self.args.device.type not in ("cpu", "mps"):
            state["device"] = torch.get_device_module(self.args.device).get_rng_state()
        return state

    def _gather_rank_states(self, mine: dict) -> list[dict]:
        """The state of every rank, as JSON values. A collective."""
        kind, keys, *rest = mine["numpy"]
        mine = mine | {"numpy": [kind, keys.tolist(), *rest], "loss": mine["loss"].item()}
        mine |= {key: mine[key].cpu().numpy().tobytes().hex() for key in ("torch", "device") if key in mine}
        return from_all(mine)

    def _evaluate(self, *args, **kwargs):
        # An evaluation draws random numbers; if it is left, the run goes on from before it.
        self.at_last_step = self._rank_state()
        return super()._evaluate(*args, **kwargs)

    def _maybe_log_save_evaluate(self, tr_loss, grad_norm, model, *args, **kwargs) -> None:
        try:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *args, **kwargs)
        except StopEvaluation:
            self.control.should_evaluate = self.control.should_save = False
            self.evaluation_owed = True
            self.save_stopped()
        else:
            # A stop may come in the middle of a step, whose part is then lost: it is from here that the run goes on.
            if self.left_at != "step":
                self.at_last_step = self._rank_state()
            if self.left_at is not None and not self.stopped:
                self.save_stopped()

    def save_stopped(self) -> None:
        """Save the last whole step of a run that was asked to stop, unless that checkpoint is there. A collective."""
        self.stopped = self.control.should_training_stop = True
        self.current_flos = self.at_last_step["flos"]
        self.state.num_input_tokens_seen = self.at_last_step["input_tokens"]
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        there = self.args.should_save and not self.evaluation_owed and checkpoint.problem_with(folder) is None
        if self.state.global_step and not from_all(there)[0]:
            self._save_checkpoint(self.model, None)
        self._say_stopped()

    def _say_stopped(self) -> None:
        if not self.is_world_process_zero():
            return
        step = self.state.global_step
        folder = Path(self.args.output_dir) / f"checkpoint-{step}"
        if step and not folder.is_dir():  # it came from elsewhere, and nothing has been trained since
            folder = self.resumed_from
        kept = f"{folder} is committed" if step else "there is nothing to save yet"
        value = folder if folder.parent.resolve() != Path(self.args.output_dir).resolve() else "auto"
        print(f"stopped at step {step}: {kept}; go on with --resume_from_checkpoint {value}", flush=True)

    # ---- Resuming ----

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if self.peft_model is None:
            # Names in the file are the published ones, which Transformers' conversions lead back to the model's.
            file = weights.Checkpoint(str(folder))
            meta = loading.meta_model(self.base_model.config)
            groups = weights.match(meta, file)
            for name, other in meta.all_tied_weights_keys.items():
                for a, b in ((name, other), (other, name)):
                    if a not in groups and b in groups:
                        groups[a] = groups[b]
            shapes = {name: tuple(meta.get_parameter(name).shape) for name in adapter.trained_layout(model or self.model)}

            def read(name):
                made = groups[name].convert(meta, file.whole)
                return made.get(name, next(iter(made.values())))

        else:
            file = weights.Checkpoint(str(folder), file_name=ADAPTER_SAFE_WEIGHTS_NAME)
            names = {key: name for name, key in self.keys.items()}
            shapes = {names.get(key, key): stored.shape for key, stored in file.tensors.items()}

            def read(name):
                return file.whole(self.keys[name])

        adapter.load_trained(model or self.model, shapes, read)
        file.close()

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint, self.model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        self.resumed = json.loads((folder / TRAINING_STATE).read_text(encoding="utf-8"))
        file = weights.Checkpoint(str(folder), file_name=OPTIMIZER)
        optimizer_state.load(self.model, self.optimizer.optimizer, set(file.tensors), file.whole, self.resumed["optimizer"])
        file.close()
        self.lr_scheduler.load_state_dict(self.resumed["scheduler"])

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.resumed["scaler"] and getattr(self.accelerator, "scaler", None) is not None:
            self.accelerator.scaler.load_state_dict(self.resumed["scaler"])

    def _my_resumed_state(self) -> dict:
        # A rank that did not exist goes on from one that did: dropout has to come from somewhere, the same every time.
        return self.resumed["ranks"][self.args.process_index % len(self.resumed["ranks"])]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = self._my_resumed_state()
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
        torch.random.set_rng_state(_bytes_tensor(state["torch"]))
        if "device" in state and self.args.device.type != "cpu":
            torch.get_device_module(self.args.device).set_rng_state(_bytes_tensor(state["device"]))
        self._evaluate_if_owed()

    def _evaluate_if_owed(self) -> None:
        if self.evaluation_owed:
            self.evaluation_owed = False
            self._determine_best_metric(self._evaluate(None, None), None)
            self._note_best()

    def restore_counters(self) -> None:
        """Sums since the last log line and tokens seen, on the first step of a resumed run."""
        if self.resumed is not None:
            ranks, mine = self.resumed["ranks"], self._my_resumed_state()
            same = len(ranks) == self.args.world_size
            loss = mine["loss"] if same else sum(rank["loss"] for rank in ranks) / len(ranks)
            self._tr_loss = torch.tensor(loss, device=self.args.device)
            self._total_loss_scalar = mine["loss_total"]
            self._globalstep_last_logged = mine["logged_step"]
            self._metrics["train"].update(mine["metrics"])
            self._total_train_tokens = self.resumed["num_tokens"]
            self.state.compute_steps(self.args, self.state.max_steps)  # the Trainer keeps those of the checkpoint
            self.evaluation_owed = self.resumed["evaluation_owed"] and self.args.eval_strategy != "no"
        self.at_last_step = self._rank_state()

    def _init_training_state(self, *args, **kwargs) -> tuple[int, int]:
        best = None
        if self.resumed_from is not None:
            best = json.loads((self.resumed_from / TRAINER_STATE).read_text(encoding="utf-8"))["best_model_checkpoint"]
        epochs_trained, batches = super()._init_training_state(*args, **kwargs)
        if best is not None and self.state.best_model_checkpoint is None:
            moved = self.resumed_from.with_name(Path(best).name)
            if moved.is_dir():
                self.state.best_model_checkpoint = str(moved)
            else:
                self.state.best_metric = self.state.best_global_step = None
                if self.is_world_process_zero():
                    print(f"warning: {best}, the best so far, is gone: the best of what comes is kept", flush=True)
        # The Trainer asks whether the last step is done only after another one.
        return (sys.maxsize, 0) if self.state.global_step >= self.state.max_steps else (epochs_trained, batches)

    def train(self, resume_from_checkpoint: str | None = None, **kwargs):
        if resume_from_checkpoint is not None:
            self.resumed_from = Path(resume_from_checkpoint)
            self.args.eval_on_start = False  # that was at the start
        try:
            return super().train(resume_from_checkpoint, **kwargs)
        except StopEvaluation:  # in one that comes before the first step
            self.stopped = True
            self._say_stopped()

    def _finalize_training(self, *args, **kwargs):
        if not self.stopped:
            self._evaluate_if_owed()
        # With a limit of one the Trainer deletes the newest checkpoint here, before anything else has been saved; and a
        # run that was stopped is not at its end, so its best model is not asked for.
        limit, best = self.args.save_total_limit, self.args.load_best_model_at_end
        self.args.save_total_limit = None
        self.args.load_best_model_at_end = best and not self.stopped
        # The sum of the losses is the whole run's, and the Trainer divides it by the steps of this session.
        here = max(self.state.global_step - self._initial_global_step, 0.001)
        total = self._total_loss_scalar + self._tr_loss.item()
        self._tr_loss = torch.zeros_like(self._tr_loss)
        self._total_loss_scalar = total * here / max(self.state.global_step, 1)
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit, self.args.load_best_model_at_end = limit, best

    # ---- The Hub ----

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload a committed checkpoint's adapter in the background, and with `checkpoint` strategies all of it."""
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        if self.push_in_progress is not None:
            if not self.push_in_progress.is_done():
                if not self.args.hub_always_push:
                    return
            else:
                self._report_pushes()
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        folder, message = Path(checkpoint_folder), f"Training in progress, step {self.state.global_step}"
        common = dict(repo_id=self.hub_model_id, folder_path=folder, run_as_future=True, revision=self.args.hub_revision)
        resuming = [TRAINER_STATE, TRAINING_STATE, OPTIMIZER, checkpoint.MANIFEST]
        jobs = [upload_folder(commit_message=message, ignore_patterns=resuming, **common)]
        if self.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            place = "last-checkpoint" if self.args.hub_strategy == HubStrategy.CHECKPOINT else folder.name
            jobs.append(upload_folder(commit_message=f"{message}, checkpoint", path_in_repo=place, **common))
        if self.push_in_progress is None or self.push_in_progress.is_done():
            self.push_in_progress, self.pushing = PushInProgress(jobs), []
        else:
            self.push_in_progress.jobs.extend(jobs)
        self.pushing.append(folder)

    def _report_pushes(self) -> None:
        # The Trainer waits for its uploads and never asks how they ended.
        for job in self.push_in_progress.jobs if self.push_in_progress is not None else []:
            error = job.exception() if job.done() else None
            if error is not None:
                print(f"warning: a push to {self.hub_model_id} failed ({_first_line(error)}); training goes on", flush=True)

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        if getattr(self, "push_in_progress", None) is not None:
            self._report_pushes()
            self.push_in_progress = None

    def push_final(self) -> None:
        """Upload what is in the output folder, checkpoints excepted. It has been saved before, so nothing can be lost.

        Raises:
            SaveFailed: the Hub refused or could not be reached; how to push again is in the message.
        """
        if not self.is_world_process_zero():
            return
        folder, repository = self.args.output_dir, self.hub_model_id
        try:
            self._finish_current_push()
            self.callback_handler.on_push_begin(self.args, self.state, self.control)
            self.create_model_card(model_name=repository.split("/")[-1])
            upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message="Model save",
                ignore_patterns=["_*", "checkpoint-*"],
                revision=self.args.hub_revision,
            )
        except Exception as error:  # the Hub's client raises many kinds, and none of them may hide that the model is safe
            raise SaveFailed(
                f"the model is saved in {folder}, but it could not be pushed to {repository} ({_first_line(error)}): push "
                f'it again with `hf upload {repository} {folder} . --exclude "checkpoint-*" --exclude "_*"`'
            ) from error


def _bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
