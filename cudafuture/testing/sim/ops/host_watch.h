// Sees what the host's own operators do to pinned memory that a stream is using.
//
// torch calls us before each operator, but only while there is such memory: from the first copy that uses some until a
// while after the last of them is known to be done. What reads or writes memory without an operator is not seen:
// `tensor.numpy()[0] = 1`, `tensor.tolist()`.
#pragma once

#include <ATen/core/Tensor.h>

namespace sim {

void install_host_watch();
void remove_host_watch();

void watch_host();                                                     // a stream is about to use pinned memory
void note_host_read(const at::Tensor& tensor, const char* operation);  // now, if it is pinned

}  // namespace sim
