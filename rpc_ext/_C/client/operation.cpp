#include "client/operation.h"

#include <pybind11/stl.h>

#include <utility>

namespace rpc_ext::offload::client {

OffloadOperation::OffloadOperation(std::size_t count, bool has_values, py::object complete, py::object join)
    : left_(count),
      written_(count, '\0'),
      values_(has_values ? count : 0, py::none()),
      complete_(std::move(complete)),
      join_(std::move(join)) {}

void OffloadOperation::set_digest(std::size_t index, std::uint64_t digest) {
  digests_.resize(written_.size());
  digests_[index] = digest;
}

void OffloadOperation::end(std::size_t index, const py::object& value, const py::object& error) {
  if (error.is_none()) {
    written_[index] = '\1';
    if (!values_.empty()) values_[index] = value;
  } else if (error_.is_none()) {
    error_ = error;
    failed_ = index;
  }
  if (--left_ > 0) return;
  const py::object complete = std::exchange(complete_, {});
  join_ = {};
  call(complete, std::move(values_), std::move(digests_), py::bytes(written_), std::exchange(error_, py::none()),
       failed_);
}

}  // namespace rpc_ext::offload::client
