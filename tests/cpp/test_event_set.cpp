// The events of a future: one per device, recorded on the right streams, joined and waited for.
#include <vector>

#include "callback.h"
#include "core/event_set.h"
#include "core/stream_order.h"
#include "core/stream_pool.h"
#include "fake_device.h"
#include "rules.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;

namespace {

// Return an event on a stream, behind unfinished work.
EventSet busy_on(const c10::Stream& on) {
  accelerator.launch(on);
  return EventSet::record(on.device(), on);
}

using Devices = std::vector<c10::Device>;

}  // namespace

TEST_SUITE_BEGIN("event_set");

TEST_CASE_FIXTURE(DeviceRules, "an empty set has finished and orders nothing") {
  const EventSet none;
  CHECK(none.empty());
  CHECK(none.devices().empty());
  CHECK(none.query());
  none.block_current_streams();
  none.block(stream(0, 0));
  CHECK(EventSet::record({}).empty());
  CHECK(EventSet::join({}, 0).empty());
  CHECK(accelerator.notes(Call::block).empty());
}

TEST_CASE_FIXTURE(DeviceRules, "record() records one event on each device's current stream") {
  const StreamScope scope({stream(0, 7), stream(2, 9)});
  const EventSet set = EventSet::record({device(2), device(0), device(1)});
  CHECK(set.devices() == Devices{device(2), device(0), device(1)});
  const auto recorded = accelerator.notes(Call::record);
  REQUIRE(recorded.size() == 3);
  const c10::StreamId expected[] = {9, 7, 0};
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(recorded[i].device == set.devices()[i].index());
    CHECK(recorded[i].current == recorded[i].device);
    CHECK(recorded[i].stream == expected[i]);
  }
  CHECK(c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).getDevice() == device(0));
}

TEST_CASE_FIXTURE(DeviceRules, "record() ignores the current streams of other threads") {
  const StreamScope scope(stream(1, 5));
  on_engine_thread([] { EventSet::record(device(1)); });
  REQUIRE(accelerator.notes(Call::record).size() == 1);
  CHECK(accelerator.notes(Call::record)[0].stream == 0);
}

TEST_CASE_FIXTURE(DeviceRules, "record() uses a given stream for that stream's device only") {
  const StreamScope scope({stream(0, 4), stream(1, 5)});
  const EventSet set = EventSet::record({device(0), device(1)}, {stream(2, 8), stream(1, 6)});
  const auto recorded = accelerator.notes(Call::record);
  REQUIRE(recorded.size() == 2);
  CHECK(recorded[0].device == 0);
  CHECK(recorded[0].stream == 4);  // the current stream, because none was given
  CHECK(recorded[1].device == 1);
  CHECK(recorded[1].stream == 6);
}

TEST_CASE_FIXTURE(DeviceRules, "query() returns true when all devices have finished") {
  for (int i : {0, 1}) accelerator.launch(stream(i, 0));
  const EventSet set = EventSet::record({device(0), device(1)});
  CHECK_FALSE(set.query());
  accelerator.finish(stream(0, 0));
  CHECK_FALSE(set.query());
  accelerator.finish(stream(1, 0));
  CHECK(set.query());
}

TEST_CASE_FIXTURE(DeviceRules, "work that is launched after the event does not delay it") {
  const EventSet set = busy_on(stream(0, 1));
  accelerator.finish(stream(0, 1));
  accelerator.launch(stream(0, 1));
  CHECK(set.query());
}

TEST_CASE_FIXTURE(DeviceRules, "query() throws the device's error, and queries with the device current") {
  const EventSet set = busy_on(stream(1, 0));
  accelerator.fail_queries(device(1));
  CHECK_THROWS_AS(set.query(), DeviceFailure);
  REQUIRE(accelerator.notes(Call::query).size() == 1);
  CHECK(accelerator.notes(Call::query)[0].current == 1);
}

