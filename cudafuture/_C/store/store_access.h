// A store's interface for other extension modules: virtual functions, through a capsule of a shared pointer. They need
// not link to the core.
//
// Each operation calls its `Done` once, when it ends. The call can come on any thread, the engine's included, or within
// the call that began the operation. `Done` must not block, take the interpreter's lock, or throw.
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

namespace cudafuture::store {

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

// The tensor of a key at the time of the lookup. It keeps the tensor's extent allocated.
struct FoundTensor {
  c10::ScalarType dtype = c10::ScalarType::Byte;
  std::vector<std::int64_t> sizes;
  std::uint64_t nbytes = 0;
  std::uint64_t digest = 0;  // the checksum that the store keeps, with this seed
  std::uint64_t seed = 0;
  bool has_digest = false;
  std::shared_ptr<const void> entry;
};

// A range of a tensor to read: from `begin` on, a multiple of 64 KiB.
struct PartRead {
  const FoundTensor* tensor;
  std::uint64_t begin;
  std::byte* into;
  std::size_t size;
  std::uint64_t* digest;  // receives the checksum of the bytes; null: none is needed, and nothing is verified
};

// A tensor to write: its bytes are contiguous on the host.
struct TensorWrite {
  std::string key;
  c10::ScalarType dtype;
  const std::vector<std::int64_t>* sizes;
  const std::byte* from;
  std::size_t size;
  std::uint64_t digest;  // the required checksum of the bytes
};

class StoreAccess {
 public:
  using Done = std::function<void(const Problem*)>;  // null: the operation succeeded

  virtual ~StoreAccess() = default;

  virtual bool is_closed() const noexcept = 0;
  // Returns the tensor of a key; none if the key is missing.
  virtual std::optional<FoundTensor> find(const std::string& key) = 0;

  // Reads the parts. The caller owns the memory of the bytes and of the checksums.
  virtual void read(const std::vector<PartRead>& parts, Done done) = 0;
  virtual void write(const TensorWrite& tensor, Done done) = 0;
  virtual void erase(const std::vector<std::string>& keys, Done done) = 0;

  // Returns the checksum of contiguous bytes.
  virtual std::uint64_t digest(const void* data, std::size_t size) const noexcept = 0;

  // Calls a function on another thread that may take the interpreter's lock.
  virtual void call_elsewhere(std::function<void()> function) = 0;
};

// Memory of a pool, for messages.
class PoolAccess {
 public:
  // `tensor` is undefined if the pool was closed or the request was cancelled.
  using Taken = std::function<void(at::Tensor tensor)>;

  virtual ~PoolAccess() = default;

  // Calls `taken` with a tensor of bytes, immediately if there is room. Otherwise the request waits, and the returned
  // function cancels it.
  virtual std::function<void()> take(std::uint64_t size, Taken taken) = 0;
};

}  // namespace cudafuture::store
