#include "core/ordered_executor.h"

#include <map>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

#include "core/process.h"

namespace cudafuture {

// The state that the executors of all depths share.
struct OrderedExecutor::Line {
  Line(std::string name, bool in_issue_order) : name(std::move(name)), in_issue_order(in_issue_order) {}

  const std::string name;
  const bool in_issue_order;
  std::mutex mutex;
  std::vector<OrderedExecutor*> depths;
  std::map<std::pair<Lane*, int>, Lane*> lanes;  // by attacher (null: the program) and depth
};

OrderedExecutor& OrderedExecutor::make(std::string name, bool in_issue_order) {
  auto line = std::make_shared<Line>(std::move(name), in_issue_order);
  auto* first = new OrderedExecutor(line, 0);
  line->depths.push_back(first);
  return *first;
}

const std::string& OrderedExecutor::name() const noexcept { return line_->name; }

OrderedExecutor& OrderedExecutor::deeper() {
  std::lock_guard lock(line_->mutex);
  const auto next = static_cast<std::size_t>(depth_) + 1;
  if (line_->depths.size() == next) line_->depths.push_back(new OrderedExecutor(line_, depth_ + 1));
  return *line_->depths[next];
}

Lane& OrderedExecutor::lane_of_thread() noexcept {
  Lane* const attacher = Lane::current();
  std::lock_guard lock(line_->mutex);
  Lane*& lane = line_->lanes[{attacher, depth_}];
  if (lane == nullptr) {
    std::ostringstream name;
    if (attacher != nullptr) name << attacher->name() << '>';
    name << line_->name << '.' << depth_;
    lane = new Lane(name.str(), line_->in_issue_order ? Lane::Order::issue : Lane::Order::attachment);
  }
  return *lane;
}

void OrderedExecutor::enrol(Continuation& c) noexcept {
  if (is_forked_child()) return;  // the lock may be held permanently
  lane_of_thread().enrol(c);
}

void OrderedExecutor::post(Continuation* c) noexcept {
  if (is_forked_child()) return;
  enrol(*c);
  c->executor->post(c);
}

}  // namespace cudafuture
