// CUDA driver API, "Virtual Memory Management": torch's expandable segments reserve addresses, and map memory there.
#pragma once

#include <cstddef>

#include "fakecuda/devices/memory.h"

extern "C" {
int cuMemGetAllocationGranularity(size_t* bytes, const void* properties, int option);
int cuMemAddressReserve(char** base, size_t size, size_t alignment, void* hint, unsigned long long flags);
int cuMemAddressFree(char* base, size_t size);
int cuMemCreate(fakecuda::Physical** handle, size_t size, const int* properties, unsigned long long flags);
int cuMemRelease(fakecuda::Physical* physical);
int cuMemMap(char* at, size_t size, size_t offset, fakecuda::Physical* physical, unsigned long long flags);
int cuMemSetAccess(void* at, size_t size, const void* access, size_t count);
int cuMemUnmap(char* at, size_t size);
}
