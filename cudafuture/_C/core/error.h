// What the core itself has to say against a call. The binding turns each kind into a class of cudafuture.errors.
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

// The system refused to start a thread. It may not refuse the next one.
inline Error no_thread(const std::string& what) {
  return {ErrorKind::no_thread, "no thread could be started for " + what +
                                    ": the system, the user or the container has as many threads as it may (see "
                                    "ulimit -u and pids.max). This operation failed; a later one can succeed"};
}

}  // namespace cudafuture
