#!/usr/bin/env bash
# What `make submit-NN`, `submit-all`, `status`, `logs-NN` and `cancel` do.
#
#     slurm/jobs.sh submit 04_fsdp [FLAG...]             flags of train.py
#     slurm/jobs.sh submit "01_single_gpu 02_ddp" ...    one after another
#     slurm/jobs.sh status
#     slurm/jobs.sh logs 04_fsdp
#     slurm/jobs.sh cancel
#
# NODES GPUS CPUS MEM PARTITION ACCOUNT TIME override the header of train.sbatch.
set -euo pipefail
unset CDPATH
cd -P "$(dirname "$0")/.."
# shellcheck source=slurm/settings.sh
source slurm/settings.sh
# what finds a job and its log again must be as in train.sbatch, and sbatch must not wait for its end
unset SBATCH_JOB_NAME SBATCH_OUTPUT SBATCH_ERROR SBATCH_ARRAY_INX SBATCH_WAIT
# in a job these describe it, and the new job would take them for its own
for name in "${!SLURM_@}"; do
  if [[ $name != SLURM_C@(ONF|LUSTERS) ]]; then unset "$name"; fi # which cluster it is
done
# if the cluster of `make cluster` is up, use it instead of any other
if [[ -e slurm/cluster/slurm.conf ]]; then export SLURM_CONF=$PWD/slurm/cluster/slurm.conf; fi
shopt -s nullglob

