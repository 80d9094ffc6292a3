#!/usr/bin/env bash
# LoRA on one GPU: a 7-8B in 16 bit on 24 GB. QLoRA on 12 GB: add --use_4bit_quantization True. Flags given here win.
#   bash run_peft_single.sh
#   MODEL=my/model DATASET=my/data bash run_peft_single.sh --use_4bit_quantization True
#   LAUNCH="python preflight.py --gpu 4090" bash run_peft_single.sh        will it work, and fit? Starts nothing
set -euo pipefail
cd "$(dirname "$0")"
export HF_HUB_DISABLE_TELEMETRY=1

${LAUNCH:-accelerate launch} --config_file "${CONFIG:-configs/single_config.yaml}" ${SCRIPT:-train.py} \
    --seed 100 \
    --model_name_or_path "${MODEL:-meta-llama/Llama-3.1-8B-Instruct}" \
    --dataset_name "${DATASET:-HuggingFaceH4/ultrachat_200k}" --splits "${SPLITS:-train_sft,test_sft[:500]}" \
    --max_length 2048 --packing True \
    --num_train_epochs 1 \
    --learning_rate 1e-4 --lr_scheduler_type cosine --warmup_steps 20 \
    --per_device_train_batch_size 1 --per_device_eval_batch_size 1 --gradient_accumulation_steps 16 \
    --gradient_checkpointing True \
    --logging_steps 5 --eval_strategy epoch --save_strategy epoch \
    --output_dir "${OUTPUT_DIR:-outputs/lora-single}" \
    --lora_r 16 --lora_alpha 32 --lora_dropout 0.0 --lora_target_modules all-linear \
    "$@"
