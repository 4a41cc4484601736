// Python objects for the executors of the core.
#pragma once

#include <string>

#include "bind/python.h"
#include "core/executor.h"

namespace cudafuture::bind {

struct HostExecutor {
  std::string name;
  Executor* executor;
};

inline HostExecutor* host_executor_or_null(nb::handle object) {
  return nb::isinstance<HostExecutor>(object) && nb::inst_ready(object) ? nb::inst_ptr<HostExecutor>(object) : nullptr;
}

}  // namespace cudafuture::bind
