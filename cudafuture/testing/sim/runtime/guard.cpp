#include "sim/runtime/guard.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "sim/runtime/arena.h"

namespace sim {
namespace {

using namespace runtime;

std::atomic<bool> installed{false};
struct sigaction handler_before;

// In a signal handler nothing may be allocated or locked.
class Line {
 public:
  Line& operator<<(const char* text) {
    for (; *text != '\0' && length_ < sizeof text_; ++text) text_[length_++] = *text;
    return *this;
  }
  Line& hex(std::uintptr_t value) {
    char digits[2 * sizeof value + 1];
    char* at = digits + sizeof digits - 1;
    *at = '\0';
    do {
      *--at = "0123456789abcdef"[value % 16];
      value /= 16;
    } while (value != 0);
    return *this << at;
  }
  void write_to(int file) const {
    if (write(file, text_, length_) < 0) return;
  }

 private:
  char text_[256];
  std::size_t length_ = 0;
};

void explain(const void* address) {
  Line line;
  line << "simulated accelerator: host code touched device memory at 0x";
  line.hex(reinterpret_cast<std::uintptr_t>(address)) << " of sim:";
  line.hex(static_cast<std::uintptr_t>(address_space::device_of(address)));
  line << " directly; copy it to the host first, with .cpu()\n";
  line.write_to(STDERR_FILENO);
}

void on_fault(int signal, siginfo_t* info, void* context) {
  if (address_space::is_shown(info->si_addr)) explain(info->si_addr);
  if ((handler_before.sa_flags & SA_SIGINFO) != 0) {
    handler_before.sa_sigaction(signal, info, context);
  } else if (handler_before.sa_handler != SIG_DFL && handler_before.sa_handler != SIG_IGN) {
    handler_before.sa_handler(signal);
  } else {
    sigaction(signal, &handler_before, nullptr);  // the instruction runs again and meets it
  }
}

}  // namespace

void install_fault_handler() noexcept {
  if (installed.exchange(true)) return;
  struct sigaction action;
  std::memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &handler_before);
}

}  // namespace sim
