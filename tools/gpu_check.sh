#!/bin/sh
# gpu_check.sh [--dry-run] tests|figures OUT [NAME...]: one half of the checks that need a GPU, in at most four minutes.
#
#   tests     tests/cuda and tests/device, the same under torch's CUDA sanitizer, cudafuture bench device
#   figures   each sync edge cut on the hardware, the stress test, cudafuture bench gpu
#   NAME      run only these: tests, by their ids from the root of the checkout; or sections of cudafuture bench gpu
#
# The package comes from the wheel in WHEELS, which `make gpu-kit` builds. Without a wheel, or with one that does not fit
# this Python, torch or checkout, it is built here. Other wheels in WHEELS are installed beside it. No network is used.
#
# Each phase has a time limit, and all of them together have LIMIT. Results are written to OUT when they arrive, so a cut
# at any second leaves those so far. OUT has at most eight files: summary.txt, machine.txt with facts about the machine,
# results.jsonl with a line for each test that has ended, logs, and the JSON of the benchmark. The exit status is 1 when
# a phase failed. Where torch has no CUDA, `tests` runs on the simulated accelerator.
#
#   PYTHON=...   a Python (python3) with torch, pip, pytest and rich. pytest-xdist, pytest-timeout and hypothesis are used
#                where they are installed. A build needs nanobind, scikit-build-core, CMake and a C++20 compiler
#   WHEELS=...   a folder of wheels (.whl in the checkout)
#   LIMIT=...    the seconds that all phases may take (240); the limits of the phases are in proportion
#   JOBS=...     how many processes run the tests (4)
set -u

usage() {
  echo "usage: gpu_check.sh [--dry-run] tests|figures OUT [NAME...]" >&2
  exit 2
}
dry=
if [ "${1-}" = --dry-run ]; then
  dry=yes
  shift
fi
[ $# -ge 2 ] || usage
part=$1
case $part in tests | figures) ;; *) usage ;; esac
case $2 in -*) usage ;; esac
mkdir -p "$2" || exit 2
out=$(cd "$2" && pwd)
shift 2
repository=$(cd "$(dirname "$0")/.." && pwd)
python=$(command -v "${PYTHON:-python3}") || {
  echo "gpu_check.sh: there is no ${PYTHON:-python3}; name a Python with torch: PYTHON=..." >&2
  exit 2
}
case $python in /*) ;; *) python=$PWD/$python ;; esac
wheels=$(cd "${WHEELS:-$repository/.whl}" 2>/dev/null && pwd) || wheels=
started=$(date +%s)
work=$(mktemp -d)
name=preparation
child=
failures=0

say() {
  echo "$*"
  echo "$*" >>"$out/summary.txt"
}

stopped() {
  trap '' HUP INT TERM
  say "STOPPED by a signal after $(($(date +%s) - started)) s, in phase: $name"
  if [ -n "$child" ]; then kill "$child" && wait "$child"; fi
  exit 130
}
trap 'rm -rf "$work"' EXIT
trap stopped HUP INT TERM
(cd "$out" && rm -f machine.txt results.jsonl ./*.json ./*.log)
: >"$out/summary.txt"
say "gpu_check.sh $part"

# phase NAME SECONDS COMMAND...: run a command and report its verdict, and the end of its output when it failed.
phase() {
  name=$1
  limit=$(($2 * whole / 240))
  shift 2
  if [ -n "$dry" ]; then
    say "$name, at most $limit s: $*"
    return
  fi
  case $name in
    packages | wheel | build | installed) log=$out/setup.log ;; # one file, because OUT may have eight
    *) log=$out/$name.log ;;
  esac
  begin=$(date +%s)
  left=$((started + whole - 6 - begin)) # a process that ignores SIGTERM has 5 s more
  if [ $limit -gt $left ]; then limit=$left; fi
  if [ $limit -lt 1 ]; then
    failures=$((failures + 1))
    say "$name: NOT RUN, the $whole s of this part are over"
    return 1
  fi
  say "$name: begins, at most $limit s"
  lines=$(wc -l <"$out/summary.txt")
  timeout -k 5 "$limit" "$@" >>"$log" 2>&1 & # in the background, so that a signal interrupts the wait
  child=$!
  wait $child
  code=$?
  child=
  tail -n +$((lines + 1)) "$out/summary.txt" # the lines that the phase itself has added
  case $code in
    0) verdict=ok ;;
    124 | 137) verdict="FAILED: stopped after its $limit s (exit code $code)" ;;
    *) verdict="FAILED with exit code $code" ;;
  esac
  say "$name: $verdict, $(($(date +%s) - begin)) s"
  if [ $code = 0 ]; then return; fi
  failures=$((failures + 1))
  tail -n 20 "$log" | sed 's/^/    /' | tee -a "$out/summary.txt"
  return 1
}

facts=$("$python" "$repository/tools/gpu_check.py" facts) || {
  say "FAILED: $python cannot import torch; choose another: PYTHON=..."
  exit 1
}
say "$facts"
device=cuda
check=--check
whole=${LIMIT:-240}
case $facts in
  *"no CUDA"*)
    if [ "$part" = figures ]; then
      say "FAILED: figures need CUDA, and this torch has none, or there is no GPU"
      exit 1
    fi
    device=sim
    whole=${LIMIT:-1800}
    say "no CUDA in this torch, or no GPU: the device is the simulated one, and nothing is shown about a real one"
    ;;
  *fakecuda*)
    check=
    say "the devices are fake ones: figures and their limits mean nothing"
    ;;
esac

# The package that is checked hides any other: an editable one stands in front of all paths.
mkdir "$work/site" "$work/packages"
cat >"$work/site/sitecustomize.py" <<'END'
import sys

sys.meta_path[:] = [f for f in sys.meta_path if "cudafuture" not in getattr(f, "known_source_files", ())]
END
export PYTHONPATH="$work/site:$work/packages${PYTHONPATH:+:$PYTHONPATH}:$repository/tools"
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_INDEX=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(env -u OMP_NUM_THREADS nproc)}"
cd "$work" || exit 1

# install NAME SECONDS FOLDER ARGUMENT...: a phase that installs packages into a folder of this check.
install() {
  called=$1
  seconds=$2
  target=$work/$3
  shift 3
  phase "$called" "$seconds" "$python" -m pip install --no-deps --no-compile --upgrade --target "$target" "$@"
}

# packages: install the wheels of other packages.
packages() {
  for wheel in "$wheels"/*.whl; do
    case ${wheel##*/} in cudafuture-* | "*.whl") ;; *) set -- "$@" "$wheel" ;; esac
  done
  if [ $# -gt 0 ]; then install packages 20 packages "$@"; fi
}

