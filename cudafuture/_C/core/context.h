// The settings of the calling thread under which its callbacks run: the current device of each type, grad mode,
// inference mode, autocast, and the profile that torch.profiler or emit_nvtx() is taking.
#pragma once

#include <c10/core/InferenceMode.h>

#include <atomic>
#include <memory>
#include <optional>

#include "core/stream_pool.h"

namespace cudafuture {

struct ProfileState;   // of a profile that does not outlive its thread's use; null if there is none
struct AutocastState;  // of every device; null if autocast is off everywhere, as it nearly always is

class CallerContext {
 public:
  // Callbacks that run now under the profile of another thread.
  static inline std::atomic<int> profiled{0};

  static CallerContext capture();

  // Applies the captured state, and restores the thread's own state afterwards.
  class Scope {
   public:
    explicit Scope(const CallerContext& context);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

    // Returns true if the end of the scope may clear torch's cache of casts. That takes a lock, which another thread
    // may hold while it frees casts, and with them Python objects: the caller must not hold the GIL (pytorch#119262).
    bool clears_casts() const noexcept { return autocast_before_ != nullptr; }

   private:
    void enter_devices(const CurrentDevices& devices);
    void enter_profile(const ProfileState& profile);

    std::optional<c10::InferenceMode> inference_mode_;  // destroyed last: it resets the grad mode as well
    bool grad_mode_before_;
    bool fw_grad_mode_before_;
    std::shared_ptr<const AutocastState> autocast_before_;  // null: unchanged
    CurrentDevices devices_before_;
    std::shared_ptr<const ProfileState> profile_before_;  // null: unchanged
  };

 private:
  bool grad_mode_ = true;
  bool fw_grad_mode_ = true;
  bool inference_mode_ = false;
  std::shared_ptr<const AutocastState> autocast_;
  std::shared_ptr<const ProfileState> profile_;
  CurrentDevices devices_;
};

}  // namespace cudafuture
