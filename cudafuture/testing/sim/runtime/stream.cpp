#include "sim/runtime/stream.h"

#include <iterator>

namespace sim {

bool Recording::reached() const noexcept { return !is_of(stream->generation()) || stream->done() >= position; }

namespace runtime {

std::string name_of_device(int device) { return "sim:" + std::to_string(device); }

std::string name_of(StreamName stream) {
  const std::string device = name_of_device(stream.device);
  return stream.id == 0 ? "the default stream of " + device : "stream " + std::to_string(stream.id) + " of " + device;
}

void Stream::reset(std::uint64_t generation) {
  generation_ = generation;
  enqueued_ = done_ = 0;
  clock.reset();
  time = 0;
  speeds.reset();
  capture.reset();
}

RecordingPtr Stream::record() {
  auto recording = std::make_shared<Recording>();
  recording->stream = this;
  recording->generation = generation_;
  recording->position = enqueued_;
  recording->seen = clock.snapshot();
  recording->time = time;
  recording->capture = capture;
  return recording;
}

void Stream::push(Item&& item) {
  queue_.push_back(std::move(item));
  ++enqueued_;
}

bool Stream::can_step() const noexcept {
  if (busy_ || queue_.empty()) return false;
  const Item& head = queue_.front();
  if (const auto* recording = std::get_if<RecordingPtr>(&head)) return (*recording)->reached();
  if (const auto* gate = std::get_if<GatePtr>(&head)) return (*gate)->is_open;
  return true;
}

Item Stream::take() {
  Item head = std::move(queue_.front());
  queue_.pop_front();
  busy_ = true;
  return head;
}

void Stream::finish() noexcept {
  busy_ = false;
  done_ = enqueued_ - queue_.size();
}

void Stream::drop_queue(std::vector<Item>& dropped) {
  dropped.insert(dropped.end(), std::make_move_iterator(queue_.begin()), std::make_move_iterator(queue_.end()));
  queue_.clear();
  if (!busy_) done_ = enqueued_;
}

}  // namespace runtime
}  // namespace sim
