// Callbacks that run on an executor of concurrent.futures.
#pragma once

#include "bind/python.h"

namespace cudafuture::bind {

// A callback that is due. One of execute() and the two overloads of refuse() is called, then dispose().
class Deferred {
 public:
  virtual void execute(Future& parent) noexcept = 0;
  virtual void refuse() noexcept = 0;  // its executor was shut down
  virtual void refuse(Future& parent, nb::object error) noexcept = 0;
  virtual void dispose() noexcept = 0;
  virtual int visit(ForeignVisitor visitor) const = 0;

 protected:
  ~Deferred() = default;
};

// Gives the callback to the executor, which then owns it: on return it may have run and been destroyed.
void hand_over(nb::object executor, Deferred* callback, Future& parent) noexcept;

// Keeps KeyboardInterrupt and SystemExit, to raise them again in the main thread. True: it was one of them.
bool keep_if_interrupt(const nb::object& exception);

void bind_job(nb::module_& m);

}  // namespace cudafuture::bind
