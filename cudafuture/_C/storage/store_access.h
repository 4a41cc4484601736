// A store as other extension modules use it: through a capsule of a shared pointer, by virtual functions. They need not
// link to the core.
//
// An operation's `Done` is called once, when the operation has ended: on any thread, the engine's included, or within
// the call that began the operation. It must not block, take the interpreter's lock, or throw.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cudafuture::storage {

// The reason for which an operation failed. The kinds are the classes of errors that a program sees.
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

// The tensor that a key had when it was looked up. It keeps the tensor's place on the disk.
struct FoundTensor {
  c10::ScalarType dtype = c10::ScalarType::Byte;
  std::vector<std::int64_t> sizes;
  std::uint64_t nbytes = 0;
  std::uint64_t digest = 0;  // that the store keeps, of the seed
  std::uint64_t seed = 0;
  bool has_digest = false;
  std::shared_ptr<const void> entry;
};

// Bytes of a tensor that are to be read: from `begin` on, a multiple of 64 KiB.
struct PartRead {
  const FoundTensor* tensor;
  std::uint64_t begin;
  std::byte* into;
  std::size_t size;
};

// A tensor that is to be written: its bytes lie together on the host.
struct TensorWrite {
  std::string key;
  c10::ScalarType dtype;
  const std::vector<std::int64_t>* sizes;
  const std::byte* from;
  std::size_t size;
  std::uint64_t digest;  // that the bytes must have
};

class StoreAccess {
 public:
  using Done = std::function<void(const Problem*)>;  // null: the operation succeeded

  virtual ~StoreAccess() = default;

  virtual bool is_closed() const noexcept = 0;
  // Returns the tensor of a key; none where there is no such key.
  virtual std::optional<FoundTensor> find(const std::string& key) = 0;

  // Reads the parts, and writes the digest of each to `digests`. The caller keeps the memory of both.
  virtual void read(const std::vector<PartRead>& parts, std::uint64_t* digests, Done done) = 0;
  virtual void write(const TensorWrite& tensor, Done done) = 0;
  virtual void erase(const std::vector<std::string>& keys, Done done) = 0;

  // Returns the digest of bytes that lie together.
  virtual std::uint64_t digest(const void* data, std::size_t size) const noexcept = 0;

  // Calls a function on another thread, which may take the interpreter's lock.
  virtual void call_elsewhere(std::function<void()> function) = 0;
};

// Memory of a pool, for messages.
class PoolAccess {
 public:
  // `tensor` is not defined where the pool was closed, or the request was given up.
  using Taken = std::function<void(at::Tensor tensor)>;

  virtual ~PoolAccess() = default;

  // Calls `taken` with a tensor of bytes, at once where there is room. Otherwise the request waits, and the function
  // that is returned gives it up.
  virtual std::function<void()> take(std::uint64_t size, Taken taken) = 0;
};

}  // namespace cudafuture::storage
