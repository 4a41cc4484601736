#include "fake_device.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "core/device_functions.h"
#include "fake_runtime.h"

namespace cudafuture::fake {
namespace {

using c10::impl::DeviceGuardImplInterface;

// One recording of an event. A stream that waits for the event waits for this recording, not for later ones.
struct Recording {
  bool reached = false;
};
using RecordingPtr = std::shared_ptr<Recording>;

struct Event {
  int number;
  int device;
  RecordingPtr last;
};

// An entry in a stream.
struct Step {
  enum Kind { work, record, wait } kind;
  bool may_end = false;    // of work
  RecordingPtr recording;  // of record and wait
};

using StreamKey = std::pair<int, c10::StreamId>;
StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

struct Machine {
  std::mutex mutex;
  std::condition_variable moved;
  std::map<StreamKey, std::deque<Step>> streams;
  std::vector<Note> notes;
  std::set<int> failing_queries;
  std::set<int> failing_recordings;
  std::set<int> lost;
  std::map<StreamKey, std::uint64_t> capturing;  // the numbers of captures
  std::function<void()> after_query;
  int events_made = 0;
  int events_alive = 0;
  c10::StreamId streams_made = 0;

  // Advance every stream as far as possible.
  void run() {
    for (bool progress = true; progress;) {
      progress = false;
      for (auto& [key, steps] : streams) {
        while (!steps.empty() && step(steps.front())) {
          steps.pop_front();
          progress = true;
        }
      }
    }
    moved.notify_all();
  }

  static bool step(const Step& step) {
    switch (step.kind) {
      case Step::work:
        return step.may_end;
      case Step::record:
        step.recording->reached = true;
        return true;
      case Step::wait:
        return step.recording->reached;
    }
    return true;
  }

  void end_work(std::deque<Step>& steps) {
    for (Step& step : steps) step.may_end = true;
  }
};

Machine& state() {
  static auto* const machine = new Machine;  // never freed: events may be destroyed until the process ends
  return *machine;
}

thread_local int current_device = 0;
thread_local c10::StreamId current_stream_ids[kDevices] = {};

class Guard final : public DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Device getDevice() const override { return device(current_device); }
  c10::Device exchangeDevice(c10::Device d) const override {
    Machine& s = state();
    std::lock_guard lock(s.mutex);
    if (s.lost.contains(d.index())) throw DeviceFailure("the device is lost");
    return device(std::exchange(current_device, checked(d)));
  }
  void setDevice(c10::Device d) const override { current_device = checked(d); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current_device = d.index(); }

