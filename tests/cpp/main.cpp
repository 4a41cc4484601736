// The program of the native tests. It installs the fakes before the first future, then runs doctest.
#define DOCTEST_CONFIG_IMPLEMENT
#define DOCTEST_CONFIG_NO_POSIX_SIGNALS  // the sanitizers report a crash in more detail
#include <doctest/doctest.h>

#include "core/process.h"
#include "fake_device.h"
#include "fake_runtime.h"
#include "watchdog.h"

int main(int argc, char** argv) {
  native_tests::watch();
  cudafuture::fake::Runtime::install();
  cudafuture::fake::Accelerator::install();
  const int result = doctest::Context(argc, argv).run();
  cudafuture::shut_down();  // joins the library's threads, so that the sanitizers check them too
  return result;
}
