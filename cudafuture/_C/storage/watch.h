// What devices have done, brought to an engine by the watcher: a source that a write may take, buffers that are free.
#pragma once

#include <exception>

#include "core/continuation.h"
#include "storage/block.h"
#include "storage/operation.h"

namespace cudafuture::storage {

// An engine, as the watcher's thread sees it. It lives until everything that is watched has come back.
class Watching {
 public:
  virtual void put_in(Operation* operation) noexcept = 0;   // its source is ready
  virtual void arrived(Block& block) noexcept = 0;          // devices have done with its buffer
  virtual void checked(Operation* operation) noexcept = 0;  // another thread has taken a checksum

 protected:
  ~Watching() = default;
};

// Block until the device work behind a future has finished, and return the device's error. This replaces the watcher
// when the process exits or the system has no thread for it.
std::exception_ptr synchronize(const Future& done) noexcept;

void watch_source(Watching& engine, Operation* operation);

// Brings one block back, as often as it is sent.
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

}  // namespace cudafuture::storage
