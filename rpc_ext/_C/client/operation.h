// One call of a program to an offload client. The GIL guards it, as it guards all of a client: no lock is needed.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "python.h"

namespace rpc_ext::offload::client {

class OffloadOperation final {
 public:
  // `complete(values, digests, written, error, index)` is called once, when all of `count` keys are done: `values` is a
  // list, `digests` a list of numbers, `written` has a byte for each key, and `error` is that of the first key that
  // failed, or None. `join(index, future)` is called for a value that is on its way to a device.
  OffloadOperation(std::size_t count, bool has_values, py::object complete, py::object join);

  void end(std::size_t index, const py::object& value, const py::object& error);
  void join(std::size_t index, const py::object& future) {
    const py::object join = join_;  // the end of the operation drops it
    call(join, index, future);
  }
  void set_digest(std::size_t index, std::uint64_t digest);

 private:
  std::size_t left_;
  std::string written_;
  std::vector<py::object> values_;
  std::vector<std::uint64_t> digests_;
  std::size_t failed_ = 0;
  py::object error_ = py::none();
  py::object complete_, join_;
};

using OperationPtr = std::shared_ptr<OffloadOperation>;

}  // namespace rpc_ext::offload::client
