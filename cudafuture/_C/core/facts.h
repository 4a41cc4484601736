// The facts about a future that most futures do not have. future.h alone declares the functions that use them.
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "core/future.h"

namespace cudafuture {

// A report of one failure, for the futures that share it.
struct FailureReport {
  bool is_made = false;
  std::shared_ptr<FailureReport> merged;  // null, or the report that replaces this one
};

struct Future::Rare {
  std::unique_ptr<std::vector<c10::Device>> bounding_set;  // null: unbounded
  Executor* executor = nullptr;
  std::shared_ptr<Producer> producer;
  Foreign origin;
  Foreign kept;
  AsyncErrors async_errors;
  std::exception_ptr late_error;
  std::string site;
  std::shared_ptr<FailureReport> report;  // guarded by the lock of all reports; null: not shared
  FuturePtr released;
  std::unique_ptr<std::vector<at::Tensor>> named_tensors;  // null: none
  std::unique_ptr<RegisteredOperation> operation;          // null: none
};

}  // namespace cudafuture
