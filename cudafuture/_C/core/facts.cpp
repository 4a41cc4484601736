#include "core/facts.h"

#include <algorithm>
#include <utility>

namespace cudafuture {
namespace {

std::mutex reports;  // the last lock that a thread takes

std::shared_ptr<FailureReport> final_report(std::shared_ptr<FailureReport> report) {
  while (report->merged != nullptr) report = report->merged;
  return report;
}

}  // namespace

const char* name_of(State state) noexcept {
  switch (state) {
    case State::pending:
      return "pending";
    case State::completed:
      return "completed";
    case State::failed:
      return "failed";
    case State::cancelled:
      return "cancelled";
  }
  return "?";
}

const char* name_of(Maker maker) noexcept {
  switch (maker) {
    case Maker::none:
      return "";
    case Maker::submit:
      return "submit";
    case Maker::then:
      return "then";
    case Maker::then_async:
      return "then_async";
    case Maker::gather:
      return "gather";
    case Maker::collect_all:
      return "collect_all";
    case Maker::collect_any:
      return "collect_any";
  }
  return "?";
}

Future::Rare& Future::rare() {
  if (rare_.load(std::memory_order_relaxed) == nullptr) rare_.store(new Rare, std::memory_order_release);
  return *rare_.load(std::memory_order_relaxed);
}

bool Future::is_bounded() const noexcept {
  const Rare* rare = find_rare();
  return rare != nullptr && rare->bounding_set != nullptr;
}

const std::vector<c10::Device>& Future::bounding_set() const noexcept {
  static const std::vector<c10::Device> none;
  const Rare* rare = find_rare();
  return rare == nullptr || rare->bounding_set == nullptr ? none : *rare->bounding_set;
}

void Future::set_bounding_set(std::vector<c10::Device> devices) {
  const auto key = [](c10::Device d) { return std::pair(static_cast<int>(d.type()), d.index()); };
  std::sort(devices.begin(), devices.end(), [&](auto a, auto b) { return key(a) < key(b); });
  devices.erase(std::unique(devices.begin(), devices.end()), devices.end());
  rare().bounding_set = std::make_unique<std::vector<c10::Device>>(std::move(devices));
}

Executor* Future::default_executor() const noexcept {
  const Rare* rare = find_rare();
  return rare == nullptr ? nullptr : rare->executor;
}
void Future::set_default_executor(Executor* executor) { rare().executor = executor; }
void* Future::origin() const noexcept {
  const Rare* rare = find_rare();
  return rare == nullptr ? nullptr : rare->origin.get();
}
void Future::set_origin(Foreign origin) { rare().origin = std::move(origin); }

Future::Rare& Future::locked_rare() {
  std::lock_guard lock(mutex_);
  return rare();
}

std::string Future::site() const {
  std::lock_guard lock(mutex_);
  const Rare* rare = find_rare();
  return rare == nullptr ? std::string() : rare->site;
}
void Future::set_site(std::string site) {
  std::lock_guard lock(mutex_);
  if (rare().site.empty()) rare().site = std::move(site);
}

void Future::keep(Foreign owner) { rare().kept = std::move(owner); }
void Future::add_async_errors(std::shared_ptr<AsyncErrorSource> source) {
  std::lock_guard lock(mutex_);
  if (!done()) rare().async_errors.add(std::move(source));
}
void Future::inherit_async_errors(const Future& parent) {
  const AsyncErrors* const inherited = parent.async_errors();
  if (inherited == nullptr) return;
  const AsyncErrors undecided = inherited->undecided();
  std::lock_guard lock(mutex_);
  if (!done() && !undecided.empty()) rare().async_errors.add(undecided);
}
void Future::inherit_host_time(const Future& parent) noexcept {
  if (parent.completed_at_.generation == 0) return;
  std::lock_guard lock(mutex_);
  if (!done()) completed_at_ = later_of(completed_at_, parent.completed_at_);
}
void Future::set_producer(std::shared_ptr<Producer> producer) { rare().producer = std::move(producer); }
FuturePtr Future::released() {
  FuturePtr released;
  bool is_over;
  {
    std::lock_guard lock(mutex_);
    if (find_rare() == nullptr && !releases_) return nullptr;
    if (releases_ && rare().released == nullptr) rare().released = c10::make_intrusive<Future>(priority_);
    released = rare().released;
    is_over = is_released_;
  }
  if (is_over) released->complete(Value());
  return released;
}
void Future::set_released(FuturePtr released) { rare().released = std::move(released); }
void Future::set_operation(const OperationFacts& facts) {
  if (done()) return;
  std::unique_ptr<RegisteredOperation>& operation = rare().operation;
  if (operation != nullptr) return;
  operation = std::make_unique<RegisteredOperation>(*this, facts);
  operation->begin();
}
const OperationFacts* Future::operation() const noexcept {
  const Rare* rare = find_rare();
  return rare == nullptr || rare->operation == nullptr ? nullptr : &rare->operation->facts();
}
void Future::end_operation(Rare* rare) noexcept {
  if (rare != nullptr && rare->operation != nullptr) rare->operation->end();
}
void Future::promise_release() { releases_ = true; }
void Future::release() noexcept {
  FuturePtr released;
  {
    std::lock_guard lock(mutex_);
    if (!releases_ || std::exchange(is_released_, true)) return;
    if (Rare* const rare = find_rare()) released = rare->released;
  }
  if (released != nullptr) released->complete(Value());
}

bool Future::claim_report_of_failure() noexcept {
  if (seen_.exchange(true, std::memory_order_relaxed)) return false;
  if (!shares_failure_report()) return true;
  std::lock_guard lock(reports);
  return !std::exchange(final_report(find_rare()->report)->is_made, true);
}

void Future::share_failure_report(Future& one, Future& other) {
  std::shared_ptr<FailureReport>& mine = one.locked_rare().report;
  std::shared_ptr<FailureReport>& theirs = other.locked_rare().report;
  std::lock_guard lock(reports);
  mine = mine == nullptr ? std::make_shared<FailureReport>() : final_report(mine);
  theirs = theirs == nullptr ? mine : final_report(theirs);
  if (theirs == mine) return;
  mine->is_made = mine->is_made || theirs->is_made;
  theirs->merged = mine;
}

bool Future::shares_failure_report() const {
  std::lock_guard lock(reports);
  const Rare* rare = find_rare();
  return rare != nullptr && rare->report != nullptr;
}

}  // namespace cudafuture
