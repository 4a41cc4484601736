// A stream capture: operations that go into a graph instead of a queue.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "machine/stream.h"

namespace fakecuda {

struct Capture {
  uint64_t id = 0;
  int mode = 0;                  // a cudaStreamCaptureMode
  uint64_t thread = 0;           // that began it
  Stream* origin = nullptr;      // where it began, and must end
  bool invalidated = false;      // by a call that CUDA forbids; the end of the capture fails
  std::vector<Operation> nodes;  // in an order in which a graph may run them

  // Number of steps of each stream in the capture, and number of every other stream's steps before its last step.
  std::map<Stream*, uint64_t> length;
  std::map<Stream*, std::map<Stream*, uint64_t>> follows;

  void advance(Stream* stream) { follows[stream][stream] = ++length[stream]; }
  void join(Stream* stream, const Recording& recording);
  bool is_joined_by(Stream* stream);  // true if `stream` follows all streams of the capture
};
using CapturePtr = std::shared_ptr<Capture>;

inline void Capture::join(Stream* stream, const Recording& recording) {
  auto& before = follows[stream];
  for (const auto& [other, position] : recording.follows) before[other] = std::max(before[other], position);
  advance(stream);
}

inline bool Capture::is_joined_by(Stream* stream) {
  auto& before = follows[stream];
  for (const auto& [other, steps] : length) {
    if (before[other] < steps) return false;
  }
  return true;
}

// An instantiated graph, or one to be instantiated.
struct Graph {
  std::vector<Operation> nodes;
};

}  // namespace fakecuda