  c10::Stream getStream(c10::Device d) const override { return stream(d.index(), current_stream_ids[checked(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(d.index(), 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    return stream(s.device_index(), std::exchange(current_stream_ids[checked(s.device())], s.id()));
  }
  c10::Stream getNewStream(c10::Device d, int priority) const override {
    Machine& s = state();
    std::lock_guard lock(s.mutex);
    const c10::Stream made = stream(checked(d), ++s.streams_made);
    note({.call = Call::new_stream, .stream = made.id(), .priority = priority}, d.index());
    return made;
  }

  void record(void** handle, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    Machine& s = state();
    std::lock_guard lock(s.mutex);
    if (*handle == nullptr) {
      ++s.events_alive;
      *handle = new Event{++s.events_made, on.device_index(), nullptr};
      note({.call = Call::make, .event = s.events_made}, on.device_index());
    }
    Event& event = *static_cast<Event*>(*handle);
    if (s.failing_recordings.contains(on.device_index())) throw DeviceFailure("the device is lost");
    event.last = std::make_shared<Recording>();
    s.streams[key_of(on)].push_back({Step::record, false, event.last});
    note({.call = Call::record, .event = event.number, .stream = on.id()}, on.device_index());
    s.run();
  }
  void block(void* handle, const c10::Stream& waiting) const override {
    Machine& s = state();
    std::lock_guard lock(s.mutex);
    const Event& event = *static_cast<const Event*>(handle);
    s.streams[key_of(waiting)].push_back({Step::wait, false, event.last});
    note({.call = Call::block, .event = event.number, .stream = waiting.id()}, waiting.device_index());
    s.run();
  }
  bool queryEvent(void* handle) const override {
    Machine& s = state();
    std::unique_lock lock(s.mutex);
    const Event& event = *static_cast<const Event*>(handle);
    note({.call = Call::query, .event = event.number}, event.device);
    const bool failing = s.failing_queries.contains(event.device);
    const bool reached = event.last->reached;
    const std::function<void()> after = s.after_query;
    lock.unlock();
    if (after) after();
    if (failing) throw DeviceFailure("the device is lost");
    return reached;
  }
  void synchronizeEvent(void* handle) const override {
    Machine& s = state();
    std::unique_lock lock(s.mutex);
    if (Runtime::inside()) Runtime::broken("a thread waited for a device inside the runtime, which the work may need");
    const RecordingPtr recording = static_cast<const Event*>(handle)->last;
    s.moved.wait(lock, [&] { return recording->reached; });
  }
  void destroyEvent(void* handle, c10::DeviceIndex) const noexcept override {
    Machine& s = state();
    std::lock_guard lock(s.mutex);
    const std::unique_ptr<Event> event(static_cast<Event*>(handle));
    --s.events_alive;
    note({.call = Call::destroy, .event = event->number}, event->device);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& by) const override {
    Machine& s = state();
    std::lock_guard lock(s.mutex);
    note({.call = Call::use, .stream = by.id(), .data = data.get()}, by.device_index());
  }

  // No `override`, because older versions of torch do not declare this function.
  bool isStreamCapturing(const c10::Stream& asked) const { return capture_of(asked.device_index(), asked.id()) != 0; }

  static std::uint64_t capture_of(int device, c10::StreamId id) {
    Machine& s = state();
    std::lock_guard lock(s.mutex);
    note({.call = Call::capturing, .stream = id}, device);
    const auto found = s.capturing.find({device, id});
    return found == s.capturing.end() ? 0 : found->second;
  }

 private:
  static int checked(c10::Device d) {
    TORCH_CHECK(d.type() == c10::DeviceType::PrivateUse1, "not a device of the fake accelerator: ", d);
    TORCH_CHECK(d.index() >= 0 && d.index() < kDevices, "the fake accelerator has no device ", d);
    return d.index();
  }
  static void note(Note note, int of_device) {
    note.device = of_device;
    note.current = current_device;
    state().notes.push_back(note);
  }
};

}  // namespace

at::Tensor tensor_on(c10::Device device) {
  constexpr std::size_t kBytes = 4 * sizeof(float);
  auto* const memory = new float[4]();
  c10::DataPtr data(memory, memory, [](void* p) { delete[] static_cast<float*>(p); }, device);
  c10::Storage storage(c10::Storage::use_byte_size_t(), kBytes, std::move(data));
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), caffe2::TypeMeta::Make<float>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({4});
  return tensor;
}

void Accelerator::install() {
  c10::impl::registerDeviceGuard(c10::DeviceType::PrivateUse1, new Guard);
  DeviceFunctions functions;
  functions.capture_of = &Accelerator::capture_of;
  set_device_functions(c10::DeviceType::PrivateUse1, functions);
}

Accelerator& Accelerator::get() {
  static auto* const instance = new Accelerator;
  return *instance;
}

void Accelerator::reset() {
  finish_all();
  Machine& s = state();
  std::lock_guard lock(s.mutex);
  s.notes.clear();
  s.failing_queries.clear();
  s.failing_recordings.clear();
  s.lost.clear();
  s.capturing.clear();
  s.after_query = nullptr;
  current_device = 0;
  std::fill(std::begin(current_stream_ids), std::end(current_stream_ids), 0);
}

void Accelerator::launch(const c10::Stream& stream) {
  Machine& s = state();
  std::lock_guard lock(s.mutex);
  s.streams[key_of(stream)].push_back({Step::work, false, nullptr});
}

void Accelerator::finish(const c10::Stream& stream) {
  Machine& s = state();
  std::lock_guard lock(s.mutex);
  s.end_work(s.streams[key_of(stream)]);
  s.run();
}

void Accelerator::finish_all() {
  Machine& s = state();
  std::lock_guard lock(s.mutex);
  for (auto& [key, steps] : s.streams) s.end_work(steps);
  s.run();
}

void Accelerator::fail_queries(c10::Device device, bool failing) {
  Machine& s = state();
  std::lock_guard lock(s.mutex);
  if (failing) {
    s.failing_queries.insert(device.index());
  } else {
    s.failing_queries.erase(device.index());
  }
}

void Accelerator::fail_recordings(c10::Device device, bool failing) {
  Machine& s = state();
  std::lock_guard lock(s.mutex);
  if (failing) {
    s.failing_recordings.insert(device.index());
  } else {
    s.failing_recordings.erase(device.index());
  }
}

void Accelerator::lose(c10::Device device) {
  Machine& s = state();
  std::lock_guard lock(s.mutex);
  s.lost.insert(device.index());
}

void Accelerator::capture(const c10::Stream& stream, std::uint64_t number) {
  Machine& s = state();
  std::lock_guard lock(s.mutex);
  s.capturing[key_of(stream)] = number;
}

std::uint64_t Accelerator::capture_of(int device, c10::StreamId id) { return Guard::capture_of(device, id); }

void Accelerator::after_query(std::function<void()> hook) {
  Machine& s = state();
  std::lock_guard lock(s.mutex);
  s.after_query = std::move(hook);
}

std::vector<Note> Accelerator::notes(Call call) const {
  Machine& s = state();
  std::lock_guard lock(s.mutex);
  std::vector<Note> found;
  std::copy_if(s.notes.begin(), s.notes.end(), std::back_inserter(found),
               [&](const Note& n) { return n.call == call; });
  return found;
}

int Accelerator::events_alive() const {
  Machine& s = state();
  std::lock_guard lock(s.mutex);
  return s.events_alive;
}

}  // namespace cudafuture::fake
