// Hooks that torch calls for an accelerator, besides its guard.
#pragma once

namespace sim {

void install_hooks();  // once

}  // namespace sim
