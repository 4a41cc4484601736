// A stop in a stream that the host opens: for tests that need work to be pending.
#pragma once

#include <memory>

namespace machine {

struct Gate {
  bool is_open = false;
};
using GatePtr = std::shared_ptr<Gate>;

}  // namespace machine
