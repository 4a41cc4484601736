#include "sim/runtime/accelerator.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "sim/runtime/machine.h"
#include "sim/runtime/process.h"

namespace sim {

using namespace runtime;

struct Accelerator::State final : Machine {};

Accelerator::Accelerator() : state_(new State) {}

Accelerator& Accelerator::get() noexcept {
  static Accelerator* const accelerator = new Accelerator;
  return *accelerator;
}

// ---- life

void Accelerator::start(const Settings& settings) {
  MachineCall entry(*state_);
  state_->start(entry.lock, settings);
}

void Accelerator::stop() {
  MachineCall entry(*state_);
  state_->stop(entry.lock);
}

Settings Accelerator::settings() const {
  const MachineCall entry(*state_);
  return state_->settings;
}

int Accelerator::device_count() const noexcept { return state_->device_count.load(std::memory_order_relaxed); }

// ---- streams: an id says what there is to know

namespace {

// The index of a priority; throws for one that no stream has.
std::size_t level_of(int priority) {
  if (priority > kLowestPriority) {
    throw std::invalid_argument("the priority of a stream is 0 or negative (more urgent), not " +
                                std::to_string(priority));
  }
  return static_cast<std::size_t>(kLowestPriority - std::max(priority, kHighestPriority));
}

}  // namespace

StreamName Accelerator::new_stream(int device, int priority) {
  const MachineCall entry(*state_);
  const std::size_t level = level_of(priority);
  int& next = state_->device(device).next[level];
  const int index = next;
  next = (next + 1) % kStreamsPerPriority;
  make_context(device);
  return {device, 1 + static_cast<int>(level) * kStreamsPerPriority + index};
}

StreamName Accelerator::own_stream(int device, int priority) {
  const MachineCall entry(*state_);
  const std::size_t level = level_of(priority);
  int& made = state_->device(device).own[level];
  if (made == kOwnStreamsPerPriority) {
    throw std::runtime_error(name_of_device(device) + " has " + std::to_string(made) +
                             " streams of this priority outside of the pool, and cannot make more");
  }
  make_context(device);
  return {device, 1 + kPoolStreams + static_cast<int>(level) * kOwnStreamsPerPriority + made++};
}

bool Accelerator::has_stream(StreamName stream) const noexcept {
  return stream.device >= 0 && stream.device < device_count() && stream.id >= 0 && stream.id < kStreamsPerDevice;
}

int Accelerator::priority_of(StreamName stream) const noexcept {
  if (stream.id <= 0) return kLowestPriority;
  const std::int64_t index = stream.id - 1;
  const std::int64_t level =
      index < kPoolStreams ? index / kStreamsPerPriority : (index - kPoolStreams) / kOwnStreamsPerPriority;
  return kLowestPriority - static_cast<int>(level);
}

void Accelerator::begin_capture(StreamName stream, CaptureMode mode) {
  const MachineCall entry(*state_);
  state_->begin_capture(state_->stream(stream), mode);
}

void Accelerator::end_capture(StreamName stream) {
  const MachineCall entry(*state_);
  state_->end_capture(state_->stream(stream));
}

std::uint64_t Accelerator::capture_of(StreamName stream) const {
  if (!state_->any_capture.load(std::memory_order_relaxed)) return 0;  // asked for each event that is recorded
  const MachineCall entry(*state_);
  const CapturePtr& capture = state_->stream(stream).capture;
  return capture == nullptr ? 0 : capture->number;
}

bool Accelerator::is_idle(StreamName stream) const {
  const MachineCall entry(*state_);
  return state_->stream(stream).is_idle();
}

void Accelerator::make_context(int device) noexcept {
  if (device < 0 || device >= device_count()) return;
  std::atomic<bool>& has_context = state_->devices[static_cast<std::size_t>(device)].has_context;
  if (!has_context.load(std::memory_order_relaxed)) has_context.store(true, std::memory_order_relaxed);
}

bool Accelerator::has_context(int device) const noexcept {
  return device >= 0 && device < device_count() && state_->devices[static_cast<std::size_t>(device)].has_context;
}

void Accelerator::submit(StreamName stream, Work&& work) {
  make_context(stream.device);
  MachineCall entry(*state_);
  state_->submit(entry.lock, state_->stream(stream), std::move(work));
}

RecordingPtr Accelerator::record(StreamName stream) {
  make_context(stream.device);
  MachineCall entry(*state_);
  ++state_->counts.recorded;
  Stream& recorded = state_->stream(stream);
  recorded.time = std::max(recorded.time, HostClock::current().now());  // an event is enqueued, as work is
  RecordingPtr recording = recorded.record();
  state_->runner.after_call(entry.lock);
  return recording;
}

void Accelerator::wait(StreamName stream, const RecordingPtr& recording) {
  make_context(stream.device);
  MachineCall entry(*state_);
  state_->wait(entry.lock, state_->stream(stream), recording);
}

// ---- the host waits

bool Accelerator::query(const RecordingPtr& recording) {
  MachineCall entry(*state_);
  return state_->query(entry.lock, recording);
}

bool Accelerator::query(StreamName stream) {
  MachineCall entry(*state_);
  return state_->query(entry.lock, state_->stream(stream).record());
}

void Accelerator::synchronize(const RecordingPtr& recording) {
  MachineCall entry(*state_);
  state_->synchronize(entry.lock, recording);
}

void Accelerator::synchronize(StreamName stream) {
  MachineCall entry(*state_);
  state_->synchronize(entry.lock, state_->stream(stream).record());
}

void Accelerator::synchronize(int device) {
  make_context(device);
  MachineCall entry(*state_);
  state_->synchronize_device(entry.lock, device);
}

GatePtr Accelerator::hold(StreamName stream) {
  const MachineCall entry(*state_);
  auto gate = std::make_shared<Gate>();
  state_->runner.push(state_->stream(stream), GatePtr(gate));
  return gate;
}

void Accelerator::open(const GatePtr& gate) {
  MachineCall entry(*state_);
  if (gate == nullptr || std::exchange(gate->is_open, true)) return;
  state_->runner.wake();
  state_->runner.after_call(entry.lock);
}

// ---- virtual time

double Accelerator::now() const {
  refuse_after_fork();
  return HostClock::current().now();
}

double Accelerator::time_of(const RecordingPtr& recording) const { return recording == nullptr ? 0 : recording->time; }

void Accelerator::spend(double seconds) {
  refuse_after_fork();
  HostClock::current().spend(seconds);
}

void Accelerator::set_speeds(std::optional<StreamName> stream, const Speeds& speeds) {
  const MachineCall entry(*state_);
  if (stream.has_value()) {
    state_->stream(*stream).speeds = speeds;
    return;
  }
  state_->settings.speeds = speeds;
  for (SimDevice& device : state_->devices) {
    for (const auto& each : device.streams) {
      if (each != nullptr) each->speeds.reset();
    }
  }
}

// ---- device memory

void* Accelerator::allocate(int device, std::size_t bytes, StreamName stream, SitePtr site) {
  make_context(device);
  MachineCall entry(*state_);
  if (stream.device != device) {
    throw std::invalid_argument("memory of " + name_of_device(device) + " cannot be allocated on " + name_of(stream));
  }
  Stream& owner = state_->stream(stream);
  return bytes == 0 ? nullptr : state_->allocate(entry.lock, device, bytes, owner, site);
}

void Accelerator::deallocate(void* pointer) noexcept {
  if (is_forked_child() || !address_space::is_shown(pointer)) return;
  const MachineCall entry(*state_);
  auto& memory = state_->devices[static_cast<std::size_t>(address_space::device_of(pointer))].memory;
  if (memory.has_value()) memory->give(pointer, state_->races.shadow);
}

void Accelerator::record_use(const void* pointer, StreamName stream) {
  const MachineCall entry(*state_);
  Stream& user = state_->stream(stream);
  if (!address_space::is_shown(pointer)) return;
  auto& memory = state_->devices[static_cast<std::size_t>(address_space::device_of(pointer))].memory;
  if (memory.has_value()) memory->use(pointer, user);
}

std::optional<int> Accelerator::device_of(const void* pointer) const noexcept {
  if (!address_space::is_shown(pointer)) return std::nullopt;
  return address_space::device_of(pointer);
}

void* Accelerator::alias(const void* pointer) noexcept { return address_space::alias(pointer); }

void Accelerator::empty_cache() {
  MachineCall entry(*state_);
  state_->empty_cache(entry.lock);
}

MemoryStatistics Accelerator::memory_statistics(int device) const {
  const MachineCall entry(*state_);
  return state_->memory(device).statistics();
}

void Accelerator::reset_memory_totals(int device) {
  const MachineCall entry(*state_);
  state_->memory(device).reset_totals();
}

void Accelerator::reset_memory_peak(int device) {
  const MachineCall entry(*state_);
  state_->memory(device).reset_peak();
}

// ---- pinned memory

void* Accelerator::allocate_pinned(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  void* pointer = nullptr;
  bool poison = false;
  {
    MachineCall entry(*state_);
    state_->refuse_in_captures("an allocation of pinned memory", nullptr);
    pointer = state_->pinned.take(bytes, state_->races.shadow);
    poison = state_->settings.poison;
    state_->runner.after_call(entry.lock);
  }
  if (poison) std::memset(pointer, kPoison, bytes);
  return pointer;
}

void Accelerator::deallocate_pinned(void* pointer) noexcept {
  if (is_forked_child() || !address_space::is_pinned(pointer)) return;
  const MachineCall entry(*state_);
  state_->pinned.give(pointer);
}

bool Accelerator::is_pinned(const void* pointer) const noexcept { return address_space::is_pinned(pointer); }

bool Accelerator::any_pinned_in_flight() const noexcept { return state_->pinned.any_in_flight(); }

void Accelerator::host_access(const std::vector<MemoryAccess>& accesses, SitePtr site) {
  if (!any_pinned_in_flight()) return;
  const MachineCall entry(*state_);
  state_->host_access(accesses, site);
}

// ---- findings

void Accelerator::report(Report&& report) {
  const MachineCall entry(*state_);
  state_->races.findings.add(std::move(report));
}

std::vector<Report> Accelerator::take_reports() {
  std::vector<Finding> found;
  {
    const MachineCall entry(*state_);
    found = state_->races.findings.take();
  }
  std::vector<Report> reports;
  reports.reserve(found.size());
  for (Finding& finding : found) reports.push_back(describe(std::move(finding)));
  return reports;
}

std::size_t Accelerator::report_count() const noexcept { return state_->races.findings.count(); }

std::exception_ptr Accelerator::error_of(int device) const {
  const MachineCall entry(*state_);
  return state_->device(device).error;
}

void Accelerator::clear_error(int device) {
  const MachineCall entry(*state_);
  state_->clear_error(device);
}

Statistics Accelerator::statistics() const {
  const MachineCall entry(*state_);
  return state_->statistics();
}

void Accelerator::set_sleep_hooks(void* (*before)(), void (*after)(void*), void (*check)()) noexcept {
  state_->runner.set_sleep_hooks(before, after, check);
}

void Accelerator::set_run_hook(void (*hook)(const std::function<void()>& run)) noexcept {
  state_->runner.set_run_hook(hook);
}

}  // namespace sim
