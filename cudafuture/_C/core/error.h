// The error that the core itself raises. The binding maps each kind to a class of cudafuture.errors.
#pragma once

#include <exception>
#include <string>
#include <utility>

namespace cudafuture {

enum class ErrorKind { invalid_state, device_mismatch, cancelled, no_thread };

class Error final : public std::exception {
 public:
  Error(ErrorKind kind, std::string message) : kind_(kind), message_(std::move(message)) {}
  ErrorKind kind() const noexcept { return kind_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  ErrorKind kind_;
  std::string message_;
};

// Returns the error for a thread that the system refused to start. A later attempt may succeed.
inline Error no_thread(const std::string& what) {
  return {ErrorKind::no_thread, "no thread could be started for " + what +
                                    ": the system, the user or the container has as many threads as it may (see "
                                    "ulimit -u and pids.max). This operation failed; a later one can succeed"};
}

}  // namespace cudafuture
