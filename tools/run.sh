#!/bin/sh
# Train a stage on this machine: run.sh PYTHON SCRIPT [FLAG...]. In the environment:
# NPROC  number of processes; by default one per GPU, or two without a GPU
# EDIT   an expression for sed: train with this change to the script, and print it
set -eu
python=$1 script=$2
shift 2

number_of_gpus() {
  # CUDA ignores what follows an entry that is no GPU (-1, NoDevFiles)
  echo "${CUDA_VISIBLE_DEVICES-$(nvidia-smi -L 2>/dev/null | grep GPU)}" | tr , '\n' |
    sed '/^ *-/,$d; /NoDevFiles/,$d' | grep -c . || true
}

# Print the path of a copy with the change: runs/edited/CHECKSUM/STAGE/edited.py, two folders below
# a link to common/. The checksum is of its text: commands at the same time have copies of their own.
edited() {
  mkdir -p runs/edited
  aside=$(mktemp runs/edited/XXXXXX)
  trap 'rm -f "$aside"' EXIT
  sed "$EDIT" "$script" >"$aside"
  if cmp -s "$script" "$aside"; then
    echo "EDIT='$EDIT' changes nothing in $script" >&2
    exit 2
  fi
  diff "$script" "$aside" >&2 || true
  copy=runs/edited/$(cksum <"$aside" | tr ' ' -)
  stage=$copy/$(basename "$(dirname "$script")")
  mkdir -p "$stage"
  [ -L "$copy/common" ] || ln -s ../../../common "$copy/common" || true
  mv "$aside" "$stage/edited.py"
  echo "$stage/edited.py"
}

stage=${script%%/*}
if [ "${EDIT:-}" ]; then script=$(edited); fi
set -- "$script" "$@"
if [ "${stage#01_}" = "$stage" ]; then
  gpus=$(number_of_gpus)
  [ "$gpus" -gt 0 ] || gpus=2
  case ${NPROC=$gpus} in
  '' | 0 | -*)
    echo "NPROC=$NPROC: pass 1 or more" >&2
    exit 2
    ;;
  esac
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
  # torchrun's own store would give ranks that it restarts the addresses of processes that are gone
  [ "${PET_MAX_RESTARTS:-0}" = 0 ] || export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  # --standalone would name the run by a UUID. A time sorts, and stays the same when torchrun restarts
  # the ranks; the process id distinguishes runs that start in the same second. Without --local-addr
  # it waits forever where the host's name does not resolve.
  set -- -m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint localhost:0 \
    --local-addr 127.0.0.1 --rdzv-id "$(date +%Y%m%d-%H%M%S)-$$" --nproc-per-node "$NPROC" "$@"
fi
echo "$python $*"
exec "$python" "$@"
