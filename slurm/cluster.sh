#!/usr/bin/env bash
# A Slurm cluster on this one machine: the real daemons, run as an ordinary user, with pretend GPUs.
#
#     slurm/cluster.sh up       start it, with NODES nodes (2)
#     slurm/cluster.sh down     end its jobs, stop it, remove its folder
#
# Everything lives in $CLUSTER (slurm/cluster). SLURM_CONF=slurm/cluster/slurm.conf points Slurm's
# own commands at it, and `make` sets it by itself. All nodes are this machine, so problems between
# machines do not show. The tests give each node a network and a host name of its own, by
# NAMESPACES=tests/namespaces.sh.
set -euo pipefail
unset CDPATH
cd "$(dirname "$0")/.."
# shellcheck source=slurm/settings.sh
source slurm/settings.sh

folder=${CLUSTER:-slurm/cluster}
nodes=${NODES:-2}
port=${PORT:-17000} # slurmctld's; node N listens on port + N
namespaces=${NAMESPACES:-} # a script that gives each node a network of its own
extra_conf=${EXTRA_CONF:-} # more lines for slurm.conf
me=$(id -un)
PATH=$PATH:/usr/sbin:/sbin # where Debian has the daemons, outside an ordinary user's path

fail() {
  echo "make cluster: $*" >&2
  exit 2
}

write_configuration() { # FOLDER SOCKETS; Slurm wants absolute paths
  local dir=$1 sockets=$2 names="node[1-$nodes]" controller=127.0.0.1 n
  if [[ $nodes == 1 ]]; then names=node1; fi
  if [[ $namespaces ]]; then controller=10.77.0.254; fi
  mkdir -p "$dir"/{log,state,gpus}
  chmod 700 "$dir" # munged insists on a key that others cannot read
  head -c 1024 /dev/urandom >"$dir/munge.key"
  chmod 600 "$dir/munge.key"
  for n in {0..7}; do ln -s /dev/null "$dir/gpus/nvidia$n"; done
  echo "AutoDetect=off" >"$dir/gres.conf"
  echo "Name=gpu File=$dir/gpus/nvidia[0-7]" >>"$dir/gres.conf"
  # no cgroups; Slurm before 23.11 has no `disabled`, and does not use v1 with the plugins below
  local plugin=cgroup/v1 version
  version=$(slurmctld -V)
  if [[ ${version##* } != @(1?|20|21|22|23.02).* ]]; then plugin=disabled; fi
  echo "CgroupPlugin=$plugin" >"$dir/cgroup.conf"
  cat >"$dir/slurm.conf" <<END
ClusterName=one-machine
SlurmctldHost=$(hostname -s)($controller)
SlurmctldPort=$port
SlurmUser=$me
SlurmdUser=$me
# the daemons trust everyone who has the key; it is in this folder and nowhere else
AuthType=auth/munge
# cred_expire: how long a requeued job waits before it starts again (120 s by default)
AuthInfo=socket=$sockets/munge,cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$sockets/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=100000
# the nodes below may declare more CPUs and memory than the machine has: several jobs share it
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
KillWait=5
MailProg=/bin/true
PartitionName=all Nodes=$names Default=YES MaxTime=UNLIMITED
END
  for ((n = 1; n <= nodes; n++)); do
    local address=127.0.0.1 host
    host=$(hostname -s)
    if [[ $namespaces ]]; then address=10.77.0.$n host=node$n; fi
    echo "NodeName=node$n NodeAddr=$address NodeHostname=$host Port=$((port + n))" \
      "CPUs=64 RealMemory=256000 Gres=gpu:8" >>"$dir/slurm.conf"
  done
  echo "$extra_conf" >>"$dir/slurm.conf"
}

wait_for() { # WHAT COMMAND...: until the command succeeds, at most 20 s
  local what=$1 try
  shift
  for ((try = 0; try < 100; try++)); do
    if "$@" >/dev/null 2>&1; then return; fi
    sleep 0.2
  done
  tail -n 5 "$folder"/log/*.log >&2
  fail "$what does not start; the ends of the logs are above, all of them in $folder/log"
}

all_idle() { [[ $(timeout 5 sinfo -h -o %t) == idle ]]; }

up() {
  local missing=() tool sockets
  for tool in slurmctld slurmd sbatch munged; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  if ((${#missing[@]})); then
    fail "no ${missing[*]} here; on Debian and Ubuntu: sudo apt install slurm-wlm munge"
  fi
  if [[ -e $folder ]]; then fail "$folder is there already; first: make cluster-down"; fi
  mkdir -p "$folder"
  folder=$(realpath "$folder")
  export SLURM_CONF=$folder/slurm.conf
  # the path of a socket may have 107 characters at most, and this folder's may be longer
  sockets=$(mktemp -d /tmp/slurm-XXXXXX)
  ln -s "$sockets" "$folder/sockets"
  write_configuration "$folder" "$sockets"
  munged --key-file="$folder/munge.key" --socket="$sockets/munge" \
    --pid-file="$folder/munged.pid" --seed-file="$folder/munge.seed" \
    --log-file="$folder/log/munged.log" --force 2>/dev/null || fail "munged: see $folder/log"
  if [[ $namespaces ]]; then
    echo "$namespaces" >"$folder/namespaces"
    "$namespaces" up "$nodes"
  fi
  slurmctld -c
  wait_for slurmctld timeout 5 scontrol ping
  for ((n = 1; n <= nodes; n++)); do
    if [[ $namespaces ]]; then
      "$namespaces" exec "node$n" slurmd -N "node$n"
    else
      slurmd -N "node$n"
    fi
  done
  wait_for "a node" all_idle
  echo "A Slurm cluster of $nodes nodes with 8 pretend GPUs each runs on this machine."
  echo "Now: make submit-04 NODES=2, make status, make logs-04; at the end make cluster-down"
}

down() {
  if [[ ! -e $folder/slurm.conf ]]; then fail "no cluster in $folder"; fi
  export SLURM_CONF=$folder/slurm.conf
  # end its jobs first: their processes would outlive the daemons
  timeout 5 scancel --user="$me" 2>/dev/null || true
  for _ in {1..50}; do
    if [[ -z $(timeout 5 squeue -h 2>/dev/null) ]]; then break; fi
    sleep 0.2
  done
  local pids=() file
  for file in "$folder"/*.pid; do
    if [[ -s $file ]]; then pids+=("$(<"$file")"); fi
  done
  kill "${pids[@]}" 2>/dev/null || true
  for _ in {1..25}; do
    kill -0 "${pids[@]}" 2>/dev/null || break
    sleep 0.2
  done
  kill -KILL "${pids[@]}" 2>/dev/null || true
  if [[ -e $folder/namespaces ]]; then "$(<"$folder/namespaces")" down; fi
  rm -rf "$(realpath "$folder/sockets")" "$folder"
  echo "The cluster is stopped."
}

case ${1-} in
up | down) "$1" ;;
*) fail "usage: slurm/cluster.sh up|down" ;;
esac
