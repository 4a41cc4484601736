#include "api/thread.h"

#include <utility>

#include "core/thread_cache.h"

namespace cudafuture::api {

void call_elsewhere(std::function<void()> function) {
  ThreadCache::get().run_or_call("cudafuture-task", std::move(function));
}

}  // namespace cudafuture::api
