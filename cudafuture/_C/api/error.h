// Errors that cross the border between extension modules.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#include "api/export.h"

namespace cudafuture::api {

// The reason why an operation failed. The kinds are the error classes that a program sees.
struct Problem {
  enum class Kind : std::uint8_t {
    storage = 1,
    checksum,
    quota,
    not_found,
    invalid_state,
    timeout,
    blocking,
    value,
    memory,
    authentication,
    other
  };
  Kind kind = Kind::other;
  std::string message = {};
  std::string path = {};     // of the file; empty: none
  std::int32_t code = 0;     // errno; 0: none
  std::uint64_t offset = 0;  // in the file, bytes
  std::uint64_t wanted = 0;  // bytes
  std::uint64_t got = 0;     // bytes
};

// Thrown by functions that need no GIL.
class CUDAFUTURE_API Failure final : public std::exception {
 public:
  explicit Failure(Problem problem);
  ~Failure() override;
  const char* what() const noexcept override;
  const Problem& problem() const noexcept { return problem_; }

 private:
  Problem problem_;
};

// Thrown by functions that need the GIL: an exception of Python is set in this thread.
class CUDAFUTURE_API PythonError final : public std::exception {
 public:
  ~PythonError() override;
  const char* what() const noexcept override;
};

// Returns the reason of a C++ exception, of this interface or any other.
CUDAFUTURE_API Problem problem_of(const std::exception_ptr& error);
// Sets the exception of Python for a problem in this thread. Needs the GIL.
CUDAFUTURE_API void set_error(const Problem& problem);

}  // namespace cudafuture::api
