#!/usr/bin/env bash
# LoRA with DDP: a copy of a 7-8B model on each GPU with 24 GB or more. Flags given here win.
#   bash run_peft_ddp.sh
#   MODEL=my/model DATASET=my/data NUM_PROCESSES=4 bash run_peft_ddp.sh
#   LAUNCH="python preflight.py --gpu a10g" bash run_peft_ddp.sh        will it work, and fit? Starts nothing
set -euo pipefail
cd "$(dirname "$0")"
export HF_HUB_DISABLE_TELEMETRY=1

${LAUNCH:-accelerate launch} --config_file "${CONFIG:-configs/ddp_config.yaml}" ${NUM_PROCESSES:+--num_processes "$NUM_PROCESSES"} \
    ${PORT:+--main_process_port "$PORT"} ${SCRIPT:-train.py} \
    --seed 100 \
    --model_name_or_path "${MODEL:-meta-llama/Llama-3.1-8B-Instruct}" \
    --dataset_name "${DATASET:-HuggingFaceH4/ultrachat_200k}" --splits "${SPLITS:-train_sft,test_sft[:500]}" \
    --max_length 2048 --packing True \
    --num_train_epochs 1 \
    --learning_rate 1e-4 --lr_scheduler_type cosine --warmup_steps 20 \
    --per_device_train_batch_size 1 --per_device_eval_batch_size 1 --gradient_accumulation_steps 8 \
    --gradient_checkpointing True \
    --logging_steps 5 --eval_strategy epoch --save_strategy epoch \
    --output_dir "${OUTPUT_DIR:-outputs/lora-ddp}" \
    --lora_r 16 --lora_alpha 32 --lora_dropout 0.0 --lora_target_modules all-linear \
    "$@"
