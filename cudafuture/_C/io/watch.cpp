#include "io/watch.h"

#include <exception>
#include <utility>

#include "core/future.h"
#include "core/watcher.h"

namespace cudafuture::io {
namespace {

// Notifies the engine when the device work before a write has finished.
class WriteSource final : public Continuation {
 public:
  WriteSource(Watching& engine, Operation* operation) noexcept : engine_(engine), operation_(operation) {
    parent = operation->device()->earlier();
  }

  void run(Future& earlier) noexcept override { leave(earlier.late_error()); }
  void abandon() noexcept override { leave(synchronize(*operation_->device()->earlier())); }

 private:
  void leave(std::exception_ptr error) noexcept {
    if (error != nullptr) operation_->abandon(std::move(error));
    Watching& engine = engine_;
    Operation* const operation = operation_;
    delete this;
    engine.put_in(operation);
  }

  Watching& engine_;
  Operation* operation_;
};

}  // namespace

// The device work may need the interpreter, so this waits outside it.
std::exception_ptr synchronize(const Future& done) noexcept {
  const ForeignRuntime& runtime = foreign_runtime();
  void* const state = runtime.step_out();
  std::exception_ptr error;
  try {
    for (const DeviceEventPtr& event : done.events().events()) event->synchronize();
  } catch (...) {
    error = std::current_exception();
  }
  runtime.step_in(state);
  return error;
}

void watch_source(Watching& engine, Operation* operation) {
  auto* const source = new WriteSource(engine, operation);
  if (!Watcher::get().try_watch(source)) source->abandon();
}

void Arrival::watch() noexcept {
  parent = block_.copied;
  if (!Watcher::get().try_watch(this)) abandon();
}

void Arrival::run(Future&) noexcept {
  parent = nullptr;
  engine_.arrived(block_);
}

void Arrival::abandon() noexcept {
  if (std::exception_ptr error = synchronize(*block_.copied)) block_.copied->set_late_error(std::move(error));
  parent = nullptr;
  engine_.arrived(block_);
}

}  // namespace cudafuture::io
