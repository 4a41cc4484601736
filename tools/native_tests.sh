#!/bin/sh
# native_tests.sh PYTHON SANITIZER: build the C++ tests with a sanitizer, and run them; see native_build.sh. Further
# arguments go to each test program.
set -eu
tools/native_build.sh "$1" "$2"
sanitizer=$2
shift 2
build=build/native-$sanitizer
tests=$PWD/tests/cpp

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
