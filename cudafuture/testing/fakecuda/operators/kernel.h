// An operator's kernel for the host, as a stream of the device runs it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <utility>
#include <vector>

#include "fakecuda/operators/place.h"

namespace fakecuda {

class OperatorKernel {
 public:
  OperatorKernel(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments);

  // The results at `index` that are new are written to these tensors.
  void add_results(size_t index, const std::vector<at::Tensor>& results);
  std::vector<MemoryAccess> accesses() const { return accesses_; }
  const char* name() const { return op_.schema().name().c_str(); }

  // Runs the kernel on the bytes of the device, and returns what it returns.
  std::vector<c10::IValue> run() const;

 private:
  at::Tensor to_placeholder(const at::Tensor& tensor, bool writes);

  c10::OperatorHandle op_;
  std::vector<c10::IValue> arguments_;  // with a placeholder for each tensor of the device
  std::vector<Place> places_;
  std::map<const c10::TensorImpl*, size_t> index_of_;  // a placeholder's place
  std::vector<std::pair<size_t, std::vector<Place>>> results_;
  std::vector<MemoryAccess> accesses_;
};

// The state of a thread that has set nothing: kernels run on any thread, and without autograd.
void remember_thread_state();

}  // namespace fakecuda
