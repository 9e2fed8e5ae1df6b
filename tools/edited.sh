#!/bin/sh
# Copy a script with one change: edited.sh SCRIPT EDIT, where EDIT is an expression for sed.
# Prints the path of the copy. It is in the script's folder, so that it finds common/, and is named by
# a checksum of what it contains: commands that run at the same time do not overwrite each other's.
set -eu
aside=$(dirname "$1")/edited-$$.py
trap 'rm -f "$aside"' EXIT
sed "$2" "$1" >"$aside"
if cmp -s "$1" "$aside"; then
    echo "edited.sh: '$2' changes nothing in $1" >&2
    exit 2
fi
diff "$1" "$aside" >&2 || true
copy=$(dirname "$1")/edited-$(cksum <"$aside" | tr ' ' -).py
mv "$aside" "$copy"
echo "$copy"
