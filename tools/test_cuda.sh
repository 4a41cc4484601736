#!/bin/sh
# test_cuda.sh PYTHON: run the tests of CUDA's code paths on fakecuda, each set to its end, and sum them up. PYTHON is one
# that can import a CUDA build of torch and this checkout's cudafuture; tools/cuda_torch.sh makes its environment.
#
#   JOBS=...            how many processes pytest uses (auto)
#   CUDAFUTURE_SOAK=1   20 seeds of the jitter schedule instead of one, and the full counts of all tests
set -u
python=$1
cd "$(dirname "$0")/.." || exit 2
failed=

# suite NAME OPTIONS-OF-FAKECUDA -- ARGUMENTS-OF-PYTEST
suite() {
  name=$1
  shift
  options=
  while [ "$1" != -- ]; do
    options="$options $1"
    shift
  done
  shift
  echo "== $name"
  # shellcheck disable=SC2086 # options are words
  "$python" -m cudafuture.testing.fakecuda $options -- \
    "$python" -m pytest -q -n "${JOBS:-auto}" --maxprocesses 8 --max-worker-restart 0 --dist loadgroup -p no:cacheprovider --timeout 600 "$@" ||
    failed="$failed '$name'"
}

# The third device is one that no test of the device suite uses: a context there fails the test.
for schedule in lazy eager; do
  suite "device suite, $schedule" --schedule $schedule --devices 3 -- tests/device -k cuda
done
for seed in $(seq "$([ "${CUDAFUTURE_SOAK-0}" = 1 ] && echo 20 || echo 1)"); do
  suite "device suite, jitter, seed $seed" --schedule jitter --seed "$seed" --devices 3 -- tests/device -k cuda
done
# Not lazy: each step of a collective that no rank waits for would take its 50 ms.
suite "CUDA suite" --schedule jitter --devices 4 -- tests/cuda
if [ "${CUDAFUTURE_SOAK-0}" = 1 ]; then
  CUDAFUTURE_TEST_BACKEND=cudafuture suite "CUDA suite over the backend cudafuture" --schedule jitter --devices 4 -- tests/cuda
fi
suite "races and missing sync edges" --schedule lazy --devices 4 --races -- tests/fakecuda/test_races.py \
  tests/fakecuda/test_mutation.py
suite "fakecuda itself" --schedule jitter --devices 4 --races -- tests/fakecuda \
  --ignore tests/fakecuda/test_races.py --ignore tests/fakecuda/test_mutation.py
TORCH_CUDA_SANITIZER=1 suite "torch's sanitizer" --devices 2 -- tests/cuda/test_sanitizer.py

if [ -n "$failed" ]; then
  echo "failed:$failed" >&2
  exit 1
fi
