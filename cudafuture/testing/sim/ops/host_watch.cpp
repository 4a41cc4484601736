#include "sim/ops/host_watch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "machine/operators/facts.h"
#include "machine/operators/values.h"
#include "sim/device/here.h"
#include "sim/ops/access_list.h"
#include "sim/ops/tensors.h"

namespace sim {
namespace {

constexpr int kIdleCalls = 64;  // operators without pinned memory in flight before we leave

struct HostWatch {
  std::mutex mutex;  // guards what follows, and is taken under no other lock
  at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
  bool installed = false;

  std::atomic<bool> wanted{false};
  std::atomic<bool> active{false};
  std::atomic<int> idle{0};
};

HostWatch& watch() {
  static auto* one = new HostWatch;
  return *one;
}

thread_local bool inside = false;  // an operator that is watched: the operators that it calls touch the same memory

struct Inside final : at::ObserverContext {};

void leave() {
  HostWatch& w = watch();
  const std::lock_guard lock(w.mutex);
  if (w.active.exchange(false)) at::disableCallback(w.handle);
}

// True for operators of the host alone that use pinned memory: streams note their own accesses.
bool host_uses_pinned(c10::ArrayRef<const c10::IValue> inputs) {
  bool pinned = false;
  bool device = false;
  for (const c10::IValue& value : inputs) {
    if (value.isDevice()) device |= !value.toDevice().is_cpu();
    each_tensor(value, [&](const at::Tensor& tensor) {
      device |= !tensor.is_cpu();
      pinned = pinned || is_pinned(tensor);
    });
  }
  return pinned && !device;
}

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// Does it look at what is in memory? An operator that is made of others does so in those.
bool touches_memory(const Facts& facts) {
  const std::string_view name = facts.name;
  if (name == "aten::copy_") return true;
  if (facts.is_view || !facts.op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) return false;
  if (name == "aten::resize_" || name == "aten::set_" || name == "aten::is_set_to") return false;
  return !ends_with(name, "_like") && name.substr(0, 10) != "aten::new_";
}

// False: it does nothing to memory itself.
bool look(const at::RecordFunction& call) {
  const auto name = call.operator_name();
  if (!name.has_value()) return false;
  const auto op = c10::Dispatcher::singleton().findSchema(*name);
  if (!op.has_value()) return false;
  const Facts& facts = facts_of(*op);
  if (!touches_memory(facts)) return false;
  AccessList accesses;
  const auto inputs = call.inputs();
  for (std::size_t i = 0; i < inputs.size() && i < facts.arguments.size(); ++i) {
    each_tensor(inputs[i], [&](const at::Tensor& tensor) {
      if (is_pinned(tensor)) accesses.add(tensor, facts.arguments[i].written);
    });
  }
  if (!accesses.empty()) Accelerator::get().host_access(std::move(accesses).take(), here(facts.name.c_str()));
  return true;
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& call) {
  if (inside) return nullptr;
  if (!Accelerator::get().any_pinned_in_flight()) {
    if (watch().idle.fetch_add(1, std::memory_order_relaxed) == kIdleCalls) leave();
    return nullptr;
  }
  if (!host_uses_pinned(call.inputs()) || !look(call)) return nullptr;
  inside = true;
  return std::make_unique<Inside>();
}

void after_operator(const at::RecordFunction&, at::ObserverContext* context) {
  if (context != nullptr) inside = false;
}

}  // namespace

void install_host_watch() { watch().wanted = true; }

void remove_host_watch() {
  watch().wanted = false;
  leave();
}

void watch_host() {
  HostWatch& w = watch();
  w.idle.store(0, std::memory_order_relaxed);
  if (w.active.load(std::memory_order_relaxed) || !w.wanted.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(w.mutex);
  if (w.active.exchange(true)) return;
  if (w.installed) {
    at::reenableCallback(w.handle);
    return;
  }
  w.handle = at::addGlobalCallback(at::RecordFunctionCallback(&before_operator, &after_operator)
                                       .needsInputs(true)
                                       .scopes({at::RecordScope::FUNCTION}));
  w.installed = true;
}

void note_host_read(const at::Tensor& tensor, const char* operation) {
  if (!Accelerator::get().any_pinned_in_flight() || !is_pinned(tensor)) return;
  AccessList accesses;
  accesses.read(tensor);
  if (!accesses.empty()) Accelerator::get().host_access(std::move(accesses).take(), here(operation));
}

}  // namespace sim
