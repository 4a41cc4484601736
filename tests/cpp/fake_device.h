// A fake accelerator that the test controls. Work in a stream ends when the test calls finish(), an event is reached
// when its stream reaches it, and each call is noted with the current device.
//
// It is registered as torch's device type PrivateUse1, so the core uses it like any other accelerator.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

#include "rules.h"

namespace cudafuture::fake {

constexpr c10::DeviceIndex kDevices = 3;

inline c10::Device device(int index) { return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)}; }
inline c10::Stream stream(int device_index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device(device_index), id);
}

// Return a tensor of four floats on a device. The address of its storage identifies it in the accelerator's notes.
at::Tensor tensor_on(c10::Device device);

enum class Call {
  make,        // an event is created, by its first recording
  record,      // an event is recorded on a stream
  block,       // a stream waits for an event
  query,       // an event is queried
  destroy,     // an event is destroyed
  use,         // a stream uses a storage
  new_stream,  // a stream is taken from the pool
  capturing,   // the capture state of a stream is queried
};

struct Note {
  Call call;
  int event = 0;               // the event's number
  int device = -1;             // the device of the event or stream
  int current = -1;            // the current device of the calling thread
  c10::StreamId stream = -1;   // -1: the call names no stream
  int priority = 0;            // the priority of a new stream
  const void* data = nullptr;  // the address of a storage
};

struct DeviceFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Accelerator {
 public:
  static void install();  // once, before the first future
  static Accelerator& get();

  // Finish all work, clear the notes, failures and captures, and make device 0 and the default streams current in this
  // thread.
  void reset();

  // ---- work
  void launch(const c10::Stream& stream);  // enqueues work that runs until finish()
  void finish(const c10::Stream& stream);  // ends all work that was launched in the stream before
  void finish_all();

  // ---- failures and captures
  void fail_queries(c10::Device device, bool failing = true);         // queries of the device's events fail
  void fail_recordings(c10::Device device, bool failing = true);      // recordings on the device's streams fail
  void lose(c10::Device device);                                      // making the device current fails
  void capture(const c10::Stream& stream, std::uint64_t number = 1);  // the stream captures a graph

  // Return the number of a stream's capture, or 0. The core calls it.
  static std::uint64_t capture_of(int device, c10::StreamId id);

  // Set a hook that each query of an event calls before it returns, with no lock held.
  void after_query(std::function<void()> hook);

  // ---- calls so far
  std::vector<Note> notes(Call call) const;
  int events_alive() const;
};

// Resets the accelerator at the start and the end of a scope.
class FreshAccelerator {
 public:
  FreshAccelerator() { Accelerator::get().reset(); }
  ~FreshAccelerator() { Accelerator::get().reset(); }
};

inline Accelerator& accelerator = Accelerator::get();

// The fixture of tests that use the accelerator.
struct DeviceRules : Rules, FreshAccelerator {};

}  // namespace cudafuture::fake
