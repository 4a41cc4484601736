// A fake of the Python runtime: a mutex for the GIL, objects with reference counts, and a list of broken rules.
//
// The rules hold for the whole run of the program:
//   - a thread of an engine never takes the lock (`EngineThread` marks such threads);
//   - a thread that holds the lock does not take it again, and a thread that has retired never takes it;
//   - an object of the runtime is destroyed inside it, and its code (callbacks flagged `foreign`) runs inside it.
// ThreadSanitizer sees the mutex and adds a rule: the lock is never taken under a lock of the core.
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

  // Behave like an interpreter that is finalizing: refuse the lock to every thread.
  static void set_finalizing(bool finalizing) noexcept;

  static int retired() noexcept;  // number of threads that have retired

  static void broken(std::string rule);  // records a broken rule
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

// Marks this thread as an engine's for a scope: in it the thread must not take the runtime's lock.
class EngineThread {
 public:
  EngineThread() noexcept;
  ~EngineThread();
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  static void mark_this_thread() noexcept;  // permanently, for a thread that the test did not start
};

// An object of the runtime. `on_death` runs when the last reference is dropped.
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

// Return a second reference to the same object.
Foreign share(const Foreign& reference) noexcept;

}  // namespace cudafuture::fake
