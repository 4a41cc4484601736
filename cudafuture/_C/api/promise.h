// The producer's side of a CUDAFuture that another extension module completes.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>
#include <string>

#include "api/export.h"

struct _object;  // PyObject

namespace cudafuture::api {

// A running future, which cancel() does not end. Its callbacks run on the library's callback thread. Completing it
// takes no GIL. A promise that is dropped while its future is pending fails the future.
class CUDAFUTURE_API Promise {
 public:
  virtual ~Promise() = default;  // any thread

  virtual _object* future() = 0;  // a new reference to the CUDAFuture. Needs the GIL

  // ---- any thread; a call after the first complete() or fail() does nothing
  virtual void complete(c10::IValue value) noexcept = 0;  // a number, a tensor, a list of tensors, or none
  // Takes over a reference. In a thread with the GIL, the exception gets a note with the future's name.
  virtual void fail(_object* exception) noexcept = 0;
  virtual void release() noexcept = 0;  // completes `released`, unless it is done
};

// `priority`: of the future's callbacks; it was checked. `has_released`: the future has a future `released`. `worker`:
// the one that the operation is sent to; empty: none.
CUDAFUTURE_API std::shared_ptr<Promise> make_promise(std::string name, int priority, bool has_released,
                                                     const std::string& worker = {});

}  // namespace cudafuture::api
