// What torch asks an accelerator beside its guard.
#pragma once

namespace sim {

void install_hooks();  // once

}  // namespace sim
