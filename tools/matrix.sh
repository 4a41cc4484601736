#!/bin/sh
# matrix.sh [--dry-run] [--torch LIST] [--python LIST] [FOLDER]: show that the supported versions work.
#
# Each combination of a torch and a Python gets a virtual environment in FOLDER (build/matrix). The script installs
# torch from PyPI, builds the project against it, imports it, and runs a short form of the tests. Then it prints a table
# of the combinations: passed, failed or skipped, and why. The exit status is 1 where a combination failed.
#
#   --torch "2.12 2.15"    these versions of torch, on the Pythons of --python, or each on its own Python
#   --python "3.10 3.13"   these versions of Python, with the torch of --torch, or with the reference torch
#   --dry-run              print the commands and run none of them
#   KEEP=1                 keep the environments (5 GB each); without it one exists at a time
#   JOBS=...               the number of processes that pytest uses (auto)
#
# Without --torch and --python: every torch on its own Python, and every Python with the reference torch. The Python of a
# torch is the reference Python, but for the torch of tools/gpu_kit.sh the Python of that kit. A Python that is not on this
# machine is skipped. The log of each combination stays in FOLDER.
set -u

# The newest patch release of each supported minor version of torch. README.md, pyproject.toml and cmake/torch.cmake
# name the same range; tests/layout/test_versions.py compares them.
TORCH="2.11.0 2.12.1 2.13.0 2.14.1 2.15.0"
PYTHON="3.10 3.11 3.12 3.13"
REFERENCE_TORCH=2.13
REFERENCE_PYTHON=3.11
GPU_TORCH=2.11
GPU_PYTHON=3.12

# The short form of the tests takes three minutes on two idle cores; the time limits of the steps only end a hang.
LIBRARY="future collectives rpc store prefetch package examples/test_offload_activations.py" # with one process
COLLECTIVES="test_collectives.py test_process_group.py test_objects.py test_point_to_point.py test_ddp_hook.py"
RPC="test_calls.py test_values.py test_torch_parity.py" # rpc_ext depends most on torch's internals
CUDA="test_wait.py test_then.py test_events.py"

usage() {
  sed -n '2,/^set -u/s/^# \{0,1\}//p' "$0"
}

refuse() {
  echo "matrix.sh: $1" >&2
  exit 2
}

dry=
torches=
pythons=
folder=
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage && exit 0 ;;
    --dry-run) dry=yes ;;
    --torch | --python)
      [ -n "${2-}" ] || refuse "$1 needs a list of versions, such as $1 \"$REFERENCE_PYTHON\""
      if [ "$1" = --torch ]; then torches=$2; else pythons=$2; fi
      shift
      ;;
    -*) refuse "there is no option $1; see matrix.sh --help" ;;
    *)
      [ -z "$folder" ] || refuse "it takes one folder, not both $folder and $1"
      folder=$1
      ;;
  esac
  shift
done

# pinned MINOR: print the release of torch that stands for a minor version.
pinned() {
  for release in $TORCH; do
    case $release in "$1" | "$1".*) echo "$release" && return ;; esac
  done
  return 1
}

# home TORCH: print the Python on which a torch is tested when no other is chosen.
home() {
  case $1 in
    "$GPU_TORCH" | "$GPU_TORCH".*) echo $GPU_PYTHON ;;
    *) echo $REFERENCE_PYTHON ;;
  esac
}

# pairs: print the chosen combinations, one `TORCH PYTHON` a line.
pairs() {
  if [ -z "$torches$pythons" ]; then
    for torch in $TORCH; do echo "$torch $(home "$torch")"; done
    for python in $PYTHON; do echo "$(pinned $REFERENCE_TORCH) $python"; done
    return
  fi
  for torch in ${torches:-$REFERENCE_TORCH}; do
    for python in ${pythons:-$(home "$torch")}; do echo "$(pinned "$torch") $python"; done
  done
}

for torch in $torches; do pinned "$torch" >/dev/null || refuse "torch $torch is none of: $TORCH"; done
for python in $pythons; do
  case " $PYTHON " in *" $python "*) ;; *) refuse "Python $python is none of: $PYTHON" ;; esac
done
repository=$(cd "$(dirname "$0")/.." && pwd)
folder=${folder:-$repository/build/matrix}
if [ -z "$dry" ]; then
  mkdir -p "$folder" || exit 2
  folder=$(cd "$folder" && pwd)
fi
# Variables that a caller's own run of the tests sets would reach these: `make soak` asks for the long form.
unset CUDAFUTURE_SOAK PYTHONPATH PYTHONHOME VIRTUAL_ENV
. "$repository/tools/pythons.sh"

