# shellcheck shell=bash
# The environment of every job; each train.sbatch sources it at the root of the repository, and so may
# you in the shell of an salloc: an error returns, with status 2, and ends no shell.
# A site's own settings go into slurm/site.env (untracked), which is read first: copy
# site.env.plain.example or site.env.jsc.example and change it.
if [[ -f slurm/site.env ]]; then
  set -a # export its variables to the processes that srun starts
  # shellcheck source=/dev/null
  source slurm/site.env
  set +a
fi

# shellcheck source=slurm/settings.sh
source slurm/settings.sh
if [[ -z ${SLURM_JOB_ID-} ]] || ! command -v scontrol >/dev/null; then
  echo "slurm/env.sh is for a Slurm job, on a node that has scontrol: SLURM_JOB_ID=${SLURM_JOB_ID-}" >&2
  return 2
fi

# A job that is submitted from within another one inherits its variables, and Slurm replaces only some
# of them. So the controller is asked what this job is.
for pause in 0 1 10 60; do
  sleep "$pause"
  # one task's SLURM_JOB_ID is the array's, by which scontrol shows all tasks
  shown=$(scontrol show job "$SLURM_JOB_ID" | awk -v RS= -v id="JobId=$SLURM_JOB_ID" '$1 == id') &&
    [[ $shown ]] && break
done
shown_field() { sed -n "s/.* $1=\([^ ]*\).*/\1/p" <<<"$shown"; }
if [[ -z $shown ]]; then
  echo "slurm/env.sh: scontrol show job $SLURM_JOB_ID does not answer: submit the job again" >&2
  return 2
elif [[ $(shown_field HetJobId) ]]; then
  echo "slurm/env.sh: heterogeneous jobs are not supported: submit with one group of nodes" >&2
  return 2
fi
JOB=$(shown_field ArrayJobId)
if [[ $JOB ]]; then
  JOB+=_$(shown_field ArrayTaskId)
else
  unset "${!SLURM_ARRAY_@}"
  JOB=$SLURM_JOB_ID
fi
SLURM_RESTART_COUNT=$(shown_field Restarts)
export JOB SLURM_RESTART_COUNT
# Slurm appends to the log, so that a requeued job continues it. At the first start, what is there is
# of a job of another cluster, or of one that counts from 1 again.
log=$(sed -n 's/^ *StdOut=//p' <<<"$shown")
if [[ $SLURM_RESTART_COUNT == 0 && -s $log && $log == */[0-9][0-9]_*-"$SLURM_JOB_ID".log ]]; then
  cp "$log" "${log%.log}.$(date -r "$log" +%Y%m%d-%H%M%S).log" && : >"$log"
fi
# what srun would take for options; without them a step has all the job's memory and GPUs
unset "${!SLURM_HET_@}" "${!SLURM_MEM_PER_@}" "${!SLURM_CPU_BIND@}" SLURM_NTASKS_PER_GPU
unset SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_GPUS_PER_SOCKET SLURM_TRES_PER_TASK
if ! scontrol show step "$SLURM_JOB_ID.${SLURM_STEP_ID-}" &>/dev/null; then
  unset "${!SLURM_STEP@}" # this shell is in no step
fi

# The run's folder is named by the job's number and the time of its submission, because Slurm may count
# from 1 again. make submit-NN passes the time; after a plain sbatch the first start notes it as the
# job's comment. The job's environment and comment outlive a requeue (its SubmitTime does not).
if [[ -z ${SUBMITTED-} ]]; then
  comment=$(sed -n 's/^ *Comment=\(.*[^ ]\) *$/\1/p' <<<"$shown")
  SUBMITTED=$(sed -n 's/.*submitted \([0-9]\{8\}-[0-9]\{6\}\).*/\1/p' <<<"$comment")
  if [[ -z $SUBMITTED ]]; then
    SUBMITTED=$(date +%Y%m%d-%H%M%S)
    # a user's own comment stays
    scontrol update JobId="$JOB" Comment="${comment:+$comment, }submitted $SUBMITTED" ||
      echo "slurm/env.sh: no comment for job $JOB: if it is requeued, its run starts in a new folder" >&2
  fi
fi
export SUBMITTED

# caches, which can fill a home folder's quota
cache=${CACHE_ROOT:-${XDG_CACHE_HOME:-$HOME/.cache}}
export HF_HOME=${HF_HOME-$cache/huggingface} TORCH_HOME=${TORCH_HOME-$cache/torch}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR-$cache/triton}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR-$cache/inductor}
# compute nodes have no internet: a library that asks the Hub fails at once
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE-1} HF_DATASETS_OFFLINE=${HF_DATASETS_OFFLINE-1}
# after `sbatch --export=NONE`, too, srun passes the environment on
export SLURM_EXPORT_ENV=ALL
# srun (22.05 and later) does not inherit --cpus-per-task from sbatch
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}

# The rendezvous is on the job's first node: at its name with HOST_SUFFIX appended or, without a
# suffix, at the address that Slurm itself uses (the name, unless the site's slurm.conf sets another)
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if [[ ${HOST_SUFFIX-} ]]; then
  MASTER_ADDR+=$HOST_SUFFIX
else
  address=$(scontrol --oneliner show node "$MASTER_ADDR" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
  MASTER_ADDR=${address:-$MASTER_ADDR} # where users may not see nodes (PrivateData), the name
fi
# a port per job, because jobs may share a node; the next one where another program listens
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000)) # below the ports that Linux gives to connections
while ((MASTER_PORT < 32768)) && timeout 5 bash -c ": <>/dev/tcp/$MASTER_ADDR/$MASTER_PORT" 2>/dev/null; do
  MASTER_PORT=$((MASTER_PORT + 1))
done
export MASTER_ADDR MASTER_PORT

if [[ -n ${VENV=.venv} ]]; then
  if [[ ! -x $VENV/bin/python ]]; then
    echo "no virtual environment in $VENV: run make setup where there is internet, or set" \
      "VENV= in slurm/site.env" >&2
    return 2
  fi
  # not by `activate`, which has the path that the environment was created at
  VIRTUAL_ENV=$(realpath "$VENV")
  export VIRTUAL_ENV PATH=$VIRTUAL_ENV/bin:$PATH
fi
