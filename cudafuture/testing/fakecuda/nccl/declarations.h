// The declarations of nccl.h, without CUDA's headers for narrow floating point types.
//
// nccl.h includes those but uses nothing of them. They need <nv/target>, which the wheels that torch depends on do not
// contain.
#pragma once

#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>

// torch 2.11 comes with NCCL 2.28, which has neither of these.
#if NCCL_VERSION_CODE < 22900
typedef int ncclCommMemStat_t;
#define NCCL_API_MAGIC 0xcafebeef
#endif
