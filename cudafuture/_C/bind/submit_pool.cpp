#include "bind/submit_pool.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "bind/errors.h"
#include "core/capture.h"

namespace cudafuture::bind {
namespace {

constexpr int kMaxDepth = 50;  // of combinations in combinations

PyObject* pool = nullptr;      // not owned: it lives as long as the process
std::size_t pool_threads = 0;  // the most that it has
thread_local bool is_pool_thread = false;

std::vector<const PoolWait*> waits_of_pool;  // of the threads of the pool, one each; guarded by the GIL, like the rest

// `known`: the answers for combinations so far. A part may be in many of them.
bool waits_for_pool(const Future& future, int depth, std::unordered_map<const Future*, bool>& known) {
  if (future.done() || depth == kMaxDepth) return false;
  if (future.is_pooled()) return true;
  if (future.maker() < Maker::gather) return false;
  const auto [answer, is_new] = known.try_emplace(&future, false);
  if (!is_new) return answer->second;
  bool& is_waiting = answer->second;  // stays in place while others are added
  const std::vector<CombinationPart> parts = future.parts();
  const auto waits = [&](const CombinationPart& part) { return waits_for_pool(*part.future, depth + 1, known); };
  if (future.maker() != Maker::collect_any) return is_waiting = std::any_of(parts.begin(), parts.end(), waits);
  const auto is_over = [&](const CombinationPart& part) { return part.future->done() || waits(part); };
  return is_waiting = !parts.empty() && std::all_of(parts.begin(), parts.end(), is_over);
}

// Returns true if every thread waits for the pool: those of the list, and `more` that are not in it.
bool is_exhausted(std::size_t more, bool for_good) {
  return pool_threads != 0 && waits_of_pool.size() + more >= pool_threads &&
         std::all_of(waits_of_pool.begin(), waits_of_pool.end(),
                     [&](const PoolWait* wait) { return !(for_good && wait->has_timeout()) && wait->is_for_pool(); });
}

std::string exhaustion() {
  return "all " + std::to_string(pool_threads) +
         " threads of submit wait for functions of submit, which need one of these threads; give the inner submit() "
         "an executor of its own, attach with then_async() instead of waiting, or raise CUDAFUTURE_SUBMIT_THREADS";
}

}  // namespace

bool is_submit_pool(nb::handle executor) noexcept { return pool != nullptr && executor.ptr() == pool; }

bool waits_for_pool(const Future& future) {
  std::unordered_map<const Future*, bool> known;
  return waits_for_pool(future, 0, known);
}

std::string exhausted_pool(const Future& future) {
  return waits_for_pool(future) && is_exhausted(is_pool_thread ? 1 : 0, false) ? exhaustion() : std::string();
}

PoolWait::PoolWait(const Future& future, bool has_timeout) : future_(future), has_timeout_(has_timeout) {
  if (!is_pool_thread) return;
  if (!has_timeout && waits_for_pool(future) && is_exhausted(1, true)) {
    raise_error("InvalidStateError", "this wait would never end: " + exhaustion());
  }
  waits_of_pool.push_back(this);
}

PoolWait::~PoolWait() {
  if (is_pool_thread) waits_of_pool.erase(std::find(waits_of_pool.begin(), waits_of_pool.end(), this));
}

void bind_submit_pool(nb::module_& m) {
  m.def(
      "set_submit_pool",
      [](nb::handle executor, std::size_t threads) {
        pool = executor.ptr();
        pool_threads = threads;
      },
      nb::arg("executor"), nb::arg("threads"));
  m.def("begin_submit_thread", [] {
    is_pool_thread = true;
    mark_library_thread();
  });
}

}  // namespace cudafuture::bind
