#!/usr/bin/env bash
# Any recipe under SLURM, on one node or several, until it is finished: a job that is preempted or runs out of time saves a
# checkpoint, queues itself again and goes on from there.
#   sbatch --nodes 2 run_slurm.sh recipe.yaml --output_dir out
#   CONFIG=configs/fsdp2_config_qlora.yaml sbatch --nodes 1 --gpus-per-node 2 run_slurm.sh recipe.yaml --output_dir out
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")}"
export HF_HUB_DISABLE_TELEMETRY=1
# From the signal until the ranks are killed; less than the 300 seconds above, more than a micro-batch and a save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-270}"

out=$(printf '%s\n' "$@" | sed -n '/^--output_dir$/{n;p;}')
[ -n "$out" ] || { echo "error: --output_dir is missing: bash $0 recipe.yaml --output_dir out" >&2; exit 1; }
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export CONFIG="${CONFIG:-configs/fsdp2_config.yaml}" SCRIPT="${SCRIPT:-train.py}" HEAD="$head" PORT="${PORT:-29500}"

status=0
# shellcheck disable=SC2016  # the variables in quotes are those of each node
srun --kill-on-bad-exit=1 bash -c 'exec ${LAUNCH:-accelerate launch} --config_file "$CONFIG" \
    --num_machines "$SLURM_NNODES" --machine_rank "$SLURM_NODEID" --num_processes $((SLURM_NNODES * SLURM_GPUS_ON_NODE)) \
    --main_process_ip "$HEAD" --main_process_port "$PORT" "$SCRIPT" "$@" --resume_from_checkpoint auto' bash "$@" || status=$?
if grep -qs '"status": "stopped"' "$out/run.json"; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
