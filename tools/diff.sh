#!/bin/sh
# What one stage changes in another: diff.sh OLD NEW [anything, for the whole new file]
# git's diff works on any two files; where git is missing, plain diff does.
context=${3:+99999}
if command -v git >/dev/null; then
  git -c core.attributesFile="$PWD/.gitattributes" \
    diff --no-index --no-prefix --histogram -U"${context:-3}" "$1" "$2"
else
  diff -u -F '^ *\(class\|def\) ' --color=auto -U "${context:-3}" "$1" "$2"
fi
case $? in
  0 | 1 | 141) ;; # 1 says that the files differ, 141 that the reader has read enough
  *) exit 2 ;;
esac
