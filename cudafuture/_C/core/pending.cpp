#include "core/pending.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <numeric>
#include <set>
#include <utility>

#include "core/callback_thread.h"
#include "core/foreign.h"
#include "core/json.h"
#include "core/ordered_executor.h"
#include "core/process.h"
#include "core/progress.h"

namespace cudafuture {
namespace {

// Held during a walk, and by a fork: the child must not inherit a lock that a walk holds.
std::mutex& walk_mutex() {
  static auto* mutex = [] {
    auto* made = new std::mutex;
    pthread_atfork([] { walk_mutex().lock(); }, [] { walk_mutex().unlock(); }, [] { walk_mutex().unlock(); });
    return made;
  }();
  return *mutex;
}

bool is_callback(Maker maker) { return maker != Maker::none && maker < Maker::gather; }

// Futures whose last reference is dropped on the callback thread: that may run foreign code.
class DroppedFutures final : public Continuation {
 public:
  explicit DroppedFutures(std::vector<WeakFuture> futures) : Continuation(foreign), futures_(std::move(futures)) {}
  void run(Future&) noexcept override { delete this; }
  void abandon() noexcept override { delete this; }

 private:
  std::vector<WeakFuture> futures_;
};

// Drops references: those to futures that are over go to the callback thread, unless this thread is inside.
void drop(std::vector<WeakFuture> futures) {
  if (foreign_runtime().inside()) return;
  std::vector<WeakFuture> over;
  for (WeakFuture& future : futures) {
    if (future.get() != nullptr && future.owners() == 0) over.push_back(std::move(future));
  }
  if (over.empty()) return;
  auto* const dropped = new DroppedFutures(std::move(over));
  dropped->parent = c10::make_intrusive<Future>();
  CallbackThread::get().post(dropped);
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", seconds);
  return text;
}

double age_in_seconds(const Future& future) { return std::chrono::duration<double>(future.age()).count(); }

// Returns what a future is, without its age.
std::string subject_of(const Future& future) {
  if (const OperationFacts* facts = future.operation()) {
    return (future.name().empty() ? "operation" : future.name()) + text_of(*facts);
  }
  switch (future.maker()) {
    case Maker::none:
      return "future " + quoted_name(future.name());
    case Maker::submit:
      return "submit of " + quoted_name(future.name());
    case Maker::then:
    case Maker::then_async:  // a child has its parent's name
      return std::string(name_of(future.maker())) + " of " + quoted_name(future.name());
    default: {
      std::vector<CombinationPart> parts = future.parts();
      std::string text = std::string(name_of(future.maker())) + " of " + std::to_string(parts.size());
      std::vector<WeakFuture> seen;
      for (CombinationPart& part : parts) seen.push_back(std::move(part.future));
      drop(std::move(seen));
      return text;
    }
  }
}

}  // namespace

std::string quoted_name(const std::string& name) { return name.empty() ? "an unnamed future" : "'" + name + "'"; }

std::string description_of(const Future& future) {
  std::string text = subject_of(future) + ", " + seconds_text(age_in_seconds(future)) + " old";
  if (const std::string site = future.site(); !site.empty()) text += ", made at " + site;
  return text;
}

// ---- the walk

PendingGraph::~PendingGraph() {
  std::vector<WeakFuture> futures = std::move(dropped_);
  for (PendingNode& node : nodes_) futures.push_back(std::move(node.future));
  for (ThreadActivities& thread : threads_) {
    for (ActivityState& activity : thread.activities) futures.push_back(std::move(activity.future));
  }
  drop(std::move(futures));
}

PendingGraph PendingGraph::walk(std::vector<WeakFuture> roots, From from, std::size_t most) {
  PendingGraph graph;
  if (is_forked_child()) return graph;  // the futures and the threads are the parent's
  graph.most_ = most;
  std::unique_lock lock(walk_mutex());
  std::uint32_t ignored;
  for (WeakFuture& root : roots) graph.add(std::move(root), ignored);
  roots.clear();
  if (from != From::roots) graph.threads_ = thread_states();
  if (from == From::threads) {
    for (const ThreadActivities& thread : graph.threads_) {
      for (const ActivityState& activity : thread.activities) graph.add(WeakFuture(*activity.future), ignored);
    }
  }
  if (from != From::roots) {
    for (WeakFuture& operation : RegisteredOperation::all()) graph.add(std::move(operation), ignored);
  }
  for (std::uint32_t i = 0; i < graph.nodes_.size(); ++i) graph.add_links(i);
  graph.find_reasons();
  return graph;
}

std::int64_t PendingGraph::index_of(const Future& future) const noexcept {
  const auto found = index_.find(&future);
  return found == index_.end() ? std::int64_t{-1} : std::int64_t{found->second};
}

// Adds a pending future, unless it is there. False: it is done, or there are too many.
bool PendingGraph::add(WeakFuture future, std::uint32_t& index) {
  const auto known = index_.find(future.get());
  if (known != index_.end()) {
    index = known->second;
    return true;
  }
  const bool is_one_too_many = nodes_.size() >= most_;
  is_cut_ = is_cut_ || is_one_too_many;
  if (is_one_too_many || future->done() || future.owners() == 0) {
    dropped_.push_back(std::move(future));
    return false;
  }
  index = static_cast<std::uint32_t>(nodes_.size());
  index_.emplace(future.get(), index);
  nodes_.emplace_back();
  nodes_.back().future = std::move(future);
  return true;
}

void PendingGraph::add_links(std::uint32_t index) {
  Future* const future = nodes_[index].future.get();
  std::uint32_t other;
  for (WeakFuture& dependent : future->dependents()) {
    const bool lists_parts = dependent->maker() >= Maker::gather;  // in their order: as follows
    if (add(std::move(dependent), other) && !lists_parts) nodes_[other].waits_for.push_back(index);
  }
  if (future->maker() < Maker::gather) return;
  for (CombinationPart& part : future->parts()) {
    if (!add(std::move(part.future), other)) continue;
    ++nodes_[other].listed;
    nodes_[other].references = part.references;
    nodes_[index].waits_for.push_back(other);
  }
}

// Finds out why futures that wait for no other one are pending.
void PendingGraph::find_reasons() {
  for (const ThreadActivities& thread : threads_) {
    for (const ActivityState& activity : thread.activities) {
      const std::int64_t index = index_of(*activity.future);
      if (index >= 0 && activity.kind == ThreadActivity::Kind::callback) nodes_[index].is_running = true;
    }
  }
  for (PendingNode& one : nodes_) {
    const Future& future = *one.future;
    if (!one.waits_for.empty() || one.is_running || future.operation() != nullptr) continue;
    one.is_due = is_callback(future.maker()) && future.is_dispatched() && !future.running();
    if (one.is_due) {
      const OrderedExecutor* const order = future.ordered_executor();
      for (std::uint32_t i = 0; i < threads_.size(); ++i) {
        const ActivityState& outermost = threads_[i].activities.front();
        if (outermost.kind != ThreadActivity::Kind::callback) continue;
        const bool is_pools = outermost.future->is_pooled();
        const bool is_in_the_way = future.is_pooled() || future.maker() == Maker::submit ? is_pools
                                   : order != nullptr ? threads_[i].queue.starts_with(order->name() + ".")
                                                      : !is_pools && threads_[i].queue.empty();
        if (is_in_the_way) one.blocked_by.push_back(i);
      }
    }
    // Only combinations refer to its foreign object, and only that object owns the future.
    one.is_lost = !one.is_due && one.listed > 0 && one.references == one.listed && one.future.owners() == 1;
  }
}

std::vector<std::uint32_t> PendingGraph::leaves_of(std::uint32_t index, std::size_t most) const {
  std::vector<std::uint32_t> leaves;
  std::vector<bool> seen(nodes_.size());
  std::vector<std::uint32_t> stack{index};
  while (!stack.empty() && leaves.size() < most) {
    const std::uint32_t one = stack.back();
    stack.pop_back();
    if (seen[one]) continue;
    seen[one] = true;
    const std::vector<std::uint32_t>& below = nodes_[one].waits_for;
    if (below.empty()) leaves.push_back(one);
    stack.insert(stack.end(), below.rbegin(), below.rend());
  }
  return leaves;
}

std::string PendingGraph::blockers(const PendingNode& one) const {
  if (one.blocked_by.empty()) return {};
  const ActivityState& first = threads_[one.blocked_by.front()].activities.front();
  std::string text = ", behind " + (first.function.empty() ? "a callback" : first.function) + ", which has run for " +
                     seconds_text(first.seconds);
  if (one.blocked_by.size() > 1) text += ", and " + std::to_string(one.blocked_by.size() - 1) + " more";
  return text;
}

std::string PendingGraph::reason(const PendingNode& one) const {
  if (one.is_lost) return "lost: only combinations refer to it, so nothing can complete it";
  if (one.is_due) return "its callback has not begun";
  if (one.is_running || one.future->operation() != nullptr || !one.waits_for.empty()) return {};
  return "no known operation";
}

// ---- the text

namespace {

// The futures of one kind that wait for the same ones; one future, while there are not too many.
struct Shown {
  std::uint32_t first = 0;  // index of an example
  std::size_t count = 0;
  std::int64_t bytes = 0;
  double oldest = 0;
  std::vector<std::uint32_t> waits_for;  // indices of groups
};

// Returns what all futures of a group have in common: numbers in names differ.
std::string kind_of(const PendingNode& one) {
  const Future& future = *one.future;
  std::string kind = std::to_string(static_cast<int>(future.maker()));
  for (const char c : future.name()) {
    if (c < '0' || c > '9') {
      kind += c;
    } else if (kind.back() != '#') {
      kind += '#';
    }
  }
  if (const OperationFacts* facts = future.operation(); facts != nullptr && facts->place != nullptr)
    kind += facts->place->text + " " + std::to_string(facts->peer);
  kind += one.is_due ? "\1" : one.is_running ? "\2" : one.is_lost ? "\3" : "";
  return kind + future.site();
}

// Returns the indices of the futures that threads wait for: each is shown by itself.
std::set<std::uint32_t> awaited_in(const PendingGraph& graph) {
  std::set<std::uint32_t> found;
  for (const ThreadActivities& thread : graph.threads()) {
    for (const ActivityState& activity : thread.activities) {
      const std::int64_t index = graph.index_of(*activity.future);
      if (index >= 0) found.insert(static_cast<std::uint32_t>(index));
    }
  }
  return found;
}

// Puts the futures into groups: `group_of` gets the group of each one.
std::vector<Shown> grouped(const PendingGraph& graph, bool is_by_kind, std::vector<std::uint32_t>& group_of) {
  const std::vector<PendingNode>& futures = graph.nodes();
  std::vector<Shown> groups;
  std::unordered_map<std::string, std::uint32_t> known;
  group_of.resize(futures.size());
  const std::set<std::uint32_t> awaited = awaited_in(graph);
  for (std::uint32_t i = 0; i < futures.size(); ++i) {
    std::uint32_t group = static_cast<std::uint32_t>(groups.size());
    if (is_by_kind && !awaited.contains(i)) group = known.emplace(kind_of(futures[i]), group).first->second;
    if (group == groups.size()) groups.emplace_back().first = i;
    group_of[i] = group;
    Shown& shown = groups[group];
    ++shown.count;
    const OperationFacts* const facts = futures[i].future->operation();
    if (facts != nullptr && facts->bytes != kUnknown) shown.bytes += facts->bytes;
    const double age = age_in_seconds(*futures[i].future);
    if (age > shown.oldest) {
      shown.oldest = age;
      shown.first = i;
    }
  }
  std::vector<std::uint32_t> added_by(groups.size(), UINT32_MAX);  // the group that a group was last added to
  std::vector<std::uint32_t> order(futures.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return group_of[a] < group_of[b]; });
  for (const std::uint32_t i : order) {
    for (const std::uint32_t other : futures[i].waits_for) {
      const std::uint32_t group = group_of[other];
      if ((group == group_of[i] && is_by_kind) || std::exchange(added_by[group], group_of[i]) == group_of[i]) continue;
      groups[group_of[i]].waits_for.push_back(group);
    }
  }
  return groups;
}

void write_operation(JsonWriter& json, const Future& future, const OperationFacts& facts) {
  json.key("operation").begin_object();
  json.key("name").value(future.name());
  if (facts.place != nullptr) {
    json.key("place").value(facts.place->kind);
    json.key("of").value(facts.place->name);
    if (facts.place->progress != nullptr) json.key("group").value(facts.place->progress->id());
  }
  if (facts.number != kUnknown) json.key("number").value(facts.number);
  if (facts.bytes != kUnknown) json.key("bytes").value(facts.bytes);
  if (facts.peer != kUnknown) json.key("peer").value(facts.peer);
  json.end_object();
}

void write_future(JsonWriter& json, const PendingGraph& graph, const Shown& shown) {
  const PendingNode& one = graph.nodes()[shown.first];
  json.begin_object();
  json.key("text").value(description_of(*one.future));
  json.key("age").value(shown.oldest);
  if (one.future->maker() == Maker::collect_any) json.key("needs_one").value(true);
  if (shown.count > 1) json.key("count").value(static_cast<std::int64_t>(shown.count));
  if (shown.count > 1 && shown.bytes > 0) json.key("bytes").value(shown.bytes);
  if (const std::string reason = graph.reason(one); !reason.empty()) json.key("reason").value(reason);
  if (!shown.waits_for.empty()) json.key("waits_for").values(shown.waits_for);
  if (!one.blocked_by.empty()) json.key("blocked_by").values(one.blocked_by);
  if (const OperationFacts* facts = one.future->operation()) write_operation(json, *one.future, *facts);
  json.end_object();
}

void write_thread(JsonWriter& json, const PendingGraph& graph, const ThreadActivities& thread,
                  const std::vector<std::uint32_t>& group_of) {
  json.begin_object();
  json.key("thread").value(static_cast<std::int64_t>(thread.thread));
  json.key("name").value(thread.name);
  json.key("is_main").value(thread.is_main);
  if (!thread.queue.empty()) json.key("queue").value(thread.queue);
  json.key("activities").begin_array();
  for (const ActivityState& activity : thread.activities) {
    const std::int64_t index = graph.index_of(*activity.future);
    json.begin_object();
    json.key("kind").value(activity.kind == ThreadActivity::Kind::wait ? "wait" : "callback");
    if (index >= 0) json.key("future").value(static_cast<std::int64_t>(group_of[index]));
    json.key("subject").value(subject_of(*activity.future));
    if (!activity.line.empty()) json.key("line").value(activity.line);
    if (!activity.function.empty()) json.key("function").value(activity.function);
    json.key("seconds").value(activity.seconds);
    if (activity.has_timeout) json.key("has_timeout").value(true);
    json.end_object();
  }
  json.end_array().end_object();
}

}  // namespace

std::string as_json(const PendingGraph& graph, std::size_t most, const std::vector<const Future*>& roots) {
  std::vector<std::uint32_t> group_of;
  const std::vector<Shown> groups = grouped(graph, graph.nodes().size() > most, group_of);
  JsonWriter json;
  json.begin_object();
  json.key("futures").begin_array();
  for (const Shown& shown : groups) write_future(json, graph, shown);
  json.end_array();
  json.key("threads").begin_array();
  for (const ThreadActivities& thread : graph.threads()) write_thread(json, graph, thread, group_of);
  json.end_array();
  json.key("roots").begin_array();
  for (const Future* root : roots) {
    const std::int64_t index = graph.index_of(*root);
    if (index >= 0) json.value(static_cast<std::int64_t>(group_of[index]));
  }
  json.end_array().end_object();
  return json.take();
}

}  // namespace cudafuture
