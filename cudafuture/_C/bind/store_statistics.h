// Statistics of a store, as dicts.
#pragma once

#include "bind/python.h"
#include "store/store.h"

namespace cudafuture::bind {

nb::dict store_statistics(const store::Store& self);
nb::dict recovery_of(const store::Store& self);  // the findings when it was opened

}  // namespace cudafuture::bind
