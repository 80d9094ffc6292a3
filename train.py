"""Supervised fine-tuning with LoRA or QLoRA on one device, with DDP or with FSDP: the same code path for all.

    accelerate launch --config_file configs/fsdp_config.yaml train.py --model_name_or_path ID --dataset_name ID [flags]
    accelerate launch --config_file configs/fsdp2_config.yaml train.py recipe.yaml [flags]
    python train.py --help

What differs between a laptop rehearsal, one GPU and eight GPUs is the Accelerate config and the flags, never the code.
"""

import contextlib
import os
import sys

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when huggingface_hub is imported, so before anything else

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from peft.utils.other import fsdp_auto_wrap_policy
from transformers import set_seed

import arguments
import chat
import checkpoint
import checks
import cpu_fsdp
import data
import data_report
import findings
import loading
import peft_fsdp
import preflight
import run_record
import sharding
import turns
import utils
from adapter import WrongAdapter
from errors import fail, one_line_errors, raise_first
from health import HealthCheck
from preemption import Preemption, give_restarts_a_store_of_their_own
from trainer import AdapterSFTTrainer, SaveFailed


def main(argv: list[str] | None = None) -> AdapterSFTTrainer:
    with one_line_errors():
        # Parse. Building the training arguments starts the process group, so the launch is checked around it.
        command = arguments.parse(argv)
        if command.values.dry_run:
            sys.exit(preflight.of_this_launch())
        if command.values.data_only:
            return report_data(command)
        fsdp = checks.FsdpSettings.from_environment()
        checks.check_processes(command.use_cpu, fsdp)
        notes = cpu_fsdp.enable(command.use_cpu)
        give_restarts_a_store_of_their_own()
        model_args, data_args, training_args = command.build()
        checks.check_world(PartialState().num_processes)
        cpu_fsdp.keep_timeout(command.use_cpu, training_args.ddp_timeout)
        notes += checks.settle_mixed_precision(training_args) + checks.unknown_fsdp_variables()
        set_seed(training_args.seed)

        # Check everything that needs no weights.
        training_args.resume_from_checkpoint, skipped = on_main(checks.find_checkpoint, training_args)
        notes += skipped
        chat.check_template_name(model_args.chat_template_format)
        trust = training_args.trust_remote_code
        config = utils.load_config(model_args.model_name_or_path, model_args.model_revision, trust)
        checks.check_launch(model_args, training_args, fsdp, config)
        on_main(checkpoint.lock, training_args.output_dir)
        if training_args.should_save:
            checkpoint.sweep(training_args.output_dir)

        # Tokenizer and data sets.
        tokenizer, new_token_ids, prepared = prepare_data(model_args, data_args, training_args)
        if PartialState().is_main_process:
            data_report.show(prepared.report)
            data_report.write(prepared.report, training_args.output_dir)
        rows = None if data_args.streaming else len(prepared.train)
        notes += findings.notes(findings.check_schedule(training_args, rows))
        fingerprint = on_main(prepared.fingerprint)
        if training_args.resume_from_checkpoint is not None:
            notes += checks.check_data(training_args, fingerprint, model_args)
        new_token_ids = chat.unfilled_rows(tokenizer, new_token_ids, config)

        # Model and LoRA configuration.
        model, deferred = utils.create_and_prepare_model(
            model_args, training_args.use_cpu, trust, tokenizer, config, sharded=fsdp is not None
        )
        if deferred is not None:
            ranks, ranks_here = PartialState().num_processes, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            deferred.check_room(training_args.device, fsdp.offload_params, fsdp.shard_ranks(ranks, ranks_here), ranks_here)
        cpu_fsdp.keep_4bit_layout(model)
        peft_config = utils.create_peft_config(model_args, new_token_ids, model)

        # Trainer. Under FSDP the model has no memory yet, and the draw of the adapter's initial values is recorded.
        with deferred.recorded() if deferred else contextlib.nullcontext():
            trainer = AdapterSFTTrainer(
                model=model,
                processing_class=tokenizer,
                args=training_args,
                train_dataset=prepared.train,
                eval_dataset=prepared.evaluation,
                peft_config=peft_config,
                about={"arguments": run_record.arguments(model_args, data_args, training_args), "data": fingerprint},
            )
        if fsdp is not None and fsdp.version == 1:
            peft_fsdp.check_gatherable(trainer.model)
        if peft_config is not None:
            peft_fsdp.restore_fp32_masters(trainer.model)
            peft_fsdp.give_token_rows_a_bias(trainer.model)

        # Health check: printed once the Trainer has wrapped the model, before the first step.
        shards = fsdp is None or fsdp.shard_ranks(2, 1) == 2  # over all ranks, as the check expects
        trainer.add_callback(HealthCheck(trainer, fsdp and fsdp.name, shards, new_token_ids, notes, deferred))

    # With FSDP1, trained and frozen parameters cannot share a unit (use_orig_params is false), so PEFT's policy wraps the
    # trained ones on their own. FSDP2 shards parameter by parameter and keeps the policy of the Accelerate config.
    fsdp_plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if deferred is not None:
        if fsdp_plugin is None:
            fail(f"{fsdp.name} was asked for but DDP is in force: the model would not be sharded")
        deferred.fill_when_wrapped(trainer)
    if fsdp_plugin is not None and fsdp_plugin.fsdp_version == 1:
        peft_fsdp.keep_buffers_as_computed(fsdp_plugin)
        if peft_config is not None:
            fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(trainer.model)
            fsdp_plugin.ignored_modules = peft_fsdp.replicate_token_rows(trainer.model, training_args.device) or None
            # The Trainer gives a 4-bit model mixed precision in its storage type, asked for or not.
            if fsdp_plugin.mixed_precision_policy is not None or model_args.use_4bit_quantization:
                peft_fsdp.keep_lora_input_dtype(trainer.model)
                peft_fsdp.detach_dora_norm(trainer.model)

    if fsdp_plugin is not None and fsdp_plugin.fsdp_version == 2:
        peft_fsdp.keep_outputs_as_computed(fsdp_plugin)
        if peft_config is not None:
            notes += peft_fsdp.let_the_root_hold_the_head(trainer.model, fsdp_plugin)

    # Train, then save: the adapter, complete, whatever fsdp_state_dict_type says.
    strategy = fsdp.name if fsdp is not None else "DDP" if training_args.world_size > 1 else "one device"
    record = run_record.Record(training_args, trainer.about, strategy)
    preemption = Preemption(trainer)
    trainer.add_callback(preemption)
    try:
        record.write("running")
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        if trainer.stopped:
            record.write("stopped", step=trainer.state.global_step)
            return trainer
        trainer.save_model(_internal_call=True)
        trainer.verify_final()
        trainer.save_state()
        record.write("finished", step=trainer.state.global_step, metrics=result.metrics)
        preemption.close()
        if training_args.push_to_hub:  # after everything is on disk, so that a failed push loses nothing
            trainer.push_final()
    except (
        sharding.NotInForce,
        WrongAdapter,
        loading.LoadingFailed,
        SaveFailed,
        run_record.NotWritten,
        data.BadRow,
    ) as error:
        fail(str(error))
    return trainer


