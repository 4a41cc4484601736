#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "python.h"
#include "seal/seal.h"

namespace rpc_ext {

// Counts refused messages by the rank that they claim to come from (-1: none), and tells Python of the first of each,
// in a thread of its own: TensorPipe's threads do not wait for the GIL.
class Refusals : public std::enable_shared_from_this<Refusals> {
 public:
  explicit Refusals(py::object tell) : tell_(std::move(tell)) {}

  void add(const Refused& refused);

  // Waits until Python has been told of all that are counted. Called without the GIL.
  std::map<int, std::uint64_t> counts();

 private:
  void tell(const Refused& refused);
  void end_telling();

  std::mutex mutex_;  // guards what follows; a leaf
  std::condition_variable told_;
  std::map<int, std::uint64_t> counts_;
  int telling_ = 0;
  Held tell_;
};

}  // namespace rpc_ext