TEST_CASE_FIXTURE(DeviceRules, "each current stream waits for the event of its device") {
  for (int i : {0, 1}) accelerator.launch(stream(i, 1));
  const EventSet set = EventSet::record({device(0), device(1)}, {stream(0, 1), stream(1, 1)});
  const StreamScope scope({stream(0, 2), stream(1, 2)});
  set.block_current_streams();
  const EventSet behind = EventSet::record({device(0), device(1)});
  CHECK_FALSE(behind.query());
  accelerator.finish(stream(0, 1));
  CHECK_FALSE(behind.query());
  accelerator.finish(stream(1, 1));
  CHECK(behind.query());
  CHECK(accelerator.notes(Call::block).size() == 2);
}

TEST_CASE_FIXTURE(DeviceRules, "a stream waits for the event of its own device only") {
  for (int i : {0, 1}) accelerator.launch(stream(i, 1));
  const EventSet set = EventSet::record({device(0), device(1)}, {stream(0, 1), stream(1, 1)});
  set.block(stream(1, 2));
  set.block(stream(2, 2));
  const auto blocked = accelerator.notes(Call::block);
  REQUIRE(blocked.size() == 1);
  CHECK(blocked[0].device == 1);
  CHECK(blocked[0].stream == 2);
  const EventSet behind = EventSet::record(device(1), stream(1, 2));
  accelerator.finish(stream(1, 1));
  CHECK(behind.query());
}

TEST_CASE_FIXTURE(DeviceRules, "synchronize() blocks the thread until the device has finished") {
  const EventSet set = busy_on(stream(1, 0));
  bool finished = false;
  together(2, [&](int i) {
    if (i == 0) {
      set.events().front()->synchronize();
      CHECK(finished);
    } else {
      finished = true;
      accelerator.finish_all();
    }
  });
}

TEST_CASE_FIXTURE(DeviceRules, "join() keeps the events of sets that share no device") {
  const EventSet one = EventSet::record(device(0));
  const EventSet two = EventSet::record({device(2), device(1)});
  const EventSet none;
  const EventSet joined = EventSet::join({&one, &none, &two}, -1);
  CHECK(joined.devices() == Devices{device(0), device(2), device(1)});
  CHECK(joined.events()[0].get() == one.events()[0].get());
  CHECK(joined.events()[1].get() == two.events()[0].get());
  CHECK(accelerator.notes(Call::new_stream).empty());
  CHECK(accelerator.notes(Call::block).empty());
}

TEST_CASE_FIXTURE(DeviceRules, "join() merges a device's events on a pool stream") {
  const EventSet one = busy_on(stream(1, 1));
  const EventSet two = busy_on(stream(1, 2));
  const EventSet three = busy_on(stream(1, 3));
  const EventSet elsewhere = busy_on(stream(0, 1));
  const EventSet joined = EventSet::join({&one, &elsewhere, &two, &three}, -2);
  CHECK(joined.devices() == Devices{device(1), device(0)});

  const auto made = accelerator.notes(Call::new_stream);
  REQUIRE(made.size() == 1);
  CHECK(made[0].device == 1);
  CHECK(made[0].priority == -2);
  const auto blocked = accelerator.notes(Call::block);
  CHECK(blocked.size() == 3);
  for (const Note& note : blocked) CHECK(note.stream == made[0].stream);
  const Note last = accelerator.notes(Call::record).back();
  CHECK(last.stream == made[0].stream);
  CHECK(last.current == 1);

  const DeviceEventPtr behind_all = joined.events()[0];
  for (int s : {3, 1, 2}) {
    CHECK_FALSE(behind_all->query());
    accelerator.finish(stream(1, s));
  }
  CHECK(behind_all->query());
  CHECK_FALSE(joined.query());  // device 0 is still busy
  CHECK(current_stream(device(1)) == stream(1, 0));
}

TEST_SUITE_END();

TEST_SUITE_BEGIN("future and devices");

TEST_CASE_FIXTURE(DeviceRules, "devices() returns the bounding set, or the devices of events") {
  const FuturePtr free = completed(EventSet::record({device(1), device(2)}));
  CHECK(free->devices() == Devices{device(1), device(2)});
  const FuturePtr bounded = pending();
  bounded->set_bounding_set({device(2), device(0)});
  bounded->complete({}, EventSet::record(device(2)));
  CHECK(bounded->devices() == Devices{device(0), device(2)});
}

