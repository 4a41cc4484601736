// Futures that follow a c10d Work: a collective, a send or a recv.
#pragma once

#include "bind/python.h"
#include "bind/work_errors.h"

namespace cudafuture::bind {

bool is_work(nb::handle object);

// Returns the CUDAFuture of a Work of the backend "cudafuture"; invalid for any other object.
nb::object future_of_work(nb::handle object);

// Makes `future` complete with the Work's result.
void follow(nb::handle work, FuturePtr future);

// Returns a future that follows one of torch's handles: a torch.futures.Future or a c10d Work.
nb::object from_torch(nb::handle source);

// The group that a Work belongs to.
struct WorkGroup {
  double timeout;        // seconds within which the engine should be done
  BackendsPtr backends;  // null: none that reports failures
  nb::object origin;     // rephrases the errors
};

// Makes `future` complete with `value`. `tensors`: an object that owns what the operation uses; it is kept while the
// device does.
void follow_work(nb::handle work, FuturePtr future, nb::object value, nb::object tensors, const WorkGroup& group);

}  // namespace cudafuture::bind