# step NAME SECONDS COMMAND...: run one step of a combination into its log; set `reason` where the step fails.
step() {
  name=$1
  limit=$2
  shift 2
  if [ -n "$dry" ]; then
    echo "  $name, at most $limit s: $*"
    return
  fi
  echo "== $name: $*" >>"$log"
  timeout -k 10 "$limit" "$@" >>"$log" 2>&1
  code=$?
  said=$(grep -v '^[[:space:]]*$' "$log" | tail -n 1)
  case $code in
    0) return 0 ;;
    124 | 137) reason="$name was stopped after its $limit s (exit status $code): $said" ;;
    *) reason="$name: $said" ;;
  esac
  return 1
}

# tests NAME SECONDS COMMAND...: a step whose result is counted; the other tests run even where one has failed.
tests() {
  if step "$@"; then
    if [ -z "$dry" ]; then counted="$counted${counted:+; }$1: $said"; fi
  else
    failures="$failures${failures:+; }$reason"
  fi
}

# below FOLDER NAME...: print the paths of test files or folders.
below() {
  parent=$repository/$1
  shift
  for name; do echo "$parent/$name"; done
}

# cuda_tests PYTHON PYTEST...: run device tests on torch's CUDA code, with fake devices.
cuda_tests() {
  # shellcheck disable=SC2046,SC2086 # words, every one
  tests cuda 600 "$1" -m cudafuture.testing.fakecuda -- "$@" -k cuda $(below tests/device $CUDA)
}

# combination TORCH INTERPRETER: build and test in an environment; set `reason`, and return 1 where that fails.
combination() {
  python=$environment/bin/python
  PATH=$environment/bin:$before # cmake and ninja may be in there
  step torch 900 "$repository/tools/cuda_torch.sh" "$2" "$environment" "$1" || return 1
  step requirements 600 "$python" "$repository/tools/environment.py" build test || return 1
  step build 1200 "$python" -m pip install --no-build-isolation --no-deps --force-reinstall \
    --config-settings "build-dir=$work/build" "$repository" || return 1
  step import 120 "$python" "$repository/tools/gpu_check.py" installed "$environment" || return 1
  short_tests
  reason=${failures:-$counted}
  [ -z "$failures" ]
}

# short_tests: run the short form of the tests in the environment; set `failures` and `counted`.
short_tests() {
  failures=
  counted=
  pytest="-m pytest -q -n ${JOBS:-auto} --maxprocesses 8 --max-worker-restart 0 --dist loadgroup -p no:cacheprovider"
  pytest="$pytest --rootdir $repository -c $repository/pyproject.toml"
  quick="not slow and not soak"
  # shellcheck disable=SC2046,SC2086 # words, every one
  {
    tests library 600 "$python" $pytest -m "$quick and not world" $(below tests $LIBRARY)
    tests device 600 "$python" $pytest -m "$quick" -k "not cuda" "$repository/tests/device"
    tests collectives 600 "$python" $pytest $(below tests/collectives $COLLECTIVES)
    tests rpc 600 "$python" $pytest $(below tests/rpc $RPC)
    cuda_tests "$python" $pytest
  }
}

# discard: delete the environment and the build of a combination; its log stays.
discard() {
  if [ -n "${work-}" ] && [ "${KEEP-}" != 1 ] && [ -z "$dry" ]; then rm -rf "$work"; fi
}
trap discard EXIT
trap 'exit 130' INT TERM

# show TORCH PYTHON: run one combination and append its row to the table.
show() {
  work=$folder/torch$1-python$2
  environment=$work/environment
  log=$work.log
  reason=
  PATH=$before
  echo "torch $1, Python $2"
  if ! found=$(interpreter "$2"); then
    verdict=skipped
    reason="there is no python$2 with venv, ensurepip and Python.h on the PATH or in pyenv"
  else
    if [ -z "$dry" ]; then
      mkdir -p "$work/run"
      : >"$log"
      cd "$work/run" || exit 2 # not the checkout, whose cudafuture/ would hide the package that was built
    fi
    if combination "$1" "$found"; then
      verdict=passed
    else
      verdict=failed
      failed=1
      reason="$reason (see $log)"
    fi
    cd "$repository" || exit 2
    discard
  fi
  if [ -n "$dry" ]; then
    if [ $verdict = skipped ]; then echo "  skipped: $reason"; fi
    return
  fi
  echo "  $verdict: $reason"
  table="$table$(printf '%-8s %-7s %-8s %s' "$1" "$2" "$verdict" "$reason")
"
}

table=
failed=0
before=$PATH
chosen=$(pairs | awk '!seen[$0]++')
while read -r torch python_version <&3; do
  show "$torch" "$python_version"
done 3<<END
$chosen
END
if [ -z "$dry" ]; then printf '\n%-8s %-7s %-8s %s\n%s' torch Python result "tests, or the reason" "$table"; fi
exit $failed
