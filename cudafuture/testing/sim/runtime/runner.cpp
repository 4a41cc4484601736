#include "sim/runtime/runner.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>

namespace sim::runtime {
namespace {

constexpr auto kCheckInterval = std::chrono::milliseconds(50);

thread_local bool in_work = false;

struct InsideWork {
  InsideWork() { in_work = true; }
  ~InsideWork() { in_work = false; }
};

std::string first_line_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    const std::string text = e.what();
    return text.substr(0, text.find('\n'));
  } catch (...) {
    return "an exception of an unknown type";
  }
}

}  // namespace

bool Runner::inside_work() noexcept { return in_work; }

void Runner::settle(Lock& lock) {
  if (in_work) throw std::logic_error("work that runs on a simulated device may not start or stop the accelerator");
  Clock::time_point next_check = Clock::now() + kCheckInterval;
  while (running_ > 0) sleep(lock, next_check);
}

void Runner::start(WorkSchedule schedule, std::uint64_t seed) {
  for (Stream* stream : listed_) stream->listed = false;
  listed_.clear();
  policy_.start(schedule, seed);
  executed = 0;
  wake();
}

void Runner::push(Stream& stream, Item&& item) {
  stream.push(std::move(item));
  if (stream.listed) return;
  stream.listed = true;
  listed_.push_back(&stream);
}

void Runner::drop_queue(Stream& stream) {
  const std::size_t before = dropped_.size();
  stream.drop_queue(dropped_);
  dropped_tasks += static_cast<std::uint64_t>(
      std::count_if(dropped_.begin() + static_cast<std::ptrdiff_t>(before), dropped_.end(),
                    [](const Item& item) { return std::holds_alternative<StreamTask>(item); }));
  if (stream.is_idle()) unlist(stream);
}

void Runner::after_call(Lock& lock) {
  if (in_work || listed_.empty()) return;
  switch (policy_.schedule()) {
    case WorkSchedule::free:
      while (step_any(lock)) {
      }
      break;
    case WorkSchedule::jitter:
      for (int i = policy_.steps(); i > 0 && step_any(lock); --i) {
      }
      break;
    case WorkSchedule::lazy:
      break;
  }
}

void Runner::after_query(Lock& lock, const std::vector<RecordingPtr>& asked) {
  if (in_work || listed_.empty()) return;
  const Needs needs = closure(asked);
  switch (policy_.schedule()) {
    case WorkSchedule::free:
      break;
    case WorkSchedule::jitter:
      step_towards(lock, needs);
      break;
    case WorkSchedule::lazy:
      while (step_towards(lock, needs)) {
      }
      break;
  }
  after_call(lock);
}

void Runner::run_until(Lock& lock, const std::vector<RecordingPtr>& wanted) {
  const auto all_reached = [&] {
    return std::all_of(wanted.begin(), wanted.end(), [](const RecordingPtr& r) { return r->reached(); });
  };
  if (all_reached()) return;
  if (in_work) throw std::logic_error("work that runs on a simulated device may not wait for a device");
  const Needs needs = closure(wanted);
  Clock::time_point next_check = Clock::now() + kCheckInterval;
  while (!all_reached()) {
    if (!step_towards(lock, needs)) sleep(lock, next_check);
  }
  if (policy_.schedule() == WorkSchedule::free) after_call(lock);  // work queued behind a busy stream
}

void Runner::wake() noexcept {
  ++changes_;
  if (sleepers_ > 0) changed_.notify_all();
}

void Runner::set_sleep_hooks(void* (*before)(), void (*after)(void*), void (*check)()) noexcept {
  before_sleep_ = before;
  after_sleep_ = after;
  check_ = check;
}

// Returns the work that must be done for the recordings: on each stream the items before a position, and the work that
// those items wait for. Later enqueues do not change the result, since a wait only looks back.
Runner::Needs Runner::closure(const std::vector<RecordingPtr>& wanted) {
  Needs needs;
  const auto need = [&needs](const Recording& recording) {
    if (recording.reached()) return;
    const auto same = [&](const Need& n) { return n.stream == recording.stream; };
    const auto known = std::find_if(needs.begin(), needs.end(), same);
    if (known == needs.end()) {
      needs.push_back({recording.stream, recording.position, 0});
    } else {
      known->position = std::max(known->position, recording.position);
    }
  };
  for (const RecordingPtr& recording : wanted) need(*recording);
  const auto unsearched = [](const Need& n) { return n.searched < n.position; };
  for (auto at = needs.begin(); at != needs.end(); at = std::find_if(needs.begin(), needs.end(), unsearched)) {
    const Need here = *at;
    at->searched = here.position;
    here.stream->each_between(here.searched, here.position, [&](const Item& item) {
      if (const auto* recording = std::get_if<RecordingPtr>(&item)) need(**recording);
    });
  }
  return needs;
}

