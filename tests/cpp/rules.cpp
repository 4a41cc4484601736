#include "rules.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <string>

#include "callback.h"
#include "core/callback_thread.h"
#include "core/process.h"
#include "core/watcher.h"
#include "threads.h"

namespace cudafuture::fake {

// The watcher decrements `pending` as its last step for a future.
void settle_watcher() {
  while (Watcher::get().statistics().pending > 0) std::this_thread::yield();
}

void settle_callback_thread() {
  // Two rounds, because an object that is dropped on the callback thread can post another.
  for (int round = 0; round < 2; ++round) {
    Signal reached;
    Callback* last = call([&](Future&) { reached.send(); });
    last->parent = completed();
    CallbackThread::get().post(last);
    reached.wait();
  }
}

Rules::Rules() : callbacks_before_(Callback::alive), objects_before_(Object::alive) {}

Rules::~Rules() {
  if (is_shut_down()) return;  // the threads that would run the rest have ended
  settle_watcher();
  settle_callback_thread();
  CHECK(Callback::alive.load() == callbacks_before_);
  CHECK(Object::alive.load() == objects_before_);
  for (const std::string& rule : Runtime::take_broken()) FAIL_CHECK(rule);
}

void run_alone(const char* test_case) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  const std::string command = "'" + program + "' --no-intro --no-skip --test-case='" + test_case + "' 2>&1";
  std::FILE* pipe = popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  std::string output;
  for (char block[4096]; const std::size_t n = std::fread(block, 1, sizeof block, pipe);) output.append(block, n);
  const int status = pclose(pipe);
  INFO(output);
  CHECK(status == 0);
  CHECK(output.find("1 passed") != std::string::npos);  // fails if no test case has this name
}

bool in_forked_child(const std::function<bool()>& body) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) _exit(body() ? 0 : 1);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace cudafuture::fake
