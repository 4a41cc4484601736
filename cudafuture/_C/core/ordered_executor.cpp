#include "core/ordered_executor.h"

#include <map>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

#include "core/process.h"

namespace cudafuture {

// The state that the executors of all depths share.
struct OrderedExecutor::Shared {
  Shared(std::string name, bool in_issue_order) : name(std::move(name)), in_issue_order(in_issue_order) {}

  const std::string name;
  const bool in_issue_order;
  std::mutex mutex;
  std::vector<OrderedExecutor*> depths;
  std::map<std::pair<SerialQueue*, int>, SerialQueue*> queues;  // by attacher (null: the program) and depth
};

OrderedExecutor& OrderedExecutor::make(std::string name, bool in_issue_order) {
  auto shared = std::make_shared<Shared>(std::move(name), in_issue_order);
  auto* first = new OrderedExecutor(shared, 0);
  shared->depths.push_back(first);
  return *first;
}

const std::string& OrderedExecutor::name() const noexcept { return shared_->name; }

OrderedExecutor& OrderedExecutor::deeper() {
  std::lock_guard lock(shared_->mutex);
  const auto next = static_cast<std::size_t>(depth_) + 1;
  if (shared_->depths.size() == next) shared_->depths.push_back(new OrderedExecutor(shared_, depth_ + 1));
  return *shared_->depths[next];
}

SerialQueue& OrderedExecutor::queue_of_thread() noexcept {
  SerialQueue* const attacher = SerialQueue::current();
  std::lock_guard lock(shared_->mutex);
  SerialQueue*& queue = shared_->queues[{attacher, depth_}];
  if (queue == nullptr) {
    std::ostringstream name;
    if (attacher != nullptr) name << attacher->name() << '>';
    name << shared_->name << '.' << depth_;
    queue = new SerialQueue(name.str(),
                            shared_->in_issue_order ? SerialQueue::Order::issue : SerialQueue::Order::attachment);
  }
  return *queue;
}

void OrderedExecutor::enrol(Continuation& c) noexcept {
  if (is_forked_child()) return;  // the lock may be held permanently
  queue_of_thread().enrol(c);
}

void OrderedExecutor::post(Continuation* c) noexcept {
  if (is_forked_child()) return;
  enrol(*c);
  c->executor->post(c);
}

}  // namespace cudafuture
