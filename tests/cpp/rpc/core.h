// The functions of the core's interface that its module defines in files with Python, for tests without Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

// What api::call_elsewhere does with a function. Tests set it while they have one thread.
struct Elsewhere {
  bool is_held = false;  // calls it in release(), not at once
  bool throws = false;
  std::vector<std::function<void()>> held = {};

  void release() {
    for (const auto& function : std::exchange(held, {})) function();
  }
};
extern Elsewhere elsewhere;

// What the pools of api::make_buffer_pool do with a request for a buffer.
struct Buffers {
  bool are_held = false;  // it waits for release()
  std::vector<std::function<void()>> held = {};
  std::weak_ptr<void> cancel = {};  // the function that cancels the last request

  void release() {
    for (const auto& take : std::exchange(held, {})) take();
  }
};
extern Buffers buffers;
