#!/usr/bin/env bash
# What launch.sh has srun run on each node, once: the launcher, with what only the node knows.
set -euo pipefail

# torchrun, or a Python that is still importing, would die of the signal that asks to save and stop
trap "" USR1

if [[ $1 == torchrun ]]; then
  # torchrun tells by its address whether a node is the one where all meet; behind another name
  # for another network it can't
  is_host=$((SLURM_NODEID == 0))
  shift
  set -- --rdzv-conf "is_host=$is_host" "$@"
  if [[ ${HOST_SUFFIX-} ]]; then set -- --local-addr "$SLURMD_NODENAME$HOST_SUFFIX" "$@"; fi
  set -- torchrun "$@"
fi

if [[ ${STAGE_DATA-} ]]; then # read the corpora from this node's memory
  copy=/dev/shm/corpora-$SLURM_JOB_ID-$SLURM_NODEID
  trap 'rm -rf "$copy"' EXIT
  rm -rf "$copy" # of a life of this job that had no end
  if [[ -d ${DATA_ROOT:-data} ]]; then
    cp -r "${DATA_ROOT:-data}" "$copy"
  else
    echo "STAGE_DATA: nothing to copy, for there is no ${DATA_ROOT:-data} (DATA_ROOT); make data fills it" >&2
    mkdir "$copy"
  fi
  DATA_ROOT=$copy "$@"
else
  exec "$@"
fi
