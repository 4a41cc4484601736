// A watchdog that aborts a test program when a test hangs, and prints the name of the test. Only the file that defines
// main() includes it.
#pragma once

#include <doctest/doctest.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>

namespace native_tests {

constexpr unsigned kSecondsPerTest = 60;
inline char running[256] = "";

inline void print(const char* text) {
  if (write(STDERR_FILENO, text, std::strlen(text)) < 0) std::abort();
}

inline void abort_hanging_test(int) {
  print("this test did not end in time: ");
  print(running);
  print("\n");
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

inline void watch() { std::signal(SIGALRM, abort_hanging_test); }

}  // namespace native_tests
