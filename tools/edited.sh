#!/bin/sh
# Copy a script with one change: edited.sh SCRIPT EDIT, where EDIT is an expression for sed.
# Prints the path of the copy. It is in the script's folder, so that it finds common/.
set -eu
copy=$(dirname "$1")/edited.py
sed "$2" "$1" >"$copy"
if cmp -s "$1" "$copy"; then
    rm "$copy"
    echo "edited.sh: '$2' changes nothing in $1" >&2
    exit 2
fi
diff "$1" "$copy" >&2 || true
echo "$copy"
