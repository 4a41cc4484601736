// The program of the simulated accelerator's tests. It needs no torch.
#define DOCTEST_CONFIG_IMPLEMENT
#define DOCTEST_CONFIG_NO_POSIX_SIGNALS  // the sanitizers report a crash in more detail
#include <doctest/doctest.h>

#include "../watchdog.h"
#include "sim/runtime/accelerator.h"

int main(int argc, char** argv) {
  native_tests::watch();
  const int result = doctest::Context(argc, argv).run();
  sim::Accelerator::get().stop();
  return result;
}
