// The settings of the calling thread that its callbacks run with: the current device of each type, grad mode, inference
// mode and autocast.
#pragma once

#include <c10/core/InferenceMode.h>

#include <memory>
#include <optional>

#include "core/stream_pool.h"

namespace cudafuture {

struct AutocastState;  // of every device; a caller with autocast off everywhere, as nearly always, has none

class CallerContext {
 public:
  static CallerContext capture();

  // Puts the captured state in force, and the thread's own back afterwards.
  class Scope {
   public:
    explicit Scope(const CallerContext& context);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    void enter_devices(const CurrentDevices& devices);

    std::optional<c10::InferenceMode> inference_mode_;  // destroyed last: it resets the grad mode as well
    bool grad_mode_before_;
    bool fw_grad_mode_before_;
    std::shared_ptr<const AutocastState> autocast_before_;  // null: it was not touched
    CurrentDevices devices_before_;
  };

 private:
  bool grad_mode_ = true;
  bool fw_grad_mode_ = true;
  bool inference_mode_ = false;
  std::shared_ptr<const AutocastState> autocast_;
  CurrentDevices devices_;
};

}  // namespace cudafuture
