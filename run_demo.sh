#!/usr/bin/env bash
# Teaches SmolLM2-135M-Instruct to turn support messages into JSON, on 2 CPU processes with FSDP2 and LoRA, and shows the
# held-out split before and after. Needs 2 cores, 8 GB of RAM and PyPI; no GPU and no model hub. Run it again and the
# environment, the model and the first measurement are reused.
#     bash run_demo.sh [train.py flags]
#     MODEL=ID_OR_FOLDER OUTPUT_DIR=out bash run_demo.sh --max_steps 30
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source ./setup_env.sh

CACHE_DIR=${CACHE_DIR:-.cache/demo}
OUTPUT_DIR=${OUTPUT_DIR:-outputs/demo}
TEST=demo_data/test.jsonl
[ -n "${MODEL:-}" ] || export HF_HUB_OFFLINE=1 # nothing to fetch, so no waiting for a hub that may be out of reach
evaluate() { OMP_NUM_THREADS=${EVAL_THREADS:-2} python demo.py evaluate --model "$MODEL" --data $TEST "$@"; } # alone on both cores
step() { printf '\n[%3ds] %s\n' "$SECONDS" "$1"; }

step "model"
MODEL=$(python demo.py prepare ${MODEL:+--model "$MODEL"} --cache_dir "$CACHE_DIR" | tail -n 1)

step "before training: $MODEL"
evaluate --out "$CACHE_DIR/before.json"

step "training"
# Keeping a gathered layer until the backward pass has used it saves gathering it twice; the model is small enough for that.
accelerate launch --config_file configs/fsdp2_config_cpu.yaml --fsdp_reshard_after_forward false \
  train.py --config configs/demo_recipe.yaml --use_cpu True --model_name_or_path "$MODEL" --output_dir "$OUTPUT_DIR" "$@"

step "after training: $OUTPUT_DIR"
evaluate --adapter "$OUTPUT_DIR" --out "$OUTPUT_DIR/after.json"

step "report"
python demo.py report --before "$CACHE_DIR/before.json" --after "$OUTPUT_DIR/after.json" \
  --trainer_state "$OUTPUT_DIR/trainer_state.json" --out "$OUTPUT_DIR" --require 0.9
step "done: the adapter, loss.png and samples.md are in $OUTPUT_DIR"
