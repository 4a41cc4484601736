// The embedding language (Python), seen from a core that includes none of its headers.
//
// The interpreter's lock (the GIL) is the outermost lock: it is never taken under a lock of the core. Threads of
// engines (Gloo, TensorPipe, I/O, the watcher) never take it at all: what needs it, they post to the callback thread.
#pragma once

#include <utility>

namespace cudafuture {

struct ForeignRuntime {
  bool (*inside)() noexcept;               // does this thread hold the interpreter's lock?
  bool (*enter)() noexcept;                // take it; false when the interpreter is going away
  void (*leave)() noexcept;                // give it back
  void (*retire)() noexcept;               // this thread, now outside, will not enter again
  void* (*step_out)() noexcept;            // give it up for a moment, if this thread is inside
  void (*step_in)(void* state) noexcept;   // and take it again; null: it was not inside
  void (*release)(void* object) noexcept;  // drop one reference; called inside only
};

// Installed once, before the first future. Without one (plain C++ programs) nothing counts as foreign.
void set_foreign_runtime(const ForeignRuntime& runtime) noexcept;
const ForeignRuntime& foreign_runtime() noexcept;

// Drops one reference: here when this thread is inside, else on the callback thread. Deep chains of objects that own
// one another are dropped one after the other, not one inside the other.
void release_foreign(void* object) noexcept;

// One owned reference to an object of the embedding language.
class Foreign {
 public:
  Foreign() = default;
  explicit Foreign(void* object) noexcept : object_(object) {}  // takes over the reference
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

// Shown each foreign reference that a future owns; non-zero stops. This is CPython's visitproc, untyped.
struct ForeignVisitor {
  int (*visit)(void* object, void* arg);
  void* arg;
  int operator()(void* object) const { return object == nullptr ? 0 : visit(object, arg); }
};

}  // namespace cudafuture
