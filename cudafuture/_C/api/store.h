// A DiskStore for other extension modules.
//
// Each operation calls its `Done` once, when it ends. The call can come on any thread, the engine's included, or within
// the call that began the operation. `Done` must not block, take the interpreter's lock, or throw.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/error.h"
#include "api/export.h"

struct _object;  // PyObject

namespace cudafuture::api {

using Done = std::function<void(const Problem*)>;  // null: the operation succeeded

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

// A tensor whose parts are written separately; see DiskStore.begin_write.
class CUDAFUTURE_API MultipartWrite {
 public:
  virtual ~MultipartWrite() = default;  // aborts, unless commit() or abort() was called
  // Writes the bytes from `at` on, a multiple of 64 KiB; `digest`: their required checksum. The caller owns the memory
  // until `done`. Throws Failure: a value, if some of the bytes belong to an earlier part or are not in the tensor; an
  // invalid state, after commit() or abort().
  virtual void put(std::uint64_t at, const std::byte* from, std::size_t size, std::uint64_t digest, Done done) = 0;
  virtual void commit(Done done) = 0;  // throws as put()
  virtual void abort() noexcept = 0;
};

class CUDAFUTURE_API Store {
 public:
  virtual ~Store() = default;

  virtual bool is_closed() const noexcept = 0;
  // Returns the tensor of a key; none if the key is missing.
  virtual std::optional<FoundTensor> find(const std::string& key) = 0;

  // Reads the parts. The caller owns the memory of the bytes and of the checksums.
  virtual void read(const std::vector<PartRead>& parts, Done done) = 0;
  virtual void write(const TensorWrite& tensor, Done done) = 0;
  virtual void erase(const std::vector<std::string>& keys, Done done) = 0;
  // Throws Failure: a quota, or any other error of the store.
  virtual std::shared_ptr<MultipartWrite> begin_write(const std::string& key, c10::ScalarType dtype,
                                                      const std::vector<std::int64_t>& sizes) = 0;
};

// Returns the store of a DiskStore. Needs the GIL. Throws PythonError: TypeError.
CUDAFUTURE_API std::shared_ptr<Store> store_of(_object* disk_store);

}  // namespace cudafuture::api
