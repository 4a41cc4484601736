#include "core/registered_operation.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <deque>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "core/debug_socket.h"
#include "core/future.h"
#include "core/process.h"
#include "core/progress.h"
#include "core/spin_lock.h"

namespace cudafuture {

struct alignas(64) RegisteredOperation::Part {
  SpinLock lock;
  RegisteredOperation* first = nullptr;

  // Parts belong to threads, in turn, so that engines' threads seldom meet at a lock.
  static std::array<Part, 16>& all() noexcept {
    static auto* parts = new std::array<Part, 16>;  // leaked: engines run until the end of the process
    return *parts;
  }
  static Part& of_thread() noexcept {
    static std::atomic<std::size_t> threads{0};
    static thread_local Part* part = nullptr;
    if (part == nullptr) [[unlikely]]
      part = &all()[threads.fetch_add(1, std::memory_order_relaxed) % all().size()];
    return *part;
  }
};

namespace {

std::mutex& places_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

// Returns the progress that an operation counts in; null: none.
GroupRecord* counted_in(const OperationFacts& facts) noexcept {
  return facts.place != nullptr && facts.place->is_counted ? facts.place->progress : nullptr;
}

std::string text_of_bytes(std::int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double size = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (size >= 1024 && unit + 1 < std::size(kUnits)) {
    size /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.3g %s", size, kUnits[unit]);
  return text;
}

}  // namespace

OperationPlace& OperationPlace::make(const std::string& kind, const std::string& name, const std::string& preposition) {
  std::string text = preposition.empty() ? "" : preposition + " " + kind + " '" + name + "'";
  return *new OperationPlace{kind, name, std::move(text)};
}

OperationPlace& OperationPlace::find(const std::string& kind, const std::string& name, const std::string& preposition) {
  static auto* places = new std::map<std::tuple<std::string, std::string, std::string>, OperationPlace*>;
  std::lock_guard lock(places_mutex());
  OperationPlace*& place = (*places)[{kind, name, preposition}];
  if (place == nullptr) place = &make(kind, name, preposition);
  return *place;
}

std::string text_of(const OperationFacts& facts) {
  std::string text;
  if (facts.number != kUnknown) text += " #" + std::to_string(facts.number);
  if (facts.peer != kUnknown) text += " with rank " + std::to_string(facts.peer);
  if (facts.place != nullptr && !facts.place->text.empty()) text += " " + facts.place->text;
  if (facts.bytes != kUnknown) text += " (" + text_of_bytes(facts.bytes) + ")";
  return text;
}

RegisteredOperation::RegisteredOperation(Future& future, const OperationFacts& facts) noexcept
    : future_(future), facts_(facts), part_(Part::of_thread()) {}

void RegisteredOperation::begin() noexcept {
  if (is_forked_child()) return;  // the lock may be held by a thread that does not exist here
  DebugSocket::require();
  trace(TraceEvent::issued, future_);
  if (GroupRecord* const progress = counted_in(facts_)) progress->issued(future_.name(), facts_.number);
  c10::raw::weak_intrusive_ptr::incref(&future_);
  std::lock_guard lock(part_.lock);
  next_ = part_.first;
  if (next_ != nullptr) next_->link_ = &next_;
  link_ = &part_.first;
  part_.first = this;
}

void RegisteredOperation::end() noexcept {
  if (is_forked_child()) {  // the lock may be held by a thread that does not exist here
    if (std::exchange(link_, nullptr) != nullptr) c10::raw::weak_intrusive_ptr::decref(&future_);
    return;
  }
  {
    std::lock_guard lock(part_.lock);
    if (link_ == nullptr) return;
    *link_ = next_;
    if (next_ != nullptr) next_->link_ = link_;
    link_ = nullptr;
  }
  if (GroupRecord* const progress = counted_in(facts_)) progress->ended();
  c10::raw::weak_intrusive_ptr::decref(&future_);
}

std::vector<WeakFuture> RegisteredOperation::all() {
  std::vector<WeakFuture> futures;
  for (Part& part : Part::all()) {
    std::lock_guard lock(part.lock);
    for (RegisteredOperation* one = part.first; one != nullptr; one = one->next_) {
      futures.emplace_back(one->future_);
    }
  }
  return futures;
}

}  // namespace cudafuture
