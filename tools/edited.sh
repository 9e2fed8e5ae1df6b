#!/bin/sh
# Copy a script with one change: edited.sh SCRIPT EDIT, where EDIT is an expression for sed.
# Prints the path of the copy, runs/edited/CHECKSUM/STAGE/edited.py, two folders below a link to common/.
# The checksum is of what it contains: commands that run at the same time do not overwrite each other's.
set -eu
mkdir -p runs/edited
aside=$(mktemp runs/edited/XXXXXX)
trap 'rm -f "$aside"' EXIT
sed "$2" "$1" >"$aside"
if cmp -s "$1" "$aside"; then
    echo "edited.sh: '$2' changes nothing in $1" >&2
    exit 2
fi
diff "$1" "$aside" >&2 || true
copy=runs/edited/$(cksum <"$aside" | tr ' ' -)
stage=$copy/$(basename "$(dirname "$1")")
mkdir -p "$stage"
[ -L "$copy/common" ] || ln -s ../../../common "$copy/common" || true
mv "$aside" "$stage/edited.py"
echo "$stage/edited.py"
