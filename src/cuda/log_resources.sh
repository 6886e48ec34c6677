#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the CUDA compiler given as arguments and keeps what ptxas says of each kernel (registers, spills)
# beside the object, as OBJECT.ptxas; the rest of its messages go on to the terminal.
object= previous=
for argument in "$@"; do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
"$@" 2> "$object.ptxas"
status=$?
grep -v -e 'ptxas info' -e 'bytes stack frame' -e '^$' "$object.ptxas" >&2
exit $status
