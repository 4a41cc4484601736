#include "fake_runtime.h"

#include <mutex>
#include <string>

namespace cudafuture::fake {
namespace {

std::mutex gil;
thread_local bool holds_gil = false;
thread_local bool is_engine = false;
thread_local bool has_retired = false;
std::atomic<int> retirements{0};
std::atomic<bool> finalizing{false};

std::mutex rules_mutex;
std::vector<std::string> broken_rules;

bool enter() noexcept {
  if (is_engine) Runtime::broken("a thread of an engine took the runtime's lock");
  if (holds_gil) Runtime::broken("a thread took the runtime's lock twice");
  if (has_retired) Runtime::broken("a thread that had retired took the runtime's lock");
  if (finalizing.load()) return false;
  gil.lock();
  holds_gil = true;
  return true;
}

void leave() noexcept {
  if (!holds_gil) Runtime::broken("a thread released a lock that it did not hold");
  holds_gil = false;
  gil.unlock();
}

void retire() noexcept {
  if (holds_gil) Runtime::broken("a thread retired inside the runtime");
  if (std::exchange(has_retired, true)) Runtime::broken("a thread retired twice");
  ++retirements;
}

void* step_out() noexcept {
  if (!holds_gil) return nullptr;
  leave();
  return &gil;
}

void step_in(void* state) noexcept {
  if (state != nullptr) enter();
}

void release(void* reference) noexcept {
  if (!holds_gil) Runtime::broken("a reference was dropped outside the runtime");
  auto* const counted = static_cast<Object*>(reference);
  if (counted->references.fetch_sub(1) > 1) return;
  if (counted->on_death) counted->on_death();
  delete counted;
}

}  // namespace

std::atomic<int> Object::alive{0};

Object::Object(OnDeath on_death) : on_death(std::move(on_death)) { ++alive; }
Object::~Object() { --alive; }

Foreign share(const Foreign& reference) noexcept {
  ++static_cast<Object*>(reference.get())->references;
  return Foreign(reference.get());
}

void Runtime::install() {
  set_foreign_runtime({.inside = []() noexcept { return holds_gil; },
                       .enter = enter,
                       .leave = leave,
                       .retire = retire,
                       .step_out = step_out,
                       .step_in = step_in,
                       .release = release,
                       .describe = [](void*) { return std::string(); }});
}

bool Runtime::inside() noexcept { return holds_gil; }
void Runtime::set_finalizing(bool value) noexcept { finalizing = value; }
int Runtime::retired() noexcept { return retirements; }

void Runtime::broken(std::string rule) {
  std::lock_guard lock(rules_mutex);
  broken_rules.push_back(std::move(rule));
}

std::vector<std::string> Runtime::take_broken() {
  std::lock_guard lock(rules_mutex);
  return std::exchange(broken_rules, {});
}

Inside::Inside() { enter(); }
Inside::~Inside() { leave(); }

EngineThread::EngineThread() noexcept { is_engine = true; }
EngineThread::~EngineThread() { is_engine = false; }
void EngineThread::mark_this_thread() noexcept { is_engine = true; }

}  // namespace cudafuture::fake
