#include "core/process.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <string>

#include "core/callback_thread.h"
#include "core/debug_socket.h"
#include "core/error.h"
#include "core/thread_cache.h"
#include "core/watcher.h"

namespace cudafuture {
namespace {

std::atomic<bool> used{false};
std::atomic<bool> forked{false};
std::atomic<bool> down{false};
std::atomic<int> used_in{0};
std::atomic<void (*)() noexcept> begin_of_end{nullptr};

}  // namespace

void mark_used() noexcept {
  if (used.load(std::memory_order_relaxed)) return;
  if (used.exchange(true)) return;
  used_in = static_cast<int>(getpid());
  pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
}

bool is_forked_child() noexcept { return forked.load(std::memory_order_relaxed); }

void refuse_after_fork() {
  if (!is_forked_child()) return;
  throw Error(ErrorKind::invalid_state,
              "cudafuture was used in process " + std::to_string(used_in.load()) +
                  " before it forked; threads and locks do not survive a fork. Start this process with the 'spawn' or "
                  "'forkserver' method, or fork before the first future is made");
}

void at_shut_down(void (*begin)() noexcept) noexcept { begin_of_end.store(begin); }

void shut_down(bool (*go_on)() noexcept) noexcept {
  if (is_forked_child() || down.exchange(true)) return;
  if (auto* const begin = begin_of_end.load()) begin();
  Watcher::get().stop(go_on);
  ThreadCache::get().stop(go_on);
  CallbackThread::get().stop(go_on);
  DebugSocket::get().stop();  // last: those who ask may want to know why the others do not end
}

bool is_shut_down() noexcept { return down.load(std::memory_order_acquire); }

}  // namespace cudafuture
