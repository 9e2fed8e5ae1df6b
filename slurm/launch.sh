#!/usr/bin/env bash
# Launch a script on the nodes of this job and, when its time is nearly up, requeue the job.
#
#     exec slurm/launch.sh python 01_single_gpu/train.py --steps 100     one process
#     exec slurm/launch.sh torchrun 02_ddp/train.py --steps 100          a process a GPU, every node
#
# Without GPUs torchrun starts NPROC processes a node (2). `exec`, for Slurm sends a job's signal
# to the shell that runs the batch script and to no other process.
set -euo pipefail

launcher=$1
shift

if [[ $launcher == torchrun ]]; then
  # one torchrun a node owns all its GPUs: a task a GPU would hide them from one another, and
  # NCCL could not pass data between them through the node's memory
  per_node=${SLURM_GPUS_ON_NODE:-${NPROC:-2}}
  nodes=$SLURM_JOB_NUM_NODES
  master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  port=$((20000 + SLURM_JOB_ID % 20000)) # jobs that share a node do not meet
  command=(torchrun --nnodes "$nodes" --nproc-per-node "$per_node" --rdzv-backend c10d
    --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$master:$port")
else
  per_node=1
  nodes=1
  command=("$launcher")
fi
# the CPUs that the job may use, or that the machine has where Slurm is told of more
cpus=$((SRUN_CPUS_PER_TASK < $(nproc) ? SRUN_CPUS_PER_TASK : $(nproc)))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus > per_node ? cpus / per_node : 1))}

# USR1 (see --signal in train.sbatch) asks the training processes to save and stop. torchrun and
# a Python that is still importing would die of it: they are started with the signal ignored.
# shellcheck disable=SC2016 # "$@" is for the inner shell
srun --nodes="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 \
  bash -c 'trap "" USR1; exec "$@"' -- "${command[@]}" "$@" &
step=$!

requeue=
trap 'requeue=1; kill -USR1 "$step"' USR1 # srun hands it on to its tasks
status=0
while true; do
  wait "$step" && status=0 || status=$? # the trap cuts a wait short
  kill -0 "$step" 2>/dev/null || break
done

if [[ -n $requeue && $status == 0 ]]; then
  echo "time is nearly up: requeued, to go on from the checkpoint"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
