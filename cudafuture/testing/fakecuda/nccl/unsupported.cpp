#include "fakecuda/nccl/unsupported.h"

#include "fakecuda/nccl/error.h"
#include "fakecuda/nccl/group.h"

extern "C" int fakenccl_unsupported(const char* function) {
  return fakenccl::note(fakenccl::fail(
      ncclInvalidUsage, std::string(function) + " is not supported: fake devices run no device code of NCCL."));
}
