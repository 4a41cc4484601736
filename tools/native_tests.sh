#!/bin/sh
# native_tests.sh PYTHON SANITIZER: build tests/cpp, the core, the simulated accelerator's runtime and the seals of RPC
# with `thread` or `address`, and run them. Further arguments go to each test program.
set -eu
python=$1
sanitizer=$2
shift 2
build=build/native-$sanitizer
tests=$PWD/tests/cpp

# After the first time the build configures itself again when its files change.
if [ ! -e "$build/built" ]; then
  generator=
  if command -v ninja >/dev/null; then generator="-G Ninja"; fi
  # Little optimisation: sanitizers see more of what was written, and the build takes two thirds of the time.
  cmake -S . -B "$build" $generator -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPython_EXECUTABLE="$python" \
    -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -DNDEBUG" -DCUDAFUTURE_PYTHON_MODULE=OFF -DCUDAFUTURE_NATIVE_TESTS=ON \
    -DCUDAFUTURE_SANITIZE="$sanitizer"
fi
cmake --build "$build"
touch "$build/built"

# ThreadSanitizer cannot place its shadow memory where the kernel randomises addresses too widely.
run=
if setarch "$(uname -m)" -R true 2>/dev/null; then run="setarch $(uname -m) -R"; fi

export TSAN_OPTIONS="suppressions=$tests/tsan.supp halt_on_error=0 second_deadlock_stack=1 ${TSAN_OPTIONS:-}"
export ASAN_OPTIONS="detect_leaks=1 detect_stack_use_after_return=1 strict_string_checks=1 ${ASAN_OPTIONS:-}"
export LSAN_OPTIONS="suppressions=$tests/lsan.supp print_suppressions=0 ${LSAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1 ${UBSAN_OPTIONS:-}"
echo "native tests, $sanitizer sanitizer"
$run "$build/cudafuture_native_tests" "$@"
$run "$build/cudafuture_rpc_tests" "$@"
exec $run "$build/cudafuture_sim_tests" "$@"
