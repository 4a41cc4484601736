#include "autograd.h"

#include <torch/csrc/distributed/autograd/context/container.h>

#include "private.h"

namespace rpc_ext {

using Container = torch::distributed::autograd::DistAutogradContainer;

struct Instance {
  friend auto member(Instance);
};
struct Initialized {
  friend auto member(Initialized);
};

template struct Private<Instance, &Container::getInstanceInternal>;
template struct Private<Initialized, &Container::initialized_>;

void forget_autograd_rank() { member(Instance{})().*member(Initialized{}) = false; }

}  // namespace rpc_ext
