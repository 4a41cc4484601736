// Threads that are never refused: each task gets one at once, few are kept, and all are joined.
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

constexpr int kMostIdle = 8;  // as many threads without a task are kept

// A function as a task.
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

// The number of the calling thread: another one for each, also when the system gives one's id to the next.
int number_of_thread() {
  static std::atomic<int> last{0};
  thread_local const int number = ++last;
  return number;
}

// Has `count` tasks run at the same time. Returns the threads that they ran in.
std::set<int> run_side_by_side(ThreadCache& cache, int count) {
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

// Returns when that many threads have ended since. A thread ends when there are enough without a task already, so the
// others have come to rest by then.
void await_ended(int count, int before) {
  while (Runtime::retired() - before < count) std::this_thread::yield();
}

}  // namespace

TEST_SUITE_BEGIN("thread_cache");

TEST_CASE_FIXTURE(Rules, "a task gets a thread at once, however many others block") {
  ThreadCache cache;
  CHECK(run_side_by_side(cache, 20).size() == 20);
  cache.stop();
}

TEST_CASE_FIXTURE(Rules, "a task runs in a thread that has its name, outside the runtime, and may enter it") {
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

TEST_CASE_FIXTURE(Rules, "threads without a task are used again, then new ones are made") {
  ThreadCache cache;
  const int before = Runtime::retired();
  const std::set<int> first = run_side_by_side(cache, kMostIdle + 1);
  await_ended(1, before);
  const std::set<int> second = run_side_by_side(cache, kMostIdle + 2);
  int used_again = 0;
  for (const int thread : second) used_again += static_cast<int>(first.count(thread));
  CHECK(used_again == kMostIdle);
  CHECK(second.size() == kMostIdle + 2);
  cache.stop();
}

TEST_CASE_FIXTURE(Rules, "of the threads without a task a few are kept, and each that ends retires from the runtime") {
  ThreadCache cache;
  const int before = Runtime::retired();
  run_side_by_side(cache, kMostIdle + 4);
  await_ended(4, before);
  run_side_by_side(cache, kMostIdle);  // none of them ends
  CHECK(Runtime::retired() - before == 4);
  cache.stop();
  CHECK(Runtime::retired() - before == kMostIdle + 4);
}

TEST_CASE_FIXTURE(Rules, "a task may bring the next one, which does not run inside it") {
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

TEST_CASE_FIXTURE(Rules, "stop waits for the tasks that run, and asks meanwhile whether to go on") {
  static Signal* asked;
  Signal signal;
  asked = &signal;
  ThreadCache cache;
  Job job([&] { signal.wait(); });
  CHECK(cache.run(&job) == ThreadCache::Run::begun);
  cache.stop([]() noexcept {
    if (!asked->sent()) asked->send();
    return true;
  });
  CHECK(signal.sent());
  CHECK(job.done());
}

TEST_CASE_FIXTURE(Rules, "after stop every task is refused, also where no thread was ever made") {
  ThreadCache cache;
  SUBCASE("unused") {}
  SUBCASE("used") { run_side_by_side(cache, 2); }
  cache.stop();
  Job late([] { FAIL_CHECK("ran after stop()"); });
  CHECK(cache.run(&late) == ThreadCache::Run::stopped);
  cache.stop();
}

TEST_CASE_FIXTURE(Rules, "a task that runs while the cache stops is refused another") {
  static Signal* asked;
  Signal signal;
  asked = &signal;
  ThreadCache cache;
  Job late([] { FAIL_CHECK("ran after stop()"); });
  bool taken = true;
  Job job([&] {
    signal.wait();
    taken = cache.run(&late) == ThreadCache::Run::begun;
  });
  CHECK(cache.run(&job) == ThreadCache::Run::begun);
  cache.stop([]() noexcept {
    if (!asked->sent()) asked->send();
    return true;
  });
  CHECK_FALSE(taken);
}

TEST_CASE_FIXTURE(Rules, "when it is told not to go on, stop leaves a task that runs to itself") {
  static auto* const cache = new ThreadCache;  // never freed: the thread that is left comes back to it
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
  cache->stop();  // returns once that one has come to its end too
}

TEST_CASE_FIXTURE(Rules, "stop does not wait for a task that says so, and for one that has taken it back") {
  static auto* const cache = new ThreadCache;  // never freed: the thread that is left comes back to it
  Signal said;
  Signal taken_back;
  Signal go;
  Signal back;
  Job blocks([&] {
    ThreadCache::set_leavable(true);
    said.send();
    go.wait();
  });
  Job waits([&] {
    ThreadCache::set_leavable(true);
    ThreadCache::set_leavable(false);
    taken_back.send();
    back.wait();
  });
  ThreadCache::set_leavable(true);  // says nothing in a thread of others
  CHECK(cache->run(&blocks) == ThreadCache::Run::begun);
  CHECK(cache->run(&waits) == ThreadCache::Run::begun);
  said.wait();
  taken_back.wait();
  std::thread ends([&] { back.send(); });
  cache->stop();
  CHECK(waits.done());
  CHECK_FALSE(blocks.done());
  ends.join();
  go.send();
  blocks.wait();
}

TEST_CASE_FIXTURE(Rules,
                  "tasks that come while the cache stops run or are refused, and none runs once stop has returned") {
  for (int round = 0; round < 100; ++round) {
    ThreadCache cache;
    std::deque<Job> jobs;
    for (int i = 0; i < 8; ++i) jobs.emplace_back([] {});
    std::vector<char> taken(jobs.size());
    std::vector<char> done(jobs.size());
    together(3, [&](int thread) {
      if (thread == 2) {
        cache.stop();
        return;
      }
      for (std::size_t i = static_cast<std::size_t>(thread); i < jobs.size(); i += 2)
        taken[i] = cache.run(&jobs[i]) == ThreadCache::Run::begun;
    });
    for (std::size_t i = 0; i < jobs.size(); ++i) done[i] = jobs[i].done();
    CHECK(done == taken);
  }
}

TEST_CASE_FIXTURE(Rules, "a forked child is refused a thread, and its parent goes on as before") {
  ThreadCache cache;
  run_side_by_side(cache, 1);
  Job job([] {});
  CHECK(in_forked_child([&] { return cache.run(&job) == ThreadCache::Run::stopped && !job.done(); }));
  CHECK(cache.run(&job) == ThreadCache::Run::begun);
  cache.stop();
  CHECK(job.done());
}

TEST_SUITE_END();
