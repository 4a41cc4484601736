// The embedding language (Python) as seen from the core, which includes none of its headers.
//
// The interpreter's lock (the GIL) is the outermost lock: it is never taken under a lock of the core. Threads of
// engines (Gloo, TensorPipe, I/O, the watcher) never take it. They post work that needs it to the callback thread.
#pragma once

#include <string>
#include <utility>

namespace cudafuture {

struct ForeignRuntime {
  bool (*inside)() noexcept;               // true if this thread holds the interpreter's lock
  bool (*enter)() noexcept;                // takes the lock; false if the interpreter is finalizing
  void (*leave)() noexcept;                // releases the lock
  void (*retire)() noexcept;               // this thread, now outside, will not enter again
  void* (*step_out)() noexcept;            // releases the lock for a moment, if this thread holds it
  void (*step_in)(void* state) noexcept;   // takes the lock again; null: it was not held
  void (*release)(void* object) noexcept;  // drops one reference; called inside only
  // Returns the name and the line of a function, or an empty text. Called without the lock; the function stays alive.
  std::string (*describe)(void* function);
};

// Sets the runtime, once, before the first future. Without one (plain C++ programs) no object counts as foreign.
void set_foreign_runtime(const ForeignRuntime& runtime) noexcept;
const ForeignRuntime& foreign_runtime() noexcept;

// Drops one reference: here if this thread is inside, otherwise on the callback thread. Deep chains of objects that own
// one another are dropped iteratively, without recursion.
void release_foreign(void* object) noexcept;

// One owned reference to an object of the embedding language.
class Foreign {
 public:
  Foreign() = default;
  explicit Foreign(void* object) noexcept : object_(object) {}  // takes ownership of the reference
  Foreign(Foreign&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Foreign& operator=(Foreign&& other) noexcept {
    Foreign old(std::exchange(object_, std::exchange(other.object_, nullptr)));
    return *this;
  }
  ~Foreign() {
    if (object_ != nullptr) release_foreign(object_);
  }

  void* get() const noexcept { return object_; }
  void* take() noexcept { return std::exchange(object_, nullptr); }
  explicit operator bool() const noexcept { return object_ != nullptr; }

 private:
  void* object_ = nullptr;
};

// A visitor for the foreign references that a future owns; a non-zero result stops. This is CPython's visitproc,
// untyped.
struct ForeignVisitor {
  int (*visit)(void* object, void* arg);
  void* arg;
  int operator()(void* object) const { return object == nullptr ? 0 : visit(object, arg); }
};

}  // namespace cudafuture