# Seconds of a time in sbatch's formats (M, M:S, H:M:S, D-H, D-H:M, D-H:M:S); nothing for other words
seconds_of() {
  local time=$1 days=0 parts
  if [[ ! $time =~ ^([0-9]+-)?[0-9]+(:[0-9]+){0,2}$ ]]; then return; fi
  if [[ $time == *-* ]]; then days=${time%%-*} time=${time#*-}; fi
  IFS=: read -ra parts <<<"$time"
  if [[ $1 != *-* && ${#parts[@]} -lt 3 ]]; then parts=(0 "${parts[@]}"); fi
  parts+=(0 0)
  echo $(((10#$days * 24 + 10#${parts[0]}) * 3600 + 10#${parts[1]} * 60 + 10#${parts[2]}))
}

# A job is asked to save and stop some minutes before its time limit. With less time than that it
# would be requeued forever. Two minutes are added: the signal may come one minute early, and a job
# needs time to start.
check_time() { # STAGE
  local warning seconds
  warning=${SBATCH_SIGNAL:-$(header "$1" signal)} warning=${warning##*@}
  seconds=$(seconds_of "${TIME-}")
  if [[ $seconds ]] && ((seconds > 0 && seconds < warning + 120)); then # 0: no limit
    echo "TIME=$TIME is too short: $warning seconds before its end a job saves and is requeued;" \
      "pass TIME=$(((warning + 179) / 60)) (minutes) or more" >&2
    exit 2
  fi
}

header() { sed -n "s/^#SBATCH --$2=//p" "$1/train.sbatch"; } # STAGE OPTION

# "NODES GPUS" of the partition: how many nodes it has in total, and the GPUs of its largest node;
# nothing where sinfo names no default partition
size_of_partition() { # STAGE
  local name=${PARTITION:-${SBATCH_PARTITION:-$(header "$1" partition)}}
  sinfo --noheader ${name:+--partition="$name"} --format="%P %D %G" | awk -v given="$name" '
    given || $1 ~ /[*]$/ {
      nodes[$1] += $2
      if (nodes[$1] > most) most = nodes[$1]
      count = match($3, /gpu:[^,(]*/) ? substr($3, RSTART, RLENGTH) : "0"
      sub(/.*:/, "", count)
      if (count + 0 > gpus) gpus = count + 0
    }
    END { if (most) print most, gpus + 0 }'
}

# Check the flags with the scripts' own parse_args, as rank 0 of as many as the job will have. Where
# there is no environment with PyTorch here, the job itself reports a wrong flag.
check_flags() { # "STAGE=RANKS ..." FLAG...
  local said
  said=$(
    set +u
    # shellcheck source=/dev/null
    if [[ -f slurm/site.env ]]; then source slurm/site.env; fi
    PATH=$(realpath -m "${VENV=.venv}")/bin:$PATH
    NPROC=${NPROC:-2} python -m tools.check_flags "$@" 2>&1 >/dev/null
  ) || if [[ $? == 2 && $said == train.py:* ]]; then
    echo "$said" >&2
    exit 2
  elif [[ $said != *"No module named"* && $said != *"python: "* ]]; then
    echo "the flags could not be checked: ${said##*$'\n'}; the job itself checks them" >&2
  fi
}

submit() {
  local stage job before='' flags scripts nodes per_node most='' gpus='' ranks='' known
  read -ra scripts <<<"$1"
  shift
  # the headers request GPUs, and a cluster without GPUs would reject the job
  if [[ -z ${GPUS-} ]] && known=$(sinfo --noheader --format=%G) && [[ $known && $known != *gpu* ]]; then
    GPUS=0
  fi
  read -r most gpus < <(size_of_partition "${scripts[0]}") || true
  for stage in "${scripts[@]}"; do
    check_time "$stage"
    nodes=$(header "$stage" nodes) per_node=${GPUS:-$(header "$stage" gpus-per-node)}
    per_node=${per_node##*:} # of a100:4
    if [[ $stage != 01_* ]]; then nodes=${NODES:-$nodes}; fi
    if [[ $most && $nodes =~ ^[0-9]+$ ]] && ((nodes > most)); then
      echo "NODES=$nodes: the partition has $most, so the job would wait forever: pass fewer" >&2
      exit 2
    fi
    if [[ $stage == 01_* ]]; then ranks+="$stage=1 "; else ranks+="$stage=${nodes}x$per_node "; fi
  done
  check_flags "$ranks" "$@"
  if [[ -z ${GPUS-} && ${gpus:-0} -gt $per_node ]]; then
    # a small request starts soon, and the default batch size is divisible by few numbers
    echo "$per_node GPU per node, as train.sbatch requests; a node has $gpus: GPUS=$gpus takes them all"
  fi
  # names the run's folder: a requeue keeps it, and another job with the same number has another one
  printf -v SUBMITTED '%(%Y%m%d-%H%M%S)T'
  export SUBMITTED
  for stage in "${scripts[@]}"; do
    flags=()
    if [[ ${NODES-} && $stage != 01_* ]]; then flags+=(--nodes="$NODES"); fi # 01 is one process
    if [[ ${GPUS-} && ($stage != 01_* || $GPUS == 0) ]]; then flags+=(--gpus-per-node="$GPUS"); fi
    if [[ ${PARTITION-} ]]; then flags+=(--partition="$PARTITION"); fi
    if [[ ${ACCOUNT-} ]]; then flags+=(--account="$ACCOUNT"); fi
    if [[ ${TIME-} ]]; then flags+=(--time="$TIME"); fi
    if [[ ${CPUS-} ]]; then flags+=(--cpus-per-task="$CPUS"); fi
    if [[ ${MEM-} ]]; then flags+=(--mem="$MEM"); fi
    # without --kill-on-invalid-dep a job whose predecessor failed would stay pending forever
    if [[ $before ]]; then flags+=(--dependency="afterok:$before" --kill-on-invalid-dep=yes); fi
    flags+=("$stage/train.sbatch" "$@")
    echo "sbatch ${flags[*]}"
    job=$(sbatch --parsable "${flags[@]}")
    before=${job%%;*} # with several clusters the cluster's name follows
    echo "  job $before, log $stage-$before.log: make status, make logs-${stage%%_*}"
  done
}

# this folder's jobs, the newest last: id, name, state, elapsed time, and its nodes or why it waits
jobs() {
  local id state time why rest name
  # the job's name and its folder come last, because they may contain any character
  squeue --me --states="$1" --noheader --sort=i --format="%A|%T|%M|%R|%j|%Z" |
    while IFS='|' read -r id state time why rest; do
      name=${rest%"|$PWD"}
      if [[ $name != "$rest" ]]; then echo "$id|${name//|/ }|$state|$time|$why"; fi
    done
}

status() {
  {
    echo "JOB|STAGE|STATE|TIME|NODES, OR WHY NOT|LOG"
    jobs all | awk -F'|' -v OFS='|' '
      $3 == "CANCELLED" && $4 == "0:00" { $5 = "(never started)" }
      { print $0, $2 "-" $1 ".log" }'
  } | column -ts'|'
}

logs() {
  local job log before now
  job=$(jobs all | awk -F'|' -v stage="$1" '$2 == stage { print $1 }' | tail -n 1)
  if [[ $job ]]; then
    log=$1-$job.log
  else
    log=$(find . -maxdepth 1 -name "$1-*.log" -printf '%T@ %f\n' | sort -n | tail -n 1 | cut -d' ' -f2-)
    if [[ -z $log ]]; then
      echo "make logs-${1%%_*}: no job of $1 and no log; submit one: make submit-${1%%_*}" >&2
      exit 2
    fi
  fi
  state() { jobs all | awk -F'|' -v job="$job" '$1 == job { print $3 ", " $5 }'; }
  echo "== $log"
  if [[ -z $job ]]; then
    cat "$log"
    return
  fi
  # follow it until the job has ended; it may be pending at first, and a requeued job continues
  tail --retry -n +1 -f "$log" 2>/dev/null &
  follower=$! before=
  trap 'kill "$follower"' EXIT
  while now=$(state) && [[ $now =~ ^(PENDING|CONFIGURING|RUNNING|COMPLETING|SUSPENDED|REQUEUED) ]]; do
    if [[ $now != "$before" && $now == PENDING* ]]; then echo "== job $job: $now"; fi
    before=$now
    sleep 2
  done
  sleep 1 # for the last lines
  echo "== job $job: $(state)"
}

# The newest first, so that no dependent job starts when its predecessor is cancelled.
cancel() {
  local wait
  wait=$(scontrol show config | sed -n 's/^KillWait *= *\([0-9]*\).*/\1/p')
  jobs pending,running,suspended | tac | while IFS='|' read -r job stage state _; do
    scancel "$job" && echo "cancelled job $job: $stage$(
      if [[ $state == RUNNING ]]; then
        echo ", which saves if a step and a save take less than ${wait:-30} s: make logs-${stage%%_*}"
      fi
    )"
  done
}

number=NN
if [[ ${2-} == [0-9][0-9]_* && $2 != *" "* ]]; then number=${2%%_*}; fi
without="make run-$number runs a stage without, make cluster starts a Slurm on this machine"
if ! command -v sbatch >/dev/null; then
  echo "there is no Slurm here (no sbatch): $without" >&2
  exit 2
elif ! said=$(squeue --me --noheader 2>&1 >/dev/null); then
  echo "Slurm does not answer (${said##*$'\n'}): $without" >&2
  exit 2
fi
"$@"