def on_main(function, *args):
    """What `function(*args)` returns on the main process, or the ValueError or OSError it raises, on every process."""
    answer = [None, None]
    if PartialState().is_main_process:
        try:
            answer = [function(*args), None]
        except (ValueError, OSError) as error:
            answer = [None, str(error)]
    result, error = broadcast_object_list(answer)
    if error is not None:
        raise ValueError(error)
    return result


def prepare_data(model_args, data_args, training_args):
    """The tokenizer, the ids of the tokens added to it, and the data sets with the report on them."""
    tokenizer, new_token_ids = chat.prepare_tokenizer(
        model_args.model_name_or_path,
        model_args.chat_template_format,
        model_args.model_revision,
        training_args.trust_remote_code,
        model_args.new_special_tokens,
    )
    with turns.main_first():
        return tokenizer, new_token_ids, data.prepare(data_args, training_args, tokenizer)


def report_data(command: arguments.Command) -> None:
    """`--data_only`: the report on the data, for which neither the model nor its hardware is needed."""
    model_args, data_args, training_args = command.build_without_hardware()
    raise_first(checks.range_problems(model_args, training_args))
    checks.check_output(training_args)
    *_, prepared = prepare_data(model_args, data_args, training_args)
    if PartialState().is_main_process:
        data_report.show(prepared.report)
        for path in data_report.write(prepared.report, training_args.output_dir):
            print(f"written: {path}")


if __name__ == "__main__":
    main()
