// The exported functions that need a real device: windows, device communicators and one-sided operations.
//
// nccl.h is not included here: it and nccl_device.h declare these functions with parameters, which do not matter where
// each call fails. Under the C calling convention the caller removes the arguments.
#include "unsupported.h"

#define UNSUPPORTED(function) \
  extern "C" int function() { return fakenccl::unsupported(#function); }

UNSUPPORTED(ncclCommWindowRegister)
UNSUPPORTED(ncclCommWindowDeregister)
UNSUPPORTED(ncclDevCommCreate)
UNSUPPORTED(ncclDevCommDestroy)
UNSUPPORTED(ncclGetLsaMultimemDevicePointer)
UNSUPPORTED(ncclGetPeerDevicePointer)
UNSUPPORTED(ncclPutSignal)
UNSUPPORTED(ncclSignal)
UNSUPPORTED(ncclWaitSignal)
