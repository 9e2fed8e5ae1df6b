#!/bin/sh
# Train a stage on this machine: run.sh PYTHON SCRIPT [FLAG...]. In the environment:
# NPROC  number of processes; by default one per GPU, or two without a GPU
# EDIT   an expression for sed: train with this change to the script, and print it
# FILE   what EDIT changes in place of the script: a file beside it
set -eu
python=$1 script=$2
shift 2

number_of_gpus() {
  # CUDA ignores what follows an entry that is no GPU (-1, NoDevFiles)
  echo "${CUDA_VISIBLE_DEVICES-$(nvidia-smi -L 2>/dev/null | grep GPU)}" | tr , '\n' |
    sed '/^ *-/,$d; /NoDevFiles/,$d' | grep -c . || true
}

# Print the path of a copy with the change: runs/edited/CHECKSUM/STAGE/edited.py, two folders below
# a link to common/, with links to the files beside the script. The checksum is of the changed text:
# commands at the same time have copies of their own.
edited() {
  folder=$(dirname "$script") file=${FILE:-$(basename "$script")}
  mkdir -p runs/edited
  aside=$(mktemp runs/edited/XXXXXX)
  trap 'rm -f "$aside"' EXIT
  sed "$EDIT" "$folder/$file" >"$aside"
  if cmp -s "$folder/$file" "$aside"; then
    echo "EDIT='$EDIT' changes nothing in $folder/$file" >&2
    [ "${FILE:-}" ] || echo "FILE= names another file of $folder" >&2
    exit 2
  fi
  diff "$folder/$file" "$aside" >&2 || true
  copy=runs/edited/$(cksum <"$aside" | tr ' ' -)
  stage=$copy/$(basename "$folder")
  mkdir -p "$stage"
  [ -L "$copy/common" ] || ln -s ../../../common "$copy/common" || true
  for other in "$folder"/*.py; do
    name=$(basename "$other")
    [ "$name" = "$file" ] || [ -L "$stage/$name" ] || ln -s "../../../../$other" "$stage/$name" || true
  done
  if [ "$folder/$file" != "$script" ]; then
    mv "$aside" "$stage/$file"
    aside=$(mktemp runs/edited/XXXXXX)
    cat "$script" >"$aside" # no link: it looks for the other files where it is itself
  fi
  mv "$aside" "$stage/edited.py"
  echo "$stage/edited.py"
}

stage=${script%%/*}
if [ "${EDIT:-}" ]; then
  script=$(edited)
  export EDIT="${FILE:+$FILE: }$EDIT" # for the run's config.json
fi
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
  # a user's settings for torchrun, such as those of a pod: PET_NNODES=2 would wait for another node
  for name in $(env | sed -n 's/^\(PET_[A-Z_]*\)=.*/\1/p'); do
    [ "$name" = PET_MAX_RESTARTS ] || unset "$name"
  done
  # --standalone would name the run by a UUID. A time sorts, and stays the same when torchrun restarts
  # the ranks; random digits distinguish runs that start in the same second. Without --local-addr it
  # waits forever where the host's name does not resolve.
  random=$(od -An -N4 -tx1 /dev/urandom | tr -d ' ')
  set -- -m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint localhost:0 \
    --local-addr 127.0.0.1 --rdzv-id "$(date +%Y%m%d-%H%M%S)-$random" --nproc-per-node "$NPROC" "$@"
fi
echo "$python $*"
exec "$python" "$@"
