// The program of the native tests: puts the fakes in place before the first future, then hands over to doctest.
#define DOCTEST_CONFIG_IMPLEMENT
#define DOCTEST_CONFIG_NO_POSIX_SIGNALS  // the sanitizers say more about a crash
#include <doctest/doctest.h>
#include <unistd.h>

#include <csignal>
#include <cstring>

#include "core/process.h"
#include "fake_device.h"
#include "fake_runtime.h"

namespace {

// A deadlock ends the program here, with the name of the test, and not in whoever waits for the program.
constexpr unsigned kSecondsPerTest = 60;
char running[256] = "";

void say(const char* text) {
  if (write(STDERR_FILENO, text, std::strlen(text)) < 0) std::abort();
}

void hangs(int) {
  say("this test hangs: ");
  say(running);
  say("\n");
  std::abort();
}

struct Watchdog : doctest::IReporter {
  explicit Watchdog(const doctest::ContextOptions&) {}
  void test_case_start(const doctest::TestCaseData& test) override {
    std::strncpy(running, test.m_name, sizeof running - 1);
    alarm(kSecondsPerTest);
  }
  void test_case_end(const doctest::CurrentTestCaseStats&) override { alarm(0); }

  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_exception(const doctest::TestCaseException&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData&) override {}
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}
};

REGISTER_LISTENER("watchdog", 0, Watchdog);

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGALRM, hangs);
  cudafuture::fake::Runtime::install();
  cudafuture::fake::Accelerator::install();
  const int result = doctest::Context(argc, argv).run();
  cudafuture::shut_down();  // joins the library's threads, as every program does: the sanitizers miss none
  return result;
}
