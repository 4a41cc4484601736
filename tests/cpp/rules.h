// The fixture of every test: when a test ends, all its callbacks have run or were abandoned, all its objects are dead,
// and no rule of the runtime was broken.
#pragma once

// torch defines CHECK and its kin as well. Whoever comes last wins: that must be doctest.
#include <c10/util/Logging.h>

#include <doctest/doctest.h>

#include <functional>

namespace cudafuture::fake {

// Returns when nothing is watched any more.
void settle_watcher();

// Returns when the callback thread has done everything that was posted before.
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

// Runs another test case, one that is skipped otherwise, in a process of its own: what it does to the process cannot be
// undone. Fails with what the process printed, unless that ended well.
void run_alone(const char* test_case);

// Runs `body` in a forked child; true when it says so.
bool in_forked_child(const std::function<bool()>& body);

}  // namespace cudafuture::fake
