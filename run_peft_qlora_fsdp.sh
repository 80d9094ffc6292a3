#!/usr/bin/env bash
# QLoRA + FSDP1 with parameter offload, as the guide has it: a 70B on 2 GPUs with 24 GB. Any flag given to this script wins over the ones below.
#   bash run_peft_qlora_fsdp.sh
#   MODEL=my/model DATASET=my/data CONFIG=configs/fsdp2_config_qlora.yaml NUM_PROCESSES=4 bash run_peft_qlora_fsdp.sh --lora_r 16
#   LAUNCH="python preflight.py --gpu 4090" bash run_peft_qlora_fsdp.sh        will it work, and fit? Starts nothing
set -euo pipefail
cd "$(dirname "$0")"
export HF_HUB_DISABLE_TELEMETRY=1
# After a SIGTERM the launcher waits this long before it kills: a micro-batch and a save have to fit.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}"

${LAUNCH:-accelerate launch} --config_file "${CONFIG:-configs/fsdp_config_qlora.yaml}" ${NUM_PROCESSES:+--num_processes "$NUM_PROCESSES"} \
    ${PORT:+--main_process_port "$PORT"} ${SCRIPT:-train.py} \
    --seed 100 \
    --model_name_or_path "${MODEL:-meta-llama/Llama-2-70b-hf}" \
    --dataset_name "${DATASET:-smangrul/ultrachat-10k-chatml}" \
    --chat_template_format "chatml" --add_special_tokens False --append_concat_token False \
    --splits "train,test" \
    --max_seq_len 2048 \
    --num_train_epochs 1 \
    --logging_steps 5 --log_level "info" --logging_strategy "steps" \
    --eval_strategy "epoch" --save_strategy "epoch" \
    --push_to_hub --hub_private_repo True --hub_strategy "every_save" \
    --bf16 True \
    --packing True \
    --learning_rate 1e-4 --lr_scheduler_type "cosine" --weight_decay 1e-4 --warmup_steps 0 --max_grad_norm 1.0 \
    --output_dir "${OUTPUT_DIR:-llama-sft-qlora-fsdp}" \
    --per_device_train_batch_size 2 --per_device_eval_batch_size 2 --gradient_accumulation_steps 2 \
    --gradient_checkpointing True --use_reentrant True \
    --dataset_text_field "content" \
    --use_flash_attn True \
    --use_peft_lora True --lora_r 8 --lora_alpha 16 --lora_dropout 0.1 --lora_target_modules "all-linear" \
    --use_4bit_quantization True --use_nested_quant True \
    --bnb_4bit_compute_dtype "bfloat16" --bnb_4bit_quant_storage_dtype "bfloat16" \
    "$@"
