// The fixture of every test. At the end of a test it checks that all callbacks ran or were abandoned, that all objects
// were destroyed, and that no rule of the fake runtime was broken.
#pragma once

// torch defines CHECK and similar macros too. The last definition takes effect, so include doctest after torch.
#include <c10/util/Logging.h>

#include <doctest/doctest.h>

#include <functional>

namespace cudafuture::fake {

// Return when the watcher has no pending futures.
void settle_watcher();

// Return when the callback thread has run all callbacks that were posted before this call.
void settle_callback_thread();

class Rules {
 public:
  Rules();
  ~Rules();
  Rules(const Rules&) = delete;
  Rules& operator=(const Rules&) = delete;

 private:
  int callbacks_before_;
  int objects_before_;
};

// Run a test case that is otherwise skipped in its own process, because it changes the process permanently. If the
// process fails, fail with its output.
void run_alone(const char* test_case);

// Run `body` in a forked child, and return its result; false if the child crashed.
bool in_forked_child(const std::function<bool()>& body);

}  // namespace cudafuture::fake