installed() {
  phase installed 30 "$python" "$repository/tools/gpu_check.py" installed "$work/site"
}

# package: install the package from its wheel; build it where that fails, or where there is no wheel.
package() {
  for wheel in "$wheels"/cudafuture-*.whl; do
    if [ -f "$wheel" ] && install wheel 20 site "$wheel" && installed; then return; fi
  done
  install build 150 site --no-build-isolation --config-settings "build-dir=$work/build" "$repository"
  installed
}

# tests NAME SECONDS PROCESSES OPTION-OR-FILE...: a phase that runs tests; tools/gpu_results.py writes their results.
tests() {
  called=$1
  seconds=$2
  options=$("$python" "$repository/tools/gpu_check.py" options "$3" $((60 * whole / 240)))
  shift 3
  # Threads of OpenMP that wait for each other in several processes spin.
  # shellcheck disable=SC2086 # words, every one
  phase "$called" "$seconds" env OMP_NUM_THREADS=1 "$python" -m pytest --rootdir "$repository" \
    -c "$repository/pyproject.toml" -p no:cacheprovider $options --results "$out" --phase "$called" "$@"
}

# benchmark NAME SECONDS ARGUMENT...: a phase that runs `cudafuture bench NAME`, and adds its table to the summary.
benchmark() {
  called=$1
  seconds=$2
  shift 2
  phase "$called" "$seconds" env COLUMNS=150 "$python" -m cudafuture bench "$called" --json "$out/$called.json" "$@"
  if [ -f "$out/$called.log" ]; then sed '/^measuring/d; s/^/    /' "$out/$called.log" | tee -a "$out/summary.txt"; fi
}

if phase machine 15 "$python" "$repository/tools/gpu_check.py" machine && [ -z "$dry" ]; then
  mv "$out/machine.log" "$out/machine.txt"
fi
packages
package

cases=$repository/tests
case $part in
  tests)
    if [ $# -gt 0 ]; then
      for test; do
        shift
        set -- "$@" "$repository/$test"
      done
      tests tests 200 "${JOBS:-4}" -k "$device" "$@"
    else
      tests tests 150 "${JOBS:-4}" -k "$device" --ignore "$cases/cuda/test_sanitizer.py" \
        --ignore "$cases/cuda/test_edges.py" --ignore "$cases/cuda/test_stress.py" "$cases/cuda" "$cases/device"
      if [ $device = cuda ]; then
        export TORCH_CUDA_SANITIZER=1
        tests sanitizer 40 0 "$cases/cuda/test_sanitizer.py"
        unset TORCH_CUDA_SANITIZER
      fi
      benchmark device 60 $check
    fi
    ;;
  figures)
    if [ $# -gt 0 ]; then
      benchmark gpu 200 $check --only "$@"
    else
      tests edges 50 0 "$cases/cuda/test_edges.py"
      tests stress 75 0 "$cases/cuda/test_stress.py"
      benchmark gpu 150 $check
    fi
    ;;
esac
name=summary

if [ -n "$dry" ]; then exit 0; fi
say "phases that failed: $failures"
[ $failures = 0 ]
