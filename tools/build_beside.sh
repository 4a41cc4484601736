#!/usr/bin/env bash
# build_beside.sh PYTHON COMMAND...: run a command, and meanwhile build the C++ tests with all sanitizers at the lowest
# priority: tests of several processes wait half of their time.
set -u -m # -m: the build has a process group of its own
python=$1
shift
log=build/native.log
mkdir -p build
nice -n 19 sh -c 'set -e; tools/doctest.sh; for s in thread address; do tools/native_build.sh "$0" $s; done' "$python" \
  </dev/null >"$log" 2>&1 &
builder=$!
trap 'kill -- -"$builder" 2>/dev/null' EXIT
"$@" || exit
if ! wait "$builder"; then
  cat "$log"
  exit 1
fi
