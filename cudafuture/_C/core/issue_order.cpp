#include "core/issue_order.h"

#include <algorithm>

namespace cudafuture {
namespace {

thread_local IssueOrder::Running* innermost = nullptr;

bool begins_with(const IssueOrder::Position& whole, const IssueOrder::Position& part) {
  return part.size() <= whole.size() && std::equal(part.begin(), part.end(), whole.begin());
}

}  // namespace

IssueOrder& IssueOrder::get() noexcept {
  static auto* order = new IssueOrder;  // leaked: serial queues live until the process ends
  return *order;
}

IssueOrder::Running::Running(const Position& position) noexcept : position_(position), outer_(innermost) {
  innermost = this;
}
IssueOrder::Running::~Running() { innermost = outer_; }

IssueOrder::Position IssueOrder::enter() {
  Position position;
  if (innermost != nullptr) {
    if (innermost->position_.empty()) return position;
    position = innermost->position_;
  }
  std::lock_guard lock(mutex_);
  position.push_back(innermost != nullptr ? ++innermost->attached_ : ++attached_);
  pending_.insert(position);
  count_.fetch_add(1, std::memory_order_release);
  return position;
}

void IssueOrder::leave(const Position& position) noexcept {
  std::lock_guard lock(mutex_);
  pending_.erase(position);
  count_.fetch_sub(1, std::memory_order_release);
  left_.notify_all();
}

// A callback waits for the callbacks before it, except those inside which it was attached, and for those that it
// attached itself. The program waits for all callbacks.
bool IssueOrder::is_turn(const Position& here) const {
  for (const Position& other : pending_) {
    if (begins_with(here, other)) continue;
    return !here.empty() && other > here && !begins_with(other, here);
  }
  return true;
}

bool IssueOrder::wait_until(Clock::time_point deadline) {
  if (count_.load(std::memory_order_acquire) == 0) return true;
  static const Position program;
  const Position& here = innermost != nullptr ? innermost->position_ : program;
  std::unique_lock lock(mutex_);
  return left_.wait_until(lock, deadline, [&] { return is_turn(here); });
}

}  // namespace cudafuture
