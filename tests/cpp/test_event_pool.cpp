// Events are kept and used again, per device, and made and destroyed under their own device only.
#include <set>
#include <vector>

#include "core/event_pool.h"
#include "core/event_set.h"
#include "fake_device.h"
#include "rules.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;

namespace {

int number_of_last_recording() { return accelerator.notes(Call::record).back().event; }

}  // namespace

TEST_SUITE_BEGIN("event_pool");

TEST_CASE_FIXTURE(DeviceRules, "an event that nobody uses any more is used again") {
  DeviceEvent::record(stream(0, 0));
  const int number = number_of_last_recording();
  const auto before = EventPool::get().statistics();
  const DeviceEventPtr again = DeviceEvent::record(stream(0, 1));
  CHECK(number_of_last_recording() == number);
  const auto after = EventPool::get().statistics();
  CHECK(after.reused == before.reused + 1);
  CHECK(after.made == before.made);
  CHECK(after.idle == before.idle - 1);
}

TEST_CASE_FIXTURE(DeviceRules, "an event that somebody still holds is not used again") {
  const DeviceEventPtr one = DeviceEvent::record(stream(0, 0));
  const int number = number_of_last_recording();
  const DeviceEventPtr shared = one;
  const DeviceEventPtr two = DeviceEvent::record(stream(0, 0));
  CHECK(number_of_last_recording() != number);
}

TEST_CASE_FIXTURE(DeviceRules, "events of one device are not used on another") {
  DeviceEvent::record(stream(0, 0));
  const int number = number_of_last_recording();
  const DeviceEventPtr elsewhere = DeviceEvent::record(stream(1, 0));
  CHECK(number_of_last_recording() != number);
  CHECK(elsewhere->device() == device(1));
}

TEST_CASE_FIXTURE(DeviceRules, "an event used again answers for its new recording") {
  accelerator.launch(stream(0, 1));
  DeviceEvent::record(stream(0, 1));  // given back before the device is there
  const DeviceEventPtr again = DeviceEvent::record(stream(0, 2));
  CHECK(again->query());
}

TEST_CASE_FIXTURE(DeviceRules, "events are made, recorded and queried under their own device") {
  std::vector<DeviceEventPtr> held;
  for (int i = 0; i < 100; ++i) held.push_back(DeviceEvent::record(stream(2, 0)));
  for (const DeviceEventPtr& event : held) CHECK(event->query());
  for (const Call call : {Call::make, Call::record, Call::query}) {
    for (const Note& note : accelerator.notes(call)) CHECK(note.current == 2);
  }
  CHECK(c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).getDevice() == device(0));
}

TEST_CASE_FIXTURE(DeviceRules, "the pool keeps a bounded number, and destroys the rest under its own device") {
  constexpr std::size_t kMany = 1500;  // more than the pool keeps
  const int alive_before = accelerator.events_alive();
  const auto before = EventPool::get().statistics();
  {
    std::vector<DeviceEventPtr> held;
    for (std::size_t i = 0; i < kMany; ++i) held.push_back(DeviceEvent::record(stream(2, 0)));
  }
  const auto after = EventPool::get().statistics();
  const auto destroyed = accelerator.notes(Call::destroy);
  CHECK(destroyed.size() == after.destroyed - before.destroyed);
  CHECK(destroyed.size() >= kMany - 1024);
  for (const Note& note : destroyed) {
    CHECK(note.device == 2);
    CHECK(note.current == 2);
  }
  CHECK(accelerator.events_alive() == alive_before + static_cast<int>(after.idle) - static_cast<int>(before.idle));
}

TEST_CASE_FIXTURE(DeviceRules, "the events of a device that is lost are kept, and serve when it is there again") {
  constexpr std::size_t kMany = 1500;
  std::vector<DeviceEventPtr> held;
  for (std::size_t i = 0; i < kMany; ++i) held.push_back(DeviceEvent::record(stream(2, 0)));
  const int alive = accelerator.events_alive();
  accelerator.lose(device(2));
  CHECK_THROWS_AS(static_cast<void>(held.back()->query()), DeviceFailure);
  held.clear();
  CHECK(accelerator.events_alive() == alive);
  CHECK(EventPool::get().statistics().idle >= kMany);
  accelerator.reset();
  for (std::size_t i = 0; i < kMany; ++i) held.push_back(DeviceEvent::record(stream(2, 0)));
  CHECK(accelerator.events_alive() == alive);
}

TEST_CASE_FIXTURE(DeviceRules, "an event whose recording fails dies under its own device, and the error gets out") {
  DeviceEvent::record(stream(1, 0));  // one to use again
  accelerator.fail_recordings(device(1));
  const int alive = accelerator.events_alive();
  CHECK_THROWS_AS(DeviceEvent::record(stream(1, 0)), DeviceFailure);
  const auto destroyed = accelerator.notes(Call::destroy);
  for (const Note& note : destroyed) CHECK(note.current == 1);
  CHECK(accelerator.events_alive() == alive - static_cast<int>(destroyed.size()));
}

TEST_CASE_FIXTURE(DeviceRules, "a new event whose recording fails dies under its own device") {
  std::vector<DeviceEventPtr> all_idle;
  while (accelerator.notes(Call::make).empty()) all_idle.push_back(DeviceEvent::record(stream(1, 0)));
  accelerator.fail_recordings(device(1));
  CHECK_THROWS_AS(DeviceEvent::record(stream(1, 0)), DeviceFailure);
  for (const Note& note : accelerator.notes(Call::destroy)) CHECK(note.current == 1);
}

TEST_CASE_FIXTURE(DeviceRules, "when one device of several fails, the events of the others go back") {
  const auto idle = [] { return EventPool::get().statistics().idle; };
  DeviceEvent::record(stream(0, 0));
  const auto before = idle();
  accelerator.fail_recordings(device(1));
  CHECK_THROWS_AS(EventSet::record({device(0), device(1)}), DeviceFailure);
  accelerator.fail_recordings(device(1), false);
  CHECK(idle() + 1 >= before);  // at most the failed one is gone
  CHECK(c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).getDevice() == device(0));
}

TEST_CASE_FIXTURE(DeviceRules, "threads record and drop at once: no event is in two hands") {
  constexpr int kThreads = 6;
  together(kThreads, [&](int thread) {
    for (int i = 0; i < 300; ++i) {
      const c10::Stream own = stream(i % kDevices, 100 + thread);
      const DeviceEventPtr one = DeviceEvent::record(own);
      const DeviceEventPtr two = DeviceEvent::record(own);
      CHECK(one->query());
      CHECK(two->query());
    }
  });
  const auto statistics = EventPool::get().statistics();
  CHECK(accelerator.events_alive() == static_cast<int>(statistics.idle));
}

TEST_SUITE_END();
