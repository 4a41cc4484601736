// A worker that is called: the calls and bytes in flight to it, which are limited, and counts of all calls.
//
// Any thread may use it, with or without the GIL. The class of Python derives from this one, and adds the calls that
// wait for room.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "histogram.h"
#include "python.h"

namespace rpc_ext {

class Destination : public std::enable_shared_from_this<Destination> {
 public:
  struct Counts {
    std::uint64_t calls = 0, failed = 0, in_flight = 0, bytes_in_flight = 0, bytes_sent = 0, bytes_received = 0;
  };

  Destination(std::string name, int rank, std::uint64_t max_calls, std::uint64_t max_bytes)
      : name(std::move(name)), rank(rank), max_calls(max_calls), max_bytes(max_bytes) {}

  // Takes room for a call of `size` bytes. False: there is none, or other calls wait for it. A call of more bytes than
  // the limit has room when no other call is in flight.
  bool try_admit(std::uint64_t size) { return waiting == 0 && take_room(size); }
  bool take_room(std::uint64_t size);  // even if other calls wait

  // Undoes the admission of a call that is not sent. As finish(), it takes the GIL if a thread of Python waits.
  void give_back(std::uint64_t size);

  // Counts the end of a call that began at `started` (seconds of the monotonic clock), with a reply of `received`
  // bytes.
  void finish(std::uint64_t size, double started, std::uint64_t received, bool has_failed);

  Counts counts() const;
  Histogram latencies() const;

  const std::string name;
  const int rank;
  const std::uint64_t max_calls, max_bytes;

  // ---- set by Python, which then looks once more: a call that ended before calls no note_room()
  std::atomic<std::uint64_t> waiting{0};  // calls that wait for room
  std::atomic<bool> is_awaited{false};    // a thread waits until no call is in flight

 private:
  bool fits(std::uint64_t size) const noexcept;
  void note_room(bool is_idle);

  mutable std::mutex mutex_;  // guards what follows; a leaf
  Counts counts_;
  Histogram latencies_;
};

using DestinationPtr = std::shared_ptr<Destination>;

}  // namespace rpc_ext
