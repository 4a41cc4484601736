#include "core/async_error_source.h"

#include <algorithm>
#include <utility>

namespace cudafuture {

void AsyncErrors::add(std::shared_ptr<AsyncErrorSource> source) {
  if (std::find(sources_.begin(), sources_.end(), source) == sources_.end()) sources_.push_back(std::move(source));
}

void AsyncErrors::add(const AsyncErrors& others) {
  for (const std::shared_ptr<AsyncErrorSource>& source : others.sources_) add(source);
}

AsyncErrors AsyncErrors::undecided() const {
  AsyncErrors rest;
  for (const std::shared_ptr<AsyncErrorSource>& source : sources_) {
    source->error();  // updates has_succeeded()
    if (!source->has_succeeded()) rest.sources_.push_back(source);
  }
  return rest;
}

std::exception_ptr AsyncErrors::error() const noexcept {
  for (const std::shared_ptr<AsyncErrorSource>& source : sources_) {
    if (std::exception_ptr error = source->error()) return error;
  }
  return nullptr;
}

bool AsyncErrors::confirm() const noexcept {
  return std::all_of(sources_.begin(), sources_.end(), [](const auto& source) { return source->confirm(); });
}

void AsyncErrors::consumed() const {
  for (const std::shared_ptr<AsyncErrorSource>& source : sources_) source->consumed();
}

}  // namespace cudafuture
