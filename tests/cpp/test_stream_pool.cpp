// Streams: devices with streams, pool streams, current streams, and scopes that change the current streams.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/stream_pool.h"
#include "fake_device.h"
#include "rules.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;

namespace {

using Streams = std::vector<c10::Stream>;

const c10::impl::VirtualGuardImpl& guard() {
  static const c10::impl::VirtualGuardImpl instance(c10::DeviceType::PrivateUse1);
  return instance;
}

const Streams defaults{stream(0, 0), stream(1, 0), stream(2, 0)};
Streams current() { return current_streams({device(0), device(1), device(2)}); }

}  // namespace

TEST_SUITE_BEGIN("stream_pool");

TEST_CASE_FIXTURE(DeviceRules, "devices of a registered accelerator have streams, and the host has none") {
  CHECK(has_streams(device(0)));
  CHECK_FALSE(has_streams(device(kDevices)));  // no such device
  CHECK_FALSE(has_streams(c10::Device(c10::DeviceType::CPU)));
  CHECK_FALSE(has_streams(c10::Device(c10::DeviceType::Meta)));
  CHECK_FALSE(has_streams(c10::Device(c10::DeviceType::MTIA, 0)));  // not registered
  CHECK(any_device_with_streams());
}

TEST_CASE_FIXTURE(DeviceRules, "all_devices_with_streams() returns all devices of the accelerator") {
  std::vector<c10::Device> ours;
  for (const c10::Device d : all_devices_with_streams()) {
    if (d.type() == c10::DeviceType::PrivateUse1) ours.push_back(d);
  }
  CHECK(ours == std::vector{device(0), device(1), device(2)});
}

TEST_CASE_FIXTURE(DeviceRules, "a pool stream has the requested device and priority") {
  const Streams made = pool_streams({device(2), device(0)}, -1);
  const c10::Stream low = pool_stream(device(1), 5);
  const auto notes = accelerator.notes(Call::new_stream);
  REQUIRE(notes.size() == 3);
  CHECK(made[0] == stream(2, notes[0].stream));
  CHECK(made[1] == stream(0, notes[1].stream));
  CHECK(low == stream(1, notes[2].stream));
  CHECK(notes[0].priority == -1);
  CHECK(notes[1].priority == -1);
  CHECK(notes[2].priority == 5);
  CHECK(current() == defaults);  // taking a stream from the pool does not make it current
}

TEST_CASE_FIXTURE(DeviceRules, "current_streams() returns this thread's current streams, in the requested order") {
  guard().exchangeStream(stream(1, 4));
  CHECK(current_stream(device(1)) == stream(1, 4));
  CHECK(current_streams({device(1), device(0)}) == Streams{stream(1, 4), stream(0, 0)});
  on_engine_thread([] { CHECK(current() == defaults); });
}

TEST_CASE_FIXTURE(DeviceRules, "a scope makes its streams current, and restores the previous ones") {
  guard().exchangeStream(stream(0, 9));
  {
    const StreamScope scope({stream(0, 1), stream(2, 2)});
    CHECK(current() == Streams{stream(0, 1), stream(1, 0), stream(2, 2)});
  }
  CHECK(current() == Streams{stream(0, 9), stream(1, 0), stream(2, 0)});
}

TEST_CASE_FIXTURE(DeviceRules, "a scope restores streams and device after changes inside it") {
  guard().setDevice(device(1));
  {
    const StreamScope scope({stream(0, 1), stream(2, 2)});
    guard().setDevice(device(2));
    guard().exchangeStream(stream(0, 7));
    guard().exchangeStream(stream(2, 8));
  }
  CHECK(current() == defaults);
  CHECK(guard().getDevice() == device(1));
}

TEST_CASE_FIXTURE(DeviceRules, "the last of two streams is current, and scopes restore") {
  guard().exchangeStream(stream(0, 9));
  {
    const StreamScope scope({stream(0, 1), stream(0, 2)});
    CHECK(current_stream(device(0)) == stream(0, 2));
  }
  CHECK(current_stream(device(0)) == stream(0, 9));
}

TEST_CASE_FIXTURE(DeviceRules, "scopes of streams nest, and an exception unwinds them") {
  const StreamScope outer(stream(0, 1));
  try {
    const StreamScope inner({stream(0, 2), stream(1, 2)});
    guard().setDevice(device(2));
    throw std::runtime_error("out of a callback");
  } catch (const std::runtime_error&) {
  }
  CHECK(current() == Streams{stream(0, 1), stream(1, 0), stream(2, 0)});
  CHECK(guard().getDevice() == device(0));
}

TEST_CASE_FIXTURE(DeviceRules, "an empty scope changes no stream and no device") {
  guard().setDevice(device(2));
  {
    const StreamScope scope({});
    CHECK(current() == defaults);
  }
  CHECK(guard().getDevice() == device(2));
}

TEST_CASE_FIXTURE(DeviceRules, "a scope that cannot be entered changes no current stream") {
  const auto enter = [](const c10::Stream& wrong) { const StreamScope scope({stream(0, 1), wrong}); };
  const c10::Stream beyond(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, kDevices), 1);
  CHECK_THROWS(enter(beyond));
  CHECK(current() == defaults);
  const c10::Stream unknown(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::MTIA, 0), 1);
  CHECK_THROWS(enter(unknown));
  CHECK(current() == defaults);
}

TEST_CASE_FIXTURE(DeviceRules, "refuse_while_capturing() throws if the device's current stream is capturing") {
  refuse_while_capturing(device(0));
  accelerator.capture(stream(1, 3));
  refuse_while_capturing(device(1));  // the capturing stream is not the device's current stream
  const StreamScope scope(stream(1, 3));
  refuse_while_capturing(device(0));
  try {
    refuse_while_capturing(device(1));
    FAIL("refuse_while_capturing() did not throw");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::invalid_state);
    CHECK(std::string(error.what()).find("non_blocking=True") != std::string::npos);
  }
  for (const Note& note : accelerator.notes(Call::capturing)) CHECK(note.current == note.device);
  CHECK(guard().getDevice() == device(0));
}

TEST_SUITE_END();
