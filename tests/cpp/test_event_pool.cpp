// The event pool keeps events per device for reuse, and creates and destroys each with its own device current.
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

TEST_CASE_FIXTURE(DeviceRules, "an event without references is reused") {
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

TEST_CASE_FIXTURE(DeviceRules, "an event with a reference is not reused") {
  const DeviceEventPtr one = DeviceEvent::record(stream(0, 0));
  const int number = number_of_last_recording();
  const DeviceEventPtr shared = one;
  const DeviceEventPtr two = DeviceEvent::record(stream(0, 0));
  CHECK(number_of_last_recording() != number);
}

TEST_CASE_FIXTURE(DeviceRules, "events of one device are not reused on another") {
  DeviceEvent::record(stream(0, 0));
  const int number = number_of_last_recording();
  const DeviceEventPtr elsewhere = DeviceEvent::record(stream(1, 0));
  CHECK(number_of_last_recording() != number);
  CHECK(elsewhere->device() == device(1));
}

TEST_CASE_FIXTURE(DeviceRules, "a query of a reused event returns the new state") {
  accelerator.launch(stream(0, 1));
  DeviceEvent::record(stream(0, 1));  // released before the device reaches it
  const DeviceEventPtr again = DeviceEvent::record(stream(0, 2));
  CHECK(again->query());
}

TEST_CASE_FIXTURE(DeviceRules, "events are created, recorded and queried with their own device current") {
  std::vector<DeviceEventPtr> held;
  for (int i = 0; i < 100; ++i) held.push_back(DeviceEvent::record(stream(2, 0)));
  for (const DeviceEventPtr& event : held) CHECK(event->query());
  for (const Call call : {Call::make, Call::record, Call::query}) {
    for (const Note& note : accelerator.notes(call)) CHECK(note.current == 2);
  }
  CHECK(c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).getDevice() == device(0));
}

TEST_CASE_FIXTURE(DeviceRules, "the pool bounds its events and destroys the others") {
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

TEST_CASE_FIXTURE(DeviceRules, "the pool keeps and reuses the events of a lost device") {
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

TEST_CASE_FIXTURE(DeviceRules, "a reused event whose recording fails is destroyed on its device") {
  DeviceEvent::record(stream(1, 0));  // an idle event to reuse
  accelerator.fail_recordings(device(1));
  const int alive = accelerator.events_alive();
  CHECK_THROWS_AS(DeviceEvent::record(stream(1, 0)), DeviceFailure);
  const auto destroyed = accelerator.notes(Call::destroy);
  REQUIRE(destroyed.size() == 1);
  CHECK(destroyed.front().current == 1);
  CHECK(accelerator.events_alive() == alive - 1);
}

TEST_CASE_FIXTURE(DeviceRules, "a new event whose recording fails is destroyed on its device") {
  std::vector<DeviceEventPtr> all_idle;
  while (accelerator.notes(Call::make).empty()) all_idle.push_back(DeviceEvent::record(stream(1, 0)));
  accelerator.fail_recordings(device(1));
  CHECK_THROWS_AS(DeviceEvent::record(stream(1, 0)), DeviceFailure);
  const auto destroyed = accelerator.notes(Call::destroy);
  REQUIRE(destroyed.size() == 1);
  CHECK(destroyed.front().current == 1);
}

TEST_CASE_FIXTURE(DeviceRules, "the events of healthy devices return to the pool") {
  const auto idle = [] { return EventPool::get().statistics().idle; };
  DeviceEvent::record(stream(0, 0));
  const auto before = idle();
  accelerator.fail_recordings(device(1));
  CHECK_THROWS_AS(EventSet::record({device(0), device(1)}), DeviceFailure);
  accelerator.fail_recordings(device(1), false);
  CHECK(idle() + 1 >= before);  // at most the failed event was destroyed
  CHECK(c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).getDevice() == device(0));
}

TEST_CASE_FIXTURE(DeviceRules, "concurrent threads never share an event") {
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
