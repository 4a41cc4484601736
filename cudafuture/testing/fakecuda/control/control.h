// Controls of fakecuda, which is in the runtime's library. Python calls them through ctypes
// (cudafuture/testing/fakecuda/_library.py); those below are for the library of operators/.
#pragma once

#include "fakecuda/devices/registry.h"

extern "C" {

// Ends all work of the devices, before the process destroys what kernels use.
void fakecuda_stop();

// Returns the cudaError_t that all calls return, or 0.
int fakecuda_device_error();

// operators/ calls it when torch is imported, which is soon enough to refuse wrong settings.
void fakecuda_set_operators_redirected();

// Sets the function that makes the site of each call.
void fakecuda_set_race_sites(fakecuda::Registry::MakeSite make_site);
}
