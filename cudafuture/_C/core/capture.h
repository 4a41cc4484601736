// Stream captures, as far as the host's questions can break them.
#pragma once

#include <c10/core/Device.h>

namespace cudafuture {

// While this lives the calling thread may ask events without invalidating a capture. CUDA by default ends every capture
// in progress, of whichever thread, when somebody asks an event meanwhile; nothing that is asked here is a part of one.
// Called with the event's device current: else a context would be made on another. Does nothing for other devices.
class BesideCaptures {
 public:
  explicit BesideCaptures(c10::DeviceType type) noexcept;
  ~BesideCaptures();
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  int before_ = -1;  // none
};

// Is this stream of CUDA's, by its native handle, recorded into a graph? For a torch whose guard cannot be asked.
bool is_cuda_stream_capturing(void* cuda_stream) noexcept;

}  // namespace cudafuture
