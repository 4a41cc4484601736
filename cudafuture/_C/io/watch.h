// Notifications from the watcher to an engine: a write's source is ready, or devices have finished with a buffer.
#pragma once

#include <exception>

#include "core/continuation.h"
#include "io/block.h"
#include "io/operation.h"

namespace cudafuture::io {

// An engine as the watcher's thread sees it. It lives until every watched object has been returned to it.
class Watching {
 public:
  virtual void put_in(Operation* operation) noexcept = 0;   // the device work before it has finished
  virtual void arrived(Block& block) noexcept = 0;          // devices have finished with its buffer
  virtual void checked(Operation* operation) noexcept = 0;  // another thread has taken a checksum

 protected:
  ~Watching() = default;
};

// Blocks until the device work behind a future has finished, and returns the device's error. It replaces the watcher
// when the process exits or the system refuses a thread for it.
std::exception_ptr synchronize(const Future& done) noexcept;

void watch_source(Watching& engine, Operation* operation);

// Returns one block to the engine each time it is watched.
class Arrival final : public Continuation {
 public:
  Arrival(Watching& engine, Block& block) noexcept : engine_(engine), block_(block) {}
  void watch() noexcept;
  void run(Future&) noexcept override;
  void abandon() noexcept override;

 private:
  Watching& engine_;
  Block& block_;
};

}  // namespace cudafuture::io
