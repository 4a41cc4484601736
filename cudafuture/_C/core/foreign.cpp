#include "core/foreign.h"

#include "core/callback_thread.h"
#include "core/process.h"
#include "core/reaper.h"

namespace cudafuture {
namespace {

ForeignRuntime runtime{
    []() noexcept { return true; },
    []() noexcept { return true; },
    []() noexcept {},
    []() noexcept {},
    []() noexcept -> void* { return nullptr; },
    [](void*) noexcept {},
    [](void*) noexcept {},
    [](void*) { return std::string(); },
};

}  // namespace

void set_foreign_runtime(const ForeignRuntime& r) noexcept { runtime = r; }
const ForeignRuntime& foreign_runtime() noexcept { return runtime; }

void release_foreign(void* object) noexcept {
  if (runtime.inside()) {
    reap_foreign(object);
  } else {
    CallbackThread::get().post_release(object);
  }
}

}  // namespace cudafuture
