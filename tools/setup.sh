#!/bin/sh
# Create the virtual environment of `make setup`: setup.sh PYTHON FOLDER
set -u
python=$1 venv=$2

fail() {
  echo "make setup: $*" >&2
  exit 2
}

command -v "$python" >/dev/null ||
  fail "no $python here; install Python 3.11 or newer, or pass one: make setup PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$python is $("$python" --version 2>&1), too old; pass a newer one: make setup PYTHON=python3.12"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
  echo "make setup: the tests run on Python 3.11.2 (Debian 12's) and 3.11.7, not on this $("$python" --version 2>&1)"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
  fail "$python has no venv module; on Debian and Ubuntu: apt install python3-venv"

echo "make setup: installing into $venv, once (PyTorch is large: a few minutes)"
[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv" || fail "cannot create $venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r requirements.txt ||
  fail "pip could not install requirements.txt (its message is above); is there internet?"
touch "$venv/.installed"
