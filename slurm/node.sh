#!/usr/bin/env bash
# srun runs this once on each node (see launch.sh): it adds the node's own settings to the launcher,
# and passes signals on to the processes that train.
set -euo pipefail

# the signal that asks to save and stop would kill torchrun, or a Python that is still importing
trap "" USR1
# Gloo connects every rank with every other, in several groups; and the login node's limits of time,
# memory and processes may come with the job
for limit in n t l v u; do ulimit -S "-$limit" "$(ulimit -H "-$limit")" || true; done

resolves() { python -c 'import socket, sys; socket.getaddrinfo(sys.argv[1], 0)' "$1" 2>&1; }
if [[ ${MASTER_ADDR-} ]] && ! said=$(resolves "$MASTER_ADDR"); then
  python -c '' || exit # it says why it cannot start here
  echo "$(hostname) cannot find the job's first node, $MASTER_ADDR (${said##*$'\n'}):" \
    "see HOST_SUFFIX in slurm/env.sh" >&2
  exit 2
fi

if [[ $1 == torchrun ]]; then
  # torchrun compares addresses to find out whether a node hosts the rendezvous, which fails when
  # HOST_SUFFIX names another network. Nodes may start minutes after one another.
  is_host=$((SLURM_NODEID == 0))
  shift
  set -- --rdzv-conf "is_host=$is_host,read_timeout=600" "$@"
  if [[ ${HOST_SUFFIX-} ]]; then set -- --local-addr "$SLURMD_NODENAME$HOST_SUFFIX" "$@"; fi
  set -- python -m torch.distributed.run "$@" # not `torchrun`, which has the path of a Python
  # restarts (torchrun's own variable turns them on) need a store for each attempt, see RUNNING.md
  if [[ ${PET_MAX_RESTARTS-0} != 0 ]]; then export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; fi
fi

if [[ ${STAGE_DATA-} ]]; then # read the corpora from this node's memory
  copy=/dev/shm/corpora-$SLURM_JOB_ID-$SLURM_NODEID
  rm -rf "$copy"-* 2>/dev/null || true # left behind if this job was killed earlier
  copy=$(mktemp -d "$copy-XXXXXX")
  trap 'rm -rf "$copy"' EXIT
  if [[ -d ${DATA_ROOT:-data} ]]; then
    cp -r "${DATA_ROOT:-data}/." "$copy"
  else
    echo "STAGE_DATA: nothing to copy, there is no ${DATA_ROOT:-data} (DATA_ROOT); make data fills it" >&2
  fi
  export DATA_ROOT=$copy
fi

"$@" &
child=$!
# With cgroups (proctrack/cgroup) Slurm signals only the process that it has started, this one.
# torchrun's children are the ranks; it would give them 30 seconds, too few to save a large model.
# shellcheck disable=SC2317 # the traps call it
pass_on() {
  if [[ ${BATCH_SHELL-} && $SLURM_NODEID == 0 ]]; then kill -USR2 "$BATCH_SHELL" 2>/dev/null || true; fi
  if [[ $1 == -m ]]; then pkill "-$2" -P "$child"; else kill "-$2" "$child"; fi || true
}
# shellcheck disable=SC2064 # $2 is -m for torchrun, now
for signal in USR1 TERM; do trap "pass_on $2 $signal" "$signal"; done
while true; do
  wait "$child" && status=0 || status=$? # a trap interrupts a wait, with a status above 128
  kill -0 "$child" 2>/dev/null || break
done
if ((status > 128)); then wait "$child" && status=0 || status=$?; fi # it may have ended meanwhile
if ((status < 0)); then status=143; fi # bash has lost it: a signal came as the child ended
exit "$status"
