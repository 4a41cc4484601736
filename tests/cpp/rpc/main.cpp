// The program of the tests of what rpc_ext signs its messages with. It needs neither Python nor an agent.
#define DOCTEST_CONFIG_IMPLEMENT
#define DOCTEST_CONFIG_NO_POSIX_SIGNALS  // the sanitizers say more about a crash
#include <doctest/doctest.h>

#include "../watchdog.h"

int main(int argc, char** argv) {
  native_tests::watch();
  return doctest::Context(argc, argv).run();
}
