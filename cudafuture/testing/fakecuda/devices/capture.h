// A stream capture: operations that go into a graph instead of a queue.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "fakecuda/devices/stream.h"
#include "machine/capture_mode.h"

namespace fakecuda {

struct CudaCapture {
  uint64_t id = 0;
  CaptureMode mode = CaptureMode::global;
  uint64_t thread = 0;                 // that began it
  CudaStream* origin = nullptr;        // where it began, and must end
  bool invalidated = false;            // by a call that CUDA forbids; the end of the capture fails
  std::vector<StreamOperation> nodes;  // in an order in which a graph may run them

  // Number of steps of each stream in the capture, and number of every other stream's steps before its last step.
  std::map<CudaStream*, uint64_t> length;
  std::map<CudaStream*, std::map<CudaStream*, uint64_t>> follows;

  void advance(CudaStream* stream) { follows[stream][stream] = ++length[stream]; }
  void join(CudaStream* stream, const CudaRecording& recording);
  bool is_joined_by(CudaStream* stream);  // true if `stream` follows all streams of the capture
};
using CapturePtr = std::shared_ptr<CudaCapture>;

inline void CudaCapture::join(CudaStream* stream, const CudaRecording& recording) {
  auto& before = follows[stream];
  for (const auto& [other, position] : recording.follows) before[other] = std::max(before[other], position);
  advance(stream);
}

inline bool CudaCapture::is_joined_by(CudaStream* stream) {
  auto& before = follows[stream];
  for (const auto& [other, steps] : length) {
    if (before[other] < steps) return false;
  }
  return true;
}

// An instantiated graph, or one to be instantiated.
struct Graph {
  std::vector<StreamOperation> nodes;
};

}  // namespace fakecuda
