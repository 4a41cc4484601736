// The stream= argument of callbacks.
#pragma once

#include <vector>

#include "bind/python.h"

namespace cudafuture::bind {

// The streams that are current in a callback.
struct StreamChoice {
  bool pool = true;
  bool caller = false;               // `streams` are the caller's current ones
  std::vector<c10::Stream> streams;  // if `pool` is false: these, and pool streams for the other devices
};

// Converts Python's argument. Raises ValueError, TypeError, or DeviceMismatchError for a stream outside the bounding
// set.
StreamChoice stream_choice_from(const Future& parent, nb::handle stream);

// Returns the streams of one run of a callback, at least one for each of the parent's devices.
std::vector<c10::Stream> streams_for(const Future& parent, const StreamChoice& choice, int priority);

}  // namespace cudafuture::bind
