// An I/O engine whose device has not finished when the process exits.
#include <memory>
#include <utility>

#include "callback.h"
#include "core/process.h"
#include "fake_device.h"
#include "folder.h"
#include "io/engine.h"
#include "rules.h"

using namespace cudafuture;
using namespace cudafuture::fake;

TEST_SUITE_BEGIN("watch");

TEST_CASE("alone: a write that waits for a device when the process exits" * doctest::skip()) {
  const Folder folder;
  io::Engine::Options options;
  options.backend = io::BackendKind::threads;
  const auto engine = io::Engine::start(options);
  const auto file = io::File::open(folder.file(), io::Access::read_write, io::Start::empty, io::Direct::no);
  const c10::Stream current = stream(0, 0);
  accelerator.launch(current);
  io::Request request;
  request.direction = io::Direction::write;
  request.file = file;
  request.device = std::make_shared<io::DeviceSide>(current.device(), io::Direction::write, 0);
  request.memory.add_on_device(tensor_on(current.device()));
  request.future = pending();
  const FuturePtr future = request.future;
  engine->submit(std::move(request));
  shut_down([]() noexcept {
    const Inside needs_the_runtime;  // like device work that calls Python
    accelerator.finish_all();
    return true;
  });
  future->wait_until(nullptr);
  future->mark_seen();
  CHECK(future->state() == State::failed);  // the fake device has no kernel that copies its memory
  CHECK(Runtime::take_broken().empty());
}

TEST_CASE_FIXTURE(Rules, "io: at exit the engine waits for a device outside the runtime") {
  run_alone("alone: a write that waits for a device when the process exits");
}

TEST_SUITE_END();
