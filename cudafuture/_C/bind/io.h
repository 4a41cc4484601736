// The Python handle of an I/O engine.
#pragma once

#include <chrono>
#include <memory>
#include <utility>

#include "bind/python.h"
#include "io/engine.h"

namespace cudafuture::bind {

// Closes the engine when Python drops the handle.
struct EngineHandle {
  std::shared_ptr<io::Engine> engine;

  explicit EngineHandle(std::shared_ptr<io::Engine> engine) : engine(std::move(engine)) {}
  EngineHandle(EngineHandle&&) = default;
  ~EngineHandle() {
    if (engine != nullptr) engine->close();
  }
};

// Waits without the GIL until `done(deadline)` returns true; each call waits at most until its deadline. Ctrl-C
// interrupts the wait. Throws the exceptions of signal handlers.
template <class Done>
void wait_until_done(Done&& done) {
  constexpr std::chrono::milliseconds kSignalInterval{50};
  while (true) {
    {
      const WithoutGil released;
      if (done(io::Engine::Clock::now() + kSignalInterval)) return;
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

inline void wait_for_room(io::Engine& engine) {
  if (engine.options().max_pending == 0) return;
  wait_until_done([&](io::Engine::Clock::time_point deadline) { return engine.wait_for_room(deadline); });
}

}  // namespace cudafuture::bind
