// The thread cache: each task gets a thread at once, a few idle threads are kept, and stop() joins all threads.
#include <pthread.h>

#include <atomic>
#include <barrier>
#include <deque>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/foreign.h"
#include "core/thread_cache.h"
#include "fake_runtime.h"
#include "rules.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;

namespace {

constexpr int kMostIdle = 8;  // number of idle threads that the cache keeps

// A task that runs a function.
class Job final : public ThreadCache::Task {
 public:
  explicit Job(std::function<void()> body) : body_(std::move(body)) {}
  void perform() noexcept override {
    body_();
    done_.send();
  }
  const char* thread_name() const noexcept override { return "a job"; }
  void wait() const { done_.wait(); }
  bool done() const { return done_.sent(); }

 private:
  std::function<void()> body_;
  Signal done_;
};

// Return a number that is unique to the calling thread. The system may reuse the id of a thread that has ended.
int number_of_thread() {
  static std::atomic<int> last{0};
  thread_local const int number = ++last;
  return number;
}

// Run `count` tasks at the same time, and return the numbers of their threads.
std::set<int> run_concurrently(ThreadCache& cache, int count) {
  std::barrier all_run(count);
  std::vector<int> threads(static_cast<std::size_t>(count));
  std::deque<Job> jobs;
  for (int& thread : threads) {
    jobs.emplace_back([&] {
      thread = number_of_thread();
      all_run.arrive_and_wait();
    });
    CHECK(cache.run(&jobs.back()) == ThreadCache::Run::begun);
  }
  for (const Job& job : jobs) job.wait();
  return {threads.begin(), threads.end()};
}

// Return when `count` threads have retired since `before`. A thread retires when enough threads are idle, so the other
// threads are idle then.
void wait_for_retired(int count, int before) {
  while (Runtime::retired() - before < count) std::this_thread::yield();
}

}  // namespace

TEST_SUITE_BEGIN("thread_cache");

TEST_CASE_FIXTURE(Rules, "a task gets a thread at once while many other tasks block") {
  ThreadCache cache;
  CHECK(run_concurrently(cache, 20).size() == 20);
  cache.stop();
}

TEST_CASE_FIXTURE(Rules, "a task runs outside the runtime in a thread with its name") {
  ThreadCache cache;
  std::string name(16, '\0');
  bool inside = true;
  Job job([&] {
    pthread_getname_np(pthread_self(), name.data(), name.size());
    inside = Runtime::inside();
    const Inside enters;
  });
  CHECK(cache.run(&job) == ThreadCache::Run::begun);
  cache.stop();
  CHECK(job.done());
  CHECK(std::string(name.c_str()) == "a job");
  CHECK_FALSE(inside);
}

TEST_CASE_FIXTURE(Rules, "the cache reuses idle threads before it starts new ones") {
  ThreadCache cache;
  const int before = Runtime::retired();
  const std::set<int> first = run_concurrently(cache, kMostIdle + 1);
  wait_for_retired(1, before);
  const std::set<int> second = run_concurrently(cache, kMostIdle + 2);
  int reused = 0;
  for (const int thread : second) reused += static_cast<int>(first.count(thread));
  CHECK(reused == kMostIdle);
  CHECK(second.size() == kMostIdle + 2);
  cache.stop();
}

TEST_CASE_FIXTURE(Rules, "the cache bounds its idle threads and retires the others") {
  ThreadCache cache;
  const int before = Runtime::retired();
  run_concurrently(cache, kMostIdle + 4);
  wait_for_retired(4, before);
  run_concurrently(cache, kMostIdle);  // none of these threads ends
  CHECK(Runtime::retired() - before == 4);
  cache.stop();
  CHECK(Runtime::retired() - before == kMostIdle + 4);
}

TEST_CASE_FIXTURE(Rules, "a task that a task starts runs in another thread") {
  ThreadCache cache;
  int inner_thread = 0;
  int outer_thread = 0;
  Job inner([&] { inner_thread = number_of_thread(); });
  Job outer([&] {
    CHECK(cache.run(&inner) == ThreadCache::Run::begun);
    inner.wait();
    outer_thread = number_of_thread();
  });
  CHECK(cache.run(&outer) == ThreadCache::Run::begun);
  outer.wait();
  CHECK(inner_thread != outer_thread);
  cache.stop();
}

TEST_CASE_FIXTURE(Rules, "stop() waits for running tasks, and calls `go_on` meanwhile") {
  static Signal* signal_of_stop;
  Signal signal;
  signal_of_stop = &signal;
  ThreadCache cache;
  Job job([&] { signal.wait(); });
  CHECK(cache.run(&job) == ThreadCache::Run::begun);
  cache.stop([]() noexcept {
    if (!signal_of_stop->sent()) signal_of_stop->send();
    return true;
  });
  CHECK(signal.sent());
  CHECK(job.done());
}

