#include "core/context.h"

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <array>

#include "core/stream_pool.h"
#include "core/sync_edge.h"

namespace cudafuture {
namespace {

constexpr std::size_t kDevices = at::autocast::_AUTOCAST_SUPPORTED_DEVICES.size();

}  // namespace

struct AutocastState {
  struct PerDevice {
    bool enabled;
    at::ScalarType dtype;
  };
  std::array<PerDevice, kDevices> devices;
  bool cache_enabled;
};

// The profile's end drops its owner: a callback that runs later finds none, and runs without it.
struct ProfileState {
  std::weak_ptr<c10::ThreadLocalDebugInfo> owner;
  std::shared_ptr<c10::ThreadLocalDebugInfo> own;  // of a thread that has applied another's; null: none
  at::RecordFunctionTLS observers;
};

namespace {

bool autocast_is_off() {
  const auto excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  return excluded.has_all(c10::autocast_dispatch_keyset);
}

std::shared_ptr<const AutocastState> capture_autocast() {
  auto state = std::make_shared<AutocastState>();
  for (std::size_t i = 0; i < kDevices; ++i) {
    const at::DeviceType type = at::autocast::_AUTOCAST_SUPPORTED_DEVICES[i];
    state->devices[i] = {at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)};
  }
  state->cache_enabled = at::autocast::is_autocast_cache_enabled();
  return state;
}

// Applies a state. Null switches autocast off on every device, and leaves the dtypes and the cache alone.
void apply_autocast(const AutocastState* state) {
  for (std::size_t i = 0; i < kDevices; ++i) {
    const at::DeviceType type = at::autocast::_AUTOCAST_SUPPORTED_DEVICES[i];
    at::autocast::set_autocast_enabled(type, state != nullptr && state->devices[i].enabled);
    if (state != nullptr) at::autocast::set_autocast_dtype(type, state->devices[i].dtype);
  }
  if (state != nullptr) at::autocast::set_autocast_cache_enabled(state->cache_enabled);
}

}  // namespace

CallerContext CallerContext::capture() {
  CallerContext context;
  const c10::AutogradState& autograd = c10::AutogradState::get_tls_state();
  context.grad_mode_ = autograd.get_grad_mode();
  context.fw_grad_mode_ = autograd.get_fw_grad_mode();
  context.inference_mode_ = autograd.get_inference_mode();
  if (!autocast_is_off()) context.autocast_ = capture_autocast();
  if (c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) != nullptr) {
    context.profile_ = std::make_shared<const ProfileState>(
        ProfileState{c10::ThreadLocalDebugInfo::current(), nullptr, at::get_record_function_tls_()});
  }
  if (any_device_with_streams()) context.devices_ = current_devices();
  return context;
}

CallerContext::Scope::Scope(const CallerContext& context) {
  c10::AutogradState& autograd = c10::AutogradState::get_tls_state();
  grad_mode_before_ = autograd.get_grad_mode();
  fw_grad_mode_before_ = autograd.get_fw_grad_mode();
  if (autograd.get_inference_mode() != context.inference_mode_) inference_mode_.emplace(context.inference_mode_);
  autograd.set_grad_mode(context.grad_mode_);
  autograd.set_fw_grad_mode(context.fw_grad_mode_);
  if (context.profile_ != nullptr) enter_profile(*context.profile_);
  if (!context.devices_.empty() && stands(SyncEdge::caller_device)) enter_devices(context.devices_);
  if (context.autocast_ == nullptr && autocast_is_off()) return;
  autocast_before_ = capture_autocast();
  apply_autocast(context.autocast_.get());
  at::autocast::increment_nesting();
}

// Also notes a device that does not change: each one is restored afterwards, whatever the callback did.
void CallerContext::Scope::enter_devices(const CurrentDevices& devices) {
  for (c10::Device device : devices) {
    const c10::impl::DeviceGuardImplInterface* const guard = c10::impl::getDeviceGuardImpl(device.type());
    devices_before_.push_back(guard->getDevice());
    if (devices_before_.back() != device) guard->uncheckedSetDevice(device);  // creates no context
  }
}

void CallerContext::Scope::enter_profile(const ProfileState& profile) {
  std::shared_ptr<c10::ThreadLocalDebugInfo> owner = profile.owner.lock();
  if (owner == nullptr) return;
  profile_before_ = std::make_shared<const ProfileState>(
      ProfileState{{}, c10::ThreadLocalDebugInfo::current(), at::get_record_function_tls_()});
  profiled.fetch_add(1, std::memory_order_relaxed);
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(owner));
  at::set_record_function_tls_(profile.observers);
}

CallerContext::Scope::~Scope() {
  if (profile_before_ != nullptr) {
    profiled.fetch_sub(1, std::memory_order_relaxed);
    at::set_record_function_tls_(profile_before_->observers);
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(profile_before_->own);
  }
  for (c10::Device device : devices_before_) c10::impl::getDeviceGuardImpl(device.type())->uncheckedSetDevice(device);
  if (autocast_before_ != nullptr) {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    apply_autocast(autocast_before_.get());
  }
  c10::AutogradState& autograd = c10::AutogradState::get_tls_state();
  autograd.set_grad_mode(grad_mode_before_);
  autograd.set_fw_grad_mode(fw_grad_mode_before_);
}

}  // namespace cudafuture
