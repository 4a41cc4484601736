// The registry of operations and the walk: what they find, and what they leave alone.
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "callback.h"
#include "core/pending.h"
#include "threads.h"

using namespace cudafuture;

namespace {

// A child that follows its parent, as then() makes one.
class Child final : public Continuation {
 public:
  explicit Child(FuturePtr child) : child_(std::move(child)) {}
  void run(Future&) noexcept override {
    child_->complete({});
    delete this;
  }
  void abandon() noexcept override {
    child_->fail({});
    delete this;
  }
  Future* dependent() const noexcept override { return child_.get(); }

 private:
  FuturePtr child_;
};

FuturePtr begin_operation(const char* name) {
  auto future = c10::make_intrusive<Future>();
  future->set_name(name);
  future->set_operation({&OperationPlace::find("store", "s", "of"), 7, 4096});
  return future;
}

FuturePtr child_of(Future& parent) {
  auto child = c10::make_intrusive<Future>();
  child->set_maker(Maker::then);
  parent.attach(new Child(child));
  return child;
}

PendingGraph walk_all() { return PendingGraph::walk({}, PendingGraph::From::threads); }

}  // namespace

TEST_CASE("an operation and what waits for it are found until it ends") {
  const FuturePtr read = begin_operation("read k");
  const FuturePtr child = child_of(*read);
  {
    const PendingGraph graph = walk_all();
    const std::int64_t index = graph.index_of(*child);
    REQUIRE(index >= 0);
    const std::vector<std::uint32_t> leaves = graph.leaves_of(static_cast<std::uint32_t>(index), 9);
    REQUIRE(leaves.size() == 1);
    CHECK(graph.nodes()[leaves[0]].future.get() == read.get());
    CHECK(description_of(*read).starts_with("read k #7 of store 's' (4 KiB), "));
  }
  CHECK(child.use_count() == 2);  // the walk keeps nothing
  read->complete({});
  CHECK(child->done());
  CHECK(walk_all().index_of(*read) == -1);
}

TEST_CASE("an operation that is dropped while pending leaves the registry") {
  FuturePtr read = begin_operation("read k");
  const FuturePtr child = child_of(*read);
  read.reset();
  child->wait_until(nullptr);  // the callback thread fails it
  CHECK(child->state() == State::failed);
  CHECK(walk_all().nodes().empty());
}

TEST_CASE("a walk that has reached its limit says so") {
  std::vector<FuturePtr> reads;
  for (int i = 0; i < 10; ++i) reads.push_back(begin_operation("read"));
  const PendingGraph graph = PendingGraph::walk({}, PendingGraph::From::operations, 4);
  CHECK(graph.nodes().size() == 4);
  CHECK(graph.is_cut());
  for (const FuturePtr& read : reads) read->complete({});
}

TEST_CASE("the text of a graph is grouped beyond a limit") {
  std::vector<FuturePtr> reads;
  for (int i = 0; i < 5; ++i) reads.push_back(begin_operation(("read " + std::to_string(i)).c_str()));
  CHECK(as_json(walk_all(), 2).find("\"count\":5,\"bytes\":20480") != std::string::npos);
  CHECK(as_json(walk_all(), 5).find("count") == std::string::npos);
  for (const FuturePtr& read : reads) read->complete({});
}

TEST_CASE("names are escaped in the text") {
  const FuturePtr read = begin_operation("a \"quoted\"\n\\name");
  CHECK(as_json(walk_all(), 9).find(R"(a \"quoted\"\u000a\\name)") != std::string::npos);
  read->complete({});
}

TEST_CASE("threads make, complete and drop operations while others walk") {
  std::atomic<bool> is_over{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([] {
      for (int round = 0; round < 3'000; ++round) {
        FuturePtr read = begin_operation("read");
        const FuturePtr child = child_of(*read);
        const ThreadActivity waiting(ThreadActivity::Kind::wait, *child, nullptr);
        if (round % 3 == 0) {
          read.reset();
        } else {
          read->complete({});
        }
        child->wait_until(nullptr);  // a walk may have held the last reference to the dropped one
      }
    });
  }
  std::thread walker([&] {
    while (!is_over) static_cast<void>(as_json(walk_all(), 100));
  });
  for (std::thread& thread : threads) thread.join();
  is_over = true;
  walker.join();
  CHECK(walk_all().nodes().empty());
}
