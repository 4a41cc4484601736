#!/bin/sh
# gpu_check.sh [--dry-run] OUT: what only a machine with a GPU can show, within eight minutes and without a network.
#
# Builds the package from this checkout in a temporary folder, and runs tests/cuda and tests/device, the same under
# torch's CUDA sanitizer, and benchmarks/device.py: each within its time, and whatever became of those before. Leaves in
# OUT: tests.xml, bench.json, summary.txt, and a log of each phase. Exits with 1 when something failed.
#
# Where torch has no CUDA the device is the simulated one, and what needs CUDA is left out. --dry-run only says what
# would be run.
#
#   PYTHON=...  a Python (python3) with torch, nanobind, scikit-build-core, pip, pytest and rich, and beside it CMake and a
#               C++20 compiler. pytest-xdist, pytest-timeout and hypothesis are used where they are there.
set -u

usage() {
  echo "usage: gpu_check.sh [--dry-run] OUT" >&2
  exit 2
}
dry=
if [ "${1-}" = --dry-run ]; then
  dry=yes
  shift
fi
[ $# = 1 ] || usage
case $1 in -*) usage ;; esac
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
repository=$(cd "$(dirname "$0")/.." && pwd)
python=$(command -v "${PYTHON:-python3}") || {
  echo "gpu_check.sh: there is no ${PYTHON:-python3}; name a Python with torch: PYTHON=..." >&2
  exit 2
}
case $python in /*) ;; *) python=$PWD/$python ;; esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
if [ -z "$dry" ]; then rm -f "$out"/*.xml "$out"/*.json "$out"/*.log; fi
: >"$out/summary.txt"
failures=0

say() {
  echo "$*"
  echo "$*" >>"$out/summary.txt"
}

# phase NAME SECONDS COMMAND...: run it, and sum it up in a line, with the end of what it printed where it failed.
phase() {
  name=$1
  limit=$2
  shift 2
  if [ -n "$dry" ]; then
    say "$name, at most $limit s: $*"
    return
  fi
  begin=$(date +%s)
  timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1
  code=$?
  took=$(($(date +%s) - begin))
  case $code in
    0) verdict=ok ;;
    124 | 137) verdict="FAILED: stopped after its $limit s (exit code $code)" ;;
    *) verdict="FAILED with exit code $code" ;;
  esac
  say "$name: $verdict, $took s"
  if [ $code = 0 ]; then return; fi
  failures=$((failures + 1))
  tail -n 30 "$out/$name.log" | sed 's/^/    /' | tee -a "$out/summary.txt"
}

facts=$("$python" "$repository/tools/gpu_check.py" facts) || {
  say "FAILED: $python cannot import torch; choose another: PYTHON=..."
  exit 1
}
say "$facts"
device=cuda
patience=200
case $facts in
  *"no CUDA"*)
    device=sim
    patience=1200 # nobody pays for this machine by the minute
    say "no CUDA in this torch, or no GPU: the device is the simulated one, and nothing is shown about a real one"
    ;;
esac

# The package that is built hides any other: where it is installed as an editable one, that stands in front of all paths.
mkdir "$work/site"
cat >"$work/site/sitecustomize.py" <<'END'
import sys

sys.meta_path[:] = [f for f in sys.meta_path if "cudafuture" not in getattr(f, "known_source_files", ())]
END
export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
phase build $patience "$python" -m pip --disable-pip-version-check install --no-cache-dir --no-index --no-build-isolation \
  --no-deps --target "$work/site" --config-settings "build-dir=$work/build" "$repository"

export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
cd "$work" || exit 1
phase installed 20 "$python" "$repository/tools/gpu_check.py" installed "$work/site"

pytest="-m pytest --rootdir $repository -c $repository/pyproject.toml -p no:cacheprovider"
options="$repository/tools/gpu_check.py options"
# shellcheck disable=SC2046,SC2086 # words, every one
phase tests 130 "$python" $pytest $("$python" $options 4) -k "$device" --junitxml "$out/tests.xml" \
  "$repository/tests/cuda" "$repository/tests/device"
if [ "$device" = cuda ]; then
  # shellcheck disable=SC2046,SC2086
  phase sanitizer 40 env TORCH_CUDA_SANITIZER=1 "$python" $pytest $("$python" $options 0) \
    --junitxml "$out/sanitizer.xml" "$repository/tests/cuda/test_sanitizer.py"
fi
phase benchmarks 80 env COLUMNS=150 "$python" "$repository/benchmarks/device.py" --check --json "$out/bench.json"

if [ -n "$dry" ]; then exit 0; fi
grep -v ^measuring "$out/benchmarks.log" >>"$out/summary.txt"
say "phases that failed: $failures"
[ $failures = 0 ]
