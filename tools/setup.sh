#!/bin/sh
# Create the virtual environment of `make setup`: setup.sh PYTHON FOLDER [TORCH]
# TORCH: a version, or "keep": the environment sees the packages of PYTHON, and so its PyTorch
set -u
python=$1 venv=$2 torch=${3:-}
default=2.13.0 # of PyTorch; requirements.txt has the range

fail() {
  echo "make setup: $*" >&2
  exit 2
}

command -v "$python" >/dev/null ||
  fail "no $python here; install Python 3.11 or newer, or pass one: make setup PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$python is $("$python" --version 2>&1), too old; pass a newer one: make setup PYTHON=python3.12"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
  fail "$python has no venv module; on Debian and Ubuntu: apt install python3-venv"

# another clone may have installed the same into it
if [ -z "$torch" ] && cmp -s requirements.txt "$venv/.installed"; then
  touch "$venv/.installed"
  exit
fi
echo "make setup: installing into $venv, once (PyTorch is large: a few minutes)"
see=$([ "$torch" = keep ] && echo --system-site-packages)
[ -x "$venv/bin/pip" ] || "$python" -m venv ${see:+"$see"} "$venv" || fail "cannot create $venv"
if "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  torch=${torch:-keep} # pip replaces it only if it is not in the range of requirements.txt
elif [ "$torch" = keep ]; then
  fail "TORCH=keep: $venv/bin/python cannot import torch. Remove $venv and pass the python3 that can," \
    "PYTHON=/path/to/python3, or install into an environment that has PyTorch, VENV=/path/to/it"
fi
wanted=$([ "$torch" = keep ] || echo "torch==${torch:-$default}")
set -- -r requirements.txt ${wanted:+"$wanted"}
unset PIP_TARGET PIP_PREFIX PIP_ROOT # of a user, as --user may be: into another folder
"$venv/bin/python" -m pip install --no-user --quiet --disable-pip-version-check "$@" ||
  fail "pip could not install requirements.txt (its message is above); is there internet?"
# PyTorch's own, outside of the environment, would start the Python that it is installed for
[ -x "$venv/bin/torchrun" ] || {
  printf '#!/bin/sh\nexec "%s/python" -m torch.distributed.run "$@"\n' "$(cd "$venv/bin" && pwd)"
} >"$venv/bin/torchrun" && chmod +x "$venv/bin/torchrun"
cp requirements.txt "$venv/.installed"
