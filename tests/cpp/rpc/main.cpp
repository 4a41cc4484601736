// The program of rpc_ext's native tests: signatures, parts of tensors and the store service's messages. It needs
// neither Python nor an RPC agent.
#define DOCTEST_CONFIG_IMPLEMENT
#define DOCTEST_CONFIG_NO_POSIX_SIGNALS  // the sanitizers report a crash in more detail
#include <doctest/doctest.h>

#include "../watchdog.h"

int main(int argc, char** argv) {
  native_tests::watch();
  return doctest::Context(argc, argv).run();
}
