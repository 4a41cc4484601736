// An operator's kernel for the host, as a stream of the device runs it.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "fakecuda/operators/place.h"
#include "machine/operators/facts.h"
#include "machine/operators/values.h"

namespace fakecuda {

class OperatorKernel {
 public:
  OperatorKernel(const Facts& facts, const Values& arguments);

  // The kernel writes the next return that is new to this tensor, or to the tensors of this list.
  void write_new(const c10::IValue& made);
  std::vector<MemoryAccess> accesses() const { return accesses_; }
  const char* name() const { return facts_.name.c_str(); }

  // Runs the kernel on the bytes of the device, and returns what it returns.
  Values run() const;

 private:
  at::Tensor to_placeholder(const at::Tensor& tensor, bool writes);

  const Facts& facts_;
  Values arguments_;  // with a placeholder for each tensor of the device
  std::vector<Place> places_;
  std::map<const c10::TensorImpl*, size_t> index_of_;  // a placeholder's place
  std::vector<std::vector<Place>> made_;               // for each return that is new
  std::vector<MemoryAccess> accesses_;
};

}  // namespace fakecuda
