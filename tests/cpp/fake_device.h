// An accelerator whose clock the test holds: streams run their work when they are told to, events are reached when the
// streams get there, and every call is written down with the device that was current.
//
// It stands behind torch's device type PrivateUse1, so the core meets it as it meets any accelerator.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

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

// A tensor of four floats on that device. Its storage tells it from others in the accelerator's notes.
at::Tensor tensor_on(c10::Device device);

enum class Call {
  make,        // of an event, with its first recording
  record,      // of an event on a stream
  block,       // of a stream by an event
  query,       // of an event
  destroy,     // of an event
  use,         // of a storage by a stream
  new_stream,  // out of the pool
  capturing,   // is the stream capturing?
};

struct Note {
  Call call;
  int event = 0;               // its number
  int device = -1;             // of the event or stream
  int current = -1;            // the device that was current
  c10::StreamId stream = -1;   // where there is one
  int priority = 0;            // of a new stream
  const void* data = nullptr;  // of a storage
};

struct DeviceFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Accelerator {
 public:
  static void install();  // once, before the first future
  static Accelerator& get();

  // Finishes all work, forgets the notes, the failures and the captures, and makes device 0 and the default streams
  // current in this thread.
  void reset();

  // ---- the clock
  void launch(const c10::Stream& stream);  // puts one piece of work into the stream; it lasts until finish()
  void finish(const c10::Stream& stream);  // ends what has been launched there so far
  void finish_all();

  // ---- what goes wrong
  void fail_queries(c10::Device device, bool failing = true);     // of the events of that device
  void fail_recordings(c10::Device device, bool failing = true);  // on the streams of that device
  void lose(c10::Device device);                                  // nobody can make it current
  void capture(const c10::Stream& stream);                        // the stream records a graph

  // Called after each query of an event has been answered, with no lock held.
  void after_query(std::function<void()> hook);

  // ---- what was done
  std::vector<Note> notes(Call call) const;
  int events_alive() const;
};

// The accelerator as new, for a scope.
class FreshAccelerator {
 public:
  FreshAccelerator() { Accelerator::get().reset(); }
  ~FreshAccelerator() { Accelerator::get().reset(); }
};

inline Accelerator& accelerator = Accelerator::get();

// The fixture of tests that use the accelerator.
struct DeviceRules : Rules, FreshAccelerator {};

}  // namespace cudafuture::fake
