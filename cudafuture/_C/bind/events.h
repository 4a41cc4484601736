#pragma once

#include "bind/python.h"

namespace cudafuture::bind {

nb::object events_of(const Future& future);  // a read-only mapping from torch.device to EventView

}  // namespace cudafuture::bind
