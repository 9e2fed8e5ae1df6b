#!/usr/bin/env bash
# Launch a script on the nodes of this job and, when its time is nearly up, requeue the job.
#
#     exec slurm/launch.sh python 01_single_gpu/train.py --steps 100     one process
#     exec slurm/launch.sh torchrun 02_ddp/train.py --steps 100          one process per GPU, all nodes
#
# Without GPUs torchrun starts NPROC processes per node (2). `exec` is needed because Slurm sends a
# job's signal only to the shell that runs the batch script.
set -euo pipefail

launcher=$1
shift

signal=${SBATCH_SIGNAL:-B:USR1@180} # as in train.sbatch
if [[ ! $signal =~ ^B:USR1@[1-9][0-9]*$ ]]; then
  echo "SBATCH_SIGNAL=$signal: pass B:USR1@SECONDS, which asks this script to save and requeue" >&2
  exit 2
fi
warning=${signal#*@} # seconds

JOB=${JOB:-$SLURM_JOB_ID} # env.sh's
job_field() { scontrol --oneliner show job "$JOB" | sed -n "s/.* $1=\([^ ]*\).*/\1/p"; }
# of StartTime or EndTime, if known. If scontrol does not answer, there is no date to read, and `date`
# would take an empty one for midnight.
seconds_of() {
  local when
  when=$(job_field "$1") && [[ $when ]] && date -d "$when" +%s 2>/dev/null
}

# Slurm may send the signal a minute early, and a job needs a minute to start: with less time than
# that it would save and be requeued forever
if start=$(seconds_of StartTime) && end=$(seconds_of EndTime) && ((end - start < warning + 120)); then
  echo "--time is too short: $warning seconds before its end a job saves and is requeued; pass" \
    "--time=$(((warning + 179) / 60)) (minutes) or more" >&2
  exit 2
fi

if [[ $launcher == torchrun ]]; then
  # One torchrun per node owns all its GPUs. With one task per GPU, Slurm may hide each task's GPU
  # from the others, and NCCL could not use peer-to-peer copies between them.
  per_node=${SLURM_GPUS_ON_NODE:-${NPROC:-2}}
  nodes=$SLURM_JOB_NUM_NODES
  if [[ ! $per_node =~ ^[1-9][0-9]*$ ]]; then
    echo "$per_node processes per node: request GPUs, or set NPROC= to 1 or more" >&2
    exit 2
  fi
  host=$MASTER_ADDR
  if [[ $host == *:* ]]; then host="[$host]"; fi # an IPv6 address
  command=(torchrun --nnodes "$nodes" --nproc-per-node "$per_node" --rdzv-backend c10d
    --rdzv-id "$JOB" --rdzv-endpoint "$host:$MASTER_PORT")
else
  per_node=1
  nodes=1
  command=("$launcher")
fi
# the CPUs that the job may use, but no more than the machine has: slurm.conf may declare more
cpus=$((SRUN_CPUS_PER_TASK < $(nproc) ? SRUN_CPUS_PER_TASK : $(nproc)))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus > per_node ? cpus / per_node : 1))}

# train.py exits with 0 if it saved and stopped, too. node.sh tells this shell about a signal that
# asked it to: Slurm and scancel signal the steps, and not this shell.
stopped=''
trap stopped=1 USR2
export BATCH_SHELL=$$
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 \
  slurm/node.sh "${command[@]}" "$@" &
step=$!

# USR1 (see --signal in train.sbatch) asks the training processes to save and stop. A signal that
# arrives before their handler is installed is lost, so it is sent again until they have exited.
requeue='' cut=''
# shellcheck disable=SC2317 # the trap calls it
asked_to_stop() {
  requeue=1
  while kill -USR1 "$step"; do sleep 2; done 2>/dev/null &
  local end
  # near the time limit, so the signal is Slurm's own and not a user's
  if end=$(seconds_of EndTime) && ((end - $(date +%s) <= warning + 90)); then cut=1; fi
}
trap asked_to_stop USR1
status=0
while true; do
  wait "$step" && status=0 || status=$? # the trap interrupts a wait, with a status above 128
  kill -0 "$step" 2>/dev/null || break
done
# the step may have ended while the trap was busy: ask for its own status
if ((status > 128)); then wait "$step" && status=0 || status=$?; fi
if ((status < 0)); then status=143; fi # bash has lost it: a signal came as the step ended

# Slurm takes minutes to notice a lost node (SlurmdTimeout), but the processes on the other nodes may
# fail within a second. A lost node shows earlier: a step starts on this node, but not on all nodes.
step_starts_on() { timeout $((60 + SLURM_JOB_NUM_NODES)) srun --overlap --nodes="$1" --ntasks="$1" true; }
node_is_lost() { step_starts_on 1 && ! step_starts_on "$SLURM_JOB_NUM_NODES"; }

# Whether this start of the job and the previous one both hit the time limit before their first
# step. The job's comment keeps the number of such a start, after what env.sh notes there.
cut_twice_without_a_step() {
  local life=${SLURM_RESTART_COUNT:-0}
  if [[ ! $cut || $status == 0 ]]; then return 1; fi # status 0: it has done a step and saved
  local comment
  comment=$(squeue --noheader --jobs="$JOB" --format=%k)
  if [[ $comment == *"no-step-in-life-$((life - 1))" ]]; then return 0; fi
  comment=${comment%no-step-in-life-*} comment=${comment%, }
  if [[ $comment == "(null)" ]]; then comment=''; fi
  scontrol update JobId="$JOB" Comment="${comment:+$comment, }no-step-in-life-$life"
  return 1
}

# Slurm has sent SIGTERM to the step, and would itself requeue the job only at the end of the GraceTime
preempted() { seconds_of PreemptTime >/dev/null; }

requeue() { # WHY
  echo "$1: job $JOB is to be requeued, and then continues from its newest checkpoint"
  if ! scontrol requeue "$JOB"; then
    echo "job $JOB could not be requeued: submit it again with --run-dir and the folder of this run" >&2
    exit 1
  fi
}

if [[ $stopped || $status != 0 ]] && preempted; then
  requeue "preempted by another job"
# 138: USR1 killed a task before it had anything to save; 143: srun then terminated the other tasks
elif [[ $requeue && $status =~ ^(0|138|143)$ ]] && cut_twice_without_a_step; then
  echo "job $JOB hit its time limit twice before its first step: not requeued;" \
    "pass a longer --time" >&2
elif [[ $requeue && $status =~ ^(0|138|143)$ ]]; then
  requeue "$([[ $cut ]] && echo "time is nearly up" || echo "asked to by USR1")"
elif [[ $status != 0 ]] && node_is_lost; then
  requeue "a node is lost"
elif [[ $status != 0 ]]; then
  echo "job $JOB failed with status $status" >&2
elif [[ $stopped ]]; then
  echo "job $JOB was asked to stop, and has saved: scontrol requeue $JOB continues it" >&2
  status=1 # no job that depends on this one's success may start
fi
exit "$status"
