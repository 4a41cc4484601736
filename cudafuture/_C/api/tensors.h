// The memory of Python's tensors, for reads and writes of other extension modules.
//
//     write    Source: host memory, or device memory that is copied to pinned memory on pool streams
//     read     Targets: the tensors to be filled, or new ones; copies to devices run on pool streams
//
// Device work is ordered as for reads and writes of a DiskStore: a write begins after the work that the caller has
// enqueued, and so do copies to a target; the future of a read has the events of its copies.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/export.h"
#include "api/promise.h"

namespace cudafuture::api {

// Returns the reason why a tensor is not strided data in a memory of its own; none: it is.
CUDAFUTURE_API std::optional<std::string> memory_fault(const at::Tensor& tensor);
// Returns the reason why a tensor's elements are not in its storage: it was freed or shrunk; none: they are. Tensors
// without a storage or without data have no such fault.
CUDAFUTURE_API std::optional<std::string> storage_fault(const at::Tensor& tensor);

// One tensor to be written. Its bytes are in the order of its elements. Any thread may drop it.
class CUDAFUTURE_API Source {
 public:
  virtual ~Source() = default;

  virtual c10::ScalarType dtype() const noexcept = 0;
  virtual const std::vector<std::int64_t>& sizes() const noexcept = 0;
  virtual std::uint64_t nbytes() const noexcept = 0;
  virtual bool is_on_device() const noexcept = 0;

  // ---- a tensor on the host. Throw Failure if its storage was freed or shrunk since
  virtual void gather(std::uint64_t at, std::uint64_t size, std::byte* into) const = 0;  // copies bytes
  // Returns bytes as a tensor whose storage holds only them and that keeps the source alive, without a copy if the
  // tensor is contiguous.
  virtual at::Tensor part(std::uint64_t at, std::uint64_t size) = 0;

  // ---- a tensor on a device
  // Calls `copied` once, on any thread or within this call, with bytes on the host as of part(), or with an error. It
  // must not block, take the GIL, or throw.
  using Copied = std::function<void(at::Tensor bytes, std::exception_ptr error)>;
  virtual void copy_to_host(std::uint64_t at, std::uint64_t size, Copied copied) = 0;
};

// Returns the sources of a sequence of tensors. Needs the GIL. Throws PythonError: TypeError for an object that is no
// tensor, TensorError for a tensor without memory of its own, ValueError for a device without streams or a priority
// above 0.
CUDAFUTURE_API std::vector<std::shared_ptr<Source>> sources_of(_object* tensors, int priority);

// The tensors of one read, by index. Any thread may drop them. One thread at a time uses an index.
class CUDAFUTURE_API Targets {
 public:
  virtual ~Targets() = default;

  virtual std::size_t size() const noexcept = 0;
  virtual std::optional<std::uint64_t> nbytes(std::size_t i) const noexcept = 0;  // none: a new tensor

  // Prepares a tensor for its bytes: allocates a new one, unless the caller has given one. A second call begins anew.
  // Throws Failure (a value) unless dtype and shape match a given tensor; its message continues "key 'k' is ".
  virtual void begin(std::size_t i, c10::ScalarType dtype, const std::vector<std::int64_t>& sizes) = 0;

  // Copies bytes on the host to byte `at` on: now, or enqueued for a device. The caller may drop `bytes`. Throws
  // Failure, and errors of devices.
  virtual void fill(std::size_t i, std::uint64_t at, const at::Tensor& bytes) = 0;

  // Makes `tensor`, which no thread uses, the new tensor, in place of begin() and fill(). False: the caller has given a
  // tensor, or the new one is on a device.
  virtual bool adopt(std::size_t i, const at::Tensor& tensor) = 0;

  // ---- the end, once: no thread uses an index any more
  // Completes a future with the tensor, or with the list of all tensors.
  virtual void complete(Promise& promise, bool gives_list) noexcept = 0;
  virtual void fail(Promise& promise, _object* exception) noexcept = 0;  // takes over a reference
};

// Returns the targets of a read of `count` tensors. `outs`: a sequence of tensors to be filled, or null. `device`: of
// new tensors; none: the host. Needs the GIL. Throws PythonError as sources_of(), and ValueError for a tensor whose
// elements share memory.
CUDAFUTURE_API std::shared_ptr<Targets> targets_of(std::size_t count, _object* outs, _object* device, int priority);

// A tensor of the caller on the host that receives results: contiguous, with one dimension. Any thread may drop it.
class CUDAFUTURE_API Results {
 public:
  virtual ~Results() = default;
  virtual void set(const void* data, std::size_t size) = 0;  // bytes; throws Failure if the tensor was resized
};

// Needs the GIL. The arguments were checked.
CUDAFUTURE_API std::shared_ptr<Results> results_in(_object* tensor);

}  // namespace cudafuture::api
