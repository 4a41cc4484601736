// A foreign runtime that plays Python: a mutex for the GIL, objects with counted references, and a list of broken
// rules.
//
// The rules, kept for the whole run of the program:
//   - a thread of an engine never takes the lock (`EngineThread` says who is one);
//   - nobody takes it twice, and nobody who has said that he is done with it takes it again;
//   - an object of the runtime dies inside it, and its code (callbacks flagged `foreign`) runs inside it.
// ThreadSanitizer, which sees the mutex, adds: the lock is never taken under a lock of the core.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/foreign.h"

namespace cudafuture::fake {

class Runtime {
 public:
  static void install();  // before the first future
  static bool inside() noexcept;

  // What an interpreter does when it goes away: whoever asks for its lock is refused.
  static void set_finalizing(bool finalizing) noexcept;

  static int retired() noexcept;  // how many threads have said that they will not enter again

  static void broken(std::string rule);  // notes that a rule was broken
  static std::vector<std::string> take_broken();
};

// Holds the runtime's lock for a scope.
class Inside {
 public:
  Inside();
  ~Inside();
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
};

// This thread belongs to an engine for a scope: it must never take the runtime's lock.
class EngineThread {
 public:
  EngineThread() noexcept;
  ~EngineThread();
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  static void for_good() noexcept;  // for a thread that the test did not start
};

// One object of the runtime. `on_death` runs when the last reference is dropped.
struct Object {
  using OnDeath = std::function<void()>;

  explicit Object(OnDeath on_death = {});
  ~Object();
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;

  OnDeath on_death;
  std::atomic<int> references{1};

  static std::atomic<int> alive;
};

inline Foreign object(Object::OnDeath on_death = {}) { return Foreign(new Object(std::move(on_death))); }

// A second reference to what `reference` refers to.
Foreign share(const Foreign& reference) noexcept;

}  // namespace cudafuture::fake
