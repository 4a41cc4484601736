// Following a c10d Work: a collective, a send or a recv.
#pragma once

#include "bind/python.h"

namespace cudafuture::bind {

bool is_work(nb::handle object);

// `future` completes with the Work's result.
void follow(nb::handle work, FuturePtr future);

// `future` completes with `value`. The engine should be done with it within `timeout` seconds.
void follow_work(nb::handle work, FuturePtr future, nb::object value, double timeout);

}  // namespace cudafuture::bind
