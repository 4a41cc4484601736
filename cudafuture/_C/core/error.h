// What the core itself has to say against a call. The binding turns each kind into a class of cudafuture.errors.
#pragma once

#include <exception>
#include <string>
#include <utility>

namespace cudafuture {

enum class ErrorKind { invalid_state, device_mismatch, cancelled };

class Error final : public std::exception {
 public:
  Error(ErrorKind kind, std::string message) : kind_(kind), message_(std::move(message)) {}
  ErrorKind kind() const noexcept { return kind_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  ErrorKind kind_;
  std::string message_;
};

}  // namespace cudafuture
