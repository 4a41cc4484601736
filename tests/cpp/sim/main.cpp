// The program of the simulated accelerator's tests. It needs no torch.
#define DOCTEST_CONFIG_IMPLEMENT
#define DOCTEST_CONFIG_NO_POSIX_SIGNALS  // the sanitizers say more about a crash
#include <doctest/doctest.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "runtime/accelerator.h"

namespace {

// A deadlock ends the program here, and not in whoever waits for it.
constexpr unsigned kSecondsPerTest = 60;
const char* running = "";

void hangs(int) {
  for (const char* text : {"this test hangs: ", running, "\n"}) {
    std::size_t length = 0;
    while (text[length] != '\0') ++length;
    if (write(STDERR_FILENO, text, length) < 0) break;
  }
  std::abort();
}

struct Watchdog : doctest::IReporter {
  explicit Watchdog(const doctest::ContextOptions&) {}
  void test_case_start(const doctest::TestCaseData& test) override {
    running = test.m_name;
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
  const int result = doctest::Context(argc, argv).run();
  sim::Accelerator::get().stop();
  return result;
}
