#!/usr/bin/env bash
# Nodes for the tests, each with a network and a host name of its own, like real machines. Needs root.
#
#     tests/namespaces.sh up N               slurm-node1 ... slurm-nodeN on one bridge
#     tests/namespaces.sh exec node1 ...     run a command as if on node1
#     tests/namespaces.sh down               end all processes in them, remove them
#
# Each node has two interfaces: the name node1 resolves to eth0, and node1i to ib0, like InfiniBand
# on some clusters. localhost is the node itself, so a job that takes it for the first node's address
# hangs here as it would on a cluster.
set -euo pipefail

namespaces() { ip netns list | awk '/^slurm-node/ { print $1 }'; }

connect() { # NAMESPACE INTERFACE ADDRESS
  local outside=$2-${1#slurm-}
  ip link add "$outside" type veth peer name "$2" netns "$1"
  ip link set "$outside" master slurm0 up
  ip -n "$1" address add "$3" dev "$2"
  ip -n "$1" link set "$2" up
}

up() {
  if [ -e /sys/class/net/slurm0 ]; then down; fi # of a run that was killed
  ip link add slurm0 type bridge
  ip address add 10.77.0.254/24 dev slurm0
  ip link set slurm0 up
  local n hosts
  hosts="127.0.0.1 localhost"$'\n'"10.77.0.254 $(hostname -s)"
  for ((n = 1; n <= $1; n++)); do
    hosts+=$'\n'"10.77.0.$n node$n"$'\n'"10.78.0.$n node${n}i"
  done
  for ((n = 1; n <= $1; n++)); do
    ip netns add "slurm-node$n"
    ip -n "slurm-node$n" link set lo up
    connect "slurm-node$n" eth0 "10.77.0.$n/24"
    connect "slurm-node$n" ib0 "10.78.0.$n/24"
    # `ip netns exec` mounts these over /etc/hosts and /etc/nsswitch.conf
    mkdir -p "/etc/netns/slurm-node$n"
    echo "$hosts" >"/etc/netns/slurm-node$n/hosts"
    sed 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf >"/etc/netns/slurm-node$n/nsswitch.conf"
  done
}

down() {
  local name
  for name in $(namespaces); do
    ip netns pids "$name" | xargs -r kill -KILL
    ip netns delete "$name"
    rm -r "/etc/netns/$name"
    # a dying process may keep the namespace, and its interfaces' names, for a while
    ip link delete "eth0-${name#slurm-}" 2>/dev/null || true
    ip link delete "ib0-${name#slurm-}" 2>/dev/null || true
  done
  ip link delete slurm0
}

case $1 in
up | down) "$@" ;;
exec)
  # shellcheck disable=SC2016 # for the inner shell
  exec ip netns exec "slurm-$2" unshare --uts \
    sh -c 'hostname "$1"; shift; exec "$@"' -- "${@:2}"
  ;;
esac
