#!/bin/sh
# doctest.sh: see that the C++ test framework doctest, one header, can be included: from the system, else installed,
# else unpacked into build/doctest, where CMakeLists.txt looks too.
set -eu

if echo '#include <doctest/doctest.h>' | "${CXX:-c++}" -E -x c++ - >/dev/null 2>&1 ||
  [ -e build/doctest/usr/include/doctest/doctest.h ]; then
  exit 0
fi
echo "doctest/doctest.h is missing" >&2
if [ "$(id -u)" = 0 ]; then
  exec "$(dirname "$0")/apt.sh" doctest-dev
fi
mkdir -p build/doctest
(cd build/doctest && apt-get download doctest-dev && dpkg -x doctest-dev_*.deb .) >&2 ||
  exec "$(dirname "$0")/apt.sh" doctest-dev
