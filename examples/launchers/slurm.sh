#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1     # one torchrun per node, which starts one process per GPU
#SBATCH --requeue
#SBATCH --open-mode=append      # a job that runs again keeps its output

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
again=${SLURM_RESTART_COUNT:-0}
if srun --kill-on-bad-exit=1 torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-backend=c10d --rdzv-endpoint="$first:29500" --rdzv-id="$SLURM_JOB_ID-$again" "$@"; then
  exit 0
fi
# SLURM requeues the job only if it notices the loss of a node before the program fails.
if [ "$again" -lt 10 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit 1
