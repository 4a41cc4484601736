// A stream: what is enqueued, first in, first out; what its work has seen of others; and its virtual time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "sim/runtime/accelerator.h"
#include "sim/runtime/recording.h"

namespace sim::runtime {

struct StreamTask {
  std::function<void()> run;
  SitePtr site;
};
constexpr int kPoison = 0xFF;  // bytes of fresh memory: NaN in every float type

struct Fill {
  void* begin;
  std::size_t bytes;
};
using Item = std::variant<StreamTask, Fill, RecordingPtr, GatePtr>;

std::string name_of_device(int device);
std::string name_of(StreamName stream);

class Stream {
 public:
  explicit Stream(StreamName name) : name(name) {}

  void reset(std::uint64_t generation);  // starts afresh, with an empty queue

  RecordingPtr record();

  // ---- the queue
  void push(Item&& item);
  bool can_step() const noexcept;  // the head is there, and may run or go
  Item take();                     // the head; the stream is busy until finish()
  void finish() noexcept;
  void drop_queue(std::vector<Item>& dropped);
  bool is_idle() const noexcept { return done_ == enqueued_; }
  std::uint64_t done() const noexcept { return done_; }
  std::uint64_t enqueued() const noexcept { return enqueued_; }
  std::uint64_t generation() const noexcept { return generation_; }
  // Calls visit(item) for what stands between two positions: after the first `from` items, up to the first `to`.
  template <class Visit>
  void each_between(std::uint64_t from, std::uint64_t to, Visit&& visit) const;

  const StreamName name;
  StreamClock clock;  // its agent is added when the stream is first used
  double time = 0;    // when its last piece of work ends
  std::optional<Speeds> speeds;
  CapturePtr capture;   // null: what is enqueued runs
  bool listed = false;  // by the runner, as one that has something to do

 private:
  std::uint64_t generation_ = 0;
  std::deque<Item> queue_;
  bool busy_ = false;
  std::uint64_t enqueued_ = 0;
  std::uint64_t done_ = 0;
};

template <class Visit>
void Stream::each_between(std::uint64_t from, std::uint64_t to, Visit&& visit) const {
  const std::uint64_t head = enqueued_ - queue_.size();  // items before the head
  for (std::uint64_t i = std::max(from, head); i < std::min(to, enqueued_); ++i) {
    visit(queue_[static_cast<std::size_t>(i - head)]);
  }
}

}  // namespace sim::runtime
