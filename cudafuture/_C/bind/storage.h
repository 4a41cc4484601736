// What Python holds of a storage engine.
#pragma once

#include <memory>
#include <utility>

#include "storage/engine.h"

namespace cudafuture::bind {

// When Python lets go, the engine takes no more.
struct EngineHandle {
  std::shared_ptr<storage::Engine> engine;

  explicit EngineHandle(std::shared_ptr<storage::Engine> engine) : engine(std::move(engine)) {}
  EngineHandle(EngineHandle&&) = default;
  ~EngineHandle() {
    if (engine != nullptr) engine->close();
  }
};

}  // namespace cudafuture::bind
