#include "store/service/order.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <utility>

#include "clock.h"

namespace rpc_ext::store {
namespace {

constexpr std::size_t kPurge = 1024;  // operations between two searches for keys that nothing can refer to any more

Problem superseded(const std::string& key) {
  return {.kind = Problem::Kind::timeout,
          .message = "the request to change key '" + key + "' has reached the store service after a later one"};
}

Problem too_late(double seconds) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.3g", seconds);
  return {.kind = Problem::Kind::timeout,
          .message = std::string("the request has reached the store service ") + text.data() + " s after its deadline"};
}

}  // namespace

// ---- Begins

void Begins::run(std::vector<Begin>&& functions) {
  if (functions.empty()) return;
  std::unique_lock lock(mutex_);
  std::move(functions.begin(), functions.end(), std::back_inserter(functions_));
  if (is_running_) return;
  is_running_ = true;
  while (!functions_.empty()) {
    {
      const Begin begin = std::move(functions_.front());
      functions_.pop_front();
      lock.unlock();
      begin();
    }
    lock.lock();
  }
  is_running_ = false;
}

// ---- ClockOffset

void ClockOffset::add(double arrived, double sent) {
  if (arrived >= begun_ + window) {
    begun_ = arrived;
    before_ = std::exchange(recent_, none);
  }
  recent_ = std::min(recent_, arrived - sent);
}

// ---- RequestOrder

RequestOrder::RequestOrder(double sent, std::shared_ptr<std::atomic<std::uint64_t>> late)
    : late_(std::move(late)), until_purge_(kPurge) {
  offset_.add(now(), sent);
}

void RequestOrder::note_arrival(double sent, std::uint64_t oldest) {
  const std::lock_guard lock(mutex_);
  offset_.add(now(), sent);
  oldest_ = std::max(oldest_, oldest);
}

void RequestOrder::enqueue(const KeyEntry& entry, KeyQueues& queues, bool is_change, Turn turn) {
  const auto queued = std::make_shared<const Queued>(Queued{entry, queues, is_change, std::move(turn)});
  if (arrive(entry.key, entry.after, [this, queued] { enter(queued); })) enter(queued);
}

// Takes a place in the key's queue.
void RequestOrder::enter(const QueuedPtr& queued) {
  const auto& [entry, queues, is_change, turn] = *queued;
  bool has_turn = false;
  if (is_change && !note_change(entry.key, entry.sequence, entry.expires)) {
    turn(superseded(entry.key));
  } else {
    has_turn = queues.enter(entry.key, is_change, [this, queued] { take_turn(*queued); });
  }
  if (has_turn && !is_change) take_turn(*queued);  // before a later change begins
  pass_on(entry.key, entry.sequence);
  if (has_turn && is_change) take_turn(*queued);
}

void RequestOrder::take_turn(const Queued& queued) {
  auto problem = late(queued.entry.expires);
  const bool leaves = problem && queued.is_change;
  queued.turn(std::move(problem));
  if (leaves) queued.queues.leave(queued.entry.key);
}

bool RequestOrder::arrive(const std::string& key, std::uint64_t after, Begin begin) {
  const std::lock_guard lock(mutex_);
  if (after == 0 || after < oldest_ || has_ended_) return true;
  const auto found = latest_.find(key);
  if (found != latest_.end() && found->second >= after) return true;
  early_[key].emplace(after, std::move(begin));
  return false;
}

bool RequestOrder::note_change(const std::string& key, std::uint64_t sequence, double expires) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = changes_.find(key);
    if (found == changes_.end() || found->second.sequence <= sequence) {
      if (expires != 0) changes_[key] = {sequence, expires};
      return true;
    }
  }
  late_->fetch_add(1, std::memory_order_relaxed);
  return false;
}

void RequestOrder::pass_on(const std::string& key, std::uint64_t sequence) {
  std::vector<Begin> begins;
  {
    const std::lock_guard lock(mutex_);
    std::uint64_t& latest = latest_[key];
    latest = std::max(latest, sequence);
    if (const auto early = early_.find(key); early != early_.end()) {
      auto& waiting = early->second;
      while (!waiting.empty() && waiting.begin()->first <= latest) {
        begins.push_back(std::move(waiting.begin()->second));
        waiting.erase(waiting.begin());
      }
      if (waiting.empty()) early_.erase(early);
    }
    if (--until_purge_ == 0) purge();
  }
  begins_.run(std::move(begins));
}

void RequestOrder::end() {
  std::vector<Begin> begins;
  {
    const std::lock_guard lock(mutex_);
    has_ended_ = true;
    for (auto& [key, waiting] : early_) {
      for (auto& [after, begin] : waiting) begins.push_back(std::move(begin));
    }
    early_.clear();
  }
  begins_.run(std::move(begins));
}

std::optional<Problem> RequestOrder::late(double expires) {
  const double seconds = -left(expires);
  if (expires == 0 || seconds <= 0) return std::nullopt;
  late_->fetch_add(1, std::memory_order_relaxed);
  return too_late(seconds);
}

double RequestOrder::left(double expires) const {
  if (expires == 0) return std::numeric_limits<double>::infinity();
  const std::lock_guard lock(mutex_);
  return expires + offset_.seconds() - now();
}

std::size_t RequestOrder::remembered() const {
  const std::lock_guard lock(mutex_);
  return latest_.size() + changes_.size();
}

// Forgets the operations and changes that no later arrival can refer to, or be late for.
void RequestOrder::purge() {
  const double client_now = now() - offset_.seconds();
  std::erase_if(latest_, [&](const auto& item) { return item.second < oldest_; });
  std::erase_if(changes_, [&](const auto& item) { return item.second.expires < client_now; });
  until_purge_ = std::max(kPurge, latest_.size() + changes_.size());
}

// ---- KeyQueues

bool KeyQueues::enter(const std::string& key, bool is_change, Begin begin) {
  const std::lock_guard lock(mutex_);
  const auto found = waiting_.find(key);
  if (found != waiting_.end()) {
    found->second.push_back({is_change, std::move(begin)});
    return false;
  }
  if (is_change) waiting_.emplace(key, std::deque<Waiting>());
  return true;
}

void KeyQueues::leave(const std::string& key) {
  std::vector<Begin> begins;
  {
    const std::lock_guard lock(mutex_);
    const auto found = waiting_.find(key);
    if (found == waiting_.end()) return;
    std::deque<Waiting>& waiting = found->second;
    bool has_change = false;
    while (!waiting.empty() && !has_change) {
      has_change = waiting.front().is_change;
      begins.push_back(std::move(waiting.front().begin));
      waiting.pop_front();
    }
    if (!has_change && !begins.empty()) {
      begins.push_back([this, key] { leave(key); });  // changes wait until these reads have begun
    } else if (!has_change) {
      waiting_.erase(found);
    }
  }
  begins_.run(std::move(begins));
}

}  // namespace rpc_ext::store
