// Device memory and pinned host memory as torch asks for them.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

namespace sim {

void install_allocators();  // of PrivateUse1, once
c10::Allocator* device_allocator() noexcept;
at::HostAllocator* pinned_allocator() noexcept;

}  // namespace sim