TEST_CASE_FIXTURE(DeviceRules, "a failed future has events too, which order consumers that recover") {
  const FuturePtr future = pending();
  future->fail(Value::of_error(nullptr), busy_on(stream(0, 1)));
  future->mark_seen();
  CHECK_FALSE(future->device_work_finished());
  accelerator.finish_all();
  CHECK(future->device_work_finished());
}

TEST_CASE_FIXTURE(DeviceRules, "a completed future's device work may be unfinished") {
  const FuturePtr future = pending();
  CHECK_FALSE(future->device_work_finished());  // pending
  future->complete({}, busy_on(stream(0, 1)));
  CHECK(future->done());
  CHECK_FALSE(future->device_work_finished());
  accelerator.finish_all();
  CHECK(future->device_work_finished());
  CHECK(completed()->device_work_finished());
}

TEST_CASE_FIXTURE(DeviceRules, "a device failure sets a late error and finishes the work") {
  const FuturePtr future = completed(busy_on(stream(0, 1)));
  accelerator.fail_queries(device(0));
  CHECK(future->device_work_finished());
  REQUIRE(future->late_error() != nullptr);
  CHECK_THROWS_AS(std::rethrow_exception(future->late_error()), DeviceFailure);
  CHECK(future->state() == State::completed);
}

TEST_CASE_FIXTURE(DeviceRules, "the completing thread records the events, and all waiting threads share them") {
  const FuturePtr future = completed(busy_on(stream(0, 1)));
  const auto recordings = accelerator.notes(Call::record).size();
  together(4, [&](int i) {
    const StreamScope scope(stream(0, 10 + i));
    order_current_streams(*future, {});
  });
  CHECK(accelerator.notes(Call::record).size() == recordings);
  CHECK(accelerator.notes(Call::block).size() == 4);
  for (int i = 0; i < 4; ++i) CHECK_FALSE(EventSet::record(device(0), stream(0, 10 + i)).query());
}

TEST_CASE_FIXTURE(DeviceRules, "order_current_streams() records the use of storages by streams with the allocator") {
  const at::Tensor on_zero = tensor_on(device(0));
  const at::Tensor on_one = tensor_on(device(1));
  const FuturePtr future = completed(EventSet::record({device(0), device(1)}));
  const StreamScope scope({stream(0, 3), stream(1, 4)});
  order_current_streams(*future, {on_zero, on_one});
  CHECK(accelerator.notes(Call::block).size() == 2);
  const auto used = accelerator.notes(Call::use);
  REQUIRE(used.size() == 2);
  CHECK(used[0].data == on_zero.storage().data_ptr().get());
  CHECK(used[0].stream == 3);
  CHECK(used[1].data == on_one.storage().data_ptr().get());
  CHECK(used[1].stream == 4);
}

TEST_CASE_FIXTURE(DeviceRules, "order_current_streams() orders held memory without recording a use") {
  const FuturePtr future = c10::make_intrusive<Future>(0, Lifetime::hold);
  future->complete({}, EventSet::record(device(0)));
  order_current_streams(*future, {tensor_on(device(0))});
  CHECK(accelerator.notes(Call::use).empty());
  CHECK(accelerator.notes(Call::block).size() == 1);
}

TEST_CASE_FIXTURE(DeviceRules, "host tensors need no order") {
  const at::Tensor host = tensor_on(c10::Device(c10::DeviceType::CPU));
  order_current_streams(*completed(), {host});
  CHECK(accelerator.notes(Call::use).empty());
  CHECK(devices_of({host}).empty());
}

TEST_CASE_FIXTURE(DeviceRules, "devices_of() returns each device once, in the order of the tensors") {
  const at::Tensor host = tensor_on(c10::Device(c10::DeviceType::CPU));
  const at::Tensor one = tensor_on(device(1));
  CHECK(devices_of({one, host, tensor_on(device(0)), one, tensor_on(device(1))}) == Devices{device(1), device(0)});
}

TEST_SUITE_END();
