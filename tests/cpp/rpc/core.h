// The functions of the core's interface that its module defines in files with Python, for tests without Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

// The fake of api::call_elsewhere. Tests set it while they have one thread.
struct Elsewhere {
  bool is_held = false;  // calls it in release(), not at once
  bool throws = false;
  std::vector<std::function<void()>> held = {};

  void release() {
    for (const auto& function : std::exchange(held, {})) function();
  }
};
extern Elsewhere elsewhere;

// The fake of the pools of api::make_buffer_pool.
struct Buffers {
  bool are_held = false;  // it waits for release()
  std::vector<std::function<void()>> held = {};
  std::weak_ptr<void> cancel = {};  // the function that cancels the last request

  void release() {
    for (const auto& take : std::exchange(held, {})) take();
  }
};
extern Buffers buffers;
