#include "api/error.h"

namespace cudafuture::api {

Failure::Failure(Problem problem) : problem_(std::move(problem)) {}
Failure::~Failure() = default;
const char* Failure::what() const noexcept { return problem_.message.c_str(); }

PythonError::~PythonError() = default;
const char* PythonError::what() const noexcept { return "an exception of Python is set"; }

}  // namespace cudafuture::api