bool Runner::step_towards(Lock& lock, const Needs& needs) {
  std::vector<Stream*> ready;
  for (const Need& need : needs) {
    if (need.stream->done() < need.position && need.stream->can_step()) ready.push_back(need.stream);
  }
  if (ready.empty()) return false;
  step(lock, *ready[policy_.choose(ready.size())]);
  return true;
}

bool Runner::step_any(Lock& lock) {
  if (policy_.schedule() == WorkSchedule::free) {
    const auto first = std::find_if(listed_.begin(), listed_.end(), [](Stream* s) { return s->can_step(); });
    if (first == listed_.end()) return false;
    step(lock, **first);
    return true;
  }
  std::vector<Stream*> ready;
  std::copy_if(listed_.begin(), listed_.end(), std::back_inserter(ready), [](Stream* s) { return s->can_step(); });
  if (ready.empty()) return false;
  step(lock, *ready[policy_.choose(ready.size())]);
  return true;
}

void Runner::step(Lock& lock, Stream& stream) {
  Item item = stream.take();
  const bool runs = std::holds_alternative<StreamTask>(item) || std::holds_alternative<Fill>(item);
  if (runs) run(lock, stream, item);
  stream.finish();
  if (stream.is_idle()) unlist(stream);
  wake();
}

void Runner::run(Lock& lock, Stream& stream, Item& item) {
  if (std::holds_alternative<StreamTask>(item)) ++executed;
  ++running_;
  lock.unlock();
  Failure failure;
  {
    const InsideWork inside;
    failure = perform(stream, item);
    item = Fill{};  // destroys the closure while no lock is held
  }
  lock.lock();
  --running_;
  if (failure.error != nullptr) on_error_(stream, std::move(failure.error), std::move(failure.report));
}

Runner::Failure Runner::perform(const Stream& stream, const Item& item) const noexcept {
  if (const auto* fill = std::get_if<Fill>(&item)) {
    std::memset(fill->begin, kPoison, fill->bytes);
    return {};
  }
  const StreamTask& task = std::get<StreamTask>(item);
  try {
    if (auto* const hook = run_hook_.load(); hook != nullptr) {
      hook(task.run);
    } else {
      task.run();
    }
    return {};
  } catch (...) {
    Failure failure{std::current_exception(), {}};
    const std::string operation = task.site == nullptr ? "work" : task.site->operation();
    failure.report.kind = Report::Kind::error;
    failure.report.summary = operation + " failed on " + name_of(stream.name) + ": " + first_line_of(failure.error);
    failure.report.later = task.site;
    return failure;
  }
}

// A wait keeps `next_check` from one sleep to the next: otherwise unrelated changes could defer the check without end.
void Runner::sleep(Lock& lock, Clock::time_point& next_check) {
  const std::uint64_t seen = changes_;
  auto* const before = before_sleep_.load();
  auto* const after = after_sleep_.load();
  std::exception_ptr interruption;
  ++sleepers_;
  lock.unlock();
  void* const token = before == nullptr ? nullptr : before();
  lock.lock();
  do {
    interruption = sleep_until_change(lock, seen, next_check);
  } while (changes_ == seen && interruption == nullptr);
  --sleepers_;
  lock.unlock();
  if (after != nullptr) after(token);
  lock.lock();
  if (interruption != nullptr) std::rethrow_exception(interruption);
}

// Sleeps until something changes or the check throws, and returns the check's exception, or null.
std::exception_ptr Runner::sleep_until_change(Lock& lock, std::uint64_t seen, Clock::time_point& next_check) {
  const auto has_changed = [&] { return changes_ != seen; };
  auto* const check = check_.load();
  if (check == nullptr) {
    changed_.wait(lock, has_changed);
    return nullptr;
  }
  changed_.wait_until(lock, next_check, has_changed);
  if (Clock::now() < next_check) return nullptr;
  std::exception_ptr thrown;
  lock.unlock();
  try {
    check();
  } catch (...) {
    thrown = std::current_exception();
  }
  lock.lock();
  next_check = Clock::now() + kCheckInterval;
  return thrown;
}

void Runner::unlist(Stream& stream) {
  if (!stream.listed) return;
  stream.listed = false;
  listed_.erase(std::find(listed_.begin(), listed_.end(), &stream));
}

}  // namespace sim::runtime
