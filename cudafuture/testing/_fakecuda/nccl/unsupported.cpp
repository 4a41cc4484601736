#include "unsupported.h"

#include "error.h"
#include "group.h"

int fakenccl::unsupported(const char* function) {
  return note(fail(ncclInvalidUsage,
                   std::string(function) + " is not supported: simulated devices run no device code of NCCL."));
}