TEST_CASE_FIXTURE(Rules, "stop() refuses every later task") {
  ThreadCache cache;
  SUBCASE("no thread was started") {}
  SUBCASE("threads were started") { run_concurrently(cache, 2); }
  cache.stop();
  Job late([] { FAIL_CHECK("ran after stop()"); });
  CHECK(cache.run(&late) == ThreadCache::Run::stopped);
  cache.stop();
}

TEST_CASE_FIXTURE(Rules, "a task that runs during stop() cannot start another task") {
  static Signal* signal_of_stop;
  Signal signal;
  signal_of_stop = &signal;
  ThreadCache cache;
  Job late([] { FAIL_CHECK("ran after stop()"); });
  bool accepted = true;
  Job job([&] {
    signal.wait();
    accepted = cache.run(&late) == ThreadCache::Run::begun;
  });
  CHECK(cache.run(&job) == ThreadCache::Run::begun);
  cache.stop([]() noexcept {
    if (!signal_of_stop->sent()) signal_of_stop->send();
    return true;
  });
  CHECK_FALSE(accepted);
}

TEST_CASE_FIXTURE(Rules, "stop() leaves a running task's thread if `go_on` returns false") {
  static auto* const cache = new ThreadCache;  // never freed: the remaining thread still uses it
  Signal go;
  Job blocks([&] { go.wait(); });
  Job ends([] {});
  CHECK(cache->run(&blocks) == ThreadCache::Run::begun);
  CHECK(cache->run(&ends) == ThreadCache::Run::begun);
  ends.wait();
  cache->stop([]() noexcept { return false; });
  CHECK_FALSE(blocks.done());
  CHECK(cache->run(&ends) == ThreadCache::Run::stopped);
  go.send();
  blocks.wait();
  cache->stop();  // returns when that thread has ended too
}

TEST_CASE_FIXTURE(Rules, "stop() waits only for tasks that are not leavable") {
  static auto* const cache = new ThreadCache;  // never freed: the remaining thread still uses it
  Signal leavable;
  Signal not_leavable;
  Signal go;
  Signal go_on;
  Job blocks([&] {
    ThreadCache::set_leavable(true);
    leavable.send();
    go.wait();
  });
  Job waits([&] {
    ThreadCache::set_leavable(true);
    ThreadCache::set_leavable(false);
    not_leavable.send();
    go_on.wait();
  });
  Job ends_leavable([&] { ThreadCache::set_leavable(true); });
  CHECK(cache->run(&ends_leavable) == ThreadCache::Run::begun);
  ends_leavable.wait();
  Signal next;
  Job waits_next([&] {  // the thread of a task that has ended is usually idle now, and not leavable any more
    next.send();
    go_on.wait();
  });
  CHECK(cache->run(&waits_next) == ThreadCache::Run::begun);
  next.wait();
  ThreadCache::set_leavable(true);  // no effect in a thread that is not the cache's
  CHECK(cache->run(&blocks) == ThreadCache::Run::begun);
  CHECK(cache->run(&waits) == ThreadCache::Run::begun);
  leavable.wait();
  not_leavable.wait();
  std::thread ends([&] { go_on.send(); });
  cache->stop();
  CHECK(waits.done());
  CHECK(waits_next.done());
  CHECK_FALSE(blocks.done());
  ends.join();
  go.send();
  blocks.wait();
}

TEST_CASE_FIXTURE(Rules, "tasks submitted during stop() run before it returns, or are refused") {
  for (int round = 0; round < 100; ++round) {
    ThreadCache cache;
    std::deque<Job> jobs;
    for (int i = 0; i < 8; ++i) jobs.emplace_back([] {});
    std::vector<char> accepted(jobs.size());
    std::vector<char> done(jobs.size());
    together(3, [&](int thread) {
      if (thread == 2) {
        cache.stop();
        return;
      }
      for (std::size_t i = static_cast<std::size_t>(thread); i < jobs.size(); i += 2)
        accepted[i] = cache.run(&jobs[i]) == ThreadCache::Run::begun;
    });
    for (std::size_t i = 0; i < jobs.size(); ++i) done[i] = jobs[i].done();
    CHECK(done == accepted);
  }
}

TEST_CASE_FIXTURE(Rules, "a forked child cannot start a task, and its parent still can") {
  ThreadCache cache;
  run_concurrently(cache, 1);
  Job job([] {});
  CHECK(in_forked_child([&] { return cache.run(&job) == ThreadCache::Run::stopped && !job.done(); }));
  CHECK(cache.run(&job) == ThreadCache::Run::begun);
  cache.stop();
  CHECK(job.done());
}

TEST_SUITE_END();
