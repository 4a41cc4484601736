#!/bin/sh
# native_build.sh PYTHON SANITIZER: build tests/cpp, the core, the simulated accelerator's runtime and the seals of RPC with
# `thread` or `address`, in build/native-SANITIZER.
set -eu
python=$1
sanitizer=$2
build=build/native-$sanitizer

# After the first time the build configures itself again when its files change.
if [ ! -e "$build/built" ]; then
  generator=
  if command -v ninja >/dev/null; then generator="-G Ninja"; fi
  # Little optimisation: sanitizers see more of what was written, and the build takes two thirds of the time. Without
  # any, the tests with the thread sanitizer take longer than the build gains.
  optimisation=-O1
  if [ "$sanitizer" = address ]; then optimisation=-O0; fi
  cmake -S . -B "$build" $generator -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPython_EXECUTABLE="$python" \
    -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="$optimisation -DNDEBUG" -DCUDAFUTURE_PYTHON_MODULE=OFF -DCUDAFUTURE_NATIVE_TESTS=ON \
    -DCUDAFUTURE_SANITIZE="$sanitizer"
fi
cmake --build "$build"
touch "$build/built"
