// A failed read or write. The binding maps it to StorageError or NotFoundError of cudafuture.errors.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <system_error>
#include <utility>

namespace cudafuture::io {

enum class FailureKind : std::uint8_t { storage, checksum, quota, not_found };

class Failure final : public std::exception {
 public:
  Failure(std::string message, int code, std::string path, std::uint64_t offset = 0, std::uint64_t wanted = 0,
          std::uint64_t got = 0, FailureKind kind = FailureKind::storage)
      : message_(std::move(message)),
        path_(std::move(path)),
        code_(code),
        offset_(offset),
        wanted_(wanted),
        got_(got),
        kind_(kind) {}

  const char* what() const noexcept override { return message_.c_str(); }
  int code() const noexcept { return code_; }  // errno; 0: none, as at the end of a file
  const std::string& path() const noexcept { return path_; }
  std::uint64_t offset() const noexcept { return offset_; }  // of the whole read or write, in bytes
  std::uint64_t wanted() const noexcept { return wanted_; }  // bytes
  std::uint64_t got() const noexcept { return got_; }        // bytes before the first failed one
  FailureKind kind() const noexcept { return kind_; }

 private:
  std::string message_;
  std::string path_;
  int code_;
  std::uint64_t offset_;
  std::uint64_t wanted_;
  std::uint64_t got_;
  FailureKind kind_;
};

// Throws the failure of a system call on `path` with the errno `code`; the message begins with `verb`.
[[noreturn]] inline void throw_errno(const char* verb, const std::string& path, int code) {
  throw Failure(std::string(verb) + " " + path + ": " + std::generic_category().message(code), code, path);
}

// Returns the failure for a tensor whose bytes have changed on the disk.
inline Failure not_as_written(const std::string& key, const std::string& path, std::uint64_t offset,
                              std::uint64_t size) {
  return {"key '" + key + "': its " + std::to_string(size) + " bytes at offset " + std::to_string(offset) + " of " +
              path + " are not those that were written",
          0,
          path,
          offset,
          size,
          0,
          FailureKind::checksum};
}

inline Failure no_such_key(const std::string& key, const std::string& folder, bool is_durable) {
  const char* const hint = is_durable ? "" : "; this store began empty: one with durable=True keeps its keys";
  return {"there is no key '" + key + "'" + hint, 0, folder, 0, 0, 0, FailureKind::not_found};
}

// Returns the failure for a tensor whose bytes changed before they were written.
inline Failure not_as_given(const std::string& key) {
  return {"key '" + key + "': the bytes to be written do not have the digest that was given for them",
          0,
          "",
          0,
          0,
          0,
          FailureKind::checksum};
}

}  // namespace cudafuture::io
